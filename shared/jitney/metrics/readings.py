"""Numbers under the names of the table: counted in one process, and carried to whoever exposes them."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import orjson

from jitney.metrics.table import ALL, Metric

Labels = tuple[str, ...]
"""Values of a metric's own labels, in the table's order."""


class Histogram:
    """Observations by bucket. Plain numbers, because a step counts into it: 0.3 µs, where a lock would cost more."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...], counts: list[int] | None = None, sum: float = 0.0) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1) if counts is None else counts
        self.sum = sum

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)


def _numbers() -> defaultdict[str, dict[Labels, float]]:
    return defaultdict(dict)


def _histograms() -> defaultdict[str, dict[Labels, Histogram]]:
    return defaultdict(dict)


@dataclass(slots=True)
class Readings:
    """numbers: of counters and gauges. Both by the metric's name, then by the values of its own labels.

    Whoever counts calls it from one thread; any other may look.
    """

    numbers: defaultdict[str, dict[Labels, float]] = field(default_factory=_numbers)
    histograms: defaultdict[str, dict[Labels, Histogram]] = field(default_factory=_histograms)

    def add(self, name: str, *labels: str, by: float = 1) -> None:
        """Count. Raises KeyError for a name that is not in the table."""
        series = self.numbers[ALL[name].name]
        series[labels] = series.get(labels, 0) + by

    def set(self, name: str, value: float, *labels: str) -> None:
        self.numbers[ALL[name].name][labels] = value

    def observe(self, name: str, value: float, *labels: str) -> None:
        self.histogram(name, *labels).observe(value)

    def histogram(self, name: str, *labels: str) -> Histogram:
        """The histogram itself, for whoever counts into it at every step."""
        series = self.histograms[name]
        found = series.get(labels)
        if found is None:
            found = series[labels] = Histogram(ALL[name].buckets)
        return found

    def value(self, name: str, *labels: str) -> float:
        """0 for what was never counted."""
        return self.numbers.get(name, {}).get(labels, 0)

    def encode(self) -> bytes:
        """As it lies in Redis beside a worker's view."""
        numbers = {
            name: [[*labels, value] for labels, value in series.items()] for name, series in self.numbers.items()
        }
        histograms = {
            name: [[*labels, one.sum, one.counts] for labels, one in series.items()]
            for name, series in self.histograms.items()
        }
        return orjson.dumps({"numbers": numbers, "histograms": histograms})

    @classmethod
    def decode(cls, stored: bytes) -> Readings | None:
        """None for bytes that are no readings. What the table does not know is left out: a newer worker's, perhaps."""
        made = cls()
        try:
            fields = orjson.loads(stored)
            for metric, row in _known(fields["numbers"]):
                *labels, value = row
                made.numbers[metric.name][_labels(metric, labels)] = _finite(value)
            for metric, row in _known(fields["histograms"]):
                *labels, total, counts = row
                made.histograms[metric.name][_labels(metric, labels)] = _read_histogram(metric, total, counts)
        except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError):
            return None
        return made


def _known(series: Any) -> Iterator[tuple[Metric, list[Any]]]:
    for name, rows in series.items():
        if name in ALL:
            for row in rows:
                yield ALL[name], row


def _labels(metric: Metric, values: list[Any]) -> Labels:
    if len(values) != len(metric.labels) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{metric.name} has the labels {metric.labels}")
    return tuple(values)


def _finite(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise ValueError(f"{value!r} is no number")
    return value


def _read_histogram(metric: Metric, total: Any, counts: Any) -> Histogram:
    """Of another version's buckets nothing can be said."""
    if metric.kind != "histogram" or len(counts) != len(metric.buckets) + 1:
        raise ValueError(f"{metric.name} has {len(metric.buckets)} buckets")
    return Histogram(metric.buckets, [int(_finite(count)) for count in counts], _finite(total))
