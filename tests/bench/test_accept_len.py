"""python bench/accept_len.py from the outside, on FakeEngine: what it asks, counts, prints and writes."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from bench import variants
from bench.accept_len import main
from drafter.report import check_report, read_report
from server.drafters import resolve_drafter
from tests.bench.conftest import PROMPTS
from tests.bench.fake_engine import FakeEngine, Script


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


def test_json_is_the_report_and_nothing_else(bench: Any):
    code, report, out, err = bench("--drafter", "good", "--json")
    assert code == 0
    assert json.loads(out) == report
    assert "good: done" in err


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
