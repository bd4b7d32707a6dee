"""One real engine for the whole session: the ``Engine`` deployment alone on Ray Serve, on the CPU.

Without a gateway there is no controller either, so a replica's reports find nobody: that is part of what is tested.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.knobs import EngineGauges, StepRecord
from policies.types import Knobs
from tests import loopback

APP = "tidegate-engine-test"
MODEL_NAME = "smollm2-135m-instruct"
RUNNING_SEQS = 16
STEP_TOKENS = 2_048
STUCK_AFTER_S = 15.0


@dataclass(frozen=True)
class Engine:
    """The replica from outside: its port, and the probes of :mod:`tests.engine.probe` through the deployment handle."""

    handle: Any
    url: str
    gate: str

    async def gauges(self) -> EngineGauges:
        found: EngineGauges = await self.handle.gauges.remote()
        return found

    async def knobs(self, knobs: Knobs) -> None:
        await self.handle.set_knobs.remote(knobs)

    async def steps(self, after_seq: int) -> list[StepRecord]:
        found: list[StepRecord] = await self.handle.steps.remote(after_seq)
        return found

    async def last_seq(self) -> int:
        return max((s.seq for s in await self.steps(0)), default=0)

    async def until(self, condition: Callable[[EngineGauges], bool], within_s: float) -> EngineGauges:
        """Wait for the gauges to satisfy ``condition``."""
        async with asyncio.timeout(within_s):
            while not condition(gauges := await self.gauges()):  # noqa: ASYNC110 - another process brings it about
                await asyncio.sleep(0.05)
        return gauges


@pytest.fixture(scope="session")
def model_folder() -> str:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    folder = os.environ.get("TIDEGATE_TEST_MODEL") or str(Path.home() / ".cache/tidegate/models" / MODEL_NAME)
    if not (Path(folder) / "config.json").exists():
        pytest.skip(f"no model in {folder}; `make model` puts it there")
    return folder


@pytest.fixture(scope="session")
def running_engine(model_folder: str) -> Iterator[Engine]:
    import ray
    from ray import serve

    from deployments.engine import build_engine_deployment
    from deployments.settings import Settings
    from tests.engine.probe import ProbedEngine

    settings = Settings.load(
        {
            "model": {
                "name": MODEL_NAME,
                "source": model_folder,
                "stuck_after_s": STUCK_AFTER_S,
                "drain_s_max": 60.0,
                "engine_args": {
                    "dtype": "float32",  # bfloat16 would make ties, and answers that differ by how they were batched
                    "max_model_len": 2_048,
                    "max_num_seqs": RUNNING_SEQS,
                    "max_num_batched_tokens": STEP_TOKENS,
                },
            },
            "scaling": {"replicas_max": 1},
        }
    )
    # Ray's workers run at niceness 15: beside anything else on the machine an engine would hardly run at all.
    config = {"worker_niceness": 0}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, _system_config=config)
    try:
        serve.start(proxy_location="Disabled")
        handle = serve.run(build_engine_deployment(settings, ProbedEngine), name=APP, route_prefix=None)
        metadata = handle.record_replica_metadata.remote().result()
        yield Engine(handle, f"http://{metadata['endpoint']}", metadata["gate"])
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.fixture
async def engine(running_engine: Engine) -> Engine:
    """The engine, idle and with its start-up values. Nothing is put back afterwards: the last test ends the engine."""
    await running_engine.knobs(Knobs())
    await running_engine.until(lambda g: g.work_since_ns == 0, 60)
    return running_engine


@pytest.fixture
async def client(running_engine: Engine) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"x-tidegate-gate": running_engine.gate}
    limits = httpx.Limits(max_connections=None)
    async with loopback.AsyncClient(base_url=running_engine.url, headers=headers, timeout=120, limits=limits) as c:
        yield c
