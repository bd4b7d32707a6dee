"""Model of a vLLM engine: continuous batching, chunked prefill, KV blocks, prefix cache, preemption by recompute.

Rules of vLLM 0.29 (``vllm/v1/core/sched/scheduler.py``). One step, within ``step_tokens`` tokens:

1. running jobs in order of admission: one token for each that decodes, the next chunk for one still in its prompt (at
   most one is, and it is the youngest: a prompt is cut only where the budget ends);
2. while nothing was preempted in this step and fewer than ``running_seqs`` run: waiting jobs, oldest first, after their
   prompt was looked up in the prefix cache. The last prompt token is always computed. A job needs free blocks for its
   whole text (``reserve_full_prompt``), and one that does not get them holds up those behind it.

When the next tokens of running jobs do not fit, the youngest is preempted until they do: it loses its blocks and goes
to the head of the queue. A step's duration is :class:`~autoscaling.simulator.spec.StepLaw`'s, in whole ns.

While only decoding goes on, no step is looked at by itself: the engine jumps to the step at which something can change
(a job ends, an arrival joins, blocks run out), see ``engine_steps.py``. A job costs O(log batch + prompt blocks +
prompt chunks), whatever it writes. Jitter is drawn once per run of like steps, with the deviation of the run's mean.

Passive in time: whoever drives it keeps calling :meth:`SimEngine.advance` at :meth:`SimEngine.wake_ns`. Every method
brings the engine up to its ``now_ns`` first, a step that begins at that very time has begun, and time must not go
back. The engine must not know why jobs come, and it draws nothing but jitter.
"""

from __future__ import annotations

import math
from random import Random

from autoscaling.simulator.engine_batch import Decoders, Queue
from autoscaling.simulator.engine_blocks import blocks_for, check_request, give_back, offer, offer_output, take_first
from autoscaling.simulator.engine_drafts import NOTHING, Drafting
from autoscaling.simulator.engine_job import EngineEvent, EngineGauges, EngineWindow, Job, Phase
from autoscaling.simulator.engine_meter import Meter
from autoscaling.simulator.engine_steps import Run
from autoscaling.simulator.kv import KvCache
from autoscaling.simulator.spec import EngineProfile
from policies.speculation import NO_EXPLORATION, Bounds
from policies.types import Knobs, StepCoefficients

__all__ = ["EngineEvent", "EngineGauges", "EngineWindow", "Job", "Phase", "SimEngine"]

STEP_TOKENS_MIN = 16
"""No knob brings the budget below this, nor below one token for each running job (as ``deployments/scheduler.py``)."""
JITTER_FACTOR_MIN = 0.2


class SimEngine:
    """One engine of ``profile``.

    ``learn``: it fits its step model as live replicas do, from ``prior`` on (``None``: from the law: it knows itself
    at once); else it reports the law's.
    """

    __slots__ = (
        "_admissions", "_block", "_decoders", "_doomed", "_drafted", "_frozen", "_knobs", "_kv", "_law", "_leaving",
        "_may_admit", "_meter", "_out", "_parts", "_prefilling", "_queue", "_rng", "_run", "_running", "_seqs_hard",
        "_speed", "_step", "drafting", "profile",
    )  # fmt: skip

    def __init__(
        self, profile: EngineProfile, rng: Random, learn: bool = True, prior: StepCoefficients | None = None
    ) -> None:
        """Raises ``ValueError`` for a profile whose KV cache holds no block or that may not run one sequence."""
        self.profile = profile
        self._law = profile.law
        self._rng = rng
        self._block = profile.block_tokens
        self._seqs_hard = min(profile.running_seqs_max, profile.step_tokens_max)
        self._knobs = Knobs()
        self._speed = 1.0
        self._kv = KvCache(profile.kv_blocks, profile.prefix_cache)
        self.drafting, self._drafted = Drafting(profile.speculative_depth), NOTHING
        self._meter = Meter(profile.law, learn, prior)
        self._out: list[EngineEvent] = []
        # Jobs: running ones in order of admission, the one of them still in its prompt, those that wait.
        self._running: dict[Job, None] = {}
        self._decoders = Decoders(self._block)
        self._prefilling: Job | None = None
        self._queue = Queue()
        self._may_admit = False
        self._admissions = 0
        self._doomed: list[Job] = []
        self._leaving: list[Job] = []
        # The run of like steps under way, from step number _step on: all running jobs that decode, and _parts.
        self._step = 0
        self._parts: list[tuple[Job, int]] = []
        self._run = Run()
        self._frozen = False

    # --- what the world calls -----------------------------------------------------------------------------------------

    @property
    def tokens_max(self) -> int:
        """Most tokens of prompt and output together that one job may have."""
        return min(self.profile.context_tokens_max, self._kv.blocks_max * self._block + 1)

    def submit(self, job: Job, now_ns: int) -> None:
        """Queue a job; it joins at the next step boundary, at once when the engine is idle.

        Output beyond :attr:`tokens_max` is cut, as vLLM does.

        Raises:
            ValueError: the prompt is empty or leaves no room for a token, or its blocks do not fit the engine's.
        """
        request = job.request
        check_request(request, self.tokens_max, self._block)
        self._run_until(now_ns)
        job.output_tokens = min(job.output_tokens, self.tokens_max - request.prompt_tokens)
        job.unit_blocks = request.block_tokens // self._block
        self._queue.push(job)
        run = self._run
        if run.end_ns is None:
            self._may_admit = True
            if not self._frozen:
                self._plan(now_ns)
            return
        ahead = 2 if self.profile.async_scheduling else 1
        job.ready_step = self._step + run.elapsed(now_ns) + ahead
        if self._queue.number == 1:
            self._may_admit = True
        if self._may_admit and not self._parts and len(self._running) < self._limits()[0]:
            run.cut(now_ns, ahead)

    def abort(self, job: Job, now_ns: int) -> None:
        """End a job, queued or running; may be called twice. Blocks are given back at the step boundary."""
        self._run_until(now_ns)
        if job.aborted or job.phase is Phase.OVER:
            return
        job.output_done = self._output_done(job, now_ns)
        job.aborted = True
        self._meter.aborted += 1
        if job.phase is Phase.WAITING:
            was_head = job is self._queue.head()
            self._queue.leave(job, Phase.OVER)
            if was_head:
                self._retry(now_ns)
            return
        self._doomed.append(job)
        self._run.cut(now_ns, 1)

    def set_knobs(self, knobs: Knobs, now_ns: int, bounds: Bounds = NO_EXPLORATION) -> None:
        """Live settings from the next step on, ``None`` fields: the start-up values; ``bounds`` are of exploration."""
        self._run_until(now_ns)
        self.drafting.ask(knobs.speculative_depth, bounds)
        if knobs != self._knobs:
            self._knobs = knobs
            self._retry(now_ns)

    def set_speed(self, factor: float, now_ns: int) -> None:
        """Steps that begin later take ``factor`` times as long; ``inf``: the step under way waits until set back.

        Raises:
            ValueError: ``factor`` is not above 0.
        """
        if not factor > 0:
            raise ValueError(f"speed factor must be above 0, is {factor}")
        self._run_until(now_ns)
        run = self._run
        if math.isinf(factor):
            if run.end_ns is not None:
                if ended := run.elapsed(now_ns):
                    self._settle(ended, now_ns)
                run.stop(now_ns, ended)
            self._frozen = True
            return
        self._speed = factor
        if not self._frozen:
            run.cut(now_ns, 1)
            return
        self._frozen = False
        if not run.go_on(now_ns) and self._queue.number:
            self._may_admit = True
            self._plan(now_ns)

    def flush_cache(self) -> None:
        """Forget the prefixes that no sequence holds."""
        self._kv.flush()

    def wake_ns(self) -> int | None:
        """When to call :meth:`advance` next: no event comes before, maybe none even then. ``None``: nothing to do."""
        return self._out[0].at_ns if self._out else self._run.end_ns

    def advance(self, now_ns: int) -> list[EngineEvent]:
        """Everything that happened by ``now_ns`` and was not returned before, in order."""
        self._run_until(now_ns)
        out = self._out
        if out:
            self._out = []
        return out

    def output_done(self, job: Job, now_ns: int) -> int:
        """Tokens that ``job`` has written by ``now_ns``."""
        self._run_until(now_ns)
        return self._output_done(job, now_ns)

    def gauges(self, now_ns: int) -> EngineGauges:
        """The engine's state."""
        self._run_until(now_ns)
        kv, block, run = self._kv, self._block, self._run
        ended = run.elapsed(now_ns)
        used = kv.blocks_max - kv.available
        if run.steps:
            used += self._opened(min(ended + 1, run.steps))
        backlog = self._queue.tokens - ended * sum(n for _, n in self._parts)
        for job, _ in self._parts:
            backlog += job.request.prompt_tokens + job.output_done - job.computed
        seqs, tokens = self._limits()
        return EngineGauges(
            len(self._running), self._queue.number, used * block, kv.blocks_max * block, backlog, seqs, tokens
        )

    def take_window(self, now_ns: int) -> EngineWindow:
        """What was done since the last call."""
        self._run_until(now_ns)
        if self._run.steps > 1:
            self._count(self._run.elapsed(now_ns), now_ns)
        return self._meter.take(*self.drafting.take())

    def step_model(self) -> StepCoefficients:
        """The step model as the engine would report it."""
        return self._meter.step_model()

    # --- the run of steps under way -----------------------------------------------------------------------------------

    def _run_until(self, now_ns: int) -> None:
        run = self._run
        while run.end_ns is not None and run.end_ns <= now_ns:
            at_ns = run.end_ns
            self._complete(at_ns)
            self._plan(at_ns)

    def _retry(self, now_ns: int) -> None:
        """Something changed for the queue: look at it again at the next boundary."""
        self._may_admit = True
        self._run.cut(now_ns, 1)

    def _count(self, ended: int, now_ns: int) -> None:
        """Bring the window's counts up to the first ``ended`` steps of the run."""
        run = self._run
        counted, run.counted = run.counted, max(run.counted, ended)
        steps = ended - counted
        if steps > 0:
            total_ns = run.total_ns(ended, now_ns) - (run.total_ns(counted, now_ns) if counted else 0)
            first_ns = total_ns if steps == 1 else run.first_ns + run.growth_ns * counted
            prefill_tokens = sum([n for _, n in self._parts]) if self._parts else 0
            self._meter.add(first_ns, run.growth_ns, steps, total_ns, self._decoders.number, prefill_tokens)
            if not self._parts:
                self.drafting.ran(self._drafted, self._decoders.number, steps, total_ns / 1e6)

    def _settle(self, ended: int, now_ns: int) -> None:
        """Book the first ``ended`` steps of the run: counts, step model, blocks, prompts, step number."""
        self._count(ended, now_ns)
        kv, parts, run = self._kv, self._parts, self._run
        opened = self._opened(ended)
        if self._meter.learns and (parts or not self._drafted.drafts):
            held = (kv.blocks_max - kv.available + opened / 2) * self._block
            prefill_tokens = sum([n for _, n in parts]) if parts else 0
            step_ns = run.total_ns(ended, now_ns) / ended
            self._meter.observe(self._decoders.number + len(parts), held, prefill_tokens, step_ns)
        if opened:
            kv.take(opened)
        run.taken = max(0, run.taken - ended)
        self._step += ended
        for job, tokens in parts:
            job.computed += tokens * ended
            if ended > 1:
                offer(self._kv, job, job.computed)

    def _opened(self, steps: int) -> int:
        """Blocks that the first ``steps`` steps of the run open, less those taken already."""
        taken, block = self._run.taken, self._block
        if steps <= taken:
            return 0
        opened = self._decoders.opened(self._step + taken, steps - taken)
        for job, tokens in self._parts:
            begin = job.computed + tokens * taken
            opened += blocks_for(begin + tokens * (steps - taken), block) - blocks_for(begin, block)
        return opened

    def _complete(self, at_ns: int) -> None:
        """The run is over: tokens, ends, and the prompts that got through."""
        self._settle(self._run.steps, at_ns)
        self._run.steps = 0
        if self._leaving:
            self._let_go()
        for job in self._decoders.pop_ended(self._step):
            self._finish(job, at_ns)
        parts = self._parts
        if parts:
            self._parts = []
            for job, _ in parts:
                if job.computed == job.request.prompt_tokens + job.output_done and not job.aborted:
                    self._next_token(job, at_ns)

    def _next_token(self, job: Job, at_ns: int) -> None:
        """A prompt (or a whole text after a preemption) is computed: it has its next token and decodes from now on."""
        job.output_done += 1
        self._meter.written_tokens += 1
        if job.first_token_ns is None:
            job.first_token_ns = at_ns
            self._out.append(EngineEvent(at_ns, "first_token", job))
        if job.output_done >= job.output_tokens:
            self._finish(job, at_ns)
        else:
            self._decoders.add(job, self._step)

    def _finish(self, job: Job, at_ns: int) -> None:
        """A job has its last token: its blocks stay findable, with those of its output where their hashes are known."""
        del self._running[job]
        job.phase = Phase.OVER
        offer_output(self._kv, job)
        if not job.aborted:
            job.finished_ns = at_ns
            self._meter.finished += 1
            self._out.append(EngineEvent(at_ns, "finished", job))
        self._may_admit = True
        if self.profile.async_scheduling:
            self._leaving.append(job)
        else:
            give_back(self._kv, self._block, job)

    def _let_go(self) -> None:
        """Give back what the jobs of the step before held."""
        for job in self._leaving:
            give_back(self._kv, self._block, job)
        self._leaving.clear()
        self._may_admit = True

    def _output_done(self, job: Job, now_ns: int) -> int:
        if job.phase is Phase.DECODE and not job.aborted:
            return self._step + self._run.elapsed(now_ns) - job.counter_shift
        return job.output_done

    # --- what the next steps do ---------------------------------------------------------------------------------------

    def _limits(self) -> tuple[int, int]:
        """Running jobs and tokens of one step, from the knobs within what is possible."""
        running, knobs, tokens_hard = len(self._running), self._knobs, self.profile.step_tokens_max
        seqs = self._seqs_hard if knobs.running_seqs_max is None else min(knobs.running_seqs_max, self._seqs_hard)
        tokens = tokens_hard if knobs.step_tokens_max is None else knobs.step_tokens_max
        return max(1, running, seqs), min(tokens_hard, max(tokens, STEP_TOKENS_MIN, running))

    def _plan(self, at_ns: int) -> None:
        """Compose the next run of steps, which begins now."""
        for job in self._doomed:
            if job.phase is not Phase.OVER:
                self._throw_out(job)
                give_back(self._kv, self._block, job)
                job.phase = Phase.OVER
                self._may_admit = True
        self._doomed.clear()
        if self._leaving and not self._queue.number:
            self._let_go()
        if self._prefilling is None and not (self._queue.number and self._may_admit):
            if not self._decoders.number and not self._queue.number:
                self._run.end_ns = None
                return
            if self._decoders.number and self._decode(at_ns, 0):
                return
        while not self._compose(at_ns):
            self._let_go()
            if not self._queue.number:
                self._run.end_ns = None
                return

    def _throw_out(self, job: Job) -> None:
        """Take a running job out of the batch; its blocks are still held."""
        del self._running[job]
        if job.phase is Phase.DECODE:
            self._decoders.remove(job, self._step)
        elif job is self._prefilling:
            self._prefilling = None

    def _decode(self, at_ns: int, taken: int, steps_max: int | None = None) -> bool:
        """Begin a run of decode steps; blocks of the first ``taken`` are held. False: those of the first do not fit."""
        decoders, step, law = self._decoders, self._step, self._law
        steps = decoders.next_end() - step
        if steps_max is not None:
            steps = min(steps, steps_max)
        number = decoders.number
        run = self._drafted = self.drafting.begin(self._running, number)
        steps = max(taken, min(steps, run.units_max))
        steps = taken + decoders.steps_within(step + taken, steps - taken, self._kv.available)
        if steps:
            first_ms = law.step_ms(number, decoders.context(step), round(run.drafts * number)) / run.tokens
            self._begin(at_ns, steps, first_ms, law.c_ms * number / 1000 / run.tokens, taken)
        return steps > 0

    def _begin(self, at_ns: int, steps: int, first_ms: float, growth_ms: float, taken: int) -> None:
        factor = self._speed * 1e6
        share = self._law.jitter_share
        if share:
            factor *= max(JITTER_FACTOR_MIN, 1 + self._rng.gauss(0.0, share / math.sqrt(steps)))
        self._run.begin(at_ns, steps, max(1, round(first_ms * factor)), round(growth_ms * factor), taken)

    def _compose(self, at_ns: int) -> bool:
        """Begin one step with all its parts, or a run where the next ones are like it. False: nothing to compute."""
        seqs, tokens = self._limits()
        preempted, chunk = self._make_room(tokens)
        decoding = self._decoders.number
        parts: list[tuple[Job, int]] = []
        if self._prefilling is not None:
            self._add_part(self._prefilling, chunk, parts)
        if preempted:
            self._may_admit = True
        elif self._queue.number:
            self._may_admit = self._admit(seqs, tokens - decoding - chunk, parts)
        if not parts:
            soon = self._queue.number and self._may_admit
            return decoding > 0 and self._decode(at_ns, 1, 1 if soon else None)
        self._parts, self._drafted = parts, NOTHING
        law, pairs, context, prefill = self._law, 0.0, self._decoders.context(self._step), 0
        for job, n in parts:
            pairs += n * (job.computed + n / 2)
            context += job.computed
            prefill += n
        first_ms = law.step_ms(decoding + len(parts), context, prefill, pairs)
        steps, growth_ms = 1, 0.0
        if len(parts) == 1 and not preempted:
            steps = self._chunks(*parts[0])
            growth_ms = law.c_ms * (decoding + prefill) / 1000 + law.e_ms * prefill * prefill / 1e6
        self._begin(at_ns, steps, first_ms, growth_ms, 1)
        return True

    def _chunks(self, job: Job, chunk: int) -> int:
        """How many steps compute ``chunk`` tokens of ``job`` and leave some, while nobody ends and blocks are there.

        Nobody can join meanwhile: a prompt is cut only where the budget ends.
        """
        steps = (job.request.prompt_tokens + job.output_done - job.computed - 1) // chunk
        decoders = self._decoders
        if decoders.number:
            steps = min(steps, decoders.next_end() - self._step)
        if steps <= 1 or self._leaving:
            return 1
        need = decoders.number * (steps // self._block + 1) + steps * chunk // self._block + 1
        return steps if need <= self._kv.available else 1

    def _make_room(self, tokens: int) -> tuple[bool, int]:
        """Take the blocks that running jobs need in the next step, preempting the youngest where they do not fit.

        Returns whether any was preempted, and the tokens of the prompt under way.
        """
        kv, block, preempted = self._kv, self._block, False
        while True:
            need, chunk, job = self._decoders.openings(self._step), 0, self._prefilling
            if job is not None:
                left = job.request.prompt_tokens + job.output_done - job.computed
                chunk = min(left, tokens - self._decoders.number)
                need += blocks_for(job.computed + chunk, block) - blocks_for(job.computed, block)
            if need <= kv.available:
                kv.take(need)
                return preempted, chunk
            self._preempt(next(reversed(self._running)))
            preempted = True

    def _preempt(self, job: Job) -> None:
        self._throw_out(job)
        give_back(self._kv, self._block, job)
        job.phase = Phase.WAITING
        job.computed = 0
        job.preemptions += 1
        job.ready_step = 0
        self._meter.preemptions += 1
        self._queue.push(job, first=True)

    def _admit(self, seqs: int, budget: int, parts: list[tuple[Job, int]]) -> bool:
        """Let waiting jobs in. Returns whether another try at the next step may let more in."""
        while budget > 0 and len(self._running) + len(self._leaving) < seqs:
            job = self._queue.head()
            if job is None or (job.ready_step > self._step and self._running):
                return True
            count = self._let_in(job, budget)
            if not count:
                return bool(self._leaving)
            budget -= count
            self._add_part(job, count, parts)
        return bool(parts) or bool(self._leaving)

    def _let_in(self, job: Job, budget: int) -> int:
        """Let one job in. Returns the tokens to compute; 0: no room."""
        count = take_first(self._kv, self._block, job, budget, self.profile.reserve_full_prompt)
        if count:
            if job.order < 0 and not job.kv_ready:
                job.cached_tokens = job.computed
                self._meter.query_tokens += job.request.prompt_tokens
                self._meter.hit_tokens += job.computed
            job.order, self._admissions = self._admissions, self._admissions + 1
            self._queue.leave(job, Phase.PREFILL)
            self._running[job] = None
        return count

    def _add_part(self, job: Job, count: int, parts: list[tuple[Job, int]]) -> None:
        """Put a chunk into the step."""
        after = job.computed + count
        offer(self._kv, job, after)
        parts.append((job, count))
        self._prefilling = job if after < job.request.prompt_tokens + job.output_done else None
