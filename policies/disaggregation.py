"""How many replicas of a split fleet prefill, and how many decode.

Each role's load is the number of replicas it would keep busy, by the step model of those that play it::

    prefill_load = prefill_tps * d_ms / 1000  /  use_max        use_max: busiest a prefill replica may be for its TTFT
    decode_load  = decode_tps * step_ms(B, B * kv_per_seq) / B / 1000        B: largest batch within ITL and memory

and the best ratio makes the fuller role as little full as it can be::

    prefill_replicas = argmin over n in 1..N-1 of max(prefill_load / n, decode_load / (N - n))

``use_max`` solves ``own + use / (1 - use) * own / 2 * WAIT_QUANTILE <= ttft_ms`` (mean wait of an M/D/1 queue of
prompts that take ``own`` each, stretched to the objective's quantile), between :data:`USE_MIN` and :data:`USE_MAX`.

A replica changes its role only where that empties the fuller role by :data:`GAIN_MIN`, asked for in
:data:`ASK_TICKS` ticks in a row; then :data:`SETTLE_TICKS` pass before the next. Half the way at a time, at least one.

What this must not do: count replicas that are there to be paid for (``autoscaling/``), or choose which one changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from policies.config import ObjectivesConfig
from policies.step_model import largest_batch, predict_step_ms
from policies.types import Reason, StepCoefficients

WAIT_QUANTILE = 3.0
"""95th percentile over mean of an exponential wait: -ln(0.05)."""

USE_MIN, USE_MAX = 0.2, 0.85
"""Bounds of what a prefill replica is planned to be busy."""

GAIN_MIN = 0.15
"""Relative fall of the fuller role's load that is worth changing a replica's role."""

ASK_TICKS = 5
"""Ticks in a row that must ask for the same direction."""

SETTLE_TICKS = 10
"""Ticks after a change during which the figures are still those of before."""

KV_SHARE_PLANNED = 0.9
"""Share of a KV cache that is planned with."""


@dataclass(frozen=True, slots=True)
class RolePoint:
    """What a split fleet is asked to carry."""

    prefill_model: StepCoefficients
    decode_model: StepCoefficients
    prefill_tps: float
    """Uncached prompt tokens offered per second."""
    decode_tps: float
    """Output tokens offered per second."""
    prompt_tokens: float
    """Uncached, mean per request."""
    kv_per_seq: float
    """KV tokens of one decoding sequence."""
    kv_tokens_max: int
    """KV cache of one decode replica; 0: not known."""
    running_seqs_max: int


@dataclass(frozen=True, slots=True)
class RoleMove:
    """One tick's answer."""

    before: int
    after: int
    reason: Reason
    inputs: dict[str, float | int | str | None] = field(default_factory=dict)
    predicted: dict[str, float] = field(default_factory=dict)

    @property
    def changed(self) -> bool:
        """Whether a replica should change its role."""
        return self.before != self.after


def loads(point: RolePoint, objectives: ObjectivesConfig) -> tuple[float, float]:
    """Replicas that prefill and decode would fill."""
    busy = point.prefill_tps * point.prefill_model.d_ms / 1_000
    prefill = busy / prefill_use_max(point, objectives)
    batch = decode_batch(point, objectives)
    step_ms = predict_step_ms(point.decode_model, batch, batch * point.kv_per_seq, 0)
    return prefill, point.decode_tps * step_ms / batch / 1_000


def prefill_use_max(point: RolePoint, objectives: ObjectivesConfig) -> float:
    """Busiest that a prefill replica may be so that its prompts' first tokens come in time."""
    own_ms = predict_step_ms(point.prefill_model, 1, point.prompt_tokens, point.prompt_tokens)
    if own_ms <= 0:
        return USE_MAX
    room = (objectives.ttft_ms - own_ms) / (own_ms / 2 * WAIT_QUANTILE)
    return min(USE_MAX, max(USE_MIN, room / (1 + room))) if room > 0 else USE_MIN


def decode_batch(point: RolePoint, objectives: ObjectivesConfig) -> int:
    """Largest batch whose gaps are within the objective and whose KV fits, at least 1."""
    kv_tokens = point.kv_tokens_max * KV_SHARE_PLANNED if point.kv_tokens_max > 0 else math.inf
    return largest_batch(point.decode_model, point.kv_per_seq, kv_tokens, point.running_seqs_max, objectives.itl_ms)


def best_split(prefill_load: float, decode_load: float, replicas: int) -> int:
    """Replicas that should prefill, of ``replicas`` (at least 2); the fewest of equally good ones."""
    return min(range(1, replicas), key=lambda n: (fullness(prefill_load, decode_load, n, replicas), n))


def fullness(prefill_load: float, decode_load: float, prefill: int, replicas: int) -> float:
    """How full the fuller role is with ``prefill`` of ``replicas``: 1 is all it can carry within the objectives."""
    return max(prefill_load / prefill, decode_load / (replicas - prefill))


class RoleTuner:
    """The ratio, tick by tick."""

    def __init__(self, objectives: ObjectivesConfig) -> None:
        self._objectives = objectives
        self._asked = 0
        self._direction = 0
        self._settle = 0

    def step(self, point: RolePoint, prefill: int, replicas: int) -> RoleMove:
        """How many of ``replicas`` should prefill, where ``prefill`` do now or are about to."""
        if replicas < 2 or not 1 <= prefill < replicas:
            return RoleMove(prefill, prefill, Reason("OneOfEach", "there is one replica of a role at least"))
        if self._settle > 0:
            self._settle -= 1
            return RoleMove(prefill, prefill, Reason("Settling", "the last change of roles has yet to show"))
        wants = loads(point, self._objectives)
        best = best_split(*wants, replicas)
        direction = (best > prefill) - (best < prefill)
        to = prefill + direction * max(1, abs(best - prefill) // 2)
        now, then = fullness(*wants, prefill, replicas), fullness(*wants, to, replicas)
        worth = direction != 0 and then <= now * (1 - GAIN_MIN)
        self._asked = self._asked + 1 if worth and direction == self._direction else int(worth)
        self._direction = direction if worth else 0
        inputs: dict[str, float | int | str | None] = {
            "prefill_load": round(wants[0], 3), "decode_load": round(wants[1], 3), "replicas": replicas, "best": best,
        }  # fmt: skip
        text = f"prefill fills {wants[0]:.1f} and decode {wants[1]:.1f} of {replicas} replicas"
        if not worth:
            return RoleMove(prefill, prefill, Reason("Balanced", f"{text}: {prefill} to prefill still fit"), inputs)
        if self._asked < ASK_TICKS:
            return RoleMove(prefill, prefill, Reason("Waiting", f"{text}: {best} to prefill, if that lasts"), inputs)
        self._asked, self._direction, self._settle = 0, 0, SETTLE_TICKS
        reason = Reason("MoreToPrefill" if direction > 0 else "MoreToDecode", f"{text}: {to} to prefill")
        return RoleMove(prefill, to, reason, inputs, {"fullness": then, "fullness_before": now})
