"""What a flow asks of whoever ranks replicas: the live router, or a baseline it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from policies.types import ReplicaId, ReplicaView, Request, RouteChoice


class RoutingStrategy(Protocol):
    """Ranks replicas for one gateway. Counts no load: the flow does, at dispatch."""

    def choose(
        self, request: Request, views: Sequence[ReplicaView], strength: float | None, now_ns: int
    ) -> RouteChoice:
        """Order ``views`` for ``request``, best first; an empty choice when nobody may take it."""
        ...

    def dispatched(self, request: Request, replica_id: ReplicaId) -> None:
        """``request`` was sent to ``replica_id``."""
        ...

    def forget(self, replica_id: ReplicaId) -> None:
        """``replica_id`` left."""
        ...
