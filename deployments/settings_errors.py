"""Words for wrong settings: path, value, why, and the nearest valid key of the whole tree.

The nearest key is looked for everywhere, not only beside the wrong one: a key in the wrong section is told where it
belongs. Nothing here decides what is valid; that is ``settings.py`` and ``policies/config.py``.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from deployments.keys import hide_keys
from policies.config_base import ConfigError

UNITS = {
    "_ms": "in milliseconds",
    "_s": "in seconds",
    "_gib": "in GiB",
    "_bytes": "in bytes",
    "_tokens": "in tokens",
    "_blocks": "in blocks",
    "_share": "as a share from 0 to 1",
}
"""What the last part of a key's name (before ``_max`` or ``_min``) says about its number."""

VALUE_CHARS_MAX = 80
"""A wrong value is shown up to this length."""

SIMILARITY_MIN = 0.75
"""Two keys at least this alike (``difflib`` ratio) may be one another's slip."""

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_TYPE_WORDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a text",
    "dict_type": "a section (key: value lines)",
    "model_type": "a section (key: value lines)",
    "model_attributes_type": "a section (key: value lines)",
    "dataclass_type": "a section (key: value lines)",
    "list_type": "a list",
}


class SettingsError(ValueError):
    """The configuration is wrong; ``problems`` has one line for each thing to mend."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[SettingsError], tuple[tuple[str, ...]]]:
        """Keep the lines apart when the error crosses a process boundary."""
        return type(self), (self.problems,)


def key_paths(model: Any) -> set[str]:
    """Return the dotted paths of all keys below ``model``, sections included."""
    return set(_paths(model, ""))


def _paths(model: Any, prefix: str) -> Iterator[str]:
    for name, kind in _fields(model):
        path = f"{prefix}{name}"
        yield path
        yield from _paths(kind, f"{path}.")


def _fields(model: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(model, type) and issubclass(model, BaseModel):
        for name, field in model.model_fields.items():
            yield name, field.annotation
    elif dataclasses.is_dataclass(model):
        hints = typing.get_type_hints(model)
        for item in dataclasses.fields(model):
            yield item.name, hints[item.name]


def unknown_key(path: str, value: object, *valid: Iterable[str]) -> str:
    """Return the line for a key at ``path`` that is in none of ``valid`` (sets of dotted paths, likeliest first)."""
    return f"{path}: {_shown_at(path, value)}: unknown key; {nearest(path, *valid)}"


def nearest(path: str, *valid: Iterable[str]) -> str:
    """Say where the key belongs, what it may have meant, or which keys its section has."""
    section, _, key = path.rpartition(".")
    groups = [sorted(group) for group in valid]
    for paths in groups:
        exact = [p for p in paths if p.rpartition(".")[2] == key]
        if exact:
            return "it belongs at " + " or ".join(f"'{p}'" for p in exact[:3])
    for paths in groups:
        close = [p for p in paths if _similar(key, p) >= SIMILARITY_MIN]
        if close:
            best = max(close, key=lambda p: _similar(key, p) + (0.15 if p.rpartition(".")[0] == section else 0.0))
            return f"did you mean '{best.rpartition('.')[2] if best.rpartition('.')[0] == section else best}'?"
    siblings = [p.rpartition(".")[2] for paths in groups for p in paths if p.rpartition(".")[0] == section]
    return "valid keys here: " + ", ".join(siblings[:30]) if siblings else "nothing like it exists"


def _similar(key: str, path: str) -> float:
    return difflib.SequenceMatcher(None, key, path.rpartition(".")[2]).ratio()


def shown(value: object) -> str:
    """Return ``value`` as it looks in YAML, shortened."""
    if isinstance(value, dict):
        return "{...}" if value else "{}"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    text = hide_keys(repr(value))
    return text if len(text) <= VALUE_CHARS_MAX else text[: VALUE_CHARS_MAX - 3] + "..."


def _shown_at(path: str, value: object) -> str:
    """Like :func:`shown`; below ``auth`` a text may be half a key, so none is shown there."""
    below = path.startswith("auth.") or ".auth." in path
    return "(not shown)" if below and not isinstance(value, bool | int | float | None) else shown(value)


def unit_of(key: str) -> str:
    """Return the unit that the name of ``key`` carries, such as ``in seconds``; empty when it carries none."""
    name = key.removesuffix("_max").removesuffix("_min")
    return next((words for suffix, words in UNITS.items() if name.endswith(suffix)), "")


def problems_of(model: type[BaseModel], error: ValidationError, further: Iterable[str] = ()) -> list[str]:
    """Return one line per problem that pydantic found; ``further`` are valid paths that ``model`` does not know."""
    valid, others = key_paths(model), set(further)
    lines = [_line(item, valid, others) for item in error.errors(include_url=False)]
    return list(dict.fromkeys(lines))


def _line(item: Any, valid: set[str], others: set[str]) -> str:
    path = ".".join(str(part) for part in item["loc"])
    kind, value = item["type"], item["input"]
    if kind in _UNKNOWN:
        return unknown_key(path, value, valid, others)
    cause = item.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        given = value.get(cause.field) if isinstance(value, dict) else None
        told = str(cause).removeprefix(f"{cause.field}: ")
        shortened = re.sub(r", is [^,]*$", "", told)
        return (
            f"{path}.{cause.field}: {told}"
            if given is None
            else f"{path}.{cause.field}: {_shown_at(path, given)}: {shortened}"
        )
    if kind == "missing":
        return f"{path}: is missing"
    return f"{path}: {_shown_at(path, value)}: {_why(path, item)}"


def _why(path: str, item: Any) -> str:
    kind = item["type"]
    if kind in _TYPE_WORDS:
        unit = unit_of(path.rpartition(".")[2])
        words = _TYPE_WORDS[kind]
        hint = f" {unit}, without a unit behind it" if unit and "number" in words else ""
        return f"must be {words}{hint}"
    if kind in ("literal_error", "enum"):
        expected = item["ctx"]["expected"]
        close = difflib.get_close_matches(
            str(item["input"]), [e.strip(" '") for e in expected.replace(" or ", ",").split(",")], 1
        )
        return f"must be {expected}" + (f"; did you mean '{close[0]}'?" if close else "")
    message = str(item["msg"]).removeprefix("Value error, ").removeprefix("Input should ")
    return f"must {message}" if message.startswith(("be ", "have ")) else message[:1].lower() + message[1:]
