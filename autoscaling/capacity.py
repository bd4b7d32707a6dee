"""Capacity: what one replica carries while it keeps the objectives, from its step model.

With ``B`` the largest batch whose decode step stays within the ITL objective, whose KV fits and which the engine may
run::

    share = (prefill_tps * d_ms + decode_tps * step_ms(B, B * kv_per_seq) / B) / 1000

is the number of such engines the demand keeps busy. The second term is Little's law: sequences decoding at once, over
``B``. An engine's *measured* busy share says something else (one stream alone keeps an engine busy at a thirtieth of
what it could carry), which is why demand is never read from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autoscaling.demand import Demand
from policies.config import ObjectivesConfig
from policies.control.signals import ReplicaSignals
from policies.control.turns import Turns
from policies.step_model import largest_batch, predict_step_ms
from policies.types import ReplicaId, StepCoefficients

KV_TOKENS_MEAN_PRIOR = 256.0
"""KV tokens of a sequence before any ran."""

KV_SHARE_PLANNED = 0.9
"""Share of a KV cache that is planned with."""

ERROR_SHARE_MAX = 0.5
"""A step model that is wrong by more than this on average is not planned with."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one replica can do within the objectives."""

    batch: int
    """Sequences decoding at once."""
    decode_token_ms: float
    """Engine time per decoded token at that batch."""
    prefill_token_ms: float
    """Engine time per prompt token."""
    kv_tokens: float
    """KV tokens planned with; infinite where the size is unknown."""

    def share(self, prefill_tps: float, decode_tps: float, kv_tokens: float) -> float:
        """Replicas like this one that the demand fills."""
        busy = (prefill_tps * self.prefill_token_ms + decode_tps * self.decode_token_ms) / 1000
        return max(busy, kv_tokens / self.kv_tokens)

    def requests_ps(self, prompt_tokens_mean: float, output_tokens_mean: float) -> float | None:
        """Requests per second of the given size; ``None`` for requests that cost nothing."""
        cost_ms = prompt_tokens_mean * self.prefill_token_ms + output_tokens_mean * self.decode_token_ms
        return 1000 / cost_ms if cost_ms > 0 else None


def ceiling(replicas: float) -> int:
    """Whole replicas for a share of them; forgives the last digits of a float."""
    return math.ceil(replicas - 1e-9)


def replica_capacity(
    model: StepCoefficients,
    running_seqs_max: int,
    kv_tokens_max: int,
    kv_tokens_mean: float | None,
    objectives: ObjectivesConfig,
) -> Capacity:
    """Capacity of an engine. A batch of one is assumed possible even where it misses the objective."""
    per_seq = kv_tokens_mean or KV_TOKENS_MEAN_PRIOR
    kv_tokens = kv_tokens_max * KV_SHARE_PLANNED if kv_tokens_max > 0 else float("inf")
    batch = largest_batch(model, per_seq, kv_tokens, running_seqs_max, objectives.itl_ms)
    step_ms = predict_step_ms(model, batch, batch * per_seq, 0)
    return Capacity(batch, step_ms / batch, model.d_ms, kv_tokens)


class Capacities:
    """Capacity of each replica, worked out anew when it is its turn (:mod:`policies.control.turns`)."""

    def __init__(self) -> None:
        self._turns = Turns()
        self._ids: tuple[ReplicaId, ...] = ()
        self._known: list[Capacity | None] = []
        """Of each of :attr:`_ids`; ``None``: its step model cannot be trusted."""

    def mean(
        self, replicas: Sequence[ReplicaSignals], demand: Demand, objectives: ObjectivesConfig, samples_min: int,
        ids: tuple[ReplicaId, ...] | None = None,
    ) -> Capacity | None:  # fmt: skip
        """Mean of the replicas whose step model can be trusted; ``None`` when none can. Call it once per tick.

        ``ids``: their names, where the caller has them.
        """
        ids = tuple([r.replica_id for r in replicas]) if ids is None else ids
        due = self._turns.due(len(replicas))
        known, places = self._known, iter(due)
        if ids != self._ids:
            old = dict(zip(self._ids, self._known, strict=True))
            places = (place for place, replica_id in enumerate(ids) if place in due or replica_id not in old)
            self._ids, self._known = ids, [old.get(replica_id) for replica_id in ids]
            known = self._known
        for place in places:
            known[place] = _trusted_capacity(replicas[place], demand, objectives, samples_min)
        return _mean([c for c in known if c is not None])


def _trusted_capacity(
    replica: ReplicaSignals, demand: Demand, objectives: ObjectivesConfig, samples_min: int
) -> Capacity | None:
    """Capacity of one replica; ``None`` where its step model cannot be trusted."""
    model = replica.latest.step_model
    if model is None or model.samples < samples_min:
        return None
    if model.error_share is not None and model.error_share > ERROR_SHARE_MAX:
        return None
    kv_max, kv_mean = replica.latest.kv_tokens_max, demand.kv_tokens_mean
    return replica_capacity(model, _seqs_max(replica), kv_max, kv_mean, objectives)


def _mean(known: Sequence[Capacity]) -> Capacity | None:
    """Work per replica adds up, so the means are of speeds, not of times."""
    if not known:
        return None
    return Capacity(
        batch=round(sum([c.batch for c in known]) / len(known)),
        decode_token_ms=_mean_ms([c.decode_token_ms for c in known]),
        prefill_token_ms=_mean_ms([c.prefill_token_ms for c in known]),
        kv_tokens=sum([c.kv_tokens for c in known]) / len(known),
    )


def _seqs_max(replica: ReplicaSignals) -> int:
    hard, now = replica.latest.running_seqs_hard, replica.latest.knobs.running_seqs_max
    return min(hard, now) if now is not None and now > 0 else hard


def _mean_ms(times_ms: list[float]) -> float:
    """Mean time of work that is spread by speed: the harmonic mean; 0 when any is 0."""
    return 0.0 if min(times_ms) <= 0 else len(times_ms) / sum([1 / t for t in times_ms])
