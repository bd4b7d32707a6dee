"""Where requests wait for room at a replica of a pool with ``ongoing_max``, first come, first served.

Serve's own router keeps such requests and asks again when a replica has a free slot; this is one line for all gateways.
A pool without the limit has no line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoscaling.simulator.context import Call
from autoscaling.simulator.replica import Phase, Replica
from policies.types import ReplicaId


class Line:
    """See the module."""

    def __init__(self, replicas: Mapping[ReplicaId, Replica], ongoing_max: int) -> None:
        self._replicas = replicas
        self._max = ongoing_max
        self._calls: dict[Call, frozenset[ReplicaId]] = {}
        self._trying = False

    def with_room(self, tier: Sequence[ReplicaId]) -> tuple[ReplicaId, ...]:
        """Those of ``tier`` that take one more; the dead refuse by themselves."""
        replicas, most = self._replicas, self._max
        return tuple(r for r in tier if replicas[r].slots_used < most or replicas[r].phase is Phase.DEAD)

    def add(self, call: Call, exclude: frozenset[ReplicaId]) -> None:
        """``call`` waits; one that is in line keeps its place."""
        if not call.in_line:
            call.in_line = True
            call.gateway.in_line += 1
        self._calls[call] = exclude

    def remove(self, call: Call) -> None:
        """``call`` waits no more."""
        if self._calls.pop(call, None) is not None:
            call.in_line = False
            call.gateway.in_line -= 1

    def room(self, now_ns: int) -> None:
        """Somebody has room: let the first ones try until one must go on waiting."""
        if self._trying:
            return
        self._trying = True
        while self._calls:
            call, exclude = next(iter(self._calls.items()))
            call.gateway.route_again(call, exclude, now_ns)
            if call.in_line:
                break
        self._trying = False
