"""The Ray actor around :class:`deployments.controller.Controller`: its shell, and how Serve is told of it.

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

    from deployments.control_desk import DecisionFilter, Refused
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

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

        def end_process() -> None:
            logging.shutdown()
            os._exit(1)

        self._controller = Controller(args, end_process, serve_logs_folder())
        self._controller.start()
        collect_rarely()

    async def report_replica(self, report: ReplicaReport) -> Plan | None:
        """See :meth:`deployments.controller.Controller.report_replica`."""
        return self._controller.report_replica(report)

    async def report_gateway(self, report: GatewayReport) -> Plan | None:
        """See :meth:`deployments.controller.Controller.report_gateway`."""
        return self._controller.report_gateway(report)

    async def report_start(self, report: StartReport) -> None:
        """See :meth:`deployments.controller.Controller.report_start`."""
        self._controller.report_start(report)

    async def exchange_tasks(self, gateway_id: str, epoch: str, seq: int, uses: list[TaskUse]) -> TaskShares:
        """See :meth:`deployments.controller.Controller.exchange_tasks`."""
        return self._controller.exchange_tasks(gateway_id, epoch, seq, uses)

    async def report_tenants(self, report: TenantReport) -> TenantAnswer:
        """See :meth:`deployments.controller.Controller.report_tenants`."""
        return self._controller.report_tenants(report)

    async def fleet(self, view: Mapping[str, int]) -> dict[str, Any] | None:
        """See :meth:`deployments.controller.Controller.fleet`."""
        return self._controller.fleet(view)

    async def state(self) -> dict[str, Any]:
        """See :meth:`deployments.controller.Controller.state`."""
        return self._controller.state()

    async def overview(self) -> bytes:
        """See :meth:`deployments.controller.Controller.overview`."""
        return self._controller.overview()

    async def state_at(self, tick: int) -> dict[str, Any] | None:
        """See :meth:`deployments.controller.Controller.state_at`."""
        return self._controller.state_at(tick)

    async def tenants(self) -> dict[str, Any]:
        """See :meth:`deployments.controller.Controller.tenants`."""
        return self._controller.tenants()

    async def decisions(self, limit: int, since_seq: int | None, wanted: DecisionFilter) -> list[dict[str, Any]]:
        """See :meth:`deployments.control_desk.ControlDesk.decisions`."""
        return self._controller.desk.decisions(limit, since_seq, wanted)

    async def conditions(self) -> list[dict[str, Any]]:
        """See :meth:`deployments.control_desk.ControlDesk.conditions`."""
        return self._controller.desk.conditions()

    async def overrides(self) -> list[dict[str, Any]]:
        """See :meth:`deployments.control_desk.ControlDesk.overrides`."""
        return self._controller.desk.overrides()

    async def set_override(self, asked: Override) -> dict[str, Any] | Refused:
        """See :meth:`deployments.control_desk.ControlDesk.set_override`."""
        return self._controller.desk.set_override(asked)

    async def drop_overrides(self, override_id: str | None, by: str) -> list[dict[str, Any]] | Refused:
        """See :meth:`deployments.control_desk.ControlDesk.drop_overrides`."""
        return self._controller.desk.drop_overrides(override_id, by)

    async def shadow(self) -> list[dict[str, Any]]:
        """See :meth:`deployments.control_desk.ControlDesk.shadow`."""
        return self._controller.desk.shadow()

    async def set_shadow(self, shadow: bool, asked: Override) -> list[dict[str, Any]] | Refused:
        """See :meth:`deployments.control_desk.ControlDesk.set_shadow`."""
        return self._controller.desk.set_shadow(shadow, asked)

    async def objectives(self) -> Mapping[str, Any] | None:
        """See :attr:`deployments.control_desk.ControlDesk.objectives`."""
        return self._controller.desk.objectives

    async def set_objectives(self, user_config: Mapping[str, Any], by: str) -> Refused | None:
        """See :meth:`deployments.control_desk.ControlDesk.set_objectives`."""
        return self._controller.desk.set_objectives(user_config, by)

    async def metrics(self) -> str:
        """See :meth:`deployments.controller.Controller.metrics`."""
        return self._controller.metrics()

    async def ping(self) -> str:
        """The controller's epoch."""
        return self._controller.epoch


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
