"""Serve's ``RequestRouter`` over the pure policies of ``policies/routing``.

Two kinds of callers run it:

* the gateway, which passes a :class:`RouteCall` as the only argument of ``choose_replica``. The call carries the
  gateway's own :class:`Membership` (fleet, router, load), so choice and counts are one and the same;
* any other handle to the engine deployment (``handle.method.remote(...)``). It gets policies of its own, built from the
  deployment's ``request_router_kwargs``, sized by its arguments and counted between Serve's two callbacks.

It decides nothing itself: it translates Serve's replicas into policy values and the answer back into tiers. Serve
pickles this module by value, so nothing here may be compared by identity with what other modules import.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from ray.serve._private.common import ReplicaID
from ray.serve._private.request_router.common import PendingRequest
from ray.serve.request_router import RequestRouter, RunningReplica

from deployments.clock import now_ns
from deployments.membership import Membership, RouteCall, tiers_of
from deployments.serve_internals import NoReplicaError
from policies.build import build_policies
from policies.config import PolicyConfig, RoutingConfig
from policies.types import Request

FOREIGN_BYTES_PER_TOKEN = 4
FOREIGN_BYTES_MAX = 1_000_000
"""Arguments of a foreign call are sized up to here."""


class TidegateRouter(RequestRouter):
    """See the module. ``request_router_kwargs``: ``{"routing": {...}}``, fields of ``RoutingConfig`` for foreign calls.

    ``on_change`` is called, when set, each time Serve's view of the deployment's replicas changes.
    """

    def initialize_state(self, routing: dict[str, Any] | None = None, seed: int = 0) -> None:
        """Keep the settings of foreign calls; their policies are built when the first one comes."""
        self._routing = RoutingConfig(**(routing or {}))
        self._seed = seed
        self._foreign: Membership | None = None
        self.on_change: Callable[[], None] | None = None

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take Serve's update and tell the gateway."""
        super().update_replicas(replicas)
        self._changed()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Drop a dead replica and tell the gateway."""
        super().on_replica_actor_died(replica_id)
        self._changed()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranked tiers of ``candidate_replicas`` for ``pending_request``.

        Raises:
            NoReplicaError: a gateway's call found nobody; the flow decides what then.
        """
        args = list(pending_request.args) if pending_request is not None else []
        if len(args) == 1 and isinstance(args[0], RouteCall):
            call = args[0]
            call.choice = call.membership.choose(call.request, call.exclude)
            tiers = tiers_of(call.choice, candidate_replicas)
            if not tiers:
                raise NoReplicaError
            return tiers
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        request = self._foreign_request(pending_request)
        membership = self._foreign_membership()
        membership.take(candidate_replicas, need_target=False)
        return tiers_of(membership.choose(request, frozenset()), candidate_replicas)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:  # noqa: ARG002
        """A foreign call was sent: count it."""
        if self._foreign is None:
            return
        request = self._foreign_request(pending_request)
        policies = self._foreign.policies
        policies.flow_context.book.dispatched(
            replica_id.unique_id, request.request_id, request.prompt_tokens, request.prompt_tokens
        )

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:  # noqa: ARG002
        """A foreign call is over: give back its count."""
        if self._foreign is not None:
            self._foreign.policies.flow_context.book.released(internal_request_id)

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def _foreign_membership(self) -> Membership:
        if self._foreign is None:
            self._foreign = Membership(build_policies(PolicyConfig(routing=self._routing), self._seed))
        return self._foreign

    def _foreign_request(self, pending: PendingRequest) -> Request:
        """What is known of a foreign call: its size. It has no prefix blocks."""
        request_id = pending.metadata.internal_request_id
        tokens = max(1, _args_bytes(pending) // FOREIGN_BYTES_PER_TOKEN)
        return Request(
            request_id=request_id,
            model="",
            endpoint=pending.metadata.call_method,
            tenant="",
            prompt_tokens=tokens,
            output_tokens_max=None,
            blocks=(),
            block_tokens=1,
            stream=pending.metadata.is_streaming,
            arrival_ns=now_ns(),
        )


def _args_bytes(pending: PendingRequest) -> int:
    size = 0
    for value in (*pending.args, *pending.kwargs.values()):
        if isinstance(value, str | bytes | bytearray):
            size += len(value)
        else:
            try:
                size += len(pickle.dumps(value, protocol=5))
            except Exception:  # noqa: BLE001  (an argument that does not pickle has no size; the call itself will say so)
                size += FOREIGN_BYTES_PER_TOKEN
    return min(size, FOREIGN_BYTES_MAX)
