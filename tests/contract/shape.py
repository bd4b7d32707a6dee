"""The shape of an HTTP answer: what a client program can depend on, without the text a model happened to write.

A JSON value becomes its skeleton: every key, and the kind of every value (``str``, ``number``, ``bool``, ``null``);
equal shapes in a list count once. A stream becomes the shapes of its events in the order of their first appearance.
Of errors the type, code and parameter are kept as they are.
"""

from __future__ import annotations

import json
from typing import Any

LITERAL_KEYS = frozenset(
    {"object", "type", "code", "param", "finish_reason", "stop_reason", "role", "status", "reason"}
)
"""Keys whose short text values are part of the contract."""
SKELETON_LITERAL_MAX = 64


def skeleton(value: Any, loose: tuple[str, ...] = (), key: str = "") -> Any:
    """Shape of a JSON value; keys in ``loose`` are left out."""
    if isinstance(value, dict):
        return {k: skeleton(v, loose, k) for k, v in sorted(value.items()) if k not in loose}
    if isinstance(value, list):
        return _dedup([skeleton(v, loose) for v in value])
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, (int, float)):
        return f"={value}" if key in LITERAL_KEYS else "number"
    if key in LITERAL_KEYS and len(value) <= SKELETON_LITERAL_MAX:
        return f"={value}"
    return "str"


def _dedup(items: list[Any]) -> list[Any]:
    out: list[Any] = []
    for item in items:
        if item not in out:
            out.append(item)
    return out


def events(body: bytes, loose: tuple[str, ...] = ()) -> list[Any]:
    """Shape of a server-sent event stream: ``[event name, data skeleton]`` each, without repeats."""
    out: list[Any] = []
    for block in body.decode("utf-8", "replace").replace("\r\n", "\n").split("\n\n"):
        if not block.strip():
            continue
        name, data = "", []
        for line in block.split("\n"):
            if line.startswith("event:"):
                name = line[6:].strip()
            elif line.startswith("data:"):
                data.append(line[5:].strip())
        text = "\n".join(data)
        out.append([name, text if text == "[DONE]" else skeleton(_loads(text), loose)])
    return _dedup(out)


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {"unparsed": text[:80]}


def answer_shape(status: int, content_type: str, body: bytes, loose: tuple[str, ...] = ()) -> dict[str, Any]:
    """Everything of an answer that is compared."""
    kind = content_type.split(";", maxsplit=1)[0].strip()
    shape: dict[str, Any] = {"status": status, "content_type": kind}
    if kind == "text/event-stream":
        shape["events"] = events(body, loose)
    elif kind == "application/json":
        shape["json"] = skeleton(_loads(body.decode("utf-8", "replace")), loose)
    else:
        shape["empty"] = not body
    return shape
