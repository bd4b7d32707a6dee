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

    from deployments.settings import Settings
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

        from deployments.controller import Controller

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

        def end_process() -> None:
            logging.shutdown()
            os._exit(1)

        self._controller = Controller(args, end_process)
        self._controller.start()

    async def report_replica(self, report: ReplicaReport) -> Plan | None:
        """See :meth:`deployments.controller.Controller.report_replica`."""
        return self._controller.report_replica(report)

    async def report_gateway(self, report: GatewayReport) -> Plan | None:
        """See :meth:`deployments.controller.Controller.report_gateway`."""
        return self._controller.report_gateway(report)

    async def fleet(self, view: Mapping[str, int]) -> dict[str, Any] | None:
        """See :meth:`deployments.controller.Controller.fleet`."""
        return self._controller.fleet(view)

    async def state(self) -> dict[str, Any]:
        """See :meth:`deployments.controller.Controller.state`."""
        return self._controller.state()

    async def decisions(self, limit: int = 100, since_seq: int | None = None) -> list[dict[str, Any]]:
        """See :meth:`deployments.controller.Controller.decisions`."""
        return self._controller.decisions(limit, since_seq)

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
