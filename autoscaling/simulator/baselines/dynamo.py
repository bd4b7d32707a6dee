"""A Dynamo-style SLA planner: replicas from predicted load over what one engine does within the objectives.

Source: NVIDIA Dynamo, "Planner Design" (docs.nvidia.com/dynamo v0.9.0, steps 1 to 4) and ai-dynamo 1.6.1
(``dynamo/planner/core/throughput_scaling.py``, ``config/defaults.py``). Every ``interval_s`` (180):

1. Request rate, mean prompt and output length (ISL, OSL), TTFT and ITL of the interval, from the frontends.
2. Corrections: ``prefill = TTFT / expected TTFT at ISL``, ``decode = ITL / expected ITL`` at the interval's concurrency
   (Little's law) and context ``ISL + OSL / 2``.
3. Prediction of the next interval's rate, ISL and OSL (``predictors.py``).
4. Replicas, by role::

    prefill  ceil(rate * ISL * min(1, prefill correction) / prefill throughput at ISL)
    decode   ceil(rate * OSL / best decode throughput at that context within ITL objective / decode correction)
    both     ceil(rate / request rate of one engine within both objectives), ISL less the hits engines reported

At most ``step_replicas_max`` (8) up or down at a time, at least one. While replicas start, nothing more is asked for.
Corrections are of the documented design; 1.6.1 corrects its engine model instead, and ``correct=False`` leaves them
out.

What engines do comes from a profile, or, without one, from the mean of the replicas' own step models (1.6.1's
regression of forward passes), told per tick. One instance scales one pool; pools of a split fleet get one each, with
its role.

Also in Dynamo and not here: GPU budgets, load-based scaling (5 s, off by default in throughput mode), power, Kalman and
Prophet predictors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autoscaling.capacity import ceiling
from autoscaling.simulator.baselines.dynamo_engine import (
    EngineSurface,
    surface_of_coefficients,
    surface_of_profile,
)
from autoscaling.simulator.baselines.fleet_view import advice, bounded, fleet_state, unknown
from autoscaling.simulator.baselines.predictors import Predictor
from autoscaling.simulator.spec import EngineProfile, ScalerFactory
from policies.config import PolicyConfig
from policies.control.scaler import ScaleAdvice
from policies.control.signals import ReplicaSignals, Signals, Traffic
from policies.step_model import mean_coefficients
from policies.types import Histogram

ROLES = ("both", "prefill", "decode")
"""Roles of ``spec.Pool``."""

HIT_SHARE_MAX = 0.95
"""Prefix hits are never believed to save more (``_MAX_KV_HIT_RATE_DISCOUNT``)."""


@dataclass(frozen=True, slots=True)
class DynamoSettings:
    """Fields of the planner's configuration, with the defaults of 1.6.1 where they are not the run's own."""

    role: str = "both"
    interval_s: float = 180.0
    predictor: str = "arima"
    correct: bool = True
    step_replicas_max: int = 8
    ttft_ms: float | None = None
    """``None``: the run's objective (Dynamo's own default is 500)."""
    itl_ms: float | None = None
    """``None``: the run's objective (Dynamo's own default is 50)."""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"role: must be one of {', '.join(ROLES)}, is {self.role!r}")
        if self.interval_s <= 0:
            raise ValueError(f"interval_s: must be above 0, is {self.interval_s}")


class _Interval:
    """Sums over the ticks of one interval, each tick's rates counting for the time since the tick before."""

    def __init__(self) -> None:
        self.seconds = self.arrivals = self.routed = self.prompt = self.ended = self.output = 0.0
        self.query = self.hits = 0.0
        self.ttft: Histogram | None = None
        self.itl: Histogram | None = None

    def add(self, traffic: Traffic, signals: Signals, seconds: float) -> None:
        self.seconds += seconds
        self.arrivals += traffic.arrivals_ps * seconds
        self.routed += traffic.routed_ps * seconds
        self.prompt += traffic.routed_prompt_tps * seconds
        self.ended += traffic.succeeded_ps * seconds
        self.output += traffic.output_tps * seconds
        self.ttft = traffic.ttft if self.ttft is None else self.ttft.plus(traffic.ttft)
        self.itl = traffic.itl if self.itl is None else self.itl.plus(traffic.itl)
        if signals.work is not None:
            self.query += signals.work.prefix_query_tokens
            self.hits += signals.work.prefix_hit_tokens

    @property
    def isl(self) -> float:
        return self.prompt / self.routed if self.routed else 0.0

    @property
    def osl(self) -> float:
        return self.output / self.ended if self.ended else 0.0

    @property
    def hit_share(self) -> float:
        return min(HIT_SHARE_MAX, self.hits / self.query) if self.query else 0.0


class DynamoPlanner:
    """One pool's planner."""

    def __init__(
        self, config: PolicyConfig, settings: DynamoSettings | None = None, profile: EngineProfile | None = None
    ) -> None:
        self._settings = settings or DynamoSettings()
        self._bounds = config.scaling
        self._ttft_ms = self._settings.ttft_ms or config.objectives.ttft_ms
        self._itl_ms = self._settings.itl_ms or config.objectives.itl_ms
        self._surface = surface_of_profile(profile) if profile else None
        self._rate, self._isl, self._osl = (Predictor(self._settings.predictor) for _ in range(3))
        self._interval = _Interval()
        self._began_ns: int | None = None
        self._ticked_ns: int | None = None
        self._target: int | None = None

    def recommend(self, signals: Signals, now_ns: int) -> ScaleAdvice:
        """The last answer until the interval is over."""
        if self._began_ns is None:
            self._began_ns = now_ns
        seconds = (now_ns - self._ticked_ns) / 1e9 if self._ticked_ns is not None else 0.0
        self._ticked_ns = now_ns
        if signals.traffic is not None:
            self._interval.add(signals.traffic, signals, seconds)
        fleet = fleet_state(signals)
        if fleet is None:
            return unknown()
        if self._target is None:
            self._target = fleet.target
        if now_ns - self._began_ns < self._settings.interval_s * 1e9:
            return advice(self._target, "Waiting", f"decides every {self._settings.interval_s:g} s")
        interval, self._interval, self._began_ns = self._interval, _Interval(), now_ns
        surface = self._surface or _live_surface(signals.serving)
        if surface is None or not interval.seconds:
            return advice(self._target, "ModelNotReady", "no engine model or no traffic was seen: the number stays")
        self._rate.add(interval.arrivals / interval.seconds)
        self._isl.add(interval.isl)
        self._osl.add(interval.osl)
        if fleet.target > fleet.running:
            return advice(self._target, "Scaling", f"{fleet.target - fleet.running} replicas start: the number stays")
        return self._decide(interval, surface, fleet.running)

    def _decide(self, interval: _Interval, surface: EngineSurface, running: int) -> ScaleAdvice:
        rate, isl, osl = self._rate.predict(), self._isl.predict(), self._osl.predict()
        if isl <= 0 or osl <= 0:
            return advice(self._target, "NoTraffic", "no request was seen to its end: the number stays")
        prefill, decode = self._corrections(interval, surface, running)
        role, inputs = self._settings.role, {"rate_ps": rate, "isl": isl, "osl": osl}
        if role == "prefill":
            engines = rate * isl * min(1.0, prefill) / surface.prefill_tps(isl)
            inputs["correction"] = prefill
        elif role == "decode":
            engines = rate * osl / surface.decode_tps(self._itl_ms / decode, isl + osl / 2)
            inputs["correction"] = decode
        else:
            engines = rate / surface.both_rps(isl, osl, self._ttft_ms, self._itl_ms, interval.hit_share)
            inputs["hit_share"] = interval.hit_share
        wanted = max(1, ceiling(engines))
        step = self._settings.step_replicas_max
        self._target = bounded(min(max(wanted, running - step), running + step), self._bounds)
        text = f"{rate:.2f} requests/s of {isl:.0f}+{osl:.0f} tokens fill {engines:.2f} engines"
        return advice(self._target, "Throughput", text, inputs)

    def _corrections(self, interval: _Interval, surface: EngineSurface, running: int) -> tuple[float, float]:
        """Measured over expected TTFT and ITL; 1 where one of them is not known."""
        if not self._settings.correct or not interval.isl or not interval.osl:
            return 1.0, 1.0
        ttft = interval.ttft.mean_ms() if interval.ttft is not None else None
        itl = interval.itl.mean_ms() if interval.itl is not None else None
        prefill = ttft / surface.ttft_ms(interval.isl) if ttft else 1.0
        if not itl:
            return prefill, 1.0
        duration_s = itl * interval.osl / 1000
        batch = max(1.0, interval.arrivals / interval.seconds * duration_s / max(1, running))
        return prefill, itl / surface.itl_ms(batch, interval.isl + interval.osl / 2)


def dynamo_scaler(profile: EngineProfile | None = None, settings: DynamoSettings | None = None) -> ScalerFactory:
    """Factory of planners of one pool's role; without ``profile`` they learn engines from the replicas' step models."""

    def make(config: PolicyConfig) -> DynamoPlanner:
        return DynamoPlanner(config, settings, profile)

    return make


def _live_surface(replicas: Sequence[ReplicaSignals]) -> EngineSurface | None:
    models = [(r.latest, r.latest.step_model) for r in replicas]
    known = [(report, model) for report, model in models if model is not None and model.samples]
    mean = mean_coefficients([model for _, model in known])
    if mean is None:
        return None
    kv = math.fsum(report.kv_tokens_max for report, _ in known) / len(known)
    return surface_of_coefficients(
        mean,
        kv or math.inf,
        min(report.running_seqs_hard for report, _ in known),
        min(report.step_tokens_hard for report, _ in known),
    )
