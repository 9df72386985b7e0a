"""bench/accept_len.py on the real engine, from the outside: figures, losslessness, a killed engine, Ctrl-C."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.load import Endpoint, Sampling, send_block
from bench.lossless import Question, ask_gaps
from drafter.data.prompts import Prompt
from drafter.report import read_report
from server.ports import port_is_free
from tests.engine.pool import EnginePool
from tests.engine.served import Served, on
from tests.tiny import TinyPair

pytestmark = pytest.mark.engine
SCRIPT = Path(__file__).parents[2] / "bench" / "accept_len.py"
ANSWERS = 8
SENTENCE = "the eagle hunts over water and sees a fish then it dives holds turns lands feeds its young in spring"


@dataclass
class Bench:
    """How to call the command on the tiny target, from a folder that is not the project's."""

    folder: Path
    command: list[str]

    def start(self, name: str, *args: str) -> tuple[subprocess.Popen[str], Path]:
        out = self.folder / name
        process = subprocess.Popen(
            [*self.command, *args, "--out", str(out)],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return process, out


@pytest.fixture(scope="module")
def llama(tiny: Callable[[str], TinyPair]) -> TinyPair:
    return tiny("llama")


@pytest.fixture(scope="module")
def bench(engines: EnginePool, llama: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    engines.stop()  # the bench starts its own, and the machine has room for one
    profile = engines.profile(llama)
    command = [sys.executable, str(SCRIPT), "--profile", str(profile.source), "--prompts", "mt_bench"]
    return Bench(tmp_path_factory.mktemp("accept-len"), [*command, "--concurrency", "8"])


@pytest.fixture(scope="module")
def measured(bench: Bench, llama: TinyPair) -> tuple[dict[str, dict[str, Any]], dict[str, Any], str]:
    """(variants by name, the whole report, what was printed) of none, NGRAM and two drafters of known quality."""
    chosen = ["ngram", *(str(llama.drafters[f"mha_{kind}"]) for kind in ("perfect", "noised_a"))]
    args = [word for name in chosen for word in ("--drafter", name)]
    process, out = bench.start("measured", *args, "--limit", str(ANSWERS), "--max-tokens", "96")
    printed, said = process.communicate(timeout=800)
    assert process.returncode == 0, said
    report = read_report(out / "report.json")
    return {variant["drafter"]: variant for variant in report["variants"]}, report, printed


def test_every_variant_is_measured_the_baseline_first(measured: Any):
    variants, report, _ = measured
    assert list(variants) == ["none", "ngram", "mha_perfect", "mha_noised_a"]
    assert {variant["status"] for variant in variants.values()} == {"ok"}
    assert report["provenance"]["engine_version"] == "0.5.23"
    assert report["simulated"] is False
    for variant in variants.values():
        assert variant["dtype"] == "float32"
        assert [request["prompt_id"] for request in variant["requests"]] == [
            f"mt_bench/{number}" for number in range(81, 161, 10)
        ]


def test_speculation_changes_no_greedy_token_in_fp32(measured: Any):
    variants, _, _ = measured
    outputs = [request["output_sha256"] for request in variants["none"]["requests"]]
    for variant in (variant for name, variant in variants.items() if name != "none"):
        assert variant["greedy_equal"] == {"equal": ANSWERS, "total": ANSWERS, "near_ties": 0, "differences": []}
        assert [request["output_sha256"] for request in variant["requests"]] == outputs


def test_better_drafters_earn_more(measured: Any):
    variants, _, _ = measured
    lengths = {name: variant.get("acceptance_length") for name, variant in variants.items()}
    assert lengths["none"] is None
    assert 1.0 < lengths["mha_noised_a"] < lengths["mha_perfect"] <= 4.0
    assert lengths["mha_perfect"] > 3.0


def test_every_two_drafters_are_compared(measured: Any):
    variants, report, _ = measured
    speculating = [name for name in variants if name != "none"]
    assert {(each["a"], each["b"]) for each in report["comparisons"]} == set(combinations(speculating, 2))
    for each in report["comparisons"]:
        a, b = (variants[each[side]] for side in "ab")
        assert each["delta_acceptance_length"] == pytest.approx(b["acceptance_length"] - a["acceptance_length"])
        assert each["ci95"][0] <= each["delta_acceptance_length"] <= each["ci95"][1]
        assert each["speedup"] == pytest.approx(b["tokens_per_second"] / a["tokens_per_second"])
    for name in speculating:
        low, high = variants[name]["acceptance_length_ci95"]
        assert low <= variants[name]["acceptance_length"] <= high


def test_figures_follow_from_the_requests(measured: Any):
    variants, _, _ = measured
    for name, variant in variants.items():
        requests = variant["requests"]
        tokens = sum(request["tokens"] for request in requests)
        assert variant["tokens_per_second"] == pytest.approx(tokens / variant["blocks"][0]["seconds"])
        assert all(0 < request["ttft_s"] < request["seconds"] for request in requests)
        if name == "none":
            assert all(request["histogram"] == [] for request in requests)
            continue
        steps = [i for request in requests for i, count in enumerate(request["histogram"]) for _ in range(count)]
        assert variant["acceptance_length"] == pytest.approx(1 + sum(steps) / len(steps))
        offered = 7 if name == "ngram" else 3
        assert variant["draft_tokens"] == offered + 1
        assert variant["full_acc"] == pytest.approx(
            [sum(accepted > k for accepted in steps) / len(steps) for k in range(offered)]
        )
        for request in requests:
            given = 1 + sum((i + 1) * count for i, count in enumerate(request["histogram"]))
            assert 0 <= given - request["tokens"] < len(request["histogram"])


def test_steps_are_placed_and_timed(measured: Any):
    variants, _, _ = measured
    plain = variants["none"]
    for name, variant in variants.items():
        if name == "none":
            continue
        for request in variant["requests"]:
            if "accepted" in request:
                counted = [request["accepted"].count(str(accepted)) for accepted in range(len(request["histogram"]))]
                assert counted == request["histogram"]
                assert sum(map(int, request["accepted"])) + len(request["accepted"]) + 1 >= request["tokens"]
        # How many are placed depends on the machine: a busy engine hands on the tokens of several steps at once.
        placed = sum(len(request.get("accepted", "")) for request in variant["requests"])
        steps = sum(sum(request["histogram"]) for request in variant["requests"])
        assert variant["placed_share"] == pytest.approx(placed / steps)
        for key in ("by_answer_position", "by_context_length"):
            assert sum(bucket["steps"] for bucket in variant.get(key, [])) == placed
        assert variant["step_cost"] == pytest.approx(variant["verify_step_ms"] / plain["decode_step_ms"])
        low, high = variant["speedup_ci95"]
        assert low <= variant["speedup"] <= high


def test_several_answers_loads_and_the_sampling_check(bench: Bench, llama: TinyPair):
    """At temperature 1, with two answers to each request, at two concurrencies: counted together, sampled alike."""
    args = ["--drafter", str(llama.drafters["mha_noised_a"]), "--temperature", "1", "--answers", "2", "--limit", "8"]
    process, out = bench.start(
        "sampled", *args, "--concurrency", "2,4", "--max-tokens", "24", "--check-sampling", "400"
    )
    _, said = process.communicate(timeout=600)
    assert process.returncode == 0, said
    variants = read_report(out / "report.json")["variants"]
    assert [(each["drafter"], each["concurrency"]) for each in variants] == [
        ("none", 2), ("none", 4), ("mha_noised_a", 2), ("mha_noised_a", 4),
    ]  # fmt: skip
    for variant in variants:
        assert len(variant["requests"]) == 16 and "greedy_equal" not in variant
        first, second = ([r["output_sha256"] for r in variant["requests"] if r["answer"] == n] for n in (0, 1))
        assert first != second, "two answers to one request are drawn each for itself"
    for variant in variants[2:]:
        assert variant["acceptance_length"] > 1.2
        assert variant["sampling"]["differs"] is False and variant["sampling"]["prompts"] >= 1


@on("llama")
def test_how_near_a_tie_was(served: Served):
    """The plain engine's own greedy token is likelier than any other after the same tokens, and the gap has a sign."""
    engine = served.engine
    endpoint = Endpoint(engine.url, engine.served_name, False, engine.headers, engine.admin_headers)
    prompt = Prompt("p", "c", ({"role": "user", "content": SENTENCE},))
    block = send_block(endpoint, [prompt], Sampling(12), 1, [0], lambda answer: None)
    ids = block.answers[0].output_ids
    others = [token for token in range(20) if token != ids[6]]
    asked = [Question("p", "default", ids[:6], (ids[6], other)) for other in others]
    swapped = [Question("p", "default", ids[:6], (other, ids[6])) for other in others[:3]]
    found = ask_gaps(endpoint, [*asked, *swapped], {"p": prompt}, Sampling(12))
    for question in asked:
        gap = found[question]
        assert gap is not None and gap > 0
    for there, back in zip(asked, swapped, strict=False):
        assert found[there] == pytest.approx(-(found[back] or 0.0), abs=1e-5)


def test_the_table_is_printed_and_kept(measured: Any, bench: Bench):
    variants, _, printed = measured
    assert (bench.folder / "measured" / "report.md").read_text() == printed
    for name, variant in variants.items():
        cells = next(line for line in printed.splitlines() if line.startswith(f"| {name} ")).split(" | ")
        assert cells[2].split()[0] == (f"{variant['acceptance_length']:.3f}" if name != "none" else "-")


def test_no_engine_is_left(measured: Any):
    variants, _, _ = measured
    for variant in variants.values():
        flags = variant["flags"]
        assert port_is_free("127.0.0.1", int(flags[flags.index("--port") + 1]))


@contextlib.contextmanager
def running(bench: Bench, name: str, until: str, *args: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """The command from the moment at which it says `until`; killed at the end where it still runs."""
    process, out = bench.start(name, *args)
    try:
        assert process.stderr
        said = ""
        while until not in said:
            line = process.stderr.readline()
            assert line, f"it ended too early: {said}"
            said += line
        yield process, out
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_an_engine_that_is_killed_is_a_failed_variant_and_the_next_one_runs(bench: Bench):
    prompts = bench.folder / "many.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Count to {number}."}) + "\n" for number in range(60)))
    args = ["--drafter", "none", "--drafter", "ngram", "--prompts", str(prompts), "--concurrency", "1"]
    with running(bench, "killed", "none: measuring", *args) as (process, out):
        children = psutil.Process(process.pid).children(recursive=True)
        time.sleep(1.0)  # into the first requests
        (scheduler,) = [child for child in children if child.name().startswith("sglang::sched")]
        scheduler.kill()
        printed, said = process.communicate(timeout=600)
    assert process.returncode == 1
    assert "none: failed, " in said and "Traceback" not in said
    dead, alive = read_report(out / "report.json")["variants"]
    assert dead["status"] == "failed" and "the engine is dead. Its last log lines:" in dead["error"]
    assert alive["status"] == "ok" and len(alive["requests"]) == 60
    assert "greedy_equal" not in alive
    assert "## Failed: none" in printed


def test_ctrl_c_leaves_no_process_and_no_file(bench: Bench):
    with running(bench, "interrupted", "none: starting the process", "--drafter", "none") as (process, out):
        children: list[psutil.Process] = []
        deadline = time.monotonic() + 60
        while len(children) < 2 and time.monotonic() < deadline:  # the guard and the engine's first process
            children = psutil.Process(process.pid).children(recursive=True)
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        printed, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert printed == "" and "Traceback" not in said
    assert said.endswith("accept_len: interrupted; the engine was stopped and no report was written.\n")
    assert not out.exists()
    assert len(children) >= 2
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
