"""The ``Engine`` deployment with the emulated engine in it, and the same engine as a plain server.

In Ray Serve it stands exactly where vLLM stands: the same :class:`ReplicaHost` with its gate, port, signals, knobs,
health and leaving, the same deployment name and options. It sets aside at most :data:`NUM_CPUS_MAX` of a core, because
it waits instead of computing.

Two more methods on the deployment handle serve tests and drills. Each call reaches one replica, which says who it is:
``set_faults(changes, replica_id)`` changes the faults in force there (and nothing when another replica was meant),
``counters()`` tells what its engine holds and has done.

``python -m deployments.emulated_engine --port N`` serves the engine alone, without Ray.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.emulation.core import EngineCore
from deployments.emulation.faults import FaultBoard
from deployments.emulation.http import EngineApp
from deployments.emulation.signals import Signals
from deployments.emulation.standalone import main
from deployments.settings import EmulatedSettings, ModelSettings, Settings

if TYPE_CHECKING:
    from ray.serve import Application

    from deployments.knobs import EngineShared
    from deployments.replica_host import ReplicaHost
    from deployments.start_report import StartTeller

NUM_CPUS_MAX = 0.05


class ScriptedStartError(RuntimeError):
    """A start that was told to fail."""


class ScriptedHealthError(RuntimeError):
    """A health check that was told to fail."""


class EmulatedEngine:
    """One replica. Serve calls the ``record_*`` hooks, ``check_health`` and, when it leaves, ``__del__``."""

    async def __init__(self, args: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        """``args`` are ``Settings.to_args()``."""
        from deployments.replica_wiring import new_shared, new_start, process_started_ns

        started_ns = process_started_ns()
        settings = Settings.load(args)
        self._host: ReplicaHost | None = None
        async with new_start(settings, started_ns) as start:
            self._replica_id = _begin_start(settings.model.emulated.faults.start_failures)
            await asyncio.sleep(settings.model.emulated.start_ms / 1e3)
            self._shared: EngineShared = new_shared()
            self._shared.unlink()
            try:
                start.opens()
                await self._open(settings, started_ns, start)
            except BaseException:
                self._shared.close()
                raise

    async def _open(self, settings: Settings, started_ns: int, start: StartTeller) -> None:
        from deployments.replica_wiring import new_host

        emulated = self._settings = engine_settings(settings.model)
        self._faults = FaultBoard(emulated.faults, emulated.seed)
        self._signals = Signals(self._faults)
        self._core = EngineCore(emulated, self._faults, self._shared)
        self._app = EngineApp(self._core, settings.model.name)
        self._steps = asyncio.create_task(self._core.run(), name="emulated-engine")
        host = new_host(settings, self._shared, started_ns, through=self._signals.through)
        await host.start(self._app, start.first_byte)
        if settings.model.can_sleep:
            host.can_sleep(self.sleep, self.wakeup)
        self._host = host

    def record_replica_metadata(self) -> dict[str, str]:
        """Once, when the replica is ready."""
        return self._host.metadata() if self._host else {}

    async def record_routing_stats(self) -> dict[str, Any]:
        """Every second, for the routers."""
        return self._signals.sample("routing", self._host.routing_stats()) if self._host else {}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """For the scaling policy's local rule."""
        return self._signals.sample("autoscaling", self._host.autoscaling_stats()) if self._host else {}

    async def check_health(self) -> None:
        """Raise when the engine makes no progress, its port is gone, or a fault says so.

        Never answers while the fault ``health: blocked`` is on.
        """
        if not await self._app.healthy():
            raise ScriptedHealthError("scripted: the health check fails")
        if self._steps.done():
            raise RuntimeError(f"the emulated engine's loop ended: {self._steps.exception()!r}")
        if self._host is not None:
            await self._host.check_health()

    async def sleep(self) -> None:
        """Compute nothing until :meth:`wakeup`."""
        self._core.asleep = True

    async def wakeup(self) -> None:
        """Compute again, after ``emulated.wake_ms``."""
        await asyncio.sleep((self._settings.wake_ms or 0.0) / 1e3)
        self._core.asleep = False

    async def set_faults(self, changes: Mapping[str, Any], replica_id: str | None = None) -> dict[str, Any]:
        """Change the faults in force here, unless ``replica_id`` names another replica.

        Returns ``{"replica_id", "applied", "faults"}``. Raises ``pydantic.ValidationError`` for wrong changes.
        """
        applied = replica_id in (None, self._replica_id)
        faults = self._faults.change(changes) if applied else self._faults.now
        return {"replica_id": self._replica_id, "applied": applied, "faults": faults.model_dump()}

    async def counters(self) -> dict[str, Any]:
        """Gauges and counters of this replica's engine, and its ``replica_id``."""
        gauges, counters = dataclasses.asdict(self._core.gauges()), dataclasses.asdict(self._core.counters)
        life = {"replica_id": self._replica_id, "pid": os.getpid(), "asleep": self._core.asleep}
        return life | gauges | counters

    async def __del__(self) -> None:
        """Serve awaits it: drain, close the port, stop the engine."""
        host, self._host = getattr(self, "_host", None), None
        if host is None:
            return
        self._core.draining = True
        await host.drain()
        await host.stop()
        self._steps.cancel()
        await asyncio.gather(self._steps, return_exceptions=True)
        self._shared.close()


def engine_settings(model: ModelSettings) -> EmulatedSettings:
    """The engine's settings; ``model.context_tokens_max`` wins where it is set, as with vLLM."""
    if model.context_tokens_max is None:
        return model.emulated
    return model.emulated.model_copy(update={"context_tokens_max": model.context_tokens_max})


def _begin_start(failures: int) -> str:
    """This replica's id; raises :class:`ScriptedStartError` for the first ``failures`` starts on this node."""
    import ray
    from ray import serve

    context = serve.get_replica_context()
    if failures:
        node = ray.get_runtime_context().get_node_id()
        count = Path(tempfile.gettempdir()) / f"tidegate-starts-{node[:16]}-{context.app_name}"
        with count.open("ab") as file:
            file.write(b".")
            file.flush()
            started = file.tell()
        if started <= failures:
            raise ScriptedStartError(f"scripted: start {started} of {failures} that fail")
    return str(context.replica_id.unique_id)


def build_emulated_deployment(settings: Settings, app_name: str | None = None) -> Application:  # noqa: ARG001
    """The bound ``Engine`` deployment. A replica learns its application's name from Serve: ``app_name`` is not needed.

    Raises:
        ValueError: the emulated KV cache is smaller than one context.
    """
    from ray import serve

    from deployments.replica_wiring import deployment_options

    EngineCore(engine_settings(settings.model), FaultBoard())
    actor = {"num_cpus": min(settings.model.num_cpus, NUM_CPUS_MAX)}
    options = deployment_options(settings) | {"ray_actor_options": actor}
    return serve.deployment(EmulatedEngine, **options).bind(settings.to_args())


if __name__ == "__main__":
    sys.exit(main())
