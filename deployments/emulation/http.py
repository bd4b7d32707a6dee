"""HTTP application of the emulated engine: vLLM's endpoints, its statuses and shapes, its behaviour when clients leave.

Raw ASGI, because it runs for every token of every stream. One request: read the body, parse it into a :class:`View`,
submit it to the core, pass events on as they come. A client that leaves aborts its work at once, streaming or not,
also while it waits. As in vLLM the status line of a stream goes out before anything is computed.

Scripted faults of requests play here where they are about bytes: a cut socket is a response that ends without its end.
It must not time anything; the core does.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from pydantic import ValidationError

from deployments.emulation import chat, checks, completions, messages, responses
from deployments.emulation.bodies import DetokenizeBody, TokenizeBody, TokenizeChatBody
from deployments.emulation.core import EngineCore, EngineFullError, Event, Generation
from deployments.emulation.errors import ApiError, BareError, invalid, invalid_body, missing
from deployments.emulation.jobs import View, to_json
from deployments.emulation.metrics import MetricsPage
from deployments.emulation.tokens import decode, encode, token_text
from deployments.gate import Message, Receive, Scope, Send

VERSION = "0.29.0"
"""Of the vLLM whose answers are emulated."""
BODY_BYTES_MAX = 64_000_000
JSON_TYPE = (b"content-type", b"application/json")
METRICS_TYPE = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
STREAM_TYPE = (b"content-type", b"text/event-stream; charset=utf-8")

Parse: TypeAlias = Callable[[Any], View]
Simple: TypeAlias = Callable[[Any], dict[str, Any]]


class ClientLeftError(Exception):
    """The client closed its connection before its request was complete."""


class EngineApp:
    """ASGI application over one :class:`EngineCore`."""

    def __init__(self, core: EngineCore, model: str, root: str = "emulated") -> None:
        """``model`` is the served name, ``root`` what ``/v1/models`` says it was loaded from."""
        self._core = core
        self._model = model
        self._root = root
        self._metrics = MetricsPage(core, model)
        self._health_changed = asyncio.Event()
        core.faults.listen(self._health_changed.set)
        self._get: dict[str, Callable[[], dict[str, Any]]] = {"/v1/models": self._models, "/version": _version}
        self._generate = {
            "/v1/chat/completions": chat.parse,
            "/v1/completions": completions.parse,
            "/v1/responses": responses.parse,
            "/v1/messages": messages.parse,
        }
        self._answer: dict[str, Simple] = {
            "/v1/messages/count_tokens": lambda raw: messages.count_tokens(raw, model),
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        path = scope["path"]
        try:
            await self._serve(scope, receive, send)
        except ClientLeftError:
            return
        except ApiError as error:
            body = error.anthropic() if path.startswith("/v1/messages") else error.openai()
            await _send(send, error.status, to_json(body))
        except BareError as error:
            await _send(send, error.status, to_json({"detail": error.detail}))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if path in self._generate or path in self._answer:
            _need_method(method, "POST")
            raw = await _read_json(scope, receive)
            if path in self._answer:
                await _send(send, 200, to_json(self._answer[path](raw)))
            else:
                await self._run(self._parse(path, scope, raw), receive, send)
        elif path.startswith("/v1/responses/"):
            raise responses.not_found(path.removeprefix("/v1/responses/").removesuffix("/cancel"))
        elif path in ("/health", "/ping"):
            await self._health(receive, send)
        elif path == "/metrics":
            _need_method(method, "GET")
            await _send(send, 200, self._metrics.text(), METRICS_TYPE)
        elif path in self._get:
            _need_method(method, "GET")
            await _send(send, 200, to_json(self._get[path]()))
        else:
            raise BareError(404, "Not Found")

    # --- generation ---------------------------------------------------------------------------------------------------

    def _parse(self, path: str, scope: Scope, raw: Any) -> View:
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), None)
        job_id = given or secrets.token_hex(8)
        if given is not None and isinstance(raw, dict):
            raw.pop("request_id", None)  # the header wins, as with vLLM
        return self._generate[path](raw, self._model, self._core.settings, job_id, int(time.time()))

    async def _run(self, view: View, receive: Receive, send: Send) -> None:
        job, core = view.job, self._core
        core.counters.requests += 1
        if core.faults.now.kind == "unavailable" and core.faults.hits(job.prompt_text):
            raise ApiError(503, "ServiceUnavailableError", "The engine takes no requests.")
        try:
            generation = core.submit(job.pairs(), job.prompt_text, job.salt)
        except EngineFullError:
            raise checks.full() from None
        watcher = asyncio.create_task(self._watch(generation, receive))
        try:
            await (self._stream(view, generation, send) if job.stream else self._collect(view, generation, send))
        finally:
            watcher.cancel()
            core.abort(generation)

    async def _watch(self, generation: Generation, receive: Receive) -> None:
        """Abort the work when the client leaves."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._core.abort(generation)
        generation.events.put_nowait(Event("left", 0))

    async def _collect(self, view: View, generation: Generation, send: Send) -> None:
        """One JSON answer."""
        open_choices = len(view.job.answers)
        while open_choices:
            event = await generation.events.get()
            if event.kind == "left":
                return
            if event.kind == "error":
                raise internal_error()
            if event.kind in ("cut", "silence"):
                await self._silence(event, generation)
                await _cut(send)
                return
            open_choices -= event.last
        body = to_json(view.whole(generation.cached_tokens))
        if generation.hit and self._core.faults.now.kind == "bad_json":
            body = body[: len(body) // 2]
        await _send(send, 200, body)

    async def _stream(self, view: View, generation: Generation, send: Send) -> None:
        """Server-sent events."""
        await send({"type": "http.response.start", "status": 200, "headers": [STREAM_TYPE]})
        await _more(send, view.opening())
        open_choices, begun = len(view.job.answers), False
        while open_choices:
            event = await generation.events.get()
            if event.kind == "left":
                return
            if event.kind != "token":
                await self._break(view, event, generation, send)
                return
            if not begun:
                begun = True
                await _more(send, view.first())
            if self._spoils(event, generation):
                await _more(send, [b'data: {"id": "broken", "choices": [{\n\n'])
            await _more(send, [view.token(event.index, event.count, event.last)])
            open_choices -= event.last
        await _more(send, view.closing(generation.cached_tokens))
        await send({"type": "http.response.body", "body": b""})

    async def _break(self, view: View, event: Event, generation: Generation, send: Send) -> None:
        """End a stream by a fault."""
        chunks = view.broken(internal_error()) if event.kind == "error" else None
        if chunks is not None:
            await _more(send, chunks)
            await send({"type": "http.response.body", "body": b""})
            return
        await self._silence(event, generation)
        # Returning without the last body message makes the server close the socket in the middle of the response.

    async def _silence(self, event: Event, generation: Generation) -> None:
        """Nothing for a while, or until the client has left."""
        if event.kind == "silence":
            try:
                await asyncio.wait_for(generation.events.get(), self._core.faults.now.silence_s)
            except TimeoutError:
                return

    def _spoils(self, event: Event, generation: Generation) -> bool:
        """Whether a broken event goes out before this token: once for each hit request."""
        faults = self._core.faults.now
        if not generation.hit or faults.kind != "bad_json" or event.count <= faults.after_tokens:
            return False
        generation.hit = False
        return True

    # --- the rest -----------------------------------------------------------------------------------------------------

    async def healthy(self) -> bool:
        """Answer a health check: never while the fault ``health: blocked`` is on."""
        while self._core.faults.now.health == "blocked":
            self._health_changed.clear()
            await self._health_changed.wait()
        return self._core.faults.now.health == "ok"

    async def _health(self, receive: Receive, send: Send) -> None:
        answer = asyncio.ensure_future(self.healthy())
        left = asyncio.ensure_future(_left(receive))
        done, pending = await asyncio.wait({answer, left}, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        if answer in done:
            await _send(send, 200 if answer.result() else 503, b"", None)

    def _models(self) -> dict[str, Any]:
        created = int(time.time())
        permission = {
            "id": f"modelperm-{secrets.token_hex(8)}", "object": "model_permission", "created": created,
            "allow_create_engine": False, "allow_sampling": True, "allow_logprobs": True, "allow_search_indices": False,
            "allow_view": True, "allow_fine_tuning": False, "organization": "*", "group": None, "is_blocking": False,
        }  # fmt: skip
        card = {
            "id": self._model, "object": "model", "created": created, "owned_by": "vllm", "root": self._root,
            "parent": None, "max_model_len": self._core.settings.context_tokens_max, "permission": [permission],
        }  # fmt: skip
        return {"object": "list", "data": [card]}

    def _tokenize(self, raw: Any) -> dict[str, Any]:
        if isinstance(raw, dict) and "messages" in raw:
            chat_body = _validated(TokenizeChatBody, raw)
            checks.check_model(chat_body.model, self._model)
            checks.check_messages(chat_body.messages)
            tokens = chat.encode_messages(chat_body.messages, self._model, chat_body.add_generation_prompt)
            strings = chat_body.return_token_strs
        else:
            body = _validated(TokenizeBody, raw)
            checks.check_model(body.model, self._model)
            tokens, strings = encode(body.prompt), body.return_token_strs
        return {
            "count": len(tokens),
            "max_model_len": self._core.settings.context_tokens_max,
            "tokens": tokens,
            "token_strs": [token_text(t) for t in tokens] if strings else None,
        }

    def _detokenize(self, raw: Any) -> dict[str, Any]:
        body = _validated(DetokenizeBody, raw)
        checks.check_model(body.model, self._model)
        return {"prompt": decode(body.tokens)}


def internal_error() -> ApiError:
    """What an engine's failure looks like from outside."""
    return ApiError(500, "InternalServerError", "Internal server error")


def _version() -> dict[str, Any]:
    return {"version": VERSION}


def _validated(kind: type[Any], raw: Any) -> Any:
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise invalid_body(error) from None


def _need_method(given: str, wanted: str) -> None:
    if given != wanted:
        raise BareError(405, "Method Not Allowed")


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read_json(scope: Scope, receive: Receive) -> Any:
    """The body as a JSON value, refused as FastAPI does."""
    body = await _read(receive)
    kind = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    media = kind.lower().split(b";")[0].strip()
    if media != b"application/json":
        problem = "Unsupported Media Type: Only 'application/json' is allowed"
        error = ApiError(400, "Bad Request", f"1 validation error:\n  {problem}")
        raise error
    try:
        value = json.loads(body) if body else None
    except json.JSONDecodeError as error:
        found = {"type": "json_invalid", "loc": ("body", error.pos), "msg": "JSON decode error", "input": {}}
        raise invalid([{**found, "ctx": {"error": error.msg}}]) from None
    except (ValueError, RecursionError):
        raise BareError(400, "There was an error parsing the body") from None
    if value is None:
        raise missing()
    return value


async def _read(receive: Receive) -> bytes:
    parts, size = [], 0
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        part = message.get("body", b"")
        size += len(part)
        if size > BODY_BYTES_MAX:
            raise ApiError(413, "BadRequestError", f"The body is larger than {BODY_BYTES_MAX} bytes.")
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


async def _send(send: Send, status: int, body: bytes, kind: tuple[bytes, bytes] | None = JSON_TYPE) -> None:
    headers = [(b"content-length", str(len(body)).encode()), *([kind] if kind else [])]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _more(send: Send, chunks: list[bytes]) -> None:
    """Parts of a stream, each its own write."""
    for chunk in chunks:
        if chunk:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})


async def _cut(send: Send) -> None:
    """Begin a JSON answer that will not come."""
    await send({"type": "http.response.start", "status": 200, "headers": [JSON_TYPE, (b"content-length", b"1000")]})
    await send({"type": "http.response.body", "body": b'{"id":', "more_body": True})
