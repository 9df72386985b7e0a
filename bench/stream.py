"""What has been read of one streamed request so far, and the answers that it makes.

Tokens come from `usage` and acceptance from the engine's own histogram; pieces are never counted as tokens, since one
piece carries as many tokens as a verify step accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import orjson

from drafter.acceptance import accepted_tokens, histogram_of_details, is_looping, verify_steps
from drafter.data.prompts import Prompt
from drafter.report import ids_sha256


class LoadError(RuntimeError):
    """A request that did not give a trustworthy answer, in one sentence."""


@dataclass(frozen=True)
class Answer:
    """One finished answer; a request has several where it asked for several.

    tokens: by `usage`. seconds: from sending to the end of the stream (to its own last piece, where the request has
    several answers). ttft_s: from sending to the first piece of text, reasoning or tool call. gaps_s: seconds between
    pieces, one for each but the first. histogram: verify steps by accepted draft tokens; empty without speculation.
    output_ids: the engine's own ids. answer: its number in the request. accepted: the accepted draft tokens of each
    verify step in order, or None where the stream does not show them.
    """

    prompt_id: str
    category: str
    tokens: int
    seconds: float
    ttft_s: float
    gaps_s: tuple[float, ...]
    histogram: tuple[int, ...]
    output_ids: tuple[int, ...]
    answer: int = 0
    prompt_tokens: int = 0
    accepted: tuple[int, ...] | None = None

    @cached_property
    def looping(self) -> bool:
        return is_looping(self.output_ids)

    @cached_property
    def output_sha256(self) -> str:
        return ids_sha256(self.output_ids)


@dataclass
class _Choice:
    """One answer on its way. totals: tokens that had been made when each piece came."""

    arrivals: list[float] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)
    finished_at: float | None = None


class Stream:
    """The events of one request. `answers` is how many it asked for."""

    def __init__(self, answers: int = 1) -> None:
        self.choices = [_Choice() for _ in range(answers)]
        self.usage: Mapping[str, Any] | None = None
        self.details: Any = None
        self.output_ids: Any = None
        self.done = False

    def take(self, data: bytes, at: float) -> None:
        """Read one event that arrived `at` seconds after sending. Raises LoadError on an error in the stream."""
        if data == b"[DONE]":
            self.done = True
            return
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError:
            raise LoadError(f"the stream has an event that is not JSON: {data[:200]!r}") from None
        if chunk.get("error"):
            raise LoadError(f"the engine broke the stream off: {error_text(data)}")
        usage = chunk.get("usage")
        for choice in chunk.get("choices", ()):
            number = choice.get("index", 0)
            if number >= len(self.choices):
                raise LoadError(f"the engine sent answer {number + 1}, {len(self.choices)} were asked for")
            mine, delta = self.choices[number], choice.get("delta") or {}
            if delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"):
                mine.arrivals.append(at)
                if usage:
                    mine.totals.append(usage["completion_tokens"])
            reason = choice.get("finish_reason")
            if reason == "abort":
                raise LoadError("the engine aborted the request")
            if reason:
                mine.finished_at = at
        extension = chunk.get("sglext") or {}
        self.details = extension.get("spec_tokens_details", self.details)
        self.output_ids = extension.get("output_ids", self.output_ids)
        if usage and not chunk.get("choices"):
            self.usage = usage

    def answers(self, prompt: Prompt, seconds: float, speculates: bool) -> list[Answer]:
        """The whole answers. Raises LoadError or ValueError where a part is missing or contradicts another."""
        if not self.done or any(choice.finished_at is None for choice in self.choices):
            raise LoadError("the stream ended before the answer did")
        if self.usage is None:
            raise LoadError("the stream carried no usage, so its tokens cannot be counted")
        if not isinstance(self.output_ids, list) or len(self.output_ids) != len(self.choices):
            raise LoadError("the stream carried no output ids (return_output_ids_in_sglext): SGLang 0.5.23 sends them")
        tokens, counts = self.usage["completion_tokens"], [len(ids) for ids in self.output_ids]
        if 0 in counts:
            raise LoadError("the engine sent an answer without a single token, of which nothing can be measured")
        if tokens != sum(counts):
            raise LoadError(f"usage counts {tokens} completion tokens but the engine sent {sum(counts)} ids")
        return [
            self._answer(number, prompt, seconds, histogram)
            for number, histogram in enumerate(self._histograms(counts, speculates))
        ]

    def _histograms(self, counts: Sequence[int], speculates: bool) -> list[list[int]]:
        """One for each answer; an answer of one token came from the prefill, and the engine has no details of it."""
        if not speculates:
            if self.details is not None:
                raise LoadError("the engine should not speculate, but it sent speculation details")
            return [[] for _ in counts]
        sent = self.details if isinstance(self.details, list) else [] if self.details is None else [self.details]
        stepped = [number for number, count in enumerate(counts) if count > 1 or len(sent) == len(counts)]
        if not sent and stepped:
            raise LoadError(f"the engine speculates but sent no speculation details with {sum(counts)} tokens")
        if len(sent) != len(stepped):
            raise LoadError(f"the engine sent {len(sent)} speculation details for {len(stepped)} answers")
        found: list[list[int]] = [[] for _ in counts]
        for number, details in zip(stepped, sent, strict=True):
            found[number] = histogram_of_details(details)
        return found

    def _answer(self, number: int, prompt: Prompt, seconds: float, histogram: list[int]) -> Answer:
        choice, ids = self.choices[number], self.output_ids[number]
        assert self.usage is not None and choice.finished_at is not None
        # Prefill gives the first token, each step its accepted ones and one more; only the last step may be cut.
        surplus = 1 + verify_steps(histogram) + accepted_tokens(histogram) - len(ids)
        if histogram and surplus > len(histogram) - 1:
            raise LoadError(
                f"the histogram {histogram} accounts for {surplus} tokens more than the {len(ids)} that came: do not "
                "trust acceptance figures of this engine version"
            )
        arrivals = choice.arrivals
        return Answer(
            prompt_id=prompt.id,
            category=prompt.category,
            tokens=len(ids),
            seconds=arrivals[-1] if arrivals and len(self.choices) > 1 else seconds,
            ttft_s=arrivals[0] if arrivals else choice.finished_at,
            gaps_s=tuple(after - before for before, after in pairwise(arrivals)),
            histogram=tuple(histogram),
            output_ids=tuple(ids),
            answer=number,
            prompt_tokens=self.usage["prompt_tokens"],
            accepted=placed_steps(choice.totals, len(ids), histogram),
        )


def placed_steps(totals: Sequence[int], tokens: int, histogram: Sequence[int]) -> tuple[int, ...] | None:
    """The accepted draft tokens of each verify step, in order, from the tokens made when each piece came.

    Every piece brings at least one step and a step brings at least one token, so as many growths as there were steps
    are the steps one by one; only the last may have been cut, and what it accepted is what the histogram has left.
    None where pieces came together or without text, or the histogram says otherwise.
    """
    marks = sorted({1, tokens, *(total for total in totals if 1 < total < tokens)})
    growths = [after - before for before, after in pairwise(marks)]
    if not growths or len(growths) != verify_steps(histogram):
        return None
    *whole, last = (growth - 1 for growth in growths)
    left = Counter({accepted: count for accepted, count in enumerate(histogram) if count})
    left.subtract(whole)
    remaining = [accepted for accepted, count in left.items() if count]
    if len(remaining) != 1 or left[remaining[0]] != 1 or remaining[0] < last:
        return None
    return (*whole, remaining[0])


def error_text(body: bytes) -> str:
    """The message in an error body of any of SGLang's shapes, or the start of the body."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode(errors="replace").strip()[:300]
    error = parsed.get("error", parsed) if isinstance(parsed, dict) else parsed
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:300]
