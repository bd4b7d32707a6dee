"""Decides who gets in: now, after waiting in the gateway's queue, or not at all.

    bounds    requests and tokens in flight, requests and tokens waiting                     429 inflight_*, queue_full
    class     more important requests that wait take shed_share of the TTFT objective        429 shed
    forecast  predicted TTFT above forecast_share of what the request is due                 429 overloaded
              or not even an idle fleet would meet its deadline                              429 deadline_unreachable
    tenant    its rates, concurrency and money (see tenants.py)                              429 tenant_*
    room      nobody waits or is on the way, and some replica begins within engine_wait_share: admitted, else queued

    due       = deadline - expected decoding, or max(TTFT objective of the class, stretch * TTFT on an idle fleet)
    predicted = tokens ahead / rate + engine wait + TTFT on an idle fleet

Those that wait are let through by :meth:`pump` in the order of :mod:`policies.admission.fair_queue`, as soon as some
replica would begin with the first of them, and refused when they would come too late: what is served, is served as
promised. Work whose client has left is never sent on.

Without any replica everybody is admitted within the bounds: the flow waits for the first one. Where the model may
sleep (``cold.py``) requests wait for it here, or are told when to come again.

``forecast_share`` and the classes' ``shed_share`` are those of the plan in force (``Plan.admission``), within bounds
that no plan can leave, and the configured ones where there is none.

What this must not do: choose a replica, or read bodies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from policies.admission.cold import ColdGate
from policies.admission.fair_queue import FairQueue, Waiting
from policies.admission.forecast import OUTPUT_WEIGHT, Capacity, Forecast
from policies.admission.limits import Admission
from policies.admission.promises import Promises
from policies.admission.refusal import Refusal
from policies.admission.reserve import Reserve
from policies.admission.spent import Spent
from policies.admission.tenants import TenantBook
from policies.config import PolicyConfig
from policies.steering import AdmissionKnobs
from policies.types import Request


class Entry(StrEnum):
    """How a request gets in."""

    ADMITTED = "admitted"
    QUEUED = "queued"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to one arrival."""

    entry: Entry
    refusal: Refusal | None = None
    output_tokens_cap: int | None = None
    """Its output is capped at this: there is a brownout and its tenant allows it."""


@dataclass(frozen=True, slots=True)
class Pumped:
    """Who waits no more."""

    granted: tuple[str, ...] = ()
    expired: tuple[str, ...] = ()


@dataclass(slots=True)
class _Held:
    """What one request in flight was let in with."""

    request: Request
    cost: int
    due_ns: int | None
    """When its first token must be there; ``None``: nobody can tell."""
    charged: bool = False
    """Its tenant was charged for it: it went past the queue, or out of it in its turn."""


NOBODY = Pumped()


class AdmissionGate:
    """One per gateway and model. Every request that was not refused is given back once, by :meth:`release`."""

    def __init__(
        self,
        config: PolicyConfig,
        capacity: Capacity,
        rng: Random,
        knobs: Callable[[int], AdmissionKnobs] = lambda now_ns: AdmissionKnobs(),  # noqa: ARG005 - no plan at any time
        cold: ColdGate | None = None,
        first: AdmissionGate | None = None,
    ) -> None:
        """``first``: the gate of the same gateway's first model. Tenants' limits and the bounds hold for both."""
        self._knobs = knobs
        self._cold = cold
        self.bounds: Admission = Admission(config.admission, None if first is None else first.bounds.peers)
        self.queue = FairQueue(config)
        self.tenants: TenantBook = TenantBook(config) if first is None else first.tenants
        self.forecast = Forecast(config.admission, capacity, rng)
        self.promises = Promises()
        self._reserve = Reserve(config)
        self._capacity = capacity
        self._held: dict[str, _Held] = {}
        self._on_the_way: set[str] = set()
        """Let through and not yet sent to a replica, so that no load book knows of them."""
        self.reconfigure(config)

    def reconfigure(self, config: PolicyConfig) -> None:
        """Promise what the objectives and classes of ``config`` say from now on; who waits keeps what it was promised.

        Everything else of ``config`` must be as before.
        """
        self._config = config
        if self._cold is not None:
            self._cold.reconfigure(config)
        share = config.admission.engine_wait_share
        self._engine_wait_ms = None if share is None else share * config.objectives.ttft_ms

    @property
    def requests(self) -> int:
        """Requests in flight, those that wait included."""
        return self.bounds.requests

    @property
    def tokens(self) -> int:
        """Their prompt plus largest output tokens."""
        return self.bounds.tokens

    # --- one request --------------------------------------------------------------------------------------------------

    def arrive(self, request: Request, now_ns: int) -> Verdict:
        """Let ``request`` in, keep it, or refuse it."""
        cost = self.forecast.cost(request.prompt_tokens, request.output_tokens_max)
        refusal = self._bounds_refusal(request, cost, now_ns)
        promised = self.promises.redeem(request.fingerprint, now_ns)
        queued, due_ns, expires_ns = False, None, 0
        if self._cold is not None and self._cold.is_cold(now_ns):
            queued = True
            if refusal is None:
                refusal, expires_ns = self._cold.enter(request, now_ns)
            else:
                refusal = self._cold.later(refusal, now_ns)
        elif refusal is None and self._engine_wait_ms is not None:
            free = not self.queue.requests and not self._kept_for_others(request.tenant, now_ns)
            queued = not (free and self._room(request.prompt_tokens, now_ns))
            refusal, due_ns, expires_ns = self._forecast_refusal(request, cost, queued, promised, now_ns)
        if refusal is None:
            output = request.output_tokens_max
            output = self._config.admission.output_tokens_estimate if output is None else output
            refusal = self.tenants.take(
                request.request_id,
                request.tenant,
                request.prompt_tokens,
                output,
                now_ns,
                request.output_tokens_most,
                request.prompt_tokens_most,
            )
        if refusal is not None:
            return Verdict(Entry.REFUSED, refusal)
        self.bounds.admit(request)
        held = self._held[request.request_id] = _Held(request, cost, due_ns)
        self._reserve.opened(request.tenant, now_ns)
        cap = self._brownout_cap(request, now_ns)
        if not queued:
            self.queue.charge(request.tenant, request.priority, request.task, cost)
            held.charged = True
            self._reserve.sent(request.tenant)
            self._on_the_way.add(request.request_id)
            self.forecast.watch(bool(self.queue.requests), 0, now_ns)
            return Verdict(Entry.ADMITTED, None, cap)
        self.forecast.watch(bool(self.queue.requests), 0, now_ns)
        self.queue.add(
            Waiting(
                request_id=request.request_id,
                tenant=request.tenant,
                priority=request.priority,
                task=request.task,
                tokens=cost,
                deadline_ns=request.deadline_ns,
                expires_ns=expires_ns,
                enqueued_ns=now_ns,
            )
        )
        return Verdict(Entry.QUEUED, None, cap)

    def sent(self, request_id: str) -> None:
        """The request is at a replica, and the load book knows it."""
        self._on_the_way.discard(request_id)

    def too_late(self, request: Request, ttft_ms: float | None, now_ns: int) -> Refusal | None:
        """Why a request that is to be sent should not be: the replica chosen for it, the best there is, is predicted to
        take ``ttft_ms`` to its first token, and it is due earlier.
        """
        held = self._held.get(request.request_id)
        if held is None or held.due_ns is None or ttft_ms is None:
            return None
        over_ms = (now_ns - held.due_ns) / 1e6 + ttft_ms
        if over_ms <= 0:
            return None
        text = f"every replica would take {ttft_ms:,.0f} ms or more to its first token, {over_ms:,.0f} ms too long"
        return self._later("overloaded", text, request, over_ms, held.cost, now_ns)

    def release(self, request_id: str, spent: Spent, now_ns: int) -> float:
        """The request is over and used so much; unknown ids change nothing. What its tenant is charged, in USD."""
        held = self._held.pop(request_id, None)
        if held is None:
            return 0.0
        self.bounds.release(request_id)
        self._on_the_way.discard(request_id)
        request = held.request
        self.queue.remove(request_id)
        served = held.charged and spent.counted
        if served and spent.output_tokens:
            self.forecast.learn(spent.prompt_tokens, spent.output_tokens)
        self._reserve.ended(request.tenant, held.charged, now_ns)
        if held.charged:
            uncached = spent.prompt_tokens - spent.cached_tokens
            real = uncached + OUTPUT_WEIGHT * spent.output_tokens if served else 0
            self.queue.charge(request.tenant, request.priority, request.task, real - held.cost)
        prompt, cached, output = spent.prompt_tokens, spent.cached_tokens, spent.output_tokens
        return self.tenants.settle(request_id, prompt, cached, output, now_ns, charged=served)

    def gave_up(self, request: Request, now_ns: int) -> Refusal:
        """Why a request that waited here is refused after all."""
        if self._cold is not None and self._cold.sleeps(now_ns):
            return self._cold.refusal(now_ns)
        text = f"it waited {(now_ns - request.arrival_ns) / 1e6:,.0f} ms for its turn and would come too late"
        cost = self.forecast.cost(request.prompt_tokens, request.output_tokens_max)
        wait_ms = self.forecast.wait_ms(self.queue.tokens, now_ns)
        return self._later("queue_timeout", text, request, wait_ms, cost, now_ns)

    @property
    def holds_for_starts(self) -> bool:
        """Whether the model may sleep, so that any request may be held while it starts."""
        return self._cold is not None and self._cold.may_sleep

    def is_cold(self, now_ns: int) -> bool:
        """Whether nobody serves, so that requests are held while the model starts, or refused where it cannot."""
        return self._cold is not None and self._cold.is_cold(now_ns)

    def sleeps(self, now_ns: int) -> bool:
        """Whether it is cold because it sleeps or starts."""
        return self._cold is not None and self._cold.sleeps(now_ns)

    def cannot_start(self, now_ns: int) -> str | None:
        """Why the model cannot start, if nobody serves it and it cannot."""
        return self._cold.cannot_start(now_ns) if self._cold is not None else None

    def start_wait_ms(self, request: Request, now_ns: int) -> float:
        """How much longer a request waits for a model that sleeps or starts."""
        if self._cold is None or not self._cold.sleeps(now_ns) or self._cold.cannot_start(now_ns) is not None:
            return 0.0
        return self._cold.patience_s(request, now_ns) * 1_000

    # --- those that wait ----------------------------------------------------------------------------------------------

    def pump(self, now_ns: int) -> Pumped:
        """Let through those whose turn it is; call it whenever load falls, members change, and from time to time."""
        queue = self.queue
        if not queue.requests:
            return NOBODY
        expired = queue.expired(now_ns, self._held_until)
        if self.cannot_start(now_ns) is not None:
            while (waiting := queue.peek()) is not None:
                queue.remove(waiting.request_id)
                expired.append(waiting)
        granted: list[str] = []
        tokens = 0
        skip: set[str] = set()
        while (head := queue.peek(skip)) is not None:
            if self._kept_for_others(head.tenant, now_ns):
                skip.add(head.tenant)
                continue
            if not self._room_for(head, now_ns):
                break
            queue.pop(skip)
            granted.append(head.request_id)
            if (held := self._held.get(head.request_id)) is not None:
                held.charged = True
                self._reserve.sent(head.tenant)
            tokens += head.tokens
            self._on_the_way.add(head.request_id)
        self.forecast.watch(True, tokens, now_ns)
        return Pumped(tuple(granted), tuple(w.request_id for w in expired))

    def _held_until(self, waiting: Waiting, now_ns: int) -> int:
        """Until when a request waits whose time is over: those that came before it was known that the last replica
        died wait for its start like those that come later.
        """
        held = self._held.get(waiting.request_id)
        waits = self._config.classes.of(waiting.priority).waits_for_start
        return now_ns + round(self.start_wait_ms(held.request, now_ns) * 1e6) if held is not None and waits else now_ns

    def _room_for(self, waiting: Waiting, now_ns: int) -> bool:
        held = self._held.get(waiting.request_id)
        return self._room(held.request.prompt_tokens if held is not None else waiting.tokens, now_ns)

    def _kept_for_others(self, tenant: str, now_ns: int) -> bool:
        """Whether the slots that are free are kept for other tenants."""
        slots = self._capacity.slots(now_ns)
        if slots is None or self._engine_wait_ms is None:
            return False
        kept = self._reserve.kept(tenant, slots[0], now_ns)
        return kept > 0 and slots[1] - len(self._on_the_way) - 1 < kept

    def _room(self, prompt_tokens: int, now_ns: int) -> bool:
        """Whether some replica would begin soon with such a prompt.

        Each request that is on the way counts as taking one of the replicas that would: a free slot is given once.

        A gateway that has nothing at any replica may always send one: samples that say that all are busy may be old,
        and nothing but a request would show it.
        """
        if self.is_cold(now_ns):
            return False
        if self._engine_wait_ms is None or not (self._on_the_way or self._capacity.own_requests):
            return True
        if not self._capacity.replicas(now_ns):
            return True
        needed = len(self._on_the_way) + 1
        return self._capacity.ready(prompt_tokens, self._engine_wait_ms, needed, now_ns) >= needed

    # --- refusals -----------------------------------------------------------------------------------------------------

    def _bounds_refusal(self, request: Request, cost: int, now_ns: int) -> Refusal | None:
        reason = self.bounds.refusal(request)
        admission = self._config.admission
        if reason is None and self.queue.requests and self.queue.requests >= admission.queue_requests_max:
            return self._overload("queue_full", f"{self.queue.requests} requests wait already", 0.0, cost, now_ns)
        if reason is None and self.queue.requests and self.queue.tokens + cost > admission.queue_tokens_max:
            return self._overload("queue_full", f"{self.queue.tokens} tokens wait already", 0.0, cost, now_ns)
        if reason is None:
            return None
        return self._overload(reason.code, reason.text, 0.0, cost, now_ns)

    def _forecast_refusal(
        self, request: Request, cost: int, queued: bool, promised: bool, now_ns: int
    ) -> tuple[Refusal | None, int | None, int]:
        """Why it cannot be served as promised, when its first token is due, and the last moment to send it on."""
        config, forecast = self._config, self.forecast
        idle_ms = self._capacity.idle_ttft_ms(request.prompt_tokens, now_ns)
        assert self._engine_wait_ms is not None
        if idle_ms is None:
            return None, None, now_ns + round(config.admission.no_replica_wait_ms * 1e6)
        of_class = config.classes.of(request.priority)
        due_ms = max(of_class.ttft_ms or config.objectives.ttft_ms, config.admission.stretch * idle_ms)
        if request.deadline_ns is not None:
            decode_ms = forecast.expected_output(request.output_tokens_max) * (self._capacity.gap_ms(now_ns) or 0.0)
            due_ms = (request.deadline_ns - now_ns) / 1e6 - decode_ms
            if due_ms < idle_ms:
                text = f"{idle_ms + decode_ms:,.0f} ms are needed and {due_ms + decode_ms:,.0f} ms are left"
                return Refusal("deadline_unreachable", text, should_retry=False), None, 0
        expires_ns = now_ns + round(max(0.0, due_ms - idle_ms - self._engine_wait_ms) * 1e6)
        due_ns = now_ns + round(due_ms * 1e6)
        if not queued or promised:
            return None, due_ns, expires_ns
        above_ms = forecast.wait_ms(self.queue.tokens_above(request.priority), now_ns)
        knobs = self._knobs(now_ns)
        if above_ms > of_class.shed_share * _within(knobs.shed_factor, 1.0) * config.objectives.ttft_ms:
            text = f"more important requests wait for the next {above_ms:,.0f} ms"
            return self._overload("shed", text, above_ms, cost, now_ns), None, 0
        waiting = ahead = self.queue.tokens_ahead(request.tenant, request.priority, request.task, cost)
        if not self.queue.has_begun(request.tenant, request.priority, request.task):  # else it waits for no newcomer
            weight = config.tenant(request.tenant).weight
            ahead += round(self.promises.ahead(request.priority, due_ms / 1_000, now_ns, request.tenant, weight, cost))
        wait_ms = forecast.wait_ms(ahead, now_ns)
        predicted_ms = wait_ms + self._engine_wait_ms + idle_ms
        allowed_ms = _within(knobs.forecast_share, config.admission.forecast_share) * due_ms
        if predicted_ms > max(allowed_ms, self._engine_wait_ms + idle_ms):
            text = f"the first token would take {predicted_ms:,.0f} ms, {due_ms:,.0f} ms are promised"
            return self._later("overloaded", text, request, forecast.wait_ms(waiting, now_ns), cost, now_ns), None, 0
        return None, due_ns, expires_ns

    def _later(self, code: str, text: str, request: Request, wait_ms: float, cost: int, now_ns: int) -> Refusal:
        """Refused now, and promised a time at which it is served; where none can be, the time of :meth:`_overload`."""
        after_s = self.promises.give(
            request.fingerprint,
            request.priority,
            cost,
            wait_ms / 1_000,
            self._rate_in(now_ns),
            self._config.admission.retry_after_s_max,
            now_ns,
            request.tenant,
            self._config.tenant(request.tenant).weight,
        )
        if after_s is None:
            return self._overload(code, text, wait_ms, cost, now_ns)
        return Refusal(code, text, retry_after_s=after_s)

    def _rate_in(self, now_ns: int) -> Callable[[float], float]:
        """This gateway's part of what is served per second, by seconds from now on."""
        rate, knobs = self.forecast.rate(now_ns) / self._config.gateways, self._knobs(now_ns)
        later = rate * (1 + knobs.coming / max(1, self._capacity.replicas(now_ns)))
        return lambda seconds: rate if seconds < knobs.coming_s else later

    def _overload(self, code: str, text: str, excess_ms: float, cost: int, now_ns: int) -> Refusal:
        return Refusal(code, text, retry_after_s=self.forecast.retry_after_s(excess_ms, cost, now_ns))

    def _brownout_cap(self, request: Request, now_ns: int) -> int | None:
        cap = self._config.tenant(request.tenant).brownout_output_tokens_max
        if cap is None or not self.queue.requests:
            return None
        if request.output_tokens_max is not None and request.output_tokens_max <= cap:
            return None
        pressure_ms = self.forecast.wait_ms(self.queue.tokens, now_ns)
        return cap if pressure_ms >= self._config.admission.brownout_share * self._config.objectives.ttft_ms else None


def _within(planned: float | None, configured: float) -> float:
    """What a plan says, where it says something that can be: above 0 and at most 1."""
    return planned if planned is not None and 0 < planned <= 1 else configured
