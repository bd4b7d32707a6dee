"""The gateway's OpenAPI 3.1 description, made from the table of endpoints and served at ``/openapi.json``.

One operation per method that :func:`deployments.endpoints.allowed_methods` lists, so path and method cannot be told
wrong. It must not describe what the table does not hold, and it says nothing of an engine's own fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from deployments.endpoints import (
    MODEL_PREFIX,
    OPEN,
    OVERRIDE_PREFIX,
    OWN,
    PAGE,
    RELAYED,
    REQUEST_PREFIX,
    TASK_OUTCOME_SUFFIX,
    TASK_PREFIX,
    Dialect,
    Endpoint,
    allowed_methods,
)
from deployments.openapi_bodies import CONTROL_BODIES, Schema, body_schema, error_schema
from deployments.request_meta import DEADLINE_MS_MAX, TASK_CHARS_MAX, TASK_ID
from policies.steering import Lever

OPENAPI_VERSION = "3.1.0"
VERSION = "0.1.0"
"""Of this product, as pyproject.toml has it."""
TEXT_ANSWERS = frozenset({"/metrics", "/control/metrics"})
"""Own endpoints that answer with plain text; ``/health`` has no body, all others are JSON."""
HTML_ANSWERS = frozenset({PAGE})
EMPTY_ANSWERS = frozenset({"/health"})
ARRAY_ANSWERS = frozenset({"/control/decisions"})
PARAMETERS: dict[str, list[Schema]] = {
    "/control/state": [
        {"name": "tick", "in": "query", "schema": {"type": "integer", "minimum": 0, "maximum": 10**18 - 1}},
    ],
    "/control/decisions": [
        {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 1_000}},
        {"name": "since_seq", "in": "query", "schema": {"type": "integer", "minimum": 0, "maximum": 10**18 - 1}},
        {"name": "since", "in": "query", "schema": {"type": "string", "examples": ["15m", "2026-11-30T21:15:00Z"]}},
        {"name": "lever", "in": "query", "schema": {"enum": [*Lever, "guard"]}},
        {"name": "target", "in": "query", "schema": {"type": "string"}},
    ],
}
"""Query parameters of own endpoints."""
OF_ONE_MODEL = frozenset(
    f"/control/{name}" for name in ("state", "overview", "decisions", "conditions", "overrides", "shadow")
)
"""Own endpoints that are about one of several models: ``?model=NAME``, else the first."""
_TASK: Schema = {"type": "string", "pattern": f"^{TASK_ID.pattern}$", "maxLength": TASK_CHARS_MAX}
_DEADLINE: Schema = {"type": "number", "exclusiveMinimum": 0, "maximum": DEADLINE_MS_MAX}
TASK = "^[A-Za-z0-9][A-Za-z0-9._~:@=+-]{0,127}$"
OUTCOME: Schema = {
    "type": "object",
    "properties": {"outcome": {"type": "string", "enum": ["success", "failure"]}},
    "required": ["outcome"],
}
REQUEST_HEADERS: tuple[tuple[str, Schema, str], ...] = (
    ("x-request-id", {"type": "string"}, "the client's own id, for the log"),
    ("x-tidegate-class", {"enum": ["interactive", "standard", "batch"]}, "how important the request is"),
    ("x-tidegate-deadline-ms", _DEADLINE, "the whole answer's time, from arrival"),
    ("x-tidegate-task", _TASK, "the user goal the request is a call of"),
)
"""Headers of requests that generate; those of a task beside its id need the id and are told in README.md."""


def describe(model: str, keys_needed: bool, others: Iterable[str] = ()) -> bytes:
    """The description as JSON, of a gateway that serves ``model`` and ``others``; ``keys_needed``: requests need an API
    key.
    """
    models = [model, *others]
    one_of: Schema = {"type": "string", "enum": models}
    paths: dict[str, Any] = {path: _relayed(endpoint, models) for path, endpoint in RELAYED.items()}
    for path, summary in OWN.items():
        chosen = [{"name": "model", "in": "query", "schema": one_of}] if others and path in OF_ONE_MODEL else []
        paths[path] = _own(path, summary, [*PARAMETERS.get(path, []), *chosen])
    name: Schema = {"name": "model", "in": "path", "required": True, "schema": one_of}
    paths[MODEL_PREFIX + "{model}"] = _own(MODEL_PREFIX + "x", "one model", [name])
    task: Schema = {"name": "task", "in": "path", "required": True, "schema": {"type": "string", "pattern": TASK}}
    paths[TASK_PREFIX + "{task}"] = _own(TASK_PREFIX + "x", "one task", [task])
    outcome = TASK_PREFIX + "x" + TASK_OUTCOME_SUFFIX
    paths[TASK_PREFIX + "{task}" + TASK_OUTCOME_SUFFIX] = _own(outcome, "how a task ended", [task])
    override: Schema = {"name": "override", "in": "path", "required": True, "schema": {"type": "string"}}
    paths[OVERRIDE_PREFIX + "{override}"] = _own(OVERRIDE_PREFIX + "x", "one override", [override])
    request: Schema = {"name": "request", "in": "path", "required": True, "schema": {"type": "string"}}
    paths[REQUEST_PREFIX + "{request}"] = _own(REQUEST_PREFIX + "x", "what became of one request", [request])
    document: dict[str, Any] = {
        "openapi": OPENAPI_VERSION,
        "info": {
            "title": "Tidegate",
            "version": VERSION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": _components(keys_needed),
    }
    if keys_needed:
        document["security"] = [{"bearer": []}, {"key": []}]
    return msgspec.json.encode(document)


def _components(keys_needed: bool) -> Schema:
    found: Schema = {
        "schemas": {"Error": error_schema(anthropic=False), "AnthropicError": error_schema(anthropic=True)},
        "headers": {"RequestId": {"description": "The server's own id of this request.", "schema": {"type": "string"}}},
    }
    if keys_needed:
        found["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return found


def _relayed(endpoint: Endpoint, models: Sequence[str]) -> Schema:
    content: Schema = {"application/json": {"schema": {"type": "object"}}}
    if endpoint.streams:
        content["text/event-stream"] = {}
    body: Schema = {"required": True, "content": {"application/json": {"schema": body_schema(endpoint, models)}}}
    anthropic = endpoint.dialect is Dialect.ANTHROPIC
    post = _operation(endpoint.path, "relayed to a replica", {"200": _answer("what the engine answers", content)})
    post["requestBody"] = body
    if endpoint.generates:
        post["parameters"] = [
            {"name": name, "in": "header", "schema": schema, "description": why}
            for name, schema, why in REQUEST_HEADERS
        ]
    post["responses"]["default"] = _error(anthropic)
    return {"post": post, "options": _options(endpoint.path, anthropic)}


def _own(path: str, summary: str, parameters: list[Schema]) -> Schema:
    """All methods of an own endpoint; ``path`` stands for all it matches."""
    operations: Schema = {}
    for method in (m.lower() for m in allowed_methods(path)):
        if method == "options":
            operations[method] = _options(path, anthropic=False)
            continue
        content = {} if method == "head" else _own_content(path)
        operations[method] = _operation(path, summary, {"200": _answer(summary, content)}, method)
        operations[method]["responses"]["default"] = _error(anthropic=False, has_body=method != "head")
        if method == "post":
            schema = CONTROL_BODIES.get(path, OUTCOME)
            operations[method]["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if path in OPEN:
        for method in ("get", "head"):
            operations[method]["security"] = []
            operations[method]["responses"]["304"] = _answer("the client has it", {})
    return {"parameters": parameters, **operations} if parameters else operations


def _own_content(path: str) -> Schema:
    if path in EMPTY_ANSWERS:
        return {}
    if path in HTML_ANSWERS:
        return {"text/html": {"schema": {"type": "string"}}}
    if path in TEXT_ANSWERS:
        return {"text/plain": {"schema": {"type": "string"}}}
    return {"application/json": {"schema": {"type": "array" if path in ARRAY_ANSWERS else "object"}}}


def _options(path: str, anthropic: bool) -> Schema:
    found = _operation(path, "the methods it answers", {"204": _answer("see the Allow header", {})}, "options")
    found["responses"]["default"] = _error(anthropic)
    return found


def _operation(path: str, summary: str, responses: Schema, method: str = "post") -> Schema:
    words = "_".join(part for part in path.replace(".", "_").split("/") if part)
    return {"operationId": f"{method}_{words}", "summary": summary, "responses": responses}


def _answer(description: str, content: Schema) -> Schema:
    headers = {"x-request-id": {"$ref": "#/components/headers/RequestId"}}
    return {"description": description, "headers": headers, **({"content": content} if content else {})}


def _error(anthropic: bool, has_body: bool = True) -> Schema:
    name = "AnthropicError" if anthropic else "Error"
    schema = {"$ref": f"#/components/schemas/{name}"}
    return _answer("an error", {"application/json": {"schema": schema}} if has_body else {})
