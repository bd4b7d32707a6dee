"""The second attempt of an interactive request, beside the first, when its first byte is late.

    due      hedge_after_factor * predicted TTFT after the dispatch, at least hedge_after_ms_min; once a request
    who      the next replica of the same choice that was not tried and is not left alone
    price    one of the retry budget

The first byte decides which attempt is the request's own; a failure of either leaves the other.

What this must not do: end the request. That is the flow's part.
"""

from __future__ import annotations

from policies.flow_context import FlowContext
from policies.types import Priority, ReplicaId, Request, RouteChoice


class Hedge:
    """State of one request's second attempt."""

    def __init__(self, ctx: FlowContext, request: Request) -> None:
        self.used = False
        """There was one."""
        self.replica_id: ReplicaId | None = None
        """Where it runs; ``None``: it does not."""
        self.sent_ns = 0
        self._ctx = ctx
        self._request = request
        self._entry = f"{request.request_id}#hedge"

    def delay_ms(self, choice: RouteChoice, replica_id: ReplicaId) -> float | None:
        """Time from the dispatch to ``replica_id`` until it is due; ``None``: never."""
        faults = self._ctx.config.faults
        predicted_ms = choice.predicted_ttft_ms.get(replica_id)
        if faults.hedge_after_factor is None or self.used or self._request.priority is not Priority.INTERACTIVE:
            return None
        if predicted_ms is None or len(choice.order) < 2:
            return None
        return max(faults.hedge_after_ms_min, faults.hedge_after_factor * predicted_ms)

    def begin(self, choice: RouteChoice, tried: set[ReplicaId], now_ns: int) -> ReplicaId | None:
        """Send it, if somebody may take it and the budget allows; the replica it goes to."""
        ctx = self._ctx
        blocked = ctx.health.blocked(now_ns)
        replica_id = next((r for r in choice.order if r not in tried and r not in blocked), None)
        if self.used or replica_id is None or not ctx.budget.try_spend():
            return None
        self.used = True
        self.replica_id, self.sent_ns = replica_id, now_ns
        ctx.count_dispatch(self._entry, self._request, choice, replica_id, now_ns)
        return replica_id

    def promote(self, choice: RouteChoice, failed: bool) -> ReplicaId:
        """It is the request's own attempt from now on; the first one ``failed``, or was left."""
        replica_id, own = self.replica_id, self._request.request_id
        assert replica_id is not None
        unproven = self._ctx.unproven.pop(self._entry, None)
        self.drop(failed=False)
        self._ctx.released(own, failed)
        if unproven is not None:
            self._ctx.unproven[own] = unproven
        self._ctx.count_load(own, self._request, choice, replica_id)
        return replica_id

    def drop(self, failed: bool) -> None:
        """It runs no more, because it ``failed`` or was left; safe at any time."""
        self.replica_id = None
        self._ctx.released(self._entry, failed)
