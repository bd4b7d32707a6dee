r"""The gateway's ASGI application: one client connection's request in, one response out, no framework between.

    client rule -> API key -> route -> scope -> body, counted -> parse -> RequestDriver -> raw chunks to the client
                \-> the page, which needs no key

Nothing that a client sends ends in a 500: what the gateway refuses is a :class:`GatewayError` with a true message, and
whatever else is raised is logged with its traceback and answered with 502 and the request's id. Each request ends once:
with its driver, or before it had one (``GatewayCore.ended_early``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import Any, TypeAlias

from deployments.auth import CHALLENGE, Authenticator, require
from deployments.clients import ClientRule, check_site
from deployments.clock import now_ns
from deployments.control_api import BODY_BYTES_MAX as OWN_BODY_BYTES_MAX
from deployments.core import GatewayCore
from deployments.dashboard_page.serving import load_page
from deployments.driver import Interrupt, RequestDriver
from deployments.endpoints import OPEN, RELAYED, Dialect, allowed_methods, label_of, scope_needed
from deployments.errors import GatewayError, error_answer, error_event
from deployments.http_bounds import CONNECTION_KEY
from deployments.ids import clean_client_id, new_request_id
from deployments.keep_alive import HeldSink
from deployments.own_answers import Answer, OwnAnswers
from deployments.request_log import RequestRecord
from deployments.serve_internals import FixedHeadersMessage
from deployments.served import Served
from deployments.shield import CLIENT_ID_KEY, REQUEST_ID_KEY
from policies.events import Outcome

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

logger = logging.getLogger("ray.serve")

JSON = (b"content-type", b"application/json")
CLOSE = (b"connection", b"close")


class ClientLeftError(Exception):
    """The client closed its connection before its request was complete."""


class HttpSink:
    """Writes one response to one HTTP client."""

    def __init__(self, send: Send, dialect: Dialect) -> None:
        self.completed = False
        """The last byte was handed over: what the client does now changes nothing."""
        self.started = False
        self._send = send
        self._dialect = dialect

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the head."""
        self.started = True
        await self._send(FixedHeadersMessage(type="http.response.start", status=status, headers=headers))

    async def body(self, chunk: bytes) -> None:
        """Send the next bytes."""
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self) -> None:
        """End the body."""
        self.completed = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def error(self, error: GatewayError, headers: list[tuple[bytes, bytes]]) -> None:
        """Send ``error`` as the whole response; one that has begun is left incomplete instead."""
        if self.started:
            return
        answer = error_answer(error, self._dialect)
        length = (b"content-length", str(len(answer.body)).encode())
        await self.start(answer.status, [JSON, length, *answer.headers, *headers])
        self.completed = True
        await self._send({"type": "http.response.body", "body": answer.body, "more_body": False})

    async def stream_error(self, error: GatewayError, is_stream: bool) -> None:
        """End a stream with an error event; leave any other body incomplete, so that the server cuts the connection."""
        if is_stream:
            await self.body(error_event(error, self._dialect))
            await self.end()


class HttpFront:
    """The ASGI callable. ``rule`` is set once Serve's front address is known."""

    def __init__(self, served: Served, rule: ClientRule, auth: Authenticator, own: OwnAnswers) -> None:
        core = self._core = served.first
        self._served = served
        self._rule = rule
        self._auth = auth
        self._own = own
        self._page = load_page()
        self._body_bytes_max = core.settings.gateway.body_bytes_max
        self._body_timeout_s = core.settings.gateway.body_timeout_ms / 1_000

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one scope of any type."""
        kind = scope["type"]
        if kind == "http":
            await self._http(scope, receive, send)
        elif kind == "lifespan":
            await _lifespan(receive, send)
        elif kind == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        core = self._core
        core.check_loop()
        arrival_ns = now_ns()
        path = _path(scope)
        endpoint = RELAYED.get(path)
        request_id = scope.get(REQUEST_ID_KEY) or new_request_id()
        sink = HttpSink(send, endpoint.dialect if endpoint is not None else Dialect.OPENAI)
        record = RequestRecord(request_id, label_of(path), arrival_ns)
        try:
            headers = dict(scope["headers"])
            refusal = self._rule.refusal(scope, headers.get(b"host"))
            if refusal is not None:
                raise refusal
            if path in OPEN and scope["method"] in {"GET", "HEAD"}:
                await self._send_page(send, headers, request_id, scope["method"] == "HEAD")
                return
            principal = self._auth.authenticate(headers)
            record.key_id, record.tenant = principal.key_id, principal.tenant
            method = _check_method(path, scope["method"])
            require(principal, scope_needed(path, method))
            if method == "OPTIONS":
                await _send_answer(send, Answer(b"", 204), request_id, allow=", ".join(allowed_methods(path)))
            elif endpoint is not None:
                body = await self._read_body(headers, receive, self._body_bytes_max, record)
                core = self._served.core_of(body)
                inbound = core.parse(body, endpoint, arrival_ns, request_id, principal, headers)
                inbound.record.client_id = clean_client_id(_client_id(scope, headers))
                may_wait = inbound.request.stream and core.policies.flow_context.admission.holds_for_starts
                client = HeldSink(sink, request_id) if may_wait else sink
                await _run(RequestDriver(core, inbound, client), scope, receive, sink)
            elif method in {"POST", "DELETE"}:
                check_site(headers)
                body = await self._read_body(headers, receive, OWN_BODY_BYTES_MAX, record)
                answer = await self._own.take(method, path, body, principal, scope.get("query_string", b""))
                await _send_answer(send, answer, request_id)
            else:
                answer = await self._own.answer(path, scope.get("query_string", b""), principal.tenant)
                await _send_answer(send, answer, request_id, head=method == "HEAD")
        except GatewayError as error:
            await self._refuse(sink, error, record, path, core)
        except ClientLeftError:
            return
        except Exception:
            logger.exception("Request %s failed in the gateway.", request_id)
            if not sink.started:
                core.ended_early(record, Outcome.FAILED, "gateway_error", 502)
                why = f"The gateway failed while it handled the request; its log has the reason under {request_id}."
                unexpected = GatewayError(502, "server_error", "gateway_error", why)
                await sink.error(unexpected, [_id_header(request_id), CLOSE])

    async def _send_page(self, send: Send, headers: dict[bytes, bytes], request_id: str, head: bool) -> None:
        status, given, body = self._page.answer(headers)
        given = [_id_header(request_id), *given]
        await send(FixedHeadersMessage(type="http.response.start", status=status, headers=given))
        await send({"type": "http.response.body", "body": b"" if head else body, "more_body": False})

    async def _read_body(
        self, headers: dict[bytes, bytes], receive: Receive, limit: int, record: RequestRecord
    ) -> bytes:
        length = headers.get(b"content-length", b"")
        if length.isdigit() and (len(length) > 18 or int(length) > limit):
            raise _too_large(limit)
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise GatewayError(415, "invalid_request_error", None, "Compressed request bodies are not supported.")
        try:
            async with asyncio.timeout(self._body_timeout_s):
                return await _whole_body(receive, limit)
        except TimeoutError:
            message = f"The request body was not complete after {self._body_timeout_s:g} s."
            raise GatewayError(408, "invalid_request_error", "request_timeout", message) from None
        except (ClientLeftError, asyncio.CancelledError):
            self._core.ended_early(record, Outcome.CANCELLED, "client_gone", None)
            raise

    async def _refuse(
        self, sink: HttpSink, error: GatewayError, record: RequestRecord, path: str, core: GatewayCore
    ) -> None:
        headers = [_id_header(record.request_id)]
        if error.status == 405:
            headers.append((b"allow", ", ".join(allowed_methods(path)).encode()))
        if error.status == 401:
            headers.append(CHALLENGE)
        if error.status in {401, 408, 413}:
            headers.append(CLOSE)
        core.ended_early(record, Outcome.REFUSED, error.code or "bad_request", error.status)
        with contextlib.suppress(ConnectionError):
            await sink.error(error, headers)


async def _run(driver: RequestDriver, scope: Scope, receive: Receive, sink: HttpSink) -> None:
    connection = scope.get(CONNECTION_KEY)
    if connection is not None and not connection.lost and connection.loop is asyncio.get_running_loop():
        connection.when_lost = partial(_left, driver, sink)
        try:
            await driver.run()
        finally:
            connection.when_lost = None
        return
    watch = asyncio.get_running_loop().create_task(_watch(receive, driver, sink))
    try:
        await driver.run()
    finally:
        watch.cancel()


async def _watch(receive: Receive, driver: RequestDriver, sink: HttpSink) -> None:
    """Tell the driver when the client leaves while the answer is not complete."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            _left(driver, sink)
            return


def _left(driver: RequestDriver, sink: HttpSink) -> None:
    if not sink.completed:
        driver.interrupt(Interrupt.CLIENT_GONE)


async def _whole_body(receive: Receive, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts) if len(parts) > 1 else parts[0]


def _path(scope: Scope) -> str:
    """The path below the application's route prefix."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    if root and path.startswith(root):
        path = path[len(root) :]
    return path if len(path) == 1 or not path.endswith("/") else path[:-1]


def _check_method(path: str, method: str) -> str:
    allowed = allowed_methods(path)
    if not allowed:
        shown = path if len(path) <= 200 else path[:200] + "..."
        raise GatewayError(404, "invalid_request_error", "unknown_url", f"Unknown request URL: {method} {shown}.")
    if method not in allowed:
        message = f"{path} does not answer {method}; it answers {', '.join(allowed)}."
        raise GatewayError(405, "invalid_request_error", "method_not_allowed", message)
    return method


def _too_large(limit: int) -> GatewayError:
    message = f"The request body is larger than the limit of {limit} bytes."
    return GatewayError(413, "invalid_request_error", "request_too_large", message)


def _id_header(request_id: str) -> tuple[bytes, bytes]:
    return (b"x-request-id", request_id.encode())


def _client_id(scope: Scope, headers: dict[bytes, bytes]) -> bytes:
    if REQUEST_ID_KEY in scope:
        value: bytes = scope.get(CLIENT_ID_KEY, b"")
        return value
    return headers.get(b"x-request-id", b"")


async def _send_answer(send: Send, answer: Answer, request_id: str, head: bool = False, allow: str = "") -> None:
    headers = [_id_header(request_id)]
    if allow:
        headers.append((b"allow", allow.encode()))
    else:
        headers.append((b"content-type", answer.content_type.encode()))
        headers.append((b"content-length", str(len(answer.body)).encode()))
    await send(FixedHeadersMessage(type="http.response.start", status=answer.status, headers=headers))
    await send({"type": "http.response.body", "body": b"" if head else answer.body, "more_body": False})


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        elif message["type"] == "lifespan.shutdown":
            await send({"type": "lifespan.shutdown.complete"})
            return
