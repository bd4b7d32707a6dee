"""The engine that ``autoscaling/simulator/engine.py`` claims to be, one step at a time and one block at a time.

Written for clearness, not for speed: every step looks at every sequence, every block is an object in a list, admission
is tried in every step. Nothing is shared with the fast engine but the values that go in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from autoscaling.simulator.spec import EngineProfile, SimRequest
from policies.types import Knobs


@dataclass(eq=False)
class Block:
    unit: int | None = None
    """Hash of the unit it is part of."""
    owner: object | None = None
    """Release that left it behind, while nobody has taken it."""
    references: int = 0


@dataclass(eq=False)
class RefJob:
    request: SimRequest
    output_tokens: int
    kv_ready: bool = False
    cached_tokens: int = 0
    preemptions: int = 0
    output_done: int = 0
    computed: int = 0
    first_token_ns: int | None = None
    finished_ns: int | None = None
    aborted: bool = False
    admitted: bool = False
    decoding: bool = False
    said: int | None = None
    """Tokens written when it was aborted."""
    visible: int = 0
    units: list[int] = field(default_factory=list)
    others: list[Block] = field(default_factory=list)
    offered: int = 0
    left: list[Block] = field(default_factory=list)
    left_units: int = 0

    @property
    def tokens(self) -> int:
        return self.request.prompt_tokens + self.output_done


class RefEngine:
    def __init__(self, profile: EngineProfile) -> None:
        self.profile, self.law, self.block = profile, profile.law, profile.block_tokens
        self.queue = [Block() for _ in range(profile.kv_tokens // self.block)]
        self.blocks_max = len(self.queue)
        self.units: dict[int, list[Block]] = {}
        self.running: list[RefJob] = []
        self.waiting: list[RefJob] = []
        self.leaving: list[RefJob] = []
        self.doomed: list[RefJob] = []
        self.parts: list[tuple[RefJob, int]] = []
        self.knobs, self.speed = Knobs(), 1.0
        self.step, self.begin_ns = 0, 0
        self.end_ns: int | None = None
        self.frozen = False
        self.left_ns: int | None = None
        self.events: list[tuple[int, str, int]] = []
        self.gaps: list[int] = []
        self.prefilled = self.written = self.queried = self.hit = self.preempted = 0

    # --- driving ------------------------------------------------------------------------------------------------------

    def run_until(self, now_ns: int) -> None:
        while self.end_ns is not None and self.end_ns <= now_ns:
            at_ns = self.end_ns
            self.complete(at_ns)
            self.plan(at_ns)

    def submit(self, job: RefJob, now_ns: int) -> None:
        self.run_until(now_ns)
        self.waiting.append(job)
        if self.end_ns is None and self.left_ns is None:
            if not self.frozen:
                self.plan(now_ns)
        elif self.left_ns is None:
            job.visible = self.step + (2 if self.profile.async_scheduling else 1)

    def abort(self, job: RefJob, now_ns: int) -> None:
        self.run_until(now_ns)
        if job.aborted or job.finished_ns is not None:
            return
        job.aborted, job.said = True, job.output_done
        if job in self.waiting:
            self.waiting.remove(job)
        else:
            self.doomed.append(job)

    def set_speed(self, factor: float, now_ns: int) -> None:
        self.run_until(now_ns)
        if math.isinf(factor):
            if not self.frozen and self.end_ns is not None:
                self.left_ns, self.end_ns = self.end_ns - now_ns, None
            self.frozen = True
            return
        self.speed = factor
        if not self.frozen:
            return
        self.frozen = False
        if self.left_ns is not None:
            self.end_ns, self.left_ns = now_ns + self.left_ns, None
        elif self.waiting:
            self.plan(now_ns)

    # --- one step -----------------------------------------------------------------------------------------------------

    def complete(self, at_ns: int) -> None:
        for job in self.leaving:
            self.release(job)
        self.leaving = []
        ended: list[RefJob] = []
        self.step += 1
        decoding = [job for job, _ in self.parts if job.decoding]
        self.gaps += [at_ns - self.begin_ns] * len(decoding)
        for job, tokens in self.parts:
            job.computed += tokens
            self.prefilled += 0 if job.decoding else tokens
            if job.computed < job.tokens or (job.aborted and not job.decoding):
                continue
            job.output_done += 1
            job.decoding = True
            self.written += 1
            if job.first_token_ns is None:
                job.first_token_ns = at_ns
            if job.output_done == job.output_tokens:
                ended.append(job)
        for job in sorted(ended, key=lambda j: j not in decoding):
            if not job.aborted:
                job.finished_ns = at_ns
        self.tell(at_ns, decoding)
        for job in ended:
            self.running.remove(job)
            for unit in job.request.blocks_after[len(job.request.blocks) : job.computed // job.request.block_tokens]:
                self.remember(job, unit)
            if self.profile.async_scheduling:
                self.leaving.append(job)
            else:
                self.release(job)
        self.parts = []

    def tell(self, at_ns: int, decoding: list[RefJob]) -> None:
        """Events in the order of the batch, ends of decoding ones first."""
        for job, _ in self.parts:
            if job in decoding and job.finished_ns == at_ns:
                self.events.append((at_ns, "finished", job.request.index))
        for job, _ in self.parts:
            if job in decoding or job.aborted:
                continue
            if job.first_token_ns == at_ns:
                self.events.append((at_ns, "first_token", job.request.index))
            if job.finished_ns == at_ns:
                self.events.append((at_ns, "finished", job.request.index))

    def plan(self, at_ns: int) -> None:
        for job in self.doomed:
            if job in self.running:
                self.running.remove(job)
                self.release(job)
        self.doomed = []
        while True:
            if not self.waiting:
                for job in self.leaving:
                    self.release(job)
                self.leaving = []
            self.parts = self.schedule()
            if self.parts:
                break
            if not self.waiting:
                self.end_ns = None
                return
            for job in self.leaving:
                self.release(job)
            self.leaving = []
        kv = sum(job.computed for job, _ in self.parts)
        chunks = [(n, job.computed) for job, n in self.parts if not job.decoding]
        pairs = sum(n * (p + n / 2) for n, p in chunks)
        law = self.law
        ms = law.a_ms + law.b_ms * len(self.parts) + law.c_ms * kv / 1e3
        ms += law.d_ms * sum(n for n, _ in chunks) + law.e_ms * pairs / 1e6
        self.begin_ns, self.end_ns = at_ns, at_ns + round(ms * 1e6 * self.speed)

    def schedule(self) -> list[tuple[RefJob, int]]:
        profile, parts, preempted = self.profile, [], False
        seqs = max(1, len(self.running), min(self.knobs.running_seqs_max or 10**9, profile.running_seqs_max))
        wanted = max(16, len(self.running), self.knobs.step_tokens_max or 10**9)
        budget = min(profile.step_tokens_max, wanted)
        i = 0
        while i < len(self.running):
            job = self.running[i]
            count = min(job.tokens - job.computed, budget)
            assert count > 0
            while self.missing(job, count) > len(self.queue):
                victim = self.running.pop()
                self.preempt(victim)
                preempted = True
                if victim is job:
                    break
            else:
                self.grow(job, count)
                parts.append((job, count))
                budget -= count
                i += 1
        while not preempted and self.waiting and budget and len(self.running) + len(self.leaving) < seqs:
            job = self.waiting[0]
            if job.visible > self.step and (self.running or parts):
                break
            admitted = self.admit(job, budget)
            if admitted is None:
                break
            parts.append((job, admitted))
            budget -= admitted
        return parts

    def admit(self, job: RefJob, budget: int) -> int | None:
        request, most = job.request, job.tokens - 1
        per_unit = request.block_tokens // self.block
        found = self.find(request.blocks[: most // request.block_tokens])
        again = self.find_own(job, len(found), most)
        computed = len(found) * request.block_tokens + len(again) * self.block
        if job.kv_ready and not job.preemptions:
            computed = most
        count = min(job.tokens - computed, budget)
        whole = job.tokens if self.profile.reserve_full_prompt else computed + count
        idle = sum(per_unit for unit in found if self.units[unit][0].references == 0)
        if -(-whole // self.block) - len(found) * per_unit + idle > len(self.queue):
            return None
        self.waiting.remove(job)
        self.running.append(job)
        for unit in found:
            for block in self.units[unit]:
                if block.references == 0:
                    self.queue.remove(block)
                block.references += 1
        for block in job.left:
            if block.owner is job:
                block.owner = None
                self.queue.remove(block)
                if block in again:
                    block.references = 1
                else:
                    self.queue.insert(0, block)
        job.left, job.left_units = [], 0
        job.units, job.others, job.offered, job.computed = found, again, len(found), computed
        if not job.admitted and not job.kv_ready:
            job.cached_tokens = computed
            self.queried += request.prompt_tokens
            self.hit += computed
        job.admitted = True
        self.grow(job, count)
        return count

    def find(self, units: tuple[int, ...]) -> list[int]:
        found: list[int] = []
        for unit in units:
            if unit not in self.units:
                break
            found.append(unit)
        return found

    def find_own(self, job: RefJob, found: int, most: int) -> list[Block]:
        """Blocks it left behind when it was preempted, from its first one on, that nobody took."""
        again: list[Block] = []
        if job.left_units == found:
            for block in job.left:
                after = found * job.request.block_tokens + (len(again) + 1) * self.block
                if block.owner is not job or after > most:
                    break
                again.append(block)
        return again

    # --- blocks -------------------------------------------------------------------------------------------------------

    def missing(self, job: RefJob, count: int) -> int:
        held = len(job.units) * (job.request.block_tokens // self.block) + len(job.others)
        return max(0, -(-(job.computed + count) // self.block) - held)

    def grow(self, job: RefJob, count: int) -> None:
        job.others += [self.take() for _ in range(self.missing(job, count))]
        upto = min(len(job.request.blocks), (job.computed + count) // job.request.block_tokens)
        while job.offered < upto:
            self.remember(job, job.request.blocks[job.offered])
            job.offered += 1

    def remember(self, job: RefJob, unit: int) -> None:
        if not self.profile.prefix_cache or unit in self.units:
            return
        blocks = [job.others.pop(0) for _ in range(job.request.block_tokens // self.block)]
        for block in blocks:
            block.unit = unit
        self.units[unit] = blocks
        job.units.append(unit)

    def take(self) -> Block:
        block = self.queue.pop(0)
        if block.unit is not None:
            rest = [b for b in self.units.pop(block.unit) if b is not block]
            for other in rest:
                self.queue.remove(other)
            self.queue[:0] = rest
            for b in (block, *rest):
                b.unit = None
        block.owner = None
        block.references = 1
        return block

    def release(self, job: RefJob) -> None:
        full = job.computed // self.block - len(job.units) * (job.request.block_tokens // self.block)
        kept, tail = job.others[:full], job.others[full:]
        assert len(tail) == (1 if job.computed % self.block else 0)
        if not self.profile.prefix_cache:
            kept, tail = [], job.others
        for block in job.others:
            block.references = 0
        self.queue[:0] = tail
        for block in reversed(kept):
            block.owner = job
            self.queue.append(block)
        for unit in reversed(job.units):
            for block in reversed(self.units[unit]):
                block.references -= 1
                if block.references == 0:
                    self.queue.append(block)
        job.left, job.left_units = kept, len(job.units)
        if len(job.units) != job.offered:
            job.left_units = -1

    def preempt(self, job: RefJob) -> None:
        self.release(job)
        job.units, job.others, job.computed = [], [], 0
        job.preemptions += 1
        job.decoding = False
        job.visible = 0
        self.preempted += 1
        self.waiting.insert(0, job)
