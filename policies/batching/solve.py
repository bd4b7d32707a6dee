"""Batch size of one engine: how many sequences run at once and how many tokens one step may hold.

The step model predicts a step's duration (``policies/step_model.py``), and a step is the gap every stream sees.
:func:`solve` takes the largest values whose predicted step stays within the ITL objective::

    step_tokens_max   = running + largest prefill with step_ms(running, kv, prefill) <= itl_ms * itl_share
    running_seqs_max  = largest n with step_ms(n, n * kv_per_seq, 0) <= max(itl_ms * DECODE_SHARE, 1.5 * step_ms(1))
                        and, once the KV cache is half full, n * kv_per_seq <= kv_tokens_max

between the floors of the configuration and the engine's start-up values. Where nobody decodes no gap is at stake, and
the token budget goes up to its start-up value, for TTFT.

A budget that holds every gap may be too small to keep up with the prompts that come: each step has a fixed cost, and
small steps pay it often. A queue of prompts costs TTFT far more than a few long gaps cost a stream, whose mean gap
stays what it was while the engine keeps up (``decode_ms / (1 - prefill share)``, whatever the budget). So the budget is
at least what computes prompts :data:`KEEP_UP_FACTOR` times as fast as they come, while a step stays within the
objective or :data:`KEEP_UP_STEPS` decode steps, whichever is longer::

    room / (decode_ms + d * room) >= KEEP_UP_FACTOR * prefill_tps / 1000

An objective that no setting can hold is no reason to starve the engine: where decoding alone takes longer, a prompt may
at most double the gap (:data:`OUT_OF_REACH_FACTOR`); and as many sequences may run as lengthen the gap of a single one
by half (:data:`BATCH_FACTOR_MIN`): below that fewer sequences cost throughput and gain little.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from policies.config import BatchingConfig, ObjectivesConfig
from policies.step_model import largest, predict_step_ms
from policies.types import Knobs, Reason, StepCoefficients

DECODE_SHARE = 0.8
"""Share of the ITL objective that decoding alone may fill; the rest is room for prompts that join."""

PREFILL_TOKENS_MIN = 16
"""Prompt tokens a step must always have room for, or waiting prompts would never start."""

OUT_OF_REACH_FACTOR = 2.0
"""Longest step over a step that only decodes, when decoding alone is above the objective."""

BATCH_FACTOR_MIN = 1.5
"""Decode step over that of one sequence up to which the number of sequences is never limited for the objective."""

KEEP_UP_FACTOR = 3.0
"""Prompts must be computable this much faster than they come, so that those that come at once do not queue long."""

KEEP_UP_STEPS = 3.0
"""Longest step that keeping up may cost over one that only decodes, where that is above the ITL objective: prompts then
get two thirds of the engine."""

STEP_TOKENS_GRAIN = 8
"""Token budgets are rounded down to a multiple of this."""

KV_SHARE_TIGHT = 0.5
"""From this share of the KV cache on, what the present sequences hold says how many fit."""

ERROR_SHARE_MAX = 0.5
"""A step model that is wrong by more than this on average is not trusted."""


@dataclass(slots=True)
class BatchPoint:
    """What an engine is asked to carry, and its limits."""

    model: StepCoefficients
    running: int
    """Sequences decoding at once."""
    kv_tokens: int
    """KV tokens they hold."""
    kv_tokens_max: int
    running_seqs_hard: int
    step_tokens_hard: int
    prefill_only: bool = False
    """Nobody decodes: the ITL objective has nothing to protect."""
    itl_share: float = 1.0
    """Share of the ITL objective to aim at, below 1 after the model proved too hopeful."""
    prefill_tps: float = 0.0
    """Prompt tokens computed per second lately."""

    @property
    def kv_per_seq(self) -> float | None:
        """Mean KV tokens of one sequence; ``None`` when none runs."""
        return self.kv_tokens / self.running if self.running > 0 and self.kv_tokens > 0 else None


def solve(
    point: BatchPoint, objectives: ObjectivesConfig, config: BatchingConfig
) -> tuple[Knobs, Reason, dict[str, float]]:
    """Knobs that the step model allows, the reason, and what they should lead to (``itl_ms``, ``decode_itl_ms``)."""
    knobs, reason, predicted = solve_gaps(point, objectives, config)
    needed = keep_up_tokens(point, objectives)
    if knobs.step_tokens_max is None or needed <= knobs.step_tokens_max:
        return knobs, reason, predicted
    text = f"{point.prefill_tps:,.0f} prompt tokens/s come: {needed} tokens a step keep their queue short"
    predicted["itl_ms"] = full_step_ms(point, needed)
    return replace(knobs, step_tokens_max=needed), Reason("KeepsUp", text), predicted


def solve_gaps(
    point: BatchPoint, objectives: ObjectivesConfig, config: BatchingConfig
) -> tuple[Knobs, Reason, dict[str, float]]:
    """The same by gaps alone, whatever prompts come."""
    tokens, reason = _solve_for_gaps(point, objectives, config)
    seqs = _solve_seqs(point, objectives, config)
    predicted = {
        "itl_ms": full_step_ms(point, tokens),
        "decode_itl_ms": predict_step_ms(point.model, point.running, point.kv_tokens, 0),
    }
    return Knobs(running_seqs_max=seqs, step_tokens_max=tokens), reason, predicted


def step_tokens_floor(running: int, step_tokens_hard: int, config: BatchingConfig) -> int:
    """Least token budget that lets ``running`` sequences decode and a prompt progress."""
    return min(step_tokens_hard, max(config.step_tokens_min, running + PREFILL_TOKENS_MIN))


def trusted(model: StepCoefficients | None, config: BatchingConfig) -> bool:
    """Whether a step model has seen enough real steps, and predicts them well enough, to act on."""
    if model is None or model.samples < config.samples_min:
        return False
    return model.error_share is None or model.error_share <= ERROR_SHARE_MAX


def keep_up_tokens(point: BatchPoint, objectives: ObjectivesConfig) -> int:
    """Least budget that computes prompts fast enough, as far as a gap may be stretched for it; 0: no prompts come."""
    rate = point.prefill_tps * KEEP_UP_FACTOR / 1000
    if rate <= 0:
        return 0
    decode_ms = predict_step_ms(point.model, point.running, point.kv_tokens, 0)
    d_ms = point.model.d_ms
    room = rate * decode_ms / (1 - rate * d_ms) if rate * d_ms < 1 else math.inf
    if d_ms > 0:
        room = min(room, (max(objectives.itl_ms, KEEP_UP_STEPS * decode_ms) - decode_ms) / d_ms)
    return int(min(point.step_tokens_hard, point.running + room))


def _solve_for_gaps(point: BatchPoint, objectives: ObjectivesConfig, config: BatchingConfig) -> tuple[int, Reason]:
    hard = point.step_tokens_hard
    if point.prefill_only:
        return hard, Reason("PrefillOnly", f"nobody decodes, so TTFT alone matters: token budget {hard}")
    limit_ms = objectives.itl_ms * point.itl_share

    def within(tokens: int) -> bool:
        return predict_step_ms(point.model, point.running, point.kv_tokens, tokens - point.running) <= limit_ms

    def guess() -> float:
        return point.running + (limit_ms - decode_ms) / point.model.d_ms if point.model.d_ms > 0 else math.inf

    decode_ms = predict_step_ms(point.model, point.running, point.kv_tokens, 0)
    floor = step_tokens_floor(point.running, hard, config)
    best = largest(floor, hard, within, guess())
    if best is None:
        limit_ms = max(limit_ms, OUT_OF_REACH_FACTOR * decode_ms)
        tokens = largest(floor, hard, within, guess()) or floor
        return tokens, Reason(
            "OutOfReach",
            f"even {floor} tokens a step take more than {objectives.itl_ms:.0f} ms with {point.running} running: "
            f"{tokens} tokens keep gaps near {limit_ms:.0f} ms",
        )
    tokens = best if best == hard else max(floor, best - best % STEP_TOKENS_GRAIN)
    return tokens, Reason(
        "WithinItl", f"{tokens} tokens a step keep gaps within {limit_ms:.0f} ms with {point.running} running"
    )


def seqs_by_cache(point: BatchPoint) -> int:
    """Sequences that the start-up value allows and, in a cache that is filling, the KV cache."""
    per_seq = point.kv_per_seq
    if per_seq is None or point.kv_tokens_max <= 0 or point.kv_tokens < KV_SHARE_TIGHT * point.kv_tokens_max:
        return point.running_seqs_hard
    return max(1, min(point.running_seqs_hard, int(point.kv_tokens_max / per_seq)))


def _solve_seqs(point: BatchPoint, objectives: ObjectivesConfig, config: BatchingConfig) -> int:
    hard = point.running_seqs_hard
    per_seq = point.kv_per_seq
    if per_seq is None:
        return hard
    one_ms = predict_step_ms(point.model, 1, per_seq, 0)
    limit_ms = max(objectives.itl_ms * DECODE_SHARE, BATCH_FACTOR_MIN * one_ms)
    kv_max = point.kv_tokens_max or math.inf
    tight = point.kv_tokens >= KV_SHARE_TIGHT * kv_max

    def within(seqs: int) -> bool:
        kv_tokens = seqs * per_seq
        fits = not tight or kv_tokens <= kv_max
        return fits and predict_step_ms(point.model, seqs, min(kv_tokens, kv_max), 0) <= limit_ms

    floor = min(hard, config.running_seqs_min)
    per_seq_ms = point.model.b_ms + point.model.c_ms * per_seq / 1000
    guess = (limit_ms - point.model.a_ms) / per_seq_ms if per_seq_ms > 0 else math.inf
    return largest(floor, hard, within, min(guess, kv_max / per_seq) if tight else guess) or floor


def full_step_ms(point: BatchPoint, step_tokens_max: int) -> float:
    """Predicted duration of a step that uses the whole budget."""
    return predict_step_ms(point.model, point.running, point.kv_tokens, max(0, step_tokens_max - point.running))
