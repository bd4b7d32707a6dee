"""Consistent hashing of the prompt's beginning, with bounded loads.

Source: KubeAI's ``PrefixHash`` load balancing (kubeai.org, "Load Balancing", and its API reference): "requests with the
same hash value are routed to the same replica, except when that replica's in-flight requests exceed the overall average
by a configurable percentage". Defaults: ``meanLoadFactor`` 125 %, ``replication`` 256 places of each replica on the
ring, ``prefixCharLength`` 100 characters. The algorithm is Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with
Bounded Loads" (SODA 2018): walk the ring from the key's place to the first replica that, with this request, has at most
``ceil(factor * (all requests + 1) / replicas)``.

The key is the first prompt block, the finest there is of a prompt's first 100 characters; prompts without a full block
share none, and each is a key of its own. vllm-router's ``consistent_hash`` (160 places, keyed by a session header, no
bound) is the same ring with ``load_factor=None``; traces carry no such header.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from autoscaling.simulator.baselines.choices import available, choice, nobody
from policies.routing.rendezvous import score, text_key
from policies.routing.strategy import RoutingStrategy
from policies.types import ReplicaId, ReplicaView, Request, RouteChoice


@dataclass(frozen=True, slots=True)
class HashRingSettings:
    """KubeAI's defaults."""

    places: int = 256
    load_factor: float | None = 1.25
    """``None``: loads are not bounded."""


class ConsistentHashing(RoutingStrategy):
    """One gateway's ring. All gateways build the same one."""

    def __init__(self, settings: HashRingSettings | None = None) -> None:
        self._settings = settings or HashRingSettings()
        self._members: tuple[ReplicaId, ...] = ()
        self._places: list[int] = []
        self._owners: list[ReplicaId] = []

    def choose(
        self,
        request: Request,
        views: Sequence[ReplicaView],
        strength: float | None,  # noqa: ARG002 - there is no loop that weighs prefixes
        now_ns: int,  # noqa: ARG002 - time plays no part
    ) -> RouteChoice:
        """The key's replica, or the next one on the ring with room."""
        ready = available(views)
        if not ready:
            return nobody(views)
        self._build(tuple(v.replica_id for v in views))
        loads = {v.replica_id: v.local_requests for v in ready}
        bound = math.inf
        if self._settings.load_factor is not None:
            bound = math.ceil(self._settings.load_factor * (sum(loads.values()) + 1) / len(loads))
        key = request.blocks[0] if request.blocks else text_key(request.request_id)
        start = bisect_right(self._places, score(key, ""))
        passed: set[ReplicaId] = set()
        for i in range(len(self._owners)):
            owner = self._owners[(start + i) % len(self._owners)]
            if owner in loads and loads[owner] + 1 <= bound:
                return choice([owner], "hash_ring", f"{len(passed)} replicas passed over, bound {bound:g} requests")
            passed.add(owner)
        return choice([min(loads, key=loads.__getitem__)], "hash_ring_full", "nobody has room: the least loaded")

    def dispatched(self, request: Request, replica_id: ReplicaId) -> None:
        """Nothing to remember."""

    def forget(self, replica_id: ReplicaId) -> None:
        """The next choice builds the ring anew."""

    def _build(self, members: tuple[ReplicaId, ...]) -> None:
        if members == self._members:
            return
        ring = sorted((text_key(f"{r}:{i}"), r) for r in members for i in range(self._settings.places))
        self._members = members
        self._places = [place for place, _ in ring]
        self._owners = [owner for _, owner in ring]
