"""Owns one request from arrival to its single end: admit, route, dispatch, try again, finish.

    NEW --Arrived--> ROUTING --Routed(replicas)--> SENT --ResponseStarted--> ANSWERED --FirstByte--> STREAMING
     |                |   ^                         |                         |                          |
     | not admitted   |   +--- refused, broken -----+------- broken ----------+                          |
     v                v Routed(nobody)              | timeout, no try left    | ended, timeout           | ended, broken
    OVER <-------- WAITING --Routed(replicas)--> SENT                         v                          v
          WaitedOut                                 +----------------------> OVER <----------------------+
    ClientGone in any state but OVER --> GONE, where whatever still comes is ignored

``step`` takes what happened and returns what the driver must do, in order. The last effect of a request is its one
:class:`Finish`, and with it every count this flow raised (admission, load book) falls, whatever the path.

When a request is sent again:

* Only before its first body byte, only to a replica it was not sent to before, at most ``attempts_max`` attempts.
* A refused request was never started. A draining replica's refusal costs nothing (and is bounded by
  ``draining_refusals_max``); a failed connection costs an attempt and, at the next dispatch, one of the retry budget.
  When no other replica is left the request waits for a new one, ``no_replica_wait_ms`` in all, and the dispatch after
  a wait is free: it has loaded no engine yet, and a restarted fleet must not fail those who waited for it.
* A request that broke off on a replica may have broken it. It is tried on one other replica, paid from the budget;
  broken off there too, it is quarantined. It never waits for new replicas.
* A request that an engine answered, with whatever status, and one that timed out are never sent again.

What this must not do: input or output, read a clock, rank replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from policies.admission.limits import Admission
from policies.config import PolicyConfig
from policies.events import (
    AbortUpstream,
    Arrived,
    ClientGone,
    Dispatch,
    Effect,
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
    UpstreamFailed,
    UpstreamFailure,
    WaitedOut,
    WaitForReplica,
)
from policies.faults import RetryBudget
from policies.routing.load import LoadBook
from policies.routing.strategy import RoutingStrategy
from policies.types import Reason, ReplicaId, Request, RouteChoice

BROKEN_REPLICAS_MAX = 2
"""A request that broke off on this many replicas is quarantined: it may be what breaks them."""


class FlowError(Exception):
    """The driver reported an event that cannot happen in the flow's state: a programming error."""


class State(StrEnum):
    """Where a request is; the diagram is in the module's text."""

    NEW = "new"
    ROUTING = "routing"
    WAITING = "waiting"
    SENT = "sent"
    ANSWERED = "answered"
    STREAMING = "streaming"
    OVER = "over"
    GONE = "gone"


_AT_REPLICA = frozenset({State.SENT, State.ANSWERED, State.STREAMING})
_ENDED = frozenset({State.OVER, State.GONE})


@dataclass(frozen=True, slots=True)
class FlowContext:
    """What all flows of one gateway share."""

    admission: Admission
    budget: RetryBudget
    book: LoadBook
    router: RoutingStrategy
    config: PolicyConfig


class RequestFlow:
    """State machine of one request. ``step`` raises :class:`FlowError` on an event that is illegal in its state."""

    def __init__(self, ctx: FlowContext, request: Request) -> None:
        self.request = request
        self.attempts = 0
        """Replicas the request was sent to, those that refused because they drain not counted."""
        self.replica_id: ReplicaId | None = None
        """Replica it is, or was last, sent to."""
        self.choice: RouteChoice | None = None
        """The router's answer behind ``replica_id``."""
        self._ctx = ctx
        self._state = State.NEW
        self._status: int | None = None
        self._tried: set[ReplicaId] = set()
        self._broken_replicas = 0
        self._draining_refusals = 0
        self._next_dispatch_pays = False
        self._wait_until_ns: int | None = None

    @property
    def state(self) -> State:
        """Where the request is now."""
        return self._state

    @property
    def done(self) -> bool:
        """True once :class:`Finish` was returned."""
        return self._state in _ENDED

    def step(self, event: Event, now_ns: int) -> list[Effect]:
        """Take one event at ``now_ns`` of the driver's monotonic clock; return what to do, in this order."""
        if isinstance(event, ClientGone):
            return self._on_client_gone()
        if self._state is State.GONE:
            return []
        match self._state, event:
            case State.NEW, Arrived():
                return self._on_arrived()
            case ((State.ROUTING | State.WAITING), Routed(choice=choice)):
                return self._on_routed(choice, now_ns)
            case State.WAITING, WaitedOut():
                return self._no_capacity()
            case State.SENT, ReplicaRefused(kind=refusal):
                return self._on_refused(refusal)
            case State.SENT, ResponseStarted(status=status):
                return self._on_response_started(status)
            case State.ANSWERED, FirstByte():
                return self._on_first_byte()
            case ((State.ANSWERED | State.STREAMING), ResponseEnded()):
                return self._on_response_ended(event.stream_error)
            case ((State.SENT | State.ANSWERED | State.STREAMING), UpstreamFailed(kind=failure)):
                return self._on_upstream_failed(failure)
        raise FlowError(f"{type(event).__name__} cannot happen while a request is {self._state.value}")

    # --- one handler per event ----------------------------------------------------------------------------------------

    def _on_arrived(self) -> list[Effect]:
        refusal = self._ctx.admission.try_admit(self.request)
        if refusal is not None:
            message = f"The server is overloaded: {refusal.text}. Try again later."
            retry_after_s = self._ctx.config.admission.retry_after_s
            error = SendError(429, "rate_limit_error", "overloaded", message, retry_after_s)
            return [error, self._finish(Outcome.REFUSED, refusal.code, refusal.text)]
        self._ctx.budget.on_request()
        return self._route()

    def _on_routed(self, choice: RouteChoice, now_ns: int) -> list[Effect]:
        replica_id = next((r for r in choice.order if r not in self._tried), None)
        if replica_id is None:
            return self._on_nobody(now_ns)
        waited = self._state is State.WAITING
        if self._next_dispatch_pays and not waited and not self._ctx.budget.try_spend():
            return self._unavailable("retry_budget", "too many requests are being retried")
        return self._dispatch(choice, replica_id)

    def _on_nobody(self, now_ns: int) -> list[Effect]:
        if self._broken_replicas:
            return self._unavailable("upstream_failed", "the replica broke off and no other one is available")
        if self._wait_until_ns is None:
            self._wait_until_ns = now_ns + round(self._ctx.config.admission.no_replica_wait_ms * 1e6)
        left_ms = (self._wait_until_ns - now_ns) / 1e6
        if left_ms <= 0:
            return self._no_capacity()
        self._state = State.WAITING
        return [WaitForReplica(left_ms, frozenset(self._tried))]

    def _on_refused(self, kind: RefusalKind) -> list[Effect]:
        self._leave_replica()
        if kind is RefusalKind.CONNECT:
            self._next_dispatch_pays = True
            return self._try_again("replicas_refused", "no replica could be reached")
        self.attempts -= 1
        self._draining_refusals += 1
        if self._draining_refusals > self._ctx.config.faults.draining_refusals_max:
            return self._unavailable("replicas_refused", "every replica it was sent to is shutting down")
        return self._route()

    def _on_response_started(self, status: int) -> list[Effect]:
        self._state = State.ANSWERED
        self._status = status
        return [Relay()]

    def _on_first_byte(self) -> list[Effect]:
        self._state = State.STREAMING
        self._ctx.book.first_byte(self.request.request_id)
        return []

    def _on_response_ended(self, stream_error: bool) -> list[Effect]:
        status = self._status or 0
        if status >= 500:
            return [self._finish(Outcome.FAILED, "engine_server_error", f"the engine answered {status}")]
        if status >= 400:
            return [self._finish(Outcome.FAILED, "engine_client_error", f"the engine answered {status}")]
        if stream_error:
            return [self._finish(Outcome.FAILED, "engine_stream_error", "the engine reported an error in its stream")]
        return [self._finish(Outcome.SUCCEEDED, "ok", "the response is complete")]

    def _on_upstream_failed(self, kind: UpstreamFailure) -> list[Effect]:
        hang_up: list[Effect] = [] if kind is UpstreamFailure.RESET else [AbortUpstream()]
        if self._state is State.STREAMING:
            return [*hang_up, *self._stream_broken(kind)]
        if kind is UpstreamFailure.TIMEOUT:
            return [*hang_up, *self._timed_out()]
        if self._status is not None and self._status >= 400:
            return [*hang_up, *self._answer_broken(self._status)]
        return [*hang_up, *self._on_broken()]

    def _on_client_gone(self) -> list[Effect]:
        if self.done:
            return []
        hang_up: list[Effect] = [AbortUpstream()] if self._state in _AT_REPLICA else []
        finish = self._finish(Outcome.CANCELLED, "client_gone", "the client closed its connection")
        self._state = State.GONE
        return [*hang_up, finish]

    # --- going on -----------------------------------------------------------------------------------------------------

    def _on_broken(self) -> list[Effect]:
        self._leave_replica()
        self._broken_replicas += 1
        self._next_dispatch_pays = True
        if self._broken_replicas >= BROKEN_REPLICAS_MAX:
            return self._quarantined()
        return self._try_again("upstream_failed", "the replica broke off before its first byte")

    def _try_again(self, code: str, why: str) -> list[Effect]:
        attempts_max = self._ctx.config.faults.attempts_max
        if self.attempts >= attempts_max:
            return self._unavailable(code, f"{why}, after {self.attempts} of at most {attempts_max} attempts")
        return self._route()

    def _route(self) -> list[Effect]:
        self._state = State.ROUTING
        return [Route(frozenset(self._tried))]

    def _dispatch(self, choice: RouteChoice, replica_id: ReplicaId) -> list[Effect]:
        request = self.request
        hit_tokens = choice.predicted_hit_tokens.get(replica_id, 0)
        uncached_tokens = max(0, request.prompt_tokens - hit_tokens)
        self._ctx.book.dispatched(replica_id, request.request_id, uncached_tokens, request.prompt_tokens)
        self._ctx.router.dispatched(request, replica_id)
        self._state = State.SENT
        self._tried.add(replica_id)
        self._next_dispatch_pays = False
        self.attempts += 1
        self.replica_id, self.choice = replica_id, choice
        return [Dispatch(replica_id)]

    def _leave_replica(self) -> None:
        """Give back the load of the attempt that failed."""
        self._ctx.book.released(self.request.request_id)
        self._status = None

    # --- the ends -----------------------------------------------------------------------------------------------------

    def _no_capacity(self) -> list[Effect]:
        waited_ms = self._ctx.config.admission.no_replica_wait_ms
        why = f"no replica became available within {waited_ms:g} ms"
        return self._error(503, "no_capacity", "no_replica", why, self._ctx.config.admission.retry_after_s)

    def _unavailable(self, code: str, why: str) -> list[Effect]:
        return self._error(503, "upstream_unavailable", code, why, self._ctx.config.admission.retry_after_s)

    def _quarantined(self) -> list[Effect]:
        why = f"it broke off on {self._broken_replicas} replicas and is not tried on another"
        return self._error(503, "upstream_unavailable", "quarantined", why, None)

    def _timed_out(self) -> list[Effect]:
        return self._error(504, "timeout", "timeout", "the engine sent nothing within the time allowed", None)

    def _answer_broken(self, status: int) -> list[Effect]:
        why = f"the engine's answer with status {status} broke off"
        return self._error(502, "upstream_unavailable", "upstream_failed", why, None)

    def _stream_broken(self, kind: UpstreamFailure) -> list[Effect]:
        why = "the engine stalled" if kind is UpstreamFailure.TIMEOUT else "the connection to the engine broke"
        error = SendStreamError("server_error", "stream_broken", f"The response is incomplete: {why}.")
        return [error, self._finish(Outcome.FAILED, "stream_broken", why)]

    def _error(self, status: int, code: str, reason_code: str, why: str, retry_after_s: float | None) -> list[Effect]:
        """An error for a client that has seen no byte yet, and the end. ``reason_code`` is for counting."""
        message = f"The request could not be served: {why}."
        error = SendError(status, "server_error", code, message, retry_after_s)
        return [error, self._finish(Outcome.FAILED, reason_code, why)]

    def _finish(self, outcome: Outcome, code: str, text: str) -> Finish:
        """The one end of every path: all counts this flow raised fall here."""
        self._state = State.OVER
        self._ctx.book.released(self.request.request_id)
        self._ctx.admission.release(self.request.request_id)
        return Finish(outcome, Reason(code, text))
