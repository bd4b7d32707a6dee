"""The gate in front of a replica's own HTTP port: who may pass, who is inside, and until when new ones are let in.

A replica's port is not an open door: a request passes only with ``x-tidegate-gate: <token>``. The token is random for
each replica's life and travels to gateways in Serve's replica metadata; it is compared in constant time and taken off
before the engine's application sees the request. Everything is behind it, ``/health`` and ``/metrics`` too; websockets
never pass.

Requests inside are counted exactly: up before the application is called, down when it has returned, failed or was
cancelled. A raw ASGI class, because it runs on every streamed chunk: no framework object is made per request.

It must not look into bodies, and it must not decide when a replica leaves: ``refuse_new`` is set by its owner.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from deployments.clock import now_ns

GATE_HEADER = "x-tidegate-gate"
REFUSED_HEADER = "x-tidegate-refused"

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
ASGIApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_GATE_KEY = GATE_HEADER.encode()


class Gate:
    """ASGI application that lets authorised requests through to ``app``."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        """``token`` is what the header must hold, ASCII."""
        self._app = app
        self._token = token.encode()
        self._silent: dict[int, int] = {}
        self._entered = 0
        self.inflight = 0
        """HTTP requests inside now."""
        self.refuse_new = False
        """True: requests that come from now on are answered 503 and never started."""
        self.on_first_body: Callable[[], None] | None = None
        """Called once, when the first byte of any answer's body leaves."""
        self.before: Callable[[], Awaitable[None]] | None = None
        """Awaited by each request before it goes on: an engine that sleeps is woken."""
        self.empty = asyncio.Event()
        """Set while nobody is inside."""
        self.empty.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection scope."""
        kind = scope["type"]
        if kind == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        elif kind != "http":
            raise RuntimeError(f"unexpected ASGI scope {kind!r}")
        elif not self._admits(scope):
            await _answer(send, 403, "permission_error", "gate_required", "Requests reach this port through a gateway.")
        elif self.refuse_new:
            await _answer(send, 503, "service_unavailable", "replica_draining", "This replica is leaving.", "draining")
        else:
            await self._inside(scope, receive, send)

    def silent_since_ns(self) -> int | None:
        """When the oldest request that has not had one byte of body yet came in; ``None``: there is no such request."""
        return next(iter(self._silent.values()), None)

    def _admits(self, scope: Scope) -> bool:
        """True when the only gate header is right; takes it off ``scope``."""
        headers = scope["headers"]
        given = [value for name, value in headers if name == _GATE_KEY]
        if len(given) != 1 or not hmac.compare_digest(given[0], self._token):
            return False
        scope["headers"] = [h for h in headers if h[0] != _GATE_KEY]
        return True

    async def _inside(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._entered += 1
        me, silent = self._entered, self._silent
        silent[me] = now_ns()
        self.inflight += 1
        self.empty.clear()

        async def heard(message: Message) -> None:
            if me in silent and message.get("body"):
                del silent[me]
                if self.on_first_body is not None:
                    told, self.on_first_body = self.on_first_body, None
                    told()
            await send(message)

        try:
            if self.before is not None:
                await self.before()
            await self._app(scope, receive, heard)
        finally:
            silent.pop(me, None)
            self.inflight -= 1
            if self.inflight == 0:
                self.empty.set()


async def _answer(send: Send, status: int, kind: str, code: str, message: str, refused: str = "") -> None:
    """One error in OpenAI's shape. The connection closes: the request's body may be unread."""
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    if refused:
        headers.append((REFUSED_HEADER.encode(), refused.encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
