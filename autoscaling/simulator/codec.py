"""Frozen dataclasses as plain JSON values and back, exactly: :func:`decode` undoes :func:`encode`.

Rules of the encoding:

* A dataclass is an object with every field, an enum its value, a tuple a list, a mapping an object in its own order.
* Whole numbers and fractions stay what they were (``500`` and ``500.0`` are different bytes and different values).
* JSON has no NaN and no infinity: ``{"float": "nan"}``, ``"inf"``, ``"-inf"``.
* A :class:`~policies.types.Histogram` is ``{"sum_ms", "counts": {bucket: count}}`` without its empty buckets.
* Chains of block hashes are one string, 16 hexadecimal digits a block: numbers above 2**53 do not survive every reader.

Decoding is strict: a missing or unknown field, or a value of another type, raises :class:`CodecError` with its path.
It must not guess defaults: a value that is not there was not recorded.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any, TypeAlias, TypeVar

from policies.types import LATENCY_BOUNDS_MS, Histogram

Plain: TypeAlias = Any
"""Dicts, lists, strings, numbers, booleans and ``None``, as ``json.loads`` gives them."""

T = TypeVar("T")

_BUCKETS = len(LATENCY_BOUNDS_MS) + 1
_HASH_DIGITS = 16


class CodecError(ValueError):
    """A value is not what the schema says; ``path`` names it, e.g. ``report.itl.counts``."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path or 'the line'}: {why}")
        self.path = path


class Blocks(tuple[int, ...]):
    """Chain hashes of a prompt's blocks, unsigned 64 bits each."""

    __slots__ = ()


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(kind))


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {name: hints[name] for name in _names(kind)}


# --- encode -----------------------------------------------------------------------------------------------------------


def encode(value: Any) -> Plain:
    """``value`` as plain JSON values. Raises :class:`CodecError` for a type that has no encoding."""
    kind: Any = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if kind is Histogram:
        return _encode_histogram(value)
    if kind is Blocks:
        return "".join([f"{block:016x}" for block in value])
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        return {name: encode(getattr(value, name)) for name in _names(kind)}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    raise CodecError("", f"{kind.__name__} has no encoding")


def _encode_histogram(histogram: Histogram) -> Plain:
    plain = {
        "sum_ms": encode(histogram.sum_ms),
        "counts": {str(i): encode(count) for i, count in enumerate(histogram.counts) if count},
    }
    return plain if len(histogram.counts) == _BUCKETS else {**plain, "buckets": len(histogram.counts)}


def dumps(plain: Plain) -> str:
    """One line of JSON without spaces, fields in the order they have."""
    return json.dumps(plain, separators=(",", ":"), allow_nan=False)


def canonical(value: object) -> str:
    """The one form in which two values are compared byte by byte: encoded, with sorted keys."""
    return json.dumps(encode(value), separators=(",", ":"), sort_keys=True, allow_nan=False)


# --- decode -----------------------------------------------------------------------------------------------------------


def decode(kind: type[T], plain: Plain, path: str = "") -> T:
    """The value of type ``kind`` that was encoded as ``plain``. Raises :class:`CodecError`."""
    decoded: T = _decode(kind, plain, path)
    return decoded


def _decode(kind: Any, plain: Plain, path: str) -> Any:
    primitive = _PRIMITIVES.get(kind)
    if primitive is not None:
        return primitive(plain, path)
    origin = typing.get_origin(kind)
    if origin is not None:
        return _decode_generic(origin, typing.get_args(kind), plain, path)
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(plain)
        except ValueError:
            raise CodecError(path, f"{plain!r} is not one of {', '.join(str(e.value) for e in kind)}") from None
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _decode_dataclass(kind, plain, path)
    raise CodecError(path, f"{kind} has no encoding")


def _decode_generic(origin: Any, args: tuple[Any, ...], plain: Plain, path: str) -> Any:
    if origin is typing.Union or origin is types.UnionType:
        return _decode_union(args, plain, path)
    if origin is tuple:
        if not isinstance(plain, list):
            raise CodecError(path, f"must be a list, is {_shown(plain)}")
        kinds = (args[0],) * len(plain) if len(args) == 2 and args[1] is Ellipsis else args
        if len(kinds) != len(plain):
            raise CodecError(path, f"must have {len(kinds)} items, has {len(plain)}")
        return tuple(_decode(k, item, f"{path}[{i}]") for i, (k, item) in enumerate(zip(kinds, plain, strict=True)))
    if issubclass(origin, Mapping):
        if not isinstance(plain, dict):
            raise CodecError(path, f"must be an object, is {_shown(plain)}")
        return {key: _decode(args[1], item, f"{path}.{key}") for key, item in plain.items()}
    raise CodecError(path, f"{origin} has no encoding")


def _decode_union(kinds: tuple[Any, ...], plain: Plain, path: str) -> Any:
    """The alternative whose own type the value has; an ``int`` is taken for a ``float`` where only that is allowed."""
    if plain is None:
        if type(None) in kinds:
            return None
        raise CodecError(path, "must not be null")
    rest = [kind for kind in kinds if kind is not type(None)]
    exact = next((kind for kind in rest if type(plain) is kind or (type(plain) is bool and kind is int)), None)
    if exact is not None:
        return plain
    if len(rest) > 1 and float in rest and isinstance(plain, dict):
        return _float(plain, path)
    return _decode(rest[0], plain, path)


def _decode_dataclass(kind: type, plain: Plain, path: str) -> Any:
    if not isinstance(plain, dict):
        raise CodecError(path, f"must be an object, is {_shown(plain)}")
    hints, below = _hints(kind), f"{path}." if path else ""
    missing = [name for name in hints if name not in plain]
    if missing:
        raise CodecError(f"{below}{missing[0]}", "is missing")
    if len(plain) != len(hints):
        unknown = next(name for name in plain if name not in hints)
        raise CodecError(f"{below}{unknown}", f"unknown field; {kind.__name__} has {', '.join(hints)}")
    values = {name: _decode(hint, plain[name], f"{below}{name}") for name, hint in hints.items()}
    try:
        return kind(**values)
    except ValueError as error:  # a configuration checks itself
        raise CodecError(path, str(error)) from None


def _int(plain: Plain, path: str) -> int:
    if type(plain) is not int:
        raise CodecError(path, f"must be a whole number, is {_shown(plain)}")
    return plain


def _float(plain: Plain, path: str) -> float:
    if type(plain) is float or type(plain) is int:
        return plain
    if isinstance(plain, dict) and len(plain) == 1 and plain.get("float") in ("nan", "inf", "-inf"):
        return float(plain["float"])
    raise CodecError(path, f"must be a number, is {_shown(plain)}")


def _str(plain: Plain, path: str) -> str:
    if type(plain) is not str:
        raise CodecError(path, f"must be a text, is {_shown(plain)}")
    return plain


def _bool(plain: Plain, path: str) -> bool:
    if type(plain) is not bool:
        raise CodecError(path, f"must be true or false, is {_shown(plain)}")
    return plain


def _blocks(plain: Plain, path: str) -> Blocks:
    text = _str(plain, path)
    if len(text) % _HASH_DIGITS:
        raise CodecError(path, f"must have {_HASH_DIGITS} hexadecimal digits a block, has {len(text)} in all")
    try:
        return Blocks(int(text[i : i + _HASH_DIGITS], 16) for i in range(0, len(text), _HASH_DIGITS))
    except ValueError:
        raise CodecError(path, f"must be hexadecimal digits, is {_shown(text)}") from None


def _histogram(plain: Plain, path: str) -> Histogram:
    if not isinstance(plain, dict) or not plain.keys() <= {"sum_ms", "counts", "buckets"}:
        raise CodecError(path, f"must be an object of sum_ms and counts, is {_shown(plain)}")
    buckets, counts = plain.get("buckets", _BUCKETS), plain.get("counts")
    if not isinstance(counts, dict) or type(buckets) is not int or not 0 <= buckets <= 100_000:
        raise CodecError(f"{path}.counts", f"must be an object of counts by bucket, is {_shown(counts)}")
    found = [0] * buckets
    for key, count in counts.items():
        if not (key.isascii() and key.isdigit() and len(key) < 7 and int(key) < buckets):
            raise CodecError(f"{path}.counts.{key}", f"must be a bucket from 0 to {buckets - 1}")
        found[int(key)] = _int(count, f"{path}.counts.{key}")
    return Histogram(tuple(found), _float(plain.get("sum_ms"), f"{path}.sum_ms"))


_PRIMITIVES: Mapping[Any, Any] = {
    int: _int,
    float: _float,
    str: _str,
    bool: _bool,
    Blocks: _blocks,
    Histogram: _histogram,
}


def _shown(plain: Plain) -> str:
    text = json.dumps(plain)
    return text if len(text) <= 60 else text[:57] + "..."
