"""What people choose on a command line, checked: policy settings, prices, names, numbers with their nearest valid word.

Every mistake is one :class:`ChoiceError`: what was given, why it cannot be, and the nearest thing that can.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic_core import to_jsonable_python

from autoscaling.simulator.spec import EngineProfile, Fault
from deployments.config_file import check_serve_config
from deployments.settings import Settings, SettingsError
from deployments.settings_errors import nearest
from policies.config import PolicyConfig

T = TypeVar("T")

FAMILIES = tuple(f.name for f in fields(PolicyConfig) if f.name in Settings.model_fields)
"""Sections of the settings that decide something; the others describe a machine."""

FAULT_KINDS = (
    "kill", "slow", "freeze", "mute", "refuse", "unavailable", "errors", "controller", "gateway_blind", "start_fail",
    "flush",
)  # fmt: skip

FAULT_KEYS = {
    "kill": ("replica",), "slow": ("for", "factor", "replica"), "freeze": ("for", "replica"),
    "mute": ("for", "replica"), "refuse": ("for", "replica"),
    "unavailable": ("for", "replica"), "errors": ("for", "replica"), "flush": ("replica",),
}  # fmt: skip
"""Keys of the kinds that have others than ``for`` alone."""

NEEDED = {"for": "for=60", "factor": "for=60,factor=4"}
"""Keys without which a fault does nothing, and how they are written."""


class ChoiceError(ValueError):
    """Something on the command line cannot be; one line that says what to write instead."""


def policy_settings(config: Path | None, changes: Sequence[str], recorded: PolicyConfig | None = None) -> PolicyConfig:
    """Return the policies' settings: those of a Serve configuration file, or the defaults, with ``changes`` on top.

    Args:
        config: a ``serve_config.yaml`` with one Tidegate application, or ``None``.
        changes: ``section.key=value`` each, as YAML would read the value.
        recorded: stands in the place of the defaults.

    Raises:
        ChoiceError: a change that is no ``key=value`` or names a section that decides nothing.
        SettingsError: an unknown key (with the nearest) or a value that cannot be.
    """
    base = _settings_of(config).policy_config() if config else recorded or PolicyConfig()
    if not changes:
        return base
    args: dict[str, Any] = {name: v for name, v in to_jsonable_python(base).items() if name in FAMILIES}
    for change in changes:
        path, value = _change(change)
        place: dict[str, Any] = args
        for name in path[:-1]:
            inner = place.get(name)
            place[name] = place = dict(inner) if isinstance(inner, dict) else {}
        place[path[-1]] = value
    return replace(Settings.load(args).policy_config(), gateways=base.gateways)


def _settings_of(config: Path) -> Settings:
    found = check_serve_config(config)
    if len(found) > 1:
        names = ", ".join(sorted(found))
        raise ChoiceError(f"{config}: holds {len(found)} Tidegate applications ({names}); one is needed")
    return next(iter(found.values()))


def _change(text: str) -> tuple[Sequence[str], Any]:
    path, equals, raw = text.partition("=")
    section, dot, _ = path.strip().partition(".")
    if not equals or not path.strip() or not raw.strip():
        raise ChoiceError(f"--set {text}: expected section.key=value, such as scaling.replicas_max=8")
    if not dot:
        raise ChoiceError(f"--set {text}: the key needs its section; {nearest(path.strip(), policy_paths())}")
    if section not in FAMILIES:
        raise ChoiceError(f"--set {text}: {section} is no section of the policies{near(section, FAMILIES)}")
    try:
        return path.strip().split("."), yaml.safe_load(raw)
    except yaml.YAMLError:
        raise ChoiceError(f"--set {text}: the value is not YAML") from None


def policy_paths() -> set[str]:
    """Return the dotted paths of every setting of the policies."""
    from deployments.settings_errors import key_paths

    return {path for path in key_paths(Settings) if path.partition(".")[0] in FAMILIES and "." in path}


def near(word: str, known: Iterable[str]) -> str:
    """Return words that name what ``word`` may have meant, or all there are."""
    names = list(known)
    found = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"; did you mean {found[0]}?" if found else f"; there are: {', '.join(names)}"


def chosen(what: str, word: str, known: Mapping[str, T]) -> T:
    """Return what ``word`` names in ``known``.

    Raises:
        ChoiceError: it names nothing.
    """
    if word not in known:
        raise ChoiceError(f"{what} {word!r} is unknown{near(word, known)}")
    return known[word]


# --- pairs: key=value,key=value ---------------------------------------------------------------------------------------


def pairs_of(what: str, text: str, known: Sequence[str]) -> dict[str, str]:
    """Return ``a=1,b=2`` as a mapping.

    Raises:
        ChoiceError: a part is no ``key=value``, a key is unknown or given twice.
    """
    found: dict[str, str] = {}
    for part in text.split(",") if text else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key or not value:
            raise ChoiceError(f"{what}: {part!r} is no key=value")
        if key not in known:
            raise ChoiceError(f"{what}: unknown key {key!r}{near(key, known)}")
        if key in found:
            raise ChoiceError(f"{what}: {key} is given twice")
        found[key] = value
    return found


def number_in(
    what: str, text: str, *, above: float = -math.inf, at_least: float = -math.inf, to: float = math.inf
) -> float:
    """Return ``text`` as a finite number in the bounds.

    Raises:
        ChoiceError: it is none.
    """
    try:
        value = float(text)
    except ValueError:
        raise ChoiceError(f"{what} must be a number, is {text!r}") from None
    if not math.isfinite(value) or not above < value or not at_least <= value <= to:
        low = f"above {above:,.16g}" if above > -math.inf else ""
        low = low or (f"at least {at_least:,.16g}" if at_least > -math.inf else "")
        high = f"at most {to:,.16g}" if to < math.inf else ""
        bounds = " and ".join(word for word in (low, high) if word) or "finite"
        raise ChoiceError(f"{what} must be {bounds}, is {text}")
    return value


def count_in(what: str, text: str, *, at_least: int = 1, to: int = 10_000_000) -> int:
    """Return ``text`` as a whole number in the bounds.

    Raises:
        ChoiceError: it is none.
    """
    value = number_in(what, text, at_least=at_least, to=to)
    if value != int(value):
        raise ChoiceError(f"{what} must be a whole number, is {text}")
    return int(value)


# --- prices and faults ------------------------------------------------------------------------------------------------


def prices_of(texts: Sequence[str]) -> dict[str, float]:
    """Return ``GPU=dollars per GPU and hour`` as a mapping from the kind, in capitals.

    Raises:
        ChoiceError: no such pair, or a price that is not above 0: every fleet would be as cheap as any other.
    """
    found: dict[str, float] = {}
    for text in texts:
        kind, equals, price = text.partition("=")
        if not equals or not kind.strip():
            raise ChoiceError(f"--price {text}: expected GPU=dollars per GPU-hour, such as H100=2.5")
        found[kind.strip().upper()] = number_in(f"--price {text}: the price", price, above=0.0)
    return found


def priced(profiles: Sequence[EngineProfile], prices: Mapping[str, float]) -> list[EngineProfile]:
    """Return ``profiles`` at ``prices``.

    Raises:
        ChoiceError: a price for a kind of GPU that none of them has.
    """
    kinds = sorted({profile.gpu.upper() for profile in profiles})
    for kind in prices:
        if kind not in kinds:
            raise ChoiceError(f"--price {kind}: no profile here uses it{near(kind, kinds)}")
    return [replace(p, usd_per_gpu_hour=prices.get(p.gpu.upper(), p.usd_per_gpu_hour)) for p in profiles]


def fault_of(text: str, replicas: int) -> Fault:
    """Return ``kill@seconds`` or ``slow@seconds:for=30,replica=1,factor=4`` as a fault.

    Args:
        text: what was written.
        replicas: the most there can be; ``replica`` is the place of one among the ready ones, from 0.

    Raises:
        ChoiceError: an unknown kind or key, a number that cannot be, or a fault that would do nothing.
    """
    what = f"--fault {text}"
    head, _, rest = text.partition(":")
    kind, at, when = head.partition("@")
    if not at:
        raise ChoiceError(f"{what}: expected KIND@SECONDS, such as kill@60 or slow@60:for=120,factor=4")
    if kind not in FAULT_KINDS:
        raise ChoiceError(f"{what}: kind {kind!r} is unknown{near(kind, FAULT_KINDS)}")
    keys = FAULT_KEYS.get(kind, ("for",))
    pairs = pairs_of(what, rest, keys)
    for key in keys:
        if key in NEEDED and key not in pairs:
            raise ChoiceError(f"{what}: without {key} it does nothing; write {kind}@{when}:{NEEDED[key]}")
    return Fault(
        kind,
        at_ns=round(number_in(f"{what}: the time", when, at_least=0.0, to=1e9) * 1e9),
        duration_ns=round(number_in(f"{what}: for", pairs["for"], above=0.0, to=1e9) * 1e9) if "for" in pairs else 0,
        replica=count_in(f"{what}: replica", pairs.get("replica", "0"), at_least=0, to=replicas - 1),
        factor=number_in(f"{what}: factor", pairs.get("factor", "1"), above=0.0, to=1e6),
    )


__all__ = [
    "ChoiceError",
    "SettingsError",
    "chosen",
    "count_in",
    "fault_of",
    "near",
    "number_in",
    "pairs_of",
    "policy_paths",
    "policy_settings",
    "priced",
    "prices_of",
]
