"""A stream whose request is held while its model starts: comments keep proxies from cutting it.

After :data:`KEEP_ALIVE_S` without an answer the response is begun: status 200, ``text/event-stream``, and a comment, as
again after each such time; readers of server-sent events skip it. From then on an error can have no status of its own:
it ends the stream as an event, without an end mark.

It must not decide who is held.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from deployments.errors import GatewayError
from deployments.sink import Sink

KEEP_ALIVE_S = 10.0
"""Proxies cut connections that are silent for 30 s or more."""

COMMENT = b": the model starts\n\n"
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]

T = TypeVar("T")


class HeldSink:
    """The sink of a stream that may be begun before its answer comes."""

    def __init__(self, sink: Sink, request_id: str) -> None:
        self.opened = False
        """The response was begun by a comment."""
        self._sink = sink
        self._headers = [*HEADERS, (b"x-request-id", request_id.encode())]

    async def comment(self) -> None:
        """Tell the client, and whatever stands between, that the request is not forgotten."""
        if not self.opened:
            self.opened = True
            await self._sink.start(200, self._headers)
        await self._sink.body(COMMENT)

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the head, unless a comment went before it."""
        if not self.opened:
            await self._sink.start(status, headers)

    async def body(self, chunk: bytes) -> None:
        """Send the next bytes."""
        await self._sink.body(chunk)

    async def end(self) -> None:
        """End the body."""
        await self._sink.end()

    async def error(self, error: GatewayError, headers: list[tuple[bytes, bytes]]) -> None:
        """The whole response is this error; behind a comment, the last event."""
        if self.opened:
            await self._sink.stream_error(error, True)
        else:
            await self._sink.error(error, headers)

    async def stream_error(self, error: GatewayError, is_stream: bool) -> None:
        """The response that was begun ends here."""
        await self._sink.stream_error(error, is_stream or self.opened)


async def during(sink: Sink, wait: Coroutine[Any, Any, T]) -> T:
    """What ``wait`` answers, with comments until it does where ``sink`` takes them."""
    if not isinstance(sink, HeldSink):
        return await wait
    waiting = asyncio.ensure_future(wait)
    try:
        while not (await asyncio.wait({waiting}, timeout=KEEP_ALIVE_S))[0]:
            await sink.comment()
        return waiting.result()
    finally:
        waiting.cancel()


def status_sent(sink: Sink, status: int | None) -> int | None:
    """The status a client was sent where ``status`` was to be: 200, once its stream was begun."""
    return 200 if isinstance(sink, HeldSink) and sink.opened else status
