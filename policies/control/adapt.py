"""Adapt: joins the levers of one tick into one set of wishes, and drafts what the ledger should say.

Cheapest lever first: routing (affinity strength), then batch (knobs per replica), then scale. Each lever keeps its own
history and answers with a value and a reason; this module asks them in that order, drops what is switched off, and
drafts an entry for every change and for every notable hold (blind, partly blind, bounded) when it begins.

It must not act, and it must not compute a lever's value itself. When blind it holds everything: the last wishes stand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from policies.affinity import AffinityLoop
from policies.batching import BatchMove, BatchTuner
from policies.config import PolicyConfig
from policies.control.detect import Condition
from policies.control.ledger import Draft
from policies.control.scaler import ScaleAdvice, Scaler
from policies.control.signals import Signals
from policies.types import GatewayReport, Knobs, ReplicaId, ReplicaReport

HOLD_REPEAT_NS = 60_000_000_000
"""The same hold of the same lever is written again at most this often."""


@dataclass(frozen=True, slots=True)
class Adaptation:
    """Wishes of one tick and drafts for the ledger."""

    replicas_target: int | None
    affinity_strength: float | None
    knobs: Mapping[ReplicaId, Knobs]
    drafts: tuple[Draft, ...]
    advice: ScaleAdvice | None


class Adapter:
    """The levers with their histories."""

    def __init__(self, config: PolicyConfig, scaler: Scaler) -> None:
        self._config = config
        self._scaler = scaler
        self._affinity = AffinityLoop(config.affinity, config.routing.affinity_strength)
        self._tuners: dict[ReplicaId, BatchTuner] = {}
        self._replicas_target: int | None = None
        self._hold_code: str | None = None
        self._held_at_ns: dict[str, int] = {}

    def receive_replica(self, report: ReplicaReport) -> None:
        """Feed an accepted report to the levers that count between ticks."""
        self._affinity.receive_replica(report)

    def receive_gateway(self, report: GatewayReport) -> None:
        """Feed an accepted report to the levers that count between ticks."""
        self._affinity.receive_gateway(report)

    def step(self, signals: Signals, conditions: Sequence[Condition], now_ns: int) -> Adaptation:
        """One tick over all levers."""
        hot_spot = any(c.active for c in conditions if c.name == "hot_spot")
        drafts: list[Draft] = []
        strength = self._step_affinity(signals, hot_spot, drafts)
        knobs = self._step_batch(signals, now_ns, drafts)
        advice = self._step_replicas(signals, now_ns, drafts)
        return Adaptation(self._replicas_target, strength, knobs, tuple(drafts), advice)

    def _step_affinity(self, signals: Signals, hot_spot: bool, drafts: list[Draft]) -> float | None:
        if not self._config.affinity.enabled:
            return None
        if not signals.blind:
            move = self._affinity.step(hot_spot)
            if move.changed:
                before, after = {"affinity_strength": move.before}, {"affinity_strength": move.after}
                drafts.append(Draft("affinity", signals.model, before, after, move.reason, move.inputs))
        return self._affinity.strength

    def _step_batch(self, signals: Signals, now_ns: int, drafts: list[Draft]) -> dict[ReplicaId, Knobs]:
        if not self._config.batching.enabled:
            return {}
        tuners, self._tuners = self._tuners, {}
        for replica in signals.replicas:
            replica_id = replica.latest.replica_id
            tuner = tuners.get(replica_id)
            if tuner is None:
                tuner = BatchTuner(self._config.batching, self._config.objectives)
            self._tuners[replica_id] = tuner
            if replica.fresh:
                move = tuner.step(replica.window, now_ns)
                if move.changed:
                    drafts.append(_batch_draft(replica_id, move))
        return {replica_id: tuner.wish for replica_id, tuner in self._tuners.items()}

    def _step_replicas(self, signals: Signals, now_ns: int, drafts: list[Draft]) -> ScaleAdvice | None:
        if not self._config.scaling.enabled:
            return None
        advice = self._scaler.recommend(signals, now_ns)
        before, after = self._replicas_target, advice.replicas
        self._replicas_target = after
        changed = before is not None and after is not None and after != before
        if changed or self._is_news(advice, signals, now_ns):
            drafts.append(
                Draft(
                    lever="replicas",
                    target=signals.model,
                    before={"replicas_target": before},
                    after={"replicas_target": after},
                    reason=advice.reason,
                    inputs=advice.inputs,
                )
            )
        return advice

    def _is_news(self, advice: ScaleAdvice, signals: Signals, now_ns: int) -> bool:
        """Whether a hold has just begun and was not written lately."""
        code = advice.reason.code if advice.held else None
        begun, self._hold_code = code is not None and code != self._hold_code, code
        anyone = bool(signals.replicas) or signals.gateways_known > 0
        if code is None or not begun or not anyone:
            return False
        last_ns = self._held_at_ns.get(code)
        if last_ns is not None and now_ns - last_ns < HOLD_REPEAT_NS:
            return False
        self._held_at_ns[code] = now_ns
        return True


def _batch_draft(replica_id: ReplicaId, move: BatchMove) -> Draft:
    return Draft(
        lever="batch",
        target=replica_id,
        before=_knob_values(move.before),
        after=_knob_values(move.after),
        reason=move.reason,
        inputs=move.inputs,
        predicted=move.predicted,
    )


def _knob_values(knobs: Knobs) -> dict[str, float | int | None]:
    return {"running_seqs_max": knobs.running_seqs_max, "step_tokens_max": knobs.step_tokens_max}
