"""Fleets that may be planned, what one costs, the first guess at its size, and what no size of it can reach.

Engine time of a token at its cheapest, from ``autoscaling/capacity.py`` with the profile's step law::

    prefill_ms   d_ms plus the mean cost of attention to the prompt's own beginning, per uncached prompt token
    decode_ms    step_ms(B, B * context) / B at the largest batch B within the ITL objective and the KV cache

    guess        hardest minute's prefill and decode time over it, over the share planned with
    lower bound  hardest window's engine time over the window and the time its work may wait; nothing can do with less

An objective is out of reach of a kind when the gap of a batch of one is above ``itl_ms``, or when fewer requests than
must succeed have a TTFT within ``ttft_ms`` with an engine of their own and every prefix cached that can be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from autoscaling.capacity import Capacity, replica_capacity
from autoscaling.planning.load import WINDOW_S, LoadFigures, quantile, shares_above
from autoscaling.recommend import ReplicaScaler
from autoscaling.simulator.spec import EngineProfile, NetworkSpec, Pool
from policies.config import ObjectivesConfig, PolicyConfig

Mode: TypeAlias = Literal["static", "autoscaled"]

PLANNED_SHARE = 0.8
"""Share of an engine's time that the first guess plans with."""

GUESS_S = 60
"""Time over which the first guess takes the demand."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a fleet must hold."""

    objectives: ObjectivesConfig
    attainment: float
    """Share of the requests that must succeed: whole answer, TTFT and mean gap within the objectives."""

    def __post_init__(self) -> None:
        if not 0 < self.attainment <= 1:
            raise ValueError(f"attainment must be above 0 and at most 1, is {self.attainment}")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One fleet of one kind of replica."""

    profile: EngineProfile
    mode: Mode
    replicas: int
    """At the start, prefill and decode together; at any time where static."""
    replicas_min: int
    replicas_max: int
    prefill: int = 0
    """Of a divided fleet; 0: every replica does both."""

    @property
    def divided(self) -> bool:
        """Whether prefill and decode have replicas of their own."""
        return self.prefill > 0

    @property
    def usd_per_hour(self) -> float:
        """While all replicas of the start are there."""
        return self.replicas * self.profile.usd_per_hour

    @property
    def kind(self) -> Kind:
        """What it is, whatever its size."""
        return Kind(self.profile, self.divided)

    def words(self) -> str:
        """Say it in a few words."""
        if self.divided:
            return f"{self.prefill} prefill + {self.replicas - self.prefill} decode x {self.profile.name}, static"
        if self.mode == "static":
            return f"{self.replicas} x {self.profile.name}, static"
        return f"{self.replicas_min}..{self.replicas_max} x {self.profile.name}, autoscaled"

    def pools(self) -> tuple[Pool, ...]:
        """Pools of a scenario."""
        if self.divided:
            decode = self.replicas - self.prefill
            return Pool(self.profile, self.prefill, "prefill"), Pool(self.profile, decode, "decode")
        return (Pool(self.profile, self.replicas, scaler=ReplicaScaler if self.mode == "autoscaled" else None),)

    def config(self, config: PolicyConfig) -> PolicyConfig:
        """The settings with this fleet's bounds."""
        bounds = replace(config.scaling, replicas_min=self.replicas_min, replicas_max=self.replicas_max)
        return replace(config, scaling=bounds)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of replica, and whether prefill and decode are divided."""

    profile: EngineProfile
    divided: bool

    def words(self) -> str:
        """Say it in a few words."""
        return f"{self.profile.name}{', divided' if self.divided else ''}"

    def static(self, replicas: int, prefill: int = 0) -> Candidate:
        """A fleet of this kind whose number does not change."""
        return Candidate(self.profile, "static", replicas, replicas, replicas, prefill)


# --- what one engine does ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """What a load asks of one profile."""

    capacity: Capacity
    prefill_ms: float
    """Per uncached prompt token."""
    decode_ms: float
    """Per output token, at its cheapest."""
    guess: int
    """Replicas, at least 1."""
    bound: float
    """Replicas (a fraction) that no fleet which holds the goal can do without, at its hardest window."""
    mean: float
    """Likewise over the whole load: what an autoscaled fleet cannot do without."""
    prefill_share: float
    """Of the engine time."""


def work_of(profile: EngineProfile, load: LoadFigures, goal: Goal) -> Work:
    """Demand on ``profile``; see the module."""
    objectives = goal.objectives
    capacity = replica_capacity(
        profile.law.coefficients(), profile.running_seqs_max, profile.kv_tokens, load.context_mean, objectives
    )
    batch, decode_ms = _cheapest(profile, capacity.batch, load.context_mean)
    prefill_ms = profile.law.d_ms + profile.law.e_ms / 1e6 * _pairs_mean(load)
    total_ms = load.requests * (load.uncached_mean * prefill_ms + load.output_mean * decode_ms)
    slack_s = (objectives.ttft_ms + objectives.itl_ms * max(load.output_tokens)) / 1e3
    hardest_s = min(WINDOW_S, load.span_s)
    bound = load.peak_ms(prefill_ms, decode_ms, WINDOW_S) / 1e3 / (hardest_s + slack_s)
    busy = load.peak_ms(prefill_ms, decode_ms, GUESS_S) / 1e3 / min(GUESS_S, load.span_s)
    kv = _kv_replicas(load, capacity, decode_ms, batch)
    return Work(
        capacity=capacity,
        prefill_ms=prefill_ms,
        decode_ms=decode_ms,
        guess=max(1, math.ceil(max(busy, kv) / PLANNED_SHARE)),
        bound=bound * goal.attainment,
        mean=total_ms / 1e3 / (load.span_s + slack_s) * goal.attainment,
        prefill_share=load.uncached_mean
        * prefill_ms
        / (load.uncached_mean * prefill_ms + load.output_mean * decode_ms),
    )


def _cheapest(profile: EngineProfile, batch_max: int, context: float) -> tuple[int, float]:
    """Batch whose tokens are cheapest, and their cost in ms: not always the largest where batches were measured."""
    batches = {min(batch, batch_max) for batch, _ in profile.law.batch} | {batch_max}
    costs = [(profile.law.step_ms(b, round(b * context)) / b, b) for b in sorted(batches)]
    cost_ms, batch = min(costs)
    return batch, cost_ms


def _pairs_mean(load: LoadFigures) -> float:
    """Pairs of a prompt token and one before it, per uncached token."""
    total = sum(u * (p - u / 2) for p, u in zip(load.prompt_tokens, load.uncached_tokens, strict=True))
    return total / sum(load.uncached_tokens)


def _kv_replicas(load: LoadFigures, capacity: Capacity, decode_ms: float, batch: int) -> float:
    """Caches that the sequences of the hardest minute fill: Little's law at the full batch's pace."""
    begin_s, end_s = load.peak_s(1.0, 1.0, GUESS_S)
    rate_ps, _, _ = load.token_rates(begin_s, end_s)
    open_ = rate_ps * load.output_mean * decode_ms * batch / 1e3
    return open_ * load.context_mean / capacity.kv_tokens


# --- what is out of reach ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unreachable:
    """An objective that no number of such replicas holds."""

    objective: str
    """``TTFT``, ``ITL``, ``context`` or ``attainment``."""
    limit: float
    """What was asked for, ms, or tokens of context."""
    reachable: float
    """The least that can be asked for, likewise."""
    text: str


def unreachable(profile: EngineProfile, load: LoadFigures, goal: Goal, network: NetworkSpec) -> Unreachable | None:
    """What ``profile`` can never hold, however many there are; ``None`` where nothing is known to be so."""
    objectives, missing = goal.objectives, 1 - goal.attainment + 1e-9
    tokens_max = min(profile.context_tokens_max, profile.kv_tokens)
    lengths = [p + o for p, o in zip(load.prompt_tokens, load.output_tokens, strict=True)]
    too_long = shares_above(lengths, tokens_max)
    if too_long > missing:
        needed = quantile(lengths, goal.attainment)
        text = f"{too_long:.1%} of the requests are longer than the {tokens_max:,} tokens an engine takes"
        return Unreachable("context", tokens_max, needed, text)
    gap_ms = profile.law.step_ms(1, round(quantile(load.prompt_tokens, 1 - goal.attainment)))
    if gap_ms > objectives.itl_ms and load.output_mean > 1:
        text = f"a step with a single sequence takes {gap_ms:.3g} ms, the gap may be {objectives.itl_ms:g} ms"
        return Unreachable("ITL", objectives.itl_ms, gap_ms, text)
    floors = [
        ttft_floor_ms(profile, network, p, u) for p, u in zip(load.prompt_tokens, load.uncached_tokens, strict=True)
    ]
    late = shares_above(floors, objectives.ttft_ms)
    if late > missing:
        reachable = quantile(floors, goal.attainment)
        text = (
            f"{late:.1%} of the prompts take longer than {objectives.ttft_ms:g} ms on an engine of their own "
            f"(the longest, {max(load.prompt_tokens):,} tokens, {max(floors):,.0f} ms)"
        )
        return Unreachable("TTFT", objectives.ttft_ms, reachable, text)
    return None


def ttft_floor_ms(profile: EngineProfile, network: NetworkSpec, prompt_tokens: int, uncached_tokens: int) -> float:
    """TTFT of a prompt on an idle engine that knows all but ``uncached_tokens`` of it."""
    steps = math.ceil(uncached_tokens / profile.step_tokens_max)
    pairs = uncached_tokens * (prompt_tokens - uncached_tokens / 2)
    compute_ms = steps * profile.law.batch_ms(1) + profile.law.step_ms(0, 0, uncached_tokens, pairs)
    compute_ms -= profile.law.batch_ms(0)
    overhead_ms = profile.request_overhead_ms + profile.first_token_overhead_ms
    return compute_ms + overhead_ms + 2 * (network.client_ms + network.hop_ms) + network.gateway_ms
