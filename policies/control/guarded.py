"""What the guard says: values for the plan, entries for the ledger, and what is held, for people.

Values and words only. What this must not do: decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from policies.control.holds import ALL, FROZEN, Hold
from policies.control.ledger import Draft
from policies.control.moves import Move, Place, Value, Wishes
from policies.steering import Lever, Override, Verdict
from policies.types import Knobs, Reason, ReplicaId

GUARD = "guard"
"""Name of the guard where the ledger names a lever."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """Verdict on one entry of the ledger."""

    seq: int
    verdict: Verdict
    text: str
    realised: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Guarded:
    """What one tick comes to."""

    acting: Wishes
    """What stands at each place that is steered, for the levers; places in shadow are missing."""
    in_force: Wishes
    """What stands at each place, for the plan."""
    knobs: Mapping[ReplicaId, Knobs]
    """The same for each replica."""
    written: tuple[Draft, ...]
    """For the ledger, in order: what the guard did, then what the levers did."""
    judged: tuple[Judgement, ...]
    overrides: tuple[Override, ...]
    """In force, with the time each has left."""


@dataclass(frozen=True, slots=True)
class Held:
    """One hold, for people."""

    lever: str
    knob: str
    """Empty: every knob of the lever."""
    target: str
    kind: str
    """``Frozen``, ``RolledBack`` or ``Foreign``."""
    reason: str
    remaining_ms: float


@dataclass(frozen=True, slots=True)
class GuardStatus:
    """What is held now, for people."""

    frozen: tuple[Held, ...]
    rolled_back: tuple[Held, ...]
    """Resting after a roll-back."""
    foreign: tuple[Held, ...]
    shadow: tuple[str, ...]
    """Knobs that are decided and not acted on."""
    trials: tuple[str, ...]
    """Levers with a change whose effect is not known yet."""


def held(key: Place | Lever, hold: Hold, now_ns: int) -> Held:
    """One hold in words."""
    remaining_ms = max(0.0, (hold.until_ns - now_ns) / 1e6)
    if isinstance(key, Lever):
        return Held(key.value, "", ALL, hold.kind, hold.text, remaining_ms)
    knob, target = key
    return Held(knob.lever.value, knob.value, target, hold.kind, hold.text, remaining_ms)


def named(values: Mapping[Place, Value]) -> dict[str, Value]:
    """Values of one target by the names of their knobs."""
    return {knob.value: value for (knob, _), value in values.items()}


def guard_draft(
    target: str,
    before: Mapping[Place, Value],
    after: Mapping[Place, Value],
    reason: Reason,
    inputs: Mapping[str, float | int | str | None],
) -> Draft:
    """An entry about something the guard did."""
    return Draft(GUARD, target, named(before), named(after), reason, inputs)


def lever_draft(move: Move, before: Mapping[Place, Value], after: Mapping[Place, Value], stopped: str = "") -> Draft:
    """An entry about a lever's move that was acted on, wholly or in part."""
    asked = {f"asked_{place[0].value}": value for place, value in move.after.items() if after.get(place) != value}
    return _move_draft(move, before, after, asked, stopped, acted=True)


def idle_draft(move: Move, stopped: str = "") -> Draft:
    """An entry about a move that was not acted on: a hold, shadow mode, or stopped by the guard."""
    return _move_draft(move, move.before, move.after, {}, stopped, acted=False)


def _move_draft(
    move: Move,
    before: Mapping[Place, Value],
    after: Mapping[Place, Value],
    asked: Mapping[str, Value],
    stopped: str,
    *,
    acted: bool,
) -> Draft:
    inputs = {**move.inputs, **asked}
    if stopped:
        inputs["held_back"] = stopped
    return Draft(
        lever=move.lever.value,
        target=move.target,
        before=named(before),
        after=named(after),
        reason=move.reason,
        inputs=inputs,
        predicted=move.predicted,
        alternatives=move.alternatives,
        acted=acted,
    )


def override_draft(override: Override, before: Value, after: Value, *, ended: bool) -> Draft:
    """An entry about an override that began or ended."""
    knob = override.knob.value if override.knob is not None else "every knob"
    what = override.mode or override.value
    if ended:
        code, text = "OverrideEnded", f"{knob} is no longer held at {what}"
    else:
        by = f" by {override.by}" if override.by else ""
        why = f": {override.why}" if override.why else ""
        code, text = "OverrideSet", f"{knob} held at {what}{by} for {override.remaining_ms / 1e3:.0f} s{why}"
    inputs = {"override": override.id, "mode": override.mode, "by": override.by, "why": override.why}
    if override.mode is not None:
        return Draft(GUARD, override.target, {}, {}, Reason(code, text), inputs)
    return Draft(GUARD, override.target, {knob: before}, {knob: after}, Reason(code, text), inputs)


def foreign_draft(place: Place, asked: Value, found: Value, hold_s: float) -> Draft:
    """An entry about a place that somebody else set."""
    text = f"somebody else set {place[0]} to {found}, it was {asked}: left to them for {hold_s:.0f} s"
    inputs = {"lever": place[0].lever.value, "hold_s": hold_s}
    return guard_draft(place[1], {place: asked}, {place: found}, Reason("ForeignWriter", text), inputs)


def over_draft(key: Place | Lever, hold: Hold, standing: Mapping[Place, Value]) -> Draft:
    """An entry about a hold that is over."""
    code, text = ("Thawed", "may be steered again") if hold.kind == FROZEN else ("ForeignOver", "is ours again")
    if isinstance(key, Lever):
        return guard_draft(ALL, {}, {}, Reason(code, f"{key} {text}"), {"lever": key.value})
    values = {key: standing.get(key)}
    return guard_draft(key[1], values, values, Reason(code, f"{key[0]} {text}"), {"lever": key[0].lever.value})


def turned_draft(place: Place, value: Value, turns: int, window_s: float, freeze_s: float) -> Draft:
    """An entry about a knob that is frozen because it turned back and forth."""
    knob, target = place
    text = f"{knob} changed direction {turns} times within {window_s:.0f} s: frozen at {value} for {freeze_s:.0f} s"
    inputs = {"lever": knob.lever.value, "turns": turns, "freeze_s": freeze_s}
    return guard_draft(target, {place: value}, {place: value}, Reason("Frozen", text), inputs)
