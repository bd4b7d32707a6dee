"""An engine that only emits events: what the relay benchmark puts behind each relay. No Ray in here.

``python -m tests.bench.flat_out PORT`` serves it alone. A request's ``max_tokens`` is the number of events, its
``gap_ms`` the time between two of one stream; 0 is as fast as the reader takes them.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvicorn

EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":" tok"},"logprobs":null,"finish_reason":null}]}\n\n'
)
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]


async def events(body: bytes) -> AsyncIterator[bytes]:
    """Yield what one request asks for, and the end mark."""
    wish = json.loads(body)
    for _ in range(wish["max_tokens"]):
        yield EVENT
        await asyncio.sleep(wish["gap_ms"] / 1e3)
    yield b"data: [DONE]\n\n"


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answer every request with a stream of events."""
    if scope["type"] != "http":
        return
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    if scope["method"] == "POST":
        async for event in events(body):
            await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def server() -> uvicorn.Server:
    """The HTTP server, as the engines run theirs."""
    config = uvicorn.Config(app, loop="uvloop", http="httptools", access_log=False, lifespan="off", log_level="error")
    return uvicorn.Server(config)


if __name__ == "__main__":
    asyncio.run(server().serve(sockets=[socket.create_server(("127.0.0.1", int(sys.argv[1])))]))
