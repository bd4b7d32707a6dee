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

    def held_blocks(self, request: Request, replica_id: ReplicaId) -> int:  # noqa: ARG002
        """Leading blocks of ``request`` that ``replica_id`` is believed to hold; 0 where nothing is remembered."""
        return 0

    def computed(self, request: Request, replica_id: ReplicaId) -> None:  # noqa: ARG002
        """``replica_id`` gave the first byte for ``request``: it has its whole prompt."""
        return  # a body: strategies that remember nothing need none of their own

    def not_computed(self, request: Request, replica_id: ReplicaId, held_blocks: int) -> None:  # noqa: ARG002
        """``request`` failed at ``replica_id`` before its first byte; when it was sent, :meth:`held_blocks` were
        ``held_blocks``.
        """
        return

    def forget(self, replica_id: ReplicaId) -> None:
        """``replica_id`` left."""
        ...
