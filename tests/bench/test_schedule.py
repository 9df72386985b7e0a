"""In which order and at which loads variants are measured: turns, curves, thinking, several answers, looks."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import schedule
from tests.bench.conftest import PROMPTS
from tests.bench.fake_engine import FakeEngine, Script


def test_caches_are_emptied_before_every_block(bench: Any, engine: type[FakeEngine]):
    bench("--drafter", "good", "--repeats", "3", "--concurrency", "1,2")
    assert engine.seen.flushes == ["none", "none", "good", "good"] * 3


@pytest.mark.parametrize("wanted", [1, 2, 4])
def test_concurrency_is_kept_to(bench: Any, engine: type[FakeEngine], wanted: int):
    engine.scripts["none"].delay_s = engine.scripts["good"].delay_s = 0.002
    bench("--drafter", "good", "--concurrency", str(wanted))
    assert engine.seen.most_running == wanted


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
