"""Sense, the pure half: what reporters said, how old it is, and the fleet's totals over what is fresh.

A reporter is *fresh* while its last report is at most ``report_age_ms_max`` old. Each reporter's reports of the last
``WINDOW_MS`` (at most ``WINDOW_REPORTS_MAX``, see ``windows.py``) are kept, and rates are counts over the windows they
cover::

    rate = sum over fresh reporters of (sum of counts / sum of window_ms)

A lost report therefore makes a rate older, not lower. Counts are summed as reports come and go, so that a tick costs
what changed and not what is kept; they are whole numbers, so sums are exact. Times are summed anew.

Three words for ignorance, all used by the decisions:

* *blind*: no gateway and no replica is fresh;
* *unknown replicas*: Serve runs more than report, or (where Serve's own word is missing) known ones fell silent;
* ``None`` in place of :class:`Traffic` or :class:`Work`: no gateway, or no replica, is fresh.

This module decides nothing. It must not read a clock: the receiver passes its own ``now_ns``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from policies.config import ControlConfig
from policies.control.windows import Figures, Reporter, Reporters
from policies.types import (
    FleetView,
    GatewayReport,
    Histogram,
    ReplicaId,
    ReplicaReport,
    ReplicaState,
    Sampled,
)

REPLICAS_MAX = 2_048
"""Replicas whose reports are kept; one more is refused unless a silent one can make room."""

GATEWAYS_MAX = 256
"""Gateways whose reports are kept, likewise."""


@dataclass(slots=True)
class ReplicaSignals:
    """One replica: its last report, its age, and what its window of reports adds up to.

    To be read only; not frozen, because making a thousand of them at each tick would take five times as long.
    """

    latest: ReplicaReport
    age_ms: float
    fresh: bool
    window: tuple[Sampled[ReplicaReport], ...]
    """Oldest first; empty when the last report is older than the window."""
    window_ms: float
    """Time covered by the window's reports."""
    prefill_tps: float
    """Prompt tokens computed per second."""
    decode_tps: float
    """Tokens decoded per second."""
    prefix_query_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    steps: int
    busy_share: float | None
    itl: Histogram

    @property
    def replica_id(self) -> ReplicaId:
        """Serve's unique id."""
        return self.latest.replica_id

    @property
    def serving(self) -> bool:
        """Fresh and in the state that takes requests."""
        return self.fresh and self.latest.state is ReplicaState.READY


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

    @property
    def predicted_hit_share(self) -> float | None:
        """Share of prompt tokens the routers believed cached; ``None`` without any."""
        return self.predicted_hit_tokens / self.predicted_prompt_tokens if self.predicted_prompt_tokens else None


@dataclass(frozen=True, slots=True)
class Work:
    """What the fresh replicas did and hold, summed."""

    running: int
    waiting: int
    http_inflight: int
    prefill_tps: float
    decode_tps: float
    kv_tokens_used: int
    kv_tokens_max: int
    kv_share_max: float | None
    """Fullest replica's share of its KV cache."""
    prefix_query_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    itl: Histogram
    busy_share: float | None
    """Mean over the fresh replicas that said."""
    gpu_utilisation_share: float | None
    """Mean over the fresh replicas with a GPU; never filled from the busy share."""

    @property
    def kv_share(self) -> float | None:
        """Share of all KV cache in use; ``None`` where no replica has told its size."""
        return self.kv_tokens_used / self.kv_tokens_max if self.kv_tokens_max else None

    @property
    def prefix_hit_share(self) -> float | None:
        """Share of looked-up prompt tokens found in prefix caches; ``None`` without any."""
        return self.prefix_hit_tokens / self.prefix_query_tokens if self.prefix_query_tokens else None


@dataclass(frozen=True, slots=True)
class Signals:
    """Everything one tick knows."""

    now_ns: int
    model: str
    replicas: tuple[ReplicaSignals, ...]
    """Every known replica, sorted by id, the silent ones included."""
    gateways_known: int
    gateways_fresh: int
    traffic: Traffic | None
    work: Work | None
    fleet: FleetView | None
    """Serve's word; ``None`` when there is none or it is too old."""
    unknown_replicas: int
    """Replicas that run, as far as is known, and say nothing."""

    @property
    def blind(self) -> bool:
        """Nothing fresh at all: hold."""
        return self.traffic is None and self.work is None

    @property
    def fresh(self) -> tuple[ReplicaSignals, ...]:
        """Replicas with a fresh report."""
        return tuple(r for r in self.replicas if r.fresh)

    @property
    def serving(self) -> tuple[ReplicaSignals, ...]:
        """Fresh replicas that take requests."""
        return tuple(r for r in self.replicas if r.serving)

    @property
    def queue(self) -> int | None:
        """Requests that wait, in engines and gateways together; ``None`` when blind."""
        if self.blind:
            return None
        return (self.work.waiting if self.work else 0) + (self.traffic.queued if self.traffic else 0)


class SignalBook:
    """Receives reports and turns them into :class:`Signals`."""

    def __init__(self, config: ControlConfig) -> None:
        self._config = config
        self._replicas: Reporters[ReplicaReport] = Reporters(REPLICAS_MAX, config, _replica_figures)
        self._gateways: Reporters[GatewayReport] = Reporters(GATEWAYS_MAX, config, _gateway_figures)
        self._fleet: Sampled[FleetView] | None = None

    @property
    def refused(self) -> int:
        """Reports refused because there were too many reporters."""
        return self._replicas.refused + self._gateways.refused

    def receive_replica(self, report: ReplicaReport, now_ns: int) -> bool:
        """Keep a replica's report; ``False`` when it was ignored."""
        return self._replicas.receive(report.replica_id, report, now_ns)

    def receive_gateway(self, report: GatewayReport, now_ns: int) -> bool:
        """Keep a gateway's report; ``False`` when it was ignored."""
        return self._gateways.receive(report.gateway_id, report, now_ns)

    def receive_fleet(self, view: FleetView, now_ns: int) -> None:
        """Keep Serve's latest word on the fleet."""
        self._fleet = Sampled(view, now_ns)

    def signals(self, now_ns: int) -> Signals:
        """Everything known at ``now_ns``; reporters silent for too long are forgotten."""
        self._replicas.forget(now_ns)
        self._gateways.forget(now_ns)
        age_max = self._config.report_age_ms_max
        replicas = tuple([_replica_signals(r, now_ns, age_max) for r in self._replicas.items()])
        gateways = [_Gateway(r, now_ns) for r in self._gateways.items() if r.last.age_ms(now_ns) <= age_max]
        fleet = self._fleet.value if self._fleet is not None and self._fleet.age_ms(now_ns) <= age_max else None
        models = sorted({r.latest.model for r in replicas} | {g.latest.model for g in gateways})
        return Signals(
            now_ns=now_ns,
            model=models[0] if models else "",
            replicas=replicas,
            gateways_known=len(self._gateways),
            gateways_fresh=len(gateways),
            traffic=_traffic(gateways) if gateways else None,
            work=_work([r for r in replicas if r.fresh]),
            fleet=fleet,
            unknown_replicas=_unknown_replicas(replicas, fleet),
        )


def merge(histograms: Iterable[Histogram]) -> Histogram:
    """Sum of any number of histograms."""
    some = [h for h in histograms if h.sum_ms or any(h.counts)]
    if not some:
        return Histogram()
    return Histogram(tuple(map(sum, zip(*(h.counts for h in some), strict=True))), sum(h.sum_ms for h in some))


def _replica_figures(report: ReplicaReport) -> Figures:
    """Counts: six of tokens, preemptions and steps, then the buckets of the histogram. Times: the window, the sum of
    the histogram, and busy time with the window it was measured in (0 and 0 where it was not).
    """
    counts = (
        report.prefill_tokens,
        report.decode_tokens,
        report.prefix_query_tokens,
        report.prefix_hit_tokens,
        report.preemptions,
        report.steps,
        *report.itl.counts,
    )
    window_ms, share = report.window_ms, report.busy_share
    if share is None:
        return counts, (window_ms, report.itl.sum_ms, 0.0, 0.0)
    return counts, (window_ms, report.itl.sum_ms, share * window_ms, window_ms)


def _replica_signals(reporter: Reporter[ReplicaReport], now_ns: int, age_ms_max: float) -> ReplicaSignals:
    window = reporter.window(now_ns)
    window_ms, itl_ms, busy_ms, busy_window_ms = map(sum, zip(*reporter.times, strict=True)) if window else (0.0,) * 4
    seconds = window_ms / 1000 or 1.0
    prefill_tokens, decode_tokens, query_tokens, hit_tokens, preemptions, steps = reporter.sums[:6] or (0,) * 6
    age_ms = reporter.last.age_ms(now_ns)
    if reporter.itl is None or not window:
        reporter.itl = Histogram(tuple(reporter.sums[6:]), itl_ms) if window else _NO_GAPS
    return ReplicaSignals(
        reporter.last.value,
        age_ms,
        age_ms <= age_ms_max,
        window,
        window_ms,
        prefill_tokens / seconds,
        decode_tokens / seconds,
        query_tokens,
        hit_tokens,
        preemptions,
        steps,
        busy_ms / busy_window_ms if busy_window_ms else None,
        reporter.itl,
    )


_NO_GAPS = Histogram()
_BUCKETS = len(_NO_GAPS.counts)


def _gateway_figures(report: GatewayReport) -> Figures:
    """Counts: eight of requests and tokens, then the buckets of the four histograms. Times: the window, the sums of the
    histograms.
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
        *report.ttft.counts,
        *report.itl.counts,
        *report.e2e.counts,
        *report.ttft_error_ms.counts,
    )
    sums_ms = report.ttft.sum_ms, report.itl.sum_ms, report.e2e.sum_ms, report.ttft_error_ms.sum_ms
    return counts, (report.window_ms, *sums_ms)


class _Gateway:
    """One fresh gateway: its last report, and what its window of reports adds up to."""

    def __init__(self, reporter: Reporter[GatewayReport], now_ns: int) -> None:
        self.latest = reporter.last.value
        reporter.window(now_ns)
        self.times = reporter.times
        self.sums = reporter.sums or [0] * (8 + 4 * _BUCKETS)
        self.seconds = sum([times[0] for times in self.times]) / 1000 or 1.0

    def rate(self, number: int) -> float:
        """One of the eight counts, per second."""
        return self.sums[number] / self.seconds

    def buckets(self, number: int) -> list[int]:
        """Buckets of one of the four histograms."""
        begin = 8 + number * _BUCKETS
        return self.sums[begin : begin + _BUCKETS]


def _traffic(gateways: Sequence[_Gateway]) -> Traffic:
    def rate(number: int) -> float:
        return sum([g.rate(number) for g in gateways])

    def histogram(number: int) -> Histogram:
        counts = tuple(map(sum, zip(*[g.buckets(number) for g in gateways], strict=True)))
        return Histogram(counts, sum([times[1 + number] for g in gateways for times in g.times]))

    return Traffic(
        arrivals_ps=rate(0),
        routed_ps=rate(1),
        routed_prompt_tps=rate(2),
        prompt_tps=rate(3),
        output_tps=rate(4),
        succeeded_ps=rate(5),
        failed_ps=rate(6),
        inflight=sum(g.latest.inflight for g in gateways),
        queued=sum(g.latest.queued for g in gateways),
        predicted_prompt_tokens=sum(g.sums[2] for g in gateways),
        predicted_hit_tokens=sum(g.sums[7] for g in gateways),
        ttft=histogram(0),
        itl=histogram(1),
        e2e=histogram(2),
        ttft_error=histogram(3),
    )


def _work(fresh: Sequence[ReplicaSignals]) -> Work | None:
    if not fresh:
        return None
    latest = [r.latest for r in fresh]
    shares = [r.kv_tokens_used / r.kv_tokens_max for r in latest if r.kv_tokens_max > 0]
    return Work(
        running=sum(r.running for r in latest),
        waiting=sum(r.waiting for r in latest),
        http_inflight=sum(r.http_inflight for r in latest),
        prefill_tps=sum(r.prefill_tps for r in fresh),
        decode_tps=sum(r.decode_tps for r in fresh),
        kv_tokens_used=sum(r.kv_tokens_used for r in latest),
        kv_tokens_max=sum(r.kv_tokens_max for r in latest),
        kv_share_max=max(shares, default=None),
        prefix_query_tokens=sum(r.prefix_query_tokens for r in fresh),
        prefix_hit_tokens=sum(r.prefix_hit_tokens for r in fresh),
        preemptions=sum(r.preemptions for r in fresh),
        itl=merge(r.itl for r in fresh),
        busy_share=_mean([r.busy_share for r in fresh]),
        gpu_utilisation_share=_mean([r.gpu_utilisation_share for r in latest]),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _unknown_replicas(replicas: Sequence[ReplicaSignals], fleet: FleetView | None) -> int:
    """Replicas that run and say nothing: by Serve's count, else those that fell silent."""
    speaking = sum(1 for r in replicas if r.fresh and r.latest.state is not ReplicaState.DRAINING)
    if fleet is not None:
        return max(0, fleet.replicas_running - speaking)
    return sum(1 for r in replicas if not r.fresh and r.latest.state is not ReplicaState.DRAINING)
