"""Training logs -> curves: our own JSON lines, speculators' Python dicts between other lines, SpecForge's and EAGLE's.

logtext.py finds the records in the text; here they become points with the rates of each draft position. What cannot be
used is left out and told.
"""

from __future__ import annotations

import json
import math
import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from drafter.logtext import SECTIONS, Record, records

MAX_POSITIONS = 32
ROUNDING = 0.005  # of rates that were printed to two digits

RATE = re.compile(r"(?:epoch_?)?(full_acc|cond_acc|acc)_(\d{1,2})(?:_epoch)?")
POSITION = re.compile(r"(?:per_position_acc/|position_)(\d{1,2})(?:/acc)?")
LISTS = {"per_position_acc": "acc", "full_acc": "full_acc", "cond_acc": "cond_acc"}
LOSSES = ("loss", "loss_epoch", "avg_loss")
AXES = ("step", "epoch")


class RunLogError(ValueError):
    """A log that holds nothing to judge: says the file, what was looked for, and what to do."""


@dataclass(frozen=True)
class Point:
    """What one record says.

    full, cond, marginal: by draft position; None where the record does not say. full_acc_k is the share of positions at
    which the guesses 0..k are all right; cond_acc_k is that of those where 0..k-1 were; a marginal rate counts guess k
    whatever came before it. loss may be nan. line: where it was read.
    """

    section: str
    step: int | None
    epoch: float | None
    full: tuple[float | None, ...]
    cond: tuple[float | None, ...]
    marginal: tuple[float | None, ...]
    loss: float | None = None
    tokens: int | None = None
    ttt_steps: int | None = None
    line: int = 0

    @property
    def survival(self) -> list[float]:
        """full_acc_k for each k, as far as it follows: taken as logged, or the one before times cond_acc_k, or, where
        only marginal rates are known, times the marginal one (as if positions were independent)."""
        found: list[float] = []
        for k in range(max(map(len, (self.full, self.cond, self.marginal)))):
            full, cond, marginal = (at(rates, k) for rates in (self.full, self.cond, self.marginal))
            rate = cond if cond is not None else marginal
            if full is None and rate is not None:
                full = rate * (found[-1] if found else 1.0)
            if full is None:
                break
            found.append(full)
        return found

    @property
    def is_marginal(self) -> bool:
        """Whether nothing but marginal rates are known."""
        return not any(rate is not None for rate in (*self.full, *self.cond))

    @property
    def accept_len_positions(self) -> float:
        """The acceptance length that the rates imply, a mean over positions (an engine's is over verify steps)."""
        return 1.0 + sum(self.survival)

    @property
    def flatness(self) -> float | None:
        """cond_acc_1 / cond_acc_0; of marginal rates where no others are known. None where they are not both known."""
        first = next((r for r in (at(self.cond, 0), at(self.full, 0), at(self.marginal, 0)) if r is not None), None)
        if not first:
            return None
        second, both = at(self.cond, 1), at(self.full, 1)
        if second is None:
            second = at(self.marginal, 1) if both is None else both / first
        return None if second is None else second / first


@dataclass(frozen=True)
class RunLog:
    """A log's points in order. left_out: what could not be read, a sentence each."""

    name: str
    points: Sequence[Point]
    left_out: Sequence[str] = field(default=())

    @property
    def judged(self) -> list[Point]:
        """The evaluations, or, where there are none, the training records in at most 20 means."""
        evaluations = [point for point in self.points if point.section == "val"]
        return evaluations or means([point for point in self.points if point.section == "train"], 20)

    @property
    def evaluated(self) -> bool:
        """Whether there are evaluations, so that `judged` is not of training batches."""
        return any(point.section == "val" for point in self.points)


def at(rates: Sequence[float | None], k: int) -> float | None:
    """The rate of position k, where it is known."""
    return rates[k] if k < len(rates) else None


def read_run(path: Path) -> RunLog:
    """Read a log file. Raises RunLogError where it holds no rate or counts verify steps, OSError where unreadable."""
    raw = path.read_bytes()
    text = raw.decode("utf-16" if raw[:2] in (BOM_UTF16_LE, BOM_UTF16_BE) else "utf-8", "replace")  # PowerShell's `>`
    if text.lstrip()[:1] == "{":
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = {}
        if "histogram" in found or "variants" in found:
            raise RunLogError(
                f"{path} counts verify steps, as an engine does; a training log is a mean over positions, which is "
                "higher: the two are never compared. Give a training log, and walk the other drafter by "
                "`python -m drafter evaluate`."
            )
    return parse_run(text, str(path))


def parse_run(text: str, name: str) -> RunLog:
    """The points of a log's text. Raises RunLogError where it holds no rate of any draft position."""
    points: list[Point] = []
    left_out: list[str] = []
    last_step: int | None = None
    ttt_steps: int | None = None  # as the training records before an evaluation say
    for record in records(text):
        point = _point(record, last_step, left_out)
        if point is None:
            continue
        ttt_steps = point.ttt_steps or ttt_steps
        point = replace(point, ttt_steps=ttt_steps)
        if point.step is not None:
            if last_step is not None and point.step < last_step:
                again = [p for p in points if p.step is not None and p.step > point.step]
                if again:
                    left_out.append(
                        f"line {record.line}: the run went back from step {last_step} to {point.step}, so the "
                        f"{len(again)} records in between were left out: they were logged again."
                    )
                points = [p for p in points if p not in again]
            last_step = point.step
        same = (point.section, point.step, point.epoch)
        if points and (points[-1].section, points[-1].step, points[-1].epoch) == same:
            points.pop()  # other ranks say the same again
        points.append(point)
    if not points:
        told = "".join(f" {each}" for each in left_out[-1:])
        raise RunLogError(
            f"{name} holds no acceptance rates, expected records with full_acc_k, cond_acc_k or acc_k as our train, "
            f"speculators or SpecForge log them: give the file that the trainer's log went to.{told}"
        )
    most = max(len(point.survival) for point in points)
    for point in points:
        if point.section == "val" and len(point.survival) < most:
            left_out.append(
                f"line {point.line}: this evaluation has {len(point.survival)} of {most} positions, so it implies less "
                "than it would whole."
            )
    return RunLog(name, points, tuple(left_out))


def means(points: Sequence[Point], most: int) -> list[Point]:
    """Neighbouring points in at most `most` groups, each the mean of its rates at the place of its last point."""
    size = max(1, math.ceil(len(points) / most))
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [
        replace(
            group[-1],
            full=_mean([point.full for point in group]),
            cond=_mean([point.cond for point in group]),
            marginal=_mean([point.marginal for point in group]),
            loss=sum(losses) / len(losses) if (losses := [p.loss for p in group if p.loss is not None]) else None,
        )
        for group in groups
    ]


def _mean(rows: Sequence[Sequence[float | None]]) -> tuple[float | None, ...]:
    columns = ([rate for row in rows if (rate := at(row, k)) is not None] for k in range(max(map(len, rows))))
    return tuple(sum(column) / len(column) if column else None for column in columns)


def _point(record: Record, last_step: int | None, left_out: list[str]) -> Point | None:
    """The point of a record, or None where it is of something else; what of it is unusable goes to `left_out`."""
    rates: dict[str, dict[int, float]] = {"full_acc": {}, "cond_acc": {}, "acc": {}}
    section: str | None = None
    facts: dict[str, float] = {}
    for name, value in record.values.items():
        head, _, rest = name.partition("/")
        if head in SECTIONS:
            section, name = SECTIONS[head], rest
        for kind, k, rate in _rates(name, value):
            if name.endswith("_epoch"):
                section = section or "val"
            if not (isinstance(rate, (int, float)) and 0 <= rate <= 1) or isinstance(rate, bool):
                left_out.append(f"line {record.line}: {name} is {rate!r}, no share from 0 to 1: left out.")
            else:
                rates[kind][k] = float(rate)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            facts["loss" if name in LOSSES else "step" if name == "global_step" else name] = _float(value)
    known = any(rates.values())
    if record.cut is not None and (known or section):
        kept = ", ".join(f"{kind}_{k}" for kind, found in rates.items() for k in sorted(found)) or "nothing"
        left_out.append(f"line {record.line}: the record is cut off after {record.cut!r}; kept: {kept}.")
    if not known:
        return None
    step, epoch = facts.get("step"), facts.get("epoch")
    whole = {key: int(value) for key in ("tokens", "ttt_steps") if math.isfinite(value := facts.get(key, math.nan))}
    _leave_out_risen(rates["full_acc"], record.line, left_out)
    full, cond, marginal = (_row(rates[kind]) for kind in ("full_acc", "cond_acc", "acc"))
    return Point(
        section or "train",
        int(step) if step is not None and math.isfinite(step) else last_step,
        epoch if epoch is not None and math.isfinite(epoch) else None,
        full,
        cond,
        marginal,
        loss=facts.get("loss"),
        tokens=whole.get("tokens"),
        ttt_steps=whole.get("ttt_steps"),
        line=record.line,
    )


def _leave_out_risen(full: dict[int, float], line: int, left_out: list[str]) -> None:
    """Drop joint rates that lie above an earlier one's: a chain that is right up to k was right up to there."""
    lowest = 1.0
    for k in sorted(full):
        if full[k] > lowest + ROUNDING:
            left_out.append(
                f"line {line}: full_acc_{k} {full[k]:g} is above {lowest:g} of a position before, which a share of "
                "chains cannot be (marginal rates are named acc_k): left out."
            )
            del full[k]
        else:
            lowest = min(lowest, full[k])


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.inf


def _rates(name: str, value: Any) -> Iterator[tuple[str, int, Any]]:
    """(kind, position, rate) of what a name and its value say of acceptance."""
    if name in LISTS and isinstance(value, list):
        yield from ((LISTS[name], k, rate) for k, rate in enumerate(value[:MAX_POSITIONS]))
    elif found := RATE.fullmatch(name):
        if int(found[2]) < MAX_POSITIONS:
            yield found[1], int(found[2]), value
    elif (found := POSITION.fullmatch(name)) and int(found[1]) < MAX_POSITIONS:
        yield "acc", int(found[1]), value


def _row(found: Mapping[int, float]) -> tuple[float | None, ...]:
    return tuple(found.get(k) for k in range(max(found, default=-1) + 1))
