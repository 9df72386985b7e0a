"""Keeps the benchmarks out of the training data: does a text share a run of words with a bundled prompt set?

What a drafter is measured on must never be what it learned from, and a model that was itself trained on such prompts
may write them down unasked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from drafter.data.prompts import BUNDLED, Prompt, load_prompts

WORDS = re.compile(r"\w+")
RUN = 8  # words in a row


def runs_of(text: str) -> set[tuple[str, ...]]:
    """Every run of RUN words of a text, lower-cased, whatever stands between the words."""
    words = WORDS.findall(text.lower())
    return {tuple(words[at : at + RUN]) for at in range(len(words) - RUN + 1)}


class Overlap:
    """The runs of words of some prompts, to hold other texts against."""

    def __init__(self, prompts: Iterable[Prompt], ours: str = "") -> None:
        """`ours`: words that we put around every prompt of a set ourselves, which say nothing about it."""
        self._runs: dict[tuple[str, ...], str] = {}
        known = runs_of(ours)
        for prompt in prompts:
            for message in prompt.messages:
                if isinstance(message["content"], str):
                    self._runs.update(dict.fromkeys(runs_of(message["content"]) - known, prompt.id))

    def with_prompt(self, text: str) -> str | None:
        """The id of a prompt that shares RUN words in a row with `text`, or None."""
        return next((self._runs[run] for run in runs_of(text) if run in self._runs), None)


def bundled_overlap() -> Overlap:
    """All bundled prompt sets. Raises PromptError where one is not installed: a check that is skipped is none."""
    return Overlap(load_prompts(",".join(BUNDLED)))
