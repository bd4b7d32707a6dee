"""One gateway: drives the live ``RequestFlow`` of each request and the live ``Policies`` on the event heap.

It does what ``deployments/driver.py`` and ``core.py`` do on asyncio, effect by effect::

    Route            ask Policies.choose; answer Routed
    WaitForReplica   try again when membership changes and at each sweep; WaitedOut after its time
    Dispatch         one hop to the replica; refusal, break or bytes come back one hop later
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
from typing import TYPE_CHECKING

from autoscaling.simulator.context import Attempt, Call, Context
from autoscaling.simulator.meter import Meter
from autoscaling.simulator.replica import GONE, Replica
from policies.build import Policies, build_policies
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
from policies.flow import RequestFlow
from policies.types import GatewayReport, ReplicaId, Request, RouteChoice

if TYPE_CHECKING:
    from autoscaling.simulator.context import Ask
    from autoscaling.simulator.control import Controller
    from autoscaling.simulator.line import Line

SWEEP_NS = 250_000_000
"""Period of the watch over silent replicas and over calls that wait."""

REPORT_JITTER_SHARE = 0.1

Stats = Mapping[ReplicaId, Mapping[str, object]]


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
        self.policies: Policies = build_policies(scenario.config, seed, scenario.router)
        self.open = 0
        """Calls in flight."""
        self.waiting: dict[Call, frozenset[ReplicaId]] = {}
        """Calls that wait for any replica, with those they were tried on."""
        self.in_line = 0
        """Calls that wait for room."""
        self._ctx = ctx
        self._model = models[0]
        self._replicas = replicas
        self._line = line
        self._controllers = controllers
        self._ended = ended
        self._silent: dict[Call, int] = {}
        """Calls without a first byte and when they were sent, oldest first."""
        self._known: tuple[ReplicaId, ...] = ()
        self._stats: Stats = {}
        self._dropped: set[ReplicaId] = set()
        self.meter = Meter(f"gateway-{index}", models)
        self._report_rng = ctx.rng(f"gateway-report/{index}")

    def begin(self) -> None:
        """Start the watch and the reports."""
        first = round(self._ctx.delays.report * self._report_rng.random())
        self._ctx.queue.at(first, self._on_report)
        self._ctx.queue.at(SWEEP_NS, self._on_sweep)

    # --- one call -----------------------------------------------------------------------------------------------------

    def receive(self, now_ns: int, ask: Ask) -> Call:
        """A client's request is complete."""
        sim = ask.request
        request = Request(
            request_id=f"{sim.index}-{ask.tries}",
            model=self._model,
            endpoint="/v1/chat/completions",
            tenant=sim.tenant,
            prompt_tokens=sim.prompt_tokens,
            output_tokens_max=sim.output_tokens_max,
            blocks=sim.blocks,
            block_tokens=sim.block_tokens,
            stream=sim.stream,
            arrival_ns=ask.sent_ns + self._ctx.delays.client,
        )
        call = Call(ask, self, request, RequestFlow(self.policies.flow_context, request))
        self.open += 1
        self.meter.arrivals += 1
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

    def _perform(self, call: Call, effects: list[Effect], now_ns: int) -> Event | None:
        event: Event | None = None
        for effect in effects:
            if isinstance(effect, Route):
                event = self._route(call, effect.exclude, now_ns)
            elif isinstance(effect, Dispatch):
                event = self._dispatch(call, effect.replica_id, now_ns)
            elif isinstance(effect, Finish):
                self._finish(call, effect, now_ns)
            elif isinstance(effect, WaitForReplica):
                self._wait(call, effect, now_ns)
            elif isinstance(effect, AbortUpstream):
                self._abort(call, now_ns)
            elif isinstance(effect, SendError) and effect.retry_after_s is not None:
                call.retry_after_ns = round(effect.retry_after_s * 1e9)
        return event

    def _route(self, call: Call, exclude: frozenset[ReplicaId], now_ns: int) -> Event | None:
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
        self._drive(call, self._route(call, exclude, now_ns), now_ns)

    def _dispatch(self, call: Call, replica_id: ReplicaId, now_ns: int) -> Event | None:
        replica = self._replicas.get(replica_id)
        if replica is None or replica_id in self._dropped:
            return ReplicaRefused(RefusalKind.CONNECT)
        counters, ask, request, choice = self._ctx.counters, call.ask, call.request, call.flow.choice
        counters["dispatches"] += 1
        if call.attempt is not None:
            counters["retries"] += 1
        if choice is not None:
            self.meter.dispatched(replica_id, request.prompt_tokens, choice.predicted_hit_tokens.get(replica_id, 0))
        attempt = call.attempt = Attempt(call, replica)
        ask.attempts += 1
        replica.slots_used += 1
        self._silent[call] = now_ns
        self._ctx.queue.at(now_ns + self._ctx.delays.hop, replica.receive, attempt)
        return None

    def _abort(self, call: Call, now_ns: int) -> None:
        attempt = call.attempt
        if attempt is None or attempt.over:
            return
        self._hang_up(call, attempt)
        self._ctx.counters["aborts"] += 1
        self._ctx.queue.at(now_ns + self._ctx.delays.hop, _abort_upstream, attempt)

    def _hang_up(self, call: Call, attempt: Attempt) -> None:
        """Listen to ``attempt`` no more."""
        attempt.over = True
        self._silent.pop(call, None)

    def _finish(self, call: Call, finish: Finish, now_ns: int) -> None:
        attempt, request = call.attempt, call.request
        if attempt is not None:
            attempt.over = True
        self._silent.pop(call, None)
        if call in self.waiting:
            del self.waiting[call]
        if call.in_line and self._line is not None:
            self._line.remove(call)
        self.open -= 1
        self.meter.ended(finish, now_ns - request.arrival_ns, call.delivered, request.prompt_tokens)
        self._ended(call, finish, now_ns)
        call.attempt = None  # nobody needs it any more, and the two would keep each other alive

    # --- what replicas answer -----------------------------------------------------------------------------------------

    def refused(self, now_ns: int, refusal: tuple[Attempt, RefusalKind]) -> None:
        """A replica did not take a request."""
        attempt, kind = refusal
        if attempt.over:
            return
        call = attempt.call
        self._hang_up(call, attempt)
        if kind is RefusalKind.CONNECT:
            self._ctx.counters["refused_connect"] += 1
            self._drop(attempt.replica.id, now_ns)
        else:
            self._ctx.counters["refused_draining"] += 1
        self._drive(call, ReplicaRefused(kind), now_ns)

    def rejected(self, now_ns: int, attempt: Attempt) -> None:
        """The engine answered 400: a prompt that no replica of this kind can hold."""
        if attempt.over:
            return
        call = attempt.call
        self._hang_up(call, attempt)
        self._ctx.counters["rejected"] += 1
        self._drive(call, ResponseStarted(400), now_ns)
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
            call.delivered = attempt.job.output_done
        if kind is UpstreamFailure.TIMEOUT:
            self._silent.pop(call, None)
        else:
            self._hang_up(call, attempt)
        self._drive(call, UpstreamFailed(kind), now_ns)

    def first_byte(self, now_ns: int, attempt: Attempt) -> None:
        """The first body byte of a stream."""
        if attempt.over:
            return
        call, replica_id = attempt.call, attempt.replica.id
        call.first_byte_ns = now_ns
        sent_ns = self._silent.pop(call)
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
        call.delivered = job.output_done
        if call.first_byte_ns is None:
            call.first_byte_ns = now_ns
            self._silent.pop(call, None)
            self._drive(call, ResponseStarted(200), now_ns)
            self._drive(call, FirstByte(), now_ns)
        if call.ask.leave_tokens:
            client_ns = self._ctx.delays.client
            call.gone_ns, call.gone_why = now_ns + client_ns, "left"
            self._ctx.queue.at(now_ns + 2 * client_ns, self.gone, call)
            return
        usage = Usage(call.request.prompt_tokens, job.output_done, attempt.cached_tokens)
        self._drive(call, ResponseEnded(usage), now_ns)

    def gone(self, now_ns: int, call: Call) -> None:
        """The client closed its connection."""
        if not call.flow.done:
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
            event = self._route(call, exclude, now_ns)
            if event is None or (isinstance(event, Routed) and event.choice.tiers):
                del self.waiting[call]
                self._drive(call, event, now_ns)

    def _on_sweep(self, now_ns: int, _: object) -> None:
        self._ctx.queue.at(now_ns + SWEEP_NS, self._on_sweep)
        if self.waiting:
            self._wake(now_ns)
        limit_ns = now_ns - self._ctx.delays.first_byte_max
        expired = []
        for call, since_ns in self._silent.items():
            if since_ns >= limit_ns:
                break
            expired.append(call)
        for call in expired:
            if call.attempt is not None:
                self.broken(now_ns, (call.attempt, UpstreamFailure.TIMEOUT))

    # --- the fleet as this gateway knows it ---------------------------------------------------------------------------

    def take_members(self, members: tuple[ReplicaId, ...], now_ns: int) -> None:
        """Serve's list of running replicas."""
        self._known = members
        self._update(now_ns)
        if self.waiting:
            self._wake(now_ns)

    def take_stats(self, stats: Stats, now_ns: int) -> None:
        """The replicas' last samples."""
        self._stats = stats
        self._update(now_ns)

    def _update(self, now_ns: int) -> None:
        if self._dropped:  # Serve names those again that are not dead
            self._dropped = {r for r in self._dropped if self._replicas[r].phase in GONE and r in self._known}
        get, dropped = self._stats.get, self._dropped
        self.policies.update_members({r: get(r) for r in self._known if r not in dropped}, now_ns)

    def _drop(self, replica_id: ReplicaId, now_ns: int) -> None:
        """A port said no: leave the replica out until Serve names it again."""
        if replica_id in self._known:
            self._dropped.add(replica_id)
            get, dropped = self._stats.get, self._dropped
            self.policies.update_members({r: get(r) for r in self._known if r not in dropped}, now_ns)

    # --- reports ------------------------------------------------------------------------------------------------------

    def _on_report(self, now_ns: int, _: object) -> None:
        delays = self._ctx.delays
        jitter = 1 - REPORT_JITTER_SHARE + 2 * REPORT_JITTER_SHARE * self._report_rng.random()
        self._ctx.queue.at(now_ns + round(delays.report * jitter), self._on_report)
        plan = self.policies.plan_follower.current(now_ns)
        queued = len(self.waiting) + self.in_line
        reports = self.meter.reports(now_ns, self.open, queued, plan.seq if plan is not None else None)
        for controller, report in zip(self._controllers, reports, strict=True):
            self._ctx.queue.at(now_ns + delays.report_lag, self._deliver, (controller, report))

    def _deliver(self, now_ns: int, sent: tuple[Controller, GatewayReport]) -> None:
        controller, report = sent
        plan = controller.receive_gateway(report, now_ns)
        if plan is not None and controller is self._controllers[0]:
            self.policies.plan_follower.receive(plan, now_ns)

    def counts(self) -> dict[str, int]:
        """What it still holds; all but the budget must be zero once every request has ended."""
        context = self.policies.flow_context
        return {
            "requests": context.admission.requests,
            "tokens": context.admission.tokens,
            "inflight": context.book.inflight,
            "open": self.open,
            "waiting": len(self.waiting),
            "queued": self.in_line,
            "attempts_left": int(context.budget.attempts_left),
        }


def _abort_upstream(now_ns: int, attempt: Attempt) -> None:
    """The connection of an attempt is closed at its replica, wherever the work is by now."""
    attempt.aborted = True
    if attempt.where is not None:
        attempt.where.abort(now_ns, attempt)
