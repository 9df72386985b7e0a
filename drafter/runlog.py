"""Training logs -> curves: our own JSON lines, speculators' Python dicts between other lines, SpecForge's and EAGLE's.

A log is read as text, whatever wrote it: dicts in Python's or JSON's form, `name=value` lines, and `Epoch [1/9],
position 0, Acc: 0.5` lines. Nothing is ever evaluated as code. What is cut off, wrapped or broken is read as far as it
goes, and what that leaves out is told.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

MAX_LINES = 400  # of one wrapped record
MAX_POSITIONS = 32
DIGITS = 3  # a rate that is cut off is taken as it stands from so many significant digits on

NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|NaN|inf|Infinity)"
PAIR = re.compile(rf"""['"]([\w/.-]+)['"]\s*:\s*(?:tensor\()?({NUMBER})""")
LIST = re.compile(rf"""['"]([\w/.-]+)['"]\s*:\s*\[((?:\s*{NUMBER}\s*,?)*)""")
FLAT = re.compile(rf"(?<![\w/'\"])([A-Za-z][\w/]*)\s*[=:]\s*({NUMBER})")
EPOCH = re.compile(rf"(Train|Test|Eval|Val)\w*\s+Epoch\s*\[(\d+)/\d+\],\s*position\s*(\d+),\s*Acc:\s*({NUMBER})", re.I)
DICT = re.compile(r"\{\s*(?:['\"]|$)")
STEP = re.compile(r"\bstep[ =:]+(\d+)(?=\D)", re.I)
RATE = re.compile(r"(?:epoch_?)?(full_acc|cond_acc|acc)_(\d{1,2})(?:_epoch)?")
POSITION = re.compile(r"(?:per_position_acc/|position_)(\d{1,2})(?:/acc)?")
BEGINS = re.compile(
    r"\s*(?:\[?\d{4}-\d\d-\d\d|\[\d\d:\d\d|\[?(?:INFO|WARNING|ERROR|DEBUG)\b|\[[A-Za-z][\w.]*\]|[{\"]|Traceback)"
)
BAR = re.compile(r"\d%\||(?:it/s|s/it)\b")
COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
FILE_COLUMN = re.compile(r"\s{2,}\w+\.py:\d+\s*$")  # which rich prints at the right of a record's first line
SECTIONS = {"train": "train", "val": "val", "eval": "val", "test": "val", "validation": "val"}
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


@dataclass
class _Record:
    """The names and numbers of one record; `cut`: what it breaks off with, if it does."""

    line: int
    values: dict[str, Any]
    cut: str | None = None


def at(rates: Sequence[float | None], k: int) -> float | None:
    """The rate of position k, where it is known."""
    return rates[k] if k < len(rates) else None


def read_run(path: Path) -> RunLog:
    """Read a log file. Raises RunLogError where it holds no rate or counts verify steps, OSError where unreadable."""
    text = path.read_bytes().decode("utf-8", "replace")
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
    for record in _records(text):
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


def _point(record: _Record, last_step: int | None, left_out: list[str]) -> Point | None:
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
            facts["loss" if name in LOSSES else "step" if name == "global_step" else name] = value
    known = any(rates.values())
    if record.cut is not None and (known or section):
        kept = ", ".join(f"{kind}_{k}" for kind, found in rates.items() for k in sorted(found)) or "nothing"
        left_out.append(f"line {record.line}: the record is cut off after {record.cut!r}; kept: {kept}.")
    if not known:
        return None
    step, epoch = facts.get("step"), facts.get("epoch")
    whole = {key: int(value) for key in ("tokens", "ttt_steps") if math.isfinite(value := facts.get(key, math.nan))}
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


def _records(text: str) -> Iterator[_Record]:
    """Everything in a text that may be a record, in order."""
    lines = [FILE_COLUMN.sub("", COLOUR.sub("", line)) for line in text.split("\n")]
    number, epochs = 0, _Epochs()
    while number < len(lines):
        line = lines[number]
        if found := EPOCH.search(line):
            if number + 1 == len(lines) and not line[found.end() :]:
                yield from epochs.flush(cut=found[0])
            else:
                yield from epochs.add(number + 1, found)
            number += 1
            continue
        begun = number
        if opens := DICT.search(line):
            whole, number, rest, closed = _dict_text(lines, number, opens.start())
            record = _read_dict(whole, begun + 1, closed)
            if found := STEP.search(line[: opens.start()]):
                record.values.setdefault("step", int(found[1]))
        elif PAIR.search(line):  # the end of a record whose beginning is not there
            whole, number = _paragraph(lines, number, PAIR)
            record, rest = _read_pairs(whole, begun + 1, cut=whole[:40]), ""
        elif epochs.open and number + 1 == len(lines) and line:  # the log ends within a line
            yield from epochs.flush(cut=line)
            number += 1
            continue
        elif FLAT.search(line):
            whole, number = _paragraph(lines, number, FLAT)
            record, rest = _read_flat(whole, begun + 1, last=number == len(lines)), ""
        else:
            number += 1
            continue
        yield from epochs.flush()
        yield record
        if "{" in rest:
            lines[number] = rest
    yield from epochs.flush()


class _Epochs:
    """Collects the `position k, Acc:` lines of one epoch to one record."""

    def __init__(self) -> None:
        self._record: _Record | None = None

    @property
    def open(self) -> bool:
        return self._record is not None

    def add(self, line: int, found: re.Match[str]) -> Iterator[_Record]:
        section, epoch = SECTIONS[found[1].lower()], int(found[2])
        known = self._record.values if self._record else {}
        if known.get("epoch") != epoch or f"{section}/acc_0" not in known:
            yield from self.flush()
            self._record = _Record(line, {"epoch": epoch})
        assert self._record is not None
        self._record.values[f"{section}/acc_{int(found[3])}"] = float(found[4])

    def flush(self, cut: str | None = None) -> Iterator[_Record]:
        record = self._record or (_Record(0, {"val/": None}) if cut else None)
        if record:
            record.cut, self._record = cut, None
            yield record


def _dict_text(lines: Sequence[str], number: int, start: int) -> tuple[str, int, str, bool]:
    """The dict that opens at lines[number][start]: (its text without line breaks, the line to go on at, what of that
    line is left, whether it closes). Bars between its lines are skipped; the beginning of another record ends it."""
    parts: list[str] = []
    depth, quote, skip = 0, "", False
    for here in range(number, min(number + MAX_LINES, len(lines))):
        line = lines[here][start:] if here == number else lines[here].strip()
        if here > number and BAR.search(line):
            continue
        goes_on = quote or PAIR.match(line) or parts[-1:] == [""] or "".join(parts[-1:]).rstrip().endswith(":")
        if here > number and BEGINS.match(lines[here]) and not goes_on:
            return "".join(parts), here, "", False
        for place, letter in enumerate(line):
            if skip:
                skip = False
            elif quote:
                skip, quote = letter == "\\", "" if letter == quote else quote
            elif letter in "'\"":
                quote = letter
            elif letter in "{[":
                depth += 1
            elif letter in "}]":
                depth -= 1
                if depth == 0:
                    rest = line[place + 1 :]
                    return "".join([*parts, line[: place + 1]]), here if "{" in rest else here + 1, rest, True
        parts.append(line)
    return ("".join(parts), len(lines), "", False) if len(parts) < MAX_LINES else (parts[0], number + 1, "", False)


def _paragraph(lines: Sequence[str], number: int, pairs: re.Pattern[str]) -> tuple[str, int]:
    """A line and those after it that go on with it: indented or not, as long as they hold pairs and begin nothing."""
    parts = [lines[number]]
    while (
        (number := number + 1) < len(lines)
        and len(parts) < MAX_LINES
        and "}" not in parts[-1]
        and (pairs is PAIR or lines[number][:1].isspace())
        and pairs.search(lines[number])
        and "{" not in lines[number]
        and not (pairs is FLAT and (EPOCH.search(lines[number]) or BEGINS.match(lines[number])))
    ):
        parts.append(lines[number].strip())
    return ("" if pairs is PAIR else " ").join(parts), number


def _read_dict(text: str, line: int, closed: bool) -> _Record:
    """A dict in JSON's or Python's form; where it is neither, the pairs in it."""
    for read in (json.loads, ast.literal_eval) if closed else ():
        try:
            found = read(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        if isinstance(found, dict):
            return _Record(line, _flat(found))
    return _read_pairs(text, line, cut=None if closed else text[-40:])


def _flat(found: Mapping[Any, Any], before: str = "", depth: int = 0) -> dict[str, Any]:
    """Nested names joined by a slash."""
    flat: dict[str, Any] = {}
    for key, value in found.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{before}{key}/", depth + 1) if depth < 8 else {}
        else:
            flat[f"{before}{key}"] = value
    return flat


def _read_pairs(text: str, line: int, cut: str | None) -> _Record:
    """The pairs of a dict that is cut off or broken, and the section they stand in."""
    values: dict[str, Any] = {}
    opened = re.search(r"""['"](train|val|eval|test|validation)['"]\s*:""", text)
    before = f"{opened[1]}/" if opened else ""
    for found in LIST.finditer(text):
        items = re.findall(NUMBER, found[2])
        if items and text[found.end() :][:1] != "]" and found[0][-1] not in ", " and not _is_long(items[-1]):
            items.pop()
        values[_within(before, found[1])] = [float(item) for item in items]
    for found in PAIR.finditer(text):
        if found.end() == len(text) or text[found.end()] not in ",}]) \t":
            cut = found[0]
            if not _is_long(found[2]):
                continue
        values[_within(before, found[1])] = float(found[2])
    if opened and not values:
        values[before] = None  # its section is all that is left
    return _Record(line, values, cut)


def _within(before: str, name: str) -> str:
    return name if "/" in name or name in ("epoch", "lr", "global_step", "step", "tokens", "seconds") else before + name


def _read_flat(text: str, line: int, last: bool) -> _Record:
    """A line of names and numbers; `last`: the log ends in it without a line's end, maybe within a number."""
    values: dict[str, Any] = {}
    cut = text[-40:].strip() if last or text.rstrip().endswith(",") else None
    for found in FLAT.finditer(text):
        if last and found.end() == len(text) and not _is_long(found[2]):
            continue
        values[found[1]] = float(found[2])
    return _Record(line, values, cut)


def _is_long(number: str) -> bool:
    """Whether a number that is cut off is a share with enough digits to be taken as it stands."""
    return number.startswith("0.") and len(number[2:].lstrip("0")) >= DIGITS and "e" not in number
