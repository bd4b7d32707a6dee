"""What the gateway answers itself: health, models, metrics, and what people ask of the controller."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from deployments import task_api
from deployments.auth import Principal
from deployments.clock import now_ns
from deployments.control_api import ControlApi
from deployments.core import GatewayCore
from deployments.endpoints import MODEL_PREFIX, REQUEST_PREFIX, TASK_PREFIX
from deployments.errors import GatewayError, model_not_found
from deployments.openapi import describe
from deployments.served import Served
from deployments.telemetry import CONTENT_TYPE, render


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole response."""

    body: bytes
    status: int = 200
    content_type: str = "application/json"


class OwnAnswers:
    """One method per own endpoint; :meth:`answer` picks it."""

    def __init__(self, served: Served, started_s: int | None = None) -> None:
        core = self._core = served.first
        self._served = served
        self._created_s = int(time.time()) if started_s is None else started_s
        self._description = describe(core.settings.model.name, core.settings.auth.required, list(served.cores)[1:])

    async def answer(self, path: str, query: bytes, tenant: str) -> Answer:
        """The answer to GET ``path`` by ``tenant``. Raises ``GatewayError``."""
        if path == "/health":
            return self.health()
        if path == "/metrics":
            return self.metrics()
        if path == "/openapi.json":
            return Answer(self._description)
        if path.startswith("/control/"):
            return await self._control_answer(path, query)
        if path.startswith(TASK_PREFIX):
            tasks = self._core.policies.flow_context.tasks
            return _json(await self._task(lambda: task_api.show(tasks, tenant, path, now_ns())))
        if path.startswith(MODEL_PREFIX):
            return _json(self.model(path[len(MODEL_PREFIX) :]))
        return _json(self.models())

    async def _control_answer(self, path: str, query: bytes) -> Answer:
        if path == "/control/tasks":
            return _json(task_api.summary(self._core.policies.flow_context.tasks, now_ns()))
        if path.startswith(REQUEST_PREFIX):
            return _json(self._core.recent.show(path[len(REQUEST_PREFIX) :]))
        model = self._served.asked(query)
        link = self._served.links[model]
        if path == "/control/state":
            state = await ControlApi(link).read(path, query)
            refused = self._served.cores[model].objectives.refused
            return _json({**state, "models": list(self._served.cores), "objectives_refused": refused})
        if path == "/control/metrics":
            return Answer((await link.ask("metrics")).encode(), content_type=CONTENT_TYPE)
        if path == "/control/overview":
            return Answer(await link.ask("overview"))
        if path == "/control/tenants":
            return _json(await link.ask("tenants"))
        return _json(await ControlApi(link).read(path, query))

    async def take(self, method: str, path: str, body: bytes, principal: Principal, query: bytes = b"") -> Answer:
        """The answer to POST and DELETE ``path``: a task's outcome, something set by hand. Raises ``GatewayError``."""
        if path.startswith("/control/"):
            control = ControlApi(self._served.links[self._served.asked(query)])
            return _json(await control.change(method, path, body, principal))
        tasks, tenant = self._core.policies.flow_context.tasks, principal.tenant
        return _json(await self._task(lambda: task_api.tell(tasks, tenant, path, body, now_ns())))

    async def _task(self, answer: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The answer, after asking the other gateways where this one does not know the task."""
        try:
            return answer()
        except GatewayError as error:
            if error.status != 404 or not self._core.policies.flow_context.tasks.shared:
                raise
        await self._served.links[self._core.settings.model.name].exchange_tasks()
        return answer()

    def health(self) -> Answer:
        """200 with an empty body when a replica is ready, as engines answer, or would be started; else 503.

        One of several models is enough: whoever takes this gateway out because of one takes the others away as well.
        """
        problems = [_unhealthy(core) for core in self._served.cores.values()]
        if problems[0] is not None and None not in problems:
            raise problems[0]
        return Answer(b"")

    def models(self) -> dict[str, Any]:
        """The list of models in the engine's own shape; known without a replica."""
        return {"object": "list", "data": [self._card(core) for core in self._served.cores.values()]}

    def model(self, name: str) -> dict[str, Any]:
        """One model. Raises ``GatewayError`` when it is not served."""
        core = self._served.cores.get(name)
        if core is None:
            raise model_not_found(name)
        return self._card(core)

    def metrics(self) -> Answer:
        """Prometheus text of this gateway; gauges are read now."""
        core, at_ns = self._core, now_ns()
        core.meter.tenants(core.policies.flow_context.admission.tenants)
        tasks, telemetry = core.policies.flow_context.tasks, core.meter.telemetry
        tasks.expire(at_ns)
        core.meter.tasks_ended(tasks.take_ended())
        telemetry["tidegate_open_tasks"].set(tasks.open_tasks)
        if core.tracing is not None:
            for result, spans in zip(("ok", "failed", "dropped"), core.tracing.take_counts(), strict=True):
                telemetry["tidegate_trace_spans_total"].inc(spans, result=result)
        for each in self._served.cores.values():
            _show(each, at_ns)
        page = render({name: each.meter.telemetry for name, each in self._served.cores.items()})
        return Answer(page, content_type=CONTENT_TYPE)

    def _card(self, core: GatewayCore) -> dict[str, Any]:
        model = core.settings.model
        permission = {
            "id": f"modelperm-{model.name}",
            "object": "model_permission",
            "created": self._created_s,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        return {
            "id": model.name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "vllm",
            "root": model.source,
            "parent": None,
            "max_model_len": model.known_context_tokens,
            "permission": [permission],
        }


def _unhealthy(core: GatewayCore) -> GatewayError | None:
    """Why one model can serve nobody; ``None``: it can."""
    admission, at_ns = core.policies.flow_context.admission, now_ns()
    why = admission.cannot_start(at_ns)
    if why is not None:
        return GatewayError(503, "server_error", "model_cannot_start", f"The model cannot start: {why}.", None, 1.0)
    if core.replicas_ready or admission.sleeps(at_ns):
        return None
    return GatewayError(503, "server_error", "no_replica", "No replica is ready.", None, 1.0)


def _show(core: GatewayCore, at_ns: int) -> None:
    """Set the gauges of one model."""
    core.meter.fold()
    age_ms = core.policies.plan_follower.age_ms(at_ns)
    telemetry = core.meter.telemetry
    telemetry["tidegate_inflight_requests"].set(len(core.drivers))
    telemetry["tidegate_queued_requests"].set(core.queued)
    telemetry["tidegate_plan_age_seconds"].set(None if age_ms is None else age_ms / 1_000)
    telemetry["tidegate_prefix_index_blocks"].set(len(core.policies.index))
    context = core.policies.flow_context
    telemetry["tidegate_queue_tokens"].set(context.admission.queue.tokens)
    telemetry["tidegate_serving_tokens_per_second"].set(context.admission.forecast.rate(at_ns))
    telemetry["tidegate_retry_budget_attempts"].set(context.budget.attempts_left)
    telemetry["tidegate_ejected_replicas"].set(len(context.health.blocked(at_ns)))
    telemetry["tidegate_quarantined_requests"].set(len(context.quarantine))
    core.meter.ejections(context.health.ejections())
    if core.recorder is not None:
        for result, lines in zip(("ok", "dropped"), core.recorder.take_counts(), strict=True):
            telemetry["tidegate_recording_lines_total"].inc(lines, result=result)


def _json(value: Any) -> Answer:
    return Answer(msgspec.json.encode(value))
