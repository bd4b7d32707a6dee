"""The relays that the relay benchmark compares, each with a flat-out engine of its own behind it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

from tests.bench import flat_out
from tests.bench import harness as h


class FlatOutEngine:
    """In the place of the ``Engine`` deployment: the same metadata, events over HTTP and through the handle."""

    async def __init__(self) -> None:  # type: ignore[misc]  # Serve awaits asynchronous constructors
        sock = socket.create_server(("127.0.0.1", 0))
        self._port = sock.getsockname()[1]
        self._serving = asyncio.create_task(flat_out.server().serve(sockets=[sock]))

    def record_replica_metadata(self) -> dict[str, str]:
        """Where the gateway finds it."""
        return {"endpoint": f"127.0.0.1:{self._port}", "gate": "open", "model": "smollm2-135m-instruct"}

    async def stream(self, body: bytes) -> AsyncIterator[bytes]:
        """The same events through a streaming deployment handle."""
        async for event in flat_out.events(body):
            yield event


@serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0})
class HandleIngress:
    """Relays what a deployment handle streams, the way Ray Serve's documentation shows."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine.options(stream=True)

    async def __call__(self, request: Request) -> StreamingResponse:
        """Stream one response."""
        return StreamingResponse(self._engine.stream.remote(await request.body()), media_type="text/event-stream")


def flat_out_engine(**options: Any) -> Any:
    """Return the bound engine deployment."""
    options = {"name": "Engine", "max_ongoing_requests": 1000, "ray_actor_options": {"num_cpus": 0}, **options}
    return serve.deployment(FlatOutEngine, **options).bind()


def deploy_relays() -> None:
    """Deploy Tidegate's gateway at ``/`` and the handle relay at ``/handle``."""
    from deployments.gateway import build_gateway_deployment
    from deployments.settings import Settings

    router = {"request_router_class": "deployments.router:TidegateRouter", "request_routing_stats_period_s": 1}
    gateway = build_gateway_deployment(Settings.load(h.emulated_args()), flat_out_engine(request_router_config=router))
    serve.run(gateway, name="tidegate", blocking=False)
    handle = HandleIngress.bind(flat_out_engine())  # type: ignore[attr-defined]  # Serve's decorator adds it
    serve.run(handle, name="handle", route_prefix="/handle", blocking=False)
