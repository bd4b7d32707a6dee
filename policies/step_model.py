"""The one model of engine speed that routing, batching, scaling and the simulator share, learned online.

Formula::

    step_ms = a_ms + b_ms * running + c_ms * kv_tokens / 1000 + d_ms * prefill_tokens

``running`` are the sequences of the step, ``kv_tokens`` the tokens of KV cache they hold, ``prefill_tokens`` the prompt
tokens computed in it. :class:`StepModel` fits the four coefficients by recursive least squares of the *relative* error
(a decode step of 20 ms counts as much as a prefill step of 2 s), with two safeguards that live traffic needs:

* Directional forgetting (Kulhavy, Automatica 23, 1987): a step makes only the prediction for its own features less
  certain before it is learned from, so that each kind of step remembers its own last 200 or so. An hour of pure
  decoding keeps what was learned about prefill; plain exponential forgetting would lose it within seconds.
* Huber weights: a relative residual above the limit pulls with the force of the limit. The limit follows the smoothed
  error, so one page fault moves nothing, while a lasting change of speed is followed.

A lasting change of speed (``policies/drift.py``) is another engine: all coefficients are scaled by the change, so that
what is not seen at present (prompts, while only decoding goes on) changes too, and learned anew from there as from a
prior. :attr:`StepCoefficients.drifts` counts it.

Which slopes are more than the prior's guess is told beside them: ``batch_known`` and ``prompts_known`` turn true when
the fit predicts a step of 16 sequences, or of 512 prompt tokens, within :data:`KNOWN_SHARE`. One stream alone,
however long, says what one stream costs and nothing of two.

It must not decide anything, and it must not trust a clock: durations come from the engine that measured them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from policies.drift import Change, DriftDetector
from policies.types import StepCoefficients

FORGETTING = 0.995
"""Share of the certainty about a step like the new one that is kept when the new one is learned from."""

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

KNOWN_SHARE = 0.2
"""Standard error, as a share of the prediction, from which on a step of another kind than those seen is predicted."""

SHOWN_MIN = 3
"""Steps of that kind that must have been seen: one tells nothing of its own noise."""

NOISE_WORTH = 1.25
"""Standard deviation of a normal residual over its mean size."""

_PREDICTED_MS_MIN = 1e-3
_SCALES = (1.0, 1 / 16, 1 / 16_000, 1 / 512)
_BATCH, _PROMPT = 1, 3
"""Factors that bring (1, running, kv_tokens, prefill_tokens) to the order of 1, for a well conditioned fit."""

_Vector: TypeAlias = list[float]
_Matrix: TypeAlias = list[list[float]]


def predict_step_ms(c: StepCoefficients, running: float, kv_tokens: float, prefill_tokens: float) -> float:
    """Duration in ms of one engine step; inputs are counts, not checked."""
    return c.a_ms + c.b_ms * running + c.c_ms * kv_tokens / 1000 + c.d_ms * prefill_tokens


def mean_coefficients(models: Sequence[StepCoefficients]) -> StepCoefficients | None:
    """The law of like engines: the mean of each coefficient, with the samples of the one that knows least."""
    if not models:
        return None
    n = len(models)
    terms = zip(*((m.a_ms, m.b_ms, m.c_ms, m.d_ms) for m in models), strict=True)
    a, b, c, d = (math.fsum(term) / n for term in terms)
    return StepCoefficients(a, b, c, d, min(m.samples for m in models))


def prefill_ms(c: StepCoefficients, tokens: float, chunk_tokens: float, running: float, kv_tokens: float) -> float:
    """Time in ms to compute ``tokens`` prompt tokens in steps of at most ``chunk_tokens``.

    ``running`` and ``kv_tokens`` are the other sequences of these steps and the KV they hold; the prompt itself adds
    one sequence, and its own KV as it grows. 0 tokens take 0 ms. Raises ``ValueError`` for a chunk below one token.
    """
    return chunked_prefill_ms(c, tokens, chunk_tokens, predict_step_ms(c, running + 1, kv_tokens, 0))


def chunked_prefill_ms(c: StepCoefficients, tokens: float, chunk_tokens: float, step_ms: float) -> float:
    """:func:`prefill_ms` where ``step_ms``, a step with all sequences and no prompt token in it, is known already."""
    if tokens <= 0:
        return 0.0
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, is {chunk_tokens}")
    if tokens <= chunk_tokens:
        return step_ms + c.d_ms * tokens
    steps = math.ceil(tokens / chunk_tokens)
    own_kv_tokens = chunk_tokens * steps * (steps - 1) / 2
    return steps * step_ms + c.c_ms * own_kv_tokens / 1000 + c.d_ms * tokens


def largest(low: int, high: int, ok: Callable[[int], bool], guess: float) -> int | None:
    """Largest value in ``low..high`` that is ``ok``, for an ``ok`` that turns false once; ``None`` when none is.

    ``guess`` is where it should be, by the law solved for it: where that is right, three looks are enough; where
    rounding or a limit makes it wrong, the rest is searched.
    """
    if not ok(low):
        return None
    middle = int(max(low, min(high, guess)))
    if middle > low and not ok(middle):
        middle, high = middle - 1, middle - 1
        if middle > low and not ok(middle):
            middle, high = low, middle - 1
    low = middle
    if low < high and not ok(low + 1):
        return low
    while low < high:
        middle = (low + high + 1) // 2
        if ok(middle):
            low = middle
        else:
            high = middle - 1
    return low


def largest_batch(
    c: StepCoefficients, kv_per_seq: float, kv_tokens: float, running_seqs_max: int, itl_ms: float
) -> int:
    """Most sequences of ``kv_per_seq`` tokens that decode in steps of at most ``itl_ms`` and fit into ``kv_tokens``.

    At least 1: a batch of one is assumed possible even where it misses the objective.
    """

    def fits(batch: int) -> bool:
        kept = batch * kv_per_seq
        return kept <= kv_tokens and predict_step_ms(c, batch, kept, 0) <= itl_ms

    each_ms = c.b_ms + c.c_ms * kv_per_seq / 1000
    within_itl = (itl_ms - c.a_ms) / each_ms if each_ms > 0 else math.inf
    within_kv = kv_tokens / kv_per_seq if kv_per_seq > 0 else math.inf
    most = max(1, running_seqs_max)
    guess = min(within_itl, within_kv)
    batch = int(max(1, min(most, guess)))
    if fits(batch) and (batch == most or not fits(batch + 1)):
        return batch
    return largest(1, most, fits, guess) or 1


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
        self._covariance = _prior_covariance(start)
        self._steps = prior.samples
        self._seen = 0
        self._error_share = prior.error_share
        self._drift = DriftDetector()
        self._drifts = prior.drifts
        self._known = {_BATCH: prior.samples > 0, _PROMPT: prior.samples > 0}
        """By coefficient: whether what it adds to a step has been seen. Drifts scale it, and do not make it unknown."""
        self._shown = {_BATCH: 0, _PROMPT: 0}
        """Steps that showed something of it: of several sequences, with a prompt."""
        self._kv_seq = 0.0
        """KV tokens of one sequence, smoothed."""
        self.refused = 0
        """Steps not learned from because a value made no sense."""

    def predict_ms(self, running: float, kv_tokens: float, prefill_tokens: float) -> float:
        """Predicted duration in ms of a step, never negative."""
        t, s = self._served, _SCALES
        return t[0] + t[1] * running * s[1] + t[2] * kv_tokens * s[2] + t[3] * prefill_tokens * s[3]

    def coefficients(self) -> StepCoefficients:
        """Current fit, all coefficients >= 0, with the number of steps seen and the smoothed error."""
        t, s = self._served, _SCALES
        scaled = t[0], t[1] * s[1], t[2] * s[2] * 1000, t[3] * s[3]
        known = self._known
        return StepCoefficients(*scaled, self._steps, self._error_share, self._drifts, known[_BATCH], known[_PROMPT])

    def observe(self, running: float, kv_tokens: float, prefill_tokens: float, step_ms: float) -> None:
        """Learn from one step of ``step_ms``; 7 to 14 us of CPU (``python -m tests.bench.bench_router``)."""
        size = running + kv_tokens + prefill_tokens + step_ms
        if not math.isfinite(size) or step_ms <= 0 or running < 0 or kv_tokens < 0 or prefill_tokens < 0:
            self.refused += 1
            return
        predicted = max(self.predict_ms(running, kv_tokens, prefill_tokens), _PREDICTED_MS_MIN)
        if self._seen >= WARM_UP_STEPS and (change := self._drift.step(step_ms, predicted, prefill_tokens > 0)):
            self._begin_anew(change)
            predicted = max(self.predict_ms(running, kv_tokens, prefill_tokens), _PREDICTED_MS_MIN)
        weight = self._weigh(predicted, step_ms)
        unit = 1 / (step_ms if self._seen < WARM_UP_STEPS else min(max(predicted, step_ms / 4), step_ms * 4))
        z = [unit, running * _SCALES[1] * unit, kv_tokens * _SCALES[2] * unit, prefill_tokens * _SCALES[3] * unit]
        self._learn(z, step_ms * unit, weight)
        self._steps += 1
        self._seen += 1
        if not all(self._known.values()):
            self._get_to_know(running, kv_tokens, prefill_tokens)

    def _get_to_know(self, running: float, kv_tokens: float, prefill_tokens: float) -> None:
        """Whether a step of unit size (:data:`_SCALES`) in one more feature is predicted from what was seen."""
        if running > 0:
            self._kv_seq += ERROR_SMOOTHING * (kv_tokens / running - self._kv_seq)
        self._shown[_BATCH] += running > 1
        self._shown[_PROMPT] += prefill_tokens > 0
        batch = [1.0, 1.0, self._kv_seq / _SCALES[_BATCH] * _SCALES[2], 0.0]
        for i, z in ((_BATCH, batch), (_PROMPT, [1.0, 0.0, 0.0, 1.0])):
            if self._shown[i] >= SHOWN_MIN and not self._known[i]:
                noise = max(PRIOR_NOISE, NOISE_WORTH * (self._error_share or 0.0))
                by_row = [sum(c * x for c, x in zip(row, z, strict=True)) for row in self._covariance]
                variance = sum(u * x for u, x in zip(by_row, z, strict=True))
                predicted = sum(t * x for t, x in zip(self._served, z, strict=True))
                self._known[i] = variance >= 0 and math.sqrt(variance) * noise <= KNOWN_SHARE * predicted

    def _begin_anew(self, change: Change) -> None:
        """The engine, or one kind of its steps, has changed: what was learned, scaled, is the prior of the new one."""
        decode, prompts = change.factor if change.decode else 1.0, change.factor if change.prompts else 1.0
        a, b, c, d = self._served
        self._theta = self._served = [a * decode, b * decode, c * decode, d * prompts]
        self._covariance = _prior_covariance(self._served)
        self._seen = 0
        self._drifts += change.is_drift

    def _weigh(self, predicted: float, step_ms: float) -> float:
        """Huber weight of a step, and the smoothed error brought up to date."""
        residual = abs(step_ms - predicted) / predicted
        smoothed = self._error_share
        limit = max(RESIDUAL_LIMIT_MIN, RESIDUAL_LIMIT_FACTOR * smoothed) if smoothed is not None else math.inf
        error = min(abs(step_ms - predicted) / step_ms, ERROR_CLIP)
        self._error_share = error if smoothed is None else smoothed + ERROR_SMOOTHING * (error - smoothed)
        return 1.0 if self._seen < WARM_UP_STEPS or residual <= limit else limit / residual

    def _learn(self, z: _Vector, y: float, weight: float) -> None:
        cov, theta = self._covariance, self._theta
        z0, z1, z2, z3 = z
        u = [r[0] * z0 + r[1] * z1 + r[2] * z2 + r[3] * z3 for r in cov]
        u0, u1, u2, u3 = u
        variance = u0 * z0 + u1 * z1 + u2 * z2 + u3 * z3
        if not 0 < variance < math.inf:
            self._covariance, self._theta = _prior_covariance(self._served), list(self._served)
            return
        excess = max(0.0, (self._error_share or 0.0) - ERROR_TOLERATED)
        kept = max(FORGETTING_MIN, FORGETTING - FORGETTING_DROP * excess)
        shrunk = 1 / (kept + weight * variance)
        step = weight * shrunk * (y - theta[0] * z0 - theta[1] * z1 - theta[2] * z2 - theta[3] * z3)
        self._theta = theta = [theta[0] + u0 * step, theta[1] + u1 * step, theta[2] + u2 * step, theta[3] + u3 * step]
        factor = (weight - (1 - kept) / variance) * shrunk
        for row, ui in zip(cov, u, strict=True):
            scaled = ui * factor
            row[0] -= scaled * u0
            row[1] -= scaled * u1
            row[2] -= scaled * u2
            row[3] -= scaled * u3
        if min(theta) >= 0:
            self._served = theta
        elif self._seen < WARM_UP_STEPS or self._seen % HOLD_REFRESH_STEPS == 0:
            self._served = _not_negative(theta, cov)


def _prior_covariance(theta: _Vector) -> _Matrix:
    """Diagonal covariance that believes ``theta`` within a factor of about two, in units of one step's noise."""
    typical_ms = max(sum(theta), _PREDICTED_MS_MIN)
    spread = [(max(value, typical_ms / 10, 1.0) / PRIOR_NOISE) ** 2 for value in theta]
    return [[spread[i] if i == j else 0.0 for j in range(4)] for i in range(4)]


def _not_negative(theta: _Vector, covariance: _Matrix) -> _Vector:
    """Best coefficients with the negative ones held at zero: the fit under ``x[i] = 0``, one after the other."""
    x, cov, free = list(theta), covariance, {0, 1, 2, 3}
    while free:
        i = min(free, key=x.__getitem__)
        if x[i] >= 0 or cov[i][i] <= 0:
            break
        free.remove(i)
        gain = [row[i] / cov[i][i] if j in free else 0.0 for j, row in enumerate(cov)]
        x = [v - g * x[i] for v, g in zip(x, gain, strict=True)]
        cov = [[v - g * w for v, w in zip(row, cov[i], strict=True)] for row, g in zip(cov, gain, strict=True)]
        x[i] = 0.0
    return [max(0.0, v) for v in x]
