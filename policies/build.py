"""The one wiring of the policies: what a gateway holds, and what the controller holds.

Live deployments and the simulator both call these functions, so that no decision exists twice.

What this must not do: decide anything, or read configuration from anywhere but its arguments.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from policies.admission.cold import ColdGate
from policies.admission.gate import AdmissionGate, Pumped
from policies.config import ClassesConfig, ObjectivesConfig, PolicyConfig
from policies.control.levers import LeverLoop
from policies.control.loop import ControlState
from policies.control.pool import Pool
from policies.control.scaler import Scaler
from policies.faults import Quarantine, ReplicaHealth, RetryBudget, with_probe
from policies.flow import FlowContext
from policies.plan_follower import PlanFollower
from policies.routing.capacity import FleetCapacity
from policies.routing.explore import Explorer
from policies.routing.fleet import Fleet, Removed
from policies.routing.load import LoadBook
from policies.routing.prefix_index import PrefixIndex
from policies.routing.router import Router
from policies.routing.strategy import RoutingStrategy
from policies.steering import AdmissionKnobs
from policies.tasks import TaskBook
from policies.types import ReplicaId, Request, RouteChoice


@dataclass(slots=True)
class Policies:
    """Everything one gateway decides with."""

    config: PolicyConfig
    flow_context: FlowContext
    fleet: Fleet
    router: RoutingStrategy
    index: PrefixIndex
    plan_follower: PlanFollower
    explorer: Explorer
    capacity: FleetCapacity

    def reconfigure(self, objectives: ObjectivesConfig, classes: ClassesConfig) -> None:
        """Steer by these objectives from now on; nothing that was learned or counted is lost."""
        self.config = self.flow_context.config = config = replace(self.config, objectives=objectives, classes=classes)
        self.flow_context.admission.reconfigure(config)
        self.capacity.reconfigure(objectives)
        self.explorer.reconfigure(objectives)
        if isinstance(self.router, Router):
            self.router.reconfigure(objectives)

    def update_members(self, members: Mapping[ReplicaId, Mapping[str, object] | None], now_ns: int) -> Removed:
        """Take Serve's members with their last routing statistics; all traces of those that left go with them."""
        removed = self.fleet.update(members, now_ns)
        self.flow_context.health.update(members.keys(), now_ns, self.fleet.learned_step_model)
        for replica_id in removed:
            self.flow_context.book.forget(replica_id)
            self.router.forget(replica_id)
        return removed

    def choose(self, request: Request, exclude: Collection[ReplicaId], now_ns: int) -> RouteChoice:
        """Rank the fleet for ``request`` without ``exclude``, trusting prefix hits as the plan in force says.

        A replica on probation that is due for a request, or one that looked slow and was long idle, comes first, unless
        the request has failed somewhere already.
        """
        self._leave_alone(now_ns)
        choice = self._rank(request, exclude, now_ns)
        probe = (
            None if exclude else self.flow_context.health.probe_due(now_ns, partial(self.fleet.takes, now_ns=now_ns))
        )
        if probe is not None:
            return with_probe(choice, probe)
        if exclude or not isinstance(self.router, Router):
            return choice
        return self.explorer.with_trial(choice, request, self.fleet.board(now_ns), now_ns)

    def _rank(self, request: Request, exclude: Collection[ReplicaId], now_ns: int) -> RouteChoice:
        plan = self.plan_follower.current(now_ns)
        strength = plan.affinity_strength if plan is not None else None
        if isinstance(self.router, Router):
            self.router.load_bound = plan.load_bound if plan is not None else None
            return self.router.choose_among(request, self.fleet, exclude, strength, now_ns)
        return self.router.choose(request, self.fleet.views(now_ns, exclude), strength, now_ns)

    def pump(self, now_ns: int) -> Pumped:
        """Who of those that wait in the gateway's queue goes on, and who waited too long."""
        self._leave_alone(now_ns)
        return self.flow_context.admission.pump(now_ns)

    def _leave_alone(self, now_ns: int) -> None:
        """Tell the fleet whom not to ask."""
        health = self.flow_context.health
        blocked = health.blocked(now_ns)
        plan = self.plan_follower.current(now_ns)
        if plan is not None and plan.warm:
            self.fleet.block(blocked | plan.warm, now_ns, partial(_why_left, health.reason, plan.warm))
            if self.fleet.board(now_ns).standings:
                return
        self.fleet.block(blocked, now_ns, health.reason)


def build_policies(
    config: PolicyConfig,
    seed: int,
    make_router: Callable[[PolicyConfig, PrefixIndex, random.Random], RoutingStrategy] | None = None,
    first: Policies | None = None,
) -> Policies:
    """Policies of one gateway for one model. ``seed`` breaks ties only; give each gateway its own.

    ``make_router`` puts a baseline in the place of the live router, for comparison in the simulator. ``first``: those
    of the same gateway for its first model; what tenants and tasks may do, and how much it holds, is one for all.
    """
    book = LoadBook()
    index = PrefixIndex(config.routing.index_blocks_max)
    rng = random.Random(seed)
    router = make_router(config, index, rng) if make_router else Router(config.routing, index, rng, config.objectives)
    fleet = Fleet(config.routing, book)
    chance = random.Random(rng.getrandbits(64))
    follower = PlanFollower()
    capacity = FleetCapacity(fleet, config.objectives)
    cold = ColdGate(config, follower.cold, follower.says_awake, partial(_nobody, fleet, capacity), chance)
    context = FlowContext(
        admission=AdmissionGate(
            config,
            capacity,
            chance,
            partial(_admission_knobs, follower),
            cold,
            None if first is None else first.flow_context.admission,
        ),
        health=ReplicaHealth(config.faults, chance),
        quarantine=Quarantine(config.faults),
        tasks=TaskBook(config.tasks, config.gateways) if first is None else first.flow_context.tasks,
        budget=RetryBudget(config.faults, config.gateways),
        book=book,
        router=router,
        config=config,
        rng=chance,
    )
    return Policies(
        config=config,
        flow_context=context,
        fleet=fleet,
        router=router,
        index=index,
        plan_follower=follower,
        explorer=Explorer(config.objectives),
        capacity=capacity,
    )


def _admission_knobs(follower: PlanFollower, now_ns: int) -> AdmissionKnobs:
    """What the plan in force says of admission; nothing where there is none."""
    plan = follower.current(now_ns)
    if plan is None or not plan.admission.coming:
        return plan.admission if plan is not None else _NO_KNOBS
    age_s = (follower.age_ms(now_ns) or 0.0) / 1_000
    return replace(plan.admission, coming_s=max(0.0, plan.admission.coming_s - age_s))


def _why_left(ejected: Callable[[ReplicaId], str], warm: Collection[ReplicaId], replica_id: ReplicaId) -> str:
    """Why a replica gets nothing, in words."""
    return "it is warm, out of rotation" if replica_id in warm else ejected(replica_id)


def _nobody(fleet: Fleet, capacity: FleetCapacity, now_ns: int) -> bool:
    """Whether no replica takes requests, and those that are there leave."""
    return not capacity.replicas(now_ns) and fleet.all_leave()


_NO_KNOBS = AdmissionKnobs()


def build_control(
    config: PolicyConfig, scaler: Scaler, epoch: str, levers: Sequence[LeverLoop] = (), pool: Pool | None = None
) -> ControlState:
    """What one life of the controller remembers; ``epoch`` must never have been used by another life.

    ``levers`` are asked after the usual ones, ``pool`` after all (see :class:`~policies.control.loop.ControlState`).
    """
    return ControlState(config, scaler, epoch, levers, pool)
