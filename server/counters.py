"""Counters and histograms that cost a tenth of prometheus_client's on the hot path, and are rendered by it.

They belong to one event loop, so they need no lock, and a histogram finds its bucket by bisection.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector


class Count:
    """One series of a counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount


class Distribution:
    """One series of a histogram: how many values fell into each bucket, the last one without a bound."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, values up to it), as Prometheus has them."""
        found, total = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


class Counter(Collector):
    """A counter by labels; without labels it is its one series."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        self.name = name
        self.text = text
        self.names = tuple(labels)
        self._series: dict[tuple[str, ...], Count] = {}
        if not labels:
            self.inc = self.labels().inc

    def labels(self, *values: str) -> Count:
        """The series with these labels, which begins with its first mention."""
        found = self._series.get(values)
        if found is None:
            assert len(values) == len(self.names), f"{self.name} has the labels {self.names}"
            found = self._series[values] = Count()
        return found

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self.name, self.text, labels=self.names)
        for values, series in self._series.items():
            family.add_metric(values, series.value)
        yield family


class Histogram(Collector):
    """A histogram by labels; without labels it is its one series."""

    def __init__(self, name: str, text: str, labels: Sequence[str], buckets: Sequence[float]) -> None:
        self.name = name
        self.text = text
        self.names = tuple(labels)
        self.bounds = tuple(buckets)
        self._series: dict[tuple[str, ...], Distribution] = {}
        if not labels:
            self.observe = self.labels().observe

    def labels(self, *values: str) -> Distribution:
        """The series with these labels, which begins with its first mention."""
        found = self._series.get(values)
        if found is None:
            assert len(values) == len(self.names), f"{self.name} has the labels {self.names}"
            found = self._series[values] = Distribution(self.bounds)
        return found

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self.name, self.text, labels=self.names)
        for values, series in self._series.items():
            family.add_metric(values, series.buckets(), series.sum)
        yield family
