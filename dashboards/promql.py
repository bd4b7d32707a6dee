"""Expressions of boards and alerts. Each selector is checked against the catalogue when it is made.

A selector of a board is narrowed by the board's variables wherever its metric has the label (:data:`VARIABLES`); one of
an alert is not. A name or label that the catalogue does not have raises ``KeyError`` or ``ValueError``: a board that
shows nothing must not be built.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from dashboards.catalogue import CATALOGUE, LABELS, PREFIX, TARGET_LABELS, Kind, Metric, Source

VARIABLES: Mapping[str, str] = MappingProxyType(
    {"model": "model", "replica": "replica", "priority": "class", "tenant": "tenant", "instance": "instance"}
)
"""Label -> the variable of boards that narrows it."""

STEP = "$__rate_interval"
"""Grafana's own: long enough for four scrapes."""


def select(name: str, suffix: str = "", **matchers: str) -> str:
    """The selector of ``tidegate_<name>`` on a board; a matcher that begins with ``~`` or ``!`` brings its operator."""
    metric = CATALOGUE[PREFIX + name]
    variables = {label: f"~${VARIABLES[label]}" for label in _narrowing(metric) if label not in matchers}
    return bare(name, suffix, **matchers, **variables)


def bare(name: str, suffix: str = "", **matchers: str) -> str:
    """Likewise without variables: the selector of an alert."""
    metric = CATALOGUE[PREFIX + name]
    if bool(suffix) != (metric.kind is Kind.HISTOGRAM):
        raise ValueError(f"{metric.name} is a {metric.kind}: suffix {suffix!r} does not fit")
    if unknown := matchers.keys() - {*metric.labels, *TARGET_LABELS}:
        raise ValueError(f"{metric.name} has no label {sorted(unknown)}")
    parts = [_matcher(label, value) for label, value in matchers.items()]
    return f"{metric.name}{suffix}{{{','.join(parts)}}}" if parts else metric.name + suffix


def rate(name: str, by: Iterable[str] = (), suffix: str = "", **matchers: str) -> str:
    """Sum of a counter's increase per second."""
    return f"sum{_by(by)}(rate({select(name, suffix, **matchers)}[{STEP}]))"


def total(name: str, by: Iterable[str] = (), **matchers: str) -> str:
    """Sum of a gauge."""
    return f"sum{_by(by)}({select(name, **matchers)})"


def worst(name: str, by: Iterable[str] = (), **matchers: str) -> str:
    """Highest of a gauge."""
    return f"max{_by(by)}({select(name, **matchers)})"


def mean(name: str, by: Iterable[str] = ()) -> str:
    """Mean of a histogram's values."""
    return f"{rate(name, by, '_sum')} / {rate(name, by, '_count')}"


def quantile(q: float, name: str, by: Iterable[str] = (), **matchers: str) -> str:
    """Quantile ``q`` of a histogram."""
    return f"histogram_quantile({q:g}, {rate(name, ('le', *by), '_bucket', **matchers)})"


def _narrowing(metric: Metric) -> list[str]:
    instance = ["instance"] if metric.source is Source.GATEWAY else []
    return [*(label for label in metric.labels if label in VARIABLES), "model", *instance]


def _matcher(label: str, value: str) -> str:
    operator = {"~": "=~", "!": "!="}.get(value[:1], "=")
    return f'{label}{operator}"{value[1:] if operator != "=" else value}"'


def _by(labels: Iterable[str]) -> str:
    names = list(labels)
    if unknown := set(names) - {*LABELS, *TARGET_LABELS, "le"}:
        raise ValueError(f"the catalogue has no label {sorted(unknown)}")
    return f" by ({', '.join(names)}) " if names else ""
