"""Drives one request's ``RequestFlow`` on asyncio: does what the effects say, reports what came of it as events.

The same driver serves HTTP clients and calls on the deployment handle; they differ in their :class:`Sink` alone. It
runs in one task, and things that stop it from outside come through :meth:`RequestDriver.interrupt`: the client left, a
replica was silent for too long or is known to be gone, the request took too long. A cancellation from elsewhere (Serve
cancels the call of a client that left) counts as the client's leaving. Cleaning up after it awaits nothing, so the
connection to the replica is closed, and with it the engine's work aborted, before the task gives up control.

A stream that could be resumed runs through its journal (``resume.py``); after a break the flow may dispatch its
continuation, and the client sees one stream.

It must not decide: whether to wait, retry, resume, or answer with which error is the flow's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from deployments import keep_alive
from deployments.attempt import Dispatched
from deployments.clock import now_ns
from deployments.errors import ERROR_BODY_BYTES_MAX, GatewayError, engine_error
from deployments.handoff import Handoff
from deployments.inbound import Inbound
from deployments.race import Race
from deployments.relay import ERROR_KEY, EVENT_STREAM, Exchange, Tail, has_stream_error, usage_of
from deployments.resume import Journal, ResumeMismatchError
from deployments.sink import FAILURES, Interrupt, Sink, own_headers
from deployments.upstream import UpstreamBrokenError
from policies.events import (
    AbortUpstream,
    ArmHedge,
    Arrived,
    ClientGone,
    Dispatch,
    Effect,
    Enqueue,
    Event,
    Finish,
    FirstByte,
    Outcome,
    RefusalKind,
    Relay,
    ReplicaRefused,
    ResponseEnded,
    ResponseStarted,
    Route,
    Routed,
    SendError,
    SendStreamError,
    TimeUp,
    UpstreamFailed,
    UpstreamFailure,
    Usage,
    WaitForReplica,
)
from policies.flow import RequestFlow
from policies.types import Reason, ReplicaId

if TYPE_CHECKING:
    from deployments.core import GatewayCore

__all__ = ["Interrupt", "RequestDriver", "Sink"]

logger = logging.getLogger("ray.serve")


class RequestDriver:
    """One request from its arrival to its end. ``run`` is called once."""

    def __init__(self, core: GatewayCore, inbound: Inbound, sink: Sink) -> None:
        self.flow = RequestFlow(core.policies.flow_context, inbound.request, inbound.limits, inbound.outcome)
        self.request = inbound.request
        self.upstream_since_ns = 0
        """Since when the replica has been silent while it is its turn; 0 while it is not."""
        self.client_since_ns = 0
        """Since when the client has taken nothing while it is its turn; 0 while it is not."""
        self.first_byte_seen = False
        self.waiting = False
        """For its turn or for a replica."""
        self._core = core
        self._inbound = inbound
        self._record = inbound.record
        self._sink = sink
        self._body: bytes | None = None
        self._task: asyncio.Task[object] | None = None
        self._interrupt: Interrupt | None = None
        self._attempt: Dispatched | None = None
        self._hedge_ms: float | None = None
        self._journal: Journal | None = None
        self._status: int | None = None
        self._first_chunk = b""
        self._started = False
        self._is_stream = False
        self._usage = Usage()
        self._events = 0
        self._over = False
        self._failed_why = ""
        self._handoff = Handoff(core, inbound)

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve the request. Raises ``CancelledError`` when cancelled from outside, never anything else."""
        self._task = asyncio.current_task()
        self._core.enter(self)
        try:
            effects = self._step(Arrived())
            while (event := await self._next_event(effects)) is not None:
                effects = self._step(event)
        except Exception:
            logger.exception("Request %s failed in the gateway.", self.request.request_id)
            await self._last_resort()
        finally:
            self._over = True
            self._core.leave(self)

    def interrupt(self, why: Interrupt) -> None:
        """Stop waiting for whatever the driver waits for, because of ``why``."""
        if self._task is None or self._over or (self._interrupt is not None and why is not Interrupt.CLIENT_GONE):
            return
        if self._interrupt is None:
            self._task.cancel()
        self._interrupt = why  # whatever else there was: nobody waits for it

    def _step(self, event: Event) -> list[Effect]:
        self.flow.note_output(self._usage, self._output_tokens)
        effects = self.flow.step(event, now_ns())
        if self._core.policies.flow_context.admission.queue.requests:
            self._core.pump()
        return effects

    async def _next_event(self, effects: list[Effect]) -> Event | None:
        """Do ``effects``; what came of them, or ``None`` when the request is over."""
        try:
            return await self._perform(effects)
        except asyncio.CancelledError:
            why, self._interrupt = self._interrupt, None
            mine = why is not None and self._task is not None and self._task.uncancel() == 0
            self.upstream_since_ns = self.client_since_ns = 0
            self.waiting = False
            if mine and not self.flow.done:
                if why is Interrupt.TIME_UP:
                    return TimeUp()
                if why in FAILURES:
                    if self.flow.hedge_id is not None:  # both attempts were closed
                        self._step(UpstreamFailed(UpstreamFailure.LOST, hedge=True))
                    return self._broken(FAILURES[why])
            self._client_gone()
            if mine:
                return None
            raise

    async def _perform(self, effects: list[Effect]) -> Event | None:
        if not effects:
            return await self._stream()
        if isinstance(effects[-1], Finish):
            self._finished(effects[-1], effects)
        event: Event | None = None
        for effect in effects:
            match effect:
                case Enqueue():
                    event = await self._queue()
                case Route():
                    event = await self._route(effect)
                case ArmHedge(ms=ms):
                    self._hedge_ms = ms
                case Dispatch():
                    event = await self._dispatch(effect)
                case Relay():
                    event = await self._relay()
                case WaitForReplica(ms=ms, exclude=exclude):
                    event = await self._wait(ms, exclude)
                case _:
                    await self._close_with(effect)
        return event

    async def _close_with(self, effect: Effect) -> None:
        """Effects that nothing comes of."""
        match effect:
            case AbortUpstream():
                self._abort()
            case SendError():
                await self._send_error(effect)
            case SendStreamError():
                error = GatewayError(502, effect.type, effect.code, effect.message)
                self.client_since_ns = now_ns()
                await self._sink.stream_error(error, self._is_stream)

    # --- waiting and routing ------------------------------------------------------------------------------------------

    async def _queue(self) -> Event:
        self.waiting = True
        self._record.wait_begins(now_ns())
        event = await keep_alive.during(self._sink, self._core.wait_turn(self.request.request_id))
        self.waiting = False
        self._record.wait_ends(now_ns())
        return event

    async def _route(self, effect: Route) -> Event:
        self.upstream_since_ns = 0
        if effect.pause_ms:
            await asyncio.sleep(effect.pause_ms / 1_000)
        return Routed(await self._handoff.route(effect.exclude))

    async def _wait(self, ms: float, exclude: frozenset[ReplicaId]) -> Event:
        self.waiting = True
        self.upstream_since_ns = 0
        self._record.wait_begins(now_ns())
        event = await keep_alive.during(self._sink, self._core.wait_for_replica(self.request, ms, exclude))
        self.waiting = False
        self._record.wait_ends(now_ns())
        return event

    # --- dispatch -----------------------------------------------------------------------------------------------------

    async def _dispatch(self, effect: Dispatch) -> Event:
        hedge_ms, self._hedge_ms = self._hedge_ms, None
        if self._body is None:
            self._body = self._inbound.seal(self.flow.output_tokens_cap)
            self._journal = self._inbound.journal()
        path, body = self._inbound.endpoint.path, self._body
        if effect.resume:
            rest = self._continuation()
            if rest is None:
                return UpstreamFailed(UpstreamFailure.PROTOCOL)
            path, body = rest
        attempt = self._begin(effect.replica_id, False, effect.resume)
        if attempt is None:
            return ReplicaRefused(RefusalKind.CONNECT)
        self._attempt = attempt
        self.first_byte_seen = False
        self.upstream_since_ns = now_ns()
        request_id, trace = self.request.request_id, self._record.trace
        if self._handoff.waiting:
            self._attempt, event = await self._handoff.send(attempt, path, body, self._begin)
        elif hedge_ms is None:
            event = await attempt.open(path, body, request_id, trace)
        else:
            race = Race(self._begin, lambda a: a.open_and_read(path, body, request_id, trace), self._step)
            self._attempt, event = await race.winner(attempt, hedge_ms)
        return self._sent(self._attempt, event)

    def _begin(self, replica_id: ReplicaId, hedge: bool, resume: bool = False) -> Dispatched | None:
        """An attempt at ``replica_id``; ``None``: it is not there any more."""
        core = self._core
        target = core.membership.targets.get(replica_id)
        if target is None:
            return None
        if self._failed_why:
            core.meter.retried(self._failed_why)
            self._failed_why = ""
        if self.flow.choice is not None:
            core.meter.dispatched(self.flow.choice, replica_id, self.request.prompt_tokens)
        if hedge:
            core.meter.hedged()
        record = self._record.sent(replica_id, now_ns(), resume=resume, hedge=hedge)
        return Dispatched(core, replica_id, target, record)

    def _sent(self, attempt: Dispatched, event: Event) -> Event:
        if not isinstance(event, ResponseStarted) or event.status >= 500:
            self._failed_why = attempt.failed_why or "server_error"
            attempt.record.close(now_ns(), self._failed_why)
        return event

    def _continuation(self) -> tuple[str, bytes] | None:
        if self._journal is None:
            return None
        return self._journal.continuation(self._inbound.fields(), self._core.context_tokens_max)

    @property
    def _resumable(self) -> bool:
        return self._started and self._journal is not None and self._journal.goes_on(self._core.context_tokens_max)

    def _broken(self, kind: UpstreamFailure) -> UpstreamFailed:
        self._failed_why = kind.value
        if self._attempt is not None:
            self._attempt.record.close(now_ns(), kind.value)
        self._abort()
        return UpstreamFailed(kind, self._resumable)

    # --- the answer ---------------------------------------------------------------------------------------------------

    async def _relay(self) -> Event:
        """Wait for the first body byte. Answers with an error status are read whole and written again in our shape."""
        attempt = self._attempt
        assert attempt is not None
        exchange = attempt.exchange
        try:
            if exchange.status >= 400:
                return await self._relay_error(attempt)
            chunk = await attempt.read()
        except UpstreamBrokenError as error:
            return self._broken(error.kind)
        self.upstream_since_ns = 0
        is_stream = exchange.content_type == EVENT_STREAM
        if not chunk and (self._started or is_stream):
            return self._broken(UpstreamFailure.PROTOCOL)
        if self._started:
            self._first_chunk = chunk
            return FirstByte()
        if not chunk:
            self._status = exchange.status
            await self._sink.start(exchange.status, self._headers(exchange))
            exchange.close()
            await self._sink.end()
            return ResponseEnded()
        if attempt.begins_with_error(chunk):
            return self._sent(attempt, ResponseStarted(exchange.status))
        self._is_stream = is_stream
        self._first_byte(chunk, attempt)
        return FirstByte()

    def _first_byte(self, chunk: bytes, attempt: Dispatched) -> None:
        self.first_byte_seen = True
        self._first_chunk = chunk
        at_ns = now_ns()
        split = self._record.first_byte(attempt.record, at_ns)
        if not self._is_stream:
            return
        request, choice, meter = self.request, self.flow.choice, self._core.meter
        predicted = choice.predicted_ttft_ms.get(attempt.replica_id) if choice is not None else None
        self._record.predicted_ttft_ms = predicted
        since_dispatch_ns = at_ns - attempt.record.sent_ns
        meter.first_byte(request.endpoint, at_ns - request.arrival_ns, since_dispatch_ns, predicted)
        if split is not None:
            meter.split(split.queue_ns, split.route_ns, split.engine_ns, request.priority)

    async def _relay_error(self, attempt: Dispatched) -> Event:
        exchange, body = attempt.exchange, attempt.error
        if body is None:
            body = await exchange.read_all(ERROR_BODY_BYTES_MAX)
        self.upstream_since_ns = 0
        error = engine_error(exchange.status, exchange.content_type, body)
        after = exchange.header(b"retry-after") or b""
        error.retry_after_s = float(after) if after.isdigit() and len(after) < 8 else None
        exchange.close()
        self._status = error.status
        await self._sink.error(error, self._own_headers())
        return ResponseEnded()

    async def _stream(self) -> Event:
        """Pass the body on. What ends it is an event."""
        attempt, tail = self._attempt, Tail()
        assert attempt is not None
        if not self._is_stream:
            self._journal = None
        journal, take = self._journal, None
        if journal is not None:
            take = journal.take_resumed if self._started else journal.take
        if not self._started:
            self._started, self._status = True, attempt.exchange.status
            self.client_since_ns = now_ns()
            await self._sink.start(attempt.exchange.status, self._headers(attempt.exchange))
        self.first_byte_seen = True
        try:
            stream_error = await self._pass_on(attempt.exchange.connection.read, take, tail)
        except UpstreamBrokenError as error:
            if journal is not None and journal.finished:
                return await self._close_finished(journal, tail)
            return self._broken(error.kind)
        except ResumeMismatchError as error:
            logger.warning("Request %s could not be resumed exactly: %s.", self.request.request_id, error)
            return self._broken(UpstreamFailure.PROTOCOL)
        return await self._ended(attempt.exchange, tail, stream_error)

    async def _pass_on(
        self, read: Callable[[], Awaitable[bytes]], take: Callable[[bytes], bytes] | None, tail: Tail
    ) -> bool:
        """Chunk by chunk: the hot loop of the gateway, keep it small. Whether the stream carried an error event."""
        journal, keep, send, clock = self._journal, tail.chunks.append, self._sink.body, now_ns
        is_stream, add_gap, stream_error, events = self._is_stream, self._core.meter.itl.add, False, self._events
        chunk, at_ns = self._first_chunk, clock()
        self._first_chunk = b""
        try:
            while chunk:
                if take is not None:
                    chunk = take(chunk)
                keep(chunk)
                if is_stream:
                    events += chunk.count(b"data:")
                    if ERROR_KEY in chunk and not stream_error:
                        stream_error = has_stream_error(tail.bytes())
                if chunk:
                    self.client_since_ns = at_ns
                    await send(chunk)
                self.client_since_ns, self.upstream_since_ns = 0, at_ns
                if journal is not None and journal.error is not None:
                    break
                chunk = await read()
                now = clock()
                if is_stream and chunk:
                    add_gap(now - at_ns)
                at_ns = now
                self.upstream_since_ns = 0
        finally:
            self._events = events
        return stream_error

    async def _ended(self, exchange: Exchange, tail: Tail, stream_error: bool) -> Event:
        """The replica says that its answer is complete."""
        journal, end = self._journal, tail.bytes()
        if journal is not None and journal.error is not None and not journal.finished:
            return self._broken(UpstreamFailure.ENGINE)
        if self._is_stream and not stream_error and self._inbound.endpoint.end_mark not in end:
            if journal is not None and journal.finished:
                return await self._close_finished(journal, tail)
            return self._broken(UpstreamFailure.PROTOCOL)
        exchange.close()
        self._usage = self._handoff.spent(usage_of(end))
        self.client_since_ns = now_ns()
        await self._sink.end()
        return ResponseEnded(self._usage, stream_error)

    async def _close_finished(self, journal: Journal, tail: Tail) -> Event:
        """The answer was complete when it broke off: only its closing events are missing."""
        self._abort()
        closing = journal.closing()
        tail.chunks.append(closing)
        self._usage = self._handoff.spent(usage_of(tail.bytes()))
        self.client_since_ns = now_ns()
        await self._sink.body(closing)
        await self._sink.end()
        return ResponseEnded(self._usage)

    async def _send_error(self, effect: SendError) -> None:
        error = GatewayError(effect.status, effect.type, effect.code, effect.message, None, effect.retry_after_s)
        headers = self._own_headers()
        if effect.should_retry is not None:
            headers.append((b"x-should-retry", b"true" if effect.should_retry else b"false"))
        self.client_since_ns = now_ns()
        await self._sink.error(error, headers)

    def _abort(self) -> None:
        if self._attempt is not None:
            self._attempt.exchange.close()

    # --- the end ------------------------------------------------------------------------------------------------------

    @property
    def _output_tokens(self) -> int:
        """As the engine counted, or the journal, or one per event."""
        if self._usage.output_tokens is not None:
            return self._usage.output_tokens
        if self._journal is not None and self._journal.output_tokens:
            return self._journal.output_tokens
        return self._events

    def _client_gone(self, instead: Finish | None = None) -> None:
        """Nothing here awaits: see the module. ``instead`` is what is written down in place of the flow's own end."""
        effects = self._step(ClientGone())
        for effect in effects:
            if isinstance(effect, AbortUpstream):
                self._abort()
            elif isinstance(effect, Finish):
                self._finished(instead or effect, effects)
        self._abort()

    async def _last_resort(self) -> None:
        """A mistake of our own: give everything back and answer with what is true."""
        request_id = self.request.request_id
        message = f"The gateway failed while it handled the request; its log has the reason under {request_id}."
        self._status = self._status or 502
        self._client_gone(Finish(Outcome.FAILED, Reason("gateway_error", message)))
        error = GatewayError(502, "server_error", "gateway_error", message)
        try:
            if self._started:
                await self._sink.stream_error(error, self._is_stream)
            else:
                await self._sink.error(error, self._own_headers())
        except Exception:
            logger.exception("Request %s could not be answered.", request_id)

    def _finished(self, finish: Finish, effects: list[Effect]) -> None:
        record, usage = self._record, self._usage
        for effect in effects:
            if isinstance(effect, SendError):
                self._status = effect.status
        record.status = keep_alive.status_sent(self._sink, self._status)
        record.prompt_tokens, record.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        record.output_tokens = self._output_tokens
        record.usd = self.flow.usd
        record.finish(finish.outcome.value, finish.reason.code, now_ns())
        self._core.ended(self._inbound, finish, usage, self._output_tokens, self.flow)

    # --- headers ------------------------------------------------------------------------------------------------------

    def _headers(self, exchange: Exchange) -> list[tuple[bytes, bytes]]:
        headers = [*exchange.relayed_headers(), *self._own_headers()]
        if self._journal is not None:  # the journal changes lengths
            headers = [(name, value) for name, value in headers if name != b"content-length"]
        return headers

    def _own_headers(self) -> list[tuple[bytes, bytes]]:
        return own_headers(self.request.request_id, self.flow.replica_id, self.flow.output_tokens_cap)
