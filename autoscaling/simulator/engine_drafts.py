"""What drafts do to a modelled engine that decodes: more tokens a step, and longer steps.

A request's ``draft_acceptance`` ``p`` is the chance of each drafted token to be kept when those before it were;
``None``: nothing can be drafted, as with n-gram lookup in text that never repeats itself. At depth ``d`` a sequence
gets on average, of ``d`` tokens that are verified::

    tokens(p, d) = 1 + p + ... + p^d

A draft token costs what a prompt token costs (``d_ms``). The engine's own unit stays one token for every job, so that
runs of like steps can be jumped over: a run lasts ``(step_ms + d_ms * drafted) / tokens`` per unit, with the batch's
mean of both. Jobs of one batch therefore progress alike, whatever their own acceptance. Steps with prompts draft
nothing, and no step model learns from steps with drafts, as live.

Other depths are explored by the live rule (``policies/speculation/explorer.py``). It must not draw anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from autoscaling.simulator.engine_job import Job, Phase
from policies.measures import DepthUse
from policies.speculation import NO_EXPLORATION, Bounds, DepthExplorer, batch_class

UNITS_MAX = 1 << 62
"""No limit."""


def tokens_per_step(acceptance: float | None, depth: int) -> float:
    """Mean tokens that a sequence gets in one step."""
    if acceptance is None:
        return 1.0
    return depth + 1.0 if acceptance >= 1 else (1 - acceptance ** (depth + 1)) / (1 - acceptance)


@dataclass(frozen=True, slots=True)
class Drafted:
    """One run of decode steps, per sequence and step."""

    depth: int
    tokens: float
    drafts: float
    units_max: int = UNITS_MAX
    """Tokens per sequence after which the depth may change."""


NOTHING = Drafted(0, 1.0, 0.0)
"""A run without drafts, of an engine that does not speculate or of steps with prompts."""


class Drafting:
    """Drafts of one engine: depth, exploration, and what the window's report says of them."""

    __slots__ = ("_bounds", "_explorer", "_sums", "accepted_tokens", "asked", "draft_tokens", "hard")

    def __init__(self, hard: int) -> None:
        """``hard`` is the start-up depth, 0 where the engine does not speculate."""
        self.hard = hard
        self.asked = hard
        self._bounds = NO_EXPLORATION
        self._explorer = DepthExplorer(hard)
        self._clear()

    def _clear(self) -> None:
        self._sums: dict[tuple[int, int], list[float]] = {}
        self.draft_tokens = self.accepted_tokens = 0.0

    @property
    def depth(self) -> int | None:
        """Depth asked for, in force; ``None``: the engine does not speculate."""
        return self.asked if self.hard else None

    def ask(self, depth: int | None, bounds: Bounds) -> None:
        """The knob and the bounds of exploration from the next run on."""
        self.asked = max(0, min(self.hard if depth is None else depth, self.hard))
        self._bounds = bounds

    def begin(self, running: Iterable[Job], number: int) -> Drafted:
        """The next run of decode steps, of ``number`` jobs of ``running``."""
        if not self.hard:
            return NOTHING
        depth = self._explorer.choose(self.asked, self._bounds, number)
        tokens = drafts = 0.0
        for job in running:
            if job.phase is Phase.DECODE:
                acceptance = job.request.draft_acceptance
                tokens += tokens_per_step(acceptance, depth)
                drafts += depth if acceptance is not None else 0
        horizon = self._explorer.horizon(number)
        units_max = UNITS_MAX if math.isinf(horizon) else max(1, math.ceil(horizon * tokens / number))
        return Drafted(depth, tokens / number, drafts / number, units_max)

    def ran(self, run: Drafted, number: int, units: int, busy_ms: float) -> None:
        """Each of ``number`` jobs got ``units`` tokens."""
        if not self.hard or not number:
            return
        steps = units / run.tokens
        self._explorer.ran(run.depth, number, units * number, busy_ms, steps)
        self.draft_tokens += steps * number * run.drafts
        self.accepted_tokens += (units - steps) * number
        sums = self._sums.setdefault((run.depth, batch_class(number)), [0.0] * 5)
        for i, value in enumerate((steps, steps * number, units * number, busy_ms, steps * number * run.drafts)):
            sums[i] += value

    def take(self) -> tuple[tuple[DepthUse, ...], int, int]:
        """The window's use of depths, its draft tokens, and those that were kept; opens the next window."""
        uses = tuple(
            DepthUse(depth, batch_max, round(steps), round(seqs), round(tokens), busy_ms, round(drafted))
            for (depth, batch_max), (steps, seqs, tokens, busy_ms, drafted) in sorted(self._sums.items())
        )
        drafted, accepted = round(self.draft_tokens), round(self.accepted_tokens)
        self._clear()
        return uses, drafted, accepted
