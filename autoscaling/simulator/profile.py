"""Engine profiles as text: JSON to :class:`EngineProfile` and back.

One object with the fields of ``EngineProfile``; ``law`` is an object with the fields of ``StepLaw``, its ``batch`` a
list of ``[running, ms]``. ``source`` is a text, or an object that gives the source of each figure by field name; in the
value it is one text with a line ``field: source`` each.

Nothing is guessed: an unknown or repeated key, a missing field, a value of the wrong kind or out of range raises
:class:`ProfileError`, which names the place, the value and, for a wrong key, the nearest right one.

What this must not do: read files (``deployments/simulation/profile_files.py``), or fill in a figure nobody gave.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, Field, fields, replace
from typing import Any

from autoscaling.simulator.spec import EngineProfile, StepLaw

_ABOVE_ZERO = frozenset({
    "d_ms", "gpus", "kv_tokens", "context_tokens_max", "usd_per_gpu_hour", "block_tokens", "running_seqs_max",
    "step_tokens_max",
})  # fmt: skip
"""Fields that must be above 0; every other number must not be negative."""

_WHY = {
    "usd_per_gpu_hour": "; without a price no fleet is cheaper than another",
    "kv_tokens": "; an engine without KV cache answers nothing",
}


class ProfileError(ValueError):
    """A profile that makes no sense: one line with its name, the place in it and what is wrong there."""

    def __init__(self, name: str, path: str, message: str) -> None:
        super().__init__(": ".join(part for part in (name, path, message) if part))
        self.path = path


def profile_from_json(text: str, name: str) -> EngineProfile:
    """Parse one profile; ``name`` (of the file) begins every error. Raises :class:`ProfileError`."""
    try:
        data = json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise ProfileError(f"{name}:{error.lineno}", "", f"not JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise ProfileError(name, "", f"not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ProfileError(name, "", f"must be an object with the fields of a profile, is {_shown(data)}")
    values = _known(data, fields(EngineProfile), name, "")
    law = values["law"]
    if not isinstance(law, dict):
        raise ProfileError(name, "law", f"must be an object with the coefficients of the step law, is {_shown(law)}")
    law_values = _known(law, fields(StepLaw), name, "law.")
    if "batch" in law_values:
        law_values["batch"] = _batch(law_values["batch"], name)
    values["law"] = StepLaw(**law_values)
    values["source"] = _source(values["source"], name)
    profile = EngineProfile(**values)
    _check_whole(profile, name)
    return profile


def profile_to_json(profile: EngineProfile) -> str:
    """Text that :func:`profile_from_json` reads back as the same value; fields at their default are left out."""
    data = _given(profile, fields(EngineProfile))
    data["law"] = _given(profile.law, fields(StepLaw))
    lines = [line.partition(": ") for line in profile.source.split("\n")]
    known = _figures()
    if all(key in known and text for key, _, text in lines) and len({key for key, *_ in lines}) == len(lines):
        data["source"] = {key: text for key, _, text in lines}
    text = json.dumps(data, indent=2, ensure_ascii=False)
    if profile.law.batch:
        rows = ", ".join(json.dumps(row) for row in profile.law.batch)
        text = text.replace(json.dumps(data["law"]["batch"], indent=2).replace("\n", "\n    "), f"[{rows}]")
    return text + "\n"


def with_sources(profile: EngineProfile, sources: Mapping[str, str]) -> EngineProfile:
    """``profile`` with new ``sources`` by field (e.g. ``law.a_ms``), the others kept, none for a law's zeros."""
    lines = dict.fromkeys(_figures(), "")
    for line in profile.source.split("\n"):
        key, _, text = line.partition(": ")
        if key in lines and text:
            lines[key] = text
    lines.update(sources)
    zeros = {f"law.{field.name}" for field in fields(StepLaw) if not getattr(profile.law, field.name)}
    return replace(profile, source="\n".join(f"{k}: {v}" for k, v in lines.items() if v and k not in zeros))


# --- inside -----------------------------------------------------------------------------------------------------------


def _unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"key {key!r} is given {keys.count(key)} times")
    return dict(pairs)


def _known(data: Mapping[str, Any], wanted: Sequence[Field[Any]], name: str, prefix: str) -> dict[str, Any]:
    """The fields of ``data``, each of its kind and in its range."""
    names = [field.name for field in wanted]
    for key, value in data.items():
        if key not in names:
            raise ProfileError(name, prefix + key, f"unknown key (value {_shown(value)}){_nearest(key, names)}")
    for field in wanted:
        if field.name not in data and field.default is MISSING and field.default_factory is MISSING:
            raise ProfileError(name, prefix + field.name, "is missing")
    return {f.name: _value(data[f.name], f, name, prefix) for f in wanted if f.name in data}


def _value(value: Any, field: Field[Any], name: str, prefix: str) -> Any:
    kind, path = str(field.type), prefix + field.name
    if kind == "str" and field.name != "source":
        if not isinstance(value, str) or not value.strip():
            raise ProfileError(name, path, f"must be a text that is not empty, is {_shown(value)}")
        return value
    if kind == "bool":
        if not isinstance(value, bool):
            raise ProfileError(name, path, f"must be true or false, is {_shown(value)}")
        return value
    if kind not in ("int", "float"):
        return value
    if isinstance(value, bool) or not isinstance(value, int if kind == "int" else int | float):
        raise ProfileError(name, path, f"must be a {'whole ' if kind == 'int' else ''}number, is {_shown(value)}")
    if not math.isfinite(value):
        raise ProfileError(name, path, f"must be a finite number, is {_shown(value)}")
    if value < 0 or (value == 0 and field.name in _ABOVE_ZERO):
        bound = "above 0" if field.name in _ABOVE_ZERO else "0 or more"
        raise ProfileError(name, path, f"must be {bound}, is {_shown(value)}{_WHY.get(field.name, '')}")
    return value if kind == "int" else float(value)


def _batch(rows: Any, name: str) -> tuple[tuple[int, float], ...]:
    if not isinstance(rows, list):
        raise ProfileError(name, "law.batch", f"must be a list of [running, ms], is {_shown(rows)}")
    table: list[tuple[int, float]] = []
    for i, row in enumerate(rows):
        path = f"law.batch[{i}]"
        if not isinstance(row, list) or len(row) != 2 or any(not _is_number(v) for v in row):
            raise ProfileError(name, path, f"must be [running, ms], is {_shown(row)}")
        running, ms = row
        if running != int(running) or running < 1 or (table and running <= table[-1][0]):
            raise ProfileError(name, path, f"running must be whole, at least 1 and grow, is {_shown(running)}")
        if ms <= 0 or (table and i == len(rows) - 1 and ms < table[-1][1]):
            raise ProfileError(name, path, f"ms must be above 0, and the last not below the one before, is {ms}")
        table.append((int(running), float(ms)))
    return tuple(table)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _source(value: Any, name: str) -> str:
    if isinstance(value, str) and value.strip():
        return value
    if not isinstance(value, dict) or not value:
        raise ProfileError(name, "source", f"must be a text, or one text by field, is {_shown(value)}")
    known = _figures()
    for key, text in value.items():
        if key not in known:
            raise ProfileError(name, f"source.{key}", f"no such figure{_nearest(key, known)}")
        if not isinstance(text, str) or not text.strip() or "\n" in text:
            raise ProfileError(name, f"source.{key}", f"must be a text of one line, is {_shown(text)}")
    return "\n".join(f"{key}: {text}" for key, text in value.items())


def _figures() -> list[str]:
    """Names a source may be given for."""
    return [f.name for f in fields(EngineProfile) if f.name != "source"] + [f"law.{f.name}" for f in fields(StepLaw)]


def _check_whole(profile: EngineProfile, name: str) -> None:
    if profile.kv_tokens < profile.block_tokens:
        raise ProfileError(name, "kv_tokens", f"{profile.kv_tokens} are less than one block of {profile.block_tokens}")
    if profile.law.a_ms + profile.law.b_ms <= 0:
        raise ProfileError(name, "law.a_ms", "a_ms and b_ms must not both be 0: no step takes no time")
    if profile.law.jitter_share >= 0.5:
        raise ProfileError(name, "law.jitter_share", f"must be below 0.5, is {profile.law.jitter_share}")


def _given(value: Any, wanted: Sequence[Field[Any]]) -> dict[str, Any]:
    """Fields of ``value`` that are not at their default."""
    return {
        f.name: getattr(value, f.name) for f in wanted if f.default is MISSING or getattr(value, f.name) != f.default
    }


def _nearest(key: str, names: Collection[str]) -> str:
    found = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    return f"; did you mean {found[0]}?" if found else f"; known: {', '.join(names)}"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
