"""Sense, the pure half: what reporters said, how old it is, and the fleet's totals over what is fresh.

A reporter is *fresh* while its last report is at most ``report_age_ms_max`` old. Each reporter's reports of the last
``WINDOW_MS`` (at most ``WINDOW_REPORTS_MAX``, see ``windows.py``) are kept, and rates are counts over the windows they
cover::

    rate = sum over fresh reporters of (sum of counts / sum of window_ms)

A lost report therefore makes a rate older, not lower. Counts are summed as reports come and go, so that a tick costs
what changed and not what is kept; they are whole numbers, so sums are exact. Every signal has an age and a confidence
(``Reporter.confidence`` in ``windows.py``). What replicas did is in ``replicas.py``, what gateways saw in
``traffic.py``.

Three words for ignorance, all used by the decisions:

* *blind*: no gateway and no replica is fresh;
* *unknown replicas*: Serve runs more than report, or (where Serve's own word is missing) known ones fell silent;
* ``None`` in place of :class:`Traffic` or :class:`Work`: no gateway, or no replica, is fresh.

This module decides nothing. It must not read a clock: the receiver passes its own ``now_ns``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from policies.config import ControlConfig
from policies.control.replicas import ReplicaBook, ReplicaSignals, Work
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
from policies.control.windows import Reporters
from policies.measures import StartReport
from policies.roofline import Bound, Utilisation
from policies.types import FleetView, GatewayReport, ReplicaId, ReplicaReport, ReplicaState, Sampled

__all__ = [
    "GATEWAYS_MAX", "REPLICAS_MAX", "Bound", "ClassTraffic", "GatewaySignals", "ModelSignals", "ReplicaSignals",
    "SignalBook", "Signals", "TenantTraffic", "Traffic", "Utilisation", "Work",
]  # fmt: skip

REPLICAS_MAX = 2_048
"""Replicas whose reports are kept; one more is refused unless a silent one can make room."""

GATEWAYS_MAX = 256
"""Gateways whose reports are kept, likewise."""


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
    ids: tuple[ReplicaId, ...] = ()
    """Of :attr:`replicas`; the same object for as long as they are the same."""
    preempting: tuple[int, ...] = ()
    """Places in :attr:`replicas` of those whose last report tells of preemptions."""
    starts: Starts = field(default_factory=Starts)
    """Replicas that start, and starts that ended."""
    warm: int = 0
    """Replicas that are ready and out of rotation, and are left out of :attr:`serving` and :attr:`fleet`."""
    warm_wanted: int = 0
    """How many of them there should be."""
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
    def serving_ids(self) -> tuple[ReplicaId, ...]:
        """Of :attr:`serving`."""
        return self.ids if self.serving is self.replicas else tuple([r.replica_id for r in self.serving])

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
        self._replicas = ReplicaBook(REPLICAS_MAX, config)
        self._gateways: Reporters[GatewayReport] = Reporters(GATEWAYS_MAX, config, gateway_figures, tenant_rows)
        self._fleet: Sampled[FleetView] | None = None
        self._starts = StartBook()
        self._tick_ns = self._period_ns = 0
        """The last tick, and its distance from the one before."""

    @property
    def refused(self) -> int:
        """Reports refused because there were too many reporters."""
        return self._replicas.refused + self._gateways.refused

    def receive_replica(self, report: ReplicaReport, now_ns: int) -> bool:
        """Keep a replica's report; ``False`` when it was ignored."""
        return self._replicas.receive(report, now_ns, self._tick_ns + self._period_ns)

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
        self._gateways.forget(now_ns)
        age_max = self._config.report_age_ms_max
        self._tick_ns, self._period_ns = now_ns, now_ns - self._tick_ns if self._tick_ns else 0
        book = self._replicas
        replicas = book.look(now_ns)
        windows = [GatewayWindow(r, now_ns, age_max) for r in self._gateways.items()]
        fleet = self._fleet.value if self._fleet is not None and self._fleet.age_ms(now_ns) <= age_max else None
        models = sorted(book.models() | {g.latest.model for g in windows if g.fresh})
        unknown = book.unknown(fleet)
        seen, work = _traffic(windows), book.work(unknown)
        model = models[0] if models else ""
        chosen = {"fresh": replicas} if book.all_fresh else {}
        if book.all_serving:
            chosen["serving"] = replicas
        return Signals(
            now_ns=now_ns,
            model=model,
            replicas=replicas,
            gateways_known=len(windows),
            gateways_fresh=sum(g.fresh for g in windows),
            traffic=seen,
            work=work,
            fleet=fleet,
            unknown_replicas=unknown,
            gateways=tuple([GatewaySignals(g.latest, g.age_ms, g.fresh, g.confidence) for g in windows]),
            by_model=(
                {model: ModelSignals(model, len(replicas), seen, work)}
                if len(models) == 1
                else {name: _of_model(name, book, windows) for name in models}
            ),
            ids=book.ids,
            preempting=book.preempting(),
            starts=self._starts.step(now_ns),
            _chosen=chosen,
        )


def _traffic(gateways: Sequence[GatewayWindow]) -> Traffic | None:
    """What the fresh ones of ``gateways`` saw together; ``None``: none is."""
    heard = [g for g in gateways if g.fresh]
    return traffic(heard, sum([g.confidence for g in heard]) / len(gateways)) if heard else None


def _of_model(model: str, book: ReplicaBook, gateways: Sequence[GatewayWindow]) -> ModelSignals:
    """What replicas and gateways of one model of several come to."""
    work = book.work(book.unknown(None, model), model)
    return ModelSignals(model, book.known(model), _traffic([g for g in gateways if g.latest.model == model]), work)
