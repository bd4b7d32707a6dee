"""Counts of one gateway for the controller's report, as ``deployments/meter.py`` makes them.

Differs from the live meter in one thing: gaps between chunks are not measured at the gateway, because there is no event
per token. The engines' own gaps are spread over the gateways instead, so that the sum over all gateways is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from policies.attainment import AttainmentMeter, Ending, ObjectivesOf
from policies.endings import is_demand
from policies.events import Finish, Outcome
from policies.histogram import Buckets
from policies.steering import Override
from policies.tasks import TaskEnd, TaskEnding
from policies.types import GatewayReport, ReplicaId, Request


class Meter:
    """See the module. ``models``: one report is made for each, they differ in the name alone."""

    def __init__(self, gateway_id: str, models: Sequence[str], objectives_of: ObjectivesOf) -> None:
        self._attainment = AttainmentMeter(objectives_of)
        self.itl = Buckets()
        self._ttft, self._e2e, self._ttft_error = Buckets(), Buckets(), Buckets()
        self._gateway_id = gateway_id
        self._models = models
        self._seq = 0
        self._started_ns = 0
        self._open_window()

    def _open_window(self) -> None:
        self._arrivals = self._retries = self._tasks_succeeded = self._tasks_failed = 0
        self._succeeded = self._prompt_tokens = self._output_tokens = 0
        self._failed: Counter[str] = Counter()
        self._routed: Counter[ReplicaId] = Counter()
        self._predicted_prompt_tokens: Counter[ReplicaId] = Counter()
        self._predicted_hit_tokens: Counter[ReplicaId] = Counter()

    def arrived(self, request: Request) -> None:
        """A request came in."""
        self._arrivals += 1
        self._attainment.arrived(request)

    def extra_attempt(self) -> None:
        """A retry, a hedge or the continuation of a stream begins."""
        self._retries += 1

    def tasks_ended(self, ends: Iterable[TaskEnd]) -> None:
        """Tasks are over."""
        for end in ends:
            self._tasks_succeeded += end.ending is TaskEnding.SUCCESS
            self._tasks_failed += end.ending in {TaskEnding.FAILURE, TaskEnding.STOPPED}

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

    def ended(
        self, request: Request, finish: Finish, now_ns: int, first_byte_ns: int | None, output_tokens: int
    ) -> None:
        """A request is over."""
        prompt_tokens = 0
        if finish.outcome is Outcome.SUCCEEDED:
            self._succeeded += 1
            self._e2e.add(now_ns - request.arrival_ns)
            prompt_tokens = request.prompt_tokens
            self._prompt_tokens += prompt_tokens
        else:
            self._arrivals -= not is_demand(finish.outcome, finish.reason.code)
            self._failed[finish.reason.code] += 1
        self._output_tokens += output_tokens
        ending = Ending(finish.outcome, finish.reason.code, now_ns, first_byte_ns, prompt_tokens, output_tokens)
        self._attainment.ended(request, ending)

    def reports(
        self,
        now_ns: int,
        inflight: int,
        queued: int,
        plan_seq: int | None,
        ejected: Mapping[ReplicaId, str],
        overrides: tuple[Override, ...],
        tasks_open: int,
    ) -> list[GatewayReport]:
        """Close the window and open the next."""
        self._seq += 1
        attained = self._attainment.take()
        report = GatewayReport(
            gateway_id=self._gateway_id,
            model=self._models[0],
            seq=self._seq,
            window_ms=(now_ns - self._started_ns) / 1e6,
            ttft=self._ttft.take(),
            itl=self.itl.take(),
            e2e=self._e2e.take(),
            arrivals=max(0, self._arrivals),
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
            met=attained.met,
            retries=self._retries,
            repeats=attained.repeats,
            tasks_succeeded=self._tasks_succeeded,
            tasks_failed=self._tasks_failed,
            tasks_open=tasks_open,
            by_class=attained.by_class,
            by_tenant=attained.by_tenant,
            ejected=ejected,
            overrides=overrides,
        )
        self._started_ns = now_ns
        self._open_window()
        return [report if model == report.model else replace(report, model=model) for model in self._models]
