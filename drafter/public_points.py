"""The roofline held against what others have measured (public_points.toml): each point, its prediction, its error."""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from drafter.roofline import cycle, decode_step, machine, target

DATA = Path(__file__).with_name("public_points.toml")
CONTEXT = 1024.0  # tokens, where a source does not say


@dataclass(frozen=True)
class Point:
    """A measurement and its prediction: a speed-up (`kind` "speedup"), or milliseconds of a decode step ("decode")."""

    kind: str
    name: str
    machine: str
    batch: int
    steps: int
    measured: float
    predicted: float
    source: str
    missing: str | None  # what its source does not say; such a point does not count

    @property
    def error(self) -> float:
        """Signed, relative to what was measured."""
        return self.predicted / self.measured - 1


def points() -> list[Point]:
    """All points, those of decode steps last."""
    table = tomllib.loads(DATA.read_text("utf-8"))
    found = []
    for entry in table["speedup"]:
        on, model = machine(entry["machine"], entry.get("allreduce")), target(entry["model"])
        batch, steps, context = entry["batch"], entry["steps"], entry.get("context", CONTEXT)
        plain = decode_step(on, model, batch, context).total
        predicted = entry["acceptance_length"] * plain / cycle(on, model, entry["drafter"], batch, steps, context).total
        counted = entry.get("counted", True)
        found.append(
            Point(
                "speedup",
                entry["name"],
                entry["machine"],
                batch,
                steps,
                entry["measured"],
                predicted,
                entry["source"],
                None if counted else entry["missing"],
            )
        )
    for entry in table["decode"]:
        on, model = machine(entry["machine"], entry.get("allreduce")), target(entry["model"])
        time = decode_step(on, model, entry["batch"], entry.get("context", CONTEXT)).total
        found.append(
            Point(
                "decode",
                entry["name"],
                entry["machine"],
                entry["batch"],
                0,
                entry["measured_ms"],
                time,
                entry["source"],
                None,
            )
        )
    return found


def median_error(found: Iterable[Point]) -> float:
    """Median of the absolute relative errors of the points that count. Raises StatisticsError where none does."""
    return statistics.median(abs(point.error) for point in found if point.missing is None)


def median_error_by_source(found: Iterable[Point]) -> float:
    """The same, each source counted once by its own median: one long table does not outweigh the others."""
    sources: dict[str, list[float]] = {}
    for point in found:
        if point.missing is None:
            sources.setdefault(point.source, []).append(abs(point.error))
    return statistics.median(statistics.median(errors) for errors in sources.values())
