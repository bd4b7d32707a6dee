"""Which sequences take part in a step of the emulated engine, and with how many tokens. vLLM's rules, without a model.

One step, within ``step_tokens`` tokens:

1. running sequences that decode, one token and its drafts each, oldest first;
2. running sequences still in their prompt, as many tokens as the budget leaves (chunked prefill);
3. while nothing was preempted in this step and fewer than ``running_seqs`` run: waiting ones, oldest first, after their
   prompt was looked up in the prefix cache. At least the last prompt token is always computed.

A sequence whose next block does not fit preempts the youngest running one, which loses its blocks, goes back to the
head of the queue and later computes prompt and output again (recompute). Source: vLLM 0.29,
``vllm/v1/core/sched/scheduler.py``.

Drafts that come true are kept, up to the first that does not; the token after them is the step's own.

Pure: no time, no input or output. The caller bounds the queue (``waiting_max``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from deployments.emulation.blocks import BlockPool, block_hashes
from deployments.emulation.drafts import Drafter


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer in the making."""

    prompt: list[int]
    answer: list[int]
    """All tokens the model would write; the sequence ends with the last of them."""
    salt: str = ""
    output_tokens: int = 0
    computed_tokens: int = 0
    """Tokens whose keys and values are in the cache."""
    cached_tokens: int = 0
    """Prompt tokens the prefix cache spared at first admission."""
    preemptions: int = 0
    admitted: bool = False
    finished: bool = False
    blocks: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    remembered: int = 0
    """Blocks already offered to the prefix cache since the last admission."""
    drafter: Drafter | None = None
    """Made with its first draft."""

    @property
    def total_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.prompt) + self.output_tokens

    def draft(self, depth: int) -> list[int]:
        """Drafts for its next step; never beyond its answer, as no engine drafts beyond a context."""
        if depth < 1:
            return []
        if self.drafter is None:
            self.drafter = Drafter([*self.prompt, *self.answer[: self.output_tokens]])
        return self.drafter.propose(min(depth, len(self.answer) - self.output_tokens - 1))

    def write(self, count: int) -> list[int]:
        """Take the next ``count`` tokens of its answer."""
        tokens = self.answer[self.output_tokens : self.output_tokens + count]
        self.output_tokens += len(tokens)
        if self.drafter is not None:
            self.drafter.add(tokens)
        return tokens

    def accepted(self, drafts: list[int]) -> int:
        """How many of ``drafts`` come true, up to the first that does not."""
        due = self.answer[self.output_tokens : self.output_tokens + len(drafts)]
        return next((i for i, (a, b) in enumerate(zip(drafts, due, strict=True)) if a != b), len(drafts))

    @property
    def decoding(self) -> bool:
        """Everything but the newest token is in the cache."""
        return self.output_tokens > 0 and self.computed_tokens == self.total_tokens - 1


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes."""

    parts: list[tuple[Sequence, int]]
    prefill_tokens: int
    decode_seqs: int
    kv_tokens: int
    """KV tokens held when the step began, in whole blocks."""
    preempted: int
    drafts: Mapping[int, list[int]] = field(default_factory=dict)
    """Draft tokens to verify, by ``id`` of their sequence."""

    @property
    def draft_tokens(self) -> int:
        """Draft tokens the step verifies."""
        return sum(map(len, self.drafts.values()))


class Scheduler:
    """Running and waiting sequences over one :class:`BlockPool`."""

    def __init__(self, pool: BlockPool, waiting_max: int) -> None:
        self.pool = pool
        self.waiting_max = waiting_max
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self._waiting_tokens = 0
        self.preemptions_total = 0
        self.prefix_query_tokens_total = 0
        self.prefix_hit_tokens_total = 0
        self.accepted_total = 0
        """Draft tokens that came true."""

    @property
    def has_work(self) -> bool:
        """True while any sequence runs or waits."""
        return bool(self.running or self.waiting)

    @property
    def prefill_backlog_tokens(self) -> int:
        """Prompt tokens of running and waiting sequences that are still to be computed."""
        running = sum(s.total_tokens - s.computed_tokens for s in self.running if not s.decoding)
        return running + self._waiting_tokens

    def add(self, seq: Sequence) -> bool:
        """Queue a sequence; False when the queue is full."""
        if len(self.waiting) >= self.waiting_max:
            return False
        seq.hashes = block_hashes(seq.prompt, self.pool.block_tokens, seq.salt)
        self.waiting.append(seq)
        self._waiting_tokens += seq.total_tokens
        return True

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out wherever it is and give its blocks back. May be called twice."""
        if seq in self.running:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
            self._waiting_tokens -= seq.total_tokens
        self.pool.give_back(seq.blocks)
        seq.blocks = []
        seq.finished = True

    def schedule(self, running_seqs: int, step_tokens: int, depth: int = 0) -> StepPlan:
        """Choose what the next step computes and take the blocks it needs; ``depth`` is that of its drafts."""
        parts: dict[int, tuple[Sequence, int]] = {}
        drafts: dict[int, list[int]] = {}
        kv_tokens, before, prefill, decodes = self.pool.used_tokens, self.preemptions_total, 0, 0
        budget = step_tokens
        for seq in [*(s for s in self.running if s.decoding), *(s for s in self.running if not s.decoding)]:
            if budget == 0:
                break
            if seq not in self.running:
                continue
            count = min(seq.total_tokens - seq.computed_tokens, budget)
            drafted = seq.draft(min(depth, budget - count)) if seq.decoding else []
            if not self._make_room(seq, count + len(drafted), parts):
                continue
            parts[id(seq)] = (seq, count)
            if drafted:
                drafts[id(seq)] = drafted
            budget -= count + len(drafted)
        if self.preemptions_total == before:
            self._admit(running_seqs, budget, parts)
        for seq, count in parts.values():
            decodes += seq.decoding
            prefill += 0 if seq.decoding else count
        drafts = {key: drafted for key, drafted in drafts.items() if key in parts}
        return StepPlan(list(parts.values()), prefill, decodes, kv_tokens, self.preemptions_total - before, drafts)

    def finish(self, plan: StepPlan) -> list[tuple[Sequence, int]]:
        """Book the step's work. Returns (sequence, token) for each that got a token; ended ones are taken out."""
        out: list[tuple[Sequence, int]] = []
        for seq, count in plan.parts:
            if seq.finished:
                continue
            accepted = seq.accepted(plan.drafts.get(id(seq), []))
            self.accepted_total += accepted
            seq.computed_tokens += count
            if seq.computed_tokens < seq.total_tokens:
                self._remember(seq)
                continue
            out += [(seq, token) for token in seq.write(1 + accepted)]
            seq.computed_tokens += accepted
            self._remember(seq)
            if seq.output_tokens == len(seq.answer):
                self.remove(seq)
        return out

    # --- inside -------------------------------------------------------------------------------------------------------

    def _admit(self, running_seqs: int, budget: int, parts: dict[int, tuple[Sequence, int]]) -> None:
        while self.waiting and budget > 0 and len(self.running) < running_seqs:
            seq = self.waiting[0]
            known = self.pool.known_prefix(seq.hashes[: (seq.total_tokens - 1) // self.pool.block_tokens])
            self.pool.take_known(known)
            cached = len(known) * self.pool.block_tokens
            count = min(seq.total_tokens - cached, budget)
            new = self.pool.take_new(self.pool.blocks_for(cached + count) - len(known))
            if new is None:
                self.pool.give_back(known)
                return
            self.waiting.popleft()
            self._waiting_tokens -= seq.total_tokens
            self.running.append(seq)
            seq.blocks, seq.computed_tokens, seq.remembered = [*known, *new], cached, len(known)
            self._count_lookup(seq, cached)
            parts[id(seq)] = (seq, count)
            budget -= count

    def _count_lookup(self, seq: Sequence, cached: int) -> None:
        if not seq.admitted:
            seq.admitted, seq.cached_tokens = True, cached
            self.prefix_query_tokens_total += len(seq.prompt)
            self.prefix_hit_tokens_total += cached

    def _make_room(self, seq: Sequence, count: int, parts: dict[int, tuple[Sequence, int]]) -> bool:
        """Take the blocks for ``count`` more tokens, preempting younger ones; False when ``seq`` itself had to go."""
        need = self.pool.blocks_for(seq.computed_tokens + count) - len(seq.blocks)
        while (new := self.pool.take_new(max(0, need))) is None:
            victim = self.running.pop()
            self._preempt(victim)
            parts.pop(id(victim), None)
            if victim is seq:
                return False
        seq.blocks += new
        return True

    def _preempt(self, seq: Sequence) -> None:
        self.pool.give_back(seq.blocks)
        seq.blocks, seq.computed_tokens, seq.remembered = [], 0, 0
        seq.preemptions += 1
        self.preemptions_total += 1
        self.waiting.appendleft(seq)
        self._waiting_tokens += seq.total_tokens

    def _remember(self, seq: Sequence) -> None:
        """Make blocks that became full findable, of the output too."""
        full = seq.computed_tokens // self.pool.block_tokens
        if full > len(seq.hashes):
            text = [*seq.prompt, *seq.answer[: seq.output_tokens]]
            seq.hashes = block_hashes(text, self.pool.block_tokens, seq.salt, seq.hashes)
        for i in range(seq.remembered, full):
            self.pool.remember(seq.blocks[i], seq.hashes[i])
        seq.remembered = full
