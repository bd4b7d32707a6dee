"""Goodput of one engine by speculative depth and class of batch sizes, from what it measured.

Goodput is tokens per ms of decode steps. It depends on how many sequences ran and how much context they had, so each
figure remembers both, and is referred to the present moment by the step model when it is compared with another::

    goodput now = goodput then * cost(batch then, kv then) / cost(batch_max, kv now)
    cost(n, kv) = step_ms(n, n * kv, 0) / n            one sequence's share of a step without drafts

Steps are taken in blocks of at least ``steps_min``; a figure is their mean, later ones weighing :data:`BLOCK_WEIGHT`.
A block that differs from the figure by more than :data:`CHANGE_SHARE` replaces it: the text has changed, and an average
of two texts is neither. What other drafts were worth on the old text is forgotten with it; a step without drafts costs
the same whatever the text.

An engine that drifted is another one. Its old figures, scaled as the step model was, are all there is until the next
block at each depth, which replaces them: all depths slow down together, and a comparison of one measured after with one
measured before would be none.

Where a depth was never (or long ago) measured in a class, its goodput is predicted from what its drafts were worth
elsewhere, which is a matter of the text and not of the batch::

    goodput(n, d) = n * tokens_per_seq(d) / (step_ms(n, n * kv, 0) + d_ms * drafted_per_seq(d) * n)

It must not decide, and it must not use the share of drafts that were accepted for anything but that prediction.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from policies.measures import DepthUse
from policies.step_model import predict_step_ms
from policies.types import StepCoefficients

BLOCK_WEIGHT = 0.2
"""Least weight of a new block in a figure it agrees with."""

CHANGE_SHARE = 0.4
"""Relative difference from which a block replaces the figure."""

STALE_NS = 60_000_000_000
"""A figure of drafts older than this gives way to a fresher prediction: the text may be another by now."""

CLASSES_MAX = 16
"""Classes of batch sizes kept."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What an engine carries, and its step model where that is trusted."""

    batch: float
    """Sequences of one step."""
    kv_per_seq: float
    """Context of one of them, in tokens."""
    model: StepCoefficients | None = None

    def cost_ms(self, model: StepCoefficients) -> float:
        """One sequence's share of a step without drafts."""
        step_ms = predict_step_ms(model, self.batch, self.batch * self.kv_per_seq, 0)
        return max(step_ms, 1e-6) / max(self.batch, 1e-6)


@dataclass(frozen=True, slots=True)
class Goodput:
    """What a depth brings in a class of batch sizes."""

    per_ms: float
    """Tokens per ms."""
    blocks: int
    """Blocks of steps it was measured in; 0: it is predicted."""
    at_ns: int
    """When it was measured last."""


@dataclass(slots=True)
class _Block:
    """Steps on their way to a whole block; ``batch`` and ``kv_per_seq`` summed over steps."""

    steps: int = 0
    seqs: int = 0
    tokens: int = 0
    drafted: int = 0
    busy_ms: float = 0.0
    kv: float = 0.0

    def add(self, use: DepthUse, kv_per_seq: float) -> None:
        """Count one entry of a report."""
        self.steps += use.steps
        self.seqs += use.seqs
        self.tokens += use.tokens
        self.drafted += use.drafted
        self.busy_ms += use.busy_ms
        self.kv += kv_per_seq * use.steps


@dataclass(slots=True)
class _Figure:
    """One depth in one class: smoothed goodput, and the moment it belongs to."""

    per_ms: float = 0.0
    batch: float = 1.0
    kv_per_seq: float = 0.0
    blocks: int = 0
    at_ns: int = 0
    doubtful: bool = False
    """Of the engine before it drifted."""
    block: _Block = field(default_factory=_Block)

    def referred(self, to: Moment) -> float:
        """Goodput at another moment."""
        if to.model is None:
            return self.per_ms
        return self.per_ms * Moment(self.batch, self.kv_per_seq).cost_ms(to.model) / to.cost_ms(to.model)

    def close(self, model: StepCoefficients | None, now_ns: int) -> bool:
        """The block is whole: it becomes part of the figure. True: it replaced what was known."""
        block, self.block = self.block, _Block()
        moment = Moment(block.seqs / block.steps, block.kv / block.steps, model)
        per_ms, old = block.tokens / block.busy_ms, self.referred(moment)
        changed = self.blocks > 0 and not self.doubtful and abs(per_ms - old) > CHANGE_SHARE * old
        self.blocks = 1 if changed or self.doubtful else self.blocks + 1
        weight = max(BLOCK_WEIGHT, 1 / self.blocks)
        self.doubtful = False
        self.per_ms = old + weight * (per_ms - old)
        self.batch, self.kv_per_seq, self.at_ns = moment.batch, moment.kv_per_seq, now_ns
        return changed


@dataclass(frozen=True, slots=True)
class _Worth:
    """What drafts of one depth brought in the last block, per sequence and step, whatever the batch."""

    tokens: float
    drafted: float
    at_ns: int


class GoodputBook:
    """Measured goodput of one engine."""

    def __init__(self, steps_min: int) -> None:
        """``steps_min`` steps make a block."""
        self._steps_min = steps_min
        self._figures: dict[tuple[int, int], _Figure] = {}
        self._worth: dict[int, _Worth] = {}

    def clear(self) -> None:
        """Forget everything: the engine is another one."""
        self._figures.clear()
        self._worth.clear()

    def doubt(self, before: StepCoefficients | None, after: StepCoefficients | None) -> None:
        """The engine drifted: figures are scaled from one step model to the other until they are measured again."""
        if before is None or after is None:
            self.clear()
            return
        for figure in self._figures.values():
            moment = Moment(figure.batch, figure.kv_per_seq)
            figure.per_ms *= moment.cost_ms(before) / moment.cost_ms(after)
            figure.block, figure.doubtful = _Block(), True

    def add(self, use: DepthUse, kv_per_seq: float, model: StepCoefficients | None, now_ns: int) -> None:
        """Count one entry of a report; ``model`` is ``None`` where it is not trusted."""
        if use.steps <= 0 or use.seqs <= 0 or use.busy_ms <= 0:
            return
        key = (use.batch_max, use.depth)
        figure = self._figures.get(key)
        if figure is None:
            classes = {batch for batch, _ in self._figures}
            if use.batch_max not in classes and len(classes) >= CLASSES_MAX:
                return
            figure = self._figures[key] = _Figure()
        block = figure.block
        block.add(use, kv_per_seq)
        if block.steps < self._steps_min:
            return
        if figure.close(model, now_ns) and use.depth:
            self._forget_drafts(key)
        self._worth[use.depth] = _Worth(block.tokens / block.seqs, block.drafted / block.seqs, now_ns)

    def forget(self, batch_max: int, depth: int) -> None:
        """What is known of ``depth`` in the class, and of the worth of its drafts, is of another text."""
        self._figures.pop((batch_max, depth), None)
        self._worth.pop(depth, None)

    def _forget_drafts(self, but: tuple[int, int]) -> None:
        """The text is another: keep of drafts only the figure that said so."""
        for key in [k for k in self._figures if k[1] and k != but]:
            del self._figures[key]
        self._worth.clear()

    def goodput(
        self, batch_max: int, depth: int, kv_per_seq: float, model: StepCoefficients | None, now_ns: int
    ) -> Goodput | None:
        """What ``depth`` brings in the class now; ``None``: nothing is known."""
        now = Moment(batch_max, kv_per_seq, model)
        figure = self._figures.get((batch_max, depth))
        measured = None
        if figure is not None and figure.blocks:
            measured = Goodput(figure.referred(now), figure.blocks, figure.at_ns)
            if depth == 0 or now_ns - figure.at_ns <= STALE_NS:
                return measured
        predicted = self._predicted(now, depth, -1 if measured is None else measured.at_ns)
        return measured if predicted is None else Goodput(predicted, 0, -1)

    def _predicted(self, now: Moment, depth: int, after_ns: int) -> float | None:
        """From what drafts were worth later than ``after_ns``."""
        if now.model is None:
            return None
        plain_ms = now.cost_ms(now.model)
        if depth == 0:
            return 1 / plain_ms
        worth = self._worth.get(depth)
        if worth is None or worth.at_ns <= after_ns:
            return None
        return worth.tokens / (plain_ms + now.model.d_ms * worth.drafted)
