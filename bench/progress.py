"""What a bench says on stderr while it runs: a bar where that is a terminal, one line for each stage where it is not.

The time that remains is an estimate from what this run has taken so far.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import TextIO

from tqdm import tqdm

from bench.stream import Answer


class Progress:
    """Progress over `variants` with `starts_each` engine starts and `answers_each` answers on each."""

    def __init__(self, variants: int, answers_each: int, starts_each: int = 1, stream: TextIO | None = None) -> None:
        self.starts_left = variants * starts_each
        self.starts_each = starts_each
        self.answers_each = answers_each
        self.answers_left = variants * answers_each
        self.start_seconds: list[float] = []
        self.busy_seconds = 0.0
        self.answered_count = 0
        self._name = ""
        self._starts: Counter[str] = Counter()
        self._answers: Counter[str] = Counter()
        self._since = time.perf_counter()
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._bar = tqdm(
            total=self.answers_left,
            file=self._stream,
            disable=not self._terminal,
            bar_format="{desc} |{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]",
        )

    def stage(self, name: str, what: str) -> None:
        """`name` is now doing `what`."""
        self._name = name
        self._bar.set_description_str(f"{name}: {what}")
        if not self._terminal:
            self._say(f"{name}: {what}")

    def started(self, seconds: float) -> None:
        """An engine is up and warm after so many seconds."""
        self.start_seconds.append(seconds)
        self.starts_left = max(0, self.starts_left - 1)
        self._starts[self._name] += 1
        self._since = time.perf_counter()

    def answered(self, answer: Answer) -> None:
        """One request has finished."""
        moment = time.perf_counter()
        self.busy_seconds += moment - self._since
        self._since = moment
        self.answered_count += 1
        self.answers_left -= 1
        self._answers[self._name] += 1
        self._bar.set_postfix_str(self.left(), refresh=False)
        self._bar.update()

    def skipped(self, name: str, answers: int) -> None:
        """So many answers of a variant were there before this run."""
        self._answers[name] += answers
        self._drop(answers)

    def finished(self, name: str, error: str | None) -> None:
        """A variant is done; what it did not answer will not be answered any more."""
        self.starts_left = max(0, self.starts_left - max(0, self.starts_each - self._starts[name]))
        self._drop(self.answers_each - self._answers[name])
        if error is not None:
            self._say(f"{name}: failed, {error.splitlines()[0]}")
        else:
            self._say(f"{name}: done, {self.left()}" if self.answers_left else f"{name}: done")

    def _drop(self, answers: int) -> None:
        self.answers_left -= answers
        if self._bar.total is not None:  # a bar that is not shown has none
            self._bar.total -= answers

    def left(self) -> str:
        """The time that remains, in words."""
        seconds = remaining_seconds(
            self.busy_seconds, self.answered_count, self.answers_left, self.start_seconds, self.starts_left
        )
        if seconds is None:
            return "time left unknown"
        return f"about {seconds:.0f} s left" if seconds < 90 else f"about {seconds / 60:.0f} min left"

    def close(self) -> None:
        self._bar.close()

    def _say(self, line: str) -> None:
        tqdm.write(line, file=self._stream)


def remaining_seconds(
    busy_seconds: float, answered: int, answers_left: int, start_seconds: list[float], starts_left: int
) -> float | None:
    """Answers and engine starts that are left, each at its mean cost so far. None before anything has been measured."""
    if (answers_left and not answered) or (starts_left and not start_seconds):
        return None
    answering = answers_left * busy_seconds / answered if answers_left else 0.0
    starting = starts_left * sum(start_seconds) / len(start_seconds) if starts_left else 0.0
    return answering + starting
