"""The emulated engine's core: an event loop over steps that last as long as the step model says.

    step_ms = (a + b*running + c*kv_tokens/1000 + d*(prefill_tokens + draft_tokens)) * jitter * slow_factor

``running`` are the sequences of the step, ``kv_tokens`` what the cache held when it began. A step that follows another
begins when that one was due to end, so that a timer or a busy event loop that is late by up to :data:`LATE_NS_MAX` does
not slow the engine down. :class:`Scheduler` decides what a step computes. Between two steps, as in the real engine:
live knobs are read (never above the start-up values, never below what runs), gauges and the step's record are written,
requests that arrived are queued and those whose clients left are taken out.

Answers are known when a request is submitted (the toy model is a function of the prompt), so the core deals in counts:
it says *when* token ``k`` of an answer exists, never what it is.

It must not know HTTP, and it must not let a fault of one request touch another, except those made to: ``freeze`` stops
the loop, a ``die_marker`` ends the process.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from deployments.clock import now_ns
from deployments.emulation.blocks import BlockPool
from deployments.emulation.drafts import LiveDepth
from deployments.emulation.faults import DIE_EXIT_CODE, FaultBoard
from deployments.emulation.scheduler import Scheduler, Sequence, StepPlan
from deployments.knobs import EngineGauges, EngineShared, StepRecord, sizes_within
from deployments.settings import EmulatedSettings
from policies.speculation import NO_EXPLORATION, Bounds
from policies.step_model import predict_step_ms
from policies.types import Knobs, StepCoefficients

WAITING_MAX = 10_000
"""Requests that may wait; more are refused."""
STEP_TOKENS_MIN = 16
"""No knob brings the token budget below this."""
EMPTY_STEP_S = 0.001
LATE_NS_MAX = 20_000_000
"""A step that ends later than this after its time makes the next one later as well."""

EventKind: TypeAlias = Literal["token", "error", "cut", "silence", "left"]


class EngineFullError(RuntimeError):
    """:data:`WAITING_MAX` requests wait already."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to choice ``index``: its ``count``-th token exists, or the request ended otherwise."""

    kind: EventKind
    index: int
    count: int = 0
    last: bool = False


@dataclass(slots=True, eq=False)
class Generation:
    """One request in the core: its sequences and the events its owner reads."""

    sequences: list[Sequence]
    events: asyncio.Queue[Event]
    """Bounded by the tokens the answers have."""
    hit: bool
    """The scripted fault of a request plays on this one."""
    left: bool = False
    """Its client is gone."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens of the first sequence that came from the prefix cache."""
        return self.sequences[0].cached_tokens


@dataclass(slots=True)
class CoreCounters:
    """Totals since the start, beside those of the gauges."""

    steps: int = 0
    requests: int = 0
    """Generating requests that came, those refused included: what attempts cost an engine."""
    finished: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    tokens_after_abort: int = 0
    """Tokens made for requests whose clients had left: wasted work."""


@dataclass(slots=True)
class _Work:
    """Since when there is work, and when the last step ended; CLOCK_MONOTONIC, 0 for never."""

    since_ns: int = 0
    progress_ns: int = 0
    owners: dict[int, tuple[Generation, int]] = field(default_factory=dict)
    """Generation and choice index of each sequence inside."""


class EngineCore:
    """One engine. :meth:`run` is its loop; everything else is called from the same event loop."""

    def __init__(
        self,
        settings: EmulatedSettings,
        faults: FaultBoard,
        shared: EngineShared | None = None,
        die: Callable[[int], object] = os._exit,
    ) -> None:
        """``shared`` receives gauges and steps and gives knobs.

        Raises:
            ValueError: the KV cache is smaller than one context.
        """
        if settings.kv_blocks * settings.block_tokens < settings.context_tokens_max:
            raise ValueError(
                f"emulated.kv_blocks: {settings.kv_blocks} blocks of {settings.block_tokens} tokens hold less than one "
                f"context of {settings.context_tokens_max} tokens"
            )
        self.settings = settings
        self.faults = faults
        self.counters = CoreCounters()
        self.draining = False
        self.asleep = False
        self.scheduler = Scheduler(BlockPool(settings.kv_blocks, settings.block_tokens), WAITING_MAX)
        step = settings.step
        self._law = StepCoefficients(step.a_ms, step.b_ms, step.c_ms, step.d_ms)
        self._rng = random.Random(settings.seed)
        self._shared = shared
        self._die = die
        self._work = _Work()
        self._wake = asyncio.Event()
        self._limits = (settings.running_seqs_max, settings.step_tokens_max)
        self._knobs = Knobs()
        self._depth = LiveDepth(settings.speculative_depth)
        self._end_ns: int | None = None
        """When the last step ended, while work goes on without a pause."""
        faults.listen(self.wake)
        self._publish()

    # --- requests -----------------------------------------------------------------------------------------------------

    def submit(self, pairs: list[tuple[list[int], list[int]]], prompt_text: str, salt: str = "") -> Generation:
        """Queue one request with one sequence for each pair of prompt and answer, neither of them empty.

        Raises:
            EngineFullError: too many requests wait.
            RuntimeError: the engine sleeps; nobody may ask it then.
        """
        if self.asleep:
            raise RuntimeError("the engine sleeps")
        if self.faults.kills(prompt_text):
            self._die(DIE_EXIT_CODE)
        sequences = [Sequence(prompt, answer, salt) for prompt, answer in pairs]
        if len(self.scheduler.waiting) + len(sequences) > self.scheduler.waiting_max:
            raise EngineFullError(f"{self.scheduler.waiting_max} requests wait already")
        room = sum(len(answer) for _, answer in pairs) + 2
        generation = Generation(sequences, asyncio.Queue(room), self.faults.hits(prompt_text))
        for index, seq in enumerate(sequences):
            self.scheduler.add(seq)
            self._work.owners[id(seq)] = (generation, index)
        self.wake()
        return generation

    def abort(self, generation: Generation) -> None:
        """The client left: stop working for it. Nothing happens when it is over already."""
        generation.left = True
        if not self.faults.now.ignore_aborts:
            self._end(generation)

    def wake(self) -> None:
        """Something changed: look again."""
        if self.scheduler.has_work and not self._work.since_ns:
            self._work.since_ns = now_ns()
        self._publish()
        self._wake.set()

    def _end(self, generation: Generation) -> None:
        for seq in generation.sequences:
            if self._work.owners.pop(id(seq), None) is not None:
                self.scheduler.remove(seq)
                self.counters.aborted += 1
        self._settle()

    # --- steps --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Step for ever."""
        while True:
            if not self.scheduler.has_work or self.stopped:
                self._end_ns = None
                self._wake.clear()
                await self._wake.wait()
                continue
            await self._step()

    @property
    def stopped(self) -> bool:
        """True while a fault keeps the loop from stepping although there is work."""
        faults = self.faults.now
        if self.draining and faults.ignore_drain:
            return True
        return faults.kind == "freeze" and any(
            generation.hit and generation.sequences[index].output_tokens >= faults.after_tokens
            for generation, index in self._work.owners.values()
        )

    async def _step(self) -> None:
        start_ns = self._end_ns or now_ns()
        self._limits = self._read_limits()
        depth = self._depth.begin(self._knobs.speculative_depth, self._bounds(), len(self.scheduler.running))
        plan = self.scheduler.schedule(*self._limits, depth)
        if not plan.parts:
            self._end_ns = None
            await asyncio.sleep(EMPTY_STEP_S)
            return
        self._publish()
        due_ns = start_ns + round(self.step_ms(plan) * 1e6)
        await asyncio.sleep(max(0, due_ns - now_ns()) / 1e9)
        accepted = self.scheduler.accepted_total
        tokens = self._deliver(plan)
        self._work.progress_ns = at_ns = now_ns()
        self._end_ns = due_ns if at_ns - due_ns <= LATE_NS_MAX else at_ns
        self.counters.steps += 1
        self.counters.prompt_tokens += plan.prefill_tokens
        if not plan.prefill_tokens:
            self._depth.ran(depth, plan.decode_seqs, tokens, (self._end_ns - start_ns) / 1e6)
        if self._shared is not None:
            record = self._record(plan, start_ns, self._end_ns)
            if self._depth.hard:
                accepted = self.scheduler.accepted_total - accepted
                drafted = plan.draft_tokens
                record = replace(
                    record, output_tokens=tokens, depth=depth, draft_tokens=drafted, accepted_tokens=accepted
                )
            self._shared.append_step(record)
        self._settle()

    def step_ms(self, plan: StepPlan) -> float:
        """Duration of a step in ms; draws the jitter."""
        jitter = 1 + self.settings.step.jitter_share * self._rng.uniform(-1, 1)
        computed = plan.prefill_tokens + plan.draft_tokens
        ms = predict_step_ms(self._law, len(plan.parts), plan.kv_tokens, computed)
        return ms * jitter * self.faults.now.slow_factor

    def _deliver(self, plan: StepPlan) -> int:
        """Hand out the tokens of a step; returns how many there were."""
        written = self.scheduler.finish(plan)
        left = Counter(id(seq) for seq, _token in written)
        for seq, _token in written:
            left[id(seq)] -= 1
            owner = self._work.owners.get(id(seq))
            if owner is None:
                continue
            generation, index = owner
            count = seq.output_tokens - left[id(seq)]
            last = seq.finished and not left[id(seq)]
            self.counters.generated_tokens += 1
            self.counters.tokens_after_abort += generation.left
            if generation.hit and self._play(generation, index, count):
                continue
            generation.events.put_nowait(Event("token", index, count, last))
            if last:
                del self._work.owners[id(seq)]
                self.counters.finished += 1
        return len(written)

    def _play(self, generation: Generation, index: int, count: int) -> bool:
        """Play a request's fault before its ``count``-th token; True when the request ended with it."""
        faults = self.faults.now
        if count <= faults.after_tokens:
            return False
        if faults.kind in ("error", "cut", "silence"):
            generation.hit = False
            self._end(generation)
            generation.events.put_nowait(Event(faults.kind, index, count, last=True))
            return True
        return False

    def _read_limits(self) -> tuple[int, int]:
        """Running sequences and token budget for the next step, from the knobs within what is possible."""
        knobs = self._knobs = self._shared.read_knobs() if self._shared is not None else Knobs()
        seqs, tokens = self.settings.running_seqs_max, self.settings.step_tokens_max
        return sizes_within(knobs, seqs, tokens, STEP_TOKENS_MIN, len(self.scheduler.running))

    def _bounds(self) -> Bounds:
        return self._shared.bounds if self._shared is not None else NO_EXPLORATION

    # --- signals ------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        if not self.scheduler.has_work:
            self._work.since_ns = 0
        self._publish()

    def _record(self, plan: StepPlan, start_ns: int, end_ns: int) -> StepRecord:
        duration_us = max(1, (end_ns - start_ns) // 1_000)
        return StepRecord(
            self.counters.steps, start_ns, duration_us, len(plan.parts), plan.prefill_tokens, plan.decode_seqs,
            plan.kv_tokens, plan.preempted,
        )  # fmt: skip

    def gauges(self) -> EngineGauges:
        """The engine's state."""
        scheduler, settings = self.scheduler, self.settings
        return EngineGauges(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_tokens_used=scheduler.pool.used_tokens,
            kv_tokens_max=settings.kv_blocks * settings.block_tokens,
            prefill_backlog_tokens=scheduler.prefill_backlog_tokens,
            running_seqs_hard=settings.running_seqs_max,
            step_tokens_hard=settings.step_tokens_max,
            running_seqs_now=self._limits[0],
            step_tokens_now=self._limits[1],
            speculative_depth_now=self._depth.asked,
            speculative_depth_hard=self._depth.hard,
            finished_total=self.counters.finished,
            aborted_total=self.counters.aborted,
            preemptions_total=scheduler.preemptions_total,
            prefix_query_tokens_total=scheduler.prefix_query_tokens_total,
            prefix_hit_tokens_total=scheduler.prefix_hit_tokens_total,
            progress_ns=self._work.progress_ns,
            work_since_ns=self._work.since_ns,
            step_tokens_floor=STEP_TOKENS_MIN,
        )

    def _publish(self) -> None:
        if self._shared is not None:
            self._shared.write_gauges(self.gauges())
