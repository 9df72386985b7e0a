"""Pictures of a report as SVG: curves, and rows of marks with their intervals.

Hand-made, since two kinds are all there is: no plotting library, text stays text, and colours come from the page's
style sheet, so that the same picture is legible on a phone, in the dark and on paper. A series is told by its colour,
its dash and its mark, so that it survives a black-and-white printer. Coordinates are in the picture's own units, which
are about a phone's pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 360
LEFT, RIGHT, TOP, BOTTOM = 40, 12, 10, 34
CURVES_HEIGHT = 220
ROW_HEIGHT = 18  # of each mark in a row
ROW_LABEL = 18  # above each row's marks
STYLES = 8  # as many as the style sheet has; more series repeat them
DASHES = ("", "6 3", "2 3", "8 3 2 3")
COLOURS = ("#0072b2", "#d55e00", "#00805f", "#a03c78", "#7a5c00", "#3d6fb6", "#5a5a5a", "#b3261e")  # of a file's own


@dataclass(frozen=True)
class Series:
    """A curve: (place on the x axis, value, low, high) for each point; low and high are None without an interval."""

    name: str
    style: int
    points: tuple[tuple[float, float, float | None, float | None], ...]


@dataclass(frozen=True)
class Mark:
    """One value in a row, with its interval where it has one."""

    name: str
    style: int
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Row:
    """A labelled row of marks. `limit`: a tick that the marks are to be held against."""

    label: str
    marks: tuple[Mark, ...]
    limit: float | None = None


def nice_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`: steps of 1, 2 or 5 times a power of ten."""
    if high - low <= max(1e-9, 1e-6 * abs(low), 1e-6 * abs(high)):  # equal but for rounding
        high = low + (abs(low) if abs(low) > 1e-9 else 1.0)
    rough = (high - low) / max(1, wanted - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(place * step, 12) for place in range(first, last + 1)]


def curves(
    series: Sequence[Series],
    *,
    what: str,
    x_label: str,
    x_ticks: Sequence[tuple[float, str]],
    rule: float | None = None,
    from_zero: bool = True,
) -> str:
    """Lines with their intervals. rule: a value to hold them against, drawn across. what: the picture in words."""
    values = [value for each in series for point in each.points for value in point[1:] if value is not None]
    values += [] if rule is None else [rule]
    ticks = nice_ticks(0.0 if from_zero else min(values), max(values))
    left, right = min(x for x, _ in x_ticks), max(x for x, _ in x_ticks)

    def across(x: float) -> float:
        share = (x - left) / (right - left) if right > left else 0.5
        return LEFT + 12 + share * (WIDTH - LEFT - RIGHT - 24)

    def up(y: float) -> float:
        share = (y - ticks[0]) / (ticks[-1] - ticks[0])
        return TOP + (1 - share) * (CURVES_HEIGHT - TOP - BOTTOM)

    parts = []
    for tick in ticks:
        parts.append(_line("grid", LEFT, up(tick), WIDTH - RIGHT, up(tick)))
        parts.append(_text(LEFT - 5, up(tick) + 4, _tick(tick, ticks), "end"))
    for x, label in _thinned(x_ticks):
        parts.append(_text(across(x), CURVES_HEIGHT - BOTTOM + 15, label, "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, CURVES_HEIGHT - 4, x_label, "middle"))
    if rule is not None:
        parts.append(_line("rule", LEFT, up(rule), WIDTH - RIGHT, up(rule)))
    for each in series:
        ends = [(across(x), up(y)) for x, y, _, _ in each.points]
        dash = DASHES[each.style % len(DASHES)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in ends)
        parts.append(
            f'<polyline class="line s{each.style % STYLES}" points="{path}"'
            + (f' stroke-dasharray="{dash}"' if dash else "")
            + "/>"
        )
        for (_, value, low, high), (x, y) in zip(each.points, ends, strict=True):
            if low is not None and high is not None:
                parts.append(_line(f"bar s{each.style % STYLES}", x, up(low), x, up(high)))
            parts.append(_mark(each.style, x, y, _title(each.name, value, low, high)))
    return _svg(what, CURVES_HEIGHT, parts)


def rows(entries: Sequence[Row], *, what: str, x_label: str, rule: float | None = None, from_zero: bool = False) -> str:
    """Marks with their intervals, row by row. rule: a value to hold all against, drawn from top to bottom."""
    values = [
        value
        for entry in entries
        for mark in entry.marks
        for value in (mark.value, mark.low, mark.high)
        if value is not None
    ]
    values += [entry.limit for entry in entries if entry.limit is not None]
    values += [] if rule is None else [rule]
    ticks = nice_ticks(min(0.0, *values) if from_zero else min(values), max(values))
    heights = [ROW_LABEL + ROW_HEIGHT * max(1, len(entry.marks)) for entry in entries]
    bottom = TOP + sum(heights)

    def across(x: float) -> float:
        return RIGHT + (x - ticks[0]) / (ticks[-1] - ticks[0]) * (WIDTH - 2 * RIGHT)

    parts = []
    for tick in ticks:
        parts.append(_line("grid", across(tick), TOP, across(tick), bottom))
        anchor = "start" if tick == ticks[0] else "end" if tick == ticks[-1] else "middle"
        parts.append(_text(across(tick), bottom + 14, _tick(tick, ticks), anchor))
    parts.append(_text(WIDTH / 2, bottom + 30, x_label, "middle"))
    if rule is not None:
        parts.append(_line("rule", across(rule), TOP, across(rule), bottom))
    at = float(TOP)
    for entry, height in zip(entries, heights, strict=True):
        if at > TOP:
            parts.append(_line("grid", RIGHT, at, WIDTH - RIGHT, at))
        parts.append(_text(RIGHT, at + 13, _short(entry.label, 52), "start", entry.label))
        for place, mark in enumerate(entry.marks):
            y = at + ROW_LABEL + ROW_HEIGHT * (place + 0.4)
            if mark.low is not None and mark.high is not None:
                parts.append(_line(f"bar s{mark.style % STYLES}", across(mark.low), y, across(mark.high), y))
            parts.append(_mark(mark.style, across(mark.value), y, _title(mark.name, mark.value, mark.low, mark.high)))
        if entry.limit is not None:
            x = across(entry.limit)
            parts.append(_line("limit", x, at + ROW_LABEL - 1, x, at + height - 3))
        at += height
    return _svg(what, bottom + 36, parts)


def swatch(style: int) -> str:
    """A series' line and mark, for a legend."""
    dash = DASHES[style % len(DASHES)]
    line = f'<polyline class="line s{style % STYLES}" points="1,7 27,7"' + (
        f' stroke-dasharray="{dash}"' if dash else ""
    )
    return f'<svg class="swatch" viewBox="0 0 28 14" aria-hidden="true">{line}/>{_mark(style, 14, 7, "")}</svg>'


def stacked(titled: Sequence[tuple[str, str]], names: Sequence[tuple[int, str]]) -> str:
    """A file of its own: pictures of `curves` below each other, each under its title, and a legend of (style, name).

    It brings its colours along, since no page does.
    """
    style = "".join(
        [
            "text{font:11px system-ui,sans-serif;fill:#1b1f24}.grid{stroke:#d8dee4}.line{fill:none;stroke-width:2}",
            ".rule{stroke:#1b1f24;stroke-dasharray:5 4}.bar{opacity:.65}",
            *(
                f".line.s{i},.bar.s{i}{{stroke:{colour}}}.mark.s{i}{{fill:{colour}}}"
                for i, colour in enumerate(COLOURS)
            ),
        ]
    )
    parts, at = [], 0
    for title, picture in titled:
        parts.append(_text(RIGHT, at + 16, title, "start"))
        place = f'<svg y="{at + 20}" width="{WIDTH}" height="{CURVES_HEIGHT}" '
        parts.append(picture.replace("<svg ", place, 1))
        at += 20 + CURVES_HEIGHT
    for index, name in names:
        at += ROW_HEIGHT
        parts.append(
            f'<g transform="translate({RIGHT} {at - 10})">{swatch(index)}</g>'.replace(
                "<svg ", '<svg width="28" height="14" ', 1
            )
        )
        parts.append(_text(RIGHT + 36, at + 1, _short(name, 48), "start", name))
    height = at + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{2 * WIDTH}" '
        f'height="{2 * height}"><style>{style}</style><rect width="100%" height="100%" fill="#fff"/>'
        + "".join(parts)
        + "</svg>\n"
    )


def _svg(what: str, height: float, parts: Iterable[str]) -> str:
    body = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(what)}">{body}</svg>'


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str, title: str | None = None) -> str:
    hint = f"<title>{escape(title)}</title>" if title and title != text else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{hint}{escape(text)}</text>'


def _mark(style: int, x: float, y: float, title: str) -> str:
    """Disc, square, diamond or triangle, by style."""
    hint = f"<title>{escape(title)}</title>" if title else ""
    kind = f'class="mark s{style % STYLES}"'
    shape = style % 4
    if shape == 0:
        return f'<circle {kind} cx="{x:.1f}" cy="{y:.1f}" r="4">{hint}</circle>'
    offsets = {
        1: ((-3.5, -3.5), (3.5, -3.5), (3.5, 3.5), (-3.5, 3.5)),
        2: ((0, -5), (5, 0), (0, 5), (-5, 0)),
        3: ((0, -5), (4.5, 3.5), (-4.5, 3.5)),
    }[shape]
    path = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in offsets)
    return f'<polygon {kind} points="{path}">{hint}</polygon>'


def _title(name: str, value: float, low: float | None, high: float | None) -> str:
    interval = "" if low is None or high is None else f" ({low:.3g} to {high:.3g})"
    return f"{name}: {value:.3g}{interval}"


def _tick(value: float, ticks: Sequence[float]) -> str:
    step = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:,.{digits}f}"


def _thinned(ticks: Sequence[tuple[float, str]]) -> Sequence[tuple[float, str]]:
    """As many of the labels as fit beside each other: about six units a letter."""
    longest = max(len(label) for _, label in ticks)
    fit = max(2, int((WIDTH - LEFT - RIGHT) / (7 * longest + 8)))
    return ticks[:: math.ceil(len(ticks) / fit)]


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else "…" + text[-(limit - 1) :]
