"""Drives one request's ``RequestFlow`` on asyncio: does what the effects say, reports what came of it as events.

The same driver serves HTTP clients and calls on the deployment handle; they differ in their :class:`Sink` alone. It
runs in one task, and two things may stop it from outside through :meth:`RequestDriver.interrupt`: the client left, or a
replica stayed silent for too long. A cancellation from elsewhere (Serve cancels the call of a client that left) counts
as the former. Cleaning up after either awaits nothing, so the connection to the replica is closed, and with it the
engine's work aborted, before the task gives up control.

It must not decide: whether to retry, wait, or answer with which error is the flow's.
"""

from __future__ import annotations

import asyncio
import json
import logging
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from deployments.clock import now_ns
from deployments.endpoints import Endpoint
from deployments.errors import ERROR_BODY_BYTES_MAX, GatewayError, engine_error
from deployments.gate import GATE_HEADER, REFUSED_HEADER
from deployments.recording import request_line
from deployments.relay import ERROR_KEY, Exchange, Tail, first_event_error, has_stream_error, usage_of
from deployments.upstream import ReplicaUnreachableError, UpstreamBrokenError
from policies.events import (
    AbortUpstream,
    Arrived,
    ClientGone,
    Dispatch,
    Effect,
    Event,
    Finish,
    FirstByte,
    RefusalKind,
    Relay,
    ReplicaRefused,
    ResponseEnded,
    ResponseStarted,
    Route,
    Routed,
    SendError,
    SendStreamError,
    UpstreamFailed,
    UpstreamFailure,
    Usage,
    WaitForReplica,
)
from policies.flow import RequestFlow
from policies.types import ReplicaId, Request

if TYPE_CHECKING:
    from deployments.core import GatewayCore

logger = logging.getLogger("ray.serve")


class Interrupt(Enum):
    """Why a driver is stopped from outside."""

    CLIENT_GONE = auto()
    SILENCE = auto()


class Sink(Protocol):
    """The client's side of one request. Each coroutine waits while the client cannot take more."""

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """The response's head."""

    async def body(self, chunk: bytes) -> None:
        """The next bytes of its body."""

    async def end(self) -> None:
        """The body is complete."""

    async def error(self, error: GatewayError, headers: list[tuple[bytes, bytes]]) -> None:
        """The whole response is this error; nothing was sent before."""

    async def stream_error(self, error: GatewayError, is_stream: bool) -> None:
        """The response that was begun ends here, so that nobody takes it for complete."""


class RequestDriver:
    """One request from its arrival to its end. ``run`` is called once."""

    def __init__(
        self,
        core: GatewayCore,
        endpoint: Endpoint,
        request: Request,
        body: bytes,
        sink: Sink,
        prompt_bytes: int = 0,
        client_request_id: str = "",
    ) -> None:
        self.flow = RequestFlow(core.policies.flow_context, request)
        self.request = request
        self.upstream_since_ns = 0
        """Since when the replica has been silent while it is its turn; 0 while it is not."""
        self.client_since_ns = 0
        """Since when the client has taken nothing while it is its turn; 0 while it is not."""
        self.first_byte_seen = False
        self.waiting_for_replica = False
        self._core = core
        self._endpoint = endpoint
        self._body = body
        self._sink = sink
        self._prompt_bytes = prompt_bytes
        self._client_request_id = client_request_id
        self._task: asyncio.Task[object] | None = None
        self._interrupt: Interrupt | None = None
        self._exchange: Exchange | None = None
        self._status: int | None = None
        self._first_chunk = b""
        self._started = False
        self._is_stream = False
        self._sent_ns = 0
        self._first_byte_ns = 0
        self._usage = Usage()
        self._events = 0
        self._over = False
        self._failed_why = ""

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve the request. Raises ``CancelledError`` when cancelled from outside, never anything else."""
        self._task = asyncio.current_task()
        self._core.enter(self)
        try:
            effects = self.flow.step(Arrived(), now_ns())
            while (event := await self._next_event(effects)) is not None:
                effects = self.flow.step(event, now_ns())
        except Exception:
            logger.exception("Request %s failed in the gateway.", self.request.request_id)
            await self._last_resort()
        finally:
            self._over = True
            self._core.leave(self)

    def interrupt(self, why: Interrupt) -> None:
        """Stop waiting for whatever the driver waits for, because of ``why``."""
        if self._task is None or self._over or self._interrupt is not None:
            return
        self._interrupt = why
        self._task.cancel()

    async def _next_event(self, effects: list[Effect]) -> Event | None:
        """Do ``effects``; what came of them, or ``None`` when the request is over."""
        try:
            return await self._perform(effects)
        except asyncio.CancelledError:
            why, self._interrupt = self._interrupt, None
            mine = why is not None and self._task is not None and self._task.uncancel() == 0
            self.upstream_since_ns = self.client_since_ns = 0
            if mine and why is Interrupt.SILENCE and not self.flow.done:
                return UpstreamFailed(UpstreamFailure.TIMEOUT)
            self._client_gone()
            if mine:
                return None
            raise

    async def _perform(self, effects: list[Effect]) -> Event | None:
        if not effects:
            return await self._stream()
        if isinstance(effects[-1], Finish):
            self._finished(effects[-1])
        event: Event | None = None
        for effect in effects:
            match effect:
                case Route(exclude=exclude):
                    self.upstream_since_ns = 0
                    event = Routed(await self._core.route(self.request, exclude))
                case Dispatch(replica_id=replica_id):
                    event = await self._dispatch(replica_id)
                case Relay():
                    event = await self._relay()
                case AbortUpstream():
                    self._abort()
                case SendError():
                    await self._send_error(effect)
                case SendStreamError():
                    error = GatewayError(502, effect.type, effect.code, effect.message)
                    await self._sink.stream_error(error, self._is_stream)
                case WaitForReplica(ms=ms, exclude=exclude):
                    event = await self._wait(ms, exclude)
                case _:
                    pass
        return event

    # --- effects ------------------------------------------------------------------------------------------------------

    async def _wait(self, ms: float, exclude: frozenset[ReplicaId]) -> Event:
        self.waiting_for_replica = True
        self.upstream_since_ns = 0
        try:
            return await self._core.wait_for_replica(self.request, ms, exclude)
        finally:
            self.waiting_for_replica = False

    async def _dispatch(self, replica_id: ReplicaId) -> Event:
        core, request = self._core, self.request
        target = core.membership.targets.get(replica_id)
        if target is None:
            return ReplicaRefused(RefusalKind.CONNECT)
        if self._failed_why:
            core.meter.retried(self._failed_why)
        if self.flow.choice is not None:
            core.meter.dispatched(self.flow.choice, replica_id, request.prompt_tokens)
        headers = [
            ("content-type", "application/json"),
            ("x-request-id", request.request_id),
            (GATE_HEADER, target.gate),
        ]
        exchange = self._exchange = Exchange(core.pool, target.endpoint)
        self.first_byte_seen = False
        self._sent_ns = self.upstream_since_ns = now_ns()
        try:
            await exchange.open(self._endpoint.path, headers, self._body)
        except ReplicaUnreachableError as error:
            self._failed_why = "unreachable"
            if error.refused:
                core.drop_replica(replica_id)
            return ReplicaRefused(RefusalKind.CONNECT)
        except UpstreamBrokenError as error:
            return self._broken(error)
        if exchange.status == 503 and exchange.header(REFUSED_HEADER.encode()) is not None:
            self._abort()
            self._failed_why = "draining"
            return ReplicaRefused(RefusalKind.DRAINING)
        if exchange.status == 403:  # the gate's answer to an address that is another replica's by now
            self._abort()
            self._failed_why = "gate"
            return ReplicaRefused(RefusalKind.CONNECT)
        self._status = exchange.status
        return ResponseStarted(exchange.status)

    def _broken(self, error: UpstreamBrokenError) -> UpstreamFailed:
        self._failed_why = error.kind.value
        self._abort()
        return UpstreamFailed(error.kind)

    async def _relay(self) -> Event:
        """Wait for the first body byte. Answers with an error status are read whole and written again in our shape."""
        exchange = self._exchange
        assert exchange is not None
        try:
            if exchange.status >= 400:
                return await self._relay_error(exchange)
            chunk = await exchange.connection.read()
        except UpstreamBrokenError as error:
            return self._broken(error)
        self.upstream_since_ns = 0
        if not chunk:
            exchange_headers = self._headers(exchange)
            exchange.close()
            await self._sink.start(exchange.status, exchange_headers)
            await self._sink.end()
            return ResponseEnded()
        self._is_stream = exchange.content_type == "text/event-stream"
        failed = first_event_error(chunk) if self._is_stream else None
        if failed is not None:
            exchange.close()
            await self._sink.error(engine_error(failed[0], "application/json", failed[1]), self._own_headers())
            return ResponseEnded(stream_error=True)
        self.first_byte_seen = True
        self._first_chunk = chunk
        self._first_byte_ns = now_ns()
        if self._is_stream:
            request, choice = self.request, self.flow.choice
            predicted = choice.predicted_ttft_ms.get(self.flow.replica_id or "") if choice is not None else None
            since_dispatch = self._first_byte_ns - self._sent_ns
            self._core.meter.first_byte(
                request.endpoint, self._first_byte_ns - request.arrival_ns, since_dispatch, predicted
            )
        return FirstByte()

    async def _relay_error(self, exchange: Exchange) -> Event:
        body = await exchange.read_all(ERROR_BODY_BYTES_MAX)
        self.upstream_since_ns = 0
        error = engine_error(exchange.status, exchange.content_type, body)
        after = exchange.header(b"retry-after") or b""
        error.retry_after_s = float(after) if after.isdigit() and len(after) < 8 else None
        exchange.close()
        await self._sink.error(error, self._own_headers())
        return ResponseEnded()

    async def _stream(self) -> Event:
        """Pass the body on, chunk by chunk. The hot loop of the gateway: keep it small."""
        exchange, sink = self._exchange, self._sink
        assert exchange is not None
        read, send, add_gap, clock = exchange.connection.read, sink.body, self._core.meter.itl.add, now_ns
        is_stream, tail, stream_error, events = self._is_stream, Tail(), False, 0
        keep = tail.chunks.append
        chunk, at_ns = self._first_chunk, self._first_byte_ns
        self._first_chunk = b""
        self._started = True
        self.client_since_ns = at_ns
        await sink.start(exchange.status, self._headers(exchange))
        try:
            while chunk:
                keep(chunk)
                if is_stream:
                    events += chunk.count(b"data:")
                    if ERROR_KEY in chunk and not stream_error:
                        stream_error = has_stream_error(tail.bytes())
                self.client_since_ns = at_ns
                await send(chunk)
                self.client_since_ns, self.upstream_since_ns = 0, at_ns
                chunk = await read()
                now = clock()
                if is_stream and chunk:
                    add_gap(now - at_ns)
                at_ns = now
                self.upstream_since_ns = 0
        except UpstreamBrokenError as error:
            return self._broken(error)
        finally:
            self._events = events
        exchange.close()
        end = tail.bytes()
        if is_stream and not stream_error and self._endpoint.end_mark not in end:
            return UpstreamFailed(UpstreamFailure.PROTOCOL)
        self._usage = usage_of(end)
        self.client_since_ns = at_ns
        await sink.end()
        return ResponseEnded(self._usage, stream_error)

    async def _send_error(self, effect: SendError) -> None:
        error = GatewayError(effect.status, effect.type, effect.code, effect.message, None, effect.retry_after_s)
        self.client_since_ns = now_ns()
        await self._sink.error(error, self._own_headers())

    def _abort(self) -> None:
        if self._exchange is not None:
            self._exchange.close()

    # --- the end ------------------------------------------------------------------------------------------------------

    def _client_gone(self) -> None:
        """Nothing here awaits: see the module."""
        for effect in self.flow.step(ClientGone(), now_ns()):
            if isinstance(effect, AbortUpstream):
                self._abort()
            elif isinstance(effect, Finish):
                self._finished(effect)
        self._abort()

    async def _last_resort(self) -> None:
        """A mistake of our own: give everything back and answer with what is true."""
        self._client_gone()
        request_id = self.request.request_id
        message = f"The gateway failed while it handled the request; its log has the reason under {request_id}."
        error = GatewayError(502, "server_error", "gateway_error", message)
        try:
            if self._started:
                await self._sink.stream_error(error, self._is_stream)
            else:
                await self._sink.error(error, self._own_headers())
        except Exception:
            logger.exception("Request %s could not be answered.", request_id)

    def _finished(self, finish: Finish) -> None:
        request, usage, core = self.request, self._usage, self._core
        e2e_ns = now_ns() - request.arrival_ns
        output_tokens = usage.output_tokens if usage.output_tokens is not None else self._events
        core.meter.ended(request.endpoint, finish, e2e_ns, usage, output_tokens, request.prompt_tokens)
        if usage.prompt_tokens and self._endpoint.prompt_weight == 1:
            core.ratio.observe(self._prompt_bytes, usage.prompt_tokens)
        if core.recorder is not None:
            recorded = request_line(
                core.recorder.header.started_ns,
                request,
                self._prompt_bytes,
                finish,
                usage,
                output_tokens,
                self._first_byte_ns,
                e2e_ns,
                self.flow.replica_id,
                self.flow.attempts,
            )
            core.recorder.put(recorded)
        if not logger.isEnabledFor(logging.INFO):
            return
        ttft_ms = (self._first_byte_ns - request.arrival_ns) / 1e6 if self._first_byte_ns else None
        line = {
            "event": "request_end",
            "id": request.request_id,
            "client_id": self._client_request_id,
            "endpoint": request.endpoint,
            "status": self._status,
            "outcome": finish.outcome.value,
            "reason": finish.reason.code,
            "replica": self.flow.replica_id,
            "attempts": self.flow.attempts,
            "ttft_ms": None if ttft_ms is None else round(ttft_ms, 3),
            "e2e_ms": round(e2e_ns / 1e6, 3),
            "prompt_tokens": usage.prompt_tokens,
            "output_tokens": output_tokens,
        }
        logger.info(json.dumps(line), extra={"log_to_stderr": False})

    # --- headers ------------------------------------------------------------------------------------------------------

    def _headers(self, exchange: Exchange) -> list[tuple[bytes, bytes]]:
        return [*exchange.relayed_headers(), *self._own_headers()]

    def _own_headers(self) -> list[tuple[bytes, bytes]]:
        headers = [(b"x-request-id", self.request.request_id.encode())]
        if self.flow.replica_id is not None:
            headers.append((b"x-tidegate-replica", self.flow.replica_id.encode()))
        return headers
