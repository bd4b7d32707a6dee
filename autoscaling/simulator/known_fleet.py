"""The fleet as one gateway knows it: Serve's list of running replicas, their last samples, and ports that said no.

As ``deployments/membership.py`` keeps it live. What this must not do: rank replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from autoscaling.simulator.replica import GONE, Replica
from policies.build import Policies
from policies.types import ReplicaId

Stats: TypeAlias = Mapping[ReplicaId, Mapping[str, object]]


class KnownFleet:
    """See the module. ``replicas``: every replica there is or was, by id."""

    def __init__(self, policies: Policies, replicas: Mapping[ReplicaId, Replica]) -> None:
        self._policies = policies
        self._replicas = replicas
        self._members: tuple[ReplicaId, ...] = ()
        self._stats: Stats = {}
        self._dropped: set[ReplicaId] = set()

    def take_members(self, members: tuple[ReplicaId, ...], now_ns: int) -> None:
        """Serve's list of running replicas."""
        self._members = members
        self._look_again(now_ns)

    def take_stats(self, stats: Stats, now_ns: int) -> None:
        """The replicas' last samples."""
        self._stats = stats
        self._look_again(now_ns)

    def drop(self, replica_id: ReplicaId, now_ns: int) -> None:
        """A port said no: leave the replica out until Serve names it again."""
        if replica_id in self._members:
            self._dropped.add(replica_id)
            self._tell(now_ns)

    def reachable(self, replica_id: ReplicaId) -> Replica | None:
        """The replica, where something may answer at its port."""
        return None if replica_id in self._dropped else self._replicas.get(replica_id)

    def _look_again(self, now_ns: int) -> None:
        if self._dropped:  # Serve names those again that are not dead
            self._dropped = {r for r in self._dropped if self._replicas[r].phase in GONE and r in self._members}
        self._tell(now_ns)

    def _tell(self, now_ns: int) -> None:
        get, dropped = self._stats.get, self._dropped
        self._policies.update_members({r: get(r) for r in self._members if r not in dropped}, now_ns)
