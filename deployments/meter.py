"""Counts of one gateway: a window for the controller's report, and running totals for Prometheus.

Per chunk there is one ``add`` to a list of buckets; everything else happens once a request or once a window. Values
move from the open window into the totals when a report is built or Prometheus asks: nothing is counted twice or lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dashboards.catalogue import Source
from deployments.clock import now_ns
from deployments.telemetry import Telemetry
from deployments.tenant_link import TenantMeter
from policies.admission.tenants import TenantBook
from policies.attainment import AttainmentMeter, Ending, ObjectivesOf
from policies.config import ObjectivesConfig
from policies.control.burn import judged
from policies.endings import is_demand
from policies.events import Finish, Outcome, RefusalKind, Usage
from policies.histogram import Buckets
from policies.measures import ClassCounts
from policies.steering import Override
from policies.tasks import TaskEnd, TaskEnding
from policies.types import GatewayReport, Histogram, Priority, ReplicaId, Request, RouteChoice

_DEFAULT_OBJECTIVES = ObjectivesConfig()


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
    retries: int = 0
    tasks_succeeded: int = 0
    tasks_failed: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    routed: Counter[ReplicaId] = field(default_factory=Counter)
    predicted_prompt_tokens: Counter[ReplicaId] = field(default_factory=Counter)
    predicted_hit_tokens: Counter[ReplicaId] = field(default_factory=Counter)


class Meter:
    """See the module. Labels of its counters are bounded by the catalogue.

    ``objectives_of`` gives the objectives of a class as they are now.
    """

    def __init__(
        self, gateway_id: str, model: str, objectives_of: ObjectivesOf = lambda _priority: _DEFAULT_OBJECTIVES
    ) -> None:
        self.telemetry = Telemetry(Source.GATEWAY)
        self.itl = Buckets()
        """Gaps between chunks of streams; written per chunk."""
        self._ttft_error = Buckets()
        self._ttft = Buckets()
        self._e2e = Buckets()
        self.gateway_id = gateway_id
        self._tenants = TenantMeter()
        self._attainment = AttainmentMeter(objectives_of)
        self._model = model
        self._seq = 0
        self._ejections: dict[str, int] = {}
        self._window = Window(now_ns())

    # --- one request --------------------------------------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        """A valid request came in."""
        self._window.arrivals += 1
        self._attainment.arrived(request)

    def ended_early(self, endpoint: str, outcome: Outcome, reason: str) -> None:
        """A request ended before it reached the flow: not allowed, malformed, or its client left while sending it."""
        self.telemetry["tidegate_requests_total"].inc(endpoint=endpoint, outcome=outcome.value, reason=reason)

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
        self._window.retries += why != RefusalKind.DRAINING
        self.telemetry["tidegate_retries_total"].inc(reason=why)

    def first_byte(self, endpoint: str, ttft_ns: int, since_dispatch_ns: int, predicted_ms: float | None) -> None:
        """The first body byte of a successful stream."""
        self._ttft.add(ttft_ns)
        self.telemetry["tidegate_ttft_seconds"].observe(ttft_ns / 1e9, endpoint=endpoint)
        if predicted_ms is not None:
            error_ns = abs(since_dispatch_ns - round(predicted_ms * 1e6))
            self._ttft_error.add(error_ns)
            self.telemetry["tidegate_ttft_error_seconds"].observe(error_ns / 1e9)

    def ejections(self, counts: Mapping[str, int]) -> None:
        """Replicas left alone since the start, by code."""
        for code, count in counts.items():
            self.telemetry["tidegate_ejections_total"].inc(count - self._ejections.get(code, 0), reason=code)
        self._ejections = dict(counts)

    def split_as(self, code: str) -> None:
        """Whether a request was split over two replicas, or why not (``policies.split.SplitCode``)."""
        self.telemetry["tidegate_disaggregation_total"].inc(reason=code)

    def prefilled(self, took_ns: int) -> None:
        """A prefill replica computed a prompt for another replica."""
        self.telemetry["tidegate_prefill_leg_seconds"].observe(took_ns / 1e9)

    def hedged(self) -> None:
        """A second attempt begins beside a first one."""
        self._window.retries += 1

    def extra_attempts(self, hedged: bool, resumes: int) -> None:
        """A request ended that had these."""
        if hedged:
            self.telemetry["tidegate_hedges_total"].inc()
        if resumes:
            self.telemetry["tidegate_resumes_total"].inc(resumes)

    def split(self, queue_ns: int, route_ns: int, engine_ns: int, priority: Priority) -> None:
        """Where the TTFT of a stream went: the three parts of ``deployments/request_log.py``."""
        self.telemetry["tidegate_queue_seconds"].observe(queue_ns / 1e9, priority=priority.value)
        self.telemetry["tidegate_route_seconds"].observe(route_ns / 1e9)
        self.telemetry["tidegate_engine_ttft_seconds"].observe(engine_ns / 1e9)

    def ended(
        self,
        request: Request,
        finish: Finish,
        usage: Usage,
        output_tokens: int,
        *,
        ended_ns: int,
        first_byte_ns: int | None,
    ) -> bool:
        """A request that arrived is over; whether it kept the promises of its class.

        ``output_tokens``: the engine's count, else one per event of its stream. The estimate of prompt tokens is used
        in the report where the engine did not say (streams carry usage only when asked).
        """
        window, outcome, code, endpoint = self._window, finish.outcome, finish.reason.code, request.endpoint
        self.telemetry["tidegate_requests_total"].inc(endpoint=endpoint, outcome=outcome.value, reason=code)
        if outcome is Outcome.SUCCEEDED:
            window.succeeded += 1
            self._e2e.add(ended_ns - request.arrival_ns)
            self.telemetry["tidegate_e2e_seconds"].observe((ended_ns - request.arrival_ns) / 1e9, endpoint=endpoint)
            prompt_tokens = request.prompt_tokens if usage.prompt_tokens is None else usage.prompt_tokens
        else:
            window.arrivals -= not is_demand(outcome, code)
            window.failed[code] += 1
            prompt_tokens = usage.prompt_tokens or 0
        window.prompt_tokens += prompt_tokens
        window.output_tokens += output_tokens
        self.telemetry["tidegate_prompt_tokens_total"].inc(usage.prompt_tokens or 0)
        self.telemetry["tidegate_output_tokens_total"].inc(output_tokens)
        ending = Ending(outcome, code, ended_ns, first_byte_ns, prompt_tokens, output_tokens)
        met = self._attainment.ended(request, ending)
        if met:
            self.telemetry["tidegate_met_requests_total"].inc(priority=request.priority.value)
        return met

    def tasks_ended(self, ends: Iterable[TaskEnd]) -> None:
        """Tasks are over."""
        for end in ends:
            self._window.tasks_succeeded += end.ending is TaskEnding.SUCCESS
            self._window.tasks_failed += end.ending in {TaskEnding.FAILURE, TaskEnding.STOPPED}
            ending = end.ending.value
            self.telemetry["tidegate_tasks_total"].inc(ending=ending)
            self.telemetry["tidegate_task_e2e_seconds"].observe(end.e2e_ms / 1e3, ending=ending)
            self.telemetry["tidegate_task_calls"].observe(end.calls, ending=ending)
            self.telemetry["tidegate_task_tokens"].observe(end.tokens, ending=ending)
            self.telemetry["tidegate_task_cost_usd"].observe(end.usd, ending=ending)

    def tenants(self, book: TenantBook) -> None:
        """Count what tenants used since the last call."""
        self._tenants.count(self.telemetry, book)

    # --- one window ---------------------------------------------------------------------------------------------------

    def report(
        self,
        inflight: int,
        queued: int,
        plan_seq: int | None,
        ejected: Mapping[ReplicaId, str] | None = None,
        overrides: tuple[Override, ...] = (),
        tasks_open: int = 0,
    ) -> GatewayReport:
        """Close the window and open the next."""
        self.fold()
        at_ns, window, attained = now_ns(), self._window, self._attainment.take()
        self._judged(attained.by_class)
        self._window = Window(at_ns)
        self._seq += 1
        return GatewayReport(
            gateway_id=self.gateway_id,
            model=self._model,
            seq=self._seq,
            window_ms=(at_ns - window.started_ns) / 1e6,
            ttft=window.ttft,
            itl=window.itl,
            e2e=window.e2e,
            arrivals=max(0, window.arrivals),
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
            met=attained.met,
            retries=window.retries,
            repeats=attained.repeats,
            tasks_succeeded=window.tasks_succeeded,
            tasks_failed=window.tasks_failed,
            tasks_open=tasks_open,
            by_class=attained.by_class,
            by_tenant=attained.by_tenant,
            ejected=ejected or {},
            overrides=overrides,
        )

    def _judged(self, by_class: Mapping[str, ClassCounts]) -> None:
        """Count promises that were judged and broken, for the burn of error budgets over hours and days."""
        for priority, counts in by_class.items():
            for objective, (missed, counted) in judged(counts).items():
                labels = {"priority": priority, "objective": objective}
                self.telemetry["tidegate_objective_requests_total"].inc(counted, **labels)
                self.telemetry["tidegate_objective_missed_total"].inc(missed, **labels)

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
