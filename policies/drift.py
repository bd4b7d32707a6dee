"""When an engine is not the one it was: a lasting change of speed, told from noise and from single slow steps.

A two-sided CUSUM (Page, Biometrika 41, 1954) over the logarithm of measured over predicted step time::

    x  = clip(ln(measured / predicted), -CLIP, CLIP)
    up = max(0, up + x - slack)       down = max(0, down - x - slack)       slack = max(SLACK_MIN, mean |x| of the past)
    drift when up or down reaches LIMIT

Steps that only decode and steps with prompts are summed apart. Where one kind has changed while the other has come as
predicted, it is the law that does not fit (longer prompts, a larger batch) and not the engine: that kind alone is to be
learned anew. It must not change a model: it tells what changed, and by what factor of the time since then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

CLIP = 0.5
"""One step counts at most as e^0.5, 1.65 times as long or as short as predicted: a page fault is no drift."""

SLACK_MIN = 0.1
"""Least lasting difference that is looked for: smaller ones are followed by learning alone."""

LIMIT = 2.5
"""Sum at which a change is certain: seven steps in a row that take 1.65 times as long, or 25 at 1.2 times."""

NOISE_SMOOTHING = 0.005
"""Weight of the newest step in the usual deviation."""

CHANGE_CLIP = 1.5
"""One step says at most 4.5 times as slow or as fast when the size of a change is told."""

QUIET_STEPS = 4
"""Steps of the other kind in a row without any evidence that speak against a drift."""


@dataclass(frozen=True, slots=True)
class Change:
    """A lasting change of speed."""

    factor: float
    """Measured over predicted time since it began."""
    decode: bool
    """Steps that only decode have changed."""
    prompts: bool
    """Steps with prompts have changed."""

    @property
    def is_drift(self) -> bool:
        """It is the engine that changed, not one kind of its steps."""
        return self.decode and self.prompts


class _Kind:
    """Sums of one kind of steps, for slower and for faster."""

    __slots__ = ("count", "noise", "quiet", "sums", "totals")

    # count: steps of the present sum. quiet: steps without evidence since the other kind's sum began.

    def __init__(self) -> None:
        self.noise = 0.0
        self.clear()

    def clear(self) -> None:
        self.sums, self.totals = [0.0, 0.0], [0.0, 0.0]
        self.count, self.quiet = [0, 0], [0, 0]

    def step(self, log_ratio: float) -> int | None:
        """Take one step in; the side (0 slower, 1 faster) that is certain."""
        x = max(-CLIP, min(CLIP, log_ratio))
        slack = max(SLACK_MIN, self.noise)
        self.noise += NOISE_SMOOTHING * (abs(x) - self.noise)
        for side, signed in ((0, x), (1, -x)):
            total = self.sums[side] + signed - slack
            if total <= 0:
                self.sums[side] = self.totals[side] = 0.0
                self.count[side] = 0
                self.quiet[side] += 1
                continue
            self.sums[side] = total
            self.totals[side] += max(-CHANGE_CLIP, min(CHANGE_CLIP, log_ratio))
            self.count[side] += 1
            self.quiet[side] = 0
            if total >= LIMIT:
                return side
        return None


class DriftDetector:
    """See the module; one per engine."""

    def __init__(self) -> None:
        self._kinds = _Kind(), _Kind()

    def step(self, measured_ms: float, predicted_ms: float, prompts: bool) -> Change | None:
        """Take in a step (both times above 0), with prompts in it or not; the change that is certain now."""
        kind, other = self._kinds[prompts], self._kinds[not prompts]
        side = kind.step(math.log(measured_ms / predicted_ms))
        for begun in (0, 1):
            if kind.count[begun] == 1:
                other.quiet[begun] = 0
        if side is None:
            return None
        factor = math.exp(kind.totals[side] / kind.count[side])
        alone = other.quiet[side] >= QUIET_STEPS
        kind.clear()
        other.clear()
        return Change(factor, decode=not (prompts and alone), prompts=prompts or not alone)
