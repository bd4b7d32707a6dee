"""Counts of one gateway for the controller's report, as ``deployments/meter.py`` makes them.

Differs from the live meter in one thing: gaps between chunks are not measured at the gateway, because there is no event
per token. The engines' own gaps are spread over the gateways instead, so that the sum over all gateways is right.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from operator import add

from policies.events import Finish, Outcome
from policies.types import LATENCY_BOUNDS_MS, GatewayReport, Histogram, ReplicaId

_BOUNDS_NS = tuple(round(bound * 1e6) for bound in LATENCY_BOUNDS_MS)
_EMPTY = Histogram()


class Buckets:
    """A histogram that is still being written; ``add`` takes ns."""

    __slots__ = ("_counts", "_sum_ns")

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS_NS) + 1)
        self._sum_ns = 0

    def add(self, ns: int) -> None:
        """Count one value."""
        self._counts[bisect_left(_BOUNDS_NS, ns)] += 1
        self._sum_ns += ns

    def plus(self, histogram: Histogram) -> None:
        """Count a whole histogram."""
        self._counts = list(map(add, self._counts, histogram.counts))
        self._sum_ns += round(histogram.sum_ms * 1e6)

    def take(self) -> Histogram:
        """What was counted since the last call."""
        if not any(self._counts):
            return _EMPTY
        taken = Histogram(tuple(self._counts), self._sum_ns / 1e6)
        self._counts = [0] * (len(_BOUNDS_NS) + 1)
        self._sum_ns = 0
        return taken


class Meter:
    """See the module. ``models``: one report is made for each, they differ in the name alone."""

    def __init__(self, gateway_id: str, models: Sequence[str]) -> None:
        self.arrivals = 0
        self.itl = Buckets()
        self._ttft, self._e2e, self._ttft_error = Buckets(), Buckets(), Buckets()
        self._gateway_id = gateway_id
        self._models = models
        self._seq = 0
        self._started_ns = 0
        self._open_window()

    def _open_window(self) -> None:
        self.arrivals = 0
        self._succeeded = self._prompt_tokens = self._output_tokens = 0
        self._failed: Counter[str] = Counter()
        self._routed: Counter[ReplicaId] = Counter()
        self._predicted_prompt_tokens: Counter[ReplicaId] = Counter()
        self._predicted_hit_tokens: Counter[ReplicaId] = Counter()

    def dispatched(self, replica_id: ReplicaId, prompt_tokens: int, hit_tokens: int) -> None:
        """A request was sent to ``replica_id``, believed to hold ``hit_tokens`` of its prompt."""
        self._routed[replica_id] += 1
        self._predicted_prompt_tokens[replica_id] += prompt_tokens
        self._predicted_hit_tokens[replica_id] += hit_tokens

    def first_byte(self, ttft_ns: int, since_dispatch_ns: int, predicted_ms: float | None) -> None:
        """The first body byte of a stream."""
        self._ttft.add(ttft_ns)
        if predicted_ms is not None:
            self._ttft_error.add(abs(since_dispatch_ns - round(predicted_ms * 1e6)))

    def ended(self, finish: Finish, e2e_ns: int, output_tokens: int, prompt_tokens: int) -> None:
        """A request is over."""
        if finish.outcome is Outcome.SUCCEEDED:
            self._succeeded += 1
            self._e2e.add(e2e_ns)
            self._prompt_tokens += prompt_tokens
        else:
            self._failed[finish.reason.code] += 1
        self._output_tokens += output_tokens

    def reports(self, now_ns: int, inflight: int, queued: int, plan_seq: int | None) -> list[GatewayReport]:
        """Close the window and open the next."""
        self._seq += 1
        report = GatewayReport(
            gateway_id=self._gateway_id,
            model=self._models[0],
            seq=self._seq,
            window_ms=(now_ns - self._started_ns) / 1e6,
            ttft=self._ttft.take(),
            itl=self.itl.take(),
            e2e=self._e2e.take(),
            arrivals=self.arrivals,
            succeeded=self._succeeded,
            failed=dict(self._failed),
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            inflight=inflight,
            queued=queued,
            routed=dict(self._routed),
            predicted_prompt_tokens=dict(self._predicted_prompt_tokens),
            predicted_hit_tokens=dict(self._predicted_hit_tokens),
            ttft_error_ms=self._ttft_error.take(),
            plan_seq=plan_seq,
        )
        self._started_ns = now_ns
        self._open_window()
        return [report if model == report.model else replace(report, model=model) for model in self._models]
