"""The controller of one pool: a driver of the live ``build_control`` and ``control.loop.tick``.

It ticks on a fixed grid from the begin of its life, each time a little late as timers are, answers reports with its
last plan (``None`` before its first tick), and can be killed: reports then go nowhere, plans grow old, and everyone
falls back to the local rule. Its successor has a new epoch and knows nothing. The first pool's controller also lends
gateways their tenants' budgets, in the same exchange; periods are numbered by the run's own time.

What this must not do: decide.
"""

from __future__ import annotations

from dataclasses import replace

from autoscaling.simulator.context import Context, ns
from autoscaling.simulator.spec import Pool
from autoscaling.warm import WarmPool
from policies.admission.lease_book import LeaseBook
from policies.admission.tenants import TenantBook
from policies.build import build_control
from policies.control.loop import ControlState, tick
from policies.control.scaler import ScaleAdvice
from policies.control.signals import Signals
from policies.measures import StartReport
from policies.types import Decision, FleetView, GatewayReport, Plan, Reason, ReplicaReport


class Unscaled:
    """The ``Scaler`` of a pool whose number of replicas is fixed: no opinion."""

    def recommend(self, signals: Signals, now_ns: int) -> ScaleAdvice:  # noqa: ARG002 - the protocol's arguments
        """Leave the number alone."""
        return ScaleAdvice(None, Reason("Fixed", "the number of replicas is fixed"))


class Controller:
    """See the module. ``decisions`` of all lives are appended to the list that is passed in."""

    def __init__(self, ctx: Context, pool: Pool, index: int, decisions: list[Decision]) -> None:
        self._ctx = ctx
        self._pool = pool
        self._index = index
        self._decisions = decisions
        self._tick_ns = ns(ctx.scenario.config.control.tick_ms)
        self._due_ns = 0
        self._rng = ctx.rng(f"controller/{index}")
        self._state: ControlState | None = None
        self._plan: Plan | None = None
        self._leases: LeaseBook | None = None
        self._told_life: dict[str, int] = {}
        """Life that each gateway has told all it knows of budgets."""
        self._life = 0

    def begin(self, now_ns: int) -> None:
        """A new life."""
        self._life += 1
        config = self._ctx.scenario.config
        scaler = self._pool.scaler(config) if self._pool.scaler is not None else Unscaled()
        levers = self._pool.levers(config) if self._pool.levers is not None else ()
        self._state = build_control(config, scaler, f"pool{self._index}-life{self._life}", levers, WarmPool(config))
        self._plan = None
        if self._index == 0 and any(tenant.budget_usd_max is not None for tenant in config.tenants.values()):
            self._leases = LeaseBook(replace(config, gateways=self._ctx.scenario.gateways), now_ns)
        self._due_ns = now_ns
        self._plan_tick()

    def _plan_tick(self) -> None:
        self._due_ns += self._tick_ns
        late_ns = round(self._rng.random() * self._ctx.delays.tick_late)
        self._ctx.queue.at(self._due_ns + late_ns, self._on_tick, self._life)

    def kill(self) -> None:
        """The process is gone."""
        self._state = self._plan = self._leases = None
        self._life += 1

    @property
    def state(self) -> ControlState | None:
        """What it remembers, for checkers; ``None``: there is no controller."""
        return self._state

    @property
    def alive(self) -> bool:
        """Whether there is one."""
        return self._state is not None

    def receive_replica(self, report: ReplicaReport, now_ns: int) -> Plan | None:
        """Take a replica's report; the current plan is the answer."""
        if self._state is not None:
            self._state.receive_replica(report, now_ns)
        return self._plan

    def receive_start(self, report: StartReport, now_ns: int) -> None:
        """Take what a replica says of its start."""
        if self._state is not None:
            self._state.receive_start(report, now_ns)

    def receive_gateway(self, report: GatewayReport, now_ns: int, tenants: TenantBook | None = None) -> Plan | None:
        """Take a gateway's report, and lend it what its tenants want; the current plan is the answer."""
        if self._state is not None:
            self._state.receive_gateway(report, now_ns)
        if self._leases is not None and tenants is not None:
            self._lend(self._leases, report.gateway_id, tenants, now_ns)
        return self._plan

    def _lend(self, leases: LeaseBook, gateway_id: str, tenants: TenantBook, now_ns: int) -> None:
        complete = self._told_life.get(gateway_id) != self._life
        asks = tenants.asks(now_ns, again=complete)
        tenants.receive(asks, leases.answer(gateway_id, asks, now_ns, complete), now_ns)
        self._told_life[gateway_id] = self._life

    def receive_fleet(self, view: FleetView, now_ns: int) -> Plan | None:
        """Take Serve's numbers; the current plan is the answer."""
        if self._state is not None:
            self._state.receive_fleet(view, now_ns)
        return self._plan

    def _on_tick(self, now_ns: int, life: int) -> None:
        state = self._state
        if state is None or life != self._life:
            return
        result = tick(state, now_ns)
        self._plan = result.plan
        self._decisions.extend(result.decisions)
        self._ctx.counters["ticks"] += 1
        if self._ctx.observer is not None:
            self._ctx.observer.tick(now_ns, self._index, result)
        self._plan_tick()
