"""Ray Serve's side of one pool: how many replicas there are, who starts, who leaves, and what gateways learn of it.

    starting + ready < target   start as many; a failed start is tried again at Serve's next loop
    starting + ready > target   those still starting go first, the newest first, then the newest ready ones, which drain
    a dead replica              is noticed at its next health check and replaced
    a stuck replica             is replaced after three failed checks in a row; it drains, and nobody waits for it
    a retired one               likewise, because it says itself that it is not well

Once a second Serve tells the controller its numbers and takes its plan; the plan in force (the live ``PlanFollower``)
sets the target as ``deployments/scaling.py`` does, or the scenario's ``local_rule`` decides, which may be that very
function. Serve's behaviour was read in Ray 2.60 (``_private/deployment_state.py``, ``deployment_scheduler.py``): those
that do not run yet are stopped before those that do, newer before older ones; failed starts are tried again at once,
without end once a replica of the version ran; a crashed actor is unhealthy at the next check, a failing one at the
third in a row, and is then stopped gracefully.

What this must not do: decide how many replicas there should be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from autoscaling.simulator.context import Attempt, Context, ns
from autoscaling.simulator.control import Controller
from autoscaling.simulator.records import FleetSample, PoolUse
from autoscaling.simulator.replica import LEAVING, Phase, Replica, Totals
from autoscaling.simulator.spec import Pool
from policies.measures import StartPhase, StartReport
from policies.plan_follower import PlanFollower
from policies.types import FleetView, Histogram, Mode, Plan

if TYPE_CHECKING:
    from autoscaling.simulator.engine import EngineWindow

EXCHANGE_NS = 1_000_000_000
"""Period of Serve's exchange with the controller, and of the pool's timeline."""

WAKE_AFTER_NS = 20_000_000_000
"""As in ``deployments/scaling.py``: without a plan for this long a model that sleeps is woken."""

LOOP_NS = 100_000_000
"""Period of Serve's control loop: a failed start is seen and tried again after it."""

UNHEALTHY_CHECKS = 3
"""Failed health checks in a row that end a replica."""

HOUR_NS = 3_600_000_000_000


class PoolServe:
    """See the module."""

    def __init__(self, ctx: Context, pool: Pool, index: int, controller: Controller) -> None:
        split = len(ctx.scenario.pools) > 1
        self.pool = pool
        self.model = f"{pool.profile.model}/{pool.role}" if split else pool.profile.model
        self.is_prefill = pool.role == "prefill"
        self.is_decode = pool.role == "decode"
        self.controller = controller
        self.replicas: dict[str, Replica] = {}
        """Those that are not gone as far as Serve knows, oldest first."""
        self.by_id: dict[str, Replica] = {}
        """Every replica there ever was."""
        self.target = pool.replicas
        self.on_members: Callable[[tuple[str, ...], int], None] | None = None
        """Told the ids of the running replicas each time they changed."""
        self.on_prefilled: Callable[[Attempt, int], None] | None = None
        self.on_room: Callable[[int], None] | None = None
        self.on_itl: Callable[[Histogram], None] | None = None
        self.queued: Callable[[], int] = int
        """Requests that wait in gateways."""
        self.starts_fail_until_ns = 0
        self.timeline: list[FleetSample] = []
        self._ctx = ctx
        self._index = index
        self._made = 0
        self._rng = ctx.rng(f"serve/{index}")
        self._follower = PlanFollower()
        self._totals = Totals()
        self._alone_since_ns: int | None = None
        """Since when there has been no fresh plan."""
        self._lived_ns = self._served_ns = self._starts = self._most = 0

    # --- life of the pool ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Everybody asked for is ready at 0."""
        for _ in range(self.pool.replicas):
            replica = self._make(0)
            replica.become_ready(0, self.pool.profile.cold_start_ms)
        self._most = len(self.replicas)
        self._ctx.queue.at(EXCHANGE_NS // 2, self._on_exchange)

    def of_phase(self, phase: Phase) -> list[Replica]:
        """Replicas in ``phase``, oldest first."""
        return [r for r in self.replicas.values() if r.phase is phase]

    def _make(self, now_ns: int) -> Replica:
        name = self.pool.role if self.pool.role != "both" else "replica"
        replica = Replica(self._ctx, self, f"{name}-{self._made:05d}", now_ns)
        self._made += 1
        self._starts += 1
        self._ctx.counters["starts"] += 1
        self.replicas[replica.id] = self.by_id[replica.id] = replica
        replica.enter(Phase.STARTING, now_ns)
        return replica

    def _start(self, now_ns: int) -> None:
        replica = self._make(now_ns)
        spread = self._ctx.scenario.start_spread_share * (2 * self._rng.random() - 1)
        took_ns = ns(self.pool.profile.cold_start_ms * (1 + spread))
        done = self._on_start_failed if now_ns < self.starts_fail_until_ns else self._on_started
        self._ctx.queue.at(now_ns + took_ns, done, replica)

    def _on_started(self, now_ns: int, replica: Replica) -> None:
        if replica.phase is not Phase.STARTING:
            return
        age_ms = (now_ns - replica.began_ns) / 1e6
        replica.become_ready(now_ns, age_ms)
        self._tell_start(StartReport(replica.id, self.model, StartPhase.FIRST_TOKEN, age_ms), now_ns)
        self._changed(now_ns)

    def _on_start_failed(self, now_ns: int, replica: Replica) -> None:
        if replica.phase is not Phase.STARTING:
            return
        self._ctx.counters["starts_failed"] += 1
        age_ms = (now_ns - replica.began_ns) / 1e6
        report = StartReport(replica.id, self.model, StartPhase.LOAD, age_ms, failed="a fault of the scenario")
        self._tell_start(report, now_ns)
        self._remove(replica, Phase.DEAD, now_ns)
        self._ctx.queue.at(now_ns + LOOP_NS, self._on_loop)

    def _tell_start(self, report: StartReport, now_ns: int) -> None:
        if self._ctx.scenario.config.scaling.replicas_min == 0:
            self.controller.receive_start(report, now_ns)

    def _on_loop(self, now_ns: int, _: object) -> None:
        self._reconcile(now_ns)

    # --- the number ---------------------------------------------------------------------------------------------------

    def set_target(self, target: int, now_ns: int) -> None:
        """Want ``target`` replicas."""
        self.target = target
        self._reconcile(now_ns)

    def _reconcile(self, now_ns: int) -> None:
        starting, running = self.of_phase(Phase.STARTING), self.running()
        missing = self.target - len(starting) - len(running)
        if missing > 0:
            for _ in range(missing):
                self._start(now_ns)
            self._most = max(self._most, len(self.replicas))
        if missing >= 0:
            return
        for replica in [*reversed(starting), *reversed(running)][:-missing]:
            if replica.phase is Phase.STARTING:
                self._remove(replica, Phase.STOPPED, now_ns)
            elif replica.phase is Phase.DEAD:
                del self.replicas[replica.id]
            else:
                replica.drain(now_ns)
        if -missing > len(starting):
            self._changed(now_ns)

    def _on_exchange(self, now_ns: int, _: object) -> None:
        """Tell the controller, take its plan, follow it."""
        self._ctx.queue.at(now_ns + EXCHANGE_NS, self._on_exchange)
        low, high = self._bounds()
        view = FleetView(len(self.running()), self.target, low, high)
        plan = self.controller.receive_fleet(view, now_ns)
        if plan is not None:
            self._follower.receive(plan, now_ns)
        target = self._wanted(low, high, now_ns)
        if target != self.target:
            self.set_target(target, now_ns)
        else:
            self._reconcile(now_ns)
        self._sample(now_ns)

    def _bounds(self) -> tuple[int, int]:
        if self.pool.scaler is None:
            return self.pool.replicas, self.pool.replicas
        scaling = self._ctx.scenario.config.scaling
        return scaling.replicas_min, scaling.replicas_max

    def _wanted(self, low: int, high: int, now_ns: int) -> int:
        """As ``deployments/scaling.py``: the plan's number, else the local rule's, else what there is; in bounds.
        A pool without a scaler keeps its number.
        """
        config = self._ctx.scenario.config
        held = max(low, min(high, self.target))
        plan = self._follower.current(now_ns)
        acting = config.scaling.enabled and config.control.mode is Mode.ACT
        if self.pool.scaler is None or (plan is None and not acting):
            return held
        if plan is not None:
            self._alone_since_ns = None
        elif self._alone_since_ns is None:
            self._alone_since_ns = now_ns
        elif self.target < 1 and now_ns - self._alone_since_ns > WAKE_AFTER_NS:
            return 1
        rule = self._ctx.scenario.local_rule
        if rule is not None:
            inflight = None
            if plan is None:
                inflight = float(sum(len(r.inside) for r in self.of_phase(Phase.READY)))
            return rule(_wire(plan), self.target, (low, high), inflight, config.scaling.inflight_target)[0]
        if plan is None or plan.mode is not Mode.ACT or plan.replicas_total is None:
            return held
        return max(low, min(high, plan.replicas_total))

    # --- leaving and dying --------------------------------------------------------------------------------------------

    def stopped(self, replica: Replica, now_ns: int) -> None:
        """A leaving replica is done."""
        self._ctx.counters["stops"] += 1
        self._remove(replica, Phase.STOPPED, now_ns)

    def kill(self, replica: Replica, now_ns: int) -> None:
        """``replica`` dies now; Serve finds out at its next health check."""
        self._ctx.counters["kills"] += 1
        if replica.phase is not Phase.READY:
            self._remove(replica, Phase.DEAD, now_ns)
            return
        self._close(replica, Phase.DEAD, now_ns)
        period_ns = ns(self._ctx.scenario.network.health_period_ms)
        self._ctx.queue.at(now_ns + period_ns - (now_ns - replica.ready_ns) % period_ns, self._on_noticed, replica)

    def _on_noticed(self, now_ns: int, replica: Replica) -> None:
        if self.replicas.pop(replica.id, None) is not None:
            self._changed(now_ns)
            self._reconcile(now_ns)

    def watch(self, replica: Replica, now_ns: int) -> None:
        """Check the health of a replica that froze or is retired, until it is well again or leaves."""
        self._ctx.queue.at(now_ns + ns(self._ctx.scenario.network.health_period_ms), self._on_health, (replica, 0))

    def _on_health(self, now_ns: int, watched: tuple[Replica, int]) -> None:
        replica, failed = watched
        retired = replica.retired and replica.phase is Phase.READY
        if not (retired or replica.frozen_since_ns is not None) or replica.id not in self.replicas:
            return
        stuck = replica.is_stuck(now_ns)
        failed = failed + 1 if stuck or retired else 0
        if stuck and replica.phase is Phase.REFUSING:
            self.cut(replica, now_ns)
            return
        if failed >= UNHEALTHY_CHECKS and replica.phase is Phase.READY:
            replica.drain(now_ns)
            self._changed(now_ns)
            self._reconcile(now_ns)
        period_ns = ns(self._ctx.scenario.network.health_period_ms)
        self._ctx.queue.at(now_ns + period_ns, self._on_health, (replica, failed))

    def cut(self, replica: Replica, now_ns: int) -> None:
        """A leaving replica stops with requests inside: its time is over, or it is stuck."""
        self._ctx.counters["cut"] += len(replica.inside)
        self.stopped(replica, now_ns)

    def _remove(self, replica: Replica, phase: Phase, now_ns: int) -> None:
        del self.replicas[replica.id]
        self._close(replica, phase, now_ns)

    def _close(self, replica: Replica, phase: Phase, now_ns: int) -> None:
        self._lived_ns += now_ns - replica.began_ns
        if replica.phase is not Phase.STARTING:
            self._served_ns += now_ns - replica.ready_ns
        replica.end(phase, now_ns)

    def _changed(self, now_ns: int) -> None:
        self._ctx.counters["membership_changes"] += 1
        if self.on_members is not None:
            self.on_members(self.members(), now_ns)

    def members(self) -> tuple[str, ...]:
        """Ids of the replicas Serve says are running."""
        return tuple(r.id for r in self.running())

    def running(self) -> list[Replica]:
        """Ready as far as Serve knows: the dead that it has not noticed included."""
        return [r for r in self.replicas.values() if r.phase is Phase.READY or r.phase is Phase.DEAD]

    # --- what replicas tell -------------------------------------------------------------------------------------------

    def prefilled(self, attempt: Attempt, now_ns: int) -> None:
        """A prefill replica is done with its part."""
        assert self.on_prefilled is not None, "a prefill pool has somebody to hand over to"
        self.on_prefilled(attempt, now_ns)

    def room(self, now_ns: int) -> None:
        """A replica has room for one more."""
        if self.on_room is not None:
            self.on_room(now_ns)

    def add_window(self, window: EngineWindow) -> None:
        """Count what a replica did."""
        totals = self._totals
        totals.busy_ms += window.busy_ms
        totals.preemptions += window.preemptions
        totals.prefix_query_tokens += window.prefix_query_tokens
        totals.prefix_hit_tokens += window.prefix_hit_tokens
        if window.itl.sum_ms:
            totals.gaps.add(window.gaps)
            if self.on_itl is not None:
                self.on_itl(window.itl)

    def _sample(self, now_ns: int) -> None:
        starting = ready = draining = waiting = running = 0
        for replica in self.replicas.values():
            waiting += replica.waiting
            running += replica.running
            if replica.phase is Phase.READY:
                ready += 1
            elif replica.phase is Phase.STARTING:
                starting += 1
            elif replica.phase in LEAVING:
                draining += 1
        waiting += self.queued()
        self.timeline.append(FleetSample(now_ns, self.target, starting, ready, draining, waiting, running))

    def use(self, now_ns: int) -> PoolUse:
        """What the pool cost and did, at the end of the run; ends every replica."""
        for replica in list(self.replicas.values()):
            if replica.phase is not Phase.DEAD:
                self._close(replica, Phase.STOPPED, now_ns)
        profile, totals = self.pool.profile, self._totals
        hours = self._lived_ns / HOUR_NS
        return PoolUse(
            profile=profile.name,
            role=self.pool.role,
            replica_hours=hours,
            gpu_hours=hours * profile.gpus,
            usd=hours * profile.usd_per_hour,
            starts=self._starts,
            replicas_max=self._most,
            preemptions=totals.preemptions,
            prefix_query_tokens=totals.prefix_query_tokens,
            prefix_hit_tokens=totals.prefix_hit_tokens,
            busy_share=totals.busy_ms * 1e6 / self._served_ns if self._served_ns else 0.0,
            itl=totals.gaps,
            timeline=self.timeline,
        )


def _wire(plan: Plan | None) -> dict[str, object] | None:
    """A plan as the live policy inside Serve gets it."""
    if plan is None:
        return None
    return {
        "epoch": plan.epoch,
        "seq": plan.seq,
        "ttl_ms": plan.ttl_ms,
        "mode": plan.mode.value,
        "replicas_target": plan.replicas_total,
    }
