"""``python -m deployments.api_reference`` writes API.md: the gateway's HTTP interface, from what it serves itself.

Everything comes from :func:`deployments.openapi.describe` and from the scopes that paths need; nothing is added.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from deployments.endpoints import OPEN, scope_needed
from deployments.openapi import describe

FILE = Path(__file__).with_name("API.md")
HEAD = """# API of the gateway

Written by `.venv/bin/python -m deployments.api_reference` from what the gateway serves at `/openapi.json`; a test says
when it is stale. Errors have OpenAI's shape (Anthropic's at `/v1/messages`); their codes, with status and cause, are in
[README.md](README.md#each-request-ends-once). Every answer carries `x-request-id`.
"""
METHODS = ("get", "post", "delete")
"""In this order. ``OPTIONS`` and ``HEAD`` say nothing of their own."""

Schema = Mapping[str, Any]


def text() -> str:
    """The whole page."""
    document = msgspec.json.decode(describe("NAME", keys_needed=True))
    lines = [HEAD]
    for path, item in document["paths"].items():
        for method in METHODS:
            if method in item:
                lines += operation(path, method, item[method])
    return "\n".join(lines).rstrip() + "\n"


def operation(path: str, method: str, found: Schema) -> Iterator[str]:
    """Lines on one operation: what it is, who may call it, what it takes and what it gives."""
    yield f"## {method.upper()} {path}\n"
    scope = scope_needed(path, method.upper())
    needs = "No key is needed" if path in OPEN else "Any key" if scope is None else f"Scope `{scope}`"
    yield f"{_sentence(found['summary'])} {needs}.\n"
    rows = [_row(p["name"], p["in"], p["schema"], p.get("required", False), p.get("description", "")) for p in
            found.get("parameters", [])]  # fmt: skip
    body = found.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    rows += [_row(*row) for row in _fields(body)]
    if rows:
        yield "| name | in | value | |\n| --- | --- | --- | --- |"
        yield "\n".join(rows) + "\n"
    answers = found["responses"]
    kinds = [f"{status}: {', '.join(f'`{k}`' for k in answer.get('content', {})) or 'no body'}" for status, answer in
             answers.items() if status.startswith("2")]  # fmt: skip
    yield f"Answers {'; '.join(kinds)}.\n"


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:].rstrip(".") + "."


def _fields(body: Schema) -> Iterator[tuple[str, str, Schema, bool, str]]:
    """Fields of a body, those of a choice (``oneOf``, ``anyOf``) as well."""
    for part in (body, *body.get("oneOf", ()), *body.get("anyOf", ())):
        for name, schema in part.get("properties", {}).items():
            yield name, "body", schema, name in part.get("required", ()), schema.get("description", "")


def _row(name: str, where: str, schema: Schema, required: bool, why: str) -> str:
    need = "required" if required else ""
    words = ", ".join(part for part in (need, why) if part)
    return f"| `{name}` | {where} | {_value(schema)} | {words} |"


def _value(schema: Schema) -> str:
    """A schema in a few words."""
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if choices := schema.get("oneOf") or schema.get("anyOf"):
        return " or ".join(dict.fromkeys(_value(choice) for choice in choices))
    kind = schema.get("type", "any")
    words = " or ".join(kind) if isinstance(kind, list) else str(kind)
    least = schema.get("minimum", schema.get("exclusiveMinimum"))
    words += f" from {least:,}" if least is not None else ""
    words += f" to {schema['maximum']:,}" if "maximum" in schema else ""
    if pattern := schema.get("pattern"):
        words += f" like `{pattern.replace('|', chr(92) + '|')}`"
    if "examples" in schema:
        words += f" such as {', '.join(f'`{example}`' for example in schema['examples'])}"
    return words


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
