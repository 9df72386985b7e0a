"""What a run has measured so far, on disk, so that one that is killed can go on: a line for each finished block."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.load import Block, Load
from bench.schedule import Unit
from bench.stream import Answer

NAME = "blocks.jsonl"
Key = tuple[str, Unit, Load]


class JournalError(ValueError):
    """A folder that holds another run, or one that cannot be gone on with."""


class Journal:
    """The journal of one run in its folder. `resumed` counts how often it was gone on with.

    plan: everything that the blocks depend on; a folder whose unfinished run had another plan is refused. A line that
    was being written when the run was killed is dropped. Raises JournalError.
    """

    def __init__(self, folder: Path, plan: Mapping[str, Any]) -> None:
        self.path = folder / NAME
        self.blocks: dict[Key, Block] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        self.samples: dict[str, list[list[list[int]]]] = {}
        self.order: list[str] = []
        self.resumed = 0
        if self._read(plan):
            self.resumed += 1
            self._write({"resumed": self.resumed})
        else:
            self._write({"plan": plan})

    def started(self, variant: str) -> None:
        """An engine came up for this variant."""
        self.order.append(variant)
        self._write({"started": variant})

    def know(self, variant: str, facts: dict[str, Any]) -> None:
        """What the first engine of a variant said of itself."""
        self.facts[variant] = facts
        self._write({"variant": variant, "facts": facts})

    def add(self, key: Key, block: Block) -> None:
        variant, unit, load = key
        self.blocks[key] = block
        self._write(
            {
                "variant": variant,
                "unit": asdict(unit),
                "load": asdict(load),
                "seconds": block.seconds,
                "flushed": block.flushed,
                "answers": [asdict(answer) for answer in block.answers],
            }
        )

    def sampled(self, variant: str, rows: list[list[list[int]]]) -> None:
        """The continuations of the sampling check, case by case."""
        self.samples[variant] = rows
        self._write({"variant": variant, "samples": rows})

    def remove(self) -> None:
        """The run is over: its report has everything."""
        self.path.unlink(missing_ok=True)

    def _write(self, line: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _read(self, plan: Mapping[str, Any]) -> bool:
        """Read what is there, without a line that was cut off. Whether there was anything."""
        raw = self.path.read_bytes() if self.path.exists() else b""
        whole = raw[: raw.rfind(b"\n") + 1]
        if whole != raw:
            with self.path.open("r+b") as file:
                file.truncate(len(whole))
        if not whole:
            return False
        fix = "choose another --out, or remove it"
        try:
            first, *lines = [json.loads(line) for line in whole.splitlines()]
            before, now = first["plan"], json.loads(json.dumps(plan))
            changed = sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
            for line in lines:
                self._take(line)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise JournalError(f"{self.path} is not the journal of a run ({error!r}): {fix}.") from None
        if changed:
            raise JournalError(
                f"{self.path} is of an unfinished run that differs in {', '.join(changed)}: give the same command "
                f"to go on with it, {fix}."
            )
        return True

    def _take(self, line: Mapping[str, Any]) -> None:
        if "resumed" in line:
            self.resumed = line["resumed"]
        elif "started" in line:
            self.order.append(line["started"])
        elif "facts" in line:
            self.facts[line["variant"]] = line["facts"]
        elif "samples" in line:
            self.samples[line["variant"]] = line["samples"]
        else:
            key = (line["variant"], Unit(**line["unit"]), Load(**line["load"]))
            answers = tuple(_answer(row) for row in line["answers"])
            self.blocks[key] = Block(answers, line["seconds"], line["flushed"])


def _answer(row: Mapping[str, Any]) -> Answer:
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return Answer(**values)
