"""Demand: what the load asks for, in tokens, whoever serves it.

Served rates fall behind when replicas are full, so demand is the larger of what is served and what is offered::

    prefill_tps = max(prompt tokens computed per s,  prompt tokens arriving per s * (1 - cached share))
    decode_tps  = max(tokens decoded per s,          arrivals per s * mean output tokens of a request)

Requests are counted in tokens because one long prompt is worth a hundred short ones. The two means (output tokens and
uncached prompt tokens of a request, KV tokens of a sequence) are averages with a half-life of :data:`HALF_LIFE_S`, so
that they outlive a quiet minute. The mean output counts half of the requests in flight as ended, because part of the
output belongs to those.

This module knows nothing of replicas' capacity and decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.control.signals import Signals

HALF_LIFE_S = 60.0
"""Half-life of the averages per request."""

REQUESTS_MIN = 3.0
"""Requests that must have ended before an average is believed."""

SEQUENCES_MIN = 1.0
"""Sequence-seconds observed before the KV average is believed."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What the load asks for now. ``None``: unknown."""

    prefill_tps: float
    """Uncached prompt tokens per second."""
    decode_tps: float
    """Output tokens per second."""
    kv_tokens: int
    """KV tokens held, with those that waiting requests will need."""
    queue: int
    """Requests waiting in engines and gateways."""
    inflight: int
    """Requests open, waiting ones included."""
    arrivals_ps: float | None
    output_tokens_mean: float | None
    """Per request."""
    prompt_tokens_mean: float | None
    """Uncached, per request."""
    kv_tokens_mean: float | None
    """Per running sequence."""


class _Mean:
    """Ratio of two sums that fade with :data:`HALF_LIFE_S`."""

    def __init__(self, weight_min: float) -> None:
        self._weight_min = weight_min
        self._sum = 0.0
        self._weight = 0.0

    def add(self, total: float, weight: float, elapsed_s: float) -> None:
        keep = 0.5 ** (elapsed_s / HALF_LIFE_S)
        self._sum = self._sum * keep + total
        self._weight = self._weight * keep + weight

    def value(self, more_weight: float = 0.0) -> float | None:
        """The mean; ``None`` while too little was seen."""
        if self._weight < self._weight_min:
            return None
        return self._sum / (self._weight + more_weight)


class DemandMeter:
    """Follows demand from tick to tick."""

    def __init__(self) -> None:
        self._last_ns: int | None = None
        self._output = _Mean(REQUESTS_MIN)
        self._prompt = _Mean(REQUESTS_MIN)
        self._cached = _Mean(1.0)
        self._kv = _Mean(SEQUENCES_MIN)

    def measure(self, signals: Signals, now_ns: int) -> Demand:
        """Demand at this tick; zero where nothing is fresh (the caller holds when blind)."""
        elapsed_s = 0.0 if self._last_ns is None else max(0.0, (now_ns - self._last_ns) / 1e9)
        self._last_ns = now_ns
        self._learn(signals, elapsed_s)
        traffic, work = signals.traffic, signals.work
        prompt_mean, output_mean, kv_mean = self._prompt.value(), self._output_mean(signals), self._kv.value()
        cached = self._cached.value() or 0.0
        offered_prefill = traffic.prompt_tps * (1 - cached) if traffic else 0.0
        offered_decode = traffic.arrivals_ps * output_mean if traffic and output_mean is not None else 0.0
        queue = signals.queue or 0
        waiting_kv = (work.waiting if work else 0) * (prompt_mean or 0.0)
        return Demand(
            prefill_tps=max(work.prefill_tps if work else 0.0, offered_prefill),
            decode_tps=max(work.decode_tps if work else 0.0, offered_decode),
            kv_tokens=int((work.kv_tokens_used if work else 0) + waiting_kv),
            queue=queue,
            inflight=_inflight(signals),
            arrivals_ps=traffic.arrivals_ps if traffic else None,
            output_tokens_mean=output_mean,
            prompt_tokens_mean=prompt_mean,
            kv_tokens_mean=kv_mean,
        )

    def _learn(self, signals: Signals, elapsed_s: float) -> None:
        traffic, work = signals.traffic, signals.work
        if traffic is not None:
            self._output.add(traffic.output_tps * elapsed_s, traffic.succeeded_ps * elapsed_s, elapsed_s)
        if work is not None:
            self._cached.add(work.prefix_hit_tokens * elapsed_s, work.prefix_query_tokens * elapsed_s, elapsed_s)
            self._kv.add(work.kv_tokens_used * elapsed_s, work.running * elapsed_s, elapsed_s)
        if traffic is not None:
            uncached = traffic.prompt_tps * (1 - (self._cached.value() or 0.0))
            self._prompt.add(uncached * elapsed_s, traffic.arrivals_ps * elapsed_s, elapsed_s)

    def _output_mean(self, signals: Signals) -> float | None:
        return self._output.value(more_weight=signals.traffic.inflight / 2 if signals.traffic else 0.0)


def _inflight(signals: Signals) -> int:
    """Open requests: as gateways count them, else as replicas do."""
    if signals.traffic is not None:
        return signals.traffic.inflight
    return signals.work.running + signals.work.waiting if signals.work else 0
