"""Foreign writers: a knob that stands at a value nobody of ours asked for.

    resting   the value first seen GRACE_TICKS after our last change of it, or any time it equals what we asked for
    foreign   then another value, that we did not ask for, seen in SEEN_TIMES ticks in a row

What counts is that a value *moves* without us, and not towards what we asked for (an engine lowers its cap as its
sequences end). A value that merely differs from ours is an engine's own limit (start-up sizes, floors, a depth it
does not have), or Serve's bounds. Engines say which plan they follow: one that follows none (too old, not there yet,
another life's) is at its start-up value and has no foreign writer.

What this must not do: decide what to do about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from policies.control.moves import Place, Value, Wishes
from policies.control.signals import Signals
from policies.steering import ANY, Knob
from policies.types import FleetView, Knobs

GRACE_TICKS = 5
"""Ticks that a plan, an engine and its report take together, with room."""

FLEET_GRACE_TICKS = 15
"""The same for the number of replicas, which Serve is asked for and reports at its own pace."""

SEEN_TIMES = 2
"""Ticks in a row in which a foreign value must be seen."""

TARGET: Place = (Knob.REPLICAS_TARGET, ANY)


@dataclass(frozen=True, slots=True)
class Foreign:
    """One place that somebody else set."""

    place: Place
    asked: Value
    found: Value


@dataclass(slots=True)
class _Watched:
    """What is remembered of one replica, or of the fleet's target."""

    asked: Knobs | Value
    reported: Knobs | Value
    since: int
    """Tick at which ``asked`` was first asked for."""
    rests: bool = False
    strange: int = 0


class ForeignWatch:
    """Compares what was asked for with what is reported."""

    def __init__(self) -> None:
        self._watched: dict[str, _Watched] = {}
        """By replica; the fleet's target is under :data:`ANY`."""

    def step(self, asked: Wishes, knobs: Mapping[str, Knobs], signals: Signals, tick: int) -> tuple[Foreign, ...]:
        """Places where somebody else's value stands since this tick.

        Args:
            asked: what the last plan said.
            knobs: the same by replica.
            signals: what is reported.
            tick: number of this tick; the last plan had the one before.
        """
        found: list[Foreign] = []
        watched, self._watched = self._watched, {}
        for replica in signals.replicas:
            latest = replica.latest
            want = knobs.get(latest.replica_id)
            if want is None or not replica.fresh or latest.plan_seq is None or latest.plan_seq >= tick:
                continue
            seen = watched.get(latest.replica_id)
            same = seen is not None and (seen.asked is want or seen.asked == want)
            if seen is not None and same and seen.rests and seen.reported == latest.knobs:
                self._watched[latest.replica_id] = seen
            elif self._look(latest.replica_id, seen, want, latest.knobs, tick, GRACE_TICKS) and seen is not None:
                found.extend(_moved(latest.replica_id, want, seen.reported, latest.knobs))
        fleet, target = signals.fleet, asked.get(TARGET)
        if fleet is not None and target is not None:
            value = _unbounded(fleet, target)
            if self._look(ANY, watched.get(ANY), target, value, tick, FLEET_GRACE_TICKS):
                found.append(Foreign(TARGET, target, value))
        return tuple(found)

    def _look(
        self, key: str, seen: _Watched | None, asked: Knobs | Value, reported: Knobs | Value, tick: int, grace: int
    ) -> bool:
        """Whether ``reported`` is somebody else's; remembers what it rests at."""
        if seen is None or seen.asked != asked:
            seen = _Watched(asked, reported, tick)
        self._watched[key] = seen
        if _fits(asked, reported):
            seen.reported, seen.rests, seen.strange = reported, True, 0
        elif seen.rests and _nearer(asked, seen.reported, reported):
            seen.reported, seen.strange = reported, 0
        elif not seen.rests:
            seen.reported, seen.rests = reported, tick - seen.since >= grace
        elif reported == seen.reported:
            seen.strange = 0
        else:
            seen.strange += 1
        if seen.strange < SEEN_TIMES:
            return False
        del self._watched[key]
        return True


def _fits(asked: Knobs | Value, reported: Knobs | Value) -> bool:
    """Whether what is reported is what was asked for, wherever something was."""
    if isinstance(asked, Knobs) and isinstance(reported, Knobs):
        return all(getattr(asked, k) in (None, getattr(reported, k)) for k in _NAMES)
    return asked == reported


def _nearer(asked: Knobs | Value, rested: Knobs | Value, reported: Knobs | Value) -> bool:
    """Whether every value stayed or went towards what was asked for: an engine lowers its cap as sequences end."""
    if isinstance(asked, Knobs) and isinstance(rested, Knobs) and isinstance(reported, Knobs):
        return all(_between(getattr(asked, k), getattr(rested, k), getattr(reported, k)) for k in _NAMES)
    return (
        not isinstance(asked, Knobs)
        and not isinstance(rested, Knobs)
        and not isinstance(reported, Knobs)
        and (_between(asked, rested, reported))
    )


def _between(asked: Value, rested: Value, reported: Value) -> bool:
    if asked is None or rested is None or reported is None:
        return reported == rested
    return min(asked, rested) <= reported <= max(asked, rested)


def _moved(replica_id: str, asked: Knobs, resting: Knobs | Value, reported: Knobs) -> list[Foreign]:
    """The knobs that left the value they rested at."""
    values = [(k, getattr(asked, k.value), getattr(resting, k.value), getattr(reported, k.value)) for k in _KNOBS]
    return [
        Foreign((knob, replica_id), want, value)
        for knob, want, rest, value in values
        if want is not None and value not in (want, rest)
    ]


_KNOBS = (Knob.RUNNING_SEQS_MAX, Knob.STEP_TOKENS_MAX, Knob.SPECULATIVE_DEPTH)
_NAMES = tuple(knob.value for knob in _KNOBS)


def _unbounded(fleet: FleetView, asked: Value) -> Value:
    """Serve's target; what we asked for where the target is that within Serve's bounds."""
    bounded = max(fleet.replicas_min, min(fleet.replicas_max, asked or 0))
    return asked if fleet.replicas_target == bounded else fleet.replicas_target
