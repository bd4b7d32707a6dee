"""At which depth the next step drafts: nearly always the one asked for, now and then another, to learn its worth.

Runs inside the engine, step by step, because there exploration costs least: a few steps in a row at another depth see
the same text and the same batch as their neighbours, and the knob itself stands still. Time spent is bounded::

    credit += share * step_ms / 2^quiet   after every decode step, up to CREDIT_STEPS steps; at most 2^QUIET_MAX
    credit -= step_ms                     after a step at a depth that was not asked for, unless it paid for itself: it
                                          brought more tokens than one at the depth asked for, and more per ms

A burst is :data:`BURST_STEPS` long and begins when the credit pays for it. One that brings more than the depth asked
for by :data:`PROMISING` goes on for as long again, and again, up to a block of ``steps``, on credit that must then be
earned back. A deeper one must do so by the tokens it brought as well: a quick moment of the machine is no promise, and
where nothing is accepted a trial ends after :data:`BURST_STEPS`. The tokens alone are enough for the first block at a
depth in a class of batch sizes: what drafts cost there is not known yet. ``quiet`` counts the deeper trials in a row,
at one batch size, that promised nothing; each halves the share.

Depth 0, against which drafts are measured, comes first; then every second burst tries the deepest draft, which says
most about whether the text can be drafted at all, and the others take turns.

It must not choose the depth that is asked for: the controller does, from what is measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from policies.config import PolicyConfig
from policies.speculation.depths import batch_class, depths
from policies.speculation.goodput import COST_STEPS_MIN
from policies.steering import ANY, Knob
from policies.types import Plan, ReplicaId

BURST_STEPS = 2
"""Steps of a burst that finds nothing."""

CREDIT_STEPS = 8
"""Most credit, in steps at the present pace; an engine begins with it. With more, bursts could follow each other."""

QUIET_MAX = 2
"""The share is halved at most so often: the first text that can be drafted must be found within a minute."""

PROMISING = 1.4
"""What a burst brings over what the depth asked for does, from which it goes on."""

PACE_WEIGHT = 0.1
"""Weight of the newest step in the pace of the depth asked for."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What exploration may cost and where it may go."""

    share: float = 0.0
    """Largest share of decode time; 0: none at all."""
    steps: int = 20
    """Steps of a whole block."""
    depth_max: int | None = None
    """Deepest draft that may be tried; ``None``: the start-up depth."""


NO_EXPLORATION = Bounds()


def exploration(config: PolicyConfig, plan: Plan, replica_id: ReplicaId) -> Bounds:
    """How far the engine of a replica may explore under a plan that is acted on.

    Not at all where the plan asks for no depth, or somebody set the depth by hand: then it is exactly that.
    """
    limits = config.guard.knobs.get(Knob.SPECULATIVE_DEPTH)
    speculation, knobs = config.speculation, plan.knobs.get(replica_id)
    by_hand = any(
        o.knob is Knob.SPECULATIVE_DEPTH and o.value is not None and o.target in (ANY, replica_id)
        for o in plan.overrides
    )
    if not speculation.enabled or knobs is None or knobs.speculative_depth is None or by_hand:
        return NO_EXPLORATION
    depth_max = None if limits is None or limits.max is None else int(limits.max)
    return Bounds(speculation.explore_share, speculation.steps_min, depth_max)


@dataclass(slots=True)
class _Burst:
    depth: int
    batch_max: int
    left: float
    steps: float = 0.0
    tokens: float = 0.0
    busy_ms: float = 0.0


@dataclass(slots=True)
class _Pace:
    """The depth asked for, in one class of batch sizes."""

    step_ms: float
    tokens: float

    def add(self, tokens: float, step_ms: float, steps: float) -> None:
        """``steps`` more, of ``step_ms`` and with ``tokens`` each."""
        weight = 1 - (1 - PACE_WEIGHT) ** steps
        self.step_ms += weight * (step_ms - self.step_ms)
        self.tokens += weight * (tokens - self.tokens)

    @property
    def goodput(self) -> float:
        """Tokens per ms."""
        return self.tokens / self.step_ms if self.step_ms > 0 else 0.0


class DepthExplorer:
    """Exploration of one engine."""

    def __init__(self, hard: int) -> None:
        """``hard`` is the start-up depth."""
        self._hard = hard
        self._depth = hard
        self._bounds = NO_EXPLORATION
        self._credit_ms: float | None = None
        self._burst: _Burst | None = None
        self._bursts = 0
        self._quiet: dict[int, int] = {}
        self._pace: dict[int, _Pace] = {}
        self._tried: dict[tuple[int, int], float] = {}

    def choose(self, depth: int, bounds: Bounds, batch: int) -> int:
        """Depth of the next step of ``batch`` sequences where ``depth`` is asked for."""
        if depth != self._depth:
            self._depth = depth
            self._pace.clear()
            self._quiet.clear()
        self._bounds = bounds
        if bounds.share <= 0 or batch < 1:
            self._burst = None
            return depth
        batch_max = batch_class(batch)
        burst = self._burst
        if burst is not None and (burst.left <= 0 or burst.depth == depth or burst.batch_max != batch_max):
            burst = None
        if burst is None:
            burst = self._begin(batch_max)
        self._burst = burst
        return depth if burst is None else burst.depth

    def ran(self, depth: int, batch: int, tokens: float, busy_ms: float, steps: float = 1.0) -> None:
        """Count ``steps`` that only decoded: their depth, their sequences, the tokens these got, how long it took.

        Engines call it step by step; a simulated one for a run of like steps, which need not be a whole number.
        """
        if busy_ms <= 0 or steps <= 0 or batch < 1:
            return
        batch_max, step_ms = batch_class(batch), busy_ms / steps
        self._tried[batch_max, depth] = self._tried.get((batch_max, depth), 0.0) + steps
        if depth == self._depth:
            pace = self._pace.get(batch_max)
            if pace is None:
                self._pace[batch_max] = _Pace(step_ms, tokens / steps)
            else:
                pace.add(tokens / steps, step_ms, steps)
        cap_ms = CREDIT_STEPS * self._step_ms(batch_max, step_ms)
        credit = cap_ms if self._credit_ms is None else self._credit_ms
        free = depth == self._depth or self._pays(batch_max, tokens / steps, tokens / busy_ms)
        spent = 0.0 if free else busy_ms
        self._credit_ms = min(cap_ms, credit + self._share(batch_max) * busy_ms - spent)
        burst = self._burst
        if burst is not None and burst.depth == depth and burst.batch_max == batch_max:
            self._count(burst, tokens, busy_ms, steps)

    def horizon(self, batch: int) -> float:
        """Steps of ``batch`` sequences after which :meth:`choose` may answer otherwise; at least one."""
        pace, share, burst = self._pace.get(batch_class(batch)), self._share(batch_class(batch)), self._burst
        if burst is not None:
            return max(1.0, burst.left)
        if share <= 0:
            return math.inf
        if pace is None or self._credit_ms is None:
            return float(BURST_STEPS)
        return max(1.0, (BURST_STEPS - self._credit_ms / pace.step_ms) / share)

    def _count(self, burst: _Burst, tokens: float, busy_ms: float, steps: float) -> None:
        burst.left -= steps
        burst.steps += steps
        burst.tokens += tokens
        burst.busy_ms += busy_ms
        if burst.left > 0:
            return
        if self._promises(burst):
            self._quiet.pop(burst.batch_max, None)
            burst.left = max(0.0, min(burst.steps, self._bounds.steps - burst.steps))
        elif burst.depth > self._depth and burst.steps <= BURST_STEPS:
            self._quiet[burst.batch_max] = min(QUIET_MAX, self._quiet.get(burst.batch_max, 0) + 1)

    def _pays(self, batch_max: int, tokens: float, goodput: float) -> bool:
        pace = self._pace.get(batch_max)
        return pace is not None and tokens > pace.tokens and goodput > pace.goodput

    def _promises(self, burst: _Burst) -> bool:
        pace = self._pace.get(burst.batch_max)
        if pace is None:
            return False
        more = burst.tokens / burst.busy_ms > PROMISING * pace.goodput
        if burst.depth < self._depth:
            return more
        untried = self._tried.get((burst.batch_max, burst.depth), 0) < self._bounds.steps
        return (more or untried) and burst.tokens / burst.steps > PROMISING * pace.tokens

    def _share(self, batch_max: int) -> float:
        """Of decode time, after what the last trials found."""
        return self._bounds.share / (1 << self._quiet.get(batch_max, 0))

    def _begin(self, batch_max: int) -> _Burst | None:
        pace, credit = self._pace.get(batch_max), self._credit_ms
        if pace is None or credit is None or credit < BURST_STEPS * pace.step_ms:
            return None
        limit = self._hard if self._bounds.depth_max is None else min(self._hard, self._bounds.depth_max)
        others = [d for d in depths(limit) if d != self._depth]
        if not others:
            return None
        if self._tried.get((batch_max, 0), 0) < COST_STEPS_MIN:
            return _Burst(0, batch_max, BURST_STEPS)
        self._bursts += 1
        turn, odd = divmod(self._bursts, 2)
        depth = others[-1] if odd or len(others) == 1 else others[turn % (len(others) - 1)]
        return _Burst(depth, batch_max, BURST_STEPS)

    def _step_ms(self, batch_max: int, step_ms: float) -> float:
        pace = self._pace.get(batch_max)
        return step_ms if pace is None else pace.step_ms
