"""The comparison of the relay benchmark: events through a streaming deployment handle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

CHUNK = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":" tok"},"logprobs":null,"finish_reason":null}]}\n\n'
)


@serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0})
class HandleBackend:
    """Yields events through a streaming deployment handle, as fast as they are taken."""

    async def stream(self, count: int) -> AsyncIterator[bytes]:
        """Yield ``count`` events."""
        for _ in range(count):
            yield CHUNK
            await asyncio.sleep(0)


@serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0})
class HandleIngress:
    """Relays what a deployment handle streams, the way Ray Serve's documentation shows."""

    def __init__(self, backend: Any, tokens: int) -> None:
        self._tokens = tokens
        self._backend = backend.options(stream=True)

    async def __call__(self, request: Request) -> StreamingResponse:
        """Stream one response."""
        return StreamingResponse(self._backend.stream.remote(self._tokens), media_type="text/event-stream")


def deploy_handle_relay(tokens: int) -> None:
    """Deploy it at ``/handle``; each request streams ``tokens`` events."""
    app = HandleIngress.bind(HandleBackend.bind(), tokens)  # type: ignore[attr-defined]  # Serve's decorator adds it
    serve.run(app, name="handle", route_prefix="/handle", blocking=False)
