"""In which order blocks are measured, so that a machine that slows down slows all variants alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from drafter.data.prompts import Prompt

Interleave = Literal["auto", "on", "off"]
SLOW_START_S = 120.0  # an engine that takes longer is not started again for every block


@dataclass(frozen=True)
class Unit:
    """What every variant measures before the next look: one pass (`repeat`) over one part of the prompts."""

    repeat: int
    part: int


def parts_of(prompts: Sequence[Prompt], parts: int) -> list[list[int]]:
    """The places of the prompts of each part, in order; every part has its share of every category."""
    by_category = sorted(range(len(prompts)), key=lambda place: prompts[place].category)
    return [sorted(by_category[part::parts]) for part in range(parts)]


def rounds(units: Sequence[Unit], interleave: Interleave, start_seconds: float) -> list[list[Unit]]:
    """The units that a variant measures between two starts of its engine.

    on: one each, A B A B. off: all of them, A B. auto: one each, but two rounds of half where a start takes long.
    """
    if interleave == "off":
        return [list(units)]
    if interleave == "on" or start_seconds <= SLOW_START_S or len(units) < 3:
        return [[unit] for unit in units]
    middle = (len(units) + 1) // 2
    return [list(units[:middle]), list(units[middle:])]


def in_order(variants: int, round_number: int, interleave: Interleave, start_seconds: float) -> list[int]:
    """The variants of a round by number. Where a start takes long every other round runs backwards, A B B A: its first
    variant is still up."""
    forwards = list(range(variants))
    slow = interleave == "auto" and start_seconds > SLOW_START_S
    return forwards[::-1] if slow and round_number % 2 else forwards
