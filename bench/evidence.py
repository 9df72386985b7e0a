"""What the requests of a report say beyond their sums: intervals, and which drafter accepts more than which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from bench.stats import (
    CONFIDENCE,
    Counts,
    Difference,
    acceptance_length,
    difference,
    holm,
    prompts_needed,
    speed_ratio,
)
from drafter.acceptance import accepted_tokens, verify_steps

Variant = Mapping[str, Any]


def counted(variant: Variant) -> tuple[Counts, list[str], list[str]]:
    """A variant's counts, its prompts' ids and their categories, a row a prompt; a prompt's answers are summed."""
    found: dict[str, list[float]] = {}
    for request in variant["requests"]:
        row = found.setdefault(request["prompt_id"], [0.0, 0.0])
        row[0] += accepted_tokens(request["histogram"])
        row[1] += verify_steps(request["histogram"])
    return _table(found, variant)


def timed(variant: Variant) -> tuple[Counts, list[str], list[str]]:
    """The same of tokens and seconds: what bench.stats.speed_ratio compares."""
    found: dict[str, list[float]] = {}
    for request in variant["requests"]:
        row = found.setdefault(request["prompt_id"], [0.0, 0.0])
        row[0] += request["tokens"]
        row[1] += request["seconds"]
    return _table(found, variant)


def _table(found: Mapping[str, Sequence[float]], variant: Variant) -> tuple[Counts, list[str], list[str]]:
    categories = {request["prompt_id"]: request["category"] for request in variant["requests"]}
    table = np.array(list(found.values()))
    return Counts(table[:, 0], table[:, 1]), list(found), [categories[prompt] for prompt in found]


def has_interval(variant: Variant) -> bool:
    """Whether there is enough for one: verify steps, and two prompts."""
    return "acceptance_length" in variant and len({request["prompt_id"] for request in variant["requests"]}) > 1


def interval(variant: Variant, confidence: float = CONFIDENCE) -> list[float]:
    """The interval of a variant's acceptance length."""
    counts, _, categories = counted(variant)
    found = acceptance_length(counts, categories, confidence=confidence)
    return [found.low, found.high]


def load_of(variant: Variant) -> tuple[int, str]:
    """What a variant was measured at: only variants of one load are compared."""
    return variant["concurrency"], variant["thinking"]


def comparisons(variants: Iterable[Variant], confidence: float = CONFIDENCE) -> list[dict[str, Any]]:
    """Every two variants that speculated on the same prompts at one load: b's acceptance length less a's.

    p_adjusted holds for all pairs of one load together (Holm); confidence is above 0.95 where a run looked several
    times, and p is multiplied in the same measure. speedup: b's tokens/s over a's. prompts_needed: to find a true
    difference of 0.05.
    """
    by_load: dict[tuple[int, str], list[Variant]] = {}
    for variant in variants:
        by_load.setdefault(load_of(variant), []).append(variant)
    return [row for some in by_load.values() for row in _compared(some, confidence)]


def _compared(variants: Iterable[Variant], confidence: float) -> list[dict[str, Any]]:
    pairs = _pairs(variants, confidence)
    looks = (1 - CONFIDENCE) / (1 - confidence)
    adjusted = holm({str(place): min(1.0, looks * found.p) for place, (_, _, found) in enumerate(pairs)})
    rows = []
    for place, (a, b, found) in enumerate(pairs):
        speedup, bounds = speed_against(b, a, confidence)
        rows.append(
            {
                "a": a["drafter"],
                "b": b["drafter"],
                "concurrency": a["concurrency"],
                "thinking": a["thinking"],
                "delta_acceptance_length": found.value,
                "ci95": [found.low, found.high],
                "p_adjusted": adjusted[str(place)],
                "prompts_needed": prompts_needed(found, len(counted(a)[1])),
                "speedup": speedup,
                **({"speedup_ci95": bounds} if bounds else {}),
            }
        )
    return rows


def _pairs(variants: Iterable[Variant], confidence: float) -> list[tuple[Variant, Variant, Difference]]:
    rows = [(variant, *counted(variant)) for variant in variants if has_interval(variant)]
    return [
        (a[0], b[0], difference(a[1], b[1], a[3], confidence=confidence))
        for a, b in combinations(rows, 2)
        if a[2] == b[2]
    ]


def all_clear(variants: Sequence[Variant], confidence: float) -> bool:
    """Whether every difference between drafters, at every load, leaves out zero at this confidence."""
    pairs = [
        pair
        for load in sorted({load_of(variant) for variant in variants})
        for pair in _pairs((variant for variant in variants if load_of(variant) == load), confidence)
    ]
    return bool(pairs) and all(found.called for _, _, found in pairs)


def speed_against(mine: Variant, theirs: Variant, confidence: float = CONFIDENCE) -> tuple[float, list[float] | None]:
    """Tokens/s of one variant over another's at the same load, and its interval.

    The ratio is of wall time. How far it could be another with other prompts is taken from the requests' own seconds,
    whose sum at a full load is the wall time times the concurrency, and it is never narrower than the ratios of the
    passes, which show whether the machine was as fast for both. None where one prompt, or different ones, cannot tell.
    """
    ratio = mine["tokens_per_second"] / theirs["tokens_per_second"]
    (own, prompts, categories), (others, same, _) = timed(mine), timed(theirs)
    if prompts != same or len(prompts) < 2:
        return ratio, None
    found = speed_ratio(others, own, categories, confidence=confidence)
    passes = [rate / there for rate, there in zip(_rates(mine), _rates(theirs), strict=False)]
    low, high = ratio * found.low / found.value, ratio * found.high / found.value
    return ratio, [min([low, *passes]), max([high, *passes])]


def _rates(variant: Variant) -> list[float]:
    """Tokens/s of each pass over the prompts, in order."""
    sums: dict[int, list[float]] = {}
    for block in variant.get("blocks", []):
        row = sums.setdefault(block["repeat"], [0.0, 0.0])
        row[0] += block["tokens"]
        row[1] += block["seconds"]
    return [tokens / seconds for _, (tokens, seconds) in sorted(sums.items())]


def speed_of(variant: Variant, baseline: Variant, confidence: float = CONFIDENCE) -> dict[str, Any]:
    """What a variant's entry says of its speed against the baseline's at the same load."""
    ratio, bounds = speed_against(variant, baseline, confidence)
    if bounds is None:
        return {"speedup": ratio}
    low, high = bounds
    clear = {"loses": high < 1} if high < 1 or low > 1 else {}
    return {"speedup": ratio, "speedup_ci95": bounds, **clear}


def costs_of(variant: Variant, baseline: Variant) -> dict[str, float]:
    """C/T1: a verify step against a decode step of no speculation at the same load, which is also the acceptance
    length below which speculation loses."""
    if "verify_step_ms" not in variant or "decode_step_ms" not in baseline:
        return {}
    return {"step_cost": variant["verify_step_ms"] / baseline["decode_step_ms"]}


def probe_line(variant: Variant, baseline: Variant) -> str:
    """One sentence about a drafter served as it is: what it accepts, how fast it is, and whether it pays."""
    bounds = variant.get("speedup_ci95")
    within = f" ({bounds[0]:.2f} to {bounds[1]:.2f})" if bounds else ""
    won, lost = ("is faster", "is slower") if "acceptance_length" in baseline else ("pays", "loses")
    says = {True: f"it {lost}", False: f"it {won}", None: "which of them is faster is not clear"}[variant.get("loses")]
    foreign = " (its draft vocabulary was chosen elsewhere)" if variant.get("foreign_vocabulary") else ""
    length = f"{variant['acceptance_length']:.3f}" if "acceptance_length" in variant else "unknown"
    return (
        f"{variant['drafter']}{foreign} at concurrency {variant['concurrency']}: acceptance length {length}, "
        f"{variant['tokens_per_second']:.1f} tokens/s against {baseline['tokens_per_second']:.1f} of "
        f"{baseline['drafter']}, x{variant['speedup']:.2f}{within}: {says}"
    )
