"""The outermost layer of a gateway replica's HTTP server: what clients send that Serve itself would act on ends here.

Serve reads some headers of direct-ingress requests before the gateway sees them: a client could choose the request id
of Serve's logs and response, a time-out that ends in a plain-text 408, a switch that hides its leaving, or a byte that
is no UTF-8 and ends in a 500. They are removed here, in every spelling Serve knows (it takes ``_`` for ``-``); the
request gets the server's own id, which Serve then uses too, and the client's id goes on in the scope, for the log.
Serve is told not to watch for clients that leave (:data:`UNWATCHED`): the gateway does that itself, and Serve's way of
doing it costs two tasks a request.
Websockets are refused here: no path has one. The HTTP server gets the bounds of :mod:`deployments.http_bounds`.

Serve loads :func:`middlewares` by its import path (``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``). Without it all
works, with Serve's own treatment of these headers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.middleware import Middleware

from deployments.http_bounds import bound_default_protocol
from deployments.ids import new_request_id

if TYPE_CHECKING:
    from deployments.gate import ASGIApp, Receive, Scope, Send

IMPORT_PATH = "deployments.shield.middlewares"
CLIENT_ID_KEY = "tidegate.client_request_id"
"""Scope key of the client's own request id, raw bytes."""
REQUEST_ID_KEY = "tidegate.request_id"
"""Scope key of the server's id."""
UNWATCHED = (b"x-request-disconnect-disabled", b"?1")
TAKEN_OFF = frozenset({
    b"x-request-id", b"x-request-timeout-seconds", b"x-request-disconnect-disabled", b"x-session-id",
    b"serve-multiplexed-model-id",
})  # fmt: skip
"""Names, with ``-`` for ``_``."""
TEXT = frozenset({b"traceparent", b"tracestate"})
"""Serve decodes these; they stay when they are ASCII."""


class Shield:
    """See the module."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one scope on."""
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] == "http":
            shield(scope)
        await self._app(scope, receive, send)


def shield(scope: Scope) -> None:
    """Change ``scope`` in place."""
    request_id = new_request_id()
    kept = [(b"x-request-id", request_id.encode()), UNWATCHED]
    for name, value in scope["headers"]:
        if name.replace(b"_", b"-") not in TAKEN_OFF:
            if value.isascii() or name not in TEXT:
                kept.append((name, value))
        elif name == b"x-request-id":
            scope[CLIENT_ID_KEY] = value
    scope["headers"] = kept
    scope[REQUEST_ID_KEY] = request_id


def middlewares() -> list[Middleware]:
    """What Serve puts around every HTTP server of the process; called before it starts one."""
    bound_default_protocol()
    return [Middleware(Shield)]
