"""What came of a token budget: measured gaps against the objective, and how much of the objective to aim at.

A step takes longer than predicted half of the time, so a budget aims at a share of the objective::

    aim = min(ITL_SHARE_MAX, 1 / (1 + z s))     z: normal quantile of the objective, s: deviation of steps (step model)

Gaps measured above the objective though the budget should have held them shrink the aim to what was expected of them
over what was measured, so that one and the same outcome shrinks it once; gaps well below it let the aim grow again.
Gaps are counted in buckets a third to a half wide (50 to 75 ms): only a quantile in a bucket that begins at the
objective or above it is surely too long. It must not change a knob.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from statistics import NormalDist

from policies.config import ObjectivesConfig
from policies.queueing import DEVIATION_FACTOR
from policies.types import LATENCY_BOUNDS_MS, Histogram, ReplicaReport, StepCoefficients

OUTCOME_SAMPLES_MIN = 50
"""Token gaps needed before an outcome is judged."""

OUTCOME_HIGH = 1.1
"""Measured over objective from which the model's value is not believed."""

OUTCOME_LOW = 0.7
"""Measured over objective up to which it is believed again, step by step."""

ITL_SHARE_MAX = 0.95
"""Share of the objective that is aimed at, at most: aiming at the objective itself would make every second stream of a
busy engine miss it by a millisecond."""

ITL_SHARE_MIN = 0.25
"""The correction by outcome never goes below this share of the objective."""


class Outcome:
    """Correction of the aim by what was measured."""

    def __init__(self, objectives: ObjectivesConfig) -> None:
        self.itl_share = ITL_SHARE_MAX
        """Share of the objective to aim at where steps come as predicted."""
        self.bad = False
        """The last outcome judged was above the objective."""
        self.reconfigure(objectives)

    def reconfigure(self, objectives: ObjectivesConfig) -> None:
        """Judge by ``objectives`` from now on."""
        self._objectives = objectives
        self._z = NormalDist().inv_cdf(objectives.quantile)
        self.high_bucket = bisect_left(LATENCY_BOUNDS_MS, objectives.itl_ms) + 1
        """First bucket of gaps that are surely too long: where none is in it or above, no quantile is."""

    def aim(self, model: StepCoefficients) -> float:
        """Share of the objective to aim at with an engine whose steps spread as ``model`` says."""
        spread = 1 / (1 + self._z * DEVIATION_FACTOR * (model.error_share or 0.0))
        return self.itl_share * min(1.0, spread / ITL_SHARE_MAX)

    def judge(self, since: Sequence[ReplicaReport], step_tokens_max: int, full_step_ms: float) -> bool:
        """Compare gaps measured with ``step_tokens_max`` with the objective; true when the aim has changed.

        A budget whose full step is not expected to hold the objective is not judged.
        """
        objective = self._objectives.itl_ms
        if full_step_ms > objective * OUTCOME_HIGH:
            return False
        in_force = [r.itl.counts for r in since if r.knobs.step_tokens_max == step_tokens_max]
        counts = tuple(map(sum, zip(*in_force, strict=True)))
        if sum(counts) < OUTCOME_SAMPLES_MIN:
            return False
        measured = Histogram(counts).quantile_ms(self._objectives.quantile)
        if measured is None:
            return False
        sure = bisect_left(LATENCY_BOUNDS_MS, measured) >= self.high_bucket
        self.bad = sure and measured > objective * OUTCOME_HIGH
        if self.bad:
            self.itl_share = max(ITL_SHARE_MIN, min(self.itl_share, full_step_ms / measured))
        elif measured < objective * OUTCOME_LOW and self.itl_share < ITL_SHARE_MAX:
            self.itl_share = min(ITL_SHARE_MAX, self.itl_share * 1.1)
        else:
            return False
        return True
