"""python bench/accept_len.py from the outside, on FakeEngine: what it prints, writes, refuses and survives."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import load, runner, schedule, variants
from bench.accept_len import main
from bench.journal import Journal
from drafter.report import check_report, read_report
from server.launch import resolve_drafter
from tests.bench.conftest import PROMPTS
from tests.bench.fake_engine import FakeEngine, Script

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(engine: type[FakeEngine], profile_file: Path, prompt_file: Path, tmp_path: Path, capsys: Any) -> Any:
    """Runs the command and gives (exit code, report or None, stdout, stderr)."""

    def run(*args: str) -> tuple[int, Any, str, str]:
        out = tmp_path / "out"
        shared = [
            "--profile",
            str(profile_file),
            "--prompts",
            str(prompt_file),
            "--max-tokens",
            "40",
            "--out",
            str(out),
        ]
        code = main([*shared, *args])
        printed = capsys.readouterr()
        report = read_report(out / "report.json") if (out / "report.json").exists() else None
        return code, report, printed.out, printed.err

    return run


def test_the_baseline_runs_first_and_every_drafter_on_an_engine_of_its_own(bench: Any, engine: type[FakeEngine]):
    engine.scripts["other"] = Script(steps=(1,))
    code, report, _, _ = bench("--drafter", "good", "--drafter", "other")
    assert code == 0
    assert engine.seen.starts == ["none", "good", "other"]
    assert [variant["drafter"] for variant in report["variants"]] == ["none", "good", "other"]
    assert report["provenance"]["baseline"] == "none"


@pytest.mark.parametrize("given", [["good", "none"], ["none", "good"]])
def test_a_baseline_that_is_given_is_not_run_twice(bench: Any, engine: type[FakeEngine], given: list[str]):
    bench(*(word for name in given for word in ("--drafter", name)))
    assert engine.seen.starts == ["none", "good"]


def test_another_baseline(bench: Any, engine: type[FakeEngine]):
    engine.scripts["other"] = Script(steps=(1,), changed=("red",))
    _, report, _, _ = bench("--drafter", "good", "--baseline", "other")
    assert engine.seen.starts == ["other", "good"]
    assert report["provenance"]["baseline"] == "other"
    assert report["variants"][1]["greedy_equal"] == {"equal": 3, "total": 4}
    assert "greedy_equal" not in report["variants"][0]


def test_what_every_request_asks(bench: Any, engine: type[FakeEngine]):
    bench("--drafter", "good", "--temperature", "0.5", "--seed", "100", "--repeats", "2", "--concurrency", "1")
    for name in ("none", "good"):
        bodies = [body for given, body in engine.seen.bodies if given == name]
        assert [body["messages"] for body in bodies] == [[{"role": "user", "content": p}] for p in PROMPTS] * 2
        assert [body["seed"] for body in bodies] == list(range(100, 108))
        for body in bodies:
            assert {key: body[key] for key in ("model", "temperature", "max_tokens", "stream", "stream_options")} == {
                "model": "fake",
                "temperature": 0.5,
                "max_tokens": 40,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
            assert body["return_spec_tokens_details"] is body["return_output_ids_in_sglext"] is True
            assert "chat_template_kwargs" not in body


@pytest.mark.parametrize(("given", "wanted"), [("on", True), ("off", False)])
def test_thinking_is_passed_to_the_template(bench: Any, engine: type[FakeEngine], given: str, wanted: bool):
    _, report, _, _ = bench("--drafter", "good", "--thinking", given)
    assert {json.dumps(body["chat_template_kwargs"]) for _, body in engine.seen.bodies} == {
        json.dumps({"thinking": wanted, "enable_thinking": wanted})
    }
    assert report["variants"][0]["thinking"] == given


def test_caches_are_emptied_before_every_block(bench: Any, engine: type[FakeEngine]):
    bench("--drafter", "good", "--repeats", "3", "--concurrency", "1,2")
    assert engine.seen.flushes == ["none", "none", "good", "good"] * 3


@pytest.mark.parametrize("wanted", [1, 2, 4])
def test_concurrency_is_kept_to(bench: Any, engine: type[FakeEngine], wanted: int):
    engine.scripts["none"].delay_s = engine.scripts["good"].delay_s = 0.002
    bench("--drafter", "good", "--concurrency", str(wanted))
    assert engine.seen.most_running == wanted


def test_acceptance_is_exactly_what_the_steps_say(bench: Any, engine: type[FakeEngine]):
    # 39 tokens after the first, in steps of 4, 3 and 1: four rounds of 8, then 4 and 3.
    _, report, _, _ = bench("--drafter", "good", "--repeats", "2")
    plain, good = report["variants"]
    steps = [3, 2, 0] * 4 + [3, 2]
    assert [request["histogram"] for request in good["requests"]] == [[4, 0, 5, 5]] * 8
    assert good["acceptance_length"] == pytest.approx(1 + sum(steps) / len(steps))
    assert good["full_acc"] == pytest.approx([10 / 14, 10 / 14, 5 / 14])
    assert good["cond_acc"] == pytest.approx([10 / 14, 1.0, 0.5])
    assert good["flatness"] == pytest.approx(1.4)
    assert {request["tokens"] for request in good["requests"] + plain["requests"]} == {40}
    assert "acceptance_length" not in plain and "full_acc" not in plain and "flatness" not in plain
    assert all(request["histogram"] == [] for request in plain["requests"])


def test_a_step_that_max_tokens_cut_counts_whole(bench: Any, engine: type[FakeEngine]):
    engine.scripts["good"] = Script(steps=(3,))
    code, report, _, _ = bench("--drafter", "good", "--max-tokens", "3")
    assert code == 0
    assert [request["histogram"] for request in report["variants"][1]["requests"]] == [[0, 0, 0, 1]] * 4
    assert report["variants"][1]["acceptance_length"] == 4.0


def test_an_answer_of_one_token_has_no_step(bench: Any, engine: type[FakeEngine]):
    code, report, _, _ = bench("--drafter", "good", "--max-tokens", "1")
    assert code == 0
    good = report["variants"][1]
    assert "acceptance_length" not in good and "tpot_ms_p50" not in good and "itl_ms_p99" not in good
    assert good["ttft_ms_p50"] > 0


def test_positions_that_are_never_accepted_are_zero(bench: Any, engine: type[FakeEngine]):
    engine.scripts["good"] = Script(steps=(1, 0))
    _, report, _, _ = bench("--drafter", "good", "--num-steps", "4")
    good = report["variants"][1]
    assert good["steps"] == 4
    assert good["full_acc"][1:] == [0.0, 0.0, 0.0]
    assert good["cond_acc"][1:] == [0.0, None, None]


def test_ngram_offers_what_a_step_verifies_less_one(bench: Any, engine: type[FakeEngine]):
    engine.scripts["ngram"] = Script(steps=(1, 0), algorithm="NGRAM")
    _, report, _, _ = bench("--drafter", "ngram", "--num-steps", "5")
    variant = report["variants"][1]
    assert len(variant["full_acc"]) == 5 and variant["draft_tokens"] == 6
    assert "steps" not in variant and "drafter_sha256" not in variant


def test_categories_and_loops(bench: Any, engine: type[FakeEngine]):
    engine.scripts["good"] = Script(steps=(3, 2, 0), looping=("green", "grey"))
    _, report, _, _ = bench("--drafter", "good")
    good = report["variants"][1]
    assert good["loop_share"] == 0.5
    assert {name: (table["answers"], table["loop_share"]) for name, table in good["categories"].items()} == {
        "warm": (1, 0.0),
        "cold": (2, 0.5),
        "grey": (1, 1.0),
    }
    assert "acceptance_length_no_loops" not in good["categories"]["grey"]
    assert good["categories"]["grey"]["acceptance_length"] == pytest.approx(good["acceptance_length"])
    assert [request["looping"] for request in good["requests"]] == [False, True, False, True]


def test_greedy_answers_are_compared_token_for_token(bench: Any, engine: type[FakeEngine]):
    engine.scripts["good"].changed = ("blue",)
    code, report, out, _ = bench("--drafter", "good", "--repeats", "2")
    plain, good = report["variants"]
    assert code == 0  # told, not failed
    assert (good["greedy_equal"]["equal"], good["greedy_equal"]["total"]) == (6, 8)
    assert "6 of 8" in out
    same = [a["output_sha256"] == b["output_sha256"] for a, b in zip(plain["requests"], good["requests"], strict=True)]
    assert same == [True, True, False, True] * 2


def test_sampled_answers_are_not_compared(bench: Any):
    _, report, _, _ = bench("--drafter", "good", "--temperature", "0.7")
    assert "greedy_equal" not in report["variants"][1]


def test_the_limit_and_two_sets(bench: Any, engine: type[FakeEngine], prompt_file: Path):
    _, report, _, _ = bench("--drafter", "good", "--limit", "2", "--prompts", f"{prompt_file},humaneval")
    ids = [request["prompt_id"] for request in report["variants"][0]["requests"]]
    assert ids == ["red", "green", "humaneval/0", "humaneval/1"]


def test_what_the_report_says_of_its_origin(bench: Any, profile_file: Path):
    _, report, _, _ = bench("--drafter", "good")
    where = report["provenance"]
    assert where["engine_version"] == "9.9.9" and where["engine_env"] == "ours"
    assert where["flags"] == ["--model", "m"]
    assert where["target"] == {"path": "/nowhere", "served_name": "fake", "trust_remote_code": False}
    assert report["simulated"] is False
    good = report["variants"][1]
    assert good["drafter_sha256"] == "5" * 64
    assert (good["steps"], good["topk"], good["draft_tokens"], good["concurrency"]) == (3, 1, 4, 4)
    assert good["flags"][-2:] == ["--for", "good"]
    text = json.dumps(report)
    assert FakeEngine.api_key not in text and FakeEngine.admin_key not in text


def test_a_simulated_engine_is_said_so(bench: Any, engine: type[FakeEngine]):
    engine.scripts["good"].simulated = True
    _, report, out, _ = bench("--drafter", "good")
    assert report["simulated"] is True
    assert "SIMULATED" in out


FAULTS = {
    "dies": r"prompt green: the connection failed \(.*\); the engine is dead\. Its last log lines:\n(.*\n)*  Segment",
    "cut off": r"prompt green: the stream ended before the answer did",
    "no done": r"prompt green: the stream ended before the answer did",
    "breaks off": r"prompt green: the engine broke the stream off: Out of KV cache\.",
    "aborts": r"prompt green: the engine aborted the request",
    "400": r"prompt green: answered 400: The input is longer than the context length\.",
    "not json": r"prompt green: the stream has an event that is not JSON",
    "miscounts": r"prompt green: the engine says spec_verify_ct 1000 but its histogram \[4, 0, 5, 5\] gives 14",
    "counts what never came": r"prompt green: the histogram .* accounts for \d+ tokens more than the 40 that came",
    "no details": r"prompt green: the engine speculates but sent no speculation details with 40 tokens",
    "no ids": r"prompt green: the stream carried no output ids",
    "fewer ids": r"prompt green: usage counts 40 completion tokens but the engine sent 39 ids",
    "no usage": r"prompt green: the stream carried no usage",
    "does not flush": r"/flush_cache answered 400: Flush cache failed\.",
    "fails to warm up": r"prompt warm-up/0: answered 400",
    "does not start": r"the engine died \(exit code 3\) while loading",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_variant_that_fails_is_reported_while_the_others_finish(bench: Any, engine: type[FakeEngine], fault: str):
    engine.scripts["bad"] = Script(steps=(3, 2, 0), fault=fault, fault_at=1)
    code, report, out, err = bench("--drafter", "bad", "--drafter", "good", "--concurrency", "1")
    assert code == 1
    assert [variant["status"] for variant in report["variants"]] == ["ok", "failed", "ok"]
    failed = report["variants"][1]
    assert set(failed) == {"status", "drafter", "error"}
    assert re.search(FAULTS[fault], failed["error"]), failed["error"]
    assert "Failed: bad" in out and "bad: failed" in err
    assert report["variants"][2]["greedy_equal"] == {"equal": 4, "total": 4, "near_ties": 0, "differences": []}
    assert "Traceback" not in err


def test_log_lines_of_a_dead_engine_are_the_last_twenty(bench: Any, engine: type[FakeEngine]):
    engine.scripts["bad"] = Script(steps=(1,), fault="dies")
    _, report, _, _ = bench("--drafter", "bad")
    lines = report["variants"][1]["error"].splitlines()[1:]
    assert lines == [f"  line {count}" for count in range(11, 30)] + ["  Segmentation fault"]


def test_an_engine_that_goes_silent_is_given_up(bench: Any, engine: type[FakeEngine], monkeypatch: Any):
    monkeypatch.setattr(load, "IDLE_TIMEOUT_S", 0.3)
    engine.scripts["bad"] = Script(steps=(1,), fault="goes silent")
    began = time.monotonic()
    code, report, _, _ = bench("--drafter", "bad")
    assert code == 1 and time.monotonic() - began < 15
    assert "prompt red: nothing came from the engine for" in report["variants"][1]["error"]


def test_a_plain_engine_that_speculates_is_a_fault(bench: Any, engine: type[FakeEngine]):
    engine.scripts["none"].fault = "speculates all the same"
    code, report, _, _ = bench("--drafter", "good")
    assert code == 1
    assert "should not speculate" in report["variants"][0]["error"]
    # without a baseline there is nothing to compare with
    assert report["variants"][1]["status"] == "ok" and "greedy_equal" not in report["variants"][1]


def test_a_report_in_which_everything_failed_is_still_written(bench: Any, engine: type[FakeEngine]):
    for script in engine.scripts.values():
        script.fault = "does not start"
    code, report, out, _ = bench("--drafter", "good")
    assert code == 1
    assert [variant["status"] for variant in report["variants"]] == ["failed", "failed"]
    assert "no engine came up" in out and "out of memory" in out


def test_json_is_the_report_and_nothing_else(bench: Any):
    code, report, out, err = bench("--drafter", "good", "--json")
    assert code == 0
    assert json.loads(out) == report
    assert "good: done" in err


def test_json_of_a_failed_variant(bench: Any, engine: type[FakeEngine]):
    engine.scripts["good"].fault = "dies"
    code, report, out, _ = bench("--drafter", "good", "--json")
    assert code == 1
    assert json.loads(out) == report


def test_report_md_is_what_is_printed_into_a_pipe(bench: Any, tmp_path: Path):
    _, _, out, _ = bench("--drafter", "good")
    assert (tmp_path / "out" / "report.md").read_text() == out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "report.html",
        "report.json",
        "report.md",
        "report.prom",
    ]


def test_without_out_the_report_goes_to_a_new_folder_under_home(
    engine: type[FakeEngine], profile_file: Path, prompt_file: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
):
    monkeypatch.setenv("EYAS_HOME", str(tmp_path / "home"))
    for _ in range(2):
        args = ["--profile", str(profile_file), "--prompts", str(prompt_file), "--max-tokens", "4"]
        assert main([*args, "--drafter", "good"]) == 0
    folders = sorted((tmp_path / "home" / "runs").iterdir())
    assert len(folders) == 2
    for folder in folders:
        check_report(read_report(folder / "report.json"))
        assert f"report in {folder}" in capsys.readouterr().err or folder == folders[1]


def unfinished(bench: Any, engine: type[FakeEngine], tmp_path: Path, *args: str) -> None:
    """A run whose last engine never came up: its journal is kept, as a killed run leaves it."""

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    engine.scripts["late"] = Script(steps=(1,))
    original, FakeEngine.start = FakeEngine.start, die  # type: ignore[method-assign, assignment]
    try:
        FakeEngine.start = (  # type: ignore[method-assign]
            lambda self, progress: die() if self.given == "late" else original(self, progress)
        )
        code, _, _, _ = bench("--drafter", "good", "--drafter", "late", *args)
    finally:
        FakeEngine.start = original  # type: ignore[method-assign]
    engine.seen.stops.remove("late")
    assert code == 130 and (tmp_path / "out" / "blocks.jsonl").exists()


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["--seed", "3"], "sampling"),
        (["--max-tokens", "30"], "sampling"),
        (["--concurrency", "2"], "concurrency and thinking"),
        (["--repeats", "2"], "repeats"),
        (["--num-steps", "2"], "drafters"),
        (["--limit", "3", "--concurrency", "3"], "concurrency and thinking, prompts"),
    ],
)
def test_another_run_does_not_go_on_with_it(
    bench: Any, engine: type[FakeEngine], tmp_path: Path, args: list[str], what: str
):
    unfinished(bench, engine, tmp_path)
    before = list(engine.seen.starts)
    code, report, _, err = bench("--drafter", "good", "--drafter", "late", *args)
    assert code == 2 and report is None and engine.seen.starts == before
    assert f"is of an unfinished run that differs in {what}: give the same command" in err and err.count("\n") == 1


def test_a_journal_that_is_none(bench: Any, engine: type[FakeEngine], tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "blocks.jsonl").write_text("[]\n")
    code, _, _, err = bench("--drafter", "good")
    assert code == 2 and "is not the journal of a run" in err and engine.seen.starts == []


def test_an_engine_that_came_back_as_another_fails_its_variant(bench: Any, engine: type[FakeEngine]):
    engine.scripts["good"].versions = ("9.9.9", "9.9.10")
    code, report, _, _ = bench("--drafter", "good", "--repeats", "2")
    assert code == 1
    assert [variant["status"] for variant in report["variants"]] == ["ok", "failed"]
    assert "engine_version '9.9.10', the one before had '9.9.9'" in report["variants"][1]["error"]


def test_variants_take_turns(bench: Any, engine: type[FakeEngine]):
    _, report, _, _ = bench("--drafter", "good", "--repeats", "3")
    assert engine.seen.starts == ["none", "good"] * 3 == report["provenance"]["order"]
    assert [block["repeat"] for block in report["variants"][1]["blocks"]] == [0, 1, 2]


def test_without_turns_each_starts_once(bench: Any, engine: type[FakeEngine]):
    bench("--drafter", "good", "--repeats", "3", "--interleave", "off")
    assert engine.seen.starts == ["none", "good"]


def test_a_slow_start_makes_fewer_turns(bench: Any, engine: type[FakeEngine], monkeypatch: Any):
    monkeypatch.setattr(schedule, "SLOW_START_S", 0.2)
    engine.scripts["none"].start_s = 0.3
    _, report, _, _ = bench("--drafter", "good", "--repeats", "4")
    assert engine.seen.starts == ["none", "good", "none"], "A B B A: the middle engine stays up"
    assert [len(variant["requests"]) for variant in report["variants"]] == [16, 16]


def test_a_curve_over_concurrency(bench: Any, engine: type[FakeEngine]):
    engine.scripts["good"].delay_s = engine.scripts["none"].delay_s = 0.001
    code, report, _, err = bench("--drafter", "good", "--concurrency", "1,2,4")
    assert code == 0 and engine.seen.starts == ["none", "good"]
    assert [(each["drafter"], each["concurrency"]) for each in report["variants"]] == [
        (name, count) for name in ("none", "good") for count in (1, 2, 4)
    ]
    for plain, good in zip(report["variants"][:3], report["variants"][3:], strict=True):
        assert good["speedup"] == pytest.approx(good["tokens_per_second"] / plain["tokens_per_second"])
        low, high = good["speedup_ci95"]
        assert low <= good["speedup"] <= high
        assert good["step_cost"] == pytest.approx(good["verify_step_ms"] / plain["decode_step_ms"])
        assert "verify_step_ms" not in plain and "decode_step_ms" not in good and "step_cost" not in plain
        assert f"good at concurrency {good['concurrency']}: acceptance length {good['acceptance_length']:.3f}" in err
        # 40 tokens in 15 pieces against 40 pieces, each after the same wait
        assert good["loses"] is False and "it pays" in err


def test_a_drafter_that_loses_is_said_to(bench: Any, engine: type[FakeEngine]):
    engine.scripts["good"] = Script(steps=(1,), delay_s=0.02)
    engine.scripts["none"].delay_s = 0.002
    _, report, _, err = bench("--drafter", "good")
    assert report["variants"][1]["loses"] is True
    assert "tokens/s against" in err and "it loses" in err


def test_thinking_on_and_off_are_two_loads(bench: Any, engine: type[FakeEngine]):
    _, report, _, _ = bench("--drafter", "good", "--thinking", "on,off")
    assert [(each["drafter"], each["thinking"]) for each in report["variants"]] == [
        ("none", "on"), ("none", "off"), ("good", "on"), ("good", "off"),
    ]  # fmt: skip
    asked = [body["chat_template_kwargs"]["thinking"] for given, body in engine.seen.bodies if given == "good"]
    assert asked == [True] * 4 + [False] * 4


def test_several_answers_are_counted_together(bench: Any, engine: type[FakeEngine]):
    code, report, _, _ = bench("--drafter", "good", "--answers", "2", "--concurrency", "2")
    plain, good = report["variants"]
    assert code == 0 and {body["n"] for _, body in engine.seen.bodies} == {2}
    assert [(r["prompt_id"], r["answer"]) for r in good["requests"]] == [(p, n) for p in PROMPTS for n in (0, 1)]
    assert {request["tokens"] for request in good["requests"]} == {40} and good["tokens"] == 320
    assert [request["histogram"] for request in good["requests"]] == [[4, 0, 5, 5]] * 8
    assert good["greedy_equal"]["equal"] == 8 and plain["answers_each"] == 2


def test_acceptance_by_place(bench: Any, engine: type[FakeEngine]):
    # Tokens 1 to 39 in steps of 4, 3 and 1 by turns: where each step stands is counted here by hand.
    _, report, _, _ = bench("--drafter", "good")
    good = report["variants"][1]
    steps, place, expected = [3, 2, 0] * 4 + [3, 2], 1, {}
    for accepted in steps:
        for name, at in (("by_answer_position", place), ("by_context_length", 5 + place)):
            bucket = next(edge for edge in (16, 32, 64) if at < edge)
            expected.setdefault((name, bucket), []).append(accepted)
        place += accepted + 1
    assert good["placed_share"] == 1.0
    for name in ("by_answer_position", "by_context_length"):
        assert [(each["from"], each["to"]) for each in good[name]] == [(0, 16), (16, 32), (32, 64)]
        for each in good[name]:
            mine = expected[name, each["to"]]
            assert each["steps"] == 4 * len(mine)
            assert each["acceptance_length"] == pytest.approx(1 + sum(mine) / len(mine))
    assert {request["accepted"] for request in good["requests"]} == {"320" * 4 + "32"}
    assert "by_answer_position" not in report["variants"][0]


def test_steps_that_came_together_are_not_placed(bench: Any, engine: type[FakeEngine]):
    engine.scripts["good"].together = True
    _, report, _, _ = bench("--drafter", "good")
    good = report["variants"][1]
    assert good["placed_share"] == 0.0 and "by_answer_position" not in good
    assert good["acceptance_length"] == pytest.approx(1 + 25 / 14), "the engine's histogram counts all the same"


def test_where_answers_differ_the_plain_engine_is_asked_how_near_it_was(bench: Any, engine: type[FakeEngine]):
    engine.scripts["good"].changed = ("blue",)
    _, report, _, _ = bench("--drafter", "good", "--repeats", "2")
    found = report["variants"][1]["greedy_equal"]
    assert engine.seen.starts[-1] == "none" and {given for given, _ in engine.seen.questions} == {"none"}
    (question,) = [body for _, body in engine.seen.questions]  # the same in both repeats
    fake = FakeEngine.__new__(FakeEngine)
    fake.script = engine.scripts["good"]
    mine = fake.answer_to("blue", 40).ids
    fake.script = Script(algorithm="NONE")
    theirs = fake.answer_to("blue", 40).ids
    assert question["input_ids"] == list(b"blue") and question["token_ids_logprob"] == [theirs[0], mine[0]]
    row = {"prompt_id": "blue", "position": 0, "gap": pytest.approx(0.4), "near_tie": False}
    assert found == {
        "equal": 6, "total": 8, "near_ties": 0, "differences": [{**row, "repeat": 0}, {**row, "repeat": 1}],
    }  # fmt: skip


@pytest.mark.parametrize(("gap", "near"), [(0.0004, True), (-0.0004, True), (0.4, False), (None, None)])
def test_what_a_near_tie_is(bench: Any, engine: type[FakeEngine], gap: float | None, near: bool | None):
    engine.scripts["good"].changed = ("blue",)
    engine.scripts["none"].gap = gap
    _, report, _, _ = bench("--drafter", "good")
    (row,) = report["variants"][1]["greedy_equal"]["differences"]
    assert row.get("near_tie") is near and report["variants"][1]["greedy_equal"]["near_ties"] == (near is True)


@pytest.mark.parametrize(("samples", "differs"), [((1, 2, 3), False), ((1, 1, 2, 3), True)])
def test_the_sampling_check(bench: Any, engine: type[FakeEngine], samples: tuple[int, ...], differs: bool):
    engine.scripts["good"].samples = samples
    _, report, _, _ = bench("--drafter", "good", "--temperature", "1", "--check-sampling", "600")
    found = report["variants"][1]["sampling"]
    assert found["differs"] is differs and (found["p_value"] < found["error_rate"]) is differs
    assert (found["prompts"], found["samples"]) == (4, 2400) and found["reference_samples"] == 3 * 2400
    assert "sampling" not in report["variants"][0]


def test_what_never_varies_is_not_called_checked(bench: Any, engine: type[FakeEngine]):
    for script in engine.scripts.values():
        script.samples = (1,)
    code, report, _, _ = bench("--drafter", "good", "--temperature", "1", "--check-sampling", "100")
    assert code == 0 and "sampling" not in report["variants"][1]


@pytest.fixture
def running(engine: type[FakeEngine]) -> Iterator[Any]:
    """Starts engines that are nobody's of the bench."""
    made: list[FakeEngine] = []

    def start(name: str) -> FakeEngine:
        found = FakeEngine(None, name)
        found.start(lambda stage: None)
        made.append(found)
        return found

    yield start
    for each in made:
        each.stop()


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "engine.yaml"
    path.write_text(json.dumps({"api-key": FakeEngine.api_key, "admin-api-key": FakeEngine.admin_key}))
    return path


def test_engines_that_already_run(bench: Any, engine: type[FakeEngine], running: Any, key_file: Path):
    urls = [f"{name}={running(name).url}" for name in ("good", "none")]
    args = [word for url in urls for word in ("--url", url)]
    code, report, _, _ = bench(*args, "--key-file", str(key_file))
    assert code == 0 and engine.seen.starts == ["good", "none"] and engine.seen.stops == []
    assert [variant["drafter"] for variant in report["variants"]] == ["none", "good"]
    where, good = report["provenance"], report["variants"][1]
    assert where["engine_env"] == "unknown" and "profile_sha256" not in where
    assert where["target"] == {"served_name": "fake", "path": "/elsewhere"}
    assert good["acceptance_length"] == pytest.approx(1 + 25 / 14) and good["flushed"] is True
    assert good["greedy_equal"]["equal"] == 4 and good["steps"] == 3
    text = json.dumps(report)
    assert FakeEngine.api_key not in text and FakeEngine.admin_key not in text


def test_a_running_engine_whose_caches_stay_is_said_so(
    bench: Any, engine: type[FakeEngine], running: Any, tmp_path: Path
):
    (tmp_path / "keys").write_text(json.dumps({"api-key": FakeEngine.api_key}))
    code, report, _, err = bench("--url", running("good").url, "--key-file", str(tmp_path / "keys"))
    assert code == 0 and report["variants"][0]["flushed"] is False and "its caches were not emptied" in err


def test_a_running_engine_beside_one_of_ours(bench: Any, engine: type[FakeEngine], running: Any, key_file: Path):
    url = running("good").url
    code, report, _, _ = bench("--drafter", "none", "--url", f"theirs={url}", "--key-file", str(key_file))
    assert code == 0 and engine.seen.stops == ["none"]
    assert [variant["drafter"] for variant in report["variants"]] == ["none", "theirs"]
    assert report["provenance"]["engine_env"] == "unknown"


@pytest.mark.parametrize(
    ("keys", "reason"), [(False, "wants its key (401): name its key file"), (True, "does not answer")]
)
def test_a_running_engine_that_cannot_be_asked(
    bench: Any, engine: type[FakeEngine], running: Any, key_file: Path, keys: bool, reason: str
):
    url = running("good").url if not keys else "http://127.0.0.1:9"
    code, report, _, _ = bench("--url", url, *(["--key-file", str(key_file)] if keys else []))
    assert code == 1 and reason in report["variants"][0]["error"]


def test_ngram_with_parameters_is_a_variant(bench: Any, engine: type[FakeEngine], tmp_path: Path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("eagles")
    given = [f"ngram:draft_tokens={count},external_corpus_path={corpus}" for count in (4, 8)]
    tables = []

    class Engine(FakeEngine):
        def __init__(self, profile: Any, drafter: str = "none", **options: Any) -> None:
            super().__init__(profile, drafter, **options)
            if drafter != "none":
                tables.append(profile.drafters[drafter].ngram)
                self.drafter = resolve_drafter(profile, drafter)

    for name in given:
        engine.scripts[name] = Script(steps=(1, 0), algorithm="NGRAM")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variants, "Engine", Engine)
        code, report, _, _ = bench(*(word for name in given for word in ("--drafter", name)))
    assert code == 0 and [variant["drafter"] for variant in report["variants"]] == ["none", *given]
    assert [table.draft_tokens for table in tables] == [4, 8]
    found = report["variants"][1]["ngram"]
    assert found["external_corpus_path"] == str(corpus) and found["draft_tokens"] == 4
    assert found["external_corpus_sha256"] == hashlib.sha256(b"eagles").hexdigest()
    assert [len(variant["full_acc"]) for variant in report["variants"][1:]] == [3, 7]


def many(tmp_path: Path, count: int) -> list[str]:
    path = tmp_path / "many.jsonl"
    lines = ({"prompt": f"p{n}", "id": f"p{n}", "category": "ab"[n % 2]} for n in range(count))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ["--prompts", str(path)]


def test_looks_stop_when_the_difference_is_clear(bench: Any, engine: type[FakeEngine], tmp_path: Path):
    engine.scripts["poor"] = Script(steps=(1, 0))
    args = ["--drafter", "good", "--drafter", "poor", "--looks", "3"]
    _, report, _, err = bench(*args, *many(tmp_path, 24))
    assert report["sequential"] == {"looks": 3, "done": 1, "level": pytest.approx(0.05 / 3), "stopped": True}
    assert [len(variant["requests"]) for variant in report["variants"]] == [8, 8, 8]
    assert [request["category"] for request in report["variants"][0]["requests"]].count("a") == 4
    assert "every difference is clear after 1 of 3 parts" in err


def test_looks_go_on_while_it_is_not(bench: Any, engine: type[FakeEngine], tmp_path: Path):
    engine.scripts["same"] = Script(steps=(3, 2, 0))
    args = ["--drafter", "good", "--drafter", "same", "--looks", "3"]
    _, report, _, _ = bench(*args, *many(tmp_path, 24))
    assert report["sequential"]["done"] == 3 and report["sequential"]["stopped"] is False
    for variant in report["variants"]:
        assert sorted(request["prompt_id"] for request in variant["requests"]) == sorted(f"p{n}" for n in range(24))
    assert engine.seen.starts == ["none", "good", "same"] * 3


def usage(capsys: Any, *args: str) -> str:
    """The one line on stderr of a command that is refused."""
    try:
        code = main(list(args))
    except SystemExit as exit_:
        code = int(str(exit_.code))
    printed = capsys.readouterr()
    assert code == 2 and printed.out == ""
    return str(printed.err)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--drafter", "nobody"], "drafter 'nobody' is neither a name"),
        (["--drafter", "good", "--baseline", "nobody"], "drafter 'nobody' is neither a name"),
        (["--drafter", "good", "--drafter", "good"], "drafter 'good' is given twice"),
        (["--drafter", "good", "--concurrency", "5"], "concurrency is 5, but the profile runs 4 requests"),
        (["--drafter", "good", "--max-tokens", "512"], "max tokens is 512, but the profile's context_length of 512"),
        (["--drafter", "good", "--prompts", "mtbench"], "did you mean 'mt_bench'"),
        (["--drafter", "good", "--profile", "nowhere.toml"], "profile nowhere.toml does not exist"),
        (["--drafter", "good", "--out", "/dev/null/x"], "the folder /dev/null/x cannot be made"),
        (["--drafter", "good", "--limit", "0"], "'0' is not 1 or more"),
        (["--drafter", "good", "--repeats", "x"], "'x' is not a whole number"),
        (["--drafter", "good", "--temperature", "-1"], "is not between 0 and 2"),
        (["--drafter", "good", "--temperature", "nan"], "is not between 0 and 2"),
        (["--drafter", "good", "--url", "x"], "--url 'x' is no address"),
        (["--drafter", "good", "--url", "a=ftp://x"], "--url 'a=ftp://x' is no address"),
        (["--drafter", "good", "--url", "http://x", "--key-file", "/nowhere"], "key file /nowhere cannot be read"),
        (["--url", "a=http://x", "--baseline", "b"], "baseline 'b' is none of the URLs (a)"),
        (["--drafter", "good", "--url", "good=http://x"], "'good' names two variants: give each URL a name"),
        (["--url", "a=http://x", "--url", "a=http://y"], "'a' names two variants: give each URL a name"),
        (["--drafter", "good", "--concurrency", "1,1"], "names one number twice"),
        (["--drafter", "good", "--concurrency", "3,4", "--limit", "3"], "concurrency is 4, but a block has 3 prompts"),
        (["--drafter", "good", "--answers", "2"], "concurrency is 4 with 2 answers each, but the profile runs 4"),
        (["--drafter", "good", "--thinking", "on,on"], "is not on, off, default"),
        (["--drafter", "good", "--looks", "2", "--concurrency", "2"], "looks compare drafters with each other"),
        (["--drafter", "good", "--check-sampling"], "greedy answers are not sampled"),
        (["--drafter", "ngram:depth=3"], "drafter 'ngram:depth=3': depth: extra inputs"),
        (["--drafter", "ngram:draft_tokens=0"], "draft_tokens: input should be greater than or equal to 1"),
        (["--drafter", "ngram:draft_tokens"], "'draft_tokens' is no key=value"),
        (["--drafter", "ngram:external_corpus_path=/nowhere"], "the corpus /nowhere is not a file"),
        ([], "nothing to measure: name a --drafter, or a --url"),
    ],
)
def test_usage_errors_start_nothing(
    engine: type[FakeEngine], profile_file: Path, prompt_file: Path, capsys: Any, args: list[str], message: str
):
    shared = ["--profile", str(profile_file), "--prompts", str(prompt_file)]
    assert message in usage(capsys, *shared, *args)
    assert engine.seen.starts == []


def test_two_folders_with_one_name_are_told_apart(bench: Any, engine: type[FakeEngine]):
    engine.scripts["a/best"] = Script(steps=(1,), name="best")
    engine.scripts["b/best"] = Script(steps=(2,), name="best")
    _, report, _, _ = bench("--drafter", "a/best", "--drafter", "b/best")
    assert [variant["drafter"] for variant in report["variants"]] == ["none", "a/best", "b/best"]


def test_one_drafter_under_two_spellings_runs_once_as_baseline(bench: Any, engine: type[FakeEngine]):
    engine.scripts["./good"] = Script(steps=(3, 2, 0), name="good")
    code, report, _, _ = bench("--drafter", "./good", "--baseline", "good")
    assert code == 0
    assert [variant["drafter"] for variant in report["variants"]] == ["good", "./good"]


HELD = """
import sys
from pathlib import Path
import bench.variants
from bench.accept_len import main
from bench.journal import Journal
from tests.bench.fake_engine import FakeEngine, Script
FakeEngine.scripts = {"none": Script(algorithm="NONE"), "slow": Script(steps=(1,), delay_s=0.1, fault=sys.argv.pop(1))}
bench.variants.Engine = FakeEngine
sys.exit(main(sys.argv[1:]))
"""


def interrupt(process: subprocess.Popen[str], at: str, signal_: int) -> tuple[str, str]:
    """Wait until the command says `at`, send the signal, and give what it printed and said after that."""
    assert process.stderr
    said = ""
    while at not in said:
        line = process.stderr.readline()
        assert line, f"it ended too early: {said}"
        said += line
    time.sleep(0.5)
    process.send_signal(signal_)
    return process.communicate(timeout=30)


@pytest.fixture
def held(profile_file: Path, prompt_file: Path, tmp_path: Path) -> Any:
    """Starts the command in a process of its own, with a slow drafter."""

    def start(fault: str, *args: str) -> subprocess.Popen[str]:
        shared = ["--profile", str(profile_file), "--prompts", str(prompt_file), "--max-tokens", "40"]
        return subprocess.Popen(
            [sys.executable, "-u", "-c", HELD, fault, *shared, *args],
            cwd=ROOT,
            env={**os.environ, "FAKE_ENGINE_STOPS": str(tmp_path / "stops")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def test_ctrl_c_before_anything_was_measured_leaves_nothing(held: Any, tmp_path: Path):
    out, stops = tmp_path / "deep" / "out", tmp_path / "stops"
    process = held("", "--drafter", "none", "--baseline", "slow", "--out", str(out))
    printed, said = interrupt(process, "slow: measuring", signal.SIGINT)
    assert process.returncode == 130
    assert printed == "" and "Traceback" not in said
    assert said.endswith("accept_len: interrupted; the engine was stopped and no report was written.\n")
    assert stops.read_text().split() == ["slow"]
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize(("fault", "at"), [("", "slow: measuring"), ("start hangs", "slow: starting the process")])
def test_ctrl_c_stops_the_engine_and_keeps_what_was_measured(held: Any, tmp_path: Path, fault: str, at: str):
    out, stops = tmp_path / "deep" / "out", tmp_path / "stops"
    process = held(fault, "--drafter", "slow", "--out", str(out))
    printed, said = interrupt(process, at, signal.SIGINT)
    assert process.returncode == 130
    assert printed == "" and "Traceback" not in said
    assert said.endswith(f"1 blocks are kept: the same command with --out {out} goes on.\n")
    assert stops.read_text().split() == ["none", "slow"]
    assert [path.name for path in out.iterdir()] == ["blocks.jsonl"]


@pytest.mark.parametrize("signal_", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_run_goes_on_where_it_stopped(
    held: Any, bench: Any, engine: type[FakeEngine], tmp_path: Path, signal_: int
):
    out = tmp_path / "out"
    process = held("", "--drafter", "slow", "--repeats", "2", "--out", str(out))
    interrupt(process, "slow: repeat 2 of 2", signal_)
    journal = (out / "blocks.jsonl").read_text()
    assert journal.count('"answers":[') == 3
    (out / "blocks.jsonl").write_text(journal + '{"variant":"slow","unit":{"re')  # as a kill amid a write leaves it
    engine.scripts["slow"] = Script(steps=(1,))
    code, report, _, err = bench("--drafter", "slow", "--repeats", "2")
    assert code == 0 and "going on with the run" in err and "3 blocks done" in err
    assert engine.seen.starts == ["slow"], "only the missing block is measured"
    assert [body["seed"] for _, body in engine.seen.bodies] == [4, 5, 6, 7]
    for variant in report["variants"]:
        assert [request["repeat"] for request in variant["requests"]] == [0] * 4 + [1] * 4
    assert report["provenance"]["resumed"] == 1
    assert report["provenance"]["order"] == ["none", "slow", "none", "slow", "slow"]
    assert report["variants"][1]["greedy_equal"]["equal"] == 8
    assert not (out / "blocks.jsonl").exists()


def test_it_runs_as_a_script_from_any_folder(tmp_path: Path):
    script = [sys.executable, str(ROOT / "bench" / "accept_len.py")]
    for command in ([*script, "--help"], [sys.executable, "-m", "bench.accept_len", "--help"]):
        folder = ROOT if "-m" in command else tmp_path
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=True)
        assert "what the numbers mean" in done.stdout
        for flag in ("--drafter", "--url", "--prompts", "--repeats", "--interleave", "--looks", "--check-sampling"):
            assert flag in done.stdout


def test_it_runs_as_a_script_without_being_installed(tmp_path: Path):
    for room in ("bench", "drafter", "server"):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, str(tmp_path / "bench" / "accept_len.py"), "--drafter", "x", "--profile", "nowhere.toml"]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == (
        "accept_len: profile nowhere.toml does not exist: see deploy/profiles/ for those that come with Eyas.\n"
    )


def test_no_file_in_bench_takes_a_standard_name():
    assert not {path.stem for path in (ROOT / "bench").glob("*.py")} & sys.stdlib_module_names


@pytest.mark.parametrize("tokens", ["1", "2", "3", "40"])
@pytest.mark.parametrize("answers", ["1", "2"])
def test_an_answer_in_one_piece_has_a_cost_that_is_not_known(
    bench: Any, engine: type[FakeEngine], tokens: str, answers: str
):
    for script in engine.scripts.values():
        script.together = True  # every other piece waits for the next
    args = ["--max-tokens", tokens, "--answers", answers, "--concurrency", "2"]
    code, report, _, _ = bench("--drafter", "good", *args)
    assert code == 0
    for entry in report["variants"]:
        for key in ("tpot_ms_p50", "decode_step_ms", "verify_step_ms", "step_cost"):
            assert entry.get(key, 1.0) > 0


def test_an_answer_without_a_token_fails_its_variant(bench: Any, engine: type[FakeEngine], monkeypatch: Any):
    original = FakeEngine.answer_to

    def nothing(self: FakeEngine, prompt: str, max_tokens: int) -> Any:
        answer = original(self, prompt, max_tokens)
        if self.given == "good" and prompt == "green":
            answer.ids, answer.pieces, answer.histogram = [], [], []
        return answer

    monkeypatch.setattr(FakeEngine, "answer_to", nothing)
    code, report, _, _ = bench("--drafter", "good")
    assert code == 1
    assert "prompt green: the engine sent an answer without a single token" in report["variants"][1]["error"]


def test_a_type_of_numbers_that_is_not_known_makes_no_near_ties(bench: Any, engine: type[FakeEngine], monkeypatch: Any):
    original = FakeEngine.start

    def start(self: FakeEngine, progress: Any) -> None:
        original(self, progress)
        self.resolved = {"dtype": "auto"}

    monkeypatch.setattr(FakeEngine, "start", start)
    engine.scripts["good"].changed = ("blue",)
    code, report, _, _ = bench("--drafter", "good")
    assert code == 0
    (difference,) = report["variants"][1]["greedy_equal"]["differences"]
    assert difference["gap"] == pytest.approx(0.4) and "near_tie" not in difference


def test_a_disk_that_fills_up_is_said_in_a_sentence(bench: Any, engine: type[FakeEngine], monkeypatch: Any):
    original = Journal.add

    def full(self: Journal, key: Any, block: Any) -> None:
        if key[0] == "good":
            raise OSError(28, "No space left on device")
        original(self, key, block)

    monkeypatch.setattr(Journal, "add", full)
    code, report, _, err = bench("--drafter", "good")
    assert code == 1 and report is None
    assert "stopped by [Errno 28] No space left on device: mend it and give the same command" in err
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--drafter", "good", "--seed", "9" * 24], "is beyond 2147483647"),
        (["--drafter", "good", "--repeats", "9" * 24], "is beyond 2147483647"),
        (["--drafter", "good", "--key-file", "keys.yaml"], "--key-file is for engines that already run"),
        (["--url", "http://[::1"], "is no address"),
        (["--url", "http://localhost:99999999"], "is no address"),
        (["--url", "http://localhost:8", "--num-steps", "2"], "keeps its draft steps"),
    ],
)
def test_what_cannot_be_meant_starts_nothing(
    bench: Any, engine: type[FakeEngine], capsys: Any, args: list[str], reason: str
):
    try:
        code, _, _, err = bench(*args)
    except SystemExit as end:  # argparse
        code, err = end.code, capsys.readouterr().err
    assert code == 2 and reason in err and engine.seen.starts == []


def test_a_run_on_engines_of_others_that_was_killed_at_the_end_knows_its_target(
    bench: Any, engine: type[FakeEngine], monkeypatch: Any, tmp_path: Path
):
    served = FakeEngine(None, "good")
    served.start(lambda what: None)
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"api-key": FakeEngine.api_key, "admin-api-key": FakeEngine.admin_key}))
    args = ["--url", f"good={served.url}", "--key-file", str(keys), "--temperature", "0.5"]

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    try:
        with monkeypatch.context() as patched:
            patched.setattr(runner, "build_report", killed)
            assert bench(*args)[0] == 130
        code, report, _, _ = bench(*args)
    finally:
        served.stop()
    assert code == 0 and report["provenance"]["resumed"] == 1
    assert report["provenance"]["target"] == {"served_name": "fake", "path": "/elsewhere"}
