"""What is said while a bench runs, and how long it thinks it will still take."""

import io
from typing import Any

import pytest

from bench import progress as module
from bench.progress import Progress, remaining_seconds


def test_what_remains_is_answers_and_starts_at_their_mean_cost():
    # 3 s an answer, 20 s a start
    assert remaining_seconds(30.0, 10, 5, [10.0, 30.0], 2) == pytest.approx(5 * 3 + 2 * 20)
    assert remaining_seconds(30.0, 10, 0, [10.0], 0) == 0.0


@pytest.mark.parametrize("known", [(0.0, 0, 5, [10.0], 0), (0.0, 0, 5, [], 1), (30.0, 10, 5, [], 1)])
def test_nothing_is_guessed_before_it_was_measured(known: Any):
    assert remaining_seconds(*known) is None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    moment = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: moment[0])
    return moment


def run(progress: Progress, clock: list[float], name: str, answers: int, seconds: float) -> None:
    progress.stage(name, "measuring")
    progress.started(20.0)
    for _ in range(answers):
        clock[0] += seconds
        progress.answered(None)  # type: ignore[arg-type]


def test_the_words(clock: list[float]):
    stream = io.StringIO()
    progress = Progress(variants=3, answers_each=10, stream=stream)
    assert progress.left() == "time left unknown"
    run(progress, clock, "none", 10, 1.0)
    progress.finished("none", None)
    # 20 answers of 1 s and two starts of 20 s
    assert progress.left() == "about 60 s left"
    run(progress, clock, "a", 5, 10.0)
    # 15 answers of (10 + 50) / 15 s and one start
    assert progress.left() == "about 80 s left"
    progress.finished("a", "it died.\nlog line")
    # the five that were not answered are not waited for: 10 answers of 4 s and one start
    assert progress.left() == "about 60 s left"
    progress.finished("b", "never came up")
    assert progress.left() == "about 0 s left"
    progress.close()
    assert stream.getvalue().splitlines() == [
        "none: measuring",
        "none: done, about 60 s left",
        "a: measuring",
        "a: failed, it died.",
        "b: failed, never came up",
    ]


def test_what_was_there_before_and_several_starts(clock: list[float]):
    progress = Progress(variants=2, answers_each=10, starts_each=2, stream=io.StringIO())
    progress.skipped("none", 4)
    run(progress, clock, "none", 3, 1.0)
    run(progress, clock, "a", 5, 1.0)
    # 8 answers of 1 s and two starts of 20 s are left
    assert progress.left() == "about 48 s left"
    progress.finished("a", "it died")
    # three answers of none, and its second start
    assert progress.left() == "about 23 s left"
    run(progress, clock, "none", 3, 1.0)
    progress.finished("none", None)
    assert progress.left() == "about 0 s left"


def test_long_waits_are_in_minutes(clock: list[float]):
    progress = Progress(variants=1, answers_each=100, stream=io.StringIO())
    run(progress, clock, "none", 10, 10.0)
    assert progress.left() == "about 15 min left"


def test_a_terminal_gets_a_bar(clock: list[float]):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    progress = Progress(variants=1, answers_each=2, stream=stream)
    run(progress, clock, "none", 2, 1.0)
    progress.finished("none", None)
    progress.close()
    assert "none: measuring" in stream.getvalue() and "2/2" in stream.getvalue()
