"""What of a log's text may be a record: dicts in Python's or JSON's form, `name=value` lines, lines of one position.

Nothing is ever evaluated as code. A record may be wrapped over lines, lie between others, or be cut off at either end:
what is read of it is what is there, and where it breaks off is said.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_LINES = 400  # of one wrapped record
DIGITS = 3  # a rate that is cut off is taken as it stands from so many significant digits on

NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|NaN|inf|Infinity)"
PAIR = re.compile(rf"""['"]([\w/.-]+)['"]\s*:\s*(?:tensor\()?({NUMBER})""")
LIST = re.compile(rf"""['"]([\w/.-]+)['"]\s*:\s*\[((?:\s*{NUMBER}\s*,?)*)""")
FLAT = re.compile(rf"(?<![\w/'\"])([A-Za-z][\w/]*)\s*[=:]\s*({NUMBER})")
EPOCH = re.compile(rf"(Train|Test|Eval|Val)\w*\s+Epoch\s*\[(\d+)/\d+\],\s*position\s*(\d+),\s*Acc:\s*({NUMBER})", re.I)
DICT = re.compile(r"\{\s*(?:['\"]|$)")
STEP = re.compile(r"\bstep[ =:]+(\d+)(?=\D)", re.I)
BEGINS = re.compile(
    r"\s*(?:\[?\d{4}-\d\d-\d\d|\[\d\d:\d\d|\[?(?:INFO|WARNING|ERROR|DEBUG)\b|\[[A-Za-z][\w.]*\]|[{\"]|Traceback)"
)
BAR = re.compile(r"\d%\||(?:it/s|s/it)\b")
COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
FILE_COLUMN = re.compile(r"\s{2,}\w+\.py:\d+\s*$")  # which rich prints at the right of a record's first line
SECTIONS = {"train": "train", "val": "val", "eval": "val", "test": "val", "validation": "val"}


@dataclass
class Record:
    """The names and numbers of one record; `cut`: what it breaks off with, if it does."""

    line: int
    values: dict[str, Any]
    cut: str | None = None


def records(text: str) -> Iterator[Record]:
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
        self._record: Record | None = None

    @property
    def open(self) -> bool:
        return self._record is not None

    def add(self, line: int, found: re.Match[str]) -> Iterator[Record]:
        section, epoch = SECTIONS[found[1].lower()], int(found[2])
        known = self._record.values if self._record else {}
        if known.get("epoch") != epoch or f"{section}/acc_0" not in known:
            yield from self.flush()
            self._record = Record(line, {"epoch": epoch})
        assert self._record is not None
        self._record.values[f"{section}/acc_{int(found[3])}"] = float(found[4])

    def flush(self, cut: str | None = None) -> Iterator[Record]:
        record = self._record or (Record(0, {"val/": None}) if cut else None)
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


def _read_dict(text: str, line: int, closed: bool) -> Record:
    """A dict in JSON's or Python's form; where it is neither, the pairs in it."""
    for read in (json.loads, ast.literal_eval) if closed else ():
        try:
            found = read(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        if isinstance(found, dict):
            return Record(line, _flat(found))
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


def _read_pairs(text: str, line: int, cut: str | None) -> Record:
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
    return Record(line, values, cut)


def _within(before: str, name: str) -> str:
    return name if "/" in name or name in ("epoch", "lr", "global_step", "step", "tokens", "seconds") else before + name


def _read_flat(text: str, line: int, last: bool) -> Record:
    """A line of names and numbers; `last`: the log ends in it without a line's end, maybe within a number."""
    values: dict[str, Any] = {}
    cut = text[-40:].strip() if last or text.rstrip().endswith(",") else None
    for found in FLAT.finditer(text):
        if last and found.end() == len(text) and not _is_long(found[2]):
            continue
        values[found[1]] = float(found[2])
    return Record(line, values, cut)


def _is_long(number: str) -> bool:
    """Whether a number that is cut off is a share with enough digits to be taken as it stands."""
    return number.startswith("0.") and len(number[2:].lstrip("0")) >= DIGITS and "e" not in number
