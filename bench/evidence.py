"""What the requests of a report say beyond their sums: intervals, and which drafter accepts more than which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any

import numpy as np

from bench.stats import Counts, acceptance_length, difference, holm
from drafter.acceptance import accepted_tokens, verify_steps

Variant = Mapping[str, Any]


def counted(variant: Variant) -> tuple[Counts, list[str], list[str]]:
    """A variant's counts, its prompts' ids and their categories, a row a prompt; a prompt's answers are summed."""
    found: dict[str, list[float]] = {}
    categories: dict[str, str] = {}
    for request in variant["requests"]:
        row = found.setdefault(request["prompt_id"], [0.0, 0.0])
        row[0] += accepted_tokens(request["histogram"])
        row[1] += verify_steps(request["histogram"])
        categories[request["prompt_id"]] = request["category"]
    table = np.array(list(found.values()))
    return Counts(table[:, 0], table[:, 1]), list(found), list(categories.values())


def has_interval(variant: Variant) -> bool:
    """Whether there is enough for one: verify steps, and two prompts."""
    return "acceptance_length" in variant and len({request["prompt_id"] for request in variant["requests"]}) > 1


def interval(variant: Variant) -> list[float]:
    """The 95 % interval of a variant's acceptance length."""
    counts, _, categories = counted(variant)
    found = acceptance_length(counts, categories)
    return [found.low, found.high]


def comparisons(variants: Iterable[Variant]) -> list[dict[str, Any]]:
    """Every two variants that speculated on the same prompts: b's acceptance length less a's, with its interval.

    p_adjusted holds for all of them together (Holm). speedup: b's tokens/s over a's.
    """
    rows = [(variant, *counted(variant)) for variant in variants if has_interval(variant)]
    pairs = [(a, b) for a, b in combinations(rows, 2) if a[2] == b[2]]
    found = [difference(a[1], b[1], a[3]) for a, b in pairs]
    adjusted = holm({str(place): each.p for place, each in enumerate(found)})
    return [
        {
            "a": a["drafter"],
            "b": b["drafter"],
            "delta_acceptance_length": each.value,
            "ci95": [each.low, each.high],
            "p_adjusted": adjusted[str(place)],
            "speedup": b["tokens_per_second"] / a["tokens_per_second"],
        }
        for place, (((a, *_), (b, *_)), each) in enumerate(zip(pairs, found, strict=True))
    ]
