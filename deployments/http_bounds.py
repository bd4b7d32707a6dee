"""uvicorn's HTTP protocol with bounds on what a client may send before anybody has looked at it.

uvicorn reads request heads of any length, for as long as they take, queues pipelined requests without end, and adds
trailers to the headers. Here a head is at most :data:`HEAD_BYTES_MAX` and :data:`HEADERS_MAX` headers long (else 431)
and complete after :data:`HEAD_S_MAX` (else 408); what is left of a body that was answered early gets as long again; at
most :data:`PIPELINED_MAX` requests wait behind the one that is answered; trailers are dropped. Behind HAProxy this is a
second line; a port of a replica or gateway that is reached directly has no other.

Bodies are not its matter: they are read as their reader asks, and their size and time are limited there.

Whoever serves a request finds the connection in its scope (:data:`CONNECTION_KEY`) and may leave word there for the
client's leaving, which costs less than a task that waits for a message.
"""

from __future__ import annotations

import asyncio
import http
from asyncio.events import TimerHandle
from collections.abc import Callable

import httptools
import uvicorn.protocols.http.auto
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES_MAX = 65_536
"""Request line and headers together. HAProxy as Serve sets it up lets 16 KiB pass."""
HEADERS_MAX = 200
HEAD_S_MAX = 20.0
"""From the connection, or the first byte of a further request, to the empty line after its headers."""
PIPELINED_MAX = 32
CONNECTION_KEY = "tidegate.connection"
"""Scope key of the connection, a :class:`BoundedHttp`."""


class BoundedHttp(HttpToolsProtocol):
    """See the module."""

    _timer: TimerHandle | None = None
    _head_open = True
    """Headers are expected, not trailers."""
    _head_begun = False
    """Part of a head is here."""
    _head_bytes = 0
    _headers = 0
    _steps = 0
    _dark_bytes = 0
    """Bytes in a row the parser has said nothing of: it keeps them, or drops them for ever."""
    lost = False
    """The connection is closed."""
    when_lost: Callable[[], None] | None = None
    """Called once, when the connection closes; of whoever answers now: requests of one connection are answered one
    after the other."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Connected: the first head is awaited."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Closed by either side."""
        self._head_is_here()
        super().connection_lost(exc)
        self.lost = True
        if self._has_cycle():  # what refers to each other stays until a full collection
            self.scope.pop(CONNECTION_KEY, None)  # type: ignore[misc]
            self.cycle = None  # type: ignore[assignment]
        call, self.when_lost = self.when_lost, None
        if call is not None:
            call()

    def data_received(self, data: bytes) -> None:
        """Parse; then see whether it led anywhere."""
        steps = self._steps
        super().data_received(data)
        if self._steps != steps:
            self._dark_bytes = 0
            return
        self._dark_bytes += len(data)
        if self._dark_bytes > HEAD_BYTES_MAX:
            self._refuse(431)
        elif not self._has_cycle() or self.cycle.response_complete:
            self._await_head()

    def send_400_response(self, msg: str) -> None:
        """Tell of bytes that are no HTTP, unless an answer is under way: then the connection just ends."""
        if self.transport.is_closing():
            return
        if self._is_answering():
            self.transport.close()
            return
        super().send_400_response(msg)

    # --- the parser's side --------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self.scope[CONNECTION_KEY] = self  # type: ignore[literal-required]
        self._steps += 1
        self._head_open = self._head_begun = True
        self._head_bytes = self._headers = 0
        self._await_head()

    def on_url(self, url: bytes) -> None:
        """Part of the request line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, or a trailer, which is dropped."""
        self._headers += 1
        self._count(len(name) + len(value) + 4)
        if self._head_open:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete: the application begins."""
        self._steps += 1
        self._head_is_here()
        self._head_open = self._head_begun = False
        if len(self.pipeline) >= PIPELINED_MAX:
            raise httptools.HttpParserError("too many pipelined requests")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Part of a body."""
        self._steps += 1
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request's last byte; when it was answered before, the next head is awaited."""
        self._steps += 1
        super().on_message_complete()
        if self.cycle.response_complete:
            self._head_is_here()
            self._await_head()

    def on_response_complete(self) -> None:
        """Answered. What is left of the request's body has as long as a head."""
        super().on_response_complete()
        if self._has_cycle() and self.cycle.response_complete and self.cycle.more_body:
            self._await_head()

    # --- bounds -------------------------------------------------------------------------------------------------------

    def _count(self, size: int) -> None:
        self._steps += 1
        self._head_bytes += size
        if self._head_bytes > HEAD_BYTES_MAX or self._headers > HEADERS_MAX:
            self._refuse(431)
            raise httptools.HttpParserError("the head is too large")

    def _await_head(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_S_MAX, self._late)

    def _head_is_here(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self._head_begun:
            self._refuse(408)
        else:
            self.transport.close()

    def _is_answering(self) -> bool:
        """Part of an answer is out, so no other one may begin."""
        started = self._has_cycle() and self.cycle.response_started and not self.cycle.response_complete
        return started or bool(self.pipeline)

    def _has_cycle(self) -> bool:
        return bool(self.cycle)  # None before the first request, whatever its type says

    def _refuse(self, status: int) -> None:
        """End the connection; say why where no answer is under way."""
        if self.transport.is_closing():
            return
        if not self._is_answering():
            phrase = http.HTTPStatus(status).phrase
            head = f"HTTP/1.1 {status} {phrase}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode())
        self.transport.close()


def bound_default_protocol() -> None:
    """Make it uvicorn's default in this process: servers that others start, such as Serve's, have the bounds too."""
    uvicorn.protocols.http.auto.AutoHTTPProtocol = BoundedHttp
