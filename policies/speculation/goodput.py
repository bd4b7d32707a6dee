"""Goodput of one engine by speculative depth and class of batch sizes, from what it measured.

Goodput is tokens per ms of decode steps. Two things make it, and they are measured apart, because the pace of a machine
wavers by more than drafts bring::

    goodput(d) = tokens(d) / (pace * cost(d))           tokens(0) = cost(0) = 1, cost(d) >= 1

``tokens``, what one sequence gets from a step: counted, in blocks of at least ``steps_min`` steps, later ones weighing
:data:`BLOCK_WEIGHT`. A matter of the text: a slow second does not change it. A block that differs by more than
:data:`CHANGE_SHARE` replaces the figure, and what other drafts were worth is forgotten with it: the text is another.

``pace``, one sequence's share of a step without drafts, in ms: follows every report, whatever its depth.

``cost``, a step with drafts over one without: from reports in which steps of two depths ran side by side, so that both
saw the same machine, batch and context; in parts of a plain step per drafted token, mean of the last :data:`COST_STEPS`
such steps. Where there were none, from the step model. After a drift all are measured anew.

So drafts are paid from what was accepted and from nothing else: however quick the seconds were in which a depth was
tried, ``goodput(d) <= tokens(d) * goodput(0)``.

Where a depth was never (or long ago) measured in a class, what its drafts brought in another one counts.

It must not decide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from policies.measures import DepthUse
from policies.step_model import predict_step_ms
from policies.types import StepCoefficients

BLOCK_WEIGHT = 0.2
"""Least weight of a new block in a figure it agrees with."""

CHANGE_SHARE = 0.4
"""Relative difference from which a block replaces the figure."""

STALE_NS = 60_000_000_000
"""What drafts brought longer ago gives way to what they brought later in another class: the text may be another."""

CLASSES_MAX = 16
"""Classes of batch sizes kept."""

PACE_WEIGHT = 0.1
"""Weight of one step in the pace."""

COST_STEPS = 60
"""Steps at a depth, side by side with others, that its cost is the mean of."""

COST_STEPS_MIN = 4
"""The same, from which it counts more than the step model."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """What a depth brings in a class of batch sizes."""

    per_ms: float
    """Tokens per ms."""
    blocks: int
    """Blocks of steps it was measured in; 0: it is predicted."""
    at_ns: int
    """When it was measured last."""
    doubt: float = 0.0
    """Standard error of ``per_ms`` as a share of it: drafts come true by chance."""


@dataclass(slots=True)
class _Block:
    """Steps on their way to a whole block."""

    steps: int = 0
    seqs: int = 0
    tokens: int = 0
    drafted: int = 0

    def add(self, use: DepthUse) -> None:
        """Count one entry of a report."""
        self.steps += use.steps
        self.seqs += use.seqs
        self.tokens += use.tokens
        self.drafted += use.drafted


@dataclass(frozen=True, slots=True)
class _Worth:
    """What drafts brought, per sequence and step."""

    tokens: float
    drafted: float
    seqs: float
    """Sequences, summed over steps, that this is the mean of."""
    at_ns: int

    @property
    def doubt(self) -> float:
        """Relative standard error of ``tokens``, as if drafts came true with one chance until the first that fails."""
        accepted = max(0.0, self.tokens - 1)
        return math.sqrt(accepted * (1 + accepted) / max(1.0, self.seqs)) / max(1.0, self.tokens)


@dataclass(slots=True)
class _Figure:
    """One depth in one class."""

    worth: _Worth | None = None
    blocks: int = 0
    block: _Block = field(default_factory=_Block)
    extra: float = 0.0
    """What one drafted token adds to a step, in parts of a step without drafts."""
    paired: float = 0.0
    """Steps beside others that ``extra`` comes from."""

    def close(self, now_ns: int) -> bool:
        """The block is whole: it becomes part of the figure. True: it replaced what was known."""
        block, self.block, old = self.block, _Block(), self.worth
        tokens, drafted = block.tokens / block.seqs, block.drafted / block.seqs
        changed = old is not None and abs(tokens - old.tokens) > CHANGE_SHARE * old.tokens
        if old is None or changed:
            self.worth, self.blocks = _Worth(tokens, drafted, block.seqs, now_ns), 1
            return changed
        self.blocks += 1
        weight = max(BLOCK_WEIGHT, 1 / self.blocks)
        seqs = min(old.seqs + block.seqs, block.seqs / BLOCK_WEIGHT)
        self.worth = _Worth(
            old.tokens + weight * (tokens - old.tokens), old.drafted + weight * (drafted - old.drafted), seqs, now_ns
        )
        return False

    def pair(self, extra: float, steps: float) -> None:
        """``steps`` beside others, in which one drafted token added ``extra``."""
        self.paired = min(COST_STEPS, self.paired + steps)
        self.extra += min(1.0, steps / self.paired) * (extra - self.extra)


@dataclass(slots=True)
class _Pace:
    """A step without drafts in one class: one sequence's share of it, in ms."""

    ms: float

    def follow(self, ms: float, steps: float) -> None:
        """``steps`` more."""
        self.ms += (1 - (1 - PACE_WEIGHT) ** steps) * (ms - self.ms)


class GoodputBook:
    """Measured goodput of one engine."""

    def __init__(self, steps_min: int) -> None:
        """``steps_min`` steps make a block."""
        self._steps_min = steps_min
        self._figures: dict[tuple[int, int], _Figure] = {}
        self._worth: dict[int, _Worth] = {}
        """What drafts brought last, whatever the class."""
        self._pace: dict[int, _Pace] = {}

    def clear(self) -> None:
        """Forget everything: the engine is another one."""
        self._figures.clear()
        self._worth.clear()
        self._pace.clear()

    def doubt(self) -> None:
        """The engine drifted: what drafts cost is measured anew."""
        self._pace.clear()
        for figure in self._figures.values():
            figure.paired = 0.0

    def add(self, uses: Sequence[DepthUse], kv_per_seq: float, model: StepCoefficients | None, now_ns: int) -> None:
        """Count what one report says; ``model`` is ``None`` where it is not trusted."""
        for batch_max in {use.batch_max for use in uses}:
            mine = [u for u in uses if u.batch_max == batch_max and u.steps > 0 and u.seqs > 0 and u.busy_ms > 0]
            if not mine or (batch_max not in self._classes() and len(self._classes()) >= CLASSES_MAX):
                continue
            self._follow(batch_max, mine, kv_per_seq, model)
            for use in mine:
                self._count(use, now_ns)

    def forget(self, batch_max: int, depth: int) -> None:
        """What drafts of ``depth`` brought in the class was on another text."""
        figure = self._figures.get((batch_max, depth))
        if figure is not None:
            figure.worth, figure.blocks, figure.block = None, 0, _Block()
        self._worth.pop(depth, None)

    def goodput(
        self, batch_max: int, depth: int, kv_per_seq: float, model: StepCoefficients | None, now_ns: int
    ) -> Goodput | None:
        """What ``depth`` brings in the class now; ``None``: nothing is known."""
        pace_ms = self._pace_ms(batch_max, kv_per_seq, model)
        if pace_ms is None:
            return None
        if depth == 0:
            return Goodput(1 / pace_ms, int(batch_max in self._pace), now_ns)
        worth, blocks = self._brought(self._figures.get((batch_max, depth)), depth, now_ns)
        if worth is None:
            return None
        cost = self._cost(batch_max, depth, worth.drafted, kv_per_seq, model)
        if cost is None:
            return None
        return Goodput(worth.tokens / (pace_ms * cost), blocks, worth.at_ns if blocks else -1, worth.doubt)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _classes(self) -> set[int]:
        return {batch for batch, _ in self._figures}

    def _brought(self, figure: _Figure | None, depth: int, now_ns: int) -> tuple[_Worth | None, int]:
        """What drafts bring, and in how many blocks of this class that was measured."""
        last, own = self._worth.get(depth), None if figure is None else figure.worth
        if figure is None or own is None:
            return last, 0
        fresher = last is not None and last.at_ns > own.at_ns and now_ns - own.at_ns > STALE_NS
        return (last, 0) if fresher else (own, figure.blocks)

    def _count(self, use: DepthUse, now_ns: int) -> None:
        """Tokens that steps of one depth brought."""
        key = (use.batch_max, use.depth)
        figure = self._figures.setdefault(key, _Figure())
        figure.block.add(use)
        if figure.block.steps < self._steps_min:
            return
        if figure.close(now_ns) and use.depth:
            for (_, depth), other in self._figures.items():
                if depth and other is not figure:
                    other.worth, other.blocks, other.block = None, 0, _Block()
            self._worth.clear()
        assert figure.worth is not None
        self._worth[use.depth] = figure.worth

    def _follow(
        self, batch_max: int, uses: Sequence[DepthUse], kv_per_seq: float, model: StepCoefficients | None
    ) -> None:
        """The pace of the class, and what drafts cost where steps with and without (or fewer of) them ran together."""
        plain = next((u for u in uses if not u.depth), None)
        costs = {
            u.depth: 1.0 if not u.depth else self._cost(batch_max, u.depth, u.drafted / u.seqs, kv_per_seq, model)
            for u in uses
        }
        for use in sorted(uses, key=lambda u: -u.steps):
            cost = costs[use.depth]
            if cost is not None and (use is plain or plain is None or plain.steps < COST_STEPS_MIN):
                self._pace.setdefault(batch_max, _Pace(_share_ms(use) / cost)).follow(_share_ms(use) / cost, use.steps)
        pace = self._pace.get(batch_max)
        for use in uses:
            if use is plain or not use.drafted or pace is None:
                continue
            if plain is not None:
                beside_ms, steps = _share_ms(plain), min(use.steps, plain.steps)
            elif costs[use.depth] is None:
                beside_ms, steps = pace.ms, use.steps
            else:
                continue
            figure = self._figures.setdefault((batch_max, use.depth), _Figure())
            figure.pair((_share_ms(use) / beside_ms - 1) * use.seqs / use.drafted, steps)

    def _cost(
        self, batch_max: int, depth: int, drafted: float, kv_per_seq: float, model: StepCoefficients | None
    ) -> float | None:
        """A step of ``depth`` that verifies ``drafted`` tokens per sequence over one without drafts, at least 1."""
        figure = self._figures.get((batch_max, depth))
        extra = None
        if figure is not None and figure.paired >= COST_STEPS_MIN:
            extra = figure.extra
        elif model is not None:
            extra = model.d_ms / _plain_ms(batch_max, kv_per_seq, model)
        elif figure is not None and figure.paired:
            extra = figure.extra
        return None if extra is None else 1 + max(0.0, extra) * drafted

    def _pace_ms(self, batch_max: int, kv_per_seq: float, model: StepCoefficients | None) -> float | None:
        """One sequence's share of a step without drafts."""
        pace = self._pace.get(batch_max)
        if pace is not None:
            return pace.ms
        return None if model is None else _plain_ms(batch_max, kv_per_seq, model)


def _share_ms(use: DepthUse) -> float:
    """One sequence's share of a step."""
    return use.busy_ms / use.seqs


def _plain_ms(batch: int, kv_per_seq: float, model: StepCoefficients) -> float:
    return max(predict_step_ms(model, batch, batch * kv_per_seq, 0), 1e-6) / batch
