"""What may not be moved now, why, and until when.

    rolled back   a change did harm and was taken back: its places rest, so that the next try has a fair baseline
    frozen        rollbacks_max roll-backs of one lever at one target, or turns_max changes of direction of one knob,
                  within window_s; or twice as many roll-backs of one lever anywhere: all of the lever
    foreign       somebody else set the place: it is theirs for foreign_hold_s

A frozen number of replicas may still grow: too few lose requests, too many cost money. Brakes (urgent moves) pass
freezes and rests; nothing passes a foreign hold but an override, which passes all of them (``guard.py``).

Everything is bounded by the places there are and by ``window_s``. This module must not change a knob.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from policies.config_guard import GuardConfig
from policies.control.moves import Move, Place, Value
from policies.steering import Knob, Lever

ROLLED_BACK, FROZEN, FOREIGN = "RolledBack", "Frozen", "Foreign"
"""Kinds of holds."""

LEVER_ROLLBACKS_FACTOR = 2
"""So many times ``rollbacks_max`` roll-backs of one lever, at whatever targets, freeze the whole lever."""

PLACES_MAX = 16_384
"""Places whose changes of direction are remembered."""

ALL = "all"
"""Target under which a lever's roll-backs anywhere are counted."""


@dataclass(slots=True)
class Hold:
    """One place, or one lever, that must stay as it is."""

    kind: str
    text: str
    until_ns: int
    told: bool = False
    """Whether a move that it stopped was written down already."""


class Holds:
    """All holds in force, and the counts that lead to freezes."""

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.places: dict[Place, Hold] = {}
        self.levers: dict[Lever, Hold] = {}
        self._rollbacks: dict[tuple[Lever, str], deque[int]] = {}
        self._turns: dict[Place, tuple[int, int, deque[int]]] = {}
        """Of each place: when it last moved, in which direction, and when it turned."""

    def hold(self, place: Place, kind: str, text: str, until_ns: int) -> None:
        """Hold one place; a freeze is not shortened by a rest."""
        held = self.places.get(place)
        if held is None or kind == FOREIGN or (held.kind != FOREIGN and until_ns > held.until_ns):
            self.places[place] = Hold(kind, text, until_ns)

    def at(self, place: Place) -> Hold | None:
        """What holds ``place``."""
        return self.places.get(place) or self.levers.get(place[0].lever)

    def stops(self, place: Place, move: Move, before: Value, after: Value) -> Hold | None:
        """The hold that forbids a lever's move at ``place``; ``None``: it may move."""
        hold = self.at(place)
        if hold is None or (move.urgent and hold.kind != FOREIGN):
            return None
        grows = place[0] is Knob.REPLICAS_TARGET and before is not None and after is not None and after > before
        return None if grows and hold.kind != FOREIGN else hold

    def expire(self, now_ns: int) -> list[tuple[Place | Lever, Hold]]:
        """Drop what is over, and answer with it."""
        over = [(key, hold) for key, hold in self.all() if now_ns >= hold.until_ns]
        if over:
            self.places = {place: hold for place, hold in self.places.items() if now_ns < hold.until_ns}
            self.levers = {lever: hold for lever, hold in self.levers.items() if now_ns < hold.until_ns}
        return over

    def all(self) -> list[tuple[Place | Lever, Hold]]:
        """Every hold, by what it holds."""
        return [*self.levers.items(), *self.places.items()]

    def count_rollback(self, lever: Lever, targets: Iterable[str], now_ns: int) -> list[str]:
        """Count a roll-back; answer with the targets that have had enough, :data:`ALL` for the whole lever."""
        enough = []
        for target, most in [(t, 1) for t in targets] + [(ALL, LEVER_ROLLBACKS_FACTOR)]:
            times = self._rollbacks.setdefault((lever, target), deque(maxlen=most * self.config.rollbacks_max))
            times.append(now_ns)
            if len(times) == times.maxlen and now_ns - times[0] <= self._window_ns:
                enough.append(target)
                times.clear()
        self._rollbacks = {k: t for k, t in self._rollbacks.items() if t and now_ns - t[-1] <= self._window_ns}
        return enough

    def count_move(self, place: Place, before: Value, after: Value, now_ns: int) -> bool:
        """Count a lever's change of a place; whether it has now turned too often."""
        if before is None or after is None or before == after:
            return False
        if place[0] is Knob.REPLICAS_TARGET and 0 in (before, after):  # falling asleep and waking are no turns
            return False
        sign = 1 if after > before else -1
        last = self._turns.get(place)
        most = self.config.turns_of(place[0])
        turns: deque[int] = deque(maxlen=most) if last is None else last[2]
        turned = last is not None and last[1] != sign and now_ns - last[0] <= self._window_ns
        if turned:
            turns.append(now_ns)
        self._turns[place] = now_ns, sign, turns
        if len(self._turns) > PLACES_MAX:
            self._forget_turns(now_ns)
        if not turned or len(turns) < most or now_ns - turns[0] > self._window_ns:
            return False
        turns.clear()
        return True

    def forget_turns(self, places: Iterable[Place]) -> None:
        """What a roll-back or a person did to a place is no direction of its lever."""
        for place in places:
            self._turns.pop(place, None)

    def keep(self, known: Mapping[Place, Value]) -> None:
        """Forget the places of replicas that are gone."""
        self.places = {p: h for p, h in self.places.items() if p in known}
        self._turns = {p: t for p, t in self._turns.items() if p in known}

    def _forget_turns(self, now_ns: int) -> None:
        recent = sorted(self._turns.items(), key=lambda item: item[1][0])[-PLACES_MAX // 2 :]
        self._turns = {place: turn for place, turn in recent if now_ns - turn[0] <= self._window_ns}

    @property
    def _window_ns(self) -> int:
        return round(self.config.window_s * 1e9)
