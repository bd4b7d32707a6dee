"""Sense, the gateways' half: what gateways saw, summed over those that are fresh, by class and by tenant.

Rates are counts over the time each gateway's window covers, summed over gateways::

    rate = sum over fresh gateways of (sum of counts / sum of window_ms)

Counts are kept as reports come and go; what one tick costs grows with gateways, classes and told tenants, never with
requests. Confidence of the whole is the gateways' mean, those that fell silent counting as 0 until they are forgotten.

This module decides nothing. It must not read a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from policies.control.windows import Figures, Reporter, whole_ns
from policies.measures import ClassCounts, TenantCounts
from policies.types import GatewayReport, Histogram, Priority, ReplicaId


@dataclass(frozen=True, slots=True)
class ClassTraffic:
    """One class of requests, all fresh gateways together, in requests per second."""

    arrivals_ps: float = 0.0
    succeeded_ps: float = 0.0
    met_ps: float = 0.0
    """Succeeded within the objectives of the class."""
    refused_ps: float = 0.0
    failed_ps: float = 0.0
    """Failed for a fault of ours."""
    abandoned_ps: float = 0.0
    """Their clients left, having waited for the first byte past the objective."""
    late_ttft_ps: float = 0.0
    """Succeeded, but their first byte came later than promised."""

    @property
    def demand_ps(self) -> float:
        """Ended and counts: all but what clients withdrew or their own limits refused."""
        return self.succeeded_ps + self.refused_ps + self.failed_ps + self.abandoned_ps

    @property
    def met_share(self) -> float | None:
        """Share of the demand that was served as promised; ``None`` without demand."""
        return self.met_ps / self.demand_ps if self.demand_ps > 0 else None


@dataclass(frozen=True, slots=True)
class TenantTraffic:
    """One tenant, likewise."""

    arrivals_ps: float = 0.0
    succeeded_ps: float = 0.0
    met_ps: float = 0.0
    refused_ps: float = 0.0
    tokens_ps: float = 0.0
    """Prompt plus output tokens of its requests that ended, per second."""


@dataclass(frozen=True, slots=True)
class GatewaySignals:
    """One gateway: its last report, its age, and how far it can be trusted."""

    latest: GatewayReport
    age_ms: float
    fresh: bool
    confidence: float
    """As :attr:`policies.control.signals.ReplicaSignals.confidence`."""

    @property
    def gateway_id(self) -> str:
        """Serve's unique id of the gateway's replica."""
        return self.latest.gateway_id


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the fresh gateways saw, summed."""

    arrivals_ps: float
    """Requests per second."""
    routed_ps: float
    """Dispatches per second, repeated ones included."""
    routed_prompt_tps: float
    """Prompt tokens dispatched per second as gateways estimate them, cached ones included."""
    prompt_tps: float
    """Prompt tokens per second of requests that ended, where engines told them."""
    output_tps: float
    """Output tokens per second of requests that ended."""
    succeeded_ps: float
    failed_ps: float
    """Refused and cancelled ones included."""
    inflight: int
    queued: int
    """Requests that wait in gateways for a replica."""
    predicted_prompt_tokens: int
    predicted_hit_tokens: int
    """Of the window's dispatched prompt tokens, those the routers believed cached."""
    ttft: Histogram
    itl: Histogram
    e2e: Histogram
    ttft_error: Histogram
    met_ps: float = 0.0
    """Succeeded within the objectives of their class."""
    demand_ps: float = 0.0
    """Ended and counts: all but what clients withdrew or their own limits refused."""
    retries_ps: float = 0.0
    """Extra attempts: retries, hedges, resumed streams."""
    repeats_ps: float = 0.0
    """Arrivals whose body was refused or failed before: clients that try again."""
    tasks_succeeded_ps: float = 0.0
    tasks_failed_ps: float = 0.0
    tasks_open: int = 0
    """Tasks whose outcome is not known yet; one that calls through two gateways counts twice."""
    by_class: Mapping[str, ClassTraffic] = field(default_factory=dict)
    """By ``Priority`` value, those that had requests in the window."""
    by_tenant: Mapping[str, TenantTraffic] = field(default_factory=dict)
    """The tenants that gateways told of, and ``other``."""
    ejected: Mapping[ReplicaId, int] = field(default_factory=dict)
    """Gateways that leave a replica alone now, by replica."""
    confidence: float = 0.0
    """In [0, 1]: of all known gateways, silent ones counting as 0."""
    age_ms: float = 0.0
    """Of the oldest report that counts."""

    @property
    def predicted_hit_share(self) -> float | None:
        """Share of prompt tokens the routers believed cached; ``None`` without any."""
        return self.predicted_hit_tokens / self.predicted_prompt_tokens if self.predicted_prompt_tokens else None

    @property
    def met_share(self) -> float | None:
        """Share of the demand that was served as promised; ``None`` without demand."""
        return self.met_ps / self.demand_ps if self.demand_ps > 0 else None


_ARRIVALS, _ROUTED, _ROUTED_PROMPT, _PROMPT, _OUTPUT, _SUCCEEDED, _FAILED, _ROUTED_HIT, _MET, _RETRIES, _REPEATS = (
    range(11)
)
_TASKS_SUCCEEDED, _TASKS_FAILED = 11, 12
_COUNTS = 13
"""Places of a gateway's counts; those of the classes follow, then the buckets of the histograms."""
_TTFT, _ITL, _E2E, _TTFT_ERROR = range(4)
"""Places of a gateway's histograms."""
_BUCKETS = len(Histogram().counts)
_CLASSES = tuple(priority.value for priority in Priority)
_CLASS_FIELDS = tuple(f.name.removesuffix("_ps") for f in fields(ClassTraffic))
_CLASS_WIDTH = len(_CLASS_FIELDS)
_NO_CLASS = (0,) * _CLASS_WIDTH
_HISTOGRAMS_AT = _COUNTS + _CLASS_WIDTH * len(_CLASSES)
_WIDTH = _HISTOGRAMS_AT + 4 * _BUCKETS


def gateway_figures(report: GatewayReport) -> Figures:
    """Counts: those of requests and tokens, in the order of ``_ARRIVALS`` and so on, those of each class, then the
    buckets of the four histograms. Times: the window, the sums of the histograms.
    """
    counts = (
        report.arrivals,
        sum(report.routed.values()),
        sum(report.predicted_prompt_tokens.values()),
        report.prompt_tokens,
        report.output_tokens,
        report.succeeded,
        sum(report.failed.values()),
        sum(report.predicted_hit_tokens.values()),
        report.met,
        report.retries,
        report.repeats,
        report.tasks_succeeded,
        report.tasks_failed,
        *_class_figures(report.by_class),
        *report.ttft.counts,
        *report.itl.counts,
        *report.e2e.counts,
        *report.ttft_error_ms.counts,
    )
    times = report.window_ms, report.ttft.sum_ms, report.itl.sum_ms, report.e2e.sum_ms, report.ttft_error_ms.sum_ms
    return counts, tuple([whole_ns(ms) for ms in times])


def _class_figures(by_class: Mapping[str, ClassCounts]) -> Iterable[int]:
    for name in _CLASSES:
        counts = by_class.get(name)
        yield from _NO_CLASS if counts is None else [getattr(counts, f) for f in _CLASS_FIELDS]


def tenant_rows(report: GatewayReport) -> Mapping[str, tuple[int, ...]]:
    """Counts of each tenant that a report tells of, the fields of :class:`TenantCounts` in order."""
    return {name: _tenant_row(counts) for name, counts in report.by_tenant.items()}


def _tenant_row(counts: TenantCounts) -> tuple[int, ...]:
    return counts.arrivals, counts.succeeded, counts.met, counts.refused, counts.tokens


class GatewayWindow:
    """One gateway: its last report, and what its window of reports adds up to."""

    def __init__(self, reporter: Reporter[GatewayReport], now_ns: int, age_ms_max: float) -> None:
        self.latest = reporter.last.value
        self.age_ms = reporter.last.age_ms(now_ns)
        self.fresh = self.age_ms <= age_ms_max
        window = reporter.window(now_ns)
        self.times = reporter.times or [0] * 5
        self.sums = reporter.sums or [0] * _WIDTH
        self.tenants = reporter.rows
        covered_ms = self.times[0] / 1e6
        self.seconds = covered_ms / 1000 or 1.0
        self.confidence = reporter.confidence(window[0] if window else None, now_ns, covered_ms, age_ms_max)

    def rate(self, number: int) -> float:
        """One of the counts, per second."""
        return self.sums[number] / self.seconds

    def buckets(self, number: int) -> list[int]:
        """Buckets of one of the four histograms."""
        begin = _HISTOGRAMS_AT + number * _BUCKETS
        return self.sums[begin : begin + _BUCKETS]

    def of_class(self, number: int) -> list[int]:
        """Counts of one class."""
        begin = _COUNTS + number * _CLASS_WIDTH
        return self.sums[begin : begin + _CLASS_WIDTH]


def traffic(gateways: Sequence[GatewayWindow], confidence: float) -> Traffic:
    """What ``gateways`` saw, at least one."""

    def rate(number: int) -> float:
        return sum([g.rate(number) for g in gateways])

    def histogram(number: int) -> Histogram:
        counts = tuple(map(sum, zip(*[g.buckets(number) for g in gateways], strict=True)))
        return Histogram(counts, sum([g.times[1 + number] for g in gateways]) / 1e6)

    by_class = _by_class(gateways)
    return Traffic(
        arrivals_ps=rate(_ARRIVALS),
        routed_ps=rate(_ROUTED),
        routed_prompt_tps=rate(_ROUTED_PROMPT),
        prompt_tps=rate(_PROMPT),
        output_tps=rate(_OUTPUT),
        succeeded_ps=rate(_SUCCEEDED),
        failed_ps=rate(_FAILED),
        inflight=sum(g.latest.inflight for g in gateways),
        queued=sum(g.latest.queued for g in gateways),
        predicted_prompt_tokens=sum(g.sums[_ROUTED_PROMPT] for g in gateways),
        predicted_hit_tokens=sum(g.sums[_ROUTED_HIT] for g in gateways),
        ttft=histogram(_TTFT),
        itl=histogram(_ITL),
        e2e=histogram(_E2E),
        ttft_error=histogram(_TTFT_ERROR),
        met_ps=rate(_MET),
        demand_ps=sum([c.demand_ps for c in by_class.values()]),
        retries_ps=rate(_RETRIES),
        repeats_ps=rate(_REPEATS),
        tasks_succeeded_ps=rate(_TASKS_SUCCEEDED),
        tasks_failed_ps=rate(_TASKS_FAILED),
        tasks_open=sum(g.latest.tasks_open for g in gateways),
        by_class=by_class,
        by_tenant=_by_tenant(gateways),
        ejected=_ejected(gateways),
        confidence=confidence,
        age_ms=max(g.age_ms for g in gateways),
    )


def _by_class(gateways: Sequence[GatewayWindow]) -> dict[str, ClassTraffic]:
    found = {}
    for number, name in enumerate(_CLASSES):
        rates = [0.0] * _CLASS_WIDTH
        for gateway in gateways:
            counts = gateway.of_class(number)
            if any(counts):
                rates = [total + count / gateway.seconds for total, count in zip(rates, counts, strict=True)]
        if any(rates):
            found[name] = ClassTraffic(*rates)
    return found


def _by_tenant(gateways: Sequence[GatewayWindow]) -> dict[str, TenantTraffic]:
    rates: dict[str, list[float]] = {}
    for gateway in gateways:
        for name, counts in gateway.tenants.items():
            if not any(counts):
                continue
            row = rates.get(name) or [0.0] * len(counts)
            rates[name] = [total + count / gateway.seconds for total, count in zip(row, counts, strict=True)]
    return {name: TenantTraffic(*rates[name]) for name in sorted(rates)}


def _ejected(gateways: Sequence[GatewayWindow]) -> dict[ReplicaId, int]:
    found: dict[ReplicaId, int] = {}
    for gateway in gateways:
        for replica_id in gateway.latest.ejected:
            found[replica_id] = found.get(replica_id, 0) + 1
    return {replica_id: found[replica_id] for replica_id in sorted(found)}
