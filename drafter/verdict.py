"""A training run's curve -> go on, stop, or promote to the bench, each with its reasons.

The rules are few and fixed, and ask for one thing: is more of this run worth its cost? They judge per-position rates of
training logs against each other alone; what an engine accepts is for `evaluate` and the bench to say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from drafter.runlog import Point, RunLog, RunLogError, at

PROMOTE, CONTINUE, STOP = "promote", "continue", "stop"
EXIT_CODES = {PROMOTE: 0, CONTINUE: 3, STOP: 4}
BROKEN, HEALTHY = 0.3, 0.7  # flatness below which the roll-out is broken, and from which it is sound
LEARNT = 0.1  # first-position accuracy from which a broken roll-out cannot be for lack of training
SETTLED = 3  # evaluations in a row without gain after which a run has settled
GAIN = 0.01  # of the tokens accepted beyond the first, that counts as a gain
SPARE = 0.05  # acceptance length by which a run may lie under its baseline and be taken as equal
CLOSING = 0.8  # share of an earlier gap from which a gap is not closing


@dataclass(frozen=True)
class Pair:
    """The run and its baseline at one place: implied acceptance lengths, the baseline's interpolated."""

    place: float
    run: float
    baseline: float


@dataclass(frozen=True)
class Verdict:
    """decision: promote, continue or stop. hypotheses: what may be wrong, the likeliest first. pairs: run and baseline
    at equal places of `axis`."""

    decision: str
    reasons: Sequence[str]
    hypotheses: Sequence[str]
    axis: str
    pairs: Sequence[Pair] = ()
    notes: Sequence[str] = field(default=())


def judge(run: RunLog, baseline: RunLog | None = None) -> Verdict:
    """Judge a run, against a baseline where there is one. Raises RunLogError where neither holds a first position."""
    points, others = _with_first(run), _with_first(baseline) if baseline else []
    last = points[-1]
    depth = min(len(last.survival), max((len(point.survival) for point in others), default=len(last.survival)))
    points, others = _reaching(points, depth), _reaching(others, depth)
    axis, pairs = equal_places(points, others, depth)
    notes = _notes(run, baseline, last, pairs)
    if depth < len(last.survival):
        notes.append(f"the baseline logs {depth} of {len(last.survival)} positions: only these are compared")
    if any(point.loss is not None and not math.isfinite(point.loss) for point in run.points):
        broken = next(p for p in run.points if p.loss is not None and not math.isfinite(p.loss))
        reason = f"the loss is {broken.loss} at {place(broken)}: nothing that follows can be trusted"
        return Verdict(STOP, [reason], ["a learning rate that is too high", "a NaN in the shards"], axis, pairs, notes)
    decision, reasons = _decide(points, others, pairs, axis, depth)
    return Verdict(decision, reasons, _hypotheses(last) if _is_broken(last) else [], axis, pairs, notes)


def implied(point: Point, depth: int) -> float:
    """The acceptance length that the first `depth` positions imply."""
    return 1.0 + sum(point.survival[:depth])


def equal_places(points: Sequence[Point], others: Sequence[Point], depth: int) -> tuple[str, list[Pair]]:
    """The axis that both have (step, else epoch), and both curves at the run's places within the baseline's range."""
    axes = [axis for axis in ("step", "epoch") if _axis(points, axis)]
    if not others:
        return (axes or ["record"])[0], []
    for axis in axes:
        theirs = _axis(others, axis)
        if len(theirs) < 2:
            continue
        values = [implied(point, depth) for point in others]
        return axis, [
            Pair(x, implied(point, depth), _interpolated(x, theirs, values))
            for x, point in zip(_axis(points, axis), points, strict=True)
            if theirs[0] <= x <= theirs[-1]
        ]
    return (axes or ["record"])[0], []


def place(point: Point) -> str:
    """Where in its run a point stands, in words."""
    if point.step is not None:
        return f"step {point.step:,}"
    return f"epoch {point.epoch:g}" if point.epoch is not None else f"line {point.line}"


def _with_first(log: RunLog) -> list[Point]:
    points = [point for point in log.judged if point.survival]
    if not points:
        raise RunLogError(
            f"{log.name} has no full_acc_0, cond_acc_0 or acc_0 in any record, so nothing can be implied from it."
        )
    return points


def _reaching(points: Sequence[Point], depth: int) -> list[Point]:
    """Those that know as many positions: sums over different numbers of them are no curve."""
    return [point for point in points if len(point.survival) >= depth]


def _decide(
    points: Sequence[Point], others: Sequence[Point], pairs: Sequence[Pair], axis: str, depth: int
) -> tuple[str, list[str]]:
    last, reasons = points[-1], []
    values = [implied(point, depth) for point in points]
    best, goal = max(values), max((implied(point, depth) for point in others), default=None)
    if _is_broken(last):
        reasons.append(
            f"flatness {last.flatness:.2f}: the second guess is right {last.flatness:.2f} times as often as the first, "
            f"where about 1 is healthy and under {BROKEN} is no lack of training, since the first has learnt"
        )
    settled = _since_best(values) >= SETTLED
    fallen = (best - 1) - (values[-1] - 1) > 10 * GAIN * max(best - 1, 1e-9) and settled
    if fallen:
        top = points[values.index(best)]
        reasons.append(f"it has fallen from {best:.2f} at {place(top)} to {values[-1]:.2f}: take that one instead")
    behind = goal is not None and values[-1] < goal - SPARE
    if goal is not None and behind:
        first, theirs = last.survival[0], max(point.survival[0] for point in others)
        text = f"implied {values[-1]:.2f} at {place(last)}, the baseline reaches {goal:.2f}"
        reasons.append(f"{text} (first position {first:.3f} against {theirs:.3f})")
    lost = _not_closing(pairs)
    if lost:
        reasons.append(
            f"at equal {axis}s it lies {lost[-1].baseline - lost[-1].run:.2f} under the baseline, at "
            f"{axis} {lost[-1].place:,g}, and the gap is not closing (it was {lost[0].baseline - lost[0].run:.2f} at "
            f"{axis} {lost[0].place:,g})"
        )
    barren = settled and last.survival[0] < LEARNT
    if barren:
        reasons.append(
            f"it has settled at {values[-1]:.2f} with a first position that is right {last.survival[0]:.1%} of the "
            "time: it has learnt nothing"
        )
    if _is_broken(last) or fallen or lost or barren or (behind and settled):
        return STOP, reasons
    sound = last.flatness is None or last.flatness >= HEALTHY
    if goal is not None and not behind and sound:
        return PROMOTE, [f"implied {values[-1]:.2f} at {place(last)}, no worse than the baseline's {goal:.2f}"]
    if goal is None and settled and sound:
        return PROMOTE, [f"implied {best:.2f}, and {_since_best(values)} evaluations without a gain: it has settled"]
    if last.flatness is not None and not sound:
        reasons.append(f"flatness {last.flatness:.2f}, where a sound drafter has {HEALTHY} or more")
    reasons.append(
        "one evaluation is no curve"
        if len(points) == 1
        else f"it is still moving: {values[-2]:.2f} then {values[-1]:.2f} at {place(last)}"
        if not settled
        else "it has settled, but its later positions are not sound yet"
    )
    return CONTINUE, reasons


def _is_broken(point: Point) -> bool:
    """Whether later positions fail although the first has learnt, and were trained at all."""
    untrained = point.ttt_steps == 1 or point.step == 0
    return not untrained and point.flatness is not None and point.flatness < BROKEN and point.survival[0] >= LEARNT


def _hypotheses(point: Point) -> list[str]:
    served = f"{point.accept_len_positions:.2f}"
    return [
        "a foreign initialisation: the weights come from a drafter that saw other features (layer ids, convention, "
        "norm) or whose lm_head rows mean other tokens (d2t); telling: the drafter as it came accepts more than "
        f"{served} in an engine",
        "a roll-out defect: from the second step on a drafter is fed its own hidden state, and the state, its "
        "position, its norm or the token beside it is not what training means it to be",
        "too little training: last, since the first position has learnt and the others have not begun to",
    ]


def _since_best(values: Sequence[float]) -> int:
    """Evaluations since the last one that gained on all before it."""
    best, since = values[0], 0
    for value in values[1:]:
        gained = value - best > GAIN * max(best - 1, 1e-9)
        best, since = (value, 0) if gained else (best, since + 1)
    return since


def _not_closing(pairs: Sequence[Pair]) -> list[Pair]:
    """Two pairs, in the middle and at the end, between which a gap to the baseline does not close; or none."""
    if len(pairs) < SETTLED:
        return []
    middle, end = pairs[len(pairs) // 2 - (len(pairs) == SETTLED)], pairs[-1]
    gap = end.baseline - end.run
    return [middle, end] if gap > SPARE and gap >= CLOSING * (middle.baseline - middle.run) else []


def _axis(points: Sequence[Point], axis: str) -> list[float]:
    """The points' places, where all have one and they rise."""
    places = [getattr(point, axis) for point in points]
    if any(x is None for x in places) or any(a >= b for a, b in pairwise(places)):
        return []
    return [float(x) for x in places]


def _interpolated(x: float, places: Sequence[float], values: Sequence[float]) -> float:
    after = next(i for i, each in enumerate(places) if each >= x)
    if places[after] == x:
        return values[after]
    share = (x - places[after - 1]) / (places[after] - places[after - 1])
    return values[after - 1] + share * (values[after] - values[after - 1])


def _notes(run: RunLog, baseline: RunLog | None, last: Point, pairs: Sequence[Pair]) -> list[str]:
    notes = []
    if not run.evaluated:
        notes.append("no evaluation on held-out text: means over training batches, which flatter")
    if last.is_marginal:
        notes.append(
            "only marginal rates are logged (each position whatever came before it): their product takes positions as "
            "independent; the truth lies "
            f"between {1 + sum(_lowest(last)):.2f} and {1 + sum(_highest(last)):.2f}"
        )
    if baseline and not pairs:
        notes.append("no equal places to compare at: the run's end is held against the baseline's best")
    elif baseline and any(p.is_marginal for p in baseline.judged) != last.is_marginal:
        notes.append("one of the two logs holds marginal rates, so their acceptance lengths are of two kinds")
    return notes


def _highest(point: Point) -> list[float]:
    rates = [at(point.marginal, k) or 0.0 for k in range(len(point.survival))]
    return [min(rates[: k + 1]) for k in range(len(rates))]


def _lowest(point: Point) -> list[float]:
    misses = [1 - (at(point.marginal, k) or 0.0) for k in range(len(point.survival))]
    return [max(0.0, 1 - sum(misses[: k + 1])) for k in range(len(misses))]


def as_json(point: Point) -> dict[str, Any]:
    """A point for `--json`."""
    return {
        "section": point.section,
        "step": point.step,
        "epoch": point.epoch,
        "tokens": point.tokens,
        "loss": point.loss if point.loss is not None and math.isfinite(point.loss) else None,
        "full_acc": [round(rate, 6) for rate in point.survival],
        "accept_len_positions": round(point.accept_len_positions, 6),
        "flatness": None if point.flatness is None else round(point.flatness, 6),
    }
