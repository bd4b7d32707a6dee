"""What people set by hand: which override holds for a place now, and for how long.

    remaining_ms(now) = remaining_ms when it was received - (now - time of receipt), both on the receiver's own clock
    in force          = remaining_ms > 0, not taken back, and not replaced by a later one for the same knob and target

The one that names a replica beats the one for all of them. Overrides outlive the controller: every plan carries them,
gateways tell them to the controller's next life (:meth:`OverrideBook.adopt`), and of several accounts of one override
the shortest is believed, because each gateway received it a little later than it was written. What ended in this life
is remembered, so that a gateway with an older plan cannot bring it back.

This module must not know what a knob does, and must not read a clock.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace

from policies.config_guard import GuardConfig
from policies.control.moves import Place
from policies.steering import ANY, FRACTIONS, Knob, Override
from policies.types import Mode

OVERRIDES_MAX = 256
"""Overrides in force at once."""

ENDED_MAX = 1_024
"""Ids of ended overrides that are remembered."""


class OverrideError(ValueError):
    """An override that cannot be taken; ``field`` names what is wrong with it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class OverrideBook:
    """All overrides in force, with the time each ends."""

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        self._held: OrderedDict[str, tuple[Override, int]] = OrderedDict()
        """By id: the override and when it ends; oldest first."""
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._by_place: dict[Place, Override] = {}
        self._modes: dict[Knob | None, Mode] = {}

    def reconfigure(self, config: GuardConfig) -> None:
        """Follow a new configuration; overrides in force keep their ends."""
        self._config = config

    def put(self, override: Override, now_ns: int) -> Override:
        """Take an override that someone sets now; it replaces one of the same id, or of the same knob and target.

        Raises:
            OverrideError: it contradicts itself, lives too long, or there are too many.
        """
        self._expire(now_ns)
        override = _checked(override, self._config.override_s_max * 1_000)
        replaced = [held.id for held, _ in self._held.values() if _same_subject(held, override)]
        for other in replaced:
            if other != override.id:
                self._end(other)
        if override.id not in self._held and len(self._held) >= OVERRIDES_MAX:
            raise OverrideError("knob", f"there are {OVERRIDES_MAX} overrides in force already")
        self._ended.pop(override.id, None)
        self._keep(override, now_ns)
        return override

    def drop(self, override_id: str, now_ns: int) -> Override | None:
        """Take an override back; ``None`` where none of that id is in force."""
        self._expire(now_ns)
        held = self._held.get(override_id)
        if held is None:
            return None
        self._end(override_id)
        return _left(*held, now_ns)

    def adopt(self, overrides: Iterable[Override], now_ns: int) -> None:
        """Take over what a gateway remembers from another life of the controller."""
        for told in overrides:
            if told.id in self._ended:
                continue
            known = self._held.get(told.id)
            if known is not None:
                if now_ns + _span_ns(told) < known[1]:
                    self._held[told.id] = known[0], now_ns + _span_ns(told)
                continue
            if len(self._held) >= OVERRIDES_MAX:
                continue
            try:
                override = _checked(told, self._config.override_s_max * 1_000)
            except OverrideError:
                continue
            if not any(_same_subject(held, override) for held, _ in self._held.values()):
                self._keep(override, now_ns)

    def in_force(self, now_ns: int) -> tuple[Override, ...]:
        """All of them, oldest first, each with the time it has left."""
        self._expire(now_ns)
        return tuple(_left(override, end_ns, now_ns) for override, end_ns in self._held.values())

    def value_at(self, place: Place, now_ns: int) -> Override | None:
        """The override that says what stands at ``place``."""
        self._expire(now_ns)
        return self._by_place.get(place) or self._by_place.get((place[0], ANY))

    def mode_of(self, knob: Knob, now_ns: int) -> Mode | None:
        """Mode that someone set for ``knob``, or for all of them; ``None``: the configuration's holds."""
        self._expire(now_ns)
        return self._modes.get(knob) or self._modes.get(None)

    def __len__(self) -> int:
        return len(self._held)

    def _keep(self, override: Override, now_ns: int) -> None:
        self._held[override.id] = override, now_ns + _span_ns(override)
        self._held.move_to_end(override.id)
        self._index()

    def _end(self, override_id: str) -> None:
        del self._held[override_id]
        self._ended[override_id] = None
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)
        self._index()

    def _expire(self, now_ns: int) -> None:
        for override_id in [o.id for o, end_ns in self._held.values() if now_ns >= end_ns]:
            self._end(override_id)

    def _index(self) -> None:
        values = [o for o, _ in self._held.values() if o.mode is None]
        self._by_place = {(o.knob, o.target): o for o in values if o.knob is not None}
        self._modes = {o.knob: Mode(o.mode) for o, _ in self._held.values() if o.mode is not None}


def _checked(override: Override, ms_max: float) -> Override:
    """The override as it will hold: whole knobs get whole numbers."""
    if (override.value is None) == (override.mode is None):
        raise OverrideError("value", "give either a value or a mode")
    if not (math.isfinite(override.remaining_ms) and 0 < override.remaining_ms <= ms_max):
        raise OverrideError("remaining_ms", f"must be above 0 and at most {ms_max:.0f}, is {override.remaining_ms}")
    if override.mode is not None:
        if override.mode not in set(Mode):
            raise OverrideError("mode", f"must be one of {', '.join(Mode)}, is {override.mode!r}")
        return replace(override, target=ANY)
    if override.knob is None:
        raise OverrideError("knob", "a value needs a knob")
    value = float(override.value or 0)
    if not math.isfinite(value) or value < 0:
        raise OverrideError("value", f"must be a number from 0 up, is {override.value}")
    if override.knob not in FRACTIONS:
        if value != round(value):
            raise OverrideError("value", f"{override.knob} takes whole numbers, is {override.value}")
        value = round(value)
    if override.target != ANY and not override.knob.per_replica:
        raise OverrideError("target", f"{override.knob} is one for the model: leave the target out")
    if override.knob is Knob.RETIRED and value > 1:
        raise OverrideError("value", f"{override.knob} takes 0 or 1, is {override.value}")
    if override.knob is Knob.RETIRED and value and override.target == ANY:
        raise OverrideError("target", f"{override.knob} needs one: not all replicas may leave")
    return replace(override, value=value)


def _same_subject(one: Override, other: Override) -> bool:
    """Whether both are about the same knob and target, in the same way."""
    same_kind = (one.mode is None) == (other.mode is None)
    return one.id == other.id or (same_kind and (one.knob, one.target) == (other.knob, other.target))


def _span_ns(override: Override) -> int:
    return round(override.remaining_ms * 1e6)


def _left(override: Override, end_ns: int, now_ns: int) -> Override:
    return replace(override, remaining_ms=(end_ns - now_ns) / 1e6)
