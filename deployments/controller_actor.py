"""The Ray actor around :class:`deployments.controller.Controller`, one for each model, and how Serve is told of it.

Serve's controller process creates it and does not have this project on its path, so Serve carries this class there by
value: imports of the project wait until the actor runs in its own process, with the application's runtime environment.
Serve checks the actor's health by asking it anything and replaces it when its process is gone or does not answer; a
controller whose ticks keep failing therefore ends its process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import DeploymentActorConfig

    from autoscaling.share import Caps
    from deployments.control_desk import DecisionFilter, Refused
    from deployments.controller import Controller
    from deployments.settings import Settings
    from deployments.tenant_desk import TenantAnswer, TenantReport
    from policies.measures import StartReport
    from policies.steering import Override
    from policies.tasks import TaskShares, TaskUse
    from policies.types import GatewayReport, Plan, ReplicaReport

ACTOR_NAME = "controller"
"""Name of the deployment-scoped actor."""

OWNER_DEPLOYMENT = "Gateway"
"""Deployment it belongs to."""


class ControllerActor:
    """One controller process. Async, so that reports and ticks share one event loop and need no locks."""

    async def __init__(self, args: Mapping[str, Any]) -> None:  # type: ignore[misc]  # Ray awaits it
        import logging
        import os

        from deployments.collector import collect_rarely
        from deployments.controller import Controller
        from deployments.serve_internals import serve_logs_folder
        from deployments.settings import Settings
        from deployments.settings_models import file_part

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

        def end_process() -> None:
            logging.shutdown()
            os._exit(1)

        settings, folder = Settings.load(args), serve_logs_folder()
        found = {}
        for name in (settings.model.name, *settings.models):
            logs = folder if name not in settings.models or folder is None else f"{folder}/{file_part(name)}"
            found[name] = Controller(settings.of(name).to_args(), end_process, logs)
        self._take(found, settings.fleet.caps)
        for controller in found.values():
            controller.start()
        collect_rarely()

    def _take(self, controllers: Mapping[str, Controller], caps: Caps | None = None) -> None:
        self._models = controllers
        """The controller of each model, the first one first; that one has the tenants and tasks of all."""
        self._first = next(iter(controllers.values()))
        self._caps = caps

    def _of(self, model: str | None) -> Controller:
        """The controller of ``model``; ``None``: the first. Raises ``KeyError``."""
        return self._first if model is None else self._models[model]

    # --- reports; those about a model that is not served (any more) have no answer ------------------------------------

    async def report_replica(self, report: ReplicaReport) -> Plan | None:
        """See :meth:`deployments.controller.Controller.report_replica`."""
        controller = self._models.get(report.model)
        return None if controller is None else controller.report_replica(report)

    async def report_gateway(self, report: GatewayReport) -> Plan | None:
        """See :meth:`deployments.controller.Controller.report_gateway`."""
        controller = self._models.get(report.model)
        return None if controller is None else controller.report_gateway(report)

    async def report_start(self, report: StartReport) -> None:
        """See :meth:`deployments.controller.Controller.report_start`."""
        controller = self._models.get(report.model)
        if controller is not None:
            controller.report_start(report)

    async def fleet(self, view: Mapping[str, int], model: str) -> dict[str, Any] | None:
        """See :meth:`deployments.controller.Controller.fleet`; its maximum is its share of what all may hold."""
        controller = self._models.get(model)
        if controller is None:
            return None
        if self._caps is not None:
            from autoscaling.share import share

            most = share({name: each.claim() for name, each in self._models.items()}, self._caps)[model]
            view = {**view, "replicas_max": min(view["replicas_max"], most), "capped": most < view["replicas_max"]}
        return controller.fleet(view)

    async def exchange_tasks(self, gateway_id: str, epoch: str, seq: int, uses: list[TaskUse]) -> TaskShares:
        """See :meth:`deployments.controller.Controller.exchange_tasks`."""
        return self._first.exchange_tasks(gateway_id, epoch, seq, uses)

    async def report_tenants(self, report: TenantReport) -> TenantAnswer:
        """See :meth:`deployments.controller.Controller.report_tenants`."""
        return self._first.report_tenants(report)

    # --- what people ask of one model, or of all ----------------------------------------------------------------------

    async def state(self, model: str | None = None) -> dict[str, Any]:
        """See :meth:`deployments.controller.Controller.state`."""
        return self._of(model).state()

    async def overview(self, model: str | None = None) -> bytes:
        """See :meth:`deployments.controller.Controller.overview`."""
        return self._of(model).overview()

    async def state_at(self, tick: int, model: str | None = None) -> dict[str, Any] | None:
        """See :meth:`deployments.controller.Controller.state_at`."""
        return self._of(model).state_at(tick)

    async def tenants(self, model: str | None = None) -> dict[str, Any]:  # noqa: ARG002 - they are the application's
        """See :meth:`deployments.controller.Controller.tenants`."""
        return self._first.tenants()

    async def decisions(
        self, limit: int, since_seq: int | None, wanted: DecisionFilter, model: str | None = None
    ) -> list[dict[str, Any]]:
        """See :meth:`deployments.control_desk.ControlDesk.decisions`."""
        return self._of(model).desk.decisions(limit, since_seq, wanted)

    async def conditions(self, model: str | None = None) -> list[dict[str, Any]]:
        """See :meth:`deployments.control_desk.ControlDesk.conditions`."""
        return self._of(model).desk.conditions()

    async def overrides(self, model: str | None = None) -> list[dict[str, Any]]:
        """See :meth:`deployments.control_desk.ControlDesk.overrides`."""
        return self._of(model).desk.overrides()

    async def set_override(self, asked: Override, model: str | None = None) -> dict[str, Any] | Refused:
        """See :meth:`deployments.control_desk.ControlDesk.set_override`."""
        return self._of(model).desk.set_override(asked)

    async def drop_overrides(
        self, override_id: str | None, by: str, model: str | None = None
    ) -> list[dict[str, Any]] | Refused:
        """See :meth:`deployments.control_desk.ControlDesk.drop_overrides`."""
        return self._of(model).desk.drop_overrides(override_id, by)

    async def shadow(self, model: str | None = None) -> list[dict[str, Any]]:
        """See :meth:`deployments.control_desk.ControlDesk.shadow`."""
        return self._of(model).desk.shadow()

    async def set_shadow(
        self, shadow: bool, asked: Override, model: str | None = None
    ) -> list[dict[str, Any]] | Refused:
        """See :meth:`deployments.control_desk.ControlDesk.set_shadow`."""
        return self._of(model).desk.set_shadow(shadow, asked)

    async def objectives(self, model: str | None = None) -> Mapping[str, Any] | None:
        """See :attr:`deployments.control_desk.ControlDesk.objectives`."""
        return self._of(model).desk.objectives

    async def set_objectives(self, user_config: Mapping[str, Any], by: str, model: str | None = None) -> Refused | None:
        """See :meth:`deployments.control_desk.ControlDesk.set_objectives`."""
        return self._of(model).desk.set_objectives(user_config, by)

    async def metrics(self, model: str | None = None) -> str:  # noqa: ARG002 - Prometheus asks for all at once
        """Prometheus text format, of all models."""
        from deployments.telemetry import render

        return render({name: each.telemetry() for name, each in self._models.items()}).decode()

    async def ping(self) -> str:
        """The first controller's epoch."""
        return self._first.epoch


def controller_actor_config(settings: Settings) -> DeploymentActorConfig:
    """The controller as a deployment-scoped actor: Serve creates, watches and replaces it."""
    import ray
    from ray.serve.config import DeploymentActorConfig

    return DeploymentActorConfig(
        name=ACTOR_NAME,
        actor_class=ray.remote(ControllerActor),
        init_kwargs={"args": settings.to_args()},
        actor_options={"num_cpus": 0},
    )
