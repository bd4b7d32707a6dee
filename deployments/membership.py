"""One caller's view of the engine's replicas: Serve's membership joined with the pure policies.

This module is imported by name wherever it is used. ``router.py`` is not: Serve pickles a request router's module by
value, so classes that the gateway and the router must both recognise live here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ray.serve.request_router import RunningReplica

from deployments.clock import now_ns
from policies.build import Policies
from policies.split import Roles
from policies.types import Reason, ReplicaId, Request, RouteChoice

EMPTY_CHOICE = RouteChoice((), Reason("none_known", "no replica is known"), {}, {})


@dataclass(frozen=True, slots=True)
class Target:
    """Where a replica listens and what its gate wants to see."""

    endpoint: str
    """``host:port``."""
    gate: str


def target_of(metadata: object) -> Target | None:
    """The target in a replica's metadata; ``None`` when it does not publish one."""
    if not isinstance(metadata, dict):
        return None
    endpoint, gate = metadata.get("endpoint"), metadata.get("gate")
    if not isinstance(endpoint, str) or not endpoint or not isinstance(gate, str):
        return None
    return Target(endpoint, gate)


class Membership:
    """Serve's replicas as one caller's policies know them. Replicas that publish no address are left out."""

    def __init__(self, policies: Policies, on_removed: Callable[[ReplicaId], None] | None = None) -> None:
        self.policies = policies
        self.targets: dict[ReplicaId, Target] = {}
        """Replaced as a whole when members change."""
        self._roles = Roles(policies.config)
        self._on_removed = on_removed

    def take(self, replicas: Sequence[RunningReplica], *, need_target: bool = True) -> None:
        """Bring the fleet in line with ``replicas``; what belonged to those that left is dropped."""
        targets: dict[ReplicaId, Target] = {}
        members: dict[ReplicaId, dict[str, Any] | None] = {}
        for replica in replicas:
            replica_id = replica.replica_id.unique_id
            target = target_of(replica.replica_metadata)
            if target is not None:
                targets[replica_id] = target
            elif need_target:
                continue
            members[replica_id] = replica.routing_stats
        self.targets = targets
        for replica_id in self.policies.update_members(members, now_ns()):
            if self._on_removed is not None:
                self._on_removed(replica_id)

    def prefill(self) -> frozenset[ReplicaId]:
        """Members that compute prompts for others, by the plan in force."""
        return self._roles.prefill(self.targets, self.policies.plan_follower.current(now_ns()))

    def choose(self, request: Request, exclude: frozenset[ReplicaId]) -> RouteChoice:
        """Ask the pure router, with the affinity strength of the plan in force."""
        return self.policies.choose(request, exclude, now_ns())


class RouteCall:
    """One request of a gateway on its way through Serve's router; the answer is left in ``choice``."""

    __slots__ = ("choice", "exclude", "membership", "request")

    def __init__(self, membership: Membership, request: Request, exclude: frozenset[ReplicaId]) -> None:
        self.membership = membership
        self.request = request
        self.exclude = exclude
        self.choice: RouteChoice | None = None


def tiers_of(choice: RouteChoice, candidates: Sequence[RunningReplica]) -> list[list[RunningReplica]]:
    """The tiers of ``choice`` as Serve's replicas; empty tiers are left out."""
    by_id = {replica.replica_id.unique_id: replica for replica in candidates}
    tiers = [[by_id[r] for r in tier if r in by_id] for tier in choice.tiers]
    return [tier for tier in tiers if tier]
