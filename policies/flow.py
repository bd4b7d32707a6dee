"""Owns one request from arrival to its single end: admit, queue, route, dispatch, try again, resume, finish.

    NEW --Arrived--> ROUTING --Routed(replicas)--> SENT --ResponseStarted--> ANSWERED --FirstByte--> STREAMING
     |      |         |   ^                         |                         |                       |      |
     |   QUEUED ------+   +--- refused, broken -----+------- broken ----------+                       |      |
     |      |  Granted|   +------------------- broken, and what was sent can be continued exactly ----+      |
     | refused, Expired                             | timeout, no try left    | ended, timeout               |
     v                v Routed(nobody)              v                         v           ended, broken      v
    OVER <-------- WAITING --Routed(replicas)--> SENT                        OVER                          OVER
          WaitedOut
    ClientGone in any state but OVER --> GONE, where whatever still comes is ignored; TimeUp ends any state

``step`` takes what happened and returns what the driver must do, in order. The last effect of a request is its one
:class:`Finish`; every count this flow raised (admission, tenant, task, load book) falls with it, whatever the path.

When a request is sent again, always to a replica it was not sent to before, at most ``attempts_max`` attempts in all:

* A refused request was never started. A draining replica's refusal costs nothing (and is bounded by
  ``draining_refusals_max``); a failed connection, and a server that answers 503 at once, cost an attempt and, at the
  next dispatch, one of the retry budget. When no other replica is left the request waits for a new one,
  ``no_replica_wait_ms`` in all; the dispatch after a wait is free, because it has loaded no engine yet. Where all
  replicas are left alone for failing it ends at once: 503 with the time of the next probe.
* A request that broke off on a replica, or was answered with a status from 500 on (a stream: began with such an error),
  is tried on one other, paid from the budget; broken off there too, it is quarantined. It never waits for new replicas.
* A stream that broke off after its first byte goes on at another replica where its driver says that this is exact, by
  the same rules. Where it cannot, one error event ends it.
* An interactive request without its first byte for long may run on a second replica beside the first (a hedge), paid
  from the budget; the first byte decides, and the other attempt is aborted.
* A request that an engine answered with any other status, and one that timed out, are never sent again.

What this must not do: input or output, read a clock, rank replicas.
"""

from __future__ import annotations

from policies.admission.gate import Entry
from policies.admission.refusal import Refusal
from policies.admission.spent import Spent
from policies.endings import broken_stream, refusal_error, server_error
from policies.events import (
    AbortUpstream,
    ArmHedge,
    Arrived,
    ClientGone,
    Dispatch,
    Effect,
    Enqueue,
    Event,
    Expired,
    Finish,
    FirstByte,
    Granted,
    HedgeDue,
    HedgeWon,
    Outcome,
    RefusalKind,
    Relay,
    ReplicaRefused,
    ResponseEnded,
    ResponseStarted,
    Route,
    Routed,
    TimeUp,
    UpstreamFailed,
    UpstreamFailure,
    Usage,
    WaitedOut,
    WaitForReplica,
)
from policies.faults import PROBATION
from policies.flow_context import AT_REPLICA, ENDED, FlowContext, FlowError, State
from policies.hedge import Hedge
from policies.tasks import NO_LIMITS, TaskLimits, TaskOutcome
from policies.types import Reason, ReplicaId, Request, RouteChoice

__all__ = ["BROKEN_REPLICAS_MAX", "FlowContext", "FlowError", "RequestFlow", "State"]

BROKEN_REPLICAS_MAX = 2
"""A request that broke off on this many replicas is quarantined: it may be what breaks them."""

_BREAKS = {
    UpstreamFailure.TIMEOUT: ("the engine stalled", "stream_broken"),
    UpstreamFailure.LOST: ("the engine stalled", "stream_broken"),
    UpstreamFailure.ENGINE: ("the engine reported an error", "engine_stream_error"),
}


class RequestFlow:
    """State machine of one request. ``step`` raises :class:`FlowError` on an event that is illegal in its state.

    ``limits`` and ``outcome`` are what the request says of its task.
    """

    def __init__(
        self, ctx: FlowContext, request: Request, limits: TaskLimits = NO_LIMITS, outcome: TaskOutcome | None = None
    ) -> None:
        self.request = request
        self.attempts = 0
        """Replicas the request was sent to, those that refused because they drain not counted."""
        self.replica_id: ReplicaId | None = None
        """Replica it is, or was last, sent to."""
        self.choice: RouteChoice | None = None
        """The router's answer behind ``replica_id``."""
        self.output_tokens_cap: int | None = None
        """The request is sent with this output limit: there is a brownout."""
        self.resumes = 0
        """Times a stream was continued at another replica."""
        self.usd = 0.0
        """What it cost its tenant, once it is over."""
        self._ctx = ctx
        self._limits = limits
        self._outcome = outcome
        self._state = State.NEW
        self._status: int | None = None
        self._begun = False
        """The client has got bytes of the answer."""
        self._tried: set[ReplicaId] = set()
        self._broken_replicas = 0
        self._draining_refusals = 0
        self._next_dispatch_pays = False
        self._wait_until_ns: int | None = None
        self._sent_ns = 0
        self._hedge = Hedge(ctx, request)
        self._answered = False
        self._usage = Usage()
        self._output_tokens = 0
        self._task_tokens: int | None = None
        """Held in the task's book; ``None``: nothing is."""

    @property
    def state(self) -> State:
        """Where the request is now."""
        return self._state

    @property
    def hedged(self) -> bool:
        """A second attempt ran beside the first."""
        return self._hedge.used

    @property
    def hedge_id(self) -> ReplicaId | None:
        """Where a second attempt runs now beside the first."""
        return self._hedge.replica_id

    @property
    def done(self) -> bool:
        """True once :class:`Finish` was returned."""
        return self._state in ENDED

    def note_output(self, usage: Usage, output_tokens: int) -> None:
        """What the driver knows of the answer's tokens so far; asked for before every :class:`Finish`."""
        self._usage, self._output_tokens = usage, output_tokens

    def step(self, event: Event, now_ns: int) -> list[Effect]:
        """Take one event at ``now_ns`` of the driver's monotonic clock; return what to do, in this order."""
        if isinstance(event, ClientGone):
            return self._on_client_gone(now_ns)
        if self._state is State.GONE:
            return []
        if isinstance(event, TimeUp):
            return self._on_time_up(now_ns)
        if self._hedge.replica_id is not None and self._state in AT_REPLICA:
            effects = self._on_beside_hedge(event, now_ns)
            if effects is not None:
                return effects
        effects = self._at_replica(event, now_ns) if self._state in AT_REPLICA else self._before_replica(event, now_ns)
        if effects is None:
            raise FlowError(f"{type(event).__name__} cannot happen while a request is {self._state.value}")
        return effects

    def _before_replica(self, event: Event, now_ns: int) -> list[Effect] | None:
        match self._state, event:
            case State.NEW, Arrived():
                return self._on_arrived(now_ns)
            case State.QUEUED, Granted():
                return self._route()
            case State.QUEUED, Expired():
                return self._on_expired(now_ns)
            case ((State.ROUTING | State.WAITING), Routed(choice=choice)):
                return self._on_routed(choice, now_ns)
            case State.WAITING, WaitedOut():
                return self._wait(0.0, now_ns)
        return None

    def _at_replica(self, event: Event, now_ns: int) -> list[Effect] | None:
        match self._state, event:
            case State.SENT, ReplicaRefused(kind=refusal):
                return self._on_refused(refusal, now_ns)
            case ((State.SENT | State.ANSWERED), ResponseStarted(status=status)):
                return self._on_response_started(status, now_ns)
            case State.ANSWERED, FirstByte():
                return self._on_first_byte(now_ns)
            case ((State.ANSWERED | State.STREAMING), ResponseEnded()):
                return self._on_response_ended(event, now_ns)
            case _, UpstreamFailed():
                return self._on_upstream_failed(event, now_ns)
            case State.SENT, HedgeDue():
                return self._on_hedge_due(now_ns)
        return None

    # --- getting in ---------------------------------------------------------------------------------------------------

    def _on_arrived(self, now_ns: int) -> list[Effect]:
        ctx, request = self._ctx, self.request
        if ctx.quarantine.holds(request.fingerprint, now_ns):
            text = "the same request broke off on two replicas before and may be what breaks them"
            refusal = Refusal("quarantined", text, "invalid_request_error", 422, should_retry=False)
            return self._refused(refusal, now_ns)
        stop = self._begin_call(now_ns)
        if stop is not None:
            return self._refused(stop, now_ns)
        verdict = ctx.admission.arrive(request, now_ns)
        if verdict.refusal is not None:
            return self._refused(verdict.refusal, now_ns)
        self.output_tokens_cap = verdict.output_tokens_cap
        if verdict.entry is Entry.QUEUED:
            self._state = State.QUEUED
            return [Enqueue()]
        return self._route()

    def _begin_call(self, now_ns: int) -> Refusal | None:
        """Count a call of its task, unless that is over. First of all: waiting helps no task that is stopped."""
        ctx, request = self._ctx, self.request
        if not request.task:
            return None
        output = request.output_tokens_max
        tokens = request.prompt_tokens + (ctx.config.admission.output_tokens_estimate if output is None else output)
        stop = ctx.tasks.call(request.tenant, request.task, self._limits, tokens, now_ns)
        if stop is None:
            self._task_tokens = tokens
        return stop

    def _on_expired(self, now_ns: int) -> list[Effect]:
        return self._refused(self._ctx.admission.gave_up(self.request, now_ns), now_ns)

    def _refused(self, refusal: Refusal, now_ns: int) -> list[Effect]:
        return [refusal_error(refusal), self._finish(Outcome.REFUSED, refusal.code, refusal.text, now_ns)]

    # --- to a replica -------------------------------------------------------------------------------------------------

    def _on_routed(self, choice: RouteChoice, now_ns: int) -> list[Effect]:
        replica_id = next((r for r in choice.order if r not in self._tried), None)
        if replica_id is None:
            return self._on_nobody(now_ns)
        waited = self._state is State.WAITING
        if not self._tried and not waited and choice.reason.code != PROBATION:
            late = self._ctx.admission.too_late(self.request, choice.predicted_ttft_ms.get(replica_id), now_ns)
            if late is not None:
                return self._refused(late, now_ns)
        if self._next_dispatch_pays and not waited and not self._ctx.budget.try_spend():
            return self._unavailable("retry_budget", "too many requests are being retried", now_ns)
        return self._dispatch(choice, replica_id, now_ns)

    def _on_nobody(self, now_ns: int) -> list[Effect]:
        if self._broken_replicas:
            return self._unavailable("upstream_failed", "the replica broke off and no other one is available", now_ns)
        probe_s = self._ctx.health.retry_after_s(now_ns)
        if probe_s is not None:
            error = server_error(503, "no_capacity", why := "every replica fails at present", probe_s)
            return [error, self._finish(Outcome.FAILED, "all_ejected", why, now_ns)]
        self._wait_until_ns = self._wait_until_ns or now_ns + round(self._ctx.config.admission.no_replica_wait_ms * 1e6)
        return self._wait((self._wait_until_ns - now_ns) / 1e6, now_ns)

    def _wait(self, left_ms: float, now_ns: int) -> list[Effect]:
        """For another replica; longer where the model starts meanwhile."""
        if left_ms <= 0 and (left_ms := self._ctx.admission.start_wait_ms(self.request, now_ns)) <= 0:
            fails = not self._begun and self._ctx.admission.cannot_start(now_ns) is not None
            return self._on_expired(now_ns) if fails else self._no_capacity(now_ns)
        self._state = State.WAITING
        return [WaitForReplica(left_ms, frozenset(self._tried))]

    def _dispatch(self, choice: RouteChoice, replica_id: ReplicaId, now_ns: int) -> list[Effect]:
        self._ctx.count_dispatch(self.request.request_id, self.request, choice, replica_id, now_ns)
        self._ctx.admission.sent(self.request.request_id)
        self._tried.add(replica_id)
        self.attempts += 1
        self._state = State.SENT
        self._next_dispatch_pays = False
        self.replica_id, self.choice = replica_id, choice
        self._sent_ns = now_ns
        self.resumes += self._begun
        dispatch = Dispatch(replica_id, resume=self._begun)
        hedge_ms = None if self._begun else self._hedge.delay_ms(choice, replica_id)
        return [dispatch] if hedge_ms is None else [ArmHedge(hedge_ms), dispatch]

    def _on_refused(self, kind: RefusalKind, now_ns: int) -> list[Effect]:
        self._leave_replica()
        health, replica_id = self._ctx.health, self.replica_id
        assert replica_id is not None
        if kind is not RefusalKind.DRAINING:
            health.failed(replica_id, 0, now_ns)
            self._next_dispatch_pays = True
            why = "no replica could be reached" if kind is RefusalKind.CONNECT else "the replicas are not available"
            return self._try_again("replicas_refused", why, now_ns)
        health.withdrew(replica_id, now_ns)
        self.attempts -= 1
        self._draining_refusals += 1
        if self._draining_refusals > self._ctx.config.faults.draining_refusals_max:
            return self._unavailable("replicas_refused", "every replica it was sent to is shutting down", now_ns)
        return self._route()

    # --- what a replica does ------------------------------------------------------------------------------------------

    def _on_response_started(self, status: int, now_ns: int) -> list[Effect]:
        health, replica_id, begun = self._ctx.health, self.replica_id, self._begun
        assert replica_id is not None
        if status >= 500:
            health.failed(replica_id, self.request.fingerprint, now_ns)
        elif begun and status >= 400:
            health.withdrew(replica_id, now_ns)
        others = not self._broken_replicas and self.attempts < self._ctx.config.faults.attempts_max
        if (begun and status >= 400) or (status >= 500 and others):
            return [AbortUpstream(), *self._on_broken(f"the replica answered {status}", now_ns)]
        self._state = State.ANSWERED
        self._status = status
        return [Relay()]

    def _on_first_byte(self, now_ns: int) -> list[Effect]:
        self._state = State.STREAMING
        self._ctx.first_byte(self.request.request_id)
        self._note_answered(now_ns)
        self._begun = True
        return []

    def _note_answered(self, now_ns: int) -> None:
        """The replica works: once per attempt that gave a byte or a proper end."""
        ctx, replica_id = self._ctx, self.replica_id
        assert replica_id is not None
        predicted_ms = self.choice.predicted_ttft_ms.get(replica_id) if self.choice is not None else None
        tells_speed = self.request.stream and not self._begun
        ttft_ms = (now_ns - self._sent_ns) / 1e6 if tells_speed else None
        ctx.health.answered(replica_id, now_ns, ttft_ms, predicted_ms if tells_speed else None)
        if not self._answered:
            self._answered = True
            ctx.budget.on_success()

    def _on_response_ended(self, event: ResponseEnded, now_ns: int) -> list[Effect]:
        status = self._status or 0
        if status >= 500:
            return [self._finish(Outcome.FAILED, "engine_server_error", f"the engine answered {status}", now_ns)]
        if self._state is State.ANSWERED:
            self._note_answered(now_ns)
        if status >= 400:
            return [self._finish(Outcome.FAILED, "engine_client_error", f"the engine answered {status}", now_ns)]
        if event.stream_error:
            return [self._finish(Outcome.FAILED, "engine_stream_error", "the stream carried an engine's error", now_ns)]
        return [self._finish(Outcome.SUCCEEDED, "ok", "the response is complete", now_ns)]

    def _on_upstream_failed(self, event: UpstreamFailed, now_ns: int) -> list[Effect]:
        kind = event.kind
        assert self.replica_id is not None
        self._ctx.health.failed(self.replica_id, self.request.fingerprint, now_ns)
        hang_up: list[Effect] = [] if kind is UpstreamFailure.RESET else [AbortUpstream()]
        if self._begun:
            why, code = _BREAKS.get(kind, ("the connection to the engine broke", "stream_broken"))
            if event.resumable and self._ctx.config.faults.resume and (self._status or 0) < 400:
                return [*hang_up, *self._on_broken(why, now_ns)]
            return [*hang_up, *self._stream_broken(why, now_ns, code)]
        if kind is UpstreamFailure.TIMEOUT:
            return [*hang_up, *self._timed_out("the engine sent nothing within the time allowed", now_ns)]
        if self._status is not None and self._status >= 400:
            why = f"the engine's answer with status {self._status} broke off"
            error = server_error(502, "upstream_unavailable", why)
            return [*hang_up, error, self._finish(Outcome.FAILED, "upstream_failed", why, now_ns)]
        return [*hang_up, *self._on_broken("the replica broke off before its first byte", now_ns)]

    def _on_client_gone(self, now_ns: int) -> list[Effect]:
        if self.done:
            return []
        left = [*self._hang_up(now_ns), self._finish(Outcome.CANCELLED, "client_gone", "the client left", now_ns)]
        self._state = State.GONE
        return left

    def _on_time_up(self, now_ns: int) -> list[Effect]:
        if self.done:
            return []
        hang_up, why = self._hang_up(now_ns), "it took longer than any request may"
        if self._begun:
            return [*hang_up, *self._stream_broken(why, now_ns, "total_timeout")]
        return [*hang_up, *self._timed_out(why, now_ns)]

    def _hang_up(self, now_ns: int) -> list[Effect]:
        """Leave whatever replica it is at, without a verdict on it."""
        if self._state not in AT_REPLICA:
            return []
        if self._state is not State.STREAMING:  # then it has answered
            for replica_id in filter(None, (self.replica_id, self._hedge.replica_id)):
                self._ctx.health.withdrew(replica_id, now_ns)
        return [AbortUpstream()]

    # --- a second attempt beside the first ----------------------------------------------------------------------------

    def _on_hedge_due(self, now_ns: int) -> list[Effect]:
        """The first byte is late: send the request to the next replica of the same choice as well."""
        if self.choice is None or self.attempts >= self._ctx.config.faults.attempts_max:
            return []
        if (replica_id := self._hedge.begin(self.choice, self._tried, now_ns)) is None:
            return []
        self._tried.add(replica_id)
        self.attempts += 1
        return [Dispatch(replica_id, hedge=True)]

    def _on_beside_hedge(self, event: Event, now_ns: int) -> list[Effect] | None:
        """What happens while two attempts run; ``None``: nothing special, the first one decides."""
        hedge, health = self._hedge, self._ctx.health
        assert hedge.replica_id is not None
        assert self.replica_id is not None
        if isinstance(event, HedgeWon):
            health.withdrew(self.replica_id, now_ns)
            self._promote_hedge(failed=False)
            return []
        if isinstance(event, UpstreamFailed | ReplicaRefused):
            broke = isinstance(event, UpstreamFailed)
            lost = hedge.replica_id if event.hedge else self.replica_id
            if event.kind is RefusalKind.DRAINING:
                health.withdrew(lost, now_ns)
            else:
                health.failed(lost, self.request.fingerprint if broke else 0, now_ns)
            self._broken_replicas += broke
            hedge.drop(failed=True) if event.hedge else self._promote_hedge(failed=True)
            return []
        if isinstance(event, ResponseStarted):
            health.withdrew(hedge.replica_id, now_ns)
            hedge.drop(failed=False)
        return None

    def _promote_hedge(self, failed: bool) -> None:
        """The second attempt is the request's own from now on; the first ``failed``, or was left."""
        assert self.choice is not None
        self._sent_ns = self._hedge.sent_ns
        self.replica_id = self._hedge.promote(self.choice, failed)
        self._state = State.SENT

    # --- going on -----------------------------------------------------------------------------------------------------

    def _on_broken(self, why: str, now_ns: int) -> list[Effect]:
        self._leave_replica()
        self._broken_replicas += 1
        self._next_dispatch_pays = True
        if self._broken_replicas >= BROKEN_REPLICAS_MAX:
            return self._quarantined(now_ns)
        return self._try_again("upstream_failed", why, now_ns)

    def _try_again(self, code: str, why: str, now_ns: int) -> list[Effect]:
        attempts_max = self._ctx.config.faults.attempts_max
        if self.attempts >= attempts_max:
            return self._unavailable(code, f"{why}, after {self.attempts} of at most {attempts_max} attempts", now_ns)
        return self._route(paused=True)

    def _route(self, paused: bool = False) -> list[Effect]:
        self._state = State.ROUTING
        pause_ms = self._ctx.config.faults.retry_pause_ms * (0.5 + self._ctx.rng.random()) if paused else 0.0
        return [Route(frozenset(self._tried), pause_ms)]

    def _leave_replica(self) -> None:
        """Give back the load of the attempt that failed."""
        self._ctx.released(self.request.request_id, failed=True)
        self._status = None

    # --- the ends -----------------------------------------------------------------------------------------------------

    def _no_capacity(self, now_ns: int) -> list[Effect]:
        why = f"no replica became available within {self._ctx.config.admission.no_replica_wait_ms:g} ms"
        error = server_error(503, "no_capacity", why, self._ctx.config.admission.retry_after_s)
        return [error, self._finish(Outcome.FAILED, "no_replica", why, now_ns)]

    def _unavailable(self, code: str, why: str, now_ns: int) -> list[Effect]:
        if self._begun:
            return self._stream_broken(why, now_ns, code)
        retry_after_s = self._ctx.health.retry_after_s(now_ns) or self._ctx.config.admission.retry_after_s
        error = server_error(503, "upstream_unavailable", why, retry_after_s)
        return [error, self._finish(Outcome.FAILED, code, why, now_ns)]

    def _quarantined(self, now_ns: int) -> list[Effect]:
        self._ctx.quarantine.add(self.request.fingerprint, now_ns)
        why = f"it broke off on {self._broken_replicas} replicas and is not tried on another"
        if self._begun:
            return self._stream_broken(why, now_ns, "quarantined")
        error = server_error(503, "upstream_unavailable", why, should_retry=False)
        return [error, self._finish(Outcome.FAILED, "quarantined", why, now_ns)]

    def _timed_out(self, why: str, now_ns: int) -> list[Effect]:
        return [server_error(504, "timeout", why), self._finish(Outcome.FAILED, "timeout", why, now_ns)]

    def _stream_broken(self, why: str, now_ns: int, code: str = "stream_broken") -> list[Effect]:
        return [broken_stream(why), self._finish(Outcome.FAILED, code, why, now_ns)]

    def _finish(self, outcome: Outcome, code: str, text: str, now_ns: int) -> Finish:
        """The one end of every path: all counts this flow raised fall here."""
        self._state = State.OVER
        ctx, request, usage = self._ctx, self.request, self._usage
        ctx.released(request.request_id, failed=outcome is Outcome.FAILED)
        self._hedge.drop(failed=outcome is Outcome.FAILED)
        spent = Spent.of(usage, request.prompt_tokens, self._output_tokens) if self.attempts else Spent()
        self.usd = ctx.admission.release(request.request_id, spent, now_ns)
        if self._task_tokens is not None:
            succeeded = outcome is Outcome.SUCCEEDED
            ctx.end_call(request, spent, self._task_tokens, self.usd, self.replica_id, succeeded, self._outcome, now_ns)
        return Finish(outcome, Reason(code, text))
