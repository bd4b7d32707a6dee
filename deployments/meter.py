"""Counts of one gateway: a window for the controller's report, and running totals for Prometheus.

Per chunk there is one ``add`` to a list of buckets; everything else happens once a request or once a window. Values
move from the open window into the totals when a report is built or Prometheus asks: nothing is counted twice or lost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from dashboards.catalogue import Source
from deployments.clock import now_ns
from deployments.telemetry import Telemetry
from policies.events import Finish, Outcome, Usage
from policies.types import LATENCY_BOUNDS_MS, GatewayReport, Histogram, ReplicaId, RouteChoice

_BOUNDS_NS = tuple(round(bound * 1e6) for bound in LATENCY_BOUNDS_MS)


class Buckets:
    """A histogram that is still being written. ``add`` takes nanoseconds."""

    __slots__ = ("_counts", "_sum_ns")

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS_NS) + 1)
        self._sum_ns = 0

    def add(self, ns: int) -> None:
        """Count one value, in ns."""
        self._counts[bisect_left(_BOUNDS_NS, ns)] += 1
        self._sum_ns += ns

    def take(self) -> Histogram:
        """What was counted since the last call, in ms; the counts start again at zero."""
        taken = Histogram(tuple(self._counts), self._sum_ns / 1e6)
        self._counts = [0] * (len(_BOUNDS_NS) + 1)
        self._sum_ns = 0
        return taken


@dataclass(slots=True)
class Window:
    """Everything counted since the last report."""

    started_ns: int
    ttft: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)
    e2e: Histogram = field(default_factory=Histogram)
    ttft_error: Histogram = field(default_factory=Histogram)
    arrivals: int = 0
    succeeded: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    routed: Counter[ReplicaId] = field(default_factory=Counter)
    predicted_prompt_tokens: Counter[ReplicaId] = field(default_factory=Counter)
    predicted_hit_tokens: Counter[ReplicaId] = field(default_factory=Counter)


class Meter:
    """See the module. Labels of its counters are bounded by the catalogue."""

    def __init__(self, gateway_id: str, model: str) -> None:
        self.telemetry = Telemetry(Source.GATEWAY)
        self.itl = Buckets()
        """Gaps between chunks of streams; written per chunk."""
        self._ttft_error = Buckets()
        self._ttft = Buckets()
        self._e2e = Buckets()
        self._gateway_id = gateway_id
        self._model = model
        self._seq = 0
        self._window = Window(now_ns())

    # --- one request --------------------------------------------------------------------------------------------------

    def arrived(self) -> None:
        """A valid request came in."""
        self._window.arrivals += 1

    def refused(self, endpoint: str, reason: str) -> None:
        """A request was refused before it reached the flow: not allowed, unknown, malformed."""
        self.telemetry["tidegate_requests_total"].inc(endpoint=endpoint, outcome="refused", reason=reason)

    def dispatched(self, choice: RouteChoice, replica_id: ReplicaId, prompt_tokens: int) -> None:
        """A request was sent to ``replica_id`` for the reasons of ``choice``."""
        window, hit = self._window, choice.predicted_hit_tokens.get(replica_id, 0)
        window.routed[replica_id] += 1
        window.predicted_prompt_tokens[replica_id] += prompt_tokens
        window.predicted_hit_tokens[replica_id] += hit
        self.telemetry["tidegate_routed_total"].inc(reason=choice.reason.code)
        self.telemetry["tidegate_predicted_hit_tokens_total"].inc(hit)

    def retried(self, why: str) -> None:
        """A request is sent again because of ``why``."""
        self.telemetry["tidegate_retries_total"].inc(reason=why)

    def first_byte(self, endpoint: str, ttft_ns: int, since_dispatch_ns: int, predicted_ms: float | None) -> None:
        """The first body byte of a successful stream."""
        self._ttft.add(ttft_ns)
        self.telemetry["tidegate_ttft_seconds"].observe(ttft_ns / 1e9, endpoint=endpoint)
        if predicted_ms is not None:
            error_ns = abs(since_dispatch_ns - round(predicted_ms * 1e6))
            self._ttft_error.add(error_ns)
            self.telemetry["tidegate_ttft_error_seconds"].observe(error_ns / 1e9)

    def ended(
        self, endpoint: str, finish: Finish, e2e_ns: int, usage: Usage, output_tokens: int, prompt_tokens: int
    ) -> None:
        """A request is over.

        ``output_tokens``: the engine's count, else one per event of its stream. ``prompt_tokens``: the estimate, used
        in the report where the engine did not say (streams carry usage only when asked).
        """
        window = self._window
        self.telemetry["tidegate_requests_total"].inc(
            endpoint=endpoint, outcome=finish.outcome.value, reason=finish.reason.code
        )
        if finish.outcome is Outcome.SUCCEEDED:
            window.succeeded += 1
            self._e2e.add(e2e_ns)
            self.telemetry["tidegate_e2e_seconds"].observe(e2e_ns / 1e9, endpoint=endpoint)
            window.prompt_tokens += prompt_tokens if usage.prompt_tokens is None else usage.prompt_tokens
        else:
            window.failed[finish.reason.code] += 1
            window.prompt_tokens += usage.prompt_tokens or 0
        window.output_tokens += output_tokens
        self.telemetry["tidegate_prompt_tokens_total"].inc(usage.prompt_tokens or 0)
        self.telemetry["tidegate_output_tokens_total"].inc(output_tokens)

    # --- one window ---------------------------------------------------------------------------------------------------

    def report(self, inflight: int, queued: int, plan_seq: int | None) -> GatewayReport:
        """Close the window and open the next."""
        self.fold()
        at_ns, window = now_ns(), self._window
        self._window = Window(at_ns)
        self._seq += 1
        return GatewayReport(
            gateway_id=self._gateway_id,
            model=self._model,
            seq=self._seq,
            window_ms=(at_ns - window.started_ns) / 1e6,
            ttft=window.ttft,
            itl=window.itl,
            e2e=window.e2e,
            arrivals=window.arrivals,
            succeeded=window.succeeded,
            failed=dict(window.failed),
            prompt_tokens=window.prompt_tokens,
            output_tokens=window.output_tokens,
            inflight=inflight,
            queued=queued,
            routed=dict(window.routed),
            predicted_prompt_tokens=dict(window.predicted_prompt_tokens),
            predicted_hit_tokens=dict(window.predicted_hit_tokens),
            ttft_error_ms=window.ttft_error,
            plan_seq=plan_seq,
        )

    def fold(self) -> None:
        """Move what was counted per value into the window; gaps between chunks also into the totals."""
        window = self._window
        itl = self.itl.take()
        if itl.count:
            self.telemetry["tidegate_itl_seconds"].add(itl)
            window.itl = window.itl.plus(itl)
        window.ttft = window.ttft.plus(self._ttft.take())
        window.e2e = window.e2e.plus(self._e2e.take())
        window.ttft_error = window.ttft_error.plus(self._ttft_error.take())
