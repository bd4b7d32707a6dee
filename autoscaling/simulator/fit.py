"""From measured steps to a step law: what a live engine's ring or a step log says of its speed.

Least squares of the *relative* error with coefficients that are never negative, as in ``policies/step_model.py`` (a
decode step of 20 ms counts as much as a prefill step of 2 s)::

    minimise  sum of w * (step_ms / measured_ms - 1)^2,  StepLaw as in spec.py

``w`` starts at 1 and is found anew in each round as ``limit / |error|`` where an error is above a limit of
:data:`LIMIT_FACTOR` median errors: a page fault or another tenant's burst moves nothing (Huber).

The batch table is fitted where ``knots`` are given, as one slope from each knot to the next, which keeps it from
falling. A straight line ``a_ms, b_ms`` is fitted in any case, for policies know nothing else.

Every fit says how far it is off, on the steps it saw and on steps it did not (every second step is held back for that,
and the law is then fitted to all). What this must not do: read files, or judge whether an error is small enough.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autoscaling.simulator.least_squares import not_negative
from autoscaling.simulator.spec import StepLaw
from autoscaling.simulator.workload.trace import TraceError
from policies.types import StepCoefficients

STEP_FIELDS = ("running", "kv_tokens", "prefill_tokens", "duration_us")
"""What is used of a step record (``deployments.knobs.StepRecord``)."""

STEP_FIELDS_UNUSED = ("seq", "start_ns", "decode_seqs", "preempted", "output_tokens")

STEPS_MIN = 8
"""Fewer steps say nothing about four coefficients."""

LIMIT_FACTOR = 2.0
"""Errors above this many median errors lose weight."""

ROUNDS = 12
"""Rounds of the robust fit at most."""

SETTLED = 0.01
"""Weights that move less end the rounds."""

KNOT_STEPS_MIN = 30
"""Steps that must lie between two knots of a batch table chosen by :func:`batch_knots`."""


class FitError(ValueError):
    """Nothing can be fitted to this: one line that says why."""


@dataclass(frozen=True, slots=True)
class StepSample:
    """One measured step."""

    running: int
    """Sequences computed in it."""
    kv_tokens: int
    """KV tokens they held when it began."""
    prefill_tokens: int
    step_ms: float
    pairs: float = 0.0
    """As ``StepLaw`` defines it; 0: not known."""


@dataclass(frozen=True, slots=True)
class StepErrors:
    """How far a law is off, as shares of the measured durations."""

    steps: int
    mean_share: float
    """Mean absolute relative error."""
    p95_share: float
    bias_share: float
    """Relative error of the sum of all durations; above 0: the law is too slow."""


@dataclass(frozen=True, slots=True)
class StepFit:
    """A law and how far it is off."""

    law: StepLaw
    seen: StepErrors
    """On all steps, the law fitted to all."""
    held_out: StepErrors
    """On every second step, the law fitted to the others."""


def parse_steps(lines: Iterable[str], name: str) -> list[StepSample]:
    """Steps from JSON lines with the fields of a live engine's records, see :data:`STEP_FIELDS`.

    Steps that computed nothing are left out. Raises :class:`TraceError` with the line.
    """
    samples: list[StepSample] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise TraceError(f"not JSON: {error.msg}", name, number) from None
        except RecursionError:
            raise TraceError("nested too deeply", name, number) from None
        if not isinstance(row, dict):
            raise TraceError("must be an object with the fields of a step", name, number)
        for key in row:
            if key not in STEP_FIELDS and key not in STEP_FIELDS_UNUSED:
                raise TraceError(f"unknown field {key!r}; known: {', '.join(STEP_FIELDS)}", name, number)
        values = [_field(row, key, name, number) for key in STEP_FIELDS]
        running, kv_tokens, prefill_tokens, duration_us = values
        if running >= 1 and duration_us > 0:
            samples.append(StepSample(int(running), int(kv_tokens), int(prefill_tokens), duration_us / 1e3))
    if not samples:
        raise TraceError("no step in it", name)
    return samples


def fit_steps(samples: Sequence[StepSample], knots: Sequence[int] = ()) -> StepFit:
    """Law of the engine that made ``samples``; ``knots`` are the batch sizes of its batch table, growing.

    Raises:
        FitError: too few steps, or values that make no sense.
    """
    usable = [s for s in samples if _sensible(s)]
    if len(usable) < STEPS_MIN:
        raise FitError(f"{len(usable)} usable steps of {len(samples)}, at least {STEPS_MIN} are needed")
    if any(b <= a for a, b in pairwise(knots)) or (knots and knots[0] < 1):
        raise FitError(f"knots must be at least 1 and grow: {list(knots)}")
    law = _fit(usable, knots)
    half = _fit(usable[::2], knots) if len(usable) >= 2 * STEPS_MIN else law
    return StepFit(law, step_errors(law, usable), step_errors(half, usable[1::2]))


def step_errors(law: StepLaw, samples: Sequence[StepSample]) -> StepErrors:
    """How far ``law`` is off on ``samples``, of which there must be one."""
    predicted = [law.step_ms(s.running, s.kv_tokens, s.prefill_tokens, s.pairs) for s in samples]
    errors = sorted(abs(p / s.step_ms - 1) for p, s in zip(predicted, samples, strict=True))
    total = sum(s.step_ms for s in samples)
    return StepErrors(
        len(errors), sum(errors) / len(errors), errors[int(0.95 * (len(errors) - 1))], sum(predicted) / total - 1
    )


def batch_knots(samples: Sequence[StepSample]) -> tuple[int, ...]:
    """Batch sizes for a table: powers of two between which :data:`KNOT_STEPS_MIN` steps lie; empty: below two gaps."""
    sizes = sorted(s.running for s in samples if _sensible(s))
    knots, seen = list[int](), 0
    for exponent in range(12):
        at_most = bisect_left(sizes, 2**exponent + 1)
        if at_most - seen >= KNOT_STEPS_MIN:
            knots.append(2**exponent)
            seen = at_most
    return tuple(knots) if len(knots) > 2 else ()


def law_from_coefficients(models: Sequence[StepCoefficients]) -> StepLaw:
    """Law of several replicas' learned step models: the mean of each coefficient, weighted by the steps seen.

    Raises:
        FitError: none of them has seen a step.
    """
    weights = [m.samples for m in models]
    total = sum(weights)
    if not total:
        raise FitError("no replica has learned its step model yet")

    def mean(value: Callable[[StepCoefficients], float]) -> float:
        return sum(value(m) * w for m, w in zip(models, weights, strict=True)) / total

    return StepLaw(mean(lambda m: m.a_ms), mean(lambda m: m.b_ms), mean(lambda m: m.c_ms), mean(lambda m: m.d_ms))


# --- inside -----------------------------------------------------------------------------------------------------------


def _field(row: Mapping[str, object], key: str, name: str, number: int) -> float:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise TraceError(f"{key} must be a number, finite and not negative, is {value!r}", name, number)
    return value


def _sensible(s: StepSample) -> bool:
    sizes = (s.running, s.kv_tokens, s.prefill_tokens, s.pairs)
    return s.step_ms > 0 and math.isfinite(s.step_ms + sum(sizes)) and s.running >= 1 and min(sizes) >= 0


def _fit(samples: Sequence[StepSample], knots: Sequence[int]) -> StepLaw:
    a_ms, b_ms, c_ms, d_ms, e_ms = _robust([[1.0, s.running, *_rest(s)] for s in samples], samples)
    law = StepLaw(a_ms, b_ms, c_ms, d_ms, e_ms)
    if not knots:
        return law
    base_ms, *x = _robust([[1.0, *_climb(s.running, knots), *_rest(s)] for s in samples], samples)
    slopes, (c_ms, d_ms, e_ms) = x[:-3], x[-3:]
    table = [(knots[0], base_ms)]
    for slope, (low, high) in zip(slopes, pairwise(knots), strict=True):
        table.append((high, table[-1][1] + slope * (high - low)))
    return replace(law, c_ms=c_ms, d_ms=d_ms, e_ms=e_ms, batch=tuple(point for point in table if point[1] > 0))


def _rest(s: StepSample) -> tuple[float, float, float]:
    return s.kv_tokens / 1000, s.prefill_tokens, s.pairs / 1e6


def _climb(running: int, knots: Sequence[int]) -> list[float]:
    """How far ``running`` reaches into each gap between knots, beyond the last one with the last."""
    reach = [float(min(max(running - low, 0), high - low)) for low, high in pairwise(knots)]
    if reach and running > knots[-1]:
        reach[-1] = running - knots[-2]
    return reach


def _robust(rows: Sequence[Sequence[float]], samples: Sequence[StepSample]) -> list[float]:
    relative = [[v / s.step_ms for v in row] for row, s in zip(rows, samples, strict=True)]
    weights = [1.0] * len(rows)
    x: list[float] = []
    for _ in range(ROUNDS):
        weighted = ([v * w for v in row] for row, w in zip(relative, weights, strict=True))
        x = not_negative(weighted, weights, len(rows[0]))
        errors = [abs(sum(v * c for v, c in zip(row, x, strict=True)) - 1) for row in relative]
        limit = max(1e-6, LIMIT_FACTOR * sorted(errors)[len(errors) // 2])
        before, weights = weights, [1.0 if e <= limit else math.sqrt(limit / e) for e in errors]
        if max(abs(a - b) for a, b in zip(before, weights, strict=True)) < SETTLED:
            break
    return x
