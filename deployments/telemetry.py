"""Prometheus metrics of one process, built from ``dashboards/catalogue.py`` into a registry of its own.

``telemetry["tidegate_requests_total"].inc(endpoint=..., outcome=..., reason=...)``: names and labels are checked
against the catalogue, and a mistake raises :class:`TelemetryError` at once instead of exporting a series nobody looks
at. Each label has a bound of values; what goes beyond is counted under ``other``. ``None`` sets a gauge to NaN,
"unknown"; a gauge never set is not exported. Numbers are kept here and handed to prometheus_client when it renders: its
own counters add a ``_created`` series to each, and its own histograms cannot add a whole
:class:`policies.types.Histogram`.

Not thread-safe: one event loop writes and renders. It must not use prometheus_client's default registry, which Ray and
vLLM fill with metrics of their own.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from dashboards.catalogue import ALL, LABELS, OF_APPLICATION, OTHER, Kind, Metric, Source
from policies.types import LATENCY_BOUNDS_MS, Histogram

CONTENT_TYPE = CONTENT_TYPE_LATEST
"""Content type of :meth:`Telemetry.render`."""


class TelemetryError(ValueError):
    """A metric is used that the catalogue does not have, or not as the catalogue says."""


class _Buckets:
    """Counts of one histogram series; ``counts`` has one more entry for everything above the last bound."""

    __slots__ = ("counts", "sum")

    def __init__(self, bounds: int) -> None:
        self.counts = [0] * (bounds + 1)
        self.sum = 0.0


def _fold(metric: Metric) -> tuple[int, ...]:
    """For each bucket of :class:`policies.types.Histogram` the bucket of ``metric`` it falls into."""
    folded = (bisect_left(metric.buckets, bound / 1_000) for bound in LATENCY_BOUNDS_MS)
    return (*folded, len(metric.buckets))


class Series(Collector):
    """One metric of this process. Labels go in by name, all of them, each time."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self._label_set = frozenset(metric.labels)
        self._seen: dict[str, set[str]] = {label: set() for label in metric.labels}
        self._numbers: dict[tuple[str, ...], float] = {}
        self._buckets: dict[tuple[str, ...], _Buckets] = {}
        self._known: dict[tuple[tuple[str, str], ...], tuple[str, ...]] = {}
        """Label sets in use, as they are given by name: what was checked once is not checked again."""
        self._kind, self._series_max = metric.kind, metric.series_max
        self._fold = _fold(metric) if metric.kind is Kind.HISTOGRAM else ()
        if metric.kind is Kind.COUNTER and not metric.labels:
            self._numbers[()] = 0.0

    def inc(self, amount: float = 1.0, **labels: str) -> None:
        """Raise a counter by ``amount``, not negative."""
        self._need(Kind.COUNTER)
        if amount < 0:
            raise TelemetryError(f"{self.metric.name} is a counter and cannot fall by {-amount}")
        values = self._values(labels)
        self._numbers[values] = self._numbers.get(values, 0.0) + amount

    def set(self, value: float | None, **labels: str) -> None:
        """Set a gauge; ``None`` is unknown and becomes NaN."""
        self._need(Kind.GAUGE)
        self._numbers[self._values(labels)] = math.nan if value is None else float(value)

    def observe(self, value: float, **labels: str) -> None:
        """Count one value of a histogram, in the metric's unit (seconds)."""
        self._need(Kind.HISTOGRAM)
        series = self._histogram(labels)
        series.counts[bisect_left(self.metric.buckets, value)] += 1
        series.sum += value

    def add(self, histogram: Histogram, **labels: str) -> None:
        """Add all counts of a histogram in ms. Exact where the metric's bounds are a subset of its bounds."""
        self._need(Kind.HISTOGRAM)
        series = self._histogram(labels)
        for index, count in zip(self._fold, histogram.counts, strict=True):
            series.counts[index] += count
        series.sum += histogram.sum_ms / 1_000

    def remove_where(self, label: str, value: str) -> None:
        """Drop every series whose ``label`` has ``value``, so that it is not exported any more."""
        at = self.metric.labels.index(label) if label in self._label_set else -1
        if at < 0:
            raise TelemetryError(f"{self.metric.name} has no label {label!r}")
        self._numbers = {v: n for v, n in self._numbers.items() if v[at] != value}
        self._buckets = {v: b for v, b in self._buckets.items() if v[at] != value}
        self._seen[label].discard(value)
        self._known.clear()

    def values_of(self, label: str) -> frozenset[str]:
        """Values of ``label`` that have been used and not removed."""
        if label not in self._label_set:
            raise TelemetryError(f"{self.metric.name} has no label {label!r}")
        return frozenset(self._seen[label])

    def collect(self) -> Iterator[MetricFamily]:
        """For the registry: the family with all its series."""
        name, help_, labels = self.metric.name, self.metric.help, self.metric.labels
        if self.metric.kind is Kind.HISTOGRAM:
            yield self._histogram_family()
            return
        numbers: CounterMetricFamily | GaugeMetricFamily
        if self.metric.kind is Kind.COUNTER:
            numbers = CounterMetricFamily(name, help_, labels=labels)
        else:
            numbers = GaugeMetricFamily(name, help_, labels=labels)
        for values, number in self._numbers.items():
            numbers.add_metric(values, number)
        yield numbers

    def _histogram_family(self) -> HistogramMetricFamily:
        family = HistogramMetricFamily(self.metric.name, self.metric.help, labels=self.metric.labels)
        for values, series in self._buckets.items():
            running, buckets = 0, []
            for bound, count in zip((*self.metric.buckets, math.inf), series.counts, strict=True):
                running += count
                buckets.append(("+Inf" if bound == math.inf else str(bound), float(running)))
            family.add_metric(values, buckets, series.sum)
        return family

    def _need(self, kind: Kind) -> None:
        if self._kind is not kind:
            raise TelemetryError(f"{self.metric.name} is a {self.metric.kind}, not a {kind}")

    def _histogram(self, labels: dict[str, str]) -> _Buckets:
        values = self._values(labels)
        series = self._buckets.get(values)
        if series is None:
            series = self._buckets[values] = _Buckets(len(self.metric.buckets))
        return series

    def _values(self, labels: dict[str, str]) -> tuple[str, ...]:
        given = tuple(labels.items())
        values = self._known.get(given)
        if values is None:
            values = self._checked(labels)
            if OTHER not in values:  # room may come for what is counted there
                self._known[given] = values
        return values

    def _checked(self, labels: dict[str, str]) -> tuple[str, ...]:
        if labels.keys() != self._label_set:
            wanted = ", ".join(self.metric.labels) or "none"
            raise TelemetryError(f"{self.metric.name} takes the labels {wanted}; got {', '.join(labels) or 'none'}")
        values = tuple([self._bounded(name, labels[name]) for name in self.metric.labels])
        known = self._buckets if self._fold else self._numbers
        if len(known) >= self._series_max and values not in known:
            return (OTHER,) * len(values)
        return values

    def _bounded(self, label: str, value: str) -> str:
        seen = self._seen[label]
        if value in seen:
            return value
        if len(seen) >= LABELS[label].values_max:
            return OTHER
        seen.add(value)
        return value


class Telemetry:
    """All metrics of ``source`` in the catalogue; no others."""

    def __init__(self, source: Source) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._series = {m.name: Series(m) for m in ALL if m.source is source}
        for series in self._series.values():
            self._registry.register(series)

    def __getitem__(self, name: str) -> Series:
        """The metric of that full name; :class:`TelemetryError` when this source has none such."""
        series = self._series.get(name)
        if series is None:
            raise TelemetryError(f"{name} is not in the catalogue for this process")
        return series

    def remove_replica(self, replica_id: str) -> None:
        """Drop the series of a replica that left."""
        for series in self._series.values():
            if "replica" in series.metric.labels:
                series.remove_where("replica", replica_id)

    def __iter__(self) -> Iterator[Series]:
        """All metrics of this source, in the catalogue's order."""
        return iter(self._series.values())

    def render(self) -> bytes:
        """Prometheus text format, see :data:`CONTENT_TYPE`."""
        return generate_latest(self._registry)


def render(of_models: Mapping[str, Telemetry]) -> bytes:
    """Prometheus text format of one process that serves these models; the first one's has what belongs to all.

    Where there are several, each series has the label ``model``, except those of the application as a whole.
    """
    first = next(iter(of_models.values()))
    if len(of_models) == 1:
        return first.render()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Joined(of_models))
    return generate_latest(registry)


class _Joined(Collector):
    """The families of several models, each family once."""

    def __init__(self, of_models: Mapping[str, Telemetry]) -> None:
        self._of_models = of_models

    def collect(self) -> Iterator[MetricFamily]:
        for series_of_one in zip(*self._of_models.values(), strict=True):
            joined: MetricFamily | None = None
            for model, series in zip(self._of_models, series_of_one, strict=True):
                if joined is not None and series.metric.name in OF_APPLICATION:
                    break
                family = next(series.collect())
                if series.metric.name not in OF_APPLICATION:
                    family.samples = [s._replace(labels={"model": model, **s.labels}) for s in family.samples]
                if joined is None:
                    joined = family
                else:
                    joined.samples += family.samples
            assert joined is not None
            yield joined
