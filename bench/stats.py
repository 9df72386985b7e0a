"""Is one drafter better than another, or was it the prompts? Paired cluster bootstrap of a ratio of sums.

A prompt is a cluster: all verify steps of its answers are drawn together, since they are alike. Both variants are drawn
with the same prompts, so what is hard for both cancels out. Categories are strata: each keeps its number of prompts.
P prompts, R resamplings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]

RESAMPLINGS = 4_000
CONFIDENCE = 0.95
SMALLEST_STRATUM = 5  # prompts; a category of fewer is drawn together with others


class StatsError(ValueError):
    """Figures that nothing can be said of: what was found, and what it takes."""


@dataclass(frozen=True)
class Counts:
    """What a variant did with each prompt, over its answers: accepted draft tokens and verify steps, float64 [P]."""

    accepted: Floats
    steps: Floats

    def __post_init__(self) -> None:
        if self.accepted.shape != self.steps.shape or self.accepted.ndim != 1 or not len(self.steps):
            raise StatsError(f"counts of {self.accepted.shape} and {self.steps.shape} are no row a prompt.")
        if (self.steps < 0).any() or (self.accepted < 0).any() or not self.steps.sum() > 0:
            raise StatsError("there is no verify step to count: did the variant speculate?")

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / steps, over the sums."""
        return float(1 + self.accepted.sum() / self.steps.sum())


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval and the bootstrap's standard error."""

    value: float
    low: float
    high: float
    error: float


@dataclass(frozen=True)
class Difference(Estimate):
    """`value` = acceptance length of b less that of a. p: two-sided, of no difference."""

    p: float

    @property
    def called(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low > 0 or self.high < 0


def strata_of(categories: Sequence[str]) -> list[list[int]]:
    """The places of the prompts that are drawn among each other: those of a category, small ones together.

    A stratum of a single prompt shows no variance: where every category has one, everything would be certain.
    """
    places: dict[str, list[int]] = {}
    for place, name in enumerate(categories):
        places.setdefault(name, []).append(place)
    by_size = sorted((len(some), name) for name, some in places.items())
    strata: list[list[int]] = []
    small: list[int] = []
    for size, name in by_size:
        if size < SMALLEST_STRATUM or 0 < len(small) < SMALLEST_STRATUM:
            small += places[name]
        else:
            strata.append(places[name])
    return [*strata, *([sorted(small)] if small else [])]


def resample(categories: Sequence[str], resamplings: int, seed: int) -> Floats:
    """How much each prompt counts, [R, P]: in each stratum as much altogether as it has prompts.

    A stratum of n is drawn n - 1 times with replacement, each draw counting n/(n - 1): drawn n times, it would show
    only (n - 1)/n of its variance, a tenth too little where a category has ten prompts (J. N. K. Rao and C. F. J. Wu,
    1988).
    """
    random = np.random.default_rng(seed)
    drawn = np.zeros((resamplings, len(categories)))
    for members in strata_of(categories):
        size = len(members)
        share = np.full(size, 1 / size)
        drawn[:, members] = random.multinomial(size - 1, share, size=resamplings) * (size / (size - 1))
    return drawn


def acceptance_length(
    counts: Counts,
    categories: Sequence[str],
    *,
    seed: int = 0,
    resamplings: int = RESAMPLINGS,
    confidence: float = CONFIDENCE,
) -> Estimate:
    """Acceptance length with its interval. `categories`: one name a prompt. Raises StatsError."""
    _check(categories, counts)
    drawn = _lengths(counts, resample(categories, resamplings, seed))
    return Estimate(counts.acceptance_length, *_interval(drawn, confidence), float(drawn.std(ddof=1)))


def difference(
    a: Counts,
    b: Counts,
    categories: Sequence[str],
    *,
    seed: int = 0,
    resamplings: int = RESAMPLINGS,
    confidence: float = CONFIDENCE,
) -> Difference:
    """b less a on the same prompts. Raises StatsError."""
    _check(categories, a, b)
    draws = resample(categories, resamplings, seed)
    return _difference(b.acceptance_length - a.acceptance_length, _lengths(b, draws) - _lengths(a, draws), confidence)


def mean_difference(
    a: Floats, b: Floats, categories: Sequence[str], *, seed: int = 0, resamplings: int = RESAMPLINGS
) -> Difference:
    """The mean of b less that of a, where each has a score for each prompt, [P]. Raises StatsError."""
    _check(categories, Counts(np.zeros(len(a)), np.ones(len(a))), Counts(np.zeros(len(b)), np.ones(len(b))))
    each = b - a
    return _difference(float(each.mean()), resample(categories, resamplings, seed) @ each / len(each), CONFIDENCE)


def speed_ratio(
    a: Counts,
    b: Counts,
    categories: Sequence[str],
    *,
    seed: int = 0,
    resamplings: int = RESAMPLINGS,
    confidence: float = CONFIDENCE,
) -> Estimate:
    """Tokens per second of b over that of a. Here a row counts a prompt's tokens (as accepted) and seconds (as steps).

    The interval is about the prompts: whether the machine was as fast for both is for interleaved blocks to see to.
    Raises StatsError.
    """
    _check(categories, a, b)
    draws = resample(categories, resamplings, seed)
    drawn = (_lengths(b, draws) - 1) / (_lengths(a, draws) - 1)
    value = (b.acceptance_length - 1) / (a.acceptance_length - 1)
    return Estimate(value, *_interval(drawn, confidence), float(drawn.std(ddof=1)))


def looks_confidence(looks: int) -> float:
    """The confidence of each interval where a run looks `looks` times and may stop at any, so that all of them together
    miss the truth in 5 % of runs at most (Bonferroni)."""
    return 1 - (1 - CONFIDENCE) / looks


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """p-values adjusted for being several (S. Holm, 1979): each holds for the whole family at its level."""
    adjusted, highest = {}, 0.0
    for place, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        highest = max(highest, min(1.0, (len(p_values) - place) * p))
        adjusted[name] = highest
    return {name: adjusted[name] for name in p_values}


def prompts_needed(found: Difference, prompts: int, wanted: float = 0.05, power: float = 0.8) -> int:
    """Prompts in all with which a true difference of `wanted` would be called in `power` of all trials.

    From the standard error at `prompts`, which falls with their square root, for the two-sided level of 5 %:
    n = prompts * ((z_a + z_b) error / wanted)^2, two at the least. Raises StatsError.
    """
    if wanted <= 0 or not 0 < power < 1:
        raise StatsError(f"a difference of {wanted} at a power of {power} cannot be asked for: both lie above 0.")
    z = stats.norm.ppf(1 - (1 - CONFIDENCE) / 2) + stats.norm.ppf(power)
    return max(2, math.ceil(prompts * (float(z) * found.error / wanted) ** 2))


def _lengths(counts: Counts, draws: Floats) -> Floats:
    """The acceptance length of each resampling, [R]; 1 where one has drawn no verify step."""
    steps = draws @ counts.steps
    return 1 + np.divide(draws @ counts.accepted, steps, out=np.zeros_like(steps), where=steps > 0)


def _difference(value: float, drawn: Floats, confidence: float) -> Difference:
    below, above = int((drawn <= 0).sum()), int((drawn >= 0).sum())
    p = min(1.0, 2 * (min(below, above) + 1) / (len(drawn) + 1))
    return Difference(value, *_interval(drawn, confidence), float(drawn.std(ddof=1)), p)


def _interval(drawn: Floats, confidence: float) -> tuple[float, float]:
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return float(low), float(high)


def _check(categories: Sequence[str], *variants: Counts) -> None:
    for counts in variants:
        if len(counts.steps) != len(categories):
            raise StatsError(f"{len(counts.steps)} prompts were counted but {len(categories)} categories are named.")
    if len(categories) < 2:
        raise StatsError("one prompt says nothing about others: measure at least two.")
