"""How far routing may trust its guess of what engines have cached.

Routers predict cache hits from what they sent where; engines evict what they must. The loop compares both as shares of
prompt tokens, so that estimated and true token counts need not agree::

    trust = (prefix_hit_tokens / prefix_query_tokens) / (predicted_hit_tokens / predicted_prompt_tokens)

* ``trust`` below :data:`TRUST_LOW`: caches hold less than believed; the strength falls towards the trust;
* ``trust`` from :data:`TRUST_HIGH`: what was predicted came true; the strength rises towards 1;
* a hot spot lowers the strength unless predictions come true: affinity that saves nothing piles work on one replica
  while others idle. Affinity that saves work is weighed against each replica's queue by the router itself.

One adjustment moves by at most ``step``, needs ``query_tokens_min`` looked-up tokens and those of :data:`REQUESTS_MIN`
usual prompts since the last one (what is looked up in a tick are not the prompts dispatched in it, so that a few say
nothing), and keeps the strength in ``strength_min..1``. Where little was predicted there is nothing to compare and the
strength stays.

:class:`LoadBoundLoop` sets how far above the mean a replica's load may be before all others come first. Affinity that
saves work may still pile it on one replica; the strength is deserved then, the pile is not. While one replica queues
and others idle the bound falls by a tenth each :data:`BOUND_TICKS` ticks, not below :data:`BOUND_MIN`; after
:data:`BOUND_QUIET_TICKS` without that it returns step by step to what is configured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from policies.config import AffinityConfig
from policies.types import GatewayReport, Reason, ReplicaReport

TRUST_LOW = 0.6
"""Realised over predicted hits below which caches are called cold."""

TRUST_HIGH = 0.8
"""Realised over predicted hits from which the prediction is called true."""

REQUESTS_MIN = 64
"""Prompts that must have been looked up since the last adjustment."""

PREDICTED_SHARE_MIN = 0.05
"""Below this share of predicted hits there is nothing to compare."""

BOUND_MIN = 1.1
"""Least bound, as a multiple of the mean load: below that prefixes move for nothing but noise."""

BOUND_FACTOR = 0.9
"""One step down; a step up is half of that way."""

BOUND_TICKS = 5
"""Ticks between two steps: a queue needs some seconds to go where the new bound sends it."""

BOUND_QUIET_TICKS = 300
"""Ticks without a hot spot before the bound rises again."""


@dataclass(frozen=True, slots=True)
class AffinityMove:
    """One tick's answer."""

    before: float
    after: float
    reason: Reason
    inputs: Mapping[str, float | int | str | None] = field(default_factory=dict)

    @property
    def changed(self) -> bool:
        """Whether the strength moved."""
        return self.before != self.after


class AffinityLoop:
    """The strength, tick by tick. Feed it every accepted report once."""

    def __init__(self, config: AffinityConfig, strength: float) -> None:
        self._config = config
        self.strength = min(1.0, max(config.strength_min, strength))
        self._query_tokens = 0
        self._hit_tokens = 0
        self._predicted_prompt_tokens = 0
        self._predicted_hit_tokens = 0
        self._dispatched = 0

    def receive_replica(self, report: ReplicaReport) -> None:
        """Count what an engine looked up and found."""
        self._query_tokens += report.prefix_query_tokens
        self._hit_tokens += report.prefix_hit_tokens

    def receive_gateway(self, report: GatewayReport) -> None:
        """Count what routers believed at dispatch."""
        self._predicted_prompt_tokens += sum(report.predicted_prompt_tokens.values())
        self._predicted_hit_tokens += sum(report.predicted_hit_tokens.values())
        self._dispatched += sum(report.routed.values())

    def step(self, hot_spot: bool) -> AffinityMove:
        """Move by at most one step when enough was seen, else stay."""
        prompt_tokens = self._predicted_prompt_tokens / self._dispatched if self._dispatched else 0.0
        needed = max(self._config.query_tokens_min, REQUESTS_MIN * prompt_tokens)
        if self._query_tokens < needed or self._predicted_prompt_tokens <= 0:
            return AffinityMove(
                self.strength, self.strength, Reason("TooLittleSeen", "too few prompt tokens since the last adjustment")
            )
        realised = self._hit_tokens / self._query_tokens
        predicted = self._predicted_hit_tokens / self._predicted_prompt_tokens
        inputs: dict[str, float | int | str | None] = {
            "prefix_query_tokens": self._query_tokens,
            "prefix_hit_tokens": self._hit_tokens,
            "predicted_prompt_tokens": self._predicted_prompt_tokens,
            "predicted_hit_tokens": self._predicted_hit_tokens,
            "realised_hit_share": round(realised, 4),
            "predicted_hit_share": round(predicted, 4),
            "hot_spot": int(hot_spot),
        }
        self._query_tokens = self._hit_tokens = self._predicted_prompt_tokens = self._predicted_hit_tokens = 0
        self._dispatched = 0
        goal, reason = self._goal(realised, predicted, hot_spot)
        before = self.strength
        step = self._config.step
        moved = min(before + step, max(before - step, goal))
        self.strength = round(min(1.0, max(self._config.strength_min, moved)), 4)
        return AffinityMove(before, self.strength, reason, inputs)

    def _goal(self, realised: float, predicted: float, hot_spot: bool) -> tuple[float, Reason]:
        seen = f"{realised:.0%} of prompt tokens were cached, {predicted:.0%} were predicted"
        trust = realised / predicted if predicted else 0.0
        if predicted < PREDICTED_SHARE_MIN:
            return self.strength, Reason("NothingPredicted", f"no cache hits to compare: strength stays ({seen})")
        if hot_spot and trust < TRUST_HIGH:
            return 0.0, Reason("HotSpot", f"one replica queues while others idle: less affinity ({seen})")
        if trust < TRUST_LOW:
            return min(trust, self.strength), Reason("CacheCold", f"{seen}: caches hold less than believed")
        if trust >= TRUST_HIGH:
            return 1.0, Reason("PredictionsTrue", f"{seen}: full affinity is deserved")
        return self.strength, Reason("TrustUnclear", f"{seen}: neither clearly true nor wrong, strength stays")


class LoadBoundLoop:
    """The bound, tick by tick."""

    def __init__(self, bound: float) -> None:
        self._configured = bound
        self.bound = bound
        self._rest = 0
        self._quiet = 0

    def reconfigure(self, bound: float) -> None:
        """Return to another bound from now on."""
        if self.bound == self._configured:
            self.bound = bound
        self._configured = bound

    def step(self, hot_spot: bool) -> AffinityMove:
        """Move by one step where it is time to, else stay."""
        self._rest = max(0, self._rest - 1)
        self._quiet = 0 if hot_spot else self._quiet + 1
        before = self.bound
        if self._rest:
            return AffinityMove(before, before, Reason("Settling", "waits for the effect of the last change"))
        lowest = min(BOUND_MIN, self._configured)
        if hot_spot and before > lowest:
            self.bound, self._rest = round(max(lowest, before * BOUND_FACTOR), 3), BOUND_TICKS
            text = f"one replica queues while others idle: none above {self.bound:g} times the mean load"
            return AffinityMove(before, self.bound, Reason("HotSpot", text), {"hot_spot": 1})
        if self._quiet >= BOUND_QUIET_TICKS and before < self._configured:
            raised = before * (2 - BOUND_FACTOR)
            self.bound, self._rest = round(min(self._configured, raised), 3), BOUND_TICKS
            text = f"no hot spot for {self._quiet} ticks: the bound returns to {self._configured:g}"
            return AffinityMove(before, self.bound, Reason("Quiet", text), {"hot_spot": 0})
        return AffinityMove(before, before, Reason("Steady", "no reason to move the bound"))
