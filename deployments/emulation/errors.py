"""Errors of the emulated engine in the words and shapes of vLLM 0.29.0.

Two families, as recorded from a real server: what the schema refuses is ``Bad Request`` with the validator's list as
its message and ``body.<path>`` as its parameter; what the server's own checks refuse is ``BadRequestError`` with a
sentence. ``/v1/messages`` answers the second family in Anthropic's shape and the first in OpenAI's, and unknown paths
and unreadable bodies in FastAPI's bare ``detail``. A gateway has to even that out; this is the engine, so it does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

_UNION_MARKS = frozenset({"str", "int", "float", "bool", "list", "dict", "none"})
"""Location parts that name a branch of a union, not a field."""
INPUT_CHARS_MAX = 2_000
"""A refused value is repeated up to this length."""


class ApiError(Exception):
    """A request ends with this status and this error object."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param

    def openai(self) -> dict[str, Any]:
        """Body in OpenAI's shape."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}}

    def anthropic(self) -> dict[str, Any]:
        """Body in Anthropic's shape; what the schema refused stays in OpenAI's, as vLLM has it."""
        if self.kind == "Bad Request":
            return self.openai()
        return {"type": "error", "error": {"type": self.kind, "message": self.message}}


class BareError(Exception):
    """FastAPI's own answer: ``{"detail": ...}``."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


def refused(message: str, param: str | None = None, **value: Any) -> ApiError:
    """400 of a check of the server's own. ``param`` and ``value`` are repeated in the message as vLLM does."""
    notes = [f"parameter={param}"] if param else []
    notes += [f"value={v}" for v in value.values()]
    return ApiError(400, "BadRequestError", f"{message} ({', '.join(notes)})" if notes else message, param)


def model_not_found(model: str) -> ApiError:
    """404 of an unknown model."""
    return ApiError(404, "NotFoundError", f"The model `{model}` does not exist.", "model")


def invalid(problems: Sequence[dict[str, Any]]) -> ApiError:
    """400 of the schema, from the validator's list (``type``, ``loc``, ``msg``, ``input`` each)."""
    label = "error" if len(problems) == 1 else "errors"
    lines = "".join(f"  {_shortened(problem)}\n" for problem in problems)
    loc = problems[0].get("loc", ()) if problems else ()
    return ApiError(400, "Bad Request", f"{len(problems)} validation {label}:\n{lines}".rstrip(), clean_loc(loc))


def invalid_body(error: ValidationError) -> ApiError:
    """The same from a pydantic error of the whole body."""
    return invalid([{**found, "loc": ("body", *found["loc"])} for found in error.errors(include_url=False)])


def missing(*loc: str | int, given: Any = None) -> ApiError:
    """400 for a field that is not there."""
    return invalid([{"type": "missing", "loc": ("body", *loc), "msg": "Field required", "input": given}])


def clean_loc(loc: Sequence[str | int]) -> str:
    """Dotted path of a field without the names of union branches."""
    parts = [str(p) for p in loc if not (isinstance(p, str) and (p in _UNION_MARKS or set("[](){}") & set(p)))]
    return ".".join(parts)


def _shortened(problem: dict[str, Any]) -> str:
    text = str(problem)
    return text if len(text) <= INPUT_CHARS_MAX else text[:INPUT_CHARS_MAX] + "..."
