"""Which prompts and answers of a target are worth learning from."""

from __future__ import annotations

import re
from collections.abc import Sequence

from drafter.acceptance import before_loop, is_looping
from drafter.data.overlap import Overlap

MIN_PROMPT_WORDS = 4
MIN_ANSWER_TOKENS = 8
SENTENCE_END = re.compile(r"[.?!:](?=\s)|\n")
PLACEHOLDER = re.compile(r"\[[A-Za-z][^\]\n]{2,40}\](?!\()|(?<!\w)<[A-Z][A-Za-z _]{2,30}>|\{\{.*?\}\}|_{4,}")


class Rejected(ValueError):
    """A prompt or an answer that is not worth learning from. Its text is the reason, one of few."""


def check_prompt(text: str, overlap: Overlap) -> None:
    """Raise Rejected unless a prompt that the target wrote reads as a request of its own."""
    if len(text.split()) < MIN_PROMPT_WORDS:
        raise Rejected("prompt too short")
    if PLACEHOLDER.search(text):
        raise Rejected("prompt with a placeholder")
    if overlap.with_prompt(text):
        raise Rejected("prompt of a benchmark")


def whole_sentences(text: str) -> str:
    """A prompt that was cut short, up to where its last whole sentence or line ends. Raises Rejected if it has none."""
    ends = [match.end() for match in SENTENCE_END.finditer(text)]
    if not ends:
        raise Rejected("prompt without an end")
    return text[: ends[-1]]


def worth_learning(answer_ids: Sequence[int], text: str, overlap: Overlap) -> Sequence[int]:
    """What of an answer is worth learning from: all of it, or what comes before it loops. Raises Rejected."""
    kept = before_loop(answer_ids) if is_looping(answer_ids) else answer_ids
    if len(kept) < MIN_ANSWER_TOKENS:
        raise Rejected("answer too short" if kept is answer_ids else "answer that loops")
    if overlap.with_prompt(text):
        raise Rejected("answer with a benchmark's text")
    return kept
