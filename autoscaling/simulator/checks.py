"""What must hold in every run, whatever goes wrong: watched event by event, and looked at again when the run is over.

Safety, at each event:

* ``one-end``       every request arrives once, ends once, and nothing happens to it afterwards
* ``one-answer``    each attempt gives one first byte, and a client gets an error before the first one or, within a
  stream, after it
* ``no-repeat``     nothing is sent again after a timeout, to a replica it was sent to before, or to more than
  ``attempts_max``; after a first byte only as the continuation of a stream that can be continued exactly
* ``poison``        what broke off on two replicas is not sent to a third, nor from that gateway when it comes again
* ``alone``         nobody sends to a replica whose breaker is open; no more are ejected by comparison than may be
* ``retry-budget``  of one gateway: paid attempts (retries, hedges, continuations) <= ``retry_share_max`` * answered
  requests + its part of ``retry_burst``
* ``leaving``       nobody sends to a replica that left or died once the fleet can know, and none takes a request then
* ``life``          replicas live in the order of their diagram; what is at one is there once, and leaves it
* ``bound``         admission, prefix index, ledger, windows of signals, engines, slots: each within its limit
* ``plan``          targets, strengths and knobs within their bounds; sequence numbers grow

Liveness, at the end, when faults are over and load is gone:

* ``drained``       every client's request has ended, every counter is zero, nothing waits or runs
* ``steady``        at no time the target goes up and down all the time
* ``settled``       the target stands still and as many replicas are ready, none starting or leaving
* ``recovered``     requests that came when all was quiet again were answered

What this must not do: change what it watches. A run with a checker has the digest of one without.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from autoscaling.simulator.records import PoolUse, RunResult
from autoscaling.simulator.replica import Replica
from autoscaling.simulator.spec import Pool, Scenario
from autoscaling.simulator.world import World
from policies.control.loop import TickResult
from policies.control.signals import GATEWAYS_MAX, REPLICAS_MAX
from policies.control.windows import WINDOW_REPORTS_MAX
from policies.events import (
    Arrived,
    ClientGone,
    Dispatch,
    Effect,
    Event,
    Finish,
    FirstByte,
    Outcome,
    RefusalKind,
    ReplicaRefused,
    ResponseEnded,
    ResponseStarted,
    SendError,
    SendStreamError,
    UpstreamFailed,
    UpstreamFailure,
    WaitForReplica,
)
from policies.faults import BreakerState, ReplicaHealth
from policies.faults.health import FAILURES
from policies.types import ReplicaId

STEADY_NS = 10_000_000_000
"""The fleet must stand still for this long before the end."""

TURNS_MAX, TURNS_NS = 5, 10_000_000_000
"""The target may turn from up to down and back this often within this time."""

BROKEN_MAX = 2
"""Replicas a request may break off on; ``policies/flow.py`` promises it, so it is not read from there."""

_NEXT = {
    "": ("starting",),
    "starting": ("ready", "stopped", "dead"),
    "ready": ("draining", "dead"),
    "draining": ("refusing", "stopped", "dead"),
    "refusing": ("stopped", "dead"),
    "stopped": (),
    "dead": (),
}


class Violation(Exception):  # noqa: N818 - a finding, not an error of the program
    """A rule does not hold: which, when, for which request, and what was seen."""

    def __init__(self, rule: str, at_ns: int, what: str, request_id: str = "") -> None:
        self.rule, self.at_ns, self.what, self.request_id = rule, at_ns, what, request_id
        of = f", request {request_id}" if request_id else ""
        super().__init__(f"{rule} at {at_ns / 1e9:.3f} s{of}: {what}")


class _Request:
    """What was seen of one request at one gateway."""

    __slots__ = (
        "answered", "attempts", "broken", "byte", "closed", "ended", "errors", "first_byte", "must_pay", "over",
        "status", "tried", "wait_until_ns", "waits",
    )  # fmt: skip

    def __init__(self) -> None:
        self.tried: list[ReplicaId] = []
        self.attempts = 0
        self.broken = 0
        self.first_byte = False
        """The client has got one."""
        self.byte = False
        """The last attempt gave one."""
        self.status = 0
        self.answered = False
        """It has paid into the retry budget."""
        self.errors = 0
        self.must_pay = False
        self.waits = False
        self.wait_until_ns: int | None = None
        self.closed = ""
        """Why it must not be sent any more."""
        self.ended = False
        """An engine's answer is complete."""
        self.over = False


class Checker:
    """An ``Observer`` that raises :class:`Violation`. One object watches one run."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._world: World | None = None
        self._requests: dict[str, _Request] = {}
        self._answered = [0] * scenario.gateways
        self._paid = [0] * scenario.gateways
        self._quarantined: set[tuple[int, str]] = set()
        """Gateway and the client's request, without the number of the try."""
        self._phases: dict[ReplicaId, tuple[str, int]] = {}
        self._left_ns: dict[ReplicaId, int] = {}
        """From when on a replica must not be sent anything, at the latest."""
        self._inside: dict[tuple[ReplicaId, str], bool] = {}
        """What is at an engine, and whether its first token was seen."""
        self._plans: dict[int, tuple[str, int]] = {}
        self._ended = False
        network, faults = scenario.network, scenario.config.faults
        self._lag_ns = round(network.membership_lag_ms * 1e6)
        self._health_ns = round(network.health_period_ms * 1e6)
        self._overhead_ns = max(round(p.profile.request_overhead_ms * 1e6) for p in scenario.pools)
        self._faults = faults
        self._burst = max(1.0, faults.retry_burst / scenario.gateways) if faults.retry_burst else 0.0

    def watch(self, world: World) -> None:
        """Look at the parts of this world at each tick."""
        self._world = world

    # --- requests -----------------------------------------------------------------------------------------------------

    def flow(self, now_ns: int, gateway: int, request_id: str, event: Event, effects: Sequence[Effect]) -> None:
        """A request's flow took a step."""
        request = self._requests.get(request_id)
        if isinstance(event, Arrived):
            if request is not None:
                raise Violation("one-end", now_ns, "it arrived twice", request_id)
            request = self._requests[request_id] = _Request()
        if request is None:
            raise Violation("one-end", now_ns, f"{type(event).__name__} before it arrived", request_id)
        if request.over and effects:
            what = ", ".join(type(e).__name__ for e in effects)
            raise Violation("one-end", now_ns, f"{what} after its end", request_id)
        self._take(now_ns, gateway, request, request_id, event)
        for n, effect in enumerate(effects):
            if request.over:
                raise Violation("one-end", now_ns, f"{type(effect).__name__} after its end", request_id)
            if isinstance(effect, Dispatch):
                self._on_dispatch(now_ns, gateway, request, request_id, effect)
            elif isinstance(effect, WaitForReplica):
                request.waits = True
                if request.wait_until_ns is None:
                    request.wait_until_ns = now_ns + round(self._scenario.config.admission.no_replica_wait_ms * 1e6)
            elif isinstance(effect, SendError | SendStreamError):
                self._on_error(now_ns, request, request_id, effect)
            elif isinstance(effect, Finish):
                self._on_finish(now_ns, gateway, request, request_id, effect, effects[:n])
        self._check_admission(now_ns, gateway)

    def _take(self, now_ns: int, gateway: int, request: _Request, request_id: str, event: Event) -> None:
        in_line = self._scenario.pools[0].ongoing_max is not None  # a wait for room, which has no limit
        until_ns = request.wait_until_ns if request.waits and not in_line else None
        if until_ns is not None and now_ns > until_ns + 1_000_000:
            late_ms = (now_ns - until_ns) / 1e6
            raise Violation("bound", now_ns, f"it waited {late_ms:g} ms too long for a replica", request_id)
        if isinstance(event, FirstByte):
            if request.byte:
                raise Violation("one-answer", now_ns, "a second first byte", request_id)
            request.byte = request.first_byte = True
            request.closed = "its first byte came"
            self._take_answer(gateway, request)
        elif isinstance(event, ResponseStarted):
            request.status = event.status
            if event.status >= (400 if request.first_byte else 500):
                request.broken += 1
                request.must_pay = True
        elif isinstance(event, ReplicaRefused):
            request.must_pay |= event.kind is not RefusalKind.DRAINING
            request.attempts -= event.kind is RefusalKind.DRAINING
        elif isinstance(event, UpstreamFailed):
            self._take_failure(request, event)
        elif isinstance(event, ResponseEnded):
            request.ended, request.closed = True, "it was answered"
            if request.status < 500:
                self._take_answer(gateway, request)
        elif isinstance(event, ClientGone):
            request.closed = request.closed or "its client left"

    def _take_answer(self, gateway: int, request: _Request) -> None:
        """It pays into the budget, once."""
        self._answered[gateway] += not request.answered
        request.answered = True

    @staticmethod
    def _take_failure(request: _Request, event: UpstreamFailed) -> None:
        request.broken += 1
        request.must_pay = True
        if request.first_byte and event.resumable:
            request.closed = ""
        elif event.kind is UpstreamFailure.TIMEOUT and not request.first_byte:
            request.closed = "it timed out"

    def _on_dispatch(self, now_ns: int, gateway: int, request: _Request, request_id: str, sent: Dispatch) -> None:
        faults, to = self._faults, sent.replica_id
        if request.closed:
            raise Violation("no-repeat", now_ns, f"sent to {to} although {request.closed}", request_id)
        if sent.resume != request.first_byte:
            what = "as a whole after its first byte" if request.first_byte else "in part before its first byte"
            raise Violation("no-repeat", now_ns, f"sent to {to} {what}", request_id)
        if to in request.tried:
            raise Violation("no-repeat", now_ns, f"sent to {to} again", request_id)
        if request.broken >= BROKEN_MAX:
            raise Violation("poison", now_ns, f"sent to {to} after {request.broken} broke off", request_id)
        if (gateway, request_id.partition("-")[0]) in self._quarantined:
            raise Violation("poison", now_ns, f"sent to {to} after it was quarantined", request_id)
        request.tried.append(to)
        request.attempts += 1
        request.byte = False
        if request.attempts > faults.attempts_max:
            what = f"attempt {request.attempts} of at most {faults.attempts_max}"
            raise Violation("no-repeat", now_ns, what, request_id)
        if sent.hedge or (request.must_pay and not request.waits):
            self._paid[gateway] += 1
            limit = faults.retry_share_max * self._answered[gateway] + self._burst
            if self._paid[gateway] > limit + 1e-6:
                what = f"extra attempt {self._paid[gateway]} of gateway {gateway}, {limit:g} are allowed"
                raise Violation("retry-budget", now_ns, what, request_id)
        if not sent.hedge:
            request.must_pay = request.waits = False
        self._check_receiver(now_ns, gateway, to, request_id)

    def _check_receiver(self, now_ns: int, gateway: int, to: ReplicaId, request_id: str) -> None:
        """Whether a gateway may send anything to this replica now."""
        phase, _ = self._phases.get(to, ("", 0))
        if phase in {"", "starting"}:
            raise Violation("leaving", now_ns, f"sent to {to}, which is {phase or 'unknown'}", request_id)
        left_ns = self._left_ns.get(to)
        if left_ns is not None and now_ns > left_ns:
            late_ms = (now_ns - left_ns) / 1e6
            raise Violation("leaving", now_ns, f"sent to {to}, {phase}, {late_ms:g} ms too late", request_id)
        if self._world is not None:
            health = self._world.gateways[gateway].policies.flow_context.health
            if health.state(to) is BreakerState.OPEN:
                raise Violation("alone", now_ns, f"sent to {to}: {health.reason(to)}", request_id)

    def _on_error(self, now_ns: int, request: _Request, request_id: str, effect: SendError | SendStreamError) -> None:
        request.errors += 1
        if request.errors > 1:
            raise Violation("one-answer", now_ns, "a second error", request_id)
        if isinstance(effect, SendStreamError) != request.first_byte:
            when = "after" if request.first_byte else "before"
            raise Violation("one-answer", now_ns, f"{type(effect).__name__} {when} its first byte", request_id)

    def _on_finish(
        self,
        now_ns: int,
        gateway: int,
        request: _Request,
        request_id: str,
        finish: Finish,
        before: Sequence[Effect],
    ) -> None:
        request.over = True
        if finish.reason.code == "quarantined":
            self._quarantined.add((gateway, request_id.partition("-")[0]))
        outcome = finish.outcome
        if outcome is Outcome.SUCCEEDED and not (request.first_byte and request.ended):
            raise Violation("one-answer", now_ns, "success without a complete answer", request_id)
        if outcome is Outcome.REFUSED and (request.tried or not request.errors):
            raise Violation("one-answer", now_ns, "refused after it was sent, or without an error", request_id)
        if outcome is Outcome.FAILED and not request.errors and not request.ended:
            what = f"failed ({finish.reason.code}) without a word to its client"
            raise Violation("one-answer", now_ns, what, request_id)
        if any(isinstance(e, Dispatch) for e in before):
            raise Violation("one-end", now_ns, "sent and ended in one step", request_id)

    # --- replicas -----------------------------------------------------------------------------------------------------

    def replica(self, now_ns: int, replica_id: ReplicaId, phase: str) -> None:
        """A replica entered ``phase``."""
        before, _ = self._phases.get(replica_id, ("", 0))
        if phase not in _NEXT[before] and not (self._ended and phase == "stopped"):
            raise Violation("life", now_ns, f"{replica_id} went from {before or 'nowhere'} to {phase}")
        self._phases[replica_id] = (phase, now_ns)
        if phase in {"draining", "dead", "stopped"} and replica_id not in self._left_ns:
            notice_ns = self._health_ns if phase == "dead" else 0
            self._left_ns[replica_id] = now_ns + notice_ns + self._lag_ns

    def engine(self, now_ns: int, replica_id: ReplicaId, phase: str, kind: str, request_id: str) -> None:
        """Something happened to a request at a replica."""
        key = (replica_id, request_id)
        known = key in self._inside
        if kind == "submit":
            self._on_submit(now_ns, replica_id, phase, request_id)
            self._inside[key] = False
        elif kind == "first_token":
            if not known or self._inside[key]:
                what = f"first token at {replica_id} of what is not there, or for the second time"
                raise Violation("life", now_ns, what, request_id)
            self._inside[key] = True
        elif kind == "finish":
            if not self._inside.pop(key, False):
                raise Violation("life", now_ns, f"finished at {replica_id} without a first token", request_id)
        else:  # abort and loss also reach what has not got to the engine yet
            self._inside.pop(key, None)
            if kind == "lost" and self._ended:
                raise Violation("drained", now_ns, f"still at {replica_id} when the run was over", request_id)

    def _on_submit(self, now_ns: int, replica_id: ReplicaId, phase: str, request_id: str) -> None:
        if (replica_id, request_id) in self._inside:
            raise Violation("life", now_ns, f"at {replica_id} twice", request_id)
        request = self._requests.get(request_id)
        if request is None or (replica_id not in request.tried and not replica_id.startswith("decode")):
            raise Violation("life", now_ns, f"at {replica_id}, where it was not sent", request_id)
        _, since_ns = self._phases[replica_id]
        late = phase == "refusing" and now_ns > since_ns + self._overhead_ns
        if phase not in {"ready", "draining", "refusing"} or late:
            raise Violation("leaving", now_ns, f"{replica_id} took it while {phase}", request_id)

    # --- bounds -------------------------------------------------------------------------------------------------------

    def tick(self, now_ns: int, pool: int, result: TickResult) -> None:
        """A controller ticked: look at the plan, and at everything that has a bound."""
        self._check_plan(now_ns, pool, result)
        signals = result.signals
        _bound(now_ns, "reporting replicas", len(signals.replicas), REPLICAS_MAX)
        _bound(now_ns, "reporting gateways", signals.gateways_known, GATEWAYS_MAX)
        for known in signals.replicas:
            _bound(now_ns, f"window of {known.replica_id}", len(known.window), WINDOW_REPORTS_MAX)
        if self._world is None:
            return
        state = self._world.controllers[pool].state
        if state is not None:
            _bound(now_ns, "ledger", len(state.ledger), self._scenario.config.control.decisions_max)
        for gateway in range(self._scenario.gateways):
            self._check_gateway(now_ns, gateway)
        serve = self._world.pools[pool]
        for replica in serve.replicas.values():
            self._check_replica(now_ns, serve.pool, replica)

    def _check_plan(self, now_ns: int, pool: int, result: TickResult) -> None:
        plan, scaling = result.plan, self._scenario.config.scaling
        epoch, seq = self._plans.get(pool, ("", 0))
        if plan.seq <= (seq if plan.epoch == epoch else 0):
            raise Violation("plan", now_ns, f"plan {plan.seq} of {plan.epoch} after {seq}")
        self._plans[pool] = (plan.epoch, plan.seq)
        target, strength = plan.replicas_target, plan.affinity_strength
        if target is not None and not scaling.replicas_min <= target <= scaling.replicas_max:
            bounds = f"{scaling.replicas_min}..{scaling.replicas_max}"
            raise Violation("plan", now_ns, f"target {target}, bounds are {bounds}")
        if strength is not None and not 0.0 <= strength <= 1.0:
            raise Violation("plan", now_ns, f"affinity strength {strength}")
        profile = self._scenario.pools[pool].profile
        for replica_id, knobs in plan.knobs.items():
            for what, value, most in (
                ("running sequences", knobs.running_seqs_max, profile.running_seqs_max),
                ("step tokens", knobs.step_tokens_max, profile.step_tokens_max),
            ):
                if value is not None and not 1 <= value <= most:
                    raise Violation("plan", now_ns, f"{what} of {replica_id}: {value}, bounds are 1..{most}")

    def _check_admission(self, now_ns: int, gateway: int) -> None:
        if self._world is None:
            return
        admission, config = self._world.gateways[gateway].policies.flow_context.admission, self._scenario.config
        _bound(now_ns, f"requests of gateway {gateway}", admission.requests, config.admission.inflight_requests_max)
        if admission.requests > 1:
            _bound(now_ns, f"tokens of gateway {gateway}", admission.tokens, config.admission.inflight_tokens_max)
        queue = admission.queue
        _bound(now_ns, f"queue of gateway {gateway}", queue.requests, max(1, config.admission.queue_requests_max))
        if queue.requests > 1:
            _bound(now_ns, f"queued tokens of gateway {gateway}", queue.tokens, config.admission.queue_tokens_max)

    def _check_gateway(self, now_ns: int, index: int) -> None:
        assert self._world is not None
        gateway, routing = self._world.gateways[index], self._scenario.config.routing
        policies, name = gateway.policies, f"gateway {index}"
        admitted = policies.flow_context.admission.requests
        self._check_admission(now_ns, index)
        self._check_ejected(now_ns, name, policies.flow_context.health)
        _bound(now_ns, f"prefix index of {name}", len(policies.index), routing.index_blocks_max)
        side_by_side = 1 if self._faults.hedge_after_factor is None else 2
        _bound(now_ns, f"load book of {name}", policies.flow_context.book.inflight, side_by_side * admitted)
        waiting = len(gateway.waiting) + gateway.in_line + len(gateway.turns)
        _bound(now_ns, f"waiting calls of {name}", waiting, admitted)
        if gateway.open != admitted:
            raise Violation("bound", now_ns, f"{name} has {gateway.open} calls open and {admitted} admitted")
        left = policies.flow_context.budget.attempts_left
        _bound(now_ns, f"retry budget of {name}", left, self._burst)

    def _check_ejected(self, now_ns: int, name: str, health: ReplicaHealth) -> None:
        states = health.states().values()
        away = [s for s in states if s.state is not BreakerState.CLOSED]
        compared = [s for s in away if s.code != FAILURES]
        most = int(self._faults.ejected_share_max * len(states)) if len(away) < len(states) else 0
        if len(compared) > most:
            raise Violation("alone", now_ns, f"{name} ejected {len(compared)} of {len(states)} by comparison")

    def _check_replica(self, now_ns: int, pool: Pool, replica: Replica) -> None:
        most = pool.ongoing_max
        _bound(now_ns, f"running at {replica.id}", replica.running, pool.profile.running_seqs_max)
        everybody = self._scenario.gateways * self._scenario.config.admission.inflight_requests_max
        _bound(now_ns, f"requests at {replica.id}", len(replica.inside), everybody if most is None else most)
        if replica.slots_used < len(replica.inside):
            what = f"{replica.slots_used} slots of {replica.id} are used by {len(replica.inside)}"
            raise Violation("bound", now_ns, what)

    # --- the end ------------------------------------------------------------------------------------------------------

    def end(self, now_ns: int, gateway: int, counts: dict[str, int]) -> None:
        """The run is over: what a gateway still holds."""
        self._ended = True
        held = {name: n for name, n in counts.items() if n and name != "attempts_left"}
        if held:
            raise Violation("drained", now_ns, f"gateway {gateway} still holds {held}")
        for pool in self._world.pools if self._world is not None else ():
            for replica in pool.replicas.values():
                if replica.slots_used or replica.inside:
                    what = f"{replica.slots_used} slots of {replica.id} are used, {len(replica.inside)} are inside"
                    raise Violation("drained", now_ns, what)

    def finish(self, result: RunResult, quiet_ns: int) -> None:
        """Look at what the run left. What came after ``quiet_ns`` met a healthy fleet without a backlog."""
        end_ns = result.end_ns
        for request_id, request in self._requests.items():
            if not request.over:
                raise Violation("drained", end_ns, "it has no end", request_id)
        for replica_id, request_id in self._inside:
            raise Violation("drained", end_ns, f"still at {replica_id}", request_id)
        self._check_rows(result, quiet_ns)
        for use in result.pools:
            _check_steady(use)
            late = [s for s in use.timeline if s.at_ns >= end_ns - STEADY_NS]
            for sample in late:
                if sample.target != late[-1].target:
                    what = f"target of the {use.role} pool went from {sample.target} to {late[-1].target}"
                    raise Violation("settled", sample.at_ns, f"{what} without load")
                if (sample.ready, sample.starting, sample.draining) != (sample.target, 0, 0):
                    raise Violation("settled", sample.at_ns, f"{use.role} pool: {sample}")
                if sample.waiting or sample.running:
                    raise Violation("drained", sample.at_ns, f"{use.role} pool: {sample}")

    def _check_rows(self, result: RunResult, quiet_ns: int) -> None:
        records = result.records
        if len(set(records.index)) != len(records) or len(records) != result.counters["requests"]:
            what = f"{result.counters['requests']} requests, {len(records)} rows, {len(set(records.index))} of them"
            raise Violation("one-end", result.end_ns, f"{what} different")
        for row in records:
            name = str(row.index)
            if row.outcome == "lost":
                raise Violation("drained", result.end_ns, f"its client still waits ({row.attempts} attempts)", name)
            fine = row.outcome == "succeeded" or row.reason in {"left", "engine_client_error"}
            if row.arrival_ns >= quiet_ns and not fine:
                what = f"{row.outcome} ({row.reason}) after all was quiet again, {row.e2e_ms:.0f} ms, tries {row.tries}"
                raise Violation("recovered", row.arrival_ns, what, name)


def _check_steady(use: PoolUse) -> None:
    turns: deque[int] = deque(maxlen=TURNS_MAX + 1)
    way = 0
    for before, after in pairwise(use.timeline):
        step = (after.target > before.target) - (after.target < before.target)
        if step and step == -way:
            turns.append(after.at_ns)
            if len(turns) > TURNS_MAX and turns[-1] - turns[0] <= TURNS_NS:
                what = f"the {use.role} pool's target turned {len(turns)} times in {TURNS_NS / 1e9:g} s"
                raise Violation("steady", after.at_ns, f"{what}, from {before.target} to {after.target} at last")
        way = step or way


def _bound(now_ns: int, what: str, value: float, most: float) -> None:
    if not 0 <= value <= most:
        raise Violation("bound", now_ns, f"{what}: {value:g}, the limit is {most:g}")
