"""Errors as clients see them: always OpenAI's shape, a true message, never a traceback, a Python repr or a bare detail.

    {"error": {"message": str, "type": str, "param": str | null, "code": str | null}}

Anthropic's clients want ``{"type": "error", "error": {"type", "message"}}``; their endpoints get both shapes in one
object. What an engine answers with status 400 and above is read whole (bounded) and written again in this shape:
``detail``, plain text and HTML included. An engine's 500 becomes 502: seen from a client, it is the server behind the
gateway that failed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from deployments.endpoints import Dialect

ERROR_BODY_BYTES_MAX = 262_144
"""An engine's error body is read up to here; what is longer is not an error message."""
MESSAGE_CHARS_MAX = 2_000
VALIDATION_CHARS_MAX = 4_096
"""Of an engine's list of problems, which repeats what the client sent: the search takes the square of its length."""
VALIDATION_ERRORS_MAX = 5
"""Problems of one body that are listed in a message."""


class GatewayError(Exception):
    """A request that ends with an error. Pickles, so that callers of a deployment handle can catch it by its fields."""

    def __init__(
        self,
        status: int,
        type: str,  # noqa: A002  (the field's name in OpenAI's error object)
        code: str | None,
        message: str,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Callable[..., GatewayError], tuple[object, ...]]:
        return GatewayError, (self.status, self.type, self.code, self.message, self.param, self.retry_after_s)

    def __str__(self) -> str:
        return f"{self.status} {self.code or self.type}: {self.message}"


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """Status, body and extra headers of an error response."""

    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()


def bad_request(message: str, param: str | None = None, code: str | None = None) -> GatewayError:
    """400: the client can mend it."""
    return GatewayError(400, "invalid_request_error", code, message, param)


def model_not_found(model: str) -> GatewayError:
    """404 in the words OpenAI's API uses."""
    shown = model if len(model) <= 128 else model[:128] + "..."
    message = f"The model `{shown}` does not exist or you do not have access to it."
    return GatewayError(404, "invalid_request_error", "model_not_found", message, "model")


def error_object(error: GatewayError, dialect: Dialect = Dialect.OPENAI) -> dict[str, Any]:
    """The JSON object of an error body."""
    inner = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return {"type": "error", "error": inner} if dialect is Dialect.ANTHROPIC else {"error": inner}


def error_answer(error: GatewayError, dialect: Dialect = Dialect.OPENAI) -> ErrorAnswer:
    """The whole response of an error before anything was sent.

    ``Retry-After`` is whole seconds, rounded up; ``retry-after-ms``, which OpenAI's clients prefer, has it exact.
    """
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if error.retry_after_s is not None:
        seconds = str(max(1, math.ceil(error.retry_after_s))).encode()
        headers = ((b"retry-after", seconds), (b"retry-after-ms", str(math.ceil(error.retry_after_s * 1_000)).encode()))
    return ErrorAnswer(error.status, msgspec.json.encode(error_object(error, dialect)), headers)


def error_event(error: GatewayError, dialect: Dialect = Dialect.OPENAI) -> bytes:
    """One server-sent event that ends a stream which has begun; no ``[DONE]`` follows it."""
    if dialect is Dialect.RESPONSES:
        payload = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return b"event: error\ndata: " + msgspec.json.encode({**payload, **error_object(error)}) + b"\n\n"
    event = b"event: error\n" if dialect is Dialect.ANTHROPIC else b""
    return event + b"data: " + msgspec.json.encode(error_object(error, dialect)) + b"\n\n"


# --- an engine's own errors -------------------------------------------------------------------------------------------


def engine_error(status: int, content_type: str, body: bytes) -> GatewayError:
    """An engine's answer with ``status`` of 400 and above as an error in our shape."""
    message, param, code, bare_detail = _read(content_type, body)
    if status == 422 and bare_detail:
        status = 400
    if status == 404 and bare_detail and message == "Not Found":
        message, code = "The engine has no such endpoint for this model.", "unsupported_endpoint"
    message = _clean(message) if message else ""
    if not message:
        message = _plain_words(status)
    kind, own_code = _kind(status, message)
    return GatewayError(502 if status == 500 else status, kind, own_code or code, message, _clean_param(param))


def _read(content_type: str, body: bytes) -> tuple[str, str | None, str | None, bool]:
    """Message, param, code, and whether the body was FastAPI's bare ``detail``."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        is_text = "html" not in content_type and body.lstrip()[:1] != b"<"
        return (body.decode("utf-8", "replace").strip() if is_text else ""), None, None, False
    if not isinstance(value, dict):
        return (value if isinstance(value, str) else ""), None, None, False
    detail = value.get("detail")
    if detail is not None:
        return _detail(detail), _detail_param(detail), None, True
    inner = value.get("error", value)
    if isinstance(inner, str):
        return inner, None, None, False
    if not isinstance(inner, dict):
        return "", None, None, False
    message, param, code = inner.get("message"), inner.get("param"), inner.get("code")
    return (
        message if isinstance(message, str) else "",
        param if isinstance(param, str) else None,
        code if isinstance(code, str) and code else None,
        False,
    )


def _detail(detail: Any) -> str:
    if isinstance(detail, str):
        return detail
    if isinstance(detail, list):
        lines = [
            _validation_line(d.get("loc"), d.get("msg"))
            for d in detail[:VALIDATION_ERRORS_MAX]
            if isinstance(d, dict) and isinstance(d.get("msg"), str)
        ]
        return "; ".join(lines)
    return ""


def _detail_param(detail: Any) -> str | None:
    first = detail[0] if isinstance(detail, list) and detail else None
    loc = first.get("loc") if isinstance(first, dict) else None
    return _path(loc) if isinstance(loc, list) else None


def _validation_line(loc: object, msg: object) -> str:
    where = _path(loc) if isinstance(loc, list) else None
    text = str(msg).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return f"{where}: {text}" if where else text


_MARKER = re.compile(
    r"[\[\]{}()]|^(function-\w+|nullable|chain|str|int|float|bool|list|dict|tagged-union|union|none)$|^([A-Z][a-z]+){2,}$"
)


def _path(loc: list[object]) -> str | None:
    """Pydantic's location without ``body`` and without the names of validators and of classes of a union."""
    parts = [str(p) for p in loc if not _MARKER.search(str(p))]
    if parts and parts[0] == "body":
        parts = parts[1:]
    return ".".join(parts) or None


def _clean_param(param: str | None) -> str | None:
    return param.removeprefix("body.")[:200] if param and param != "body" else None


_VALIDATION = re.compile(r"^\d+ validation errors?:")
_ENTRY = re.compile(
    r"'loc': \((?P<loc>(?:(?!'msg').){0,400}?)\), 'msg': (?P<quote>['\"])(?P<msg>.*?)(?P=quote)(?:, '|\}|$)", re.DOTALL
)
_REPR = re.compile(r"<[\w.]+ object at 0x|<class '|\bTraceback \(most recent call last\)|File \"[^\"]+\", line \d+")


def _clean(message: str) -> str:
    """The message for people: reprs of validation errors become ``path: what``; tracebacks and object reprs go."""
    if _VALIDATION.match(message):
        message = _validation_message(message)
    if _REPR.search(message):
        return ""
    message = " ".join(message.split()) if "\n" in message else message.strip()
    return message if len(message) <= MESSAGE_CHARS_MAX else message[:MESSAGE_CHARS_MAX] + "..."


def _validation_message(message: str) -> str:
    """Engines print pydantic's errors as Python dictionaries; only path and message are the client's."""
    lines: list[str] = []
    for entry in _ENTRY.finditer(message[:VALIDATION_CHARS_MAX]):
        loc: list[object] = [p.strip().strip("'\"") for p in entry["loc"].split(",") if p.strip()]
        line = _validation_line(loc, entry["msg"].replace("\\'", "'").replace('\\"', '"'))
        if line not in lines:
            lines.append(line)
    if not lines:
        return "The request body is not valid."
    return "; ".join(lines[:VALIDATION_ERRORS_MAX])


def _plain_words(status: int) -> str:
    if status >= 500:
        return f"The engine failed while it handled the request (status {status})."
    return f"The engine refused the request (status {status})."


_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def _kind(status: int, message: str) -> tuple[str, str | None]:
    """OpenAI's error type for a status, and a code where the message has a well-known one."""
    if status >= 500:
        return "server_error", "engine_error"
    code = None
    low = message.lower()
    if status == 404 and "model" in low and "does not exist" in low:
        code = "model_not_found"
    elif status == 400 and ("maximum context length" in low or "maximum model length" in low or "max_model_len" in low):
        code = "context_length_exceeded"
    return _TYPES.get(status, "invalid_request_error"), code
