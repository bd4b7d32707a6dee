"""Sense, the pure half: what reporters said, how old it is, and the fleet's totals over what is fresh.

A reporter is *fresh* while its last report is at most ``report_age_ms_max`` old. Each reporter's reports of the last
``WINDOW_MS`` (at most ``WINDOW_REPORTS_MAX``, see ``windows.py``) are kept, and rates are counts over the windows they
cover::

    rate = sum over fresh reporters of (sum of counts / sum of window_ms)

A lost report therefore makes a rate older, not lower. Counts are summed as reports come and go, so that a tick costs
what changed and not what is kept; they are whole numbers, so sums are exact. Every signal has an age and a confidence
(``Reporter.confidence`` in ``windows.py``). What gateways saw is in ``traffic.py``.

Three words for ignorance, all used by the decisions:

* *blind*: no gateway and no replica is fresh;
* *unknown replicas*: Serve runs more than report, or (where Serve's own word is missing) known ones fell silent;
* ``None`` in place of :class:`Traffic` or :class:`Work`: no gateway, or no replica, is fresh.

This module decides nothing. It must not read a clock: the receiver passes its own ``now_ns``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from policies.config import ControlConfig
from policies.control.starts import Start, StartBook, Starts
from policies.control.traffic import (
    ClassTraffic,
    GatewaySignals,
    GatewayWindow,
    TenantTraffic,
    Traffic,
    gateway_figures,
    tenant_rows,
    traffic,
)
from policies.control.windows import Ahead, Figures, Reporter, Reporters, whole_ns
from policies.measures import StartReport
from policies.roofline import Bound, Load, Utilisation, utilisation
from policies.types import (
    FleetView,
    GatewayReport,
    Histogram,
    ReplicaId,
    ReplicaReport,
    ReplicaState,
    Sampled,
)

__all__ = [
    "GATEWAYS_MAX", "REPLICAS_MAX", "Bound", "ClassTraffic", "GatewaySignals", "ModelSignals", "ReplicaSignals",
    "SignalBook", "Signals", "TenantTraffic", "Traffic", "Utilisation", "Work",
]  # fmt: skip

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
    confidence: float
    """In [0, 1]: how recent, complete and long its window is; 0 where it is not fresh."""
    gaps: int
    """Token gaps in the window: the count of :attr:`itl`."""
    sums: list[int]
    """Of the window, in the order of :func:`_replica_figures`; nobody changes them."""
    itl_ns: int
    """Sum of the gaps, in ns."""
    _itl: Histogram | None = field(default=None, repr=False, compare=False)
    _utilisation: tuple[Utilisation | None] | None = field(default=None, repr=False, compare=False)

    @property
    def itl(self) -> Histogram:
        """Token gaps of the window. Put together when first asked for."""
        if self._itl is None:
            self._itl = Histogram(tuple(self.sums[_BUCKETS_AT:]), self.itl_ns / 1e6) if self.sums else _NO_GAPS
        return self._itl

    @property
    def utilisation(self) -> Utilisation | None:
        """What its device does of what it could, over the window's busy time; ``None`` while it does nothing or nothing
        is known. Worked out when first asked for.
        """
        if self._utilisation is None:
            self._utilisation = (_utilisation_of(self),)
        return self._utilisation[0]

    @property
    def replica_id(self) -> ReplicaId:
        """Serve's unique id."""
        return self.latest.replica_id

    @property
    def serving(self) -> bool:
        """Fresh and in the state that takes requests."""
        return self.fresh and self.latest.state is ReplicaState.READY


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
    confidence: float = 0.0
    """In [0, 1]: of all replicas that run as far as is known, silent ones counting as 0."""
    age_ms: float = 0.0
    """Of the oldest report that counts."""

    @property
    def kv_share(self) -> float | None:
        """Share of all KV cache in use; ``None`` where no replica has told its size."""
        return self.kv_tokens_used / self.kv_tokens_max if self.kv_tokens_max else None

    @property
    def prefix_hit_share(self) -> float | None:
        """Share of looked-up prompt tokens found in prefix caches; ``None`` without any."""
        return self.prefix_hit_tokens / self.prefix_query_tokens if self.prefix_query_tokens else None


@dataclass(frozen=True, slots=True)
class ModelSignals:
    """What is known of one model: the part of :class:`Signals` that is its own."""

    model: str
    replicas: int
    """Known, the silent ones included."""
    traffic: Traffic | None
    work: Work | None


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
    gateways: tuple[GatewaySignals, ...] = ()
    """Every known gateway, sorted by id, the silent ones included."""
    by_model: Mapping[str, ModelSignals] = field(default_factory=dict)
    starts: Starts = field(default_factory=Starts)
    """Replicas that start, and starts that ended."""
    _chosen: dict[str, tuple[ReplicaSignals, ...]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def blind(self) -> bool:
        """Nothing fresh at all: hold."""
        return self.traffic is None and self.work is None

    @property
    def fresh(self) -> tuple[ReplicaSignals, ...]:
        """Replicas with a fresh report."""
        if "fresh" not in self._chosen:
            self._chosen["fresh"] = tuple([r for r in self.replicas if r.fresh])
        return self._chosen["fresh"]

    @property
    def serving(self) -> tuple[ReplicaSignals, ...]:
        """Fresh replicas that take requests."""
        if "serving" not in self._chosen:
            self._chosen["serving"] = tuple([r for r in self.fresh if r.latest.state is ReplicaState.READY])
        return self._chosen["serving"]

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
        self._gateways: Reporters[GatewayReport] = Reporters(GATEWAYS_MAX, config, gateway_figures, tenant_rows)
        self._fleet: Sampled[FleetView] | None = None
        self._starts = StartBook()
        self._made: dict[ReplicaId, tuple[Ahead[ReplicaReport], ReplicaSignals]] = {}
        """What reports since the last tick come to at the next one, if that comes when it should."""
        self._tick_ns = self._period_ns = 0
        """The last tick, and its distance from the one before."""

    @property
    def refused(self) -> int:
        """Reports refused because there were too many reporters."""
        return self._replicas.refused + self._gateways.refused

    def receive_replica(self, report: ReplicaReport, now_ns: int) -> bool:
        """Keep a replica's report; ``False`` when it was ignored."""
        reporter = self._replicas.receive(report.replica_id, report, now_ns)
        if reporter is None:
            return False
        ahead = reporter.ahead(max(now_ns, self._tick_ns + self._period_ns))
        made = _replica_signals(reporter, ahead, now_ns, self._config.report_age_ms_max)
        self._made[report.replica_id] = ahead, made
        return True

    def receive_gateway(self, report: GatewayReport, now_ns: int) -> bool:
        """Keep a gateway's report; ``False`` when it was ignored."""
        return self._gateways.receive(report.gateway_id, report, now_ns) is not None

    def receive_fleet(self, view: FleetView, now_ns: int) -> None:
        """Keep Serve's latest word on the fleet."""
        self._fleet = Sampled(view, now_ns)
        self._starts.receive_fleet(view, now_ns)

    def receive_start(self, report: StartReport, now_ns: int) -> Start | None:
        """Keep what a replica says of its start; the start, where a phase of it is over that can be counted."""
        return self._starts.receive(report, now_ns)

    def signals(self, now_ns: int) -> Signals:
        """Everything known at ``now_ns``; reporters silent for too long are forgotten."""
        self._replicas.forget(now_ns)
        self._gateways.forget(now_ns)
        age_max = self._config.report_age_ms_max
        self._tick_ns, self._period_ns = now_ns, now_ns - self._tick_ns if self._tick_ns else 0
        made, self._made = self._made, {}
        replicas = tuple([_present(made.get(r.name), r, now_ns, age_max) for r in self._replicas.items()])
        windows = [GatewayWindow(r, now_ns, age_max) for r in self._gateways.items()]
        fleet = self._fleet.value if self._fleet is not None and self._fleet.age_ms(now_ns) <= age_max else None
        models = sorted({r.latest.model for r in replicas} | {g.latest.model for g in windows if g.fresh})
        unknown = _unknown_replicas(replicas, fleet)
        of_all = _model_signals(models[0] if models else "", replicas, windows, unknown)
        return Signals(
            now_ns=now_ns,
            model=of_all.model,
            replicas=replicas,
            gateways_known=len(windows),
            gateways_fresh=sum(g.fresh for g in windows),
            traffic=of_all.traffic,
            work=of_all.work,
            fleet=fleet,
            unknown_replicas=unknown,
            gateways=tuple([GatewaySignals(g.latest, g.age_ms, g.fresh, g.confidence) for g in windows]),
            by_model={of_all.model: of_all} if len(models) == 1 else _by_model(models, replicas, windows),
            starts=self._starts.step(now_ns),
        )


def _model_signals(
    model: str, replicas: Sequence[ReplicaSignals], gateways: Sequence[GatewayWindow], unknown: int
) -> ModelSignals:
    """What the fresh ones of ``replicas`` and ``gateways`` add up to; ``unknown`` more replicas run and say nothing."""
    fresh, heard = [r for r in replicas if r.fresh], [g for g in gateways if g.fresh]
    trust = sum([g.confidence for g in heard]) / len(gateways) if gateways else 0.0
    work = _work(fresh, sum([r.confidence for r in fresh]) / (len(fresh) + unknown)) if fresh else None
    return ModelSignals(model, len(replicas), traffic(heard, trust) if heard else None, work)


def _by_model(
    models: Sequence[str], replicas: Sequence[ReplicaSignals], gateways: Sequence[GatewayWindow]
) -> dict[str, ModelSignals]:
    found = {}
    for model in models:
        own = [r for r in replicas if r.latest.model == model]
        found[model] = _model_signals(
            model, own, [g for g in gateways if g.latest.model == model], _unknown_replicas(own, None)
        )
    return found


_BUCKETS_AT = 7
"""Place of the first bucket among a replica's counts."""
_NO_SUMS = (0,) * _BUCKETS_AT
_NO_TIMES = (0,) * 4


def _replica_figures(report: ReplicaReport) -> Figures:
    """Counts: six of tokens, preemptions and steps, that of gaps, then the buckets of the histogram. Times: the window,
    the sum of the histogram, and busy time with the window it was measured in (0 and 0 where it was not).
    """
    buckets = report.itl.counts
    counts = (
        report.prefill_tokens,
        report.decode_tokens,
        report.prefix_query_tokens,
        report.prefix_hit_tokens,
        report.preemptions,
        report.steps,
        sum(buckets),
        *buckets,
    )
    window_ns, itl_ns, share = whole_ns(report.window_ms), whole_ns(report.itl.sum_ms), report.busy_share
    if share is None or not math.isfinite(share):
        return counts, (window_ns, itl_ns, 0, 0)
    return counts, (window_ns, itl_ns, round(share * window_ns), window_ns)


def _replica_signals(
    reporter: Reporter[ReplicaReport], ahead: Ahead[ReplicaReport], now_ns: int, age_ms_max: float
) -> ReplicaSignals:
    """A replica at ``now_ns``, at which ``ahead`` is its window."""
    _, window, sums, times = ahead
    window_ns, itl_ns, busy_ns, busy_window_ns = times or _NO_TIMES
    window_ms = window_ns / 1e6
    seconds = window_ns / 1e9 or 1.0
    prefill_tokens, decode_tokens, query_tokens, hit_tokens, preemptions, steps, gaps = sums[:_BUCKETS_AT] or _NO_SUMS
    last = reporter.last
    age_ms = (now_ns - last.received_ns) / 1e6
    return ReplicaSignals(
        last.value,
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
        busy_ns / busy_window_ns if busy_window_ns else None,
        reporter.confidence(window[0] if window else None, now_ns, window_ms, age_ms_max),
        gaps,
        sums,
        itl_ns,
    )


def _present(
    made: tuple[Ahead[ReplicaReport], ReplicaSignals] | None,
    reporter: Reporter[ReplicaReport],
    now_ns: int,
    age_ms_max: float,
) -> ReplicaSignals:
    """What was made of the last report for this tick, with its age; made anew where the tick is not as expected."""
    if made is None or not reporter.turn_to(made[0], now_ns):
        reporter.window(now_ns)
        return _replica_signals(reporter, reporter.ahead(now_ns), now_ns, age_ms_max)
    found = made[1]
    found.age_ms = age_ms = (now_ns - reporter.last.received_ns) / 1e6
    found.fresh = age_ms <= age_ms_max
    if age_ms > found.latest.window_ms or not found.fresh:
        found.confidence = reporter.confidence(found.window[0], now_ns, found.window_ms, age_ms_max)
    return found


def _utilisation_of(replica: ReplicaSignals) -> Utilisation | None:
    latest, busy_share, steps = replica.latest, replica.busy_share, replica.steps
    if not busy_share or not steps:
        return None
    seconds = replica.window_ms / 1e3
    load = Load(
        tokens=(replica.prefill_tps + replica.decode_tps) * seconds,
        prefill_tokens=replica.prefill_tps * seconds,
        steps=steps,
        running=replica.decode_tps * seconds / steps,
        kv_tokens=_mean_kv_tokens(replica),
        busy_s=busy_share * seconds,
        busy_share=busy_share,
    )
    return utilisation(load, latest.roofline, latest.step_model, latest.gpu)


_NO_GAPS = Histogram()


def _work(fresh: Sequence[ReplicaSignals], confidence: float) -> Work:
    latest = [r.latest for r in fresh]
    shares = [r.kv_tokens_used / r.kv_tokens_max for r in latest if r.kv_tokens_max > 0]
    columns = list(map(sum, zip(*[r.sums for r in fresh if r.sums], strict=True)))
    _, _, query_tokens, hit_tokens, preemptions, _, gaps = columns[:_BUCKETS_AT] or _NO_SUMS
    itl_ms = sum([r.itl_ns / 1e6 for r in fresh])
    return Work(
        running=sum([r.running for r in latest]),
        waiting=sum([r.waiting for r in latest]),
        http_inflight=sum([r.http_inflight for r in latest]),
        prefill_tps=sum([r.prefill_tps for r in fresh]),
        decode_tps=sum([r.decode_tps for r in fresh]),
        kv_tokens_used=sum([r.kv_tokens_used for r in latest]),
        kv_tokens_max=sum([r.kv_tokens_max for r in latest]),
        kv_share_max=max(shares, default=None),
        prefix_query_tokens=query_tokens,
        prefix_hit_tokens=hit_tokens,
        preemptions=preemptions,
        itl=Histogram(tuple(columns[_BUCKETS_AT:]), itl_ms) if gaps or itl_ms else _NO_GAPS,
        busy_share=_mean([r.busy_share for r in fresh]),
        gpu_utilisation_share=_mean([r.gpu_utilisation_share for r in latest]),
        confidence=confidence,
        age_ms=max([r.age_ms for r in fresh]),
    )


def _mean_kv_tokens(replica: ReplicaSignals) -> float:
    """Held at the ends of reports, weighed by the steps that each of them tells of."""
    reports = [sampled.value for sampled in replica.window]
    steps = sum([r.steps for r in reports])
    return sum([r.kv_tokens_used * r.steps for r in reports]) / steps if steps > 0 else replica.latest.kv_tokens_used


def _mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _unknown_replicas(replicas: Sequence[ReplicaSignals], fleet: FleetView | None) -> int:
    """Replicas that run and say nothing: by Serve's count, else those that fell silent."""
    stay = [r.fresh for r in replicas if r.latest.state is not ReplicaState.DRAINING]
    speaking = sum(stay)
    return len(stay) - speaking if fleet is None else max(0, fleet.replicas_running - speaking)
