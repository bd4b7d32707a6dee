"""Schemas of the OpenAPI description: request bodies by where the prompt lies, and the two shapes of an error.

A body lists what the gateway reads and the fields most clients send. Every other field is the engine's own and passes
unread, so no body forbids more: what is refused is told by the answer, not by this text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from deployments.endpoints import Endpoint, PromptKind
from policies.steering import ANY, Knob
from policies.types import Mode

Schema: TypeAlias = dict[str, Any]

ERROR_TYPES = (
    "invalid_request_error", "authentication_error", "permission_error", "rate_limit_error", "insufficient_quota",
    "server_error", "service_unavailable",
)  # fmt: skip
"""Examples of ``error.type``; engines may name others."""

_TEXT: Schema = {"type": "string"}
_TOKENS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_NULLABLE_TEXT: Schema = {"type": ["string", "null"]}


def body_schema(endpoint: Endpoint, models: Sequence[str]) -> Schema:
    """The request body of one relayed endpoint of a gateway that serves ``models``."""
    if endpoint.prompt is PromptKind.PROMPT_OR_CHAT:
        by_text = _object({"prompt": _TEXT}, ["prompt"])
        by_messages = _object({"messages": _messages(endpoint)}, ["messages"])
        return _object({"model": _model(models)}, [], anyOf=[by_text, by_messages])
    properties: Schema = {"model": _model(models)}
    required = [] if endpoint.model_optional else ["model"]
    name, prompt = _prompt(endpoint)
    properties[name] = prompt
    required.append(name)
    if endpoint.generates:
        properties |= _generation(endpoint)
        if _is_anthropic(endpoint):
            required.append("max_tokens")
    if endpoint.streams:
        properties["stream"] = {"type": ["boolean", "null"], "description": "Answer with server-sent events."}
    return _object(properties, required)


def error_schema(anthropic: bool) -> Schema:
    """The body of every answer with a status of 400 and above."""
    inner = _object(
        {
            "message": {"type": "string", "minLength": 1},
            "type": {"type": "string", "minLength": 1, "examples": list(ERROR_TYPES)},
            "param": {**_NULLABLE_TEXT, "description": "The field that is wrong, where one is."},
            "code": {**_NULLABLE_TEXT, "description": "The reason, for programs."},
        },
        ["message", "type", "param", "code"],
    )
    if anthropic:
        return _object({"type": {"const": "error"}, "error": inner}, ["type", "error"])
    return _object({"error": inner}, ["error"])


def _object(properties: Schema, required: list[str], **more: Any) -> Schema:
    return {"type": "object", "properties": properties, **({"required": required} if required else {}), **more}


def _model(models: Sequence[str]) -> Schema:
    return {"type": "string", "enum": list(models)}


def _prompt(endpoint: Endpoint) -> tuple[str, Schema]:
    """Name and schema of the field that holds the prompt."""
    if endpoint.prompt is PromptKind.CHAT:
        return "messages", _messages(endpoint)
    if endpoint.prompt is PromptKind.TOKENS:
        return "tokens", _TOKENS
    if endpoint.prompt is PromptKind.PROMPT:
        batch: list[Schema] = [{"type": "array", "items": _TEXT}, {"type": "array", "items": _TOKENS}]
        return "prompt", {"anyOf": [_TEXT, _TOKENS, *batch]}
    items: Schema = {"type": "array", "items": {"type": "object"} if endpoint.generates else _TEXT}
    return "input", {"anyOf": [_TEXT, items]}


_WHY: Schema = {"type": "string", "maxLength": 500, "description": "Why, for those who read the ledger."}
_EXPIRES: Schema = {"type": "number", "exclusiveMinimum": 0, "default": 3_600, "description": "Seconds it lasts."}
_KNOB: Schema = {"enum": [*Knob, ANY, None], "description": "Left out: every knob, with a mode."}
CONTROL_BODIES: dict[str, Schema] = {
    "/control/overrides": {
        "type": "object",
        "properties": {
            "knob": _KNOB,
            "value": {"type": "number", "minimum": 0, "maximum": 1_000_000_000},
            "mode": {"enum": list(Mode)},
            "target": {"type": "string", "maxLength": 256, "description": "A replica's id; left out: all of them."},
            "expires_in_s": _EXPIRES,
            "why": _WHY,
        },
        "additionalProperties": False,
        "oneOf": [{"required": ["knob", "value"]}, {"required": ["mode"]}],
    },
    "/control/shadow": {
        "type": "object",
        "properties": {"shadow": {"type": "boolean"}, "knob": _KNOB, "expires_in_s": _EXPIRES, "why": _WHY},
        "additionalProperties": False,
        "required": ["shadow"],
    },
}
"""Bodies that set something by hand, by path."""


def _messages(endpoint: Endpoint) -> Schema:
    roles = ["user", "assistant"] if _is_anthropic(endpoint) else ["system", "user", "assistant", "tool"]
    part = _object({"type": {"const": "text"}, "text": _TEXT}, ["type", "text"])
    content: Schema = {"anyOf": [_TEXT, {"type": "array", "items": part}]}
    message = _object({"role": {"type": "string", "enum": roles}, "content": content}, ["role", "content"])
    return {"type": "array", "minItems": 1, "items": message}


def _generation(endpoint: Endpoint) -> Schema:
    """Fields of endpoints that generate."""
    limit: Schema = {"type": "integer", "minimum": 1, "description": "Most output tokens."}
    sampling: Schema = {
        "temperature": {"type": "number", "minimum": 0, "maximum": 2},
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "cache_salt": {"type": "string", "minLength": 1, "maxLength": 1_024},
    }
    if _is_anthropic(endpoint):
        return {"max_tokens": limit, "system": _TEXT, **sampling}
    sampling["metadata"] = {"type": "object", "additionalProperties": _TEXT}
    if endpoint.prompt is PromptKind.INPUT:
        return {"max_output_tokens": limit, "instructions": _TEXT, **sampling}
    sampling |= {
        "max_tokens": limit,
        "n": {"type": "integer", "minimum": 1},
        "seed": {"type": "integer"},
        "stop": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": 4}]},
        "stream_options": _object({"include_usage": {"type": "boolean"}}, []),
    }
    if endpoint.prompt is PromptKind.CHAT:
        sampling["max_completion_tokens"] = limit
    return sampling


def _is_anthropic(endpoint: Endpoint) -> bool:
    return endpoint.dialect.value == "anthropic"
