"""Detect: named conditions with evidence, each with a threshold to begin and a lower one to end.

A condition becomes active after its rule said *high* for ``on_ticks`` ticks in a row and inactive after *low* for
``off_ticks``; in between, and while its figures are unknown, it keeps its state. The rules::

    slo_ttft          TTFT at the objective's quantile > objective          ends at 0.9 of it
    slo_itl           token gap at the quantile > objective                 ends at 0.9 of it
    queue_growing     queue >= 4 and half as long again within the window   ends at < 2 or not growing
    kv_pressure       fullest replica's KV share > 0.9                      ends at < 0.8
    preemptions       any in the window                                     ends at none
    cache_cold        realised / predicted hits < 0.6                       ends at >= 0.8
    hot_spot          one replica queues, above load_bound x mean,          ends when none does
                      while another is at most half full
    over_provisioned  busy share * N / (N - 1) < 0.5, no queue, N > min     ends at > 0.6 or a queue
    signal_loss       blind, or replicas that run and say nothing           ends when all speak
    stuck_replica     says so itself, or has work and made no step for      ends when none is
                      STUCK_MS and twice its longest predicted step

A condition explains; it does not act. Levers read figures themselves and may quote a condition.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from policies.affinity import PREDICTED_SHARE_MIN, TRUST_HIGH, TRUST_LOW
from policies.config import PolicyConfig
from policies.control.signals import ReplicaSignals, Signals
from policies.step_model import predict_step_ms
from policies.types import Histogram, ReplicaState

SAMPLES_MIN = 5
"""Values a latency histogram must hold before a quantile of it is believed."""

STUCK_MS = 10_000.0
"""An engine with work makes a step within this time, or within twice its longest predicted step.

Where that is longer than the window of reports, only the replica's own word counts.
"""

QUEUE_TICKS = 12
"""Ticks over which a queue's growth is judged."""

NAMED_MAX = 3
"""Replicas named in a condition's text."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One named condition at one tick."""

    name: str
    active: bool
    since_ns: int | None
    """When it last became active or inactive; ``None`` when it never changed."""
    evidence: Mapping[str, float] = field(default_factory=dict)
    """Figures of the last tick that had any."""
    text: str = ""


class Verdict(NamedTuple):
    """What a rule says of one tick. Neither high nor low: the state stays."""

    high: bool
    low: bool
    evidence: Mapping[str, float]
    text: str


_UNKNOWN = Verdict(False, False, {}, "unknown: no fresh figures")


class _State:
    """Hysteresis of one condition."""

    def __init__(self, name: str, on_ticks: int, off_ticks: int) -> None:
        self._name, self._on_ticks, self._off_ticks = name, on_ticks, off_ticks
        self._active = False
        self._streak = 0
        self._since_ns: int | None = None
        self._evidence: Mapping[str, float] = {}

    def step(self, verdict: Verdict, now_ns: int) -> Condition:
        against = verdict.low if self._active else verdict.high
        self._streak = self._streak + 1 if against else 0
        if self._streak >= (self._off_ticks if self._active else self._on_ticks):
            self._active, self._streak, self._since_ns = not self._active, 0, now_ns
        self._evidence = verdict.evidence or self._evidence
        return Condition(self._name, self._active, self._since_ns, self._evidence, verdict.text)


class Detector:
    """Turns signals into conditions; remembers only streaks and the last lengths of the queue."""

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self._queue: deque[int] = deque(maxlen=QUEUE_TICKS)
        rules: list[tuple[str, int, int, Callable[[Signals], Verdict]]] = [
            ("cache_cold", 3, 5, self._cache_cold),
            ("hot_spot", 3, 3, self._hot_spot),
            ("kv_pressure", 2, 5, self._kv_pressure),
            ("over_provisioned", 10, 3, self._over_provisioned),
            ("preemptions", 1, 3, self._preemptions),
            ("queue_growing", 3, 3, self._queue_growing),
            ("signal_loss", 3, 2, self._signal_loss),
            ("slo_itl", 2, 5, self._slo_itl),
            ("slo_ttft", 2, 5, self._slo_ttft),
            ("stuck_replica", 1, 2, self._stuck_replica),
        ]
        self._rules = [(_State(name, on, off), rule) for name, on, off, rule in rules]

    def step(self, signals: Signals, now_ns: int) -> tuple[Condition, ...]:
        """Conditions at this tick, sorted by name."""
        if signals.queue is not None:
            self._queue.append(signals.queue)
        return tuple(state.step(rule(signals), now_ns) for state, rule in self._rules)

    def _slo_ttft(self, signals: Signals) -> Verdict:
        if signals.traffic is None:
            return _UNKNOWN
        return self._slo("TTFT", signals.traffic.ttft, self._config.objectives.ttft_ms)

    def _slo_itl(self, signals: Signals) -> Verdict:
        """Gaps as streams saw them where gateways measured enough, else as engines made them."""
        if signals.blind:
            return _UNKNOWN
        seen = signals.traffic.itl if signals.traffic else None
        made = signals.work.itl if signals.work else None
        itl = seen if made is None or (seen is not None and seen.count >= SAMPLES_MIN) else made
        return self._slo("token gap", itl or Histogram(), self._config.objectives.itl_ms)

    def _slo(self, what: str, histogram: Histogram, objective_ms: float) -> Verdict:
        quantile = self._config.objectives.quantile
        value = histogram.quantile_ms(quantile)
        if value is None or histogram.count < SAMPLES_MIN:
            return Verdict(False, True, {}, f"{what}: too few values to judge")
        evidence = {"value_ms": value, "objective_ms": objective_ms, "samples": float(histogram.count)}
        text = f"{what} at {quantile:.0%} is {value:.0f} ms, objective {objective_ms:.0f} ms"
        return Verdict(value > objective_ms, value <= 0.9 * objective_ms, evidence, text)

    def _queue_growing(self, signals: Signals) -> Verdict:
        if signals.queue is None or len(self._queue) < QUEUE_TICKS // 2:
            return _UNKNOWN
        half = len(self._queue) // 2
        values = list(self._queue)
        older, newer = sum(values[:half]) / half, sum(values[-half:]) / half
        evidence = {"queue": float(signals.queue), "older_mean": older, "newer_mean": newer}
        high = signals.queue >= 4 and newer >= 1.5 * older and newer - older >= 2
        return Verdict(
            high, signals.queue < 2 or newer < 1.1 * older, evidence, f"queue went from {older:.1f} to {newer:.1f}"
        )

    @staticmethod
    def _kv_pressure(signals: Signals) -> Verdict:
        share = signals.work.kv_share_max if signals.work else None
        if share is None:
            return _UNKNOWN
        return Verdict(share > 0.9, share < 0.8, {"kv_share_max": share}, f"fullest KV cache is at {share:.0%}")

    @staticmethod
    def _preemptions(signals: Signals) -> Verdict:
        if signals.work is None:
            return _UNKNOWN
        n = signals.work.preemptions
        return Verdict(n > 0, n == 0, {"preemptions": float(n)}, f"{n} preemptions in the window")

    def _cache_cold(self, signals: Signals) -> Verdict:
        if signals.work is None or signals.traffic is None:
            return _UNKNOWN
        realised, predicted = signals.work.prefix_hit_share, signals.traffic.predicted_hit_share
        enough = signals.work.prefix_query_tokens >= self._config.affinity.query_tokens_min
        if realised is None or predicted is None or predicted < PREDICTED_SHARE_MIN or not enough:
            return Verdict(False, True, {}, "too few predicted cache hits to compare")
        trust = realised / predicted
        evidence = {"realised_hit_share": realised, "predicted_hit_share": predicted}
        text = f"{realised:.0%} of prompt tokens were cached, {predicted:.0%} were predicted"
        return Verdict(trust < TRUST_LOW, trust >= TRUST_HIGH, evidence, text)

    def _hot_spot(self, signals: Signals) -> Verdict:
        replicas = [r.latest for r in signals.serving]
        if len(replicas) < 2:
            return Verdict(False, bool(replicas), {}, "fewer than two replicas to compare")
        loads = [r.running + r.waiting for r in replicas]
        mean, top = sum(loads) / len(loads), max(loads)
        hot = max(replicas, key=lambda r: (r.running + r.waiting, r.replica_id))
        idle = any(r.waiting == 0 and 2 * r.running <= min(r.running_seqs_hard, hot.running) for r in replicas)
        high = hot.waiting > 0 and idle and top > self._config.routing.load_bound * mean
        evidence = {"requests_max": float(top), "requests_mean": mean}
        return Verdict(high, not high, evidence, f"{hot.replica_id} holds {top} requests, the mean is {mean:.1f}")

    def _over_provisioned(self, signals: Signals) -> Verdict:
        n = len(signals.serving)
        busy = signals.work.busy_share if signals.work else None
        if n == 0 or busy is None or signals.queue is None or signals.unknown_replicas:
            return _UNKNOWN
        if n <= self._config.scaling.replicas_min:
            return Verdict(False, True, {"replicas": float(n)}, f"{n} replicas, the least allowed")
        without_one = busy * n / (n - 1) if n > 1 else busy
        evidence = {"replicas": float(n), "busy_share": busy, "busy_share_without_one": without_one}
        text = f"{n} replicas are {busy:.0%} busy; one fewer would be {without_one:.0%} busy"
        return Verdict(without_one < 0.5 and signals.queue == 0, without_one > 0.6 or signals.queue > 0, evidence, text)

    @staticmethod
    def _signal_loss(signals: Signals) -> Verdict:
        known = len(signals.replicas) + signals.gateways_known
        silent = signals.gateways_known - signals.gateways_fresh
        evidence = {
            "unknown_replicas": float(signals.unknown_replicas),
            "silent_gateways": float(silent),
            "blind": float(signals.blind),
        }
        if known == 0 and signals.unknown_replicas == 0:
            return Verdict(False, False, {}, "nobody has reported yet")
        lost = signals.blind or signals.unknown_replicas > 0 or (known > 0 and signals.gateways_fresh == 0)
        text = f"{signals.unknown_replicas} replicas run and say nothing, {signals.gateways_fresh} gateways report"
        return Verdict(lost, not lost, evidence, "blind: no fresh report at all" if signals.blind else text)

    @staticmethod
    def _stuck_replica(signals: Signals) -> Verdict:
        if not signals.fresh:
            return _UNKNOWN
        stuck = [r.replica_id for r in signals.fresh if is_stuck(r)]
        text = f"no progress on {', '.join(stuck[:NAMED_MAX])}" if stuck else "all replicas with work make progress"
        return Verdict(bool(stuck), not stuck, {"replicas": float(len(stuck))}, text)


def is_stuck(replica: ReplicaSignals) -> bool:
    """Whether a replica says it is stuck, or had work and made no step for longer than its longest step may take."""
    latest = replica.latest
    if latest.state is ReplicaState.STUCK:
        return True
    idle_ms = 0.0
    for sample in reversed(replica.window):
        if sample.value.steps or not (sample.value.running or sample.value.waiting):
            break
        idle_ms += sample.value.window_ms
    if idle_ms < STUCK_MS:
        return False
    longest_ms = 0.0
    if latest.step_model is not None:
        longest_ms = predict_step_ms(latest.step_model, latest.running, latest.kv_tokens_used, latest.step_tokens_hard)
    return idle_ms >= 2 * longest_ms
