"""Readings as Prometheus reads them. Needs `prometheus_client`, which the extras `api` and `worker` bring."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from jitney.metrics.readings import Histogram, Readings
from jitney.metrics.table import Metric

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


@dataclass(frozen=True, slots=True)
class Source:
    """Whose readings: the metrics there may be, the names of its labels, and for each of its kind values and readings.

    What was never counted is shown as nothing, but for counters without labels of their own: those begin at 0, so that
    the first increase is seen.
    """

    metrics: Sequence[Metric]
    labels: tuple[str, ...]
    readings: Sequence[tuple[tuple[str, ...], Readings]]


class _Sources(Collector):
    def __init__(self, sources: Callable[[], Iterable[Source]]) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Family]:
        for source in self._sources():
            for metric in source.metrics:
                yield _family(metric, source)


def registry_of(sources: Callable[[], Iterable[Source]]) -> CollectorRegistry:
    """A registry of its own, which asks anew at every scrape: nothing of another library gets into it."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Sources(sources))
    return registry


def render(sources: Iterable[Source], accept: str) -> tuple[bytes, str]:
    """The page, and its content type: the one of those in the `accept` header that Prometheus likes best."""
    encode, content_type = choose_encoder(accept)
    found = list(sources)
    return encode(registry_of(lambda: found)), content_type


def _family(metric: Metric, source: Source) -> Family:
    labels = (*source.labels, *metric.labels)
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=labels)
        for own, readings in source.readings:
            for values, one in list(readings.histograms.get(metric.name, {}).items()):
                histogram.add_metric([*own, *values], *_buckets(one))
        return histogram
    make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = make(metric.name, metric.help, labels=labels)
    for own, readings in source.readings:
        series = dict(readings.numbers.get(metric.name, {}))
        if metric.kind == "counter" and not metric.labels:
            series.setdefault((), 0)
        for values, value in series.items():
            family.add_metric([*own, *values], value)
    return family


def _buckets(one: Histogram) -> tuple[list[tuple[str, float]], float]:
    """Cumulative, as the format has it. Copied first: whoever counts may go on meanwhile."""
    counts, total = list(one.counts), one.sum
    bounds = [*map(floatToGoString, one.bounds), "+Inf"]
    return list(zip(bounds, accumulate(counts), strict=True)), total
