"""One dispatch to one replica: the request goes out, a status and the first bytes come back, or how it broke.

It must not decide what follows; its outcome is an event for the flow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deployments.gate import GATE_HEADER, REFUSED_HEADER
from deployments.relay import EVENT_STREAM, Exchange, first_event_error
from deployments.request_log import Attempt
from deployments.upstream import ReplicaUnreachableError, UpstreamBrokenError
from policies.events import Event, RefusalKind, ReplicaRefused, ResponseStarted, UpstreamFailed
from policies.types import ReplicaId

if TYPE_CHECKING:
    from deployments.core import GatewayCore
    from deployments.membership import Target
    from deployments.tracing import TraceContext


class Dispatched:
    """See the module. ``record`` is its entry in the request's record."""

    def __init__(self, core: GatewayCore, replica_id: ReplicaId, target: Target, record: Attempt) -> None:
        self.exchange = Exchange(core.pool, target.endpoint)
        self.replica_id = replica_id
        self.record = record
        self.first_chunk: bytes | None = None
        """Read already; ``None``: not yet."""
        self.error: bytes | None = None
        """The engine's error that its stream begins with, as JSON; the status of the exchange is that of the error."""
        self.failed_why = ""
        self._core = core
        self._gate = target.gate

    async def open(self, path: str, body: bytes, request_id: str, trace: TraceContext | None) -> Event:
        """Send the request; :class:`ResponseStarted`, or how it failed."""
        headers = [("content-type", "application/json"), ("x-request-id", request_id), (GATE_HEADER, self._gate)]
        if trace is not None:
            headers.append(("traceparent", trace.traceparent(self.record)))
        exchange = self.exchange
        try:
            await exchange.open(path, headers, body)
        except ReplicaUnreachableError as error:
            if error.refused:
                self._core.drop_replica(self.replica_id)
            return self._refused(RefusalKind.CONNECT, "unreachable")
        except UpstreamBrokenError as error:
            return self.broken(error)
        if exchange.status == 503:
            draining = exchange.header(REFUSED_HEADER.encode()) is not None
            kind = RefusalKind.DRAINING if draining else RefusalKind.UNAVAILABLE
            return self._refused(kind, kind.value)
        if exchange.status == 403:  # the gate's answer to an address that is another replica's by now
            return self._refused(RefusalKind.CONNECT, "gate")
        return ResponseStarted(exchange.status)

    async def open_and_read(self, path: str, body: bytes, request_id: str, trace: TraceContext | None) -> Event:
        """The same, and the first bytes of a good answer as well: what they say of its status counts."""
        event = await self.open(path, body, request_id, trace)
        if isinstance(event, ResponseStarted):
            try:
                if event.status < 400:
                    self.first_chunk = await self.exchange.connection.read()
                    if self.begins_with_error(self.first_chunk):
                        return ResponseStarted(self.exchange.status)
            except UpstreamBrokenError as error:
                return self.broken(error)
        return event

    async def read(self) -> bytes:
        """The first bytes of the body. Raises ``UpstreamBrokenError``."""
        chunk, self.first_chunk = self.first_chunk, None
        return await self.exchange.connection.read() if chunk is None else chunk

    def begins_with_error(self, chunk: bytes) -> bool:
        """Whether ``chunk``, the first one, is a stream's that is an engine's error and nothing else."""
        found = first_event_error(chunk) if self.exchange.content_type == EVENT_STREAM else None
        if found is not None:
            self.exchange.status, self.error = found
        return found is not None

    def broken(self, error: UpstreamBrokenError) -> UpstreamFailed:
        """It broke off."""
        self.failed_why = error.kind.value
        self.exchange.close()
        return UpstreamFailed(error.kind)

    def _refused(self, kind: RefusalKind, why: str) -> ReplicaRefused:
        self.failed_why = why
        self.exchange.close()
        return ReplicaRefused(kind)
