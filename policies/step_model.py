"""The one model of engine speed that routing, batching, scaling and the simulator share, learned online.

Formula::

    step_ms = a_ms + b_ms * running + c_ms * kv_tokens / 1000 + d_ms * prefill_tokens

``running`` are the sequences of the step, ``kv_tokens`` the tokens of KV cache they hold, ``prefill_tokens`` the prompt
tokens computed in it. :class:`StepModel` fits the four coefficients by recursive least squares of the *relative* error
(a decode step of 20 ms counts as much as a prefill step of 2 s), with two safeguards that live traffic needs:

* Directional forgetting (Cao and Schwartz, Automatica 36, 2000): only the direction of the features just seen is
  discounted. An hour of pure decoding keeps what was learned about prefill; plain exponential forgetting would lose it
  within :data:`FORGETTING`'s window of some 200 steps, which is seconds.
* Huber weights: a relative residual above the limit pulls with the force of the limit. The limit follows the smoothed
  error, so one page fault moves nothing, while a lasting change of speed is followed.

It must not decide anything, and it must not trust a clock: durations come from the engine that measured them.
"""

from __future__ import annotations

import math
from math import sqrt
from typing import TypeAlias

from policies.types import StepCoefficients

FORGETTING = 0.995
"""Share of the old information that is kept in the direction of a new step."""

FORGETTING_MIN = 0.95
"""The same while predictions are far off: a changed engine is learned anew, not averaged with what it was."""

FORGETTING_DROP = 0.2
"""Forgetting falls by this times the smoothed error above :data:`ERROR_TOLERATED`."""

ERROR_TOLERATED = 0.1
"""Smoothed error up to which the engine is taken to be unchanged."""

WARM_UP_STEPS = 16
"""No residual is limited before this many steps: the prior may be wrong by any factor."""

RESIDUAL_LIMIT_MIN = 0.1
"""Relative residuals below this always have full weight."""

RESIDUAL_LIMIT_FACTOR = 4.0
"""Limit of a full-weight residual as a multiple of the smoothed error."""

ERROR_CLIP = 8.0
"""One step adds at most this relative error to the smoothed error."""

ERROR_SMOOTHING = 0.05
"""Weight of the newest step in the smoothed error."""

HOLD_REFRESH_STEPS = 8
"""Steps between two computations of the served coefficients while the free fit has a negative one."""

PRIOR_NOISE = 0.005
"""Relative noise of one step, assumed when the prior meets the first steps: small, so that the steps win at once."""

_PREDICTED_MS_MIN = 1e-3
_SCALES = (1.0, 1 / 16, 1 / 16_000, 1 / 512)
"""Factors that bring (1, running, kv_tokens, prefill_tokens) to the order of 1, for a well conditioned fit."""

_Vector: TypeAlias = list[float]
_Matrix: TypeAlias = list[list[float]]


def predict_step_ms(c: StepCoefficients, running: float, kv_tokens: float, prefill_tokens: float) -> float:
    """Duration in ms of one engine step; inputs are counts, not checked."""
    return c.a_ms + c.b_ms * running + c.c_ms * kv_tokens / 1000 + c.d_ms * prefill_tokens


def prefill_ms(c: StepCoefficients, tokens: float, chunk_tokens: float, running: float, kv_tokens: float) -> float:
    """Time in ms to compute ``tokens`` prompt tokens in steps of at most ``chunk_tokens``.

    ``running`` and ``kv_tokens`` are the other sequences of these steps and the KV they hold; the prompt itself adds
    one sequence, and its own KV as it grows. 0 tokens take 0 ms. Raises ``ValueError`` for a chunk below one token.
    """
    if tokens <= 0:
        return 0.0
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, is {chunk_tokens}")
    steps = math.ceil(tokens / chunk_tokens)
    own_kv_tokens = chunk_tokens * steps * (steps - 1) / 2
    fixed_ms = steps * (c.a_ms + c.b_ms * (running + 1) + c.c_ms * kv_tokens / 1000)
    return fixed_ms + c.c_ms * own_kv_tokens / 1000 + c.d_ms * tokens


class StepModel:
    """Online fit of the step law for one engine.

    Coefficients served are never negative: where the free fit of one is, it is held at zero and the others take the
    best values under that condition. Steps with a value that is not finite, or negative, or a duration of 0 are not
    learned from; :attr:`refused` counts them.
    """

    def __init__(self, prior: StepCoefficients) -> None:
        start = [prior.a_ms, prior.b_ms / _SCALES[1], prior.c_ms / _SCALES[2] / 1000, prior.d_ms / _SCALES[3]]
        if not all(math.isfinite(v) and v >= 0 for v in start):
            raise ValueError(f"prior coefficients must be finite and not negative: {prior}")
        self._theta = start
        self._served: _Vector = list(start)
        self._info = _prior_information(start)
        self._steps = prior.samples
        self._seen = 0
        self._error_share = prior.error_share
        self.refused = 0
        """Steps not learned from because a value made no sense."""

    def predict_ms(self, running: float, kv_tokens: float, prefill_tokens: float) -> float:
        """Predicted duration in ms of a step, never negative."""
        t, s = self._served, _SCALES
        return t[0] + t[1] * running * s[1] + t[2] * kv_tokens * s[2] + t[3] * prefill_tokens * s[3]

    def coefficients(self) -> StepCoefficients:
        """Current fit, all coefficients >= 0, with the number of steps seen and the smoothed error."""
        t, s = self._served, _SCALES
        return StepCoefficients(t[0], t[1] * s[1], t[2] * s[2] * 1000, t[3] * s[3], self._steps, self._error_share)

    def observe(self, running: float, kv_tokens: float, prefill_tokens: float, step_ms: float) -> None:
        """Learn from one step of ``step_ms``."""
        size = running + kv_tokens + prefill_tokens + step_ms
        if not math.isfinite(size) or step_ms <= 0 or running < 0 or kv_tokens < 0 or prefill_tokens < 0:
            self.refused += 1
            return
        predicted = max(self.predict_ms(running, kv_tokens, prefill_tokens), _PREDICTED_MS_MIN)
        weight = self._weigh(predicted, step_ms)
        unit = 1 / (step_ms if self._seen < WARM_UP_STEPS else min(max(predicted, step_ms / 4), step_ms * 4))
        z = [unit, running * _SCALES[1] * unit, kv_tokens * _SCALES[2] * unit, prefill_tokens * _SCALES[3] * unit]
        self._learn(z, step_ms * unit, weight)
        self._steps += 1
        self._seen += 1

    def _weigh(self, predicted: float, step_ms: float) -> float:
        """Huber weight of a step, and the smoothed error brought up to date."""
        residual = abs(step_ms - predicted) / predicted
        smoothed = self._error_share
        limit = max(RESIDUAL_LIMIT_MIN, RESIDUAL_LIMIT_FACTOR * smoothed) if smoothed is not None else math.inf
        error = min(abs(step_ms - predicted) / step_ms, ERROR_CLIP)
        self._error_share = error if smoothed is None else smoothed + ERROR_SMOOTHING * (error - smoothed)
        return 1.0 if self._seen < WARM_UP_STEPS or residual <= limit else limit / residual

    def _learn(self, z: _Vector, y: float, weight: float) -> None:
        info, theta = self._info, self._theta
        z0, z1, z2, z3 = z
        v = [r[0] * z0 + r[1] * z1 + r[2] * z2 + r[3] * z3 for r in info]
        known = v[0] * z0 + v[1] * z1 + v[2] * z2 + v[3] * z3
        excess = max(0.0, (self._error_share or 0.0) - ERROR_TOLERATED)
        forget = weight * (1 - max(FORGETTING_MIN, FORGETTING - FORGETTING_DROP * excess)) / known
        for i in range(4):
            row, vi, zi = info[i], v[i] * forget, z[i] * weight
            row[0] += zi * z0 - vi * v[0]
            row[1] += zi * z1 - vi * v[1]
            row[2] += zi * z2 - vi * v[2]
            row[3] += zi * z3 - vi * v[3]
        force = weight * (y - theta[0] * z0 - theta[1] * z1 - theta[2] * z2 - theta[3] * z3)
        change = _solve(info, [zi * force for zi in z])
        if change is None:
            self._info = _prior_information(self._served)
            self._theta = list(self._served)
            return
        self._theta = theta = [t + d for t, d in zip(theta, change, strict=True)]
        if min(theta) >= 0:
            self._served = theta
        elif self._seen < WARM_UP_STEPS or self._seen % HOLD_REFRESH_STEPS == 0:
            self._served = _not_negative(theta, info)


def _prior_information(theta: _Vector) -> _Matrix:
    """Diagonal information matrix that believes ``theta`` within a factor of about two, weakly."""
    typical_ms = max(sum(theta), _PREDICTED_MS_MIN)
    info = [[0.0] * 4 for _ in range(4)]
    for i, value in enumerate(theta):
        info[i][i] = (PRIOR_NOISE / max(value, typical_ms / 10, 1.0)) ** 2
    return info


def _solve(matrix: _Matrix, right: _Vector) -> _Vector | None:
    """Solve a symmetric positive definite 4x4 system by Cholesky; ``None`` when it is not positive definite.

    Written out because it runs once per engine step: loops take three times as long.
    """
    (m00, _, _, _), (m10, m11, _, _), (m20, m21, m22, _), (m30, m31, m32, m33) = matrix
    try:
        l00 = sqrt(m00)
        l10, l20, l30 = m10 / l00, m20 / l00, m30 / l00
        l11 = sqrt(m11 - l10 * l10)
        l21, l31 = (m21 - l20 * l10) / l11, (m31 - l30 * l10) / l11
        l22 = sqrt(m22 - l20 * l20 - l21 * l21)
        l32 = (m32 - l30 * l20 - l31 * l21) / l22
        l33 = sqrt(m33 - l30 * l30 - l31 * l31 - l32 * l32)
        y0 = right[0] / l00
        y1 = (right[1] - l10 * y0) / l11
        y2 = (right[2] - l20 * y0 - l21 * y1) / l22
        x3 = (right[3] - l30 * y0 - l31 * y1 - l32 * y2) / l33 / l33
    except (ValueError, ZeroDivisionError):
        return None
    x2 = (y2 - l32 * x3) / l22
    x1 = (y1 - l21 * x2 - l31 * x3) / l11
    return [(y0 - l10 * x1 - l20 * x2 - l30 * x3) / l00, x1, x2, x3]


def _not_negative(theta: _Vector, info: _Matrix) -> _Vector:
    """Best coefficients with negative ones held at zero: least ``(x - theta)' info (x - theta)`` on the free ones."""
    held: set[int] = set()
    x = theta
    while min(x) < 0:
        held.add(min(range(4), key=x.__getitem__))
        right = [0.0 if i in held else sum(info[i][j] * theta[j] for j in held) for i in range(4)]
        shift = _solve(
            [[info[i][j] if not {i, j} & held else float(i == j) for j in range(4)] for i in range(4)], right
        )
        if shift is None:
            return [max(0.0, v) for v in theta]
        x = [0.0 if i in held else theta[i] + shift[i] for i in range(4)]
    return x
