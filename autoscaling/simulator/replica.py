"""One replica: the modelled engine behind the gate of its port, its samples, its reports, its knobs.

    starting --cold start--> ready --told to leave--> draining --grace over--> refusing --nobody inside--> stopped
        |                      |                          |                        |
        +---- start fails      +--------- killed ---------+------------------------+--------> dead

What a live replica does around its engine (``deployments/replica_host.py``, ``gate.py``, ``reporting.py``) is modelled
here: who may enter, what the sample for routers and the report for the controller hold, how the plan's knobs are
followed through the live ``PlanFollower``. Knobs and step models are never decided here.

The engine is passive. After every call on it the replica asks when something will happen next and keeps one event for
that time; an event for a time that was given up since is ignored.
"""

from __future__ import annotations

import math
from dataclasses import replace
from enum import StrEnum
from random import Random
from typing import TYPE_CHECKING

from autoscaling.simulator.context import Attempt, Context, ns
from autoscaling.simulator.device import roofline_of_profile
from autoscaling.simulator.engine import EngineEvent, EngineGauges, EngineWindow, Job, SimEngine
from autoscaling.simulator.gaps import GapCounts
from policies.events import RefusalKind, UpstreamFailure
from policies.plan_follower import PlanFollower
from policies.routing.sample import Sample, sample
from policies.speculation import NO_EXPLORATION, exploration
from policies.types import Knobs, Mode, Plan, ReplicaReport, ReplicaState

if TYPE_CHECKING:
    from autoscaling.simulator.serve import PoolServe

START_UP = Knobs()
"""No opinion: the engine's start-up values."""


class Phase(StrEnum):
    """Where a replica is in its life; the diagram is in the module's text."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    REFUSING = "refusing"
    STOPPED = "stopped"
    DEAD = "dead"


LEAVING = (Phase.DRAINING, Phase.REFUSING)
GONE = (Phase.STOPPED, Phase.DEAD)


class Totals:
    """What the replicas of a pool did, added up window by window."""

    __slots__ = ("busy_ms", "gaps", "preemptions", "prefix_hit_tokens", "prefix_query_tokens")

    def __init__(self) -> None:
        self.busy_ms = 0.0
        self.preemptions = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self.gaps = GapCounts()


class Replica:
    """See the module. ``serve`` is the pool's owner; ids are never used again."""

    def __init__(self, ctx: Context, serve: PoolServe, replica_id: str, now_ns: int) -> None:
        self.id = replica_id
        self.phase = Phase.STARTING
        self.began_ns = now_ns
        self.ready_ns = 0
        self.inside: dict[Attempt, None] = {}
        """Open at its port, oldest first."""
        self.slots_used = 0
        """Inside or on their way."""
        self.promised_tokens = 0
        """In a decode pool: prompt tokens of those, whose KV it holds or will hold."""
        self.running = 0
        self.waiting = 0
        """At the last sample or report."""
        self.muted_until_ns = 0
        self.refuses_until_ns = 0
        self.unavailable_until_ns = 0
        self.errors_until_ns = 0
        self.frozen_since_ns: int | None = None
        self.retired = False
        """It fails its health checks, because the plan says so."""
        self.speed_version = 0
        """Grows with each change of its speed by a fault."""
        self._ctx = ctx
        self._serve = serve
        self._profile = serve.pool.profile
        self._roofline = roofline_of_profile(self._profile)
        self._jobs: dict[Job, Attempt] = {}
        self._engine: SimEngine | None = None
        self._idle: tuple[EngineGauges, EngineWindow] | None = None
        """Its gauges and an empty window, while it has no work and nothing was done to it since the last window."""
        self._wake_ns: int | None = None
        self._overhead_ns = ns(self._profile.request_overhead_ms)
        self._first_byte_ns = ns(self._profile.first_token_overhead_ms)
        self._follower = PlanFollower()
        self._knobs, self._bounds = START_UP, NO_EXPLORATION
        self._idle_stats: Sample = {}
        """Its last sample, where it had no work then."""
        self._knobs_told = START_UP
        """As in the last report."""
        self._report_rng: Random | None = None
        self._report_seq = self._stats_seq = 0
        self._window_start_ns = 0
        self._cold_start_ms = 0.0
        self._step = ctx.scenario.config.routing.step_prior

    # --- life ---------------------------------------------------------------------------------------------------------

    def become_ready(self, now_ns: int, cold_start_ms: float) -> None:
        """The start is over: serve and report."""
        ctx = self._ctx
        self._engine = SimEngine(
            self._profile, ctx.rng(f"engine/{self.id}"), ctx.scenario.learn, ctx.scenario.config.routing.step_prior
        )
        self.ready_ns = self._window_start_ns = now_ns
        self._cold_start_ms = cold_start_ms
        self._report_rng = ctx.rng(f"report/{self.id}")
        self.enter(Phase.READY, now_ns)
        ctx.queue.at(now_ns + round(ctx.delays.report * self._report_rng.random()), self._on_report)

    def enter(self, phase: Phase, now_ns: int) -> None:
        """Change the phase."""
        self.phase = phase
        if self._ctx.observer is not None:
            self._ctx.observer.replica(now_ns, self.id, phase.value)

    def drain(self, now_ns: int) -> None:
        """Leave: serve on for the grace time, then refuse, then wait for those inside."""
        delays = self._ctx.delays
        self.enter(Phase.DRAINING, now_ns)
        self._ctx.queue.at(now_ns + min(delays.grace, delays.drain_max), self._on_grace_over)
        self._ctx.queue.at(now_ns + delays.drain_max, self._on_drain_over)

    def end(self, phase: Phase, now_ns: int) -> list[Attempt]:
        """Stop or die at once; returns what was inside, whose connections break."""
        self.enter(phase, now_ns)
        if self._catch_up(now_ns) is not None:
            self._take_window(now_ns)
        cut = list(self.inside)
        for attempt in cut:
            self._see(now_ns, "lost", attempt)
            self.note_output(attempt, now_ns)
            self._ctx.queue.at(
                now_ns + self._ctx.delays.hop, attempt.call.gateway.broken, (attempt, UpstreamFailure.RESET)
            )
        self.slots_used -= len(cut)
        self.inside.clear()
        self._jobs.clear()
        self._engine = self._wake_ns = self._idle = None
        self.running = self.waiting = 0
        return cut

    def _on_grace_over(self, now_ns: int, _: object) -> None:
        if self.phase is Phase.DRAINING:
            self.enter(Phase.REFUSING, now_ns)
            if self.is_stuck(now_ns):
                self._serve.cut(self, now_ns)
            else:
                self._look_if_empty(now_ns)

    def _on_drain_over(self, now_ns: int, _: object) -> None:
        if self.phase in LEAVING:
            self._serve.cut(self, now_ns)

    def _look_if_empty(self, now_ns: int) -> None:
        if self.phase is Phase.REFUSING and not self.inside:
            self._serve.stopped(self, now_ns)

    # --- the gate -----------------------------------------------------------------------------------------------------

    def receive(self, now_ns: int, attempt: Attempt) -> None:
        """A gateway's request is at the port."""
        if self.phase in GONE or now_ns < self.refuses_until_ns:
            self._refuse(attempt, RefusalKind.CONNECT, now_ns)
        elif self.phase is Phase.REFUSING:
            self._refuse(attempt, RefusalKind.DRAINING, now_ns)
        elif now_ns < self.unavailable_until_ns:
            self._refuse(attempt, RefusalKind.UNAVAILABLE, now_ns)
        else:
            self._admit(attempt, now_ns)

    def promise(self, attempt: Attempt) -> None:
        """A prefilled request will come with its KV."""
        self.slots_used += 1
        self.promised_tokens += attempt.call.request.prompt_tokens

    def receive_kv(self, now_ns: int, attempt: Attempt) -> bool:
        """The KV of a promised request is here; ``False``: it is not taken, or nobody wants it any more."""
        unwanted = attempt.over or attempt.aborted
        if unwanted or self.phase in GONE or self.phase is Phase.REFUSING or now_ns < self.refuses_until_ns:
            self.slots_used -= 1
            self.promised_tokens -= attempt.call.request.prompt_tokens
            return False
        self._admit(attempt, now_ns)
        return True

    def _refuse(self, attempt: Attempt, kind: RefusalKind, now_ns: int) -> None:
        self.slots_used -= 1
        self._ctx.queue.at(now_ns + self._ctx.delays.hop, attempt.call.gateway.refused, (attempt, kind))
        self._serve.room(now_ns)

    def _admit(self, attempt: Attempt, now_ns: int) -> None:
        attempt.received_ns = now_ns
        attempt.where = self
        self.inside[attempt] = None
        if self._overhead_ns and not self._serve.is_decode:
            self._ctx.queue.at(now_ns + self._overhead_ns, self._submit, attempt)
        else:
            self._submit(now_ns, attempt)

    def _submit(self, now_ns: int, attempt: Attempt) -> None:
        if attempt not in self.inside:
            return
        engine = self._catch_up(now_ns)
        assert engine is not None, "a replica with a request inside has an engine"
        ask, before = attempt.call.ask, attempt.before
        too_long = ask.request.prompt_tokens + before >= engine.tokens_max
        if too_long or now_ns < self.errors_until_ns:
            answer = (attempt, 400 if too_long else 500)
            self._ctx.queue.at(now_ns + self._ctx.delays.hop, attempt.call.gateway.rejected, answer)
            self._leave(attempt, now_ns)
            return
        tokens = (ask.leave_tokens or ask.request.output_tokens) - before
        request = ask.request
        if before:
            prompt_tokens, output_tokens = request.prompt_tokens + before, request.output_tokens - before
            request = replace(request, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        serve = self._serve
        job = Job(request, max(1, tokens), prefill_only=serve.is_prefill, kv_ready=serve.is_decode)
        attempt.job = job
        self._idle = None
        self._jobs[job] = attempt
        self._see(now_ns, "submit", attempt)
        engine.submit(job, now_ns)
        self._wake_again()

    def abort(self, now_ns: int, attempt: Attempt) -> None:
        """The gateway closed the connection; unknown attempts change nothing."""
        if attempt not in self.inside:
            return
        job = attempt.job
        self._see(now_ns, "abort", attempt)
        if job is not None and self._jobs.pop(job, None) is not None:
            engine = self._catch_up(now_ns)
            assert engine is not None, "a replica with a request inside has an engine"
            engine.abort(job, now_ns)
            self._wake_again()
        self._leave(attempt, now_ns)

    def _leave(self, attempt: Attempt, now_ns: int) -> None:
        if self.inside.pop(attempt, self) is self:
            return
        self.slots_used -= 1
        if self._serve.is_decode:
            self.promised_tokens -= attempt.call.request.prompt_tokens
        if self.phase is Phase.REFUSING:
            self._look_if_empty(now_ns)
        else:
            self._serve.room(now_ns)

    # --- the engine ---------------------------------------------------------------------------------------------------

    def _wake_again(self) -> None:
        """Keep one event for the engine's next moment."""
        engine = self._engine
        wake_ns = engine.wake_ns() if engine is not None else None
        if wake_ns != self._wake_ns:
            self._wake_ns = wake_ns
            if wake_ns is not None:
                self._ctx.queue.at(wake_ns, self._on_wake)

    def _on_wake(self, now_ns: int, _: object) -> None:
        if now_ns == self._wake_ns:
            self._wake_ns = None
            self._catch_up(now_ns)
            self._wake_again()

    def _catch_up(self, now_ns: int) -> SimEngine | None:
        """Take what the engine did up to now; a leaving replica may have stopped with that: ``None``."""
        if self._engine is not None:
            for event in self._engine.advance(now_ns):
                self._take(event, now_ns)
        return self._engine

    def _take(self, event: EngineEvent, now_ns: int) -> None:
        attempt = self._jobs.get(event.job)
        if attempt is None:
            return
        queue, hop_ns = self._ctx.queue, self._ctx.delays.hop
        if event.kind == "first_token":
            self._see(now_ns, "first_token", attempt)
            if not self._serve.is_prefill and attempt.call.request.stream:
                attempt.first_byte_at_ns = now_ns + self._first_byte_ns + hop_ns
                queue.at(attempt.first_byte_at_ns, attempt.call.gateway.first_byte, attempt)
            return
        del self._jobs[event.job]
        self._see(now_ns, "finish", attempt)
        if self._serve.is_prefill:
            self._serve.prefilled(attempt, now_ns)
        else:
            queue.at(max(now_ns + hop_ns, attempt.first_byte_at_ns), attempt.call.gateway.finished, attempt)
        self._leave(attempt, now_ns)

    def set_speed(self, factor: float, now_ns: int) -> None:
        """Steps take ``factor`` times as long from now on; ``math.inf``: frozen."""
        engine = self._catch_up(now_ns)
        if engine is None:
            return
        self._idle = None
        engine.set_speed(factor, now_ns)
        self.frozen_since_ns = now_ns if math.isinf(factor) else None
        self._wake_again()

    def flush_cache(self, now_ns: int) -> None:
        """Its engine forgets the prefixes that no sequence holds."""
        engine = self._catch_up(now_ns)
        if engine is not None:
            engine.flush_cache()

    def look_if_silent(self, now_ns: int, version: int) -> None:
        """It froze so long ago that gateways give up the streams it broke off."""
        if self.frozen_since_ns is None or self.speed_version != version:
            return
        for attempt in list(self.inside):
            if attempt.call.first_byte_ns is not None:
                at_ns = now_ns + self._ctx.delays.hop
                self._ctx.queue.at(at_ns, attempt.call.gateway.broken, (attempt, UpstreamFailure.TIMEOUT))

    def note_output(self, attempt: Attempt, now_ns: int) -> None:
        """Bring the job's count of tokens up to date."""
        job = attempt.job
        if job is not None and self._engine is not None:
            job.output_done = self._engine.output_done(job, now_ns)

    def is_stuck(self, now_ns: int) -> bool:
        """It has work and made no step for longer than it may (the live rule is in ``deployments/replica_host.py``)."""
        if self.frozen_since_ns is None or not self.inside:
            return False
        since_ns = max(self.frozen_since_ns, next(iter(self.inside)).received_ns)
        return now_ns - since_ns > ns(self._ctx.scenario.network.stuck_after_ms)

    # --- samples and reports ------------------------------------------------------------------------------------------

    def state(self, now_ns: int) -> ReplicaState:
        """As it tells routers and the controller."""
        if self.phase is Phase.READY:
            if self.retired:
                return ReplicaState.DRAINING
            stuck = self.frozen_since_ns is not None and self.is_stuck(now_ns)
            return ReplicaState.STUCK if stuck else ReplicaState.READY
        return ReplicaState.STARTING if self.phase is Phase.STARTING else ReplicaState.DRAINING

    def _gauges(self, now_ns: int) -> EngineGauges:
        if self._idle is not None:
            return self._idle[0]
        assert self._engine is not None
        gauges = self._engine.gauges(now_ns)
        self.running, self.waiting = gauges.running, gauges.waiting
        return gauges

    def routing_stats(self, now_ns: int) -> Sample:
        """Sample for routers, the keys of the live one."""
        self._stats_seq += 1
        if self._idle is not None and self._idle_stats:
            return {**self._idle_stats, "seq": self._stats_seq}
        stats = sample(self._stats_seq, self.state(now_ns), self._gauges(now_ns), self._step)
        self._idle_stats = stats if self._idle is not None else {}
        return stats

    def _on_report(self, now_ns: int, _: object) -> None:
        rng = self._report_rng
        if rng is None or (self._idle is None and self._catch_up(now_ns) is None):
            return
        delays = self._ctx.delays
        self._ctx.queue.at(now_ns + self._ctx.report_period_ns(rng), self._on_report)
        plan = self._follow_plan(now_ns)
        if now_ns >= self.muted_until_ns:
            self._ctx.counters["reports"] += 1
            self._ctx.queue.at(now_ns + delays.report_lag, self._deliver, self._take_window(now_ns, plan))

    def _take_window(self, now_ns: int, plan: Plan | None = None) -> ReplicaReport:
        """Close the window: the report, and the pool's totals."""
        gauges, window, profile = self._gauges(now_ns), self._window(now_ns), self._profile
        window_ms = (now_ns - self._window_start_ns) / 1e6
        self._window_start_ns = now_ns
        self._report_seq += 1
        told = self._knobs_told
        depth = self._engine.drafting.depth if self._engine is not None else None
        now = (gauges.running_seqs_now, gauges.step_tokens_now, depth)
        if (told.running_seqs_max, told.step_tokens_max, told.speculative_depth) != now:
            told = self._knobs_told = Knobs(*now)
        return ReplicaReport(
            replica_id=self.id,
            model=self._serve.model,
            seq=self._report_seq,
            window_ms=window_ms,
            state=self.state(now_ns),
            running=gauges.running,
            waiting=gauges.waiting,
            http_inflight=len(self.inside),
            kv_tokens_used=gauges.kv_tokens_used,
            kv_tokens_max=gauges.kv_tokens_max,
            prefill_tokens=window.prefill_tokens,
            decode_tokens=window.decode_tokens,
            prefix_query_tokens=window.prefix_query_tokens,
            prefix_hit_tokens=window.prefix_hit_tokens,
            preemptions=window.preemptions,
            steps=window.steps,
            busy_share=min(1.0, window.busy_ms / window_ms) if window_ms > 0 else None,
            gpu_utilisation_share=None,
            itl=window.itl,
            step_model=window.step_model,
            knobs=told,
            running_seqs_hard=profile.running_seqs_max,
            step_tokens_hard=profile.step_tokens_max,
            finished=window.finished,
            aborted=window.aborted,
            cold_start_ms=self._cold_start_ms,
            plan_seq=plan.seq if plan is not None else None,
            draft_tokens=window.draft_tokens,
            accepted_tokens=window.accepted_tokens,
            depth_use=window.depth_use,
            speculative_depth_hard=profile.speculative_depth or None,
            roofline=self._roofline,
        )

    def _window(self, now_ns: int) -> EngineWindow:
        """What the engine did since the last call; its gauges must have been read just now."""
        if self._idle is not None:
            return self._idle[1]
        assert self._engine is not None
        window = self._engine.take_window(now_ns)
        self._wake_again()
        self._serve.add_window(window)
        self._step = window.step_model
        if not (self.inside or self._wake_ns or self.running or self.waiting):
            self._idle, self._idle_stats = (self._engine.gauges(now_ns), self._engine.take_window(now_ns)), {}
        return window

    def _deliver(self, now_ns: int, report: ReplicaReport) -> None:
        plan = self._serve.controller.receive_replica(report, now_ns)
        if plan is not None and self._engine is not None:
            self._follower.receive(plan, now_ns)
            self._follow_plan(now_ns)

    def _follow_plan(self, now_ns: int) -> Plan | None:
        """The plan in force says what the engine may do; without one, or in shadow mode, start-up values hold."""
        plan = self._follower.current(now_ns)
        acting = plan is not None and plan.mode is Mode.ACT
        self._retire(plan is not None and acting and self.id in plan.retired, now_ns)
        knobs = plan.knobs.get(self.id, START_UP) if plan is not None and acting else START_UP
        bounds = NO_EXPLORATION
        if plan is not None and acting and self._profile.speculative_depth:
            bounds = exploration(self._ctx.scenario.config, plan, self.id)
        if (knobs is self._knobs or knobs == self._knobs) and bounds == self._bounds:
            return plan
        engine = self._catch_up(now_ns)
        if engine is not None:
            self._knobs, self._bounds, self._idle = knobs, bounds, None
            engine.set_knobs(knobs, now_ns, bounds)
            self._wake_again()
        return plan

    def _retire(self, wanted: bool, now_ns: int) -> None:
        """The plan in force wants another one in its place, or not any more."""
        if wanted == self.retired:
            return
        self.retired, self._idle_stats = wanted, {}
        if wanted:
            self._serve.watch(self, now_ns)

    def _see(self, now_ns: int, kind: str, attempt: Attempt) -> None:
        observer = self._ctx.observer
        if observer is not None:
            observer.engine(now_ns, self.id, self.phase.value, kind, attempt.call.request.request_id)
