"""Costs of a step from two answers' times, and what is refused before an engine starts. The engine here is fake."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import step_cost
from bench.step_cost import CostError, check, cycle_ms, main, measure
from server.config import load_profile
from server.engine import EngineError

PROFILE = load_profile(Path(__file__).resolve().parents[2] / "deploy" / "profiles" / "cpu-smollm2.toml")


class FakeEngine:
    """Takes 50 ms to prefill a prompt, then so many ms a cycle; a cycle gives `accepted` tokens."""

    def __init__(self, cycle: float, accepted: float = 1.0, slow_first: bool = False) -> None:
        self.cycle = cycle
        self.accepted = accepted
        self.calls = itertools.count()
        self.slow_first = slow_first
        self.seen: list[list[int]] = []

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(self, *error: object) -> None:
        return None


def fake_ask(engine: Any, prompts: Sequence[Sequence[int]], count: int) -> tuple[float, list[int]]:
    engine.seen += [list(prompt) for prompt in prompts]
    cycles = round((count - 1) / engine.accepted)
    warming = 100.0 if engine.slow_first and next(engine.calls) < 2 else 0.0
    return (50.0 * len(prompts) + cycles * engine.cycle * len(prompts)) / 1e3 + warming, [cycles] * len(prompts)


def test_prefill_and_the_warm_up_drop_out():
    assert cycle_ms(FakeEngine(12.5, slow_first=True), 4, 40, 3, fake_ask) == pytest.approx(4 * 12.5)  # type: ignore[arg-type]


def test_no_prompt_is_sent_twice():
    engine = FakeEngine(1.0)
    cycle_ms(engine, 8, 16, 3, fake_ask)  # type: ignore[arg-type]
    assert len({tuple(prompt) for prompt in engine.seen}) == len(engine.seen) == 2 * 4 * 8


def test_an_engine_that_accepts_after_all_is_refused():
    with pytest.raises(EngineError, match="does not heed SGLANG_SIMULATE_ACC_LEN"):
        cycle_ms(FakeEngine(1.0, accepted=2.0), 1, 40, 1, fake_ask)  # type: ignore[arg-type]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Fake engines: plain decoding takes 10 ms, then 11 (the machine drifts); a cycle 10 ms more a draft step."""
    made: list[dict[str, Any]] = []

    def make(profile: Any, **options: Any) -> FakeEngine:
        made.append(options)
        steps = options["num_steps"]
        return FakeEngine(10.0 + 10 * steps if steps else 10.0 + (len(made) > 1))

    real: Callable[..., float] = cycle_ms
    monkeypatch.setattr(step_cost, "Engine", make)
    monkeypatch.setattr(step_cost, "cycle_ms", lambda *words: real(*words, fake_ask))
    return made


def test_plain_decoding_is_measured_before_and_after(started: list[dict[str, Any]]):
    costs, drift = measure(PROFILE, "new", [1, 2], [1, 3], 16, 2, lambda what: None)
    assert costs.decode_ms == pytest.approx({1: 10.5, 2: 21.0})
    assert costs.step_ms == {1: pytest.approx({1: 20.0, 3: 40.0}), 2: pytest.approx({1: 40.0, 3: 80.0})}
    assert drift == pytest.approx(0.1)
    assert [each["drafter"] for each in started] == ["none", "new", "new", "none"]
    assert [each["simulate_accept_len"] for each in started] == [None, 1.0, 1.0, None]


@pytest.mark.parametrize(
    ("batches", "tokens", "drafter", "says"),
    [
        ([1, 4096], 16, "ngram", "at a time"),
        ([1], 10**6, "ngram", "lower --tokens"),
        ([1], 16, "ngram", "has no number of draft steps"),
        ([1], 16, "none", "has no number of draft steps"),
    ],
)
def test_what_cannot_be_measured(batches: list[int], tokens: int, drafter: str, says: str):
    with pytest.raises(CostError, match=says):
        check(PROFILE, drafter, batches, [1], tokens)


def test_usage_errors_are_one_sentence(capsys: pytest.CaptureFixture[str]):
    assert main(["--drafter", "ngram"]) == 2
    assert capsys.readouterr().err.startswith("step_cost: 'ngram' is NGRAM")
    assert main(["--drafter", "no-such-folder"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
