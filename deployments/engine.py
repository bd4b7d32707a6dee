"""The ``Engine`` deployment around real vLLM: ``ray.serve.llm.LLMServer`` with a port, live knobs and signals.

A replica is one vLLM engine. Its native ASGI application, with every endpoint vLLM has, is served by
:class:`ReplicaHost` on the replica's own port; the engine core runs the scheduler of ``deployments/scheduler.py`` and
shares a mapping with this process.

What is set here and not left to vLLM's defaults, unless ``model.engine_args`` says otherwise:

* ``enable_prompt_tokens_details``: a response's ``usage`` says how many prompt tokens were cached;
* CPU: ``enforce_eager``, and ``dtype`` as :func:`cpu_dtype` finds it; memory and threads come as environment
  (``model.engine_environment``);
* speculation: ``async_scheduling`` off, because only then drafts pass through the scheduler and their depth can move;
* GPU: ``tensor_parallel_size`` is ``model.num_gpus``.

One engine per replica: ``data_parallel_size`` above 1 is refused, replicas are what scales.
"""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from ray import serve
from ray.serve import Application
from ray.serve.llm import LLMConfig, LLMServer
from starlette.exceptions import HTTPException

from deployments.knobs import EngineShared
from deployments.local_model import CALLBACK as LOCAL_MODEL
from deployments.model import engine_environment, resolve
from deployments.replica_host import ReplicaHost
from deployments.replica_wiring import deployment_options, new_host, new_shared, new_start, process_started_ns
from deployments.settings import ModelSettings, Settings, SettingsError
from deployments.start_report import StartTeller

SCHEDULER = "deployments.scheduler.live_scheduler"
WORKER_EXTENSION = "deployments.worker_extension.DeviceName"
CPU_MIN = 0.001
"""Ray refuses a bundle of nothing."""


class VllmEngine(LLMServer):
    """One replica. Serve calls the ``record_*`` hooks, ``check_health`` and, when it leaves, ``__del__``."""

    async def __init__(self, args: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        started_ns = process_started_ns()
        settings = Settings.load(args)
        self._host: ReplicaHost | None = None
        self._shared = new_shared()
        async with new_start(settings, started_ns) as start:
            try:
                await super().__init__(llm_config(settings, self._shared.path))
                self._shared.unlink()
                start.opens(self._shared.read_gauges().compile_ms)
                await self._open(settings, self._shared, started_ns, start)
            except BaseException:
                self._shared.close()
                raise

    async def _open(self, settings: Settings, shared: EngineShared, started_ns: int, start: StartTeller) -> None:
        app = await self.engine.build_asgi_app()
        speak_openai(app)
        devices: list[str] = []
        if settings.model.device == "gpu":
            devices = [name for name in await self.collective_rpc("tidegate_device", timeout=60.0) if name]
        host = new_host(settings, shared, started_ns, devices)
        await host.start(app, start.first_byte)
        if settings.model.can_sleep:
            host.can_sleep(partial(self.sleep, level=1), self.wakeup)
        self._host = host

    def record_replica_metadata(self) -> dict[str, str]:
        """Once, when the replica is ready."""
        return self._host.metadata() if self._host else {}

    async def record_routing_stats(self) -> dict[str, Any]:
        """Every second, for the routers."""
        return dict(self._host.routing_stats()) if self._host else {}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """For the scaling policy's local rule."""
        return self._host.autoscaling_stats() if self._host else {}

    async def check_health(self) -> None:
        """Raise when the engine is dead, makes no progress, or the port is gone."""
        await super().check_health()
        if self._host is not None:
            await self._host.check_health()

    async def __del__(self) -> None:
        """Serve awaits it: drain, close the port, end the engine."""
        host, self._host = getattr(self, "_host", None), None
        if host is None:
            return
        await host.drain()
        await host.stop()
        self._shared.close()
        await super().__del__()
        client = getattr(self.engine, "_engine_client", None)
        if client is not None:
            await asyncio.to_thread(client.shutdown)


def llm_config(settings: Settings, shared: Path | None = None) -> LLMConfig:
    """Ray's description of the engine. Without ``shared`` it serves only to compute the deployment's options.

    Raises:
        SettingsError: engine arguments that contradict the rest.
    """
    model = settings.model
    location = resolve(model.source) if shared is not None else model.source
    arguments = engine_arguments(model)
    if shared is not None:
        own = {"tidegate": {"shared": str(shared), "replica_pid": os.getpid()}}
        arguments["additional_config"] = {**arguments.get("additional_config", {}), **own}
    local = {"callback_config": {"callback_class": LOCAL_MODEL}} if Path(location).is_dir() else {}
    return LLMConfig(
        **local,
        model_loading_config={"model_id": model.name, "model_source": location},
        accelerator_config={"kind": model.device},
        accelerator_type=model.accelerator_type,
        placement_group_config=_placement(model),
        # The bundles hold a CPU replica's cores; a GPU replica's come on top of Ray's bundle per device.
        deployment_config={"ray_actor_options": {"num_cpus": 0 if model.device == "cpu" else model.num_cpus}},
        engine_kwargs=arguments,
        log_engine_metrics=False,
    )


def engine_arguments(model: ModelSettings) -> dict[str, Any]:
    """Arguments for vLLM: ours, then the user's, then those that are never the user's to set.

    Raises:
        SettingsError: see :func:`llm_config`.
    """
    given = model.engine_args
    ours: dict[str, Any] = {"enable_prompt_tokens_details": True}
    if model.device == "cpu":
        ours |= {"dtype": cpu_dtype(_cpu_info()), "enforce_eager": True}
    else:
        ours |= {"worker_extension_cls": WORKER_EXTENSION, "tensor_parallel_size": max(1, int(model.num_gpus))}
    if model.context_tokens_max is not None:
        ours["max_model_len"] = model.context_tokens_max
    if given.get("speculative_config"):
        ours["async_scheduling"] = False
    arguments = {**ours, **given, "scheduler_cls": SCHEDULER}
    if problems := _contradictions(model, arguments):
        raise SettingsError(problems)
    return arguments


def cpu_dtype(cpu_info: str) -> str:
    """``bfloat16`` where the processor multiplies it in hardware, else ``float32``.

    Without AVX512-BF16, AMX or Arm's bf16 a bfloat16 product is emulated: on an AVX2 processor 9 GFLOP/s a core against
    62-74 in float32 (64 to 512 rows of SmolLM2's largest layer), and a prompt token took 25 ms.

    Args:
        cpu_info: text of ``/proc/cpuinfo``.
    """
    flags = {word for line in cpu_info.splitlines() if line.startswith(("flags", "Features")) for word in line.split()}
    return "bfloat16" if flags & {"avx512_bf16", "amx_bf16", "bf16"} else "float32"


def _cpu_info() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""


def _contradictions(model: ModelSettings, arguments: dict[str, Any]) -> list[str]:
    found, path = [], "model.engine_args"
    if arguments.get("data_parallel_size", 1) != 1:
        found.append(f"{path}.data_parallel_size: one replica is one engine; raise scaling.replicas_min instead")
    length = arguments.get("max_model_len")
    if model.context_tokens_max is not None and length != model.context_tokens_max:
        found.append(f"{path}.max_model_len: {length!r}: differs from model.context_tokens_max; remove one of them")
    devices = arguments.get("tensor_parallel_size", 1) * arguments.get("pipeline_parallel_size", 1)
    if model.device == "gpu" and devices != max(1, model.num_gpus):
        found.append(f"model.num_gpus: {model.num_gpus:g}: tensor times pipeline parallel size is {devices}")
    return found


def _placement(model: ModelSettings) -> dict[str, Any] | None:
    """Bundles of one replica; Ray's default for whole GPUs."""
    if model.device == "cpu":
        return {"bundles": [{"CPU": max(model.num_cpus, CPU_MIN)}]}
    return {"bundle_per_worker": {"GPU": model.num_gpus}} if model.num_gpus < 1 else None


def speak_openai(app: FastAPI) -> None:
    """Give errors of the framework itself (unknown path, wrong method) the shape of all others."""

    async def answer(_request: Request, error: HTTPException) -> JSONResponse:
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        body = {"error": {"message": str(error.detail), "type": kind, "param": None, "code": code}}
        return JSONResponse(body, error.status_code, headers=error.headers)

    app.add_exception_handler(HTTPException, answer)  # type: ignore[arg-type]
    app.middleware_stack = None  # vLLM has built it already; it is built again with the first request


def build_engine_deployment(settings: Settings, engine_cls: type[VllmEngine] = VllmEngine) -> Application:
    """The bound ``Engine`` deployment.

    Raises:
        SettingsError: engine arguments that contradict the rest.
    """
    config = llm_config(settings)
    options = engine_cls.get_deployment_options(config)
    actor = dict(options["ray_actor_options"])
    environment = actor.get("runtime_env", {})
    variables = {**environment.get("env_vars", {}), **engine_environment(settings.model, _location(settings.model))}
    actor["runtime_env"] = {**environment, "env_vars": variables}
    options |= deployment_options(settings) | {"ray_actor_options": actor}
    return serve.deployment(engine_cls, **options).bind(settings.to_args())


def _location(model: ModelSettings) -> str:
    """Where the model is as seen from here; its name when it is not here: then the replica says what is missing."""
    try:
        return resolve(model.source)
    except RuntimeError:
        return model.source
