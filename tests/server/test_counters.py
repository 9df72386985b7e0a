"""Our counters against prometheus_client's own: the same text comes out of the same events."""

from __future__ import annotations

import random

import prometheus_client as theirs
import pytest

from server import counters as ours


def text(registry: theirs.CollectorRegistry) -> list[str]:
    lines = theirs.generate_latest(registry).decode().splitlines()
    return sorted(line for line in lines if "_created" not in line)


def test_the_same_text_as_prometheus_client() -> None:
    dice = random.Random(1)
    buckets = (0.001, 0.5, 1.0, 60.0)
    a, b = theirs.CollectorRegistry(), theirs.CollectorRegistry()
    mine = (ours.Counter("c", "text", ("x", "y")), ours.Histogram("h", "text", ("x",), buckets), ours.Counter("p", "t"))
    for each in mine:
        a.register(each)
    other = (
        theirs.Counter("c", "text", ("x", "y"), registry=b),
        theirs.Histogram("h", "text", ("x",), buckets=buckets, registry=b),
        theirs.Counter("p", "t", registry=b),
    )
    for _ in range(500):
        x, y, value = dice.choice('ab"\\'), dice.choice("cd"), dice.choice([*buckets, dice.expovariate(1), 1e9])
        for counter, histogram, plain in (mine, other):
            counter.labels(x, y).inc(2.5)  # type: ignore[attr-defined]
            histogram.labels(x).observe(value)  # type: ignore[attr-defined]
            plain.inc()  # type: ignore[attr-defined]
    assert text(a) == text(b)
    assert len(text(a)) > 20


def test_a_series_with_too_few_labels_is_a_mistake() -> None:
    with pytest.raises(AssertionError):
        ours.Counter("c", "text", ("x",)).labels()
