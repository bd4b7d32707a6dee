"""HTTP/1.1 to replicas, made for relaying: one small client in place of a general one.

A connection carries one exchange at a time: request out in one write, response parsed by llhttp (``httptools``), body
bytes handed on as they came. What that saves against a general client, per chunk and per request, is the gateway's CPU.

A connection is used again only when its last response was complete, and not after :data:`KEEPALIVE_S` of idling:
replicas close idle ones later than that, so a request does not run into a connection the replica is just closing (after
the bytes are out, that cannot be told from an engine the request broke).

Reading ahead of a slow client stops at :data:`READ_BUFFER_BYTES`: the kernel's window then slows the replica down. It
must not retry or interpret: what broke, and how, is an exception for the driver.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import cast

import httptools

from policies.events import UpstreamFailure

KEEPALIVE_S = 60.0
"""Idle connections live this long; replicas keep theirs for 120 s."""
IDLE_CONNECTIONS_MAX = 256
"""Idle connections kept per replica; more are closed."""
READ_BUFFER_BYTES = 131_072
HEADERS_MAX = 128
HEADER_BYTES_MAX = 65_536


class ReplicaUnreachableError(Exception):
    """No connection to the replica: the request was not sent. ``refused`` is true when its port said no."""

    def __init__(self, refused: bool) -> None:
        super().__init__("the replica's port refused the connection" if refused else "the replica could not be reached")
        self.refused = refused


class UpstreamBrokenError(Exception):
    """The exchange broke off after the request was sent."""

    def __init__(self, kind: UpstreamFailure) -> None:
        super().__init__(kind.value)
        self.kind = kind


class Connection(asyncio.Protocol):
    """One connection and the exchange on it. Names without underscore that start with ``on_`` are the parser's."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        """Names in lower case."""
        self.closed = False
        self.idle_since_ns = 0
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._parts: list[bytes] = []
        self._buffered = 0
        self._paused = False
        self._head_done = False
        self._complete = False
        self._reusable = False
        self._failure: UpstreamFailure | None = None
        self._header_bytes = 0

    # --- one exchange -------------------------------------------------------------------------------------------------

    async def request(self, message: bytes) -> None:
        """Send ``message`` and wait for the response's head. Raises ``UpstreamBrokenError``."""
        transport = self._transport
        if transport is None or self.closed:
            raise UpstreamBrokenError(UpstreamFailure.RESET)
        self._parser = httptools.HttpResponseParser(self)
        self.status, self.headers, self._header_bytes = 0, [], 0
        self._head_done = self._complete = self._reusable = False
        transport.write(message)
        while not self._head_done:
            if self._failure is not None:
                raise UpstreamBrokenError(self._failure)
            await self._wait()

    async def read(self) -> bytes:
        """Body bytes that came in since the last call; ``b""`` at the end. Raises ``UpstreamBrokenError``."""
        while not self._parts:
            if self._complete:
                return b""
            if self._failure is not None:
                raise UpstreamBrokenError(self._failure)
            await self._wait()
        parts = self._parts
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self._parts, self._buffered = [], 0
        if self._paused and self._transport is not None and not self.closed:
            self._paused = False
            self._transport.resume_reading()
        return data

    def header(self, name: bytes) -> bytes | None:
        """The first header of that lower-case name."""
        return next((value for key, value in self.headers if key == name), None)

    @property
    def reusable(self) -> bool:
        """Whether another exchange may follow on this connection."""
        transport = self._transport
        if self.closed or not self._complete or not self._reusable or self._parts or transport is None:
            return False
        return transport.get_write_buffer_size() == 0

    def abort(self) -> None:
        """Close at once. What waits for this connection raises."""
        if not self.closed and self._transport is not None:
            self._transport.abort()
        self._fail(UpstreamFailure.RESET)
        self.closed = True

    async def _wait(self) -> None:
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        try:
            await waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, kind: UpstreamFailure) -> None:
        if self._failure is None and not self._complete:
            self._failure = kind
        self._wake()

    # --- the event loop's side ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Bytes came in: parse them; one wake-up for all of them."""
        if self._parser is None or self._complete:
            self.abort()  # nobody asked
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail(UpstreamFailure.PROTOCOL)
            self.abort()
            return
        if self._buffered > READ_BUFFER_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        """The replica will send no more."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Closed, by either side. A body without a length ends with the connection."""
        self.closed = True
        if exc is None and self._head_done and not self._complete and not self._has_length():
            self._complete = True
        self._fail(UpstreamFailure.RESET)
        self._parser = None  # they refer to each other, and would stay until a full collection

    def _has_length(self) -> bool:
        return any(name in {b"content-length", b"transfer-encoding"} for name, _ in self.headers)

    # --- the parser's side --------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._header_bytes += len(name) + len(value)
        if len(self.headers) >= HEADERS_MAX or self._header_bytes > HEADER_BYTES_MAX:
            raise httptools.HttpParserError("too many or too long headers")
        if not self._head_done:  # trailers are dropped
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is complete, unless it is an interim response."""
        parser = self._parser
        assert parser is not None
        self.status = parser.get_status_code()
        self._head_done = self.status >= 200

    def on_body(self, body: bytes) -> None:
        """Body bytes, without their chunk framing."""
        self._parts.append(body)
        self._buffered += len(body)

    def on_message_complete(self) -> None:
        """The response is complete, unless it was an interim one."""
        if not self._head_done:
            self.headers = []
            return
        parser = self._parser
        assert parser is not None
        self._complete = True
        self._reusable = parser.should_keep_alive()


class ConnectionPool:
    """Connections of one gateway to all replicas. How many are open is bounded by what admission lets in."""

    def __init__(self, connect_timeout_ms: float) -> None:
        self._connect_timeout_s = connect_timeout_ms / 1_000
        self._idle: dict[str, list[Connection]] = {}

    async def acquire(self, endpoint: str, at_ns: int) -> Connection:
        """An idle connection to ``endpoint`` (``host:port``) or a new one. Raises ``ReplicaUnreachableError``."""
        idle = self._idle.get(endpoint)
        while idle:
            connection = idle.pop()
            if not connection.closed and at_ns - connection.idle_since_ns < KEEPALIVE_S * 1e9:
                return connection
            connection.abort()
        host, _, port = endpoint.rpartition(":")
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    Connection, host.strip("[]"), int(port)
                )
        except (OSError, ValueError) as error:  # TimeoutError is an OSError
            raise ReplicaUnreachableError(isinstance(error, ConnectionRefusedError)) from None
        return connection

    def release(self, endpoint: str, connection: Connection, at_ns: int) -> None:
        """Keep the connection for another exchange, or close it when there must be none."""
        idle = self._idle.setdefault(endpoint, [])
        if connection.reusable and len(idle) < IDLE_CONNECTIONS_MAX:
            connection.idle_since_ns = at_ns
            idle.append(connection)
        else:
            connection.abort()

    def prune(self, endpoints: Iterable[str], at_ns: int) -> None:
        """Close connections that have idled too long, and all to replicas that are not in ``endpoints``."""
        wanted = set(endpoints)
        for endpoint, idle in list(self._idle.items()):
            keep = []
            for connection in idle:
                young = at_ns - connection.idle_since_ns < KEEPALIVE_S * 1e9
                if endpoint in wanted and young and not connection.closed:
                    keep.append(connection)
                else:
                    connection.abort()
            if keep:
                self._idle[endpoint] = keep
            else:
                del self._idle[endpoint]

    @property
    def idle(self) -> int:
        """Idle connections."""
        return sum(len(connections) for connections in self._idle.values())

    def close(self) -> None:
        """Close all idle connections."""
        self.prune((), 0)


def request_message(path: str, endpoint: str, headers: Iterable[tuple[str, str]], body: bytes) -> bytes:
    """A POST of ``body``. Header values are the gateway's own, never a client's."""
    lines = [f"POST {path} HTTP/1.1", f"host: {endpoint}", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body
