"""Pictures: every mark at its value and inside its frame, whatever the values are."""

import itertools
import re
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from drafter.svg import WIDTH, Mark, Row, Series, curves, nice_ticks, rows, swatch

VALUES = st.floats(-1e6, 1e6, allow_nan=False).map(lambda value: round(value, 6))


def elements(picture: str, tag: str) -> list[ElementTree.Element]:
    """The picture's elements of a kind; it must be well-formed XML for that."""
    return list(ElementTree.fromstring(picture).iter(tag))


def inside(picture: str) -> bool:
    """Whether no coordinate lies outside the frame."""
    root = ElementTree.fromstring(picture)
    _, _, width, height = (float(number) for number in root.attrib["viewBox"].split())
    for element in root.iter():
        pairs = re.findall(r"(-?[\d.]+),(-?[\d.]+)", element.attrib.get("points", ""))
        pairs += [
            (element.attrib[x], element.attrib[y])
            for x, y in (("x1", "y1"), ("x2", "y2"), ("cx", "cy"), ("x", "y"))
            if x in element.attrib
        ]
        if not all(-0.1 <= float(x) <= width + 0.1 and -0.1 <= float(y) <= height + 0.1 for x, y in pairs):
            return False
    return True


@given(VALUES, VALUES, st.integers(2, 9))
@example(1.0, 1.0 + 1e-15, 5)
@example(0.0, 0.0, 5)
@example(-4e-160, 4e-160, 5)
@example(-7.5, -7.5, 2)
def test_ticks_are_round_even_and_cover_the_values(one: float, other: float, wanted: int):
    low, high = sorted((one, other))
    ticks = nice_ticks(low, high, wanted)
    steps = [b - a for a, b in itertools.pairwise(ticks)]
    size = max(abs(low), abs(high), 1e-6)
    assert ticks[0] <= low + 1e-6 * size and ticks[-1] >= high - 1e-6 * size
    assert 2 <= len(ticks) <= 2 * wanted + 2
    assert all(step == pytest.approx(steps[0], rel=1e-6) for step in steps)
    assert f"{steps[0]:e}"[0] in "125" or f"{steps[0]:.6e}".startswith(("9.99", "1.99", "4.99"))


@given(
    st.lists(st.tuples(VALUES, st.floats(0, 100), st.floats(0, 100)), min_size=1, max_size=8),
    st.none() | VALUES,
    st.booleans(),
)
def test_nothing_is_drawn_outside(values: list[tuple[float, float, float]], rule: float | None, from_zero: bool):
    points = tuple((float(x), value, value - below, value + above) for x, (value, below, above) in enumerate(values))
    ticks = [(float(x), str(x)) for x in range(len(values))]
    positive = all(low >= 0 for _, _, low, _ in points) and (rule or 0) >= 0
    picture = curves(
        [Series("a", 1, points)], what="w", x_label="x", x_ticks=ticks, rule=rule, from_zero=from_zero and positive
    )
    assert inside(picture)
    entries = [Row(f"{x}", (Mark("m", 0, value, low, high),), rule) for x, value, low, high in points]
    assert inside(rows(entries, what="w", x_label="x", rule=rule, from_zero=from_zero))


def test_a_mark_lies_where_its_value_is():
    """On a scale from 0 to 4: marks at 0, 1, 2 and 4 are a quarter, a half and all of the way apart."""
    series = [Series("a", 0, tuple((float(x), value, None, None) for x, value in enumerate((0.0, 1.0, 2.0, 4.0))))]
    picture = curves(series, what="w", x_label="x", x_ticks=[(float(x), str(x)) for x in range(4)])
    marks = [(float(mark.attrib["cx"]), float(mark.attrib["cy"])) for mark in elements(picture, "circle")]
    heights = [y for _, y in marks]
    whole = heights[0] - heights[3]
    assert [heights[0] - y for y in heights] == pytest.approx([0, whole / 4, whole / 2, whole], abs=0.1)
    across = [x for x, _ in marks]
    assert across[1] - across[0] == pytest.approx(across[3] - across[2], abs=0.11)
    entries = [Row(str(value), (Mark("m", 0, value),), limit=1.0) for value in (0.0, 2.0, 4.0)]
    drawn = rows(entries, what="w", x_label="x", rule=1.0)
    places = [float(mark.attrib["cx"]) for mark in elements(drawn, "circle")]
    assert places[1] - places[0] == pytest.approx(places[2] - places[1], abs=0.11)
    limits = [float(line.attrib["x1"]) for line in elements(drawn, "line") if line.attrib["class"] in ("rule", "limit")]
    assert limits == pytest.approx([(places[0] + places[1]) / 2] * 4, abs=0.11)


def test_words_are_escaped_and_long_ones_cut_but_kept_as_a_hint():
    long = "/a/long/path" * 12 + "<b>&"
    picture = rows([Row(long, (Mark("<m>", 0, 1.0, 0.5, 1.5),))], what='"quoted" & more', x_label="<x>")
    root = ElementTree.fromstring(picture)
    assert root.attrib["aria-label"] == '"quoted" & more'
    assert long in [title.text for title in root.iter("title")] and "<m>: 1 (0.5 to 1.5)" in [
        t.text for t in root.iter("title")
    ]
    assert any((text.text or "").startswith("<x>") for text in root.iter("text"))


def test_crowded_labels_are_thinned():
    ticks = [(float(x), f"{64 * x}-{64 * x + 63}") for x in range(40)]
    series = [Series("a", 0, tuple((x, 1.0, None, None) for x, _ in ticks))]
    texts = [text.text for text in elements(curves(series, what="w", x_label="tokens", x_ticks=ticks), "text")]
    shown = [text for text in texts if text and "-" in text]
    assert shown[0] == "0-63" and len(shown) * (7 * len("2496-2559")) < WIDTH


def test_every_style_differs_in_more_than_colour():
    looks = {re.sub(r"s\d", "", swatch(style)) for style in range(4)}
    assert len(looks) == 4
    assert len({swatch(style) for style in range(8)}) == 8
