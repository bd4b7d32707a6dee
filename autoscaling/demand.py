"""Demand: what the load asks for, in tokens, whoever serves it.

Served and offered rates differ while a queue grows (served is too low) and while one is worked off (served is too high:
the more replicas work it off, the more there seem to be needed)::

    served    prompt tokens computed per s                           tokens decoded per s
    offered   arrivals per s * mean uncached prompt tokens           arrivals per s * mean output tokens

:meth:`Demand.rates` takes the offered ones while requests wait, or waited a moment ago, else the larger of both.

Requests are counted in tokens because one long prompt is worth a hundred short ones. The two means (output tokens and
uncached prompt tokens of a request, KV tokens of a sequence) are averages with a half-life of :data:`HALF_LIFE_S`, so
that they outlive a quiet minute. Refused requests arrive and are demand, but count into neither mean.

This module knows nothing of replicas' capacity and decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.control.signals import Signals, Traffic

HALF_LIFE_S = 60.0
"""Half-life of the averages per request."""

REQUESTS_MIN = 3.0
"""Requests that must have ended before an average is believed."""

SEQUENCES_MIN = 1.0
"""Sequence-seconds observed before the KV average is believed."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What the load asks for now. ``None``: unknown."""

    served_prefill_tps: float
    """Uncached prompt tokens computed per second."""
    served_decode_tps: float
    """Output tokens made per second."""
    offered_prefill_tps: float | None
    offered_decode_tps: float | None
    kv_tokens: int
    """KV tokens held. Those of waiting requests are no demand: a queue grows for as long as a start takes, and the
    number of replicas would grow with it. What arrives counts as rates, the queue itself as pressure."""
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

    def rates(self, backlog: bool) -> tuple[float, float]:
        """Prefill and decode tokens per second the load asks for; ``backlog``: requests wait or waited a moment ago."""
        prefill, decode = self.offered_prefill_tps, self.offered_decode_tps
        if backlog and prefill is not None and decode is not None:
            return prefill, decode
        return max(prefill or 0.0, self.served_prefill_tps), max(decode or 0.0, self.served_decode_tps)


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

    def value(self) -> float | None:
        """The mean; ``None`` while too little was seen."""
        return self._sum / self._weight if self._weight >= self._weight_min else None


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
        prompt_mean, output_mean, kv_mean = self._prompt.value(), self._output.value(), self._kv.value()
        queue = signals.queue or 0
        return Demand(
            served_prefill_tps=work.prefill_tps if work else 0.0,
            served_decode_tps=work.decode_tps if work else 0.0,
            offered_prefill_tps=traffic.arrivals_ps * prompt_mean if traffic and prompt_mean is not None else None,
            offered_decode_tps=traffic.arrivals_ps * output_mean if traffic and output_mean is not None else None,
            kv_tokens=work.kv_tokens_used if work else 0,
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
            self._output.add(traffic.output_tps * elapsed_s, _served_ps(traffic) * elapsed_s, elapsed_s)
        if work is not None:
            self._cached.add(work.prefix_hit_tokens * elapsed_s, work.prefix_query_tokens * elapsed_s, elapsed_s)
            self._kv.add(work.kv_tokens_used * elapsed_s, work.running * elapsed_s, elapsed_s)
        if traffic is not None:
            uncached = traffic.routed_prompt_tps * (1 - (self._cached.value() or 0.0))
            self._prompt.add(uncached * elapsed_s, traffic.routed_ps * elapsed_s, elapsed_s)


def _served_ps(traffic: Traffic) -> float:
    """Requests per second that ended after a dispatch: without the refused, which arrive and are not routed."""
    refused_ps = max(0.0, traffic.arrivals_ps - traffic.routed_ps)
    return max(traffic.succeeded_ps, traffic.succeeded_ps + traffic.failed_ps - refused_ps)


def _inflight(signals: Signals) -> int:
    """Open requests: as gateways count them, else as replicas do."""
    if signals.traffic is not None:
        return signals.traffic.inflight
    return signals.work.running + signals.work.waiting if signals.work else 0
