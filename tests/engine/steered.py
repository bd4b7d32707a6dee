"""A real engine that reports to a control loop in its own process: the product's, without gateway or controller.

Reports, plans and knobs take the way they take live, only the remote call is missing; so what an engine does under
control can be seen with one engine and nothing else on the machine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from autoscaling.recommend import ReplicaScaler
from deployments.clock import now_ns
from deployments.engine import VllmEngine, build_engine_deployment
from deployments.settings import Settings
from policies.control.loop import ControlState, tick
from policies.steering import ANY, Knob, Override
from policies.types import Plan, ReplicaReport
from tests import loopback

PIN_MS = 3_600_000.0
REPORTS_KEPT = 1_000
COMPLETIONS = "/v1/completions"


class SteeredEngine(VllmEngine):
    """Reports to itself."""

    async def _open(self, *args: Any, **kwargs: Any) -> None:
        await super()._open(*args, **kwargs)
        assert self._host is not None
        config = self._host._policy
        self._state = ControlState(config, ReplicaScaler(config), "own")
        self._reports: list[ReplicaReport] = []
        self._host._report = self._steer

    async def _steer(self, report: ReplicaReport) -> Plan:
        now = now_ns()
        self._reports = [*self._reports, report][-REPORTS_KEPT:]
        self._state.receive_replica(report, now)
        return tick(self._state, now).plan

    async def pin(self, depth: int | None) -> None:
        """Hold the speculative depth by hand; ``None``: let it move again."""
        if depth is None:
            self._state.overrides.drop("pin", now_ns())
        else:
            held = Override("pin", Knob.SPECULATIVE_DEPTH, ANY, depth, remaining_ms=PIN_MS)
            self._state.overrides.put(held, now_ns())

    async def depth(self) -> int | None:
        """Depth that is asked for: that of the engine's next step."""
        assert self._host is not None
        asked = self._host._knobs.speculative_depth
        return self._shared.read_gauges().speculative_depth_hard if asked is None else asked

    async def reports(self, after_seq: int) -> list[ReplicaReport]:
        """Reports after ``after_seq``."""
        return [r for r in self._reports if r.seq > after_seq]

    async def decisions(self) -> list[str]:
        """What the ledger says of speculation."""
        entries = self._state.ledger.latest(1_000)
        return [f"{d.before} -> {d.after}: {d.reason.text}" for d in entries if d.lever == "speculation"]


@dataclass
class Stream:
    """One streamed completion as its client saw it."""

    tokens: int = 0
    first_s: float | None = None
    last_s: float = 0.0
    text: list[str] = field(default_factory=list)

    @property
    def decode_tps(self) -> float:
        """Tokens per second after the first ones."""
        return (self.tokens - 1) / (self.last_s - (self.first_s or 0.0))


@dataclass
class Steered:
    """The replica from outside."""

    handle: Any
    url: str
    gate: str
    model: str

    async def call(self, method: str, *args: Any) -> Any:
        """One of :class:`SteeredEngine`'s methods."""
        return await getattr(self.handle, method).remote(*args)

    def client(self) -> httpx.AsyncClient:
        """A client of the replica's port."""
        return loopback.AsyncClient(base_url=self.url, headers={"x-tidegate-gate": self.gate}, timeout=600)

    async def stream(self, client: httpx.AsyncClient, prompt: str, tokens: int, temperature: float = 0.0) -> Stream:
        """Complete ``prompt`` by exactly ``tokens`` tokens."""
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": temperature,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        seen = Stream()
        async with client.stream("POST", COMPLETIONS, json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if event.get("choices"):
                    seen.last_s = time.perf_counter()
                    seen.first_s = seen.first_s or seen.last_s
                    seen.text.append(event["choices"][0]["text"])
                seen.tokens = (event.get("usage") or {}).get("completion_tokens", seen.tokens)
        return seen


@contextmanager
def steered(args: dict[str, Any], app: str = "steered") -> Iterator[Steered]:
    """Deploy one engine; Ray and Serve are started where they are not there, and ended with it."""
    import ray
    from ray import serve

    ours = not ray.is_initialized()
    if ours:
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, _system_config={"worker_niceness": 0})
    try:
        serve.start(proxy_location="Disabled")
        settings = Settings.load(args)
        handle = serve.run(build_engine_deployment(settings, SteeredEngine), name=app, route_prefix=None)
        metadata = handle.record_replica_metadata.remote().result()
        yield Steered(handle, f"http://{metadata['endpoint']}", metadata["gate"], settings.model.name)
        serve.delete(app)
    finally:
        if ours:
            serve.shutdown()
            ray.shutdown()
