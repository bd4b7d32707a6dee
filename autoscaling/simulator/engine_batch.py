"""Jobs of a modelled engine: those that decode, none of them looked at by itself, and those that wait.

All decoding jobs write one token in every step, so what differs between them is constant in terms of the engine's step
counter: the step at which a job ends (a heap), and the step, modulo the tokens of a block, at which its next token
opens a block (one counter for each remainder). Contexts are summed once, as of step 0. It must not know time or rules.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from autoscaling.simulator.engine_job import Job, Phase


class Decoders:
    """Jobs that decode, in an engine with blocks of ``block_tokens``."""

    __slots__ = ("_block", "_context", "_ends", "_openings", "number")

    def __init__(self, block_tokens: int) -> None:
        self.number = 0
        self._block = block_tokens
        self._ends: list[tuple[int, int, Job]] = []
        self._openings = [0] * block_tokens
        self._context = 0

    def context(self, step: int) -> int:
        """Tokens of KV cache that the jobs have before step number ``step``, shared ones counted for each."""
        return self._context + self.number * step

    def openings(self, step: int) -> int:
        """Blocks that step number ``step`` opens."""
        return self._openings[step % self._block]

    def add(self, job: Job, step: int) -> None:
        """A job decodes from step number ``step`` on; ``computed`` and ``output_done`` are as of now."""
        job.phase = Phase.DECODE
        shift = job.computed = job.computed - step
        job.counter_shift = step - job.output_done
        self._openings[-shift % self._block] += 1
        self.number += 1
        self._context += shift
        heappush(self._ends, (job.counter_shift + job.output_tokens, job.order, job))

    def remove(self, job: Job, step: int) -> None:
        """A job decodes no longer; ``computed`` and ``output_done`` are plain counts again."""
        shift = job.computed
        self._openings[-shift % self._block] -= 1
        self.number -= 1
        self._context -= shift
        job.computed = shift + step
        if not job.aborted:
            job.output_done = step - job.counter_shift

    def next_end(self) -> int:
        """Step number at which the first job ends; there must be one."""
        ends = self._ends
        while ends[0][2].order != ends[0][1] or ends[0][2].phase is not Phase.DECODE:
            heappop(ends)
        return ends[0][0]

    def pop_ended(self, step: int) -> list[Job]:
        """Jobs that have all their tokens before step number ``step``, taken out, in order of admission."""
        ended: list[Job] = []
        ends = self._ends
        while ends and ends[0][0] <= step:
            _, order, job = heappop(ends)
            if job.order == order and job.phase is Phase.DECODE:
                self.remove(job, step)
                ended.append(job)
        return ended

    def opened(self, begin: int, steps: int) -> int:
        """Blocks opened by ``steps`` steps from step number ``begin`` on."""
        block, openings = self._block, self._openings
        cycles, rest = divmod(steps, block)
        opened = cycles * self.number
        for step in range(begin, begin + rest):
            opened += openings[step % block]
        return opened

    def steps_within(self, begin: int, steps: int, blocks: int) -> int:
        """How many of ``steps`` steps from step number ``begin`` on need no more than ``blocks`` blocks."""
        block = self._block
        if blocks >= self.number * (steps // block + 1):
            return steps
        cycles, left = divmod(blocks, self.number)
        possible = cycles * block
        for step in range(begin, begin + block):
            left -= self._openings[step % block]
            if left < 0:
                break
            possible += 1
        return min(steps, possible)


class Queue:
    """Waiting jobs, first come first. Aborted ones stay in it, not counted, until they would be its head."""

    __slots__ = ("_jobs", "number", "tokens")

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self.number = 0
        self.tokens = 0
        """Tokens of their prompts and of what they have written."""

    def push(self, job: Job, *, first: bool = False) -> None:
        """Put a job at the end of the queue, or at its head."""
        if first:
            self._jobs.appendleft(job)
        else:
            self._jobs.append(job)
        self.number += 1
        self.tokens += job.request.prompt_tokens + job.output_done

    def head(self) -> Job | None:
        """The first job."""
        return self._jobs[0] if self._jobs else None

    def leave(self, job: Job, phase: Phase) -> None:
        """A job waits no longer."""
        job.phase = phase
        self.number -= 1
        self.tokens -= job.request.prompt_tokens + job.output_done
        jobs = self._jobs
        while jobs and jobs[0].phase is not Phase.WAITING:
            jobs.popleft()
