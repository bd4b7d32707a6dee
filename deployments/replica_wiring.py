"""What joins a replica of either engine to Ray Serve: deployment options, identity, its line to the controller.

The options are the same for both engines, so that what is tested with the emulated one holds for vLLM:

* Serve's own limit on ongoing requests is out of the way: requests come over the replica's own port, and admission
  bounds them;
* graceful shutdown lasts as long as draining may, plus time to close; Serve does not see the streams, the replica waits
  for them itself in ``__del__``;
* routing samples travel every second.

It must not import vLLM: the emulated engine runs without it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray import serve

from deployments.clock import now_ns
from deployments.controller_actor import ACTOR_NAME, OWNER_DEPLOYMENT
from deployments.knobs import EngineShared
from deployments.model_figures import model_figures
from deployments.replica_host import LOOPBACK, ReplicaHost, ReplicaIdentity, Report
from deployments.scaling import autoscaling_config
from deployments.sensors import GpuSensor
from deployments.serve_internals import find_controller_actor
from deployments.settings import ModelSettings, Settings
from deployments.settings_models import MAIN_DEPLOYMENT
from deployments.start_report import StartTeller
from policies.measures import Roofline, StartReport
from policies.roofline import roofline_of
from policies.types import Plan, ReplicaReport

ONGOING_REQUESTS_MAX = 100_000
ROUTING_STATS_PERIOD_S = 1.0
HEALTH_PERIOD_S = 5.0
HEALTH_TIMEOUT_S = 30.0
START_TOLD_S = 2.0
"""Longest wait for the controller to take a report of a start; in a thread of its own."""
CLOSE_S = 15.0
"""Time for closing after draining before Serve ends the process."""


def deployment_options(settings: Settings, name: str = MAIN_DEPLOYMENT) -> dict[str, Any]:
    """Options of ``serve.deployment`` for the engine deployment ``name``, resources aside."""
    routing = {k: v for k, v in dataclasses.asdict(settings.routing).items() if k != "step_prior"}
    return {
        "name": name,
        "max_ongoing_requests": ONGOING_REQUESTS_MAX,
        "autoscaling_config": autoscaling_config(settings),
        "request_router_config": {
            "request_router_class": "deployments.router:TidegateRouter",
            "request_router_kwargs": {"routing": routing, "seed": settings.gateway.seed},
            "request_routing_stats_period_s": ROUTING_STATS_PERIOD_S,
            "request_routing_stats_timeout_s": HEALTH_TIMEOUT_S,
        },
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": settings.model.drain_s_max + CLOSE_S,
        "logging_config": {"enable_access_log": False},
    }


def new_shared() -> EngineShared:
    """Make the mapping of one replica, in memory where the system has such a folder."""
    folder = Path("/dev/shm")  # noqa: S108 - the file is made 0600, with O_EXCL, under a random name
    name = f"tidegate-{os.getpid()}-{os.urandom(8).hex()}"
    return EngineShared.create((folder if folder.is_dir() else Path(tempfile.gettempdir())) / name)


def process_started_ns() -> int:
    """When this process began, on the monotonic clock: an engine's cold start is counted from there. Linux only."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    since_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s
    return now_ns() - int(age_s * 1e9)


def new_host(
    settings: Settings,
    shared: EngineShared,
    started_ns: int,
    gpu_devices: list[str] | None = None,
    through: Callable[[Report], Report] = lambda deliver: deliver,
) -> ReplicaHost:
    """The host of the calling replica. Only inside a replica of Ray Serve.

    ``through`` wraps the delivery of reports: scripted faults of signals play there.
    """
    context = serve.get_replica_context()
    host = LOOPBACK if settings.model.listen == "loopback" else ray.util.get_node_ip_address()
    identity = ReplicaIdentity(context.replica_id.unique_id, context.app_name, context.deployment, host)
    sensor = GpuSensor(gpu_devices or [])
    return ReplicaHost(
        settings.model,
        settings.policy_config(),
        shared,
        identity,
        started_ns,
        through(ControllerLine(context.app_name)),
        sensor if sensor.devices else None,
        roofline(settings.model, sensor),
    )


def new_start(settings: Settings, started_ns: int) -> StartTeller:
    """Who tells of the calling replica's start. Only inside a replica of Ray Serve."""
    context = serve.get_replica_context()

    def deliver(report: StartReport) -> None:
        controller = find_controller_actor(context.app_name, OWNER_DEPLOYMENT, ACTOR_NAME)
        if controller is not None:
            ray.get(controller.report_start.remote(report), timeout=START_TOLD_S)

    return StartTeller(context.replica_id.unique_id, settings.model.name, started_ns, deliver)


def roofline(model: ModelSettings, sensor: GpuSensor) -> Roofline | None:
    """What the calling replica's devices could do at best with ``model``; ``None`` where one of the two is unknown."""
    device = sensor.device_name()
    return roofline_of(device, sensor.devices, model_figures(model)) if device is not None else None


class ControllerLine:
    """Delivers reports to the controller actor of an application. Finds it anew after every failed call."""

    def __init__(self, app: str) -> None:
        """``app`` is the application's name in Serve."""
        self._app = app
        self._actor: Any = None
        self._lookup: asyncio.Future[Any] | None = None

    async def __call__(self, report: ReplicaReport) -> Plan | None:
        """Hand over ``report`` and return the newest plan; raises when there is no controller."""
        if self._actor is None:
            self._actor = await self._find()
        if self._actor is None:
            raise ConnectionError("there is no controller")
        try:
            plan: Plan | None = await self._actor.report_replica.remote(report)
        except BaseException:
            self._actor = None
            raise
        return plan

    async def _find(self) -> Any:
        """The lookup blocks, so it runs in a thread; a hanging one is joined, not multiplied."""
        if self._lookup is None or self._lookup.done():
            self._lookup = asyncio.ensure_future(
                asyncio.to_thread(find_controller_actor, self._app, OWNER_DEPLOYMENT, ACTOR_NAME)
            )
        return await asyncio.shield(self._lookup)
