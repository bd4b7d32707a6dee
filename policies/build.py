"""The one wiring of the policies: what a gateway holds, and what the controller holds.

Live deployments and the simulator both call these functions, so that no decision exists twice.

What this must not do: decide anything, or read configuration from anywhere but its arguments.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from policies.admission.limits import Admission
from policies.config import PolicyConfig
from policies.control.loop import ControlState
from policies.control.scaler import Scaler
from policies.faults import RetryBudget
from policies.flow import FlowContext
from policies.plan_follower import PlanFollower
from policies.routing.fleet import Fleet, Removed
from policies.routing.load import LoadBook
from policies.routing.prefix_index import PrefixIndex
from policies.routing.router import Router
from policies.routing.strategy import RoutingStrategy
from policies.types import ReplicaId, Request, RouteChoice


@dataclass(frozen=True, slots=True)
class Policies:
    """Everything one gateway decides with."""

    config: PolicyConfig
    flow_context: FlowContext
    fleet: Fleet
    router: RoutingStrategy
    index: PrefixIndex
    plan_follower: PlanFollower

    def update_members(self, members: Mapping[ReplicaId, Mapping[str, object] | None], now_ns: int) -> Removed:
        """Take Serve's members with their last routing statistics; all traces of those that left go with them."""
        removed = self.fleet.update(members, now_ns)
        for replica_id in removed:
            self.flow_context.book.forget(replica_id)
            self.router.forget(replica_id)
        return removed

    def choose(self, request: Request, exclude: Collection[ReplicaId], now_ns: int) -> RouteChoice:
        """Rank the fleet for ``request`` without ``exclude``, trusting prefix hits as the plan in force says."""
        plan = self.plan_follower.current(now_ns)
        strength = plan.affinity_strength if plan is not None else None
        if isinstance(self.router, Router):
            return self.router.choose_among(request, self.fleet, exclude, strength, now_ns)
        return self.router.choose(request, self.fleet.views(now_ns, exclude), strength, now_ns)


def build_policies(
    config: PolicyConfig,
    seed: int,
    make_router: Callable[[PolicyConfig, PrefixIndex, random.Random], RoutingStrategy] | None = None,
) -> Policies:
    """Policies of one gateway. ``seed`` breaks ties only; give each gateway its own.

    ``make_router`` puts a baseline in the place of the live router, for comparison in the simulator.
    """
    book = LoadBook()
    index = PrefixIndex(config.routing.index_blocks_max)
    rng = random.Random(seed)
    router = make_router(config, index, rng) if make_router else Router(config.routing, index, rng, config.objectives)
    return Policies(
        config=config,
        flow_context=FlowContext(Admission(config.admission), RetryBudget(config.faults), book, router, config),
        fleet=Fleet(config.routing, book),
        router=router,
        index=index,
        plan_follower=PlanFollower(),
    )


def build_control(config: PolicyConfig, scaler: Scaler, epoch: str) -> ControlState:
    """What one life of the controller remembers; ``epoch`` must never have been used by another life."""
    return ControlState(config, scaler, epoch)
