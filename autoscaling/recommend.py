"""Recommend: how many replicas the load needs within the objectives. Implements the control loop's ``Scaler``.

Two questions are asked at each tick, and the larger answer counts::

    load       ceil(share of the demand / headroom)                 share: autoscaling/capacity.py
    pressure   where every replica is full and more waits than can start within the TTFT objective (or TTFT is missed
               and prompts alone would meet it): as many more as work the queue off within :data:`CLEAR_S`, at least
               one, unless the replicas there are do that already

A replica is full when it is busy and requests wait in it or its batch is at its cap: one stream alone keeps an engine
busy, and a queue that sits on one of several replicas is the router's to cure.

More replicas than requests were open at once lately help nobody: the load's answer is bounded by that. Pressure asks
for nothing while replicas are pending (they are the answer to it, so a slow start never makes a fleet run away) and for
:data:`SETTLE_NS` after their number changed; but while it is there the number does not fall. Before any step model can
be trusted, load is open requests over ``inflight_target``.

What is measured is the load of now; a replica asked for now serves that of one start-up ahead. Where forecasts of it
(``demand_forecast.py``) have proved how wrong they are, their upper quantile is asked for as well (``Forecast``).

Going down is asked for only where the remaining replicas carry the load with headroom and a tolerance:
``share <= n * headroom * DOWN_TOLERANCE``; never when blind, partly blind, without a fresh gateway or without Serve's
own word. ``autoscaling/stabilise.py`` turns the asks of many ticks into a target.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from autoscaling.capacity import Capacities, Capacity, ceiling
from autoscaling.demand import Demand, DemandMeter
from autoscaling.demand_forecast import DemandForecast
from autoscaling.stabilise import Ask, Stabiliser
from autoscaling.zero import Rest, ZeroRule
from policies.config import PolicyConfig
from policies.control.joint import cold_start_ms
from policies.control.scaler import Ahead, ScaleAdvice
from policies.control.signals import ReplicaSignals, Signals
from policies.types import Reason, ReplicaState

DOWN_TOLERANCE = 0.8
"""Going down is asked for only with this much more room than going up: the two must not meet within noise."""

BUSY_SHARE_FULL = 0.95
"""Busy share from which an engine counts as saturated."""

SAMPLES_MIN = 5
"""Values of a latency histogram needed before its quantile counts."""

CLEAR_S = 120.0
"""A queue should be worked off within this time, beside what arrives meanwhile."""

FULL_SHARE_MIN = 0.8
"""Share of the replicas that must be full: with many, one is always between two requests."""

SLOPE_NS = 12_000_000_000
"""The queue's slope is taken over this time."""

SLOPE_SAMPLES_MAX = 512
"""Lengths of the queue kept for its slope."""

SETTLE_NS = 15_000_000_000
"""Pressure is not judged for this time after the number of replicas changed: older figures are in every window."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """What the queue says. ``replicas`` is 0 where it asks for nothing."""

    replicas: int
    reason: Reason
    startable: float | None
    """Requests that can start within the TTFT objective; half of ``inflight_target`` while that cannot be computed."""
    slope_ps: float | None
    """Growth of the queue per second."""
    full: bool = False
    """Everybody is full and requests wait for longer than they may: the number must not fall."""


_NO_PRESSURE = Pressure(0, Reason("NoPressure", "nothing waits for longer than it may"), None, None)


class ReplicaScaler:
    """Number of replicas of one model.

    Args:
        config: scaling bounds and pace, objectives, and the trust threshold of step models are read from it.
    """

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self._meter = DemandMeter()
        self._capacities = Capacities()
        self._forecast = DemandForecast(config.scaling) if config.scaling.forecast else None
        self._stabiliser = Stabiliser(config.scaling)
        self._zero = ZeroRule(config) if config.scaling.replicas_min == 0 else None
        self._queue: deque[tuple[int, int]] = deque(maxlen=SLOPE_SAMPLES_MAX)
        self._inflight: deque[tuple[int, int]] = deque(maxlen=SLOPE_SAMPLES_MAX)
        self._running: int | None = None
        self._changed_ns: int | None = None

    def reconfigure(self, config: PolicyConfig) -> None:
        """Steer by the objectives of ``config``; everything else in it is as before."""
        self._config = config

    def recommend(self, signals: Signals, now_ns: int) -> ScaleAdvice:
        """One tick; see the module."""
        demand = self._meter.measure(signals, now_ns)
        running = signals.fleet.replicas_running if signals.fleet else len(signals.fresh) + signals.unknown_replicas
        adopted = self._stabiliser.adopt(signals.fleet, running, now_ns)
        self._follow(signals, demand, running, now_ns)
        rest = self._zero.step(signals, self._stabiliser.target, now_ns) if self._zero is not None else None
        if rest is not None:
            return self._at_rest(rest, demand, running, now_ns)
        if signals.blind:
            blind = Reason("HeldBlind", "no gateway and no replica reports: the number stays")
            held = self._stabiliser.hold(blind, signals.fleet, now_ns)
            if held is None:
                return ScaleAdvice(None, Reason("Unknown", "nothing is known of the fleet yet"))
            return ScaleAdvice(held.target, held.reason, {"replicas_running": running}, held.stages, held.held)
        if self._stabiliser.target is None:
            return ScaleAdvice(None, Reason("Unknown", "no replica runs and Serve has not spoken yet"))
        samples_min = self._config.batching.samples_min
        objectives, ids = self._config.objectives, signals.serving_ids
        capacity = self._capacities.mean(signals.serving, demand, objectives, samples_min, ids)
        pending = max(0, self._stabiliser.target - running)
        pressure = self._pressure(signals, demand, capacity, running, pending, now_ns)
        ahead = self._look_ahead(demand, signals, now_ns)
        ask, share = self._ask(demand, capacity, pressure, running, ahead)
        result = self._stabiliser.step(ask, running, signals.fleet, _hold_down(signals), now_ns)
        stages = (adopted, *result.stages) if adopted else result.stages
        inputs = _inputs(signals, demand, capacity, pressure, share, running)
        inputs |= {"ask_up": ask.up, "ask_down": ask.down} | _ahead_inputs(ahead)
        return ScaleAdvice(result.target, result.reason, inputs, stages, result.held, ahead)

    def _at_rest(self, rest: Rest, demand: Demand, running: int, now_ns: int) -> ScaleAdvice:
        """No replica serves, or none is needed: the load says nothing of their number."""
        self._stabiliser.put(rest.replicas, now_ns)
        inputs: dict[str, float | int | str | None] = {
            "replicas_running": running,
            "queue": demand.queue,
            "inflight": demand.inflight,
            "start_s": rest.cold.start_s,
            "start_measured": int(rest.cold.measured),
        }
        return ScaleAdvice(rest.replicas, rest.reason, inputs, (rest.reason,), cold=rest.cold)

    def adopt(self, target: int, now_ns: int) -> None:
        """Another number stands than the one advised: only asks beyond it count from there."""
        self._stabiliser.overrule(target, now_ns)

    def _look_ahead(self, demand: Demand, signals: Signals, now_ns: int) -> Ahead | None:
        if self._forecast is None:
            return None
        self._forecast.measure(demand, signals, cold_start_ms(signals) / 1000, now_ns)
        return self._forecast.ahead()

    def _follow(self, signals: Signals, demand: Demand, running: int, now_ns: int) -> None:
        if self._running is not None and running != self._running:
            self._changed_ns = now_ns
            self._queue.clear()
        self._running = running
        if signals.queue is not None:
            self._queue.append((now_ns, signals.queue))
            self._inflight.append((now_ns, demand.inflight))
        for samples in (self._queue, self._inflight):
            while samples and now_ns - samples[0][0] > SLOPE_NS:
                samples.popleft()

    def _ask(
        self, demand: Demand, capacity: Capacity | None, pressure: Pressure, running: int, ahead: Ahead | None
    ) -> tuple[Ask, float | None]:
        headroom, target = self._config.scaling.headroom, self._config.scaling.inflight_target
        if capacity is None:
            share = None
            up = max(1, math.ceil(demand.inflight / target))
            down = max(1, math.ceil(demand.inflight / (target * DOWN_TOLERANCE)))
            text = f"{demand.inflight} open requests at {target} per replica"
            reason = Reason("InflightTarget", text)
        else:
            prefill_tps, decode_tps = demand.rates(backlog=any(n for _, n in self._queue))
            share = capacity.share(prefill_tps, decode_tps, demand.kv_tokens)
            up = max(1, ceiling(share / headroom))
            most = capacity.share(*demand.rates(backlog=False), demand.kv_tokens)
            down = max(1, ceiling(most / (headroom * DOWN_TOLERANCE)))
            text = f"the load fills {share:.2f} replicas, planned to {headroom:.0%}"
            reason = Reason("Demand", text)
            open_max = max((n for _, n in self._inflight), default=0)
            if up > max(1, open_max):
                up = max(1, open_max)
                reason = Reason("FewRequests", f"{text}, but only {open_max} requests were open at once")
            if ahead is not None and ahead.trusted:
                coming = capacity.share(ahead.prefill_tps, ahead.decode_tps, ahead.kv_tokens)
                needed = max(1, ceiling(coming / headroom))
                down = max(down, needed)
                if needed > up:
                    text = f"{coming:.2f} replicas will be full in {ahead.horizon_s:.0f} s ({ahead.by})"
                    up, reason = needed, Reason("Forecast", text)
        if pressure.replicas > up:
            up, reason = pressure.replicas, pressure.reason
        if pressure.full:
            down = max(down, running, self._stabiliser.target or 0)
        return Ask(up, max(up, down), reason), share

    def _pressure(
        self, signals: Signals, demand: Demand, capacity: Capacity | None, running: int, pending: int, now_ns: int
    ) -> Pressure:
        if not _all_full(signals, running):
            return _NO_PRESSURE
        rate = _requests_ps(demand, capacity)
        ttft_s = self._config.objectives.ttft_ms / 1000
        startable = running * (rate * ttft_s if rate is not None else self._config.scaling.inflight_target / 2)
        missed_ms = self._ttft_missed_ms(signals, demand, capacity)
        slope = self._slope_ps()
        if demand.queue <= startable and missed_ms is None:
            return Pressure(0, _NO_PRESSURE.reason, startable, slope)
        if pending or (self._changed_ns is not None and now_ns - self._changed_ns < SETTLE_NS):
            return Pressure(0, Reason("Settling", "new replicas are the answer: wait for them"), startable, slope, True)
        missing_ps = slope + max(0.0, demand.queue - startable) / CLEAR_S
        if missing_ps <= 0 and slope < 0:
            text = f"{demand.queue} wait, but the queue shrinks by {-slope:.2f} a second"
            return Pressure(0, Reason("QueueShrinks", text), startable, slope, True)
        more = max(1, ceiling(missing_ps / rate)) if rate is not None else 1
        if demand.queue > startable:
            text = f"all are full and {demand.queue} wait, {startable:.1f} can start within {ttft_s:g} s"
            return Pressure(running + more, Reason("QueuePressure", text), startable, slope, True)
        text = f"all are full and TTFT is {missed_ms:.0f} ms, objective {self._config.objectives.ttft_ms:.0f} ms"
        return Pressure(running + more, Reason("TtftMissed", text), startable, slope, True)

    def _ttft_missed_ms(self, signals: Signals, demand: Demand, capacity: Capacity | None) -> float | None:
        """TTFT at the quantile where it misses the objective and more replicas can cure that, else ``None``."""
        objectives = self._config.objectives
        if signals.traffic is None or signals.traffic.ttft.count < SAMPLES_MIN:
            return None
        value = signals.traffic.ttft.quantile_ms(objectives.quantile)
        if value is None or value <= objectives.ttft_ms:
            return None
        requests = signals.work.running + signals.work.waiting if signals.work else 0
        if requests <= len(signals.serving):
            return None
        prompt_ms = (demand.prompt_tokens_mean or 0.0) * (capacity.prefill_token_ms if capacity else 0.0)
        return value if prompt_ms < objectives.ttft_ms else None

    def _slope_ps(self) -> float:
        """Growth of the queue per second, from the means of its older and newer half; 0 while too little is known."""
        half = len(self._queue) // 2
        if half < 2:
            return 0.0
        values = list(self._queue)
        older, newer = values[:half], values[-half:]
        elapsed_s = (_mean_ns(newer) - _mean_ns(older)) / 1e9
        growth = sum(q for _, q in newer) / half - sum(q for _, q in older) / half
        return growth / elapsed_s if elapsed_s > 0 else 0.0


def _ahead_inputs(ahead: Ahead | None) -> dict[str, float | int | str | None]:
    if ahead is None:
        return {}
    return {
        "ahead_s": ahead.horizon_s,
        "ahead_prefill_tps": ahead.prefill_tps,
        "ahead_decode_tps": ahead.decode_tps,
        "ahead_kv_tokens": ahead.kv_tokens,
        "ahead_margin": ahead.margin,
        "ahead_trusted": int(ahead.trusted),
        "ahead_by": ahead.by,
    }


def _hold_down(signals: Signals) -> Reason | None:
    """Why the number of replicas must not fall at this tick, if it must not."""
    if signals.fleet is None:
        return Reason("HeldNoFleetView", "Serve has not said how many replicas run: the number does not fall")
    if signals.unknown_replicas:
        text = f"{signals.unknown_replicas} replicas run and say nothing, they may be full: the number does not fall"
        return Reason("HeldPartial", text)
    if signals.traffic is None:
        return Reason("HeldNoGateway", "no gateway reports, requests may be waiting there: the number does not fall")
    return None


def _all_full(signals: Signals, running: int) -> bool:
    """Whether the running replicas are full; one that says nothing counts as empty, a stuck one as full."""
    serving, fresh = signals.serving, signals.fresh
    stuck = [r for r in fresh if r.latest.state is ReplicaState.STUCK] if len(serving) < len(fresh) else []
    busy = [r for r in serving if (r.busy_share or 0.0) >= BUSY_SHARE_FULL]
    full = len(stuck) + sum([_is_full(r) for r in busy])
    return running > 0 and bool(serving) and full >= running * FULL_SHARE_MIN


def _is_full(busy: ReplicaSignals) -> bool:
    """Whether a busy replica has no place for one more."""
    latest = busy.latest
    return latest.waiting > 0 or latest.running >= (latest.knobs.running_seqs_max or latest.running_seqs_hard)


def _requests_ps(demand: Demand, capacity: Capacity | None) -> float | None:
    if capacity is None or demand.prompt_tokens_mean is None or demand.output_tokens_mean is None:
        return None
    return capacity.requests_ps(demand.prompt_tokens_mean, demand.output_tokens_mean)


def _mean_ns(samples: list[tuple[int, int]]) -> float:
    return sum(t for t, _ in samples) / len(samples)


def _inputs(
    signals: Signals,
    demand: Demand,
    capacity: Capacity | None,
    pressure: Pressure,
    share: float | None,
    running: int,
) -> dict[str, float | int | str | None]:
    return {
        "replicas_running": running,
        "replicas_reporting": len(signals.serving),
        "replicas_unknown": signals.unknown_replicas,
        "served_prefill_tps": demand.served_prefill_tps,
        "served_decode_tps": demand.served_decode_tps,
        "offered_prefill_tps": demand.offered_prefill_tps,
        "offered_decode_tps": demand.offered_decode_tps,
        "demand_kv_tokens": demand.kv_tokens,
        "demand_share": share,
        "queue": demand.queue,
        "inflight": demand.inflight,
        "capacity_batch": capacity.batch if capacity else None,
        "capacity_decode_token_ms": capacity.decode_token_ms if capacity else None,
        "capacity_prefill_token_ms": capacity.prefill_token_ms if capacity else None,
        "busy_share": signals.work.busy_share if signals.work else None,
        "startable_requests": pressure.startable,
        "queue_slope_ps": pressure.slope_ps,
        "pressure": pressure.reason.code,
    }
