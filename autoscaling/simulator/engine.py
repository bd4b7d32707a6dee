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
from collections import deque
from heapq import heappop, heappush
from random import Random

from autoscaling.simulator.engine_job import EngineEvent, EngineGauges, EngineWindow, Job, Phase
from autoscaling.simulator.engine_steps import Gaps, steps_ns, steps_within
from autoscaling.simulator.kv import KvCache
from autoscaling.simulator.spec import EngineProfile
from policies.step_model import StepModel
from policies.types import Knobs, StepCoefficients

__all__ = ["EngineEvent", "EngineGauges", "EngineWindow", "Job", "Phase", "SimEngine"]

STEP_TOKENS_MIN = 16
"""No knob brings the budget below this, nor below one token for each running job (as ``deployments/scheduler.py``)."""
JITTER_FACTOR_MIN = 0.2
SAMPLES_OF_LAW = 1_000
"""Steps that the coefficients of an engine that does not learn claim to rest on."""


class SimEngine:
    """One engine of ``profile``. ``learn``: it fits its step model as live replicas do, else it reports the law's."""

    def __init__(self, profile: EngineProfile, rng: Random, learn: bool = True) -> None:
        """Raises ``ValueError`` for a profile whose KV cache holds no block or that may not run one sequence."""
        blocks = profile.kv_tokens // max(1, profile.block_tokens)
        if blocks < 1 or profile.running_seqs_max < 1 or profile.step_tokens_max < 1:
            raise ValueError(
                f"profile {profile.name}: kv_tokens, running_seqs_max and step_tokens_max must be positive"
            )
        self.profile = profile
        self._law = profile.law
        self._rng = rng
        self._block = profile.block_tokens
        self._seqs_hard = min(profile.running_seqs_max, profile.step_tokens_max)
        self._knobs = Knobs()
        self._speed = 1.0
        self._kv = KvCache(blocks, profile.prefix_cache)
        self._step_model = StepModel(profile.law.coefficients()) if learn else None
        # Jobs: running in order of admission; the queue may hold jobs that are over, which do not count.
        self._running: dict[Job, None] = {}
        self._waiting: deque[Job] = deque()
        self._waiting_jobs = 0
        self._waiting_tokens = 0
        self._prefilling: Job | None = None
        self._doomed: list[Job] = []
        self._leaving: list[Job] = []
        self._may_admit = False
        self._admissions = 0
        # Those that decode: ends by step, number by the step (modulo a block) that opens a block, contexts at step 0.
        self._ends: list[tuple[int, int, Job]] = []
        self._openings = [0] * self._block
        self._decoding = 0
        self._context = 0
        # The run of like steps under way, from step number _step on.
        self._step = 0
        self._parts: list[tuple[Job, int]] = []
        self._steps = 0
        self._start_ns = self._first_ns = self._growth_ns = 0
        self._end_ns: int | None = None
        self._taken = 0
        self._counted = 0
        self._frozen = False
        self._frozen_left_ns: int | None = None
        self._out: list[EngineEvent] = []
        # Counts of the window.
        self._gaps = Gaps()
        self._busy_ns = self._window_steps = 0
        self._prefilled = self._written = self._queried = self._hit = self._preempted = 0
        self._finished = self._aborted = 0

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
        if not 1 <= request.prompt_tokens < self.tokens_max:
            raise ValueError(f"a prompt of {request.prompt_tokens} tokens: 1..{self.tokens_max - 1} are possible")
        if request.block_tokens % self._block or request.block_tokens < 1:
            raise ValueError(f"prefix blocks of {request.block_tokens} tokens are no multiple of {self._block}")
        self._run_until(now_ns)
        job.output_tokens = min(job.output_tokens, self.tokens_max - request.prompt_tokens)
        job.unit_blocks = request.block_tokens // self._block
        self._waiting.append(job)
        self._waiting_jobs += 1
        self._waiting_tokens += request.prompt_tokens
        if self._end_ns is None:
            self._may_admit = True
            if not self._frozen:
                self._plan(now_ns)
            return
        ahead = 2 if self.profile.async_scheduling else 1
        job.ready_step = self._step + self._elapsed(now_ns) + ahead
        if self._waiting_jobs == 1:
            self._may_admit = True
        if self._may_admit and len(self._running) < self._limits()[0]:
            self._cut(now_ns, ahead)

    def abort(self, job: Job, now_ns: int) -> None:
        """End a job, queued or running; may be called twice. Blocks are given back at the step boundary."""
        self._run_until(now_ns)
        if job.aborted or job.phase is Phase.OVER:
            return
        job.output_done = self._output_done(job, now_ns)
        job.aborted = True
        self._aborted += 1
        if job.phase is Phase.WAITING:
            job.phase = Phase.OVER
            self._waiting_jobs -= 1
            self._waiting_tokens -= job.request.prompt_tokens + job.output_done
            if not self._waiting_jobs:
                self._waiting.clear()
            elif job is self._waiting[0]:
                self._retry(now_ns)
            return
        self._doomed.append(job)
        self._cut(now_ns, 1)

    def set_knobs(self, knobs: Knobs, now_ns: int) -> None:
        """Live settings from the next step on; ``None`` fields: the start-up values."""
        self._run_until(now_ns)
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
        if math.isinf(factor):
            if not self._frozen:
                self._freeze(now_ns)
            return
        self._speed = factor
        if self._frozen:
            self._thaw(now_ns)
        else:
            self._cut(now_ns, 1)

    def wake_ns(self) -> int | None:
        """When to call :meth:`advance` next: no event comes before, maybe none even then. ``None``: nothing to do."""
        return self._out[0].at_ns if self._out else self._end_ns

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
        kv, block = self._kv, self._block
        used = kv.blocks_max - kv.available
        if self._decoding and self._steps:
            used += self._opened(min(self._elapsed(now_ns) + 1, self._steps))
        prefilling = sum(n for _, n in self._parts)
        if self._prefilling is not None:
            job = self._prefilling
            left = job.request.prompt_tokens + job.output_done - job.computed
            prefilling += left - next((n for part, n in self._parts if part is job), 0)
        seqs, tokens = self._limits()
        return EngineGauges(
            len(self._running), self._waiting_jobs, used * block, kv.blocks_max * block,
            self._waiting_tokens + prefilling, seqs, tokens,
        )  # fmt: skip

    def take_window(self, now_ns: int) -> EngineWindow:
        """What was done since the last call."""
        self._run_until(now_ns)
        if self._steps > 1:
            self._count(self._elapsed(now_ns), now_ns)
        window = EngineWindow(
            self._prefilled, self._written, self._queried, self._hit, self._preempted, self._window_steps,
            self._busy_ns / 1e6, self._gaps.take(), self._finished, self._aborted, self.step_model(),
        )  # fmt: skip
        self._busy_ns = self._window_steps = 0
        self._prefilled = self._written = self._queried = self._hit = self._preempted = 0
        self._finished = self._aborted = 0
        return window

    def step_model(self) -> StepCoefficients:
        """The step model as the engine would report it."""
        if self._step_model is not None:
            return self._step_model.coefficients()
        law = self._law
        return StepCoefficients(law.a_ms, law.b_ms, law.c_ms, law.d_ms, SAMPLES_OF_LAW, law.jitter_share)

    # --- the run of steps under way -----------------------------------------------------------------------------------

    def _run_until(self, now_ns: int) -> None:
        end_ns = self._end_ns
        while end_ns is not None and end_ns <= now_ns:
            self._complete(end_ns)
            self._plan(end_ns)
            end_ns = self._end_ns

    def _elapsed(self, now_ns: int) -> int:
        """Steps of the run that have ended; the caller brought the engine up to ``now_ns``."""
        if self._steps <= 1 or self._end_ns is None:
            return 0
        return min(self._steps - 1, steps_within(self._first_ns, self._growth_ns, now_ns - self._start_ns))

    def _cut(self, now_ns: int, ahead: int) -> None:
        """End the run with the step under way (``ahead`` 1) or one of those after it."""
        if self._steps > ahead and self._end_ns is not None:
            steps = self._elapsed(now_ns) + ahead
            if steps < self._steps:
                self._steps = steps
                self._end_ns = self._start_ns + steps_ns(self._first_ns, self._growth_ns, steps)

    def _retry(self, now_ns: int) -> None:
        """Something changed for the queue: look at it again at the next boundary."""
        self._may_admit = True
        self._cut(now_ns, 1)

    def _freeze(self, now_ns: int) -> None:
        self._frozen = True
        if self._end_ns is None:
            return
        ended = self._elapsed(now_ns)
        self._cut(now_ns, 1)
        left_ns = self._end_ns - now_ns
        if ended:
            self._settle(ended, now_ns)
            self._start_ns += steps_ns(self._first_ns, self._growth_ns, ended)
            self._first_ns += self._growth_ns * ended
            self._steps, self._counted = 1, 0
        self._frozen_left_ns, self._end_ns = left_ns, None

    def _thaw(self, now_ns: int) -> None:
        self._frozen = False
        if self._frozen_left_ns is not None:
            self._end_ns, self._frozen_left_ns = now_ns + self._frozen_left_ns, None
        elif self._waiting_jobs:
            self._may_admit = True
            self._plan(now_ns)

    def _count(self, ended: int, now_ns: int) -> None:
        """Bring the window's counts up to the first ``ended`` steps of the run."""
        steps = ended - self._counted
        if steps <= 0:
            return
        if self._steps == 1:
            first_ns = total_ns = now_ns - self._start_ns
        else:
            first_ns = self._first_ns + self._growth_ns * self._counted
            total_ns = steps_ns(first_ns, self._growth_ns, steps)
        self._counted = ended
        self._window_steps += steps
        self._busy_ns += total_ns
        if self._decoding:
            self._written += self._decoding * steps
            self._gaps.add(first_ns, self._growth_ns, steps, self._decoding, total_ns)

    def _settle(self, ended: int, now_ns: int) -> None:
        """Book the first ``ended`` steps of the run: counts, step model, blocks, step number."""
        self._count(ended, now_ns)
        opened = self._opened(ended)
        if self._step_model is not None:
            self._learn(ended, opened, now_ns)
        if opened:
            self._kv.take(opened)
        self._taken = max(0, self._taken - ended)
        self._step += ended

    def _learn(self, ended: int, opened: int, now_ns: int) -> None:
        kv = self._kv
        if self._steps == 1:
            step_ns: float = now_ns - self._start_ns
        else:
            step_ns = steps_ns(self._first_ns, self._growth_ns, ended) / ended
        used = (kv.blocks_max - kv.available + opened / 2) * self._block
        prefill = sum(n for _, n in self._parts)
        assert self._step_model is not None
        self._step_model.observe(self._decoding + len(self._parts), used, prefill, step_ns / 1e6)

    def _opened(self, steps: int) -> int:
        """Blocks that decoding opens in the first ``steps`` steps of the run, less those taken already."""
        begin, count = self._step + self._taken, steps - self._taken
        if count <= 0:
            return 0
        cycles, rest = divmod(count, self._block)
        opened = cycles * self._decoding
        openings, block = self._openings, self._block
        for step in range(begin, begin + rest):
            opened += openings[step % block]
        return opened

    def _steps_until_full(self, begin: int, steps: int) -> int:
        """How many of ``steps`` decode steps from step number ``begin`` on find the blocks they open."""
        block, available = self._block, self._kv.available
        if available >= self._decoding * (steps // block + 1):
            return steps
        cycles, left = divmod(available, self._decoding)
        possible = cycles * block
        for step in range(begin, begin + block):
            left -= self._openings[step % block]
            if left < 0:
                break
            possible += 1
        return min(steps, possible)

    def _complete(self, at_ns: int) -> None:
        """The run is over: tokens, ends, and the prompts that got through."""
        self._settle(self._steps, at_ns)
        self._steps = self._counted = 0
        if self._leaving:
            self._let_go()
        step, ends, parts = self._step, self._ends, self._parts
        while ends and ends[0][0] <= step:
            _, order, job = heappop(ends)
            if job.order == order and job.phase is Phase.DECODE:
                self._stop_decoding(job)
                self._finish(job, at_ns)
        if parts:
            self._parts = []
            for job, tokens in parts:
                self._prefilled += tokens
                job.computed += tokens
                if job.computed == job.request.prompt_tokens + job.output_done and not job.aborted:
                    self._first_token(job, at_ns)

    def _first_token(self, job: Job, at_ns: int) -> None:
        """A prompt (or a whole text after a preemption) is computed: it has its next token and decodes from now on."""
        if job is self._prefilling:
            self._prefilling = None
        job.output_done += 1
        self._written += 1
        if job.first_token_ns is None:
            job.first_token_ns = at_ns
            self._out.append(EngineEvent(at_ns, "first_token", job))
        if job.output_done >= job.output_tokens:
            self._finish(job, at_ns)
            return
        step = self._step
        job.phase = Phase.DECODE
        job.computed -= step
        job.counter_shift = step - job.output_done
        job.end_step = job.counter_shift + job.output_tokens
        self._openings[-job.computed % self._block] += 1
        self._decoding += 1
        self._context += job.computed
        heappush(self._ends, (job.end_step, job.order, job))

    def _stop_decoding(self, job: Job) -> None:
        shift = job.computed
        self._openings[-shift % self._block] -= 1
        self._decoding -= 1
        self._context -= shift
        job.computed = shift + self._step
        if not job.aborted:
            job.output_done = self._step - job.counter_shift

    def _finish(self, job: Job, at_ns: int) -> None:
        """A job has its last token: its blocks stay findable, with those of its output where their hashes are known."""
        request = job.request
        del self._running[job]
        job.phase = Phase.OVER
        if request.blocks_after:
            upto = min(len(request.blocks_after), job.computed // request.block_tokens)
            job.units += [u for u in request.blocks_after[len(request.blocks) : upto] if self._kv.remember(u)]
        if not job.aborted:
            job.finished_ns = at_ns
            self._finished += 1
            self._out.append(EngineEvent(at_ns, "finished", job))
        self._may_admit = True
        if self.profile.async_scheduling:
            self._leaving.append(job)
        else:
            self._release(job)

    def _let_go(self) -> None:
        for job in self._leaving:
            self._release(job)
        self._leaving.clear()
        self._may_admit = True

    def _release(self, job: Job) -> None:
        """Give the blocks of a job back; ``computed`` says what it holds."""
        full, rest = divmod(job.computed, self._block)
        full -= len(job.units) * job.unit_blocks
        job.left_over = object() if full else None
        self._kv.release(job.left_over, job.units, job.unit_blocks, full, 1 if rest else 0)

    def _output_done(self, job: Job, now_ns: int) -> int:
        if job.phase is Phase.DECODE and not job.aborted:
            return self._step + self._elapsed(now_ns) - job.counter_shift
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
                self._release(job)
                job.phase = Phase.OVER
                self._may_admit = True
        self._doomed.clear()
        if self._leaving and not self._waiting_jobs:
            self._let_go()
        if self._prefilling is None and not (self._waiting_jobs and self._may_admit):
            if not self._decoding and not self._waiting_jobs:
                self._end_ns = None
                return
            if self._decoding and self._decode(at_ns, 0):
                return
        while not self._compose(at_ns):
            self._let_go()
            if not self._waiting_jobs:
                self._end_ns = None
                return

    def _throw_out(self, job: Job) -> None:
        """Take a running job out of the batch; its blocks are still held."""
        del self._running[job]
        if job.phase is Phase.DECODE:
            self._stop_decoding(job)
        if job is self._prefilling:
            self._prefilling = None

    def _decode(self, at_ns: int, taken: int, steps_max: int | None = None) -> bool:
        """Begin a run of decode steps; blocks of the first ``taken`` are held. False: those of the first do not fit."""
        ends, step = self._ends, self._step
        while ends[0][2].order != ends[0][1] or ends[0][2].phase is not Phase.DECODE:
            heappop(ends)
        steps = ends[0][0] - step
        if steps_max is not None:
            steps = min(steps, steps_max)
        steps = taken + self._steps_until_full(step + taken, steps - taken)
        if not steps:
            return False
        decoding, law = self._decoding, self._law
        ms = law.step_ms(decoding, self._context + decoding * step)
        self._begin(at_ns, steps, ms, law.c_ms * decoding / 1000, taken)
        return True

    def _begin(self, at_ns: int, steps: int, first_ms: float, growth_ms: float, taken: int) -> None:
        factor = self._speed * 1e6
        share = self._law.jitter_share
        if share:
            factor *= max(JITTER_FACTOR_MIN, 1 + self._rng.gauss(0.0, share / math.sqrt(steps)))
        self._start_ns, self._steps, self._taken, self._counted = at_ns, steps, taken, 0
        self._first_ns = max(1, round(first_ms * factor))
        self._growth_ns = round(growth_ms * factor)
        self._end_ns = at_ns + steps_ns(self._first_ns, self._growth_ns, steps)

    def _compose(self, at_ns: int) -> bool:
        """Begin one step with all its parts, or a run where it has no prompts. False: there is nothing to compute."""
        seqs, tokens = self._limits()
        preempted, chunk = self._make_room(tokens)
        parts: list[tuple[Job, int]] = []
        if self._prefilling is not None:
            self._add_part(self._prefilling, chunk, parts)
        if preempted:
            self._may_admit = True
        elif self._waiting_jobs:
            self._may_admit = self._admit(seqs, tokens - self._decoding - chunk, parts)
        if not parts:
            soon = self._waiting_jobs and self._may_admit
            return self._decoding > 0 and self._decode(at_ns, 1, 1 if soon else None)
        self._parts = parts
        pairs, context, prefill = 0.0, self._context + self._decoding * self._step, 0
        for job, n in parts:
            pairs += n * (job.computed + n / 2)
            context += job.computed
            prefill += n
        self._begin(at_ns, 1, self._law.step_ms(self._decoding + len(parts), context, prefill, pairs), 0.0, 1)
        return True

    def _make_room(self, tokens: int) -> tuple[bool, int]:
        """Take the blocks that running jobs need in the next step, preempting the youngest where they do not fit.

        Returns whether any was preempted, and the tokens of the prompt under way.
        """
        kv, block, preempted = self._kv, self._block, False
        while True:
            need, chunk, job = self._openings[self._step % block], 0, self._prefilling
            if job is not None:
                left = job.request.prompt_tokens + job.output_done - job.computed
                chunk = min(left, tokens - self._decoding)
                need += -(-(job.computed + chunk) // block) + -job.computed // block
            if need <= kv.available:
                kv.take(need)
                return preempted, chunk
            self._preempt(next(reversed(self._running)))
            preempted = True

    def _preempt(self, job: Job) -> None:
        self._throw_out(job)
        self._release(job)
        if len(job.units) != job.next_unit:
            job.left_over = None  # a copy of a block known elsewhere lies in between
        job.phase = Phase.WAITING
        job.computed = 0
        job.preemptions += 1
        job.ready_step = 0
        self._preempted += 1
        self._waiting.appendleft(job)
        self._waiting_jobs += 1
        self._waiting_tokens += job.request.prompt_tokens + job.output_done

    def _admit(self, seqs: int, budget: int, parts: list[tuple[Job, int]]) -> bool:
        """Let waiting jobs in. Returns whether another try at the next step may let more in."""
        waiting = self._waiting
        while budget > 0 and len(self._running) + len(self._leaving) < seqs:
            while waiting and waiting[0].phase is Phase.OVER:
                waiting.popleft()
            if not waiting:
                return True
            job = waiting[0]
            if job.ready_step > self._step and (self._running or parts):
                return True
            count = self._let_in(job, budget)
            if not count:
                return bool(self._leaving)
            waiting.popleft()
            budget -= count
            self._add_part(job, count, parts)
        return bool(parts) or bool(self._leaving)

    def _let_in(self, job: Job, budget: int) -> int:
        """Find what the cache knows of a job and take its blocks. Returns the tokens to compute; 0: no room."""
        kv, block, request, unit_blocks = self._kv, self._block, job.request, job.unit_blocks
        tokens = request.prompt_tokens + job.output_done
        found = kv.known(request.blocks, (tokens - 1) // request.block_tokens)
        units = list(request.blocks[:found])
        again = 0
        if job.left_over is not None and found == len(job.units):
            again = min(kv.left_over(job.left_over), (tokens - 1) // block - found * unit_blocks)
        computed = found * request.block_tokens + again * block
        if job.kv_ready and not job.preemptions:
            computed = tokens - 1
        count = min(tokens - computed, budget)
        held = found * unit_blocks
        needed = -(-(tokens if self.profile.reserve_full_prompt else computed + count) // block)
        if needed - held + kv.idle(units) * unit_blocks > kv.available:
            return 0
        kv.hold(units)
        if job.left_over is not None and kv.left_over(job.left_over):
            kv.reclaim(job.left_over, again)
        kv.take(-(-(computed + count) // block) - held - again)
        if job.order < 0 and not job.kv_ready:
            job.cached_tokens = computed
            self._queried += request.prompt_tokens
            self._hit += computed
        job.left_over = None
        job.units, job.next_unit, job.computed = units, found, computed
        job.order, self._admissions = self._admissions, self._admissions + 1
        job.phase = Phase.PREFILL
        self._running[job] = None
        self._waiting_jobs -= 1
        self._waiting_tokens -= tokens
        return count

    def _add_part(self, job: Job, count: int, parts: list[tuple[Job, int]]) -> None:
        """Put a chunk into the step; blocks it fills can be found from now on."""
        request = job.request
        after = job.computed + count
        upto = min(len(request.blocks), after // request.block_tokens)
        if job.next_unit < upto:
            job.units += [u for u in request.blocks[job.next_unit : upto] if self._kv.remember(u)]
            job.next_unit = upto
        parts.append((job, count))
        self._prefilling = job if after < request.prompt_tokens + job.output_done else None
