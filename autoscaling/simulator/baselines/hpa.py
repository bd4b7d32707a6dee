"""Kubernetes' HorizontalPodAutoscaler on a utilisation metric.

Source: kubernetes.io, "Horizontal Pod Autoscaling", "Algorithm details" (v1.35) and ``pkg/controller/podautoscaler``
(``replica_calculator.go: calcPlainMetricReplicas``, ``horizontal.go``), with the defaults of
``kube-controller-manager`` and of ``autoscaling/v2`` behaviours::

    every sync_s (15):  ratio = mean utilisation of ready pods / target
    |1 - ratio| <= tolerance (0.1): the number stays
    else desired = ceil(ratio * pods)

* Pods that start, and pods without a metric while going up, count as 0 % of use; pods without a metric while going down
  count as being on target. The ratio is taken again with them in; where it is then within the tolerance or points the
  other way, the number stays.
* Going down follows the highest desire of the last ``down_stabilisation_s`` (300), the first number seen being one;
  going up follows at once (0).
* In ``period_s`` (15) the number may rise by the larger of 4 pods and 100 %; it may fall by 100 %, i.e. without limit.

The metric is ``utilisation`` of the device (``DCGM_FI_DEV_GPU_UTIL``, taken for the engine's busy share where no device
reports one: both are the share of time in which something runs), or ``kv`` (vLLM's ``gpu_cache_usage_perc``). The
target of 80 % is the default of a metric that names none.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from autoscaling.capacity import ceiling
from autoscaling.simulator.baselines.fleet_view import FleetState, advice, bounded, fleet_state, unknown
from policies.config import PolicyConfig
from policies.control.scaler import ScaleAdvice
from policies.control.signals import ReplicaSignals, Signals


@dataclass(frozen=True, slots=True)
class HpaSettings:
    """Flags of the controller and fields of the object, with their defaults."""

    metric: str = "utilisation"
    """``utilisation`` or ``kv``."""
    target_share: float = 0.8
    tolerance: float = 0.1
    sync_s: float = 15.0
    down_stabilisation_s: float = 300.0
    up_pods: int = 4
    up_share: float = 1.0
    period_s: float = 15.0

    def __post_init__(self) -> None:
        if self.metric not in ("utilisation", "kv"):
            raise ValueError(f"metric: must be 'utilisation' or 'kv', is {self.metric!r}")


class HpaScaler:
    """One HorizontalPodAutoscaler."""

    def __init__(self, config: PolicyConfig, settings: HpaSettings | None = None) -> None:
        self._bounds = config.scaling
        self._settings = settings or HpaSettings()
        self._synced_ns: int | None = None
        self._last: ScaleAdvice | None = None
        self._desires: deque[tuple[int, int]] = deque()
        self._rises: deque[tuple[int, int]] = deque()

    def recommend(self, signals: Signals, now_ns: int) -> ScaleAdvice:
        """The last answer until the next sync."""
        synced_ns, last = self._synced_ns, self._last
        if synced_ns is not None and last is not None and now_ns - synced_ns < self._settings.sync_s * 1e9:
            return last
        fleet = fleet_state(signals)
        if fleet is None:
            return unknown()
        self._synced_ns = now_ns
        self._last = self._sync(signals, fleet, now_ns)
        return self._last

    def _sync(self, signals: Signals, fleet: FleetState, now_ns: int) -> ScaleAdvice:
        shares = [s for s in (self._share(r) for r in signals.serving) if s is not None]
        if not shares:
            return advice(fleet.target, "NoMetrics", "no pod reports: the number stays")
        desired, ratio = self._desired(shares, fleet)
        inputs = {"ratio": ratio, "replicas_desired": desired, "replicas_running": fleet.running}
        stable = self._stabilised(desired, fleet.target, now_ns)
        limited = self._limited(stable, fleet.target, now_ns)
        replicas = bounded(limited, self._bounds)
        if replicas > fleet.target:
            self._rises.append((now_ns, replicas - fleet.target))
        code = "ScaleDownStabilised" if stable != desired else "ScaleUpLimit" if limited != stable else "Desired"
        return advice(replicas, code, f"utilisation is {ratio:.2f} of its target, {desired} desired", inputs)

    def _share(self, replica: ReplicaSignals) -> float | None:
        latest = replica.latest
        if self._settings.metric == "kv":
            return latest.kv_tokens_used / latest.kv_tokens_max if latest.kv_tokens_max else None
        told = latest.gpu_utilisation_share
        return told if told is not None else replica.busy_share

    def _desired(self, shares: list[float], fleet: FleetState) -> tuple[int, float]:
        """Replicas the metric asks for, and the ratio of the ready pods."""
        target, tolerance = self._settings.target_share, self._settings.tolerance
        ratio = math.fsum(shares) / (target * len(shares))
        missing = max(0, fleet.running - len(shares))
        unready = max(0, fleet.target - fleet.running)
        if not missing and (ratio <= 1 or not unready):
            within = abs(1 - ratio) <= tolerance
            return (fleet.target if within else ceiling(ratio * len(shares))), ratio
        assumed = math.fsum(shares) + (missing * target if ratio < 1 else 0.0)
        pods = len(shares) + missing + (unready if ratio > 1 else 0)
        again = assumed / (target * pods)
        if abs(1 - again) <= tolerance or (ratio < 1) != (again < 1):
            return fleet.target, ratio
        desired = ceiling(again * pods)
        turned = desired > fleet.target if again < 1 else desired < fleet.target
        return (fleet.target if turned else desired), ratio

    def _stabilised(self, desired: int, target: int, now_ns: int) -> int:
        """The highest desire of the window, but never a rise that the present does not ask for."""
        if not self._desires:
            self._desires.append((now_ns, target))
        self._desires.append((now_ns, desired))
        while now_ns - self._desires[0][0] > self._settings.down_stabilisation_s * 1e9:
            self._desires.popleft()
        if desired >= target:
            return desired
        return min(target, max(n for _, n in self._desires))

    def _limited(self, desired: int, target: int, now_ns: int) -> int:
        while self._rises and now_ns - self._rises[0][0] >= self._settings.period_s * 1e9:
            self._rises.popleft()
        start = target - sum(n for _, n in self._rises)
        most = max(start + self._settings.up_pods, math.ceil(start * (1 + self._settings.up_share)))
        return min(desired, max(target, most))
