"""One gateway: drives the live ``RequestFlow`` of each request and the live ``Policies`` on the event heap.

It does what ``deployments/driver.py`` and ``core.py`` do on asyncio, effect by effect::

    Enqueue          keep the call; Granted or Expired when a pump says so, after each event and at each sweep
    Route            ask Policies.choose, after the pause; answer Routed
    WaitForReplica   try again when membership changes and at each sweep; WaitedOut after its time
    ArmHedge         HedgeDue after its time, if there is no first byte
    Dispatch         one hop to the replica; refusal, break or bytes come back one hop later; a continuation asks for
                     the tokens that are missing, with those that came as part of its prompt
    SendError        remember Retry-After for the client
    AbortUpstream    one hop to the replica, which aborts the engine's work
    Finish           count, and tell the client

The status line of an answer has no event of its own: it is reported with the first byte, because nothing depends on it
before. A request that is not streamed has its first byte with its last. Silence is looked for each :data:`SWEEP_NS`, as
live. Where a pool has ``ongoing_max``, the choice is reduced to replicas with room, as Serve's router reserves slots,
and a request for which there is none waits in one line for all gateways.

What this must not do: decide; whatever is chosen here comes from a policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from autoscaling.simulator.context import Attempt, Call, Context
from autoscaling.simulator.known_fleet import KnownFleet, Stats
from autoscaling.simulator.meter import Meter
from autoscaling.simulator.replica import Replica
from policies.build import Policies, build_policies
from policies.config import ObjectivesConfig
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
    RefusalKind,
    ReplicaRefused,
    ResponseEnded,
    ResponseStarted,
    Route,
    Routed,
    SendError,
    UpstreamFailed,
    UpstreamFailure,
    Usage,
    WaitedOut,
    WaitForReplica,
)
from policies.flow import RequestFlow, State
from policies.objectives import objectives_for
from policies.types import GatewayReport, Priority, ReplicaId, RouteChoice

if TYPE_CHECKING:
    from autoscaling.simulator.context import Ask
    from autoscaling.simulator.control import Controller
    from autoscaling.simulator.line import Line

SWEEP_NS = 250_000_000
"""Period of the watch over silent replicas and over calls that wait."""

LOST_AFTER_NS = 1_000_000_000
"""As in ``deployments/core.py``: silence after which a replica that says it is stuck is left."""


class Gateway:
    """See the module.

    Args:
        ctx: the run.
        index: number of this gateway.
        models: names of the pools' models; clients ask for the first.
        replicas: every replica of the pool that the router ranks, those that are gone as well, by id.
        line: where requests wait for room; ``None``: replicas take as many as come.
        controllers: those that get this gateway's reports; the first one's plan is followed.
        ended: told of every call that is over.
    """

    def __init__(
        self,
        ctx: Context,
        index: int,
        models: list[str],
        replicas: Mapping[ReplicaId, Replica],
        line: Line | None,
        controllers: list[Controller],
        ended: Callable[[Call, Finish, int], None],
    ) -> None:
        scenario = ctx.scenario
        self.index = index
        seed = ctx.rng(f"gateway/{index}").getrandbits(32)
        self.policies: Policies = build_policies(
            replace(scenario.config, gateways=scenario.gateways), seed, scenario.router
        )
        self.open = 0
        """Calls in flight."""
        self.waiting: dict[Call, frozenset[ReplicaId]] = {}
        """Calls that wait for any replica, with those they were tried on."""
        self.in_line = 0
        """Calls that wait for room."""
        self.turns: dict[str, Call] = {}
        """Calls in the gateway's own queue, by request id."""
        self._pumping = False
        self._resumes = all(pool.role == "both" for pool in scenario.pools)
        self._ctx = ctx
        self._model = models[0]
        self._line = line
        self._controllers = controllers
        self._ended = ended
        self._silent: dict[Attempt, int] = {}
        """Attempts without a first byte and when they were sent, oldest first."""
        self._fleet = KnownFleet(self.policies, replicas)
        self.meter = Meter(f"gateway-{index}", models, self._objectives_of)
        self._report_rng = ctx.rng(f"gateway-report/{index}")

    def _objectives_of(self, priority: Priority) -> ObjectivesConfig:
        return objectives_for(self.policies.config, self._model, priority)

    def begin(self) -> None:
        """Start the watch and the reports."""
        first = round(self._ctx.delays.report * self._report_rng.random())
        self._ctx.queue.at(first, self._on_report)
        self._ctx.queue.at(SWEEP_NS, self._on_sweep)

    # --- one call -----------------------------------------------------------------------------------------------------

    def receive(self, now_ns: int, ask: Ask) -> Call:
        """A client's request is complete."""
        request = ask.as_request(self._model, self._ctx.delays.client)
        call = Call(ask, self, request, RequestFlow(self.policies.flow_context, request))
        self.open += 1
        self.meter.arrived(request)
        self._drive(call, Arrived(), now_ns)
        return call

    def _drive(self, call: Call, event: Event | None, now_ns: int) -> None:
        """Step the flow, do what it wants, and go on with what came of that at once."""
        flow, observer = call.flow, self._ctx.observer
        while event is not None:
            effects = flow.step(event, now_ns)
            if observer is not None:
                observer.flow(now_ns, self.index, call.request.request_id, event, effects)
            event = self._perform(call, effects, now_ns)
        if not self._pumping and self.policies.flow_context.admission.queue.requests:
            self._pump(now_ns)

    def _pump(self, now_ns: int) -> None:
        """Let those go on whose turn it is, until nobody's is."""
        self._pumping = True
        while True:
            pumped = self.policies.pump(now_ns)
            for request_id in pumped.expired:
                self._drive(self.turns.pop(request_id), Expired(), now_ns)
            for request_id in pumped.granted:
                self._drive(self.turns.pop(request_id), Granted(), now_ns)
            if not pumped.granted:
                break
        self._pumping = False

    def _perform(self, call: Call, effects: list[Effect], now_ns: int) -> Event | None:
        event: Event | None = None
        for effect in effects:
            if isinstance(effect, Route):
                event = self._route(call, effect, now_ns)
            elif isinstance(effect, Dispatch):
                event = self._dispatch(call, effect, now_ns)
            elif isinstance(effect, Enqueue):
                self._ctx.counters["queued"] += 1
                self.turns[call.request.request_id] = call
            elif isinstance(effect, ArmHedge):
                call.hedge_ns = round(effect.ms * 1e6)
            elif isinstance(effect, Finish):
                self._finish(call, effect, now_ns)
            elif isinstance(effect, WaitForReplica):
                self._wait(call, effect, now_ns)
            elif isinstance(effect, AbortUpstream):
                self._abort(call, now_ns)
            elif isinstance(effect, SendError):
                call.retry_after_ns = round((effect.retry_after_s or 0.0) * 1e9)
                call.may_retry = effect.should_retry is not False
        return event

    def _route(self, call: Call, effect: Route, now_ns: int) -> Event | None:
        if not effect.pause_ms:
            return self._ask(call, effect.exclude, now_ns)
        self._ctx.queue.at(now_ns + round(effect.pause_ms * 1e6), self._on_pause_over, (call, effect.exclude))
        return None

    def _on_pause_over(self, now_ns: int, route: tuple[Call, frozenset[ReplicaId]]) -> None:
        call, exclude = route
        if call.flow.state is State.ROUTING:
            self._drive(call, self._ask(call, exclude, now_ns), now_ns)

    def _ask(self, call: Call, exclude: frozenset[ReplicaId], now_ns: int) -> Event | None:
        choice = self.policies.choose(call.request, exclude, now_ns)
        line = self._line
        if line is None:
            return Routed(choice)
        if not choice.tiers:
            line.remove(call)
            return Routed(choice)
        tiers = tuple(t for t in (line.with_room(tier) for tier in choice.tiers) if t)
        if tiers:
            line.remove(call)
            return Routed(RouteChoice(tiers, choice.reason, choice.predicted_ttft_ms, choice.predicted_hit_tokens))
        if not call.in_line:
            self._ctx.counters["slot_waits"] += 1
        line.add(call, exclude)
        return None

    def route_again(self, call: Call, exclude: frozenset[ReplicaId], now_ns: int) -> None:
        """There may be room now for a call from the line."""
        self._drive(call, self._ask(call, exclude, now_ns), now_ns)

    def _dispatch(self, call: Call, effect: Dispatch, now_ns: int) -> Event | None:
        replica = self._fleet.reachable(effect.replica_id)
        if replica is None:
            return ReplicaRefused(RefusalKind.CONNECT, hedge=effect.hedge)
        counters, ask, request, choice = self._ctx.counters, call.ask, call.request, call.flow.choice
        counters["dispatches"] += 1
        if effect.hedge:
            counters["hedges"] += 1
        elif effect.resume:
            counters["resumes"] += 1
        elif call.attempt is not None:
            counters["retries"] += 1
        if call.flow.attempts > 1:
            self.meter.extra_attempt()
        if choice is not None:
            hit_tokens = choice.predicted_hit_tokens.get(effect.replica_id, 0)
            self.meter.dispatched(effect.replica_id, request.prompt_tokens, hit_tokens)
        attempt = Attempt(call, replica, call.delivered if effect.resume else 0)
        if effect.hedge:
            call.hedge = attempt
        else:
            call.attempt = attempt
            if call.hedge_ns is not None:
                self._ctx.queue.at(now_ns + call.hedge_ns, self._on_hedge_due, attempt)
                call.hedge_ns = None
        ask.attempts += 1
        replica.slots_used += 1
        self._silent[attempt] = now_ns
        self._ctx.queue.at(now_ns + self._ctx.delays.hop, replica.receive, attempt)
        return None

    def _on_hedge_due(self, now_ns: int, attempt: Attempt) -> None:
        call = attempt.call
        if attempt is call.attempt and not attempt.over and call.flow.state is State.SENT:
            self._drive(call, HedgeDue(), now_ns)

    def _settle_hedge(self, call: Call, attempt: Attempt, now_ns: int) -> None:
        """``attempt`` gives the first byte: the other one ends."""
        if call.hedge is None:
            return
        if attempt is call.hedge:
            self._drive(call, HedgeWon(), now_ns)
        other = call.settle(attempt)
        if not other.over:
            self._hang_up(other)
            self._ctx.queue.at(now_ns + self._ctx.delays.hop, _abort_upstream, other)

    def _abort(self, call: Call, now_ns: int) -> None:
        for attempt in (call.attempt, call.hedge):
            if attempt is not None and not attempt.over:
                self._hang_up(attempt)
                self._ctx.counters["aborts"] += 1
                self._ctx.queue.at(now_ns + self._ctx.delays.hop, _abort_upstream, attempt)

    def _hang_up(self, attempt: Attempt) -> None:
        """Listen to ``attempt`` no more."""
        attempt.over = True
        self._silent.pop(attempt, None)

    def _finish(self, call: Call, finish: Finish, now_ns: int) -> None:
        request = call.request
        for attempt in (call.attempt, call.hedge):
            if attempt is not None:
                self._hang_up(attempt)
        self.turns.pop(request.request_id, None)
        if call in self.waiting:
            del self.waiting[call]
        if call.in_line and self._line is not None:
            self._line.remove(call)
        self.open -= 1
        self.meter.ended(request, finish, now_ns, call.first_byte_ns, call.delivered)
        self._ended(call, finish, now_ns)
        call.attempt = call.hedge = None  # nobody needs it any more, and the two would keep each other alive

    # --- what replicas answer -----------------------------------------------------------------------------------------

    def refused(self, now_ns: int, refusal: tuple[Attempt, RefusalKind]) -> None:
        """A replica did not take a request."""
        attempt, kind = refusal
        if attempt.over:
            return
        call = attempt.call
        self._hang_up(attempt)
        hedge = call.lost(attempt)
        if kind is RefusalKind.CONNECT:
            self._ctx.counters["refused_connect"] += 1
            self._fleet.drop(attempt.replica.id, now_ns)
        else:
            self._ctx.counters["refused_draining" if kind is RefusalKind.DRAINING else "refused_unavailable"] += 1
        self._drive(call, ReplicaRefused(kind, hedge), now_ns)

    def rejected(self, now_ns: int, answer: tuple[Attempt, int]) -> None:
        """The engine answered an error: 400 to a prompt that no replica of this kind can hold, 500 to anything."""
        attempt, status = answer
        call = attempt.call
        if attempt.over:
            return
        if status >= 500 and call.hedge is not None:
            self.broken(now_ns, (attempt, UpstreamFailure.PROTOCOL))
            return
        self._hang_up(attempt)
        self._settle_hedge(call, attempt, now_ns)
        self._ctx.counters["rejected"] += 1
        self._drive(call, ResponseStarted(status), now_ns)
        if call.flow.state is State.ANSWERED:
            self._drive(call, ResponseEnded(), now_ns)

    def broken(self, now_ns: int, failure: tuple[Attempt, UpstreamFailure]) -> None:
        """The connection to a replica broke, or was silent for too long."""
        attempt, kind = failure
        if attempt.over:
            return
        call = attempt.call
        self._ctx.counters["timeouts" if kind is UpstreamFailure.TIMEOUT else "broken"] += 1
        if call.first_byte_ns is not None and attempt.job is not None:
            if attempt.where is not None:
                attempt.where.note_output(attempt, now_ns)
            call.delivered = attempt.before + attempt.job.output_done
        if kind is UpstreamFailure.TIMEOUT:
            self._silent.pop(attempt, None)
        else:
            self._hang_up(attempt)
        hedge = call.lost(attempt)
        resumable = self._resumes and call.request.stream and call.delivered < call.ask.request.output_tokens
        self._drive(call, UpstreamFailed(kind, resumable and call.first_byte_ns is not None, hedge), now_ns)

    def first_byte(self, now_ns: int, attempt: Attempt) -> None:
        """The first body byte of a stream."""
        if attempt.over:
            return
        call, replica_id = attempt.call, attempt.replica.id
        self._settle_hedge(call, attempt, now_ns)
        sent_ns = self._silent.pop(attempt)
        if call.first_byte_ns is None:
            call.first_byte_ns = now_ns
            choice = call.flow.choice
            predicted = choice.predicted_ttft_ms.get(replica_id) if choice is not None else None
            self.meter.first_byte(now_ns - call.request.arrival_ns, now_ns - sent_ns, predicted)
        self._drive(call, ResponseStarted(200), now_ns)
        self._drive(call, FirstByte(), now_ns)

    def finished(self, now_ns: int, attempt: Attempt) -> None:
        """The last byte of an answer, or the last one the client stays for."""
        if attempt.over:
            return
        call, job = attempt.call, attempt.job
        assert job is not None, "an answer comes from a job"
        call.delivered = attempt.before + job.output_done
        if call.first_byte_ns is None:
            self._settle_hedge(call, attempt, now_ns)
            call.first_byte_ns = now_ns
            self._silent.pop(attempt, None)
            self._drive(call, ResponseStarted(200), now_ns)
            self._drive(call, FirstByte(), now_ns)
        if call.ask.leave_tokens:
            client_ns = self._ctx.delays.client
            call.gone_ns, call.gone_why = now_ns + client_ns, "left"
            self._ctx.queue.at(now_ns + 2 * client_ns, self.gone, call)
            return
        usage = Usage(
            call.request.prompt_tokens, call.delivered, min(attempt.cached_tokens, call.request.prompt_tokens)
        )
        call.flow.note_output(usage, call.delivered)
        self._drive(call, ResponseEnded(usage), now_ns)

    def gone(self, now_ns: int, call: Call) -> None:
        """The client closed its connection."""
        if not call.flow.done:
            call.flow.note_output(Usage(), call.delivered)
            self._drive(call, ClientGone(), now_ns)

    # --- waiting and silence ------------------------------------------------------------------------------------------

    def _wait(self, call: Call, effect: WaitForReplica, now_ns: int) -> None:
        self._ctx.counters["waits"] += 1
        self.waiting[call] = effect.exclude
        call.wait_version += 1
        self._ctx.queue.at(now_ns + round(effect.ms * 1e6), self._on_waited_out, (call, call.wait_version))

    def _on_waited_out(self, now_ns: int, wait: tuple[Call, int]) -> None:
        call, version = wait
        if call in self.waiting and call.wait_version == version:
            del self.waiting[call]
            self._drive(call, WaitedOut(), now_ns)

    def _wake(self, now_ns: int) -> None:
        """Ask the router again for those that wait."""
        for call, exclude in list(self.waiting.items()):
            event = self._ask(call, exclude, now_ns)
            if event is None or (isinstance(event, Routed) and event.choice.tiers):
                del self.waiting[call]
                self._drive(call, event, now_ns)

    def _on_sweep(self, now_ns: int, _: object) -> None:
        self._ctx.queue.at(now_ns + SWEEP_NS, self._on_sweep)
        if self.waiting:
            self._wake(now_ns)
        if self.turns:
            self._pump(now_ns)
        limit_ns = now_ns - self._ctx.delays.first_byte_max
        lost = self.policies.fleet.stuck(now_ns)
        expired = [a for a, since in self._silent.items() if a.replica.id in lost and since < now_ns - LOST_AFTER_NS]
        for attempt in expired:
            self.broken(now_ns, (attempt, UpstreamFailure.LOST))
        expired = []
        for attempt, since_ns in self._silent.items():
            if since_ns >= limit_ns:
                break
            expired.append(attempt)
        for attempt in expired:
            self.broken(now_ns, (attempt, UpstreamFailure.TIMEOUT))

    # --- the fleet as this gateway knows it ---------------------------------------------------------------------------

    def take_members(self, members: tuple[ReplicaId, ...], now_ns: int) -> None:
        """Serve's list of running replicas."""
        self._fleet.take_members(members, now_ns)
        if self.waiting:
            self._wake(now_ns)

    def take_stats(self, stats: Stats, now_ns: int) -> None:
        """The replicas' last samples."""
        self._fleet.take_stats(stats, now_ns)

    # --- reports ------------------------------------------------------------------------------------------------------

    def _on_report(self, now_ns: int, _: object) -> None:
        delays = self._ctx.delays
        self._ctx.queue.at(now_ns + self._ctx.report_period_ns(self._report_rng), self._on_report)
        plan = self.policies.plan_follower.current(now_ns)
        queued = len(self.waiting) + self.in_line + len(self.turns)
        context, follower = self.policies.flow_context, self.policies.plan_follower
        context.tasks.expire(now_ns)
        self.meter.tasks_ended(context.tasks.take_ended())
        plan_seq = plan.seq if plan is not None else None
        ejected, overrides = context.health.ejected(), follower.overrides(now_ns)
        tasks_open = context.tasks.open_tasks
        reports = self.meter.reports(now_ns, self.open, queued, plan_seq, ejected, overrides, tasks_open)
        for controller, report in zip(self._controllers, reports, strict=True):
            self._ctx.queue.at(now_ns + delays.report_lag, self._deliver, (controller, report))

    def _deliver(self, now_ns: int, sent: tuple[Controller, GatewayReport]) -> None:
        controller, report = sent
        plan = controller.receive_gateway(report, now_ns, self.policies.flow_context.admission.tenants)
        if plan is not None and controller is self._controllers[0]:
            self.policies.plan_follower.receive(plan, now_ns)

    def counts(self) -> dict[str, int]:
        """What it still holds; all but the budget must be zero once every request has ended."""
        context = self.policies.flow_context
        return {
            "requests": context.admission.requests,
            "tokens": context.admission.tokens,
            "inflight": context.book.inflight,
            "unproven": len(context.unproven),
            "open": self.open,
            "waiting": len(self.waiting),
            "queued": self.in_line + len(self.turns),
            "attempts_left": int(context.budget.attempts_left),
        }


def _abort_upstream(now_ns: int, attempt: Attempt) -> None:
    """The connection of an attempt is closed at its replica, wherever the work is by now."""
    attempt.aborted = True
    if attempt.where is not None:
        attempt.where.abort(now_ns, attempt)
