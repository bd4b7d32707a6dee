"""What is believed of the speed of a replica that has not learned it yet: that it is like its fellows.

A replica's step model starts from the configured prior, which knows no device: on a fast one it promises a TTFT many
times too long, and a newcomer would get no request, and learn nothing, until its fellows were that far behind. So::

    coefficients of a sample with fewer than SAMPLES_MIN steps  :=  mean over the samples with at least as many

of the same deployment, whose replicas are of one kind. Where nobody has learned yet, all have the same prior and the
comparison is fair. It must not change what a replica says of its load.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from policies.types import ReplicaId

SAMPLES_MIN = 32
"""Steps from which a replica's own step model is believed."""
COEFFICIENTS = ("step_a_ms", "step_b_ms", "step_c_ms", "step_d_ms")
VALUE_MAX = 1e12
FELLOWS_MAX = 64
"""Samples the mean is taken over: more would not change it."""

Members = Mapping[ReplicaId, Mapping[str, object] | None]


def like_their_fellows(members: Members) -> Members:
    """``members`` with the mean step model in the samples of those that have not learned one. O(members)."""
    fresh = {r: stats for r, stats in members.items() if isinstance(stats, Mapping) and not _has_learned(stats)}
    if not fresh:
        return members
    told = (_model(stats) for r, stats in members.items() if stats and r not in fresh)
    models = list(islice((model for model in told if model is not None), FELLOWS_MAX))
    if not models:
        return members
    mean = [sum(values) / len(models) for values in zip(*models, strict=True)]
    believed = dict(zip(COEFFICIENTS, mean, strict=True))
    return {**members, **{r: {**stats, **believed} for r, stats in fresh.items()}}


def _has_learned(stats: Mapping[str, object]) -> bool:
    samples = stats.get("step_samples")
    return type(samples) is int and samples >= SAMPLES_MIN


def _model(stats: Mapping[str, object]) -> list[float] | None:
    """The four coefficients; ``None`` unless each is a number that can be one."""
    if not isinstance(stats, Mapping):
        return None
    values: list[float] = []
    for value in map(stats.get, COEFFICIENTS):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= VALUE_MAX:
            return None
        values.append(value)
    return values if any(values) else None
