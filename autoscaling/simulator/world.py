"""A run: puts the world together around the live policies, lets time pass, and gathers what it left.

    run(scenario) -> RunResult: rows of all client requests, use of each pool, decisions, counters, digest

Wiring is all this does; the folder's README shows the picture. Names of counters: ``context.COUNTERS``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

from autoscaling.simulator.client import Clients
from autoscaling.simulator.context import Call, Context
from autoscaling.simulator.context import Observer as Observer  # noqa: PLC0414 - the public name is here
from autoscaling.simulator.control import Controller
from autoscaling.simulator.faults import Faults
from autoscaling.simulator.gateway import Gateway
from autoscaling.simulator.handover import Handover
from autoscaling.simulator.line import Line
from autoscaling.simulator.records import PoolUse, RunResult
from autoscaling.simulator.replica import Phase
from autoscaling.simulator.serve import PoolServe
from autoscaling.simulator.spec import Pool, Scenario
from policies.events import Finish
from policies.routing.sample import Sample
from policies.types import Decision, Histogram, ReplicaId


class ScenarioError(ValueError):
    """A scenario that cannot be run; the message names the field and its value."""


def run(
    scenario: Scenario,
    *,
    observer: Observer | None = None,
    progress: Callable[[int, int], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> RunResult:
    """Simulate ``scenario`` from 0 until everything is answered.

    Args:
        scenario: what happens; the same one gives the same result, whatever the hash seed.
        observer: sees every event; for checkers.
        progress: told (requests that ended, simulated time in ns) every few thousand events.
        stop: asked as often; ``True`` ends the run where it is, and what is open counts as lost.

    Raises:
        ScenarioError: pools or gateways that cannot be.
        FaultError: a fault that cannot be.
        SourceError: arrivals that go back in time, or requests without tokens.
    """
    _check(scenario)
    world = World(scenario, observer)
    return world.run(progress, stop)


def _check(scenario: Scenario) -> None:
    roles = tuple(p.role for p in scenario.pools)
    if roles not in (("both",), ("prefill", "decode")):
        raise ScenarioError(f"pools: roles {roles}: must be ('both',) or ('prefill', 'decode')")
    if scenario.gateways < 1:
        raise ScenarioError(f"gateways: {scenario.gateways}: must be at least 1")
    for i, pool in enumerate(scenario.pools):
        if pool.replicas < 0:
            raise ScenarioError(f"pools[{i}].replicas: {pool.replicas}: must not be negative")
        if pool.ongoing_max is not None and pool.ongoing_max < 1:
            raise ScenarioError(f"pools[{i}].ongoing_max: {pool.ongoing_max}: must be at least 1")
        if not pool.profile.cold_start_ms >= 0:
            raise ScenarioError(f"pools[{i}].profile.cold_start_ms: {pool.profile.cold_start_ms}: must not be negative")
    _check_limits(scenario)


def _check_limits(scenario: Scenario) -> None:
    """Numbers that have a range."""
    clients, network = scenario.clients, scenario.network
    for path, value, fine, words in (
        ("clients.patience_ms", clients.patience_ms, clients.patience_ms is None or clients.patience_ms > 0, "above 0"),
        ("clients.retries_max", clients.retries_max, clients.retries_max >= 0, "at least 0"),
        ("clients.retry_pause_ms", clients.retry_pause_ms, clients.retry_pause_ms >= 0, "at least 0"),
        ("clients.abort_share", clients.abort_share, 0 <= clients.abort_share <= 1, "in [0, 1]"),
        ("start_spread_share", scenario.start_spread_share, 0 <= scenario.start_spread_share <= 1, "in [0, 1]"),
        ("duration_ns", scenario.duration_ns, scenario.duration_ns is None or scenario.duration_ns >= 0, "at least 0"),
        ("drain_ns_max", scenario.drain_ns_max, scenario.drain_ns_max >= 0, "at least 0"),
        ("settle_ns", scenario.settle_ns, scenario.settle_ns >= 0, "at least 0"),
    ):
        if not fine:
            raise ScenarioError(f"{path}: {value}: must be {words}")
    for name in ("stats_period_ms", "report_period_ms", "health_period_ms"):
        if not getattr(network, name) > 0:
            raise ScenarioError(f"network.{name}: {getattr(network, name)}: must be above 0")
    for name in network.__slots__:
        if not 0 <= getattr(network, name) < float("inf"):
            raise ScenarioError(f"network.{name}: {getattr(network, name)}: must be finite and not negative")


class World:
    """Everything of one run."""

    def __init__(self, scenario: Scenario, observer: Observer | None) -> None:
        ctx = self._ctx = Context(scenario, observer)
        self._decisions: list[Decision] = []
        self._controllers = [self._controller(pool, i) for i, pool in enumerate(scenario.pools)]
        self._pools = [
            PoolServe(ctx, pool, i, controller)
            for i, (pool, controller) in enumerate(zip(scenario.pools, self._controllers, strict=True))
        ]
        routed = self._pools[0]
        self._line = None
        if routed.pool.ongoing_max is not None:
            self._line = Line(routed.by_id, routed.pool.ongoing_max)
            routed.on_room = self._line.room
        models = [p.model for p in self._pools]
        self._gateways = [
            Gateway(ctx, i, models, routed.by_id, self._line, self._controllers, self._ended)
            for i in range(scenario.gateways)
        ]
        routed.on_members = self._on_members
        routed.queued = self._queued
        for pool in self._pools:
            pool.on_itl = self._on_itl
        if len(self._pools) > 1:
            Handover(ctx, *self._pools)
        self._clients = Clients(ctx, scenario.source(ctx.rng("source")), self._gateways)
        self._faults = Faults(ctx, self._pools, self._controllers, self._on_blind)
        self._blind_until_ns = 0
        self._itl_turn = 0
        self._stats: dict[ReplicaId, Sample] = {}

    @property
    def now_ns(self) -> int:
        """Time of the event that runs, or of the last one."""
        return self._ctx.queue.now_ns

    @property
    def gateways(self) -> list[Gateway]:
        """For checkers, like the two below: to look at, not to change."""
        return self._gateways

    @property
    def pools(self) -> list[PoolServe]:
        """One, or prefill and decode."""
        return self._pools

    @property
    def controllers(self) -> list[Controller]:
        """One of each pool."""
        return self._controllers

    def _controller(self, pool: Pool, index: int) -> Controller:
        return Controller(self._ctx, pool, index, self._decisions)

    def run(self, progress: Callable[[int, int], None] | None, stop: Callable[[], bool] | None) -> RunResult:
        """Let time pass until the end."""
        ctx, queue = self._ctx, self._ctx.queue
        for pool in self._pools:
            pool.begin()
        self._collect(0, None)
        for gateway in self._gateways:
            gateway.take_stats(self._stats, 0)
            gateway.take_members(self._pools[0].members(), 0)
            gateway.begin()
        for controller in self._controllers:
            controller.begin(0)
        self._clients.begin()

        def look() -> bool:
            if progress is not None:
                progress(len(self._clients.records), queue.now_ns)
            return stop is not None and stop()

        queue.run(look)
        self._clients.give_up(queue.now_ns)
        if progress is not None:
            progress(len(self._clients.records), queue.now_ns)
        if ctx.observer is not None:
            for gateway in self._gateways:
                ctx.observer.end(queue.now_ns, gateway.index, gateway.counts())
        ctx.counters["events"] = queue.events
        return self._result([pool.use(queue.now_ns) for pool in self._pools])

    def _result(self, pools: list[PoolUse]) -> RunResult:
        scenario, records, counters = self._ctx.scenario, self._clients.records, self._ctx.counters
        digest = hashlib.sha256()
        records.update_digest(digest)
        for decision in self._decisions:
            digest.update(repr(decision).encode())
        digest.update(repr(sorted(counters.items())).encode())
        return RunResult(
            scenario=scenario.name,
            seed=scenario.seed,
            records=records,
            pools=pools,
            decisions=self._decisions,
            counters=counters,
            end_ns=self._ctx.queue.now_ns,
            digest=digest.hexdigest(),
        )

    # --- between the parts --------------------------------------------------------------------------------------------

    def _ended(self, call: Call, finish: Finish, now_ns: int) -> None:
        self._clients.ended(call, finish, now_ns)

    def _queued(self) -> int:
        return sum(len(g.waiting) + g.in_line for g in self._gateways)

    def _on_members(self, members: tuple[ReplicaId, ...], now_ns: int) -> None:
        self._ctx.queue.at(now_ns + self._ctx.delays.membership, self._deliver_members, members)

    def _deliver_members(self, now_ns: int, members: tuple[ReplicaId, ...]) -> None:
        for gateway in self._gateways:
            gateway.take_members(members, now_ns)
        if self._line is not None:
            self._line.room(now_ns)

    def _collect(self, now_ns: int, _: object) -> None:
        """Serve asks every running replica of the routed pool for its sample; silent ones keep their last."""
        queue, delays = self._ctx.queue, self._ctx.delays
        queue.at(now_ns + delays.stats, self._collect)
        last, counters = self._stats, self._ctx.counters
        stats: dict[ReplicaId, Sample] = {}
        for replica in self._pools[0].running():
            if replica.phase is Phase.READY and now_ns >= replica.muted_until_ns:
                stats[replica.id] = replica.routing_stats(now_ns)
                counters["samples"] += 1
            elif replica.id in last:
                stats[replica.id] = last[replica.id]
        self._stats = stats
        queue.at(now_ns + delays.stats_lag, self._deliver_stats, stats)

    def _deliver_stats(self, now_ns: int, stats: Mapping[ReplicaId, Mapping[str, object]]) -> None:
        if now_ns < self._blind_until_ns:
            return
        for gateway in self._gateways:
            gateway.take_stats(stats, now_ns)

    def _on_blind(self, until_ns: int) -> None:
        self._blind_until_ns = max(self._blind_until_ns, until_ns)

    def _on_itl(self, itl: Histogram) -> None:
        """Gaps that engines made are counted by one gateway after the other."""
        self._gateways[self._itl_turn].meter.itl.plus(itl)
        self._itl_turn = (self._itl_turn + 1) % len(self._gateways)
