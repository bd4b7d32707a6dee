"""Knative's pod autoscaler (KPA): concurrency over a stable and a panic window.

Source: knative.dev, "Additional autoscaling configuration for Knative Pod Autoscaler", the ConfigMap
``config-autoscaler``, and ``pkg/autoscaler/scaling/autoscaler.go`` of Knative Serving 1.x, with its defaults. Every
``tick_s`` (2), with ``target`` = ``concurrency`` (100) times ``utilisation_share`` (70 %)::

    stable, panic = ceil(mean concurrency over 60 s / target), ceil(the same over the last 10 % of it / target)
    each within floor(ready / max_scale_down_rate (2)) .. ceil(max_scale_up_rate (1000) * ready)
    panic mode begins, or goes on, while the unlimited panic number is at least 200 % of the ready pods,
               and ends one stable window after it last was
    in panic mode the number never falls: the largest of stable, panic and what panic mode asked for before
    else stable

``scale_down_delay_s`` (0): the highest answer of that time. A KPA that finds more than one pod starts in panic mode, so
that a restart does not scale down. Concurrency is what the queue proxies count: requests open at the pods and waiting
for one. Scale to zero is not modelled: the bounds keep one replica at least.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from autoscaling.simulator.baselines.fleet_view import advice, bounded, fleet_state, open_requests, unknown
from policies.config import PolicyConfig
from policies.control.scaler import ScaleAdvice
from policies.control.signals import Signals


@dataclass(frozen=True, slots=True)
class KpaSettings:
    """``config-autoscaler`` with its defaults."""

    concurrency: float = 100.0
    """``container-concurrency-target-default``."""
    utilisation_share: float = 0.7
    stable_window_s: float = 60.0
    panic_window_share: float = 0.1
    panic_threshold_share: float = 2.0
    max_scale_up_rate: float = 1_000.0
    max_scale_down_rate: float = 2.0
    scale_down_delay_s: float = 0.0
    tick_s: float = 2.0


class KpaScaler:
    """One revision."""

    def __init__(self, config: PolicyConfig, settings: KpaSettings | None = None) -> None:
        self._bounds = config.scaling
        self._settings = settings or KpaSettings()
        self._samples: deque[tuple[int, int]] = deque()
        self._answers: deque[tuple[int, int]] = deque()
        self._ticked_ns: int | None = None
        self._last: ScaleAdvice | None = None
        self._panic_ns: int | None = None
        self._panic_pods = 0

    def recommend(self, signals: Signals, now_ns: int) -> ScaleAdvice:
        """The last answer until the next tick."""
        requests = open_requests(signals)
        if requests is not None:
            self._samples.append((now_ns, requests))
        while self._samples and now_ns - self._samples[0][0] >= self._settings.stable_window_s * 1e9:
            self._samples.popleft()
        ticked_ns, last = self._ticked_ns, self._last
        if ticked_ns is not None and last is not None and now_ns - ticked_ns < self._settings.tick_s * 1e9:
            return last
        fleet = fleet_state(signals)
        if fleet is None:
            return unknown()
        if not self._samples:
            return advice(fleet.target, "NoMetrics", "no pod reports: the number stays")
        if self._ticked_ns is None and fleet.running > 1:
            self._panic_ns, self._panic_pods = now_ns, fleet.running
        self._ticked_ns = now_ns
        self._last = self._tick(max(1, fleet.running), now_ns)
        return self._last

    def _tick(self, ready: int, now_ns: int) -> ScaleAdvice:
        settings = self._settings
        target = settings.concurrency * settings.utilisation_share
        stable_mean = self._mean(settings.stable_window_s, now_ns)
        panic_mean = self._mean(settings.stable_window_s * settings.panic_window_share, now_ns)
        asked = math.ceil(panic_mean / target)
        stable, panic = self._rated(math.ceil(stable_mean / target), ready), self._rated(asked, ready)
        self._follow_panic(asked / ready >= settings.panic_threshold_share, now_ns)
        code, wanted = "Stable", stable
        if self._panic_ns is not None:
            self._panic_pods = wanted = max(stable, panic, self._panic_pods)
            code = "Panic"
        wanted = self._delayed(wanted, now_ns)
        text = f"{stable_mean:.1f} requests open over the stable window, {panic_mean:.1f} over the panic window"
        inputs = {"stable_requests": stable_mean, "panic_requests": panic_mean, "replicas_running": ready}
        return advice(bounded(wanted, self._bounds), code, text, inputs)

    def _mean(self, window_s: float, now_ns: int) -> float:
        inside = [n for t, n in self._samples if now_ns - t < window_s * 1e9]
        return sum(inside) / len(inside) if inside else float(self._samples[-1][1])

    def _rated(self, replicas: int, ready: int) -> int:
        least = math.floor(ready / self._settings.max_scale_down_rate)
        return min(max(replicas, least), math.ceil(self._settings.max_scale_up_rate * ready))

    def _follow_panic(self, over: bool, now_ns: int) -> None:
        if over:
            self._panic_ns = now_ns
        elif self._panic_ns is not None and now_ns - self._panic_ns > self._settings.stable_window_s * 1e9:
            self._panic_ns, self._panic_pods = None, 0

    def _delayed(self, wanted: int, now_ns: int) -> int:
        self._answers.append((now_ns, wanted))
        while now_ns - self._answers[0][0] > self._settings.scale_down_delay_s * 1e9:
            self._answers.popleft()
        return max(n for _, n in self._answers)
