"""The gateway's API for Python: methods on its deployment handle, through the same flow as HTTP, without HTTP.

    handle = serve.get_app_handle("tidegate")
    answer = await handle.chat.remote({"model": ..., "messages": [...]})                       # one dict
    async for chunk in handle.options(stream=True).chat.remote({..., "stream": True}):         # chunk dicts
        ...

Each method takes the body its HTTP endpoint takes. With ``"stream": true`` in it the handle needs ``stream=True`` too:
Serve hands over a generator only then. Errors are :class:`GatewayError` with status, type, code and message (Ray wraps
them: ``error.cause`` is the original). A cancelled call, or a generator closed early, aborts the engine's work.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from deployments.auth import ANYBODY, Principal
from deployments.clock import now_ns
from deployments.core import GatewayCore
from deployments.driver import Interrupt, RequestDriver
from deployments.endpoints import RELAYED, Endpoint
from deployments.errors import GatewayError, bad_request, engine_error
from deployments.ids import new_request_id
from deployments.request_log import RequestRecord
from deployments.served import Served
from policies.config import DEFAULT_TENANT
from policies.events import Outcome

CHUNKS_MAX = 64
"""Chunks of a stream that wait for their reader; the replica is not read from while there are more."""

TENANT_CHARS_SHOWN = 128
"""Of a name that a refused caller gave."""

_END = object()


class CollectSink:
    """Keeps a whole answer."""

    def __init__(self) -> None:
        self.status = 0
        self.problem: GatewayError | None = None
        self._parts: list[bytes] = []

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:  # noqa: ARG002
        """Note the status."""
        self.status = status

    async def body(self, chunk: bytes) -> None:
        """Keep the bytes."""
        self._parts.append(chunk)

    async def end(self) -> None:
        """Nothing more comes."""

    async def error(self, error: GatewayError, headers: list[tuple[bytes, bytes]]) -> None:  # noqa: ARG002
        """Keep the error for the caller."""
        self.problem = error

    async def stream_error(self, error: GatewayError, is_stream: bool) -> None:  # noqa: ARG002
        """Keep the error for the caller."""
        self.problem = error

    def value(self) -> dict[str, Any]:
        """The answer as a dict; raises what the request ended with otherwise."""
        if self.problem is not None:
            raise self.problem
        try:
            value = msgspec.json.decode(b"".join(self._parts))
        except msgspec.DecodeError:
            value = None
        if not isinstance(value, dict):
            raise GatewayError(502, "server_error", "engine_error", "The engine's answer is not a JSON object.")
        return value


class QueueSink:
    """Hands chunks to a generator, at most ``CHUNKS_MAX`` ahead of it."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Any] = asyncio.Queue(CHUNKS_MAX)
        self._ended = False

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """A stream's head says nothing its reader needs."""

    async def body(self, chunk: bytes) -> None:
        """Wait until the reader is near enough."""
        await self.queue.put(chunk)

    async def end(self) -> None:
        """Nothing more comes."""
        await self._last(_END)

    async def error(self, error: GatewayError, headers: list[tuple[bytes, bytes]]) -> None:  # noqa: ARG002
        """The reader raises it."""
        await self._last(error)

    async def stream_error(self, error: GatewayError, is_stream: bool) -> None:  # noqa: ARG002
        """The reader raises it."""
        await self._last(error)

    async def _last(self, item: object) -> None:
        await self.queue.put(item)
        self._ended = True

    def close(self) -> None:
        """No more comes, whatever the reason: a reader that was given up finds an error, not silence."""
        if self._ended:
            return
        if self.queue.full():
            self.queue.get_nowait()
        why = "The stream was given up: its reader took nothing for too long."
        self.queue.put_nowait(GatewayError(502, "server_error", "stream_broken", why))


@dataclass(frozen=True, slots=True)
class _Caller:
    """Who calls a method, and what they say of the request."""

    principal: Principal
    headers: dict[bytes, bytes]

    @classmethod
    def of(cls, tenant: object, headers: object) -> _Caller:
        """From a method's arguments. Raises ``GatewayError``."""
        if not isinstance(tenant, str) or not tenant:
            raise bad_request(f"tenant: must be a name, not {tenant!r:.64}.", "tenant")
        if not isinstance(headers, Mapping | None) or not all(
            isinstance(part, str) for pair in (headers or {}).items() for part in pair
        ):
            raise bad_request("headers: must be a dict of texts.", "headers")
        given = {
            k.lower().encode("latin-1", "replace"): v.encode("latin-1", "replace") for k, v in (headers or {}).items()
        }
        return cls(Principal(tenant, ANYBODY.scopes, ""), given)


class HandleApi:
    """Runs one call of a handle method."""

    def __init__(self, served: Served) -> None:
        self._core = served.first
        self._served = served

    async def call(
        self, path: str, body: Any, tenant: str = DEFAULT_TENANT, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any] | AsyncGenerator[dict[str, Any], None]:
        """Answer ``body`` for the endpoint ``path``: a dict, or with ``stream: true`` a generator of dicts.

        Callers are on the cluster and trusted: ``tenant`` is who they say. ``headers`` are those of HTTP that say
        something of the request (``x-tidegate-task`` ...).
        """
        self._core.check_loop()
        with self._counted(path, tenant, self._core):
            caller = _Caller.of(tenant, headers)
            endpoint, raw = RELAYED[path], encode_body(body, self._core.settings.gateway.body_bytes_max)
        if endpoint.streams and body.get("stream") is True:
            return self._stream(endpoint, raw, caller)
        sink = CollectSink()
        await self._driver(endpoint, raw, sink, caller).run()
        return sink.value()

    def _driver(self, endpoint: Endpoint, raw: bytes, sink: CollectSink | QueueSink, caller: _Caller) -> RequestDriver:
        core = self._served.core_of(raw)
        with self._counted(endpoint.path, caller.principal.tenant, core):
            inbound = core.parse(raw, endpoint, now_ns(), new_request_id(), caller.principal, caller.headers)
        return RequestDriver(core, inbound, sink)

    @staticmethod
    @contextlib.contextmanager
    def _counted(path: str, tenant: object, core: GatewayCore) -> Iterator[None]:
        """A call that is refused inside ends here, as any request of ``core``'s model ends."""
        record = RequestRecord(new_request_id(), path, now_ns(), tenant=str(tenant)[:TENANT_CHARS_SHOWN])
        try:
            yield
        except GatewayError as error:
            core.ended_early(record, Outcome.REFUSED, error.code or "bad_request", error.status)
            raise

    async def _stream(self, endpoint: Endpoint, raw: bytes, caller: _Caller) -> AsyncGenerator[dict[str, Any], None]:
        sink = QueueSink()
        driver = self._driver(endpoint, raw, sink, caller)
        task = asyncio.get_running_loop().create_task(driver.run())
        task.add_done_callback(lambda _: sink.close())
        try:
            async for value in parse_events(_chunks(sink.queue)):
                yield value
            await task
        finally:
            if not task.done():
                driver.interrupt(Interrupt.CLIENT_GONE)
                if not task.cancelling():  # the driver has not begun, so it holds nothing
                    task.cancel()


async def _chunks(queue: asyncio.Queue[Any]) -> AsyncIterator[bytes]:
    while (item := await queue.get()) is not _END:
        if isinstance(item, GatewayError):
            raise item
        yield item


async def parse_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """JSON objects of server-sent events, however the bytes are cut. ``[DONE]`` and comments are left out.

    Raises:
        GatewayError: the stream carries an engine's error.
    """
    rest = b""
    async for chunk in chunks:
        *events, rest = (rest + chunk).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            value = _event(event)
            if value is not None:
                yield value


def _event(event: bytes) -> dict[str, Any] | None:
    data = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
    if not data or data == b"[DONE]":
        return None
    try:
        value = msgspec.json.decode(data)
    except msgspec.DecodeError:
        raise GatewayError(502, "server_error", "engine_error", "The engine sent an event that is not JSON.") from None
    if not isinstance(value, dict):
        raise GatewayError(502, "server_error", "engine_error", "The engine sent an event that is not an object.")
    if isinstance(value.get("error"), dict) and ("choices" not in value and "response" not in value):
        raise engine_error(502, "application/json", data)
    return value


def encode_body(body: Any, bytes_max: int) -> bytes:
    """``body`` as JSON. Raises ``GatewayError`` for what JSON cannot hold, ``NaN`` included."""
    if not isinstance(body, dict):
        raise bad_request(f"The request body must be a dict, not {type(body).__name__}.")
    try:
        raw = json.dumps(body, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise bad_request(f"The request body is not valid JSON: {error}.", code="invalid_json") from None
    if len(raw) > bytes_max:
        message = f"The request body is larger than the limit of {bytes_max} bytes."
        raise GatewayError(413, "invalid_request_error", "request_too_large", message)
    return raw
