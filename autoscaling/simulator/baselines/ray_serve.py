"""Ray Serve's own autoscaling: ongoing requests per replica, with delays and factors.

Source: Ray 2.60, ``ray/serve/autoscaling_policy.py`` (``_core_replica_queue_length_policy``,
``_apply_scaling_factors``, ``_apply_delay_logic``), ``ray/serve/_private/autoscaling_state.py``
(``get_total_num_requests``) and the defaults of ``AutoscalingConfig`` in ``ray/serve/config.py``::

    desired = running * total_requests / (target_ongoing_requests * running)
    scaled  = ceil(running + factor * (desired - running))        factor: up or down, 1 by default
              one less where rounding up would hold a wish to go down

The target moves only when ``scaled`` was above it without a break for ``upscale_delay_s`` (30), or below it for
``downscale_delay_s`` (600). ``total_requests`` is the mean of requests queued and running over ``look_back_period_s``
(30); handles push their samples every ``push_interval_s`` (10), so what is decided on may be that old. Between two
pushes the last value is taken to hold.

``target_ongoing_requests`` is 2 by default. Ray Serve LLM raises it to 1e9, which never scales: its users set their
own. Without any report the total is 0, as in Ray, where stale handles are dropped.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from autoscaling.simulator.baselines.fleet_view import advice, bounded, fleet_state, open_requests, unknown
from policies.config import PolicyConfig
from policies.control.scaler import ScaleAdvice
from policies.control.signals import Signals


@dataclass(frozen=True, slots=True)
class RayServeSettings:
    """``AutoscalingConfig`` with its defaults."""

    target_ongoing_requests: float = 2.0
    look_back_period_s: float = 30.0
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    upscaling_factor: float = 1.0
    downscaling_factor: float = 1.0
    push_interval_s: float = 10.0
    """``RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S``."""


class RayServeScaler:
    """One deployment."""

    def __init__(self, config: PolicyConfig, settings: RayServeSettings | None = None) -> None:
        self._bounds = config.scaling
        self._settings = settings or RayServeSettings()
        self._recorded: deque[tuple[int, int]] = deque()
        self._pushed: list[tuple[int, int]] = []
        self._pushed_ns: int | None = None
        self._direction = 0
        self._since_ns = 0

    def recommend(self, signals: Signals, now_ns: int) -> ScaleAdvice:
        """One turn of Serve's control loop."""
        self._record(open_requests(signals) or 0, now_ns)
        fleet = fleet_state(signals)
        if fleet is None:
            return unknown()
        total = self._total_requests(now_ns)
        if fleet.running == 0:
            replicas = max(math.ceil(self._settings.upscaling_factor), fleet.target) if total else fleet.target
            return advice(bounded(replicas, self._bounds), "ColdStart", "no replica runs")
        scaled = self._scaled(total / self._settings.target_ongoing_requests, fleet.running)
        inputs = {"total_requests": total, "replicas_running": fleet.running, "replicas_scaled": scaled}
        replicas, code, text = self._delayed(scaled, fleet.target, now_ns)
        return advice(bounded(replicas, self._bounds), code, text, inputs)

    def _record(self, requests: int, now_ns: int) -> None:
        recorded, settings = self._recorded, self._settings
        recorded.append((now_ns, requests))
        while now_ns - recorded[0][0] > settings.look_back_period_s * 1e9:
            recorded.popleft()
        if self._pushed_ns is None or now_ns - self._pushed_ns >= settings.push_interval_s * 1e9:
            self._pushed, self._pushed_ns = list(recorded), now_ns

    def _total_requests(self, now_ns: int) -> float:
        """Time-weighted mean of what was pushed, its last value holding until now."""
        times = [t for t, _ in self._pushed] + [now_ns]
        weights = [after - before for before, after in pairwise(times)]
        span = sum(weights)
        if span <= 0:
            return float(self._pushed[-1][1])
        return math.fsum(w * n for w, (_, n) in zip(weights, self._pushed, strict=True)) / span

    def _scaled(self, desired: float, running: int) -> int:
        settings = self._settings
        delta = desired - running
        scaled = math.ceil(running + (settings.upscaling_factor if delta > 0 else settings.downscaling_factor) * delta)
        if math.ceil(desired) < running and scaled == running:
            scaled -= 1
        return max(0, scaled)

    def _delayed(self, scaled: int, target: int, now_ns: int) -> tuple[int, str, str]:
        """The target, moved where the same wish has lasted for its delay."""
        direction = (scaled > target) - (scaled < target)
        if direction == 0:
            self._direction = 0
            return target, "Steady", f"{target} is right"
        if direction != self._direction:
            self._direction, self._since_ns = direction, now_ns
        up = direction > 0
        delay_s = self._settings.upscale_delay_s if up else self._settings.downscale_delay_s
        waited_s = (now_ns - self._since_ns) / 1e9
        if waited_s < delay_s:
            return target, "Delayed", f"{scaled} wished for since {waited_s:.0f} of {delay_s:g} s"
        self._direction = 0
        wish = scaled if up else max(1, scaled)
        return wish, "Upscaled" if up else "Downscaled", f"{wish} wished for {delay_s:g} s"
