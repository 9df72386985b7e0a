"""The figures of one variant, from its answers. A figure that is not defined is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy

from bench.load import Block
from bench.stream import Answer
from drafter.acceptance import acceptance_length, add_histograms, cond_acc, flatness, full_acc, verify_steps

FIRST_BUCKET = 16  # tokens; each bucket after it is twice as long as all before it
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def figures(blocks: Sequence[Block], positions: int) -> dict[str, Any]:
    """The figures of one variant at one load.

    positions: draft positions a step offered, so that one where nothing was ever accepted counts as 0.
    Speed is over the wall time of the blocks; a category has none of its own, since its requests run among others'.
    """
    answers = [answer for block in blocks for answer in block.answers]
    seconds = sum(block.seconds for block in blocks)
    result: dict[str, Any] = {
        **_acceptance(answers, positions),
        "tokens_per_second": sum(answer.tokens for answer in answers) / seconds,
        **_times(answers),
    }
    result["categories"] = {}
    for category in dict.fromkeys(answer.category for answer in answers):
        own = [answer for answer in answers if answer.category == category]
        result["categories"][category] = {**_acceptance(own, positions), **_times(own)}
    return result | _places(answers)


def _acceptance(answers: Sequence[Answer], positions: int) -> dict[str, Any]:
    """What the histograms of some answers say, and how many of them loop."""
    summed = add_histograms(answer.histogram for answer in answers)
    calm = add_histograms(answer.histogram for answer in answers if not answer.looping)
    padded = summed + [0] * (positions + 1 - len(summed)) if summed else []
    found: dict[str, Any] = {
        "acceptance_length": acceptance_length(summed),
        "acceptance_length_no_loops": acceptance_length(calm),
        "full_acc": full_acc(padded) or None,
        "cond_acc": cond_acc(padded) or None,
        "flatness": flatness(padded),
        "loop_share": sum(answer.looping for answer in answers) / len(answers),
        "answers": len(answers),
        "tokens": sum(answer.tokens for answer in answers),
    }
    return {name: value for name, value in found.items() if value is not None}


def _times(answers: Sequence[Answer]) -> dict[str, float]:
    """Times in milliseconds, and the tokens a second that one user sees.

    TPOT is (seconds - ttft) / (tokens - 1) of an answer of two tokens or more that came in several pieces; ITL is the
    time between two pieces of a stream, each of which may carry several tokens; a verify step takes
    (seconds - ttft) / steps, the median over answers, and without speculation a decode step takes what TPOT says.
    """
    timed = [answer for answer in answers if answer.seconds > answer.ttft_s]  # of the others no time is known
    speculates = any(sum(answer.histogram) for answer in answers)
    per_token = [(a.seconds - a.ttft_s) / (a.tokens - 1) for a in timed if a.tokens > 1]
    found: dict[str, float] = {}
    for name, share, values in (
        ("ttft_ms_p50", 50, [answer.ttft_s for answer in answers]),
        ("ttft_ms_p99", 99, [answer.ttft_s for answer in answers]),
        ("tpot_ms_p50", 50, per_token),
        ("itl_ms_p50", 50, [gap for answer in answers for gap in answer.gaps_s]),
        ("itl_ms_p99", 99, [gap for answer in answers for gap in answer.gaps_s]),
        ("verify_step_ms", 50, [(a.seconds - a.ttft_s) / sum(a.histogram) for a in timed if sum(a.histogram)]),
        ("decode_step_ms", 50, [] if speculates else per_token),
    ):
        if values:
            found[name] = 1000 * float(numpy.percentile(values, share))
    found["tokens_per_second_each"] = sum(a.tokens for a in answers) / sum(a.seconds for a in answers)
    return found


def _places(answers: Sequence[Answer]) -> dict[str, Any]:
    """Acceptance by place in the answer and by context length, over the answers whose steps are known one by one.

    A step stands where its first token does: the answer's tokens count from 0, of which prefill gives the first; the
    context is the prompt and the answer before that token.
    """
    steps = sum(verify_steps(answer.histogram) for answer in answers)
    placed = [answer for answer in answers if answer.accepted]
    if not steps:
        return {}
    found: dict[str, Any] = {"placed_share": sum(verify_steps(answer.histogram) for answer in placed) / steps}
    if placed:
        found["by_answer_position"] = _buckets(placed, lambda answer: 0)
        found["by_context_length"] = _buckets(placed, lambda answer: answer.prompt_tokens)
    return found


def _buckets(answers: Sequence[Answer], before: Callable[[Answer], int]) -> list[dict[str, Any]]:
    histograms: dict[int, list[int]] = {}
    for answer in answers:
        for place, accepted in _standing(answer.accepted or ()):
            bucket = ((before(answer) + place) // FIRST_BUCKET).bit_length()
            histograms[bucket] = add_histograms((histograms.get(bucket, []), [0] * accepted + [1]))
    edges = [0, *(FIRST_BUCKET << bucket for bucket in range(max(histograms) + 1))]
    return [
        {"from": low, "to": high, "steps": verify_steps(found), "acceptance_length": acceptance_length(found)}
        for bucket, (low, high) in enumerate(pairwise(edges))
        if (found := histograms.get(bucket))
    ]


def _standing(accepted: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(place of the step's first token in the answer, what it accepted) of each step."""
    place = 1
    for count in accepted:
        yield place, count
        place += count + 1


def request_entries(block: Block, repeat: int) -> list[dict[str, Any]]:
    """What the report keeps of each answer of a block."""
    return [
        {
            "prompt_id": answer.prompt_id,
            "category": answer.category,
            "repeat": repeat,
            "answer": answer.answer,
            "histogram": list(answer.histogram),
            "tokens": answer.tokens,
            "prompt_tokens": answer.prompt_tokens,
            "seconds": answer.seconds,
            "ttft_s": answer.ttft_s,
            "looping": answer.looping,
            "output_sha256": answer.output_sha256,
            **_written(answer.accepted),
        }
        for answer in block.answers
    ]


def _written(accepted: Sequence[int] | None) -> dict[str, str]:
    """The steps as the report writes them: a base-36 digit each."""
    if accepted is None or max(accepted) >= len(DIGITS):
        return {}
    return {"accepted": "".join(DIGITS[count] for count in accepted)}
