"""What people ask of the controller and tell it: its ledger, conditions, overrides, shadow mode, objectives.

Everything that changes what the controller decides (an override, other objectives) is recorded like a report, so that a
replay decides the same. What is refused comes back as a :class:`Refused`, not as an exception: Ray would wrap it, and
the gateway tells the client in its own words.

It must not decide: overrides are kept and weighed by ``policies/control``. All times people see are of the wall clock;
the controller's own are monotonic.
"""

from __future__ import annotations

import logging
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autoscaling.simulator.recorded import (
    ConditionNote,
    DecisionLine,
    InputLine,
    ObjectivesLine,
    OverrideEndLine,
    OverrideLine,
)
from deployments.clock import now_ns, wall_ns
from deployments.control_view import condition_state, decision_state, hold_state, override_state, plain
from deployments.settings import Settings, SettingsError
from policies.control.catalogue import CONDITIONS
from policies.control.loop import ControlState, TickResult
from policies.control.overrides import OverrideError
from policies.steering import Knob, Override
from policies.types import Decision, Mode

logger = logging.getLogger(__name__)

DECISIONS_PAGE_MAX = 1_000
"""Most entries of one answer of :meth:`ControlDesk.decisions`."""


@dataclass(frozen=True, slots=True)
class Refused:
    """What someone asked for cannot be done."""

    message: str
    param: str | None = None
    """The field that is wrong."""
    found: bool = True
    """Whether what it is about exists."""


@dataclass(frozen=True, slots=True)
class DecisionFilter:
    """Which entries of the ledger are asked for. ``None``: all."""

    lever: str | None = None
    target: str | None = None
    since_unix_s: float | None = None

    def takes(self, entry: Decision, at_unix_ns: int) -> bool:
        """Whether ``entry``, made at that time, is one of them."""
        return (
            (self.lever is None or entry.lever == self.lever)
            and (self.target is None or entry.target == self.target)
            and (self.since_unix_s is None or at_unix_ns >= self.since_unix_s * 1e9)
        )


EVERYTHING = DecisionFilter()


class ControlDesk:
    """See the module.

    Args:
        state: the controller's memory.
        settings: those it was started with.
        record: writes an input into the recording.
    """

    def __init__(self, state: ControlState, settings: Settings, record: Callable[[InputLine], None]) -> None:
        self._state = state
        self._settings = settings
        self._record = record
        self._notes: OrderedDict[int, tuple[ConditionNote, ...]] = OrderedDict()
        self.objectives: Mapping[str, Any] | None = None
        """The ``user_config`` in force; ``None``: no gateway has one."""

    # --- the ledger -------------------------------------------------------------------------------------------------

    def took(self, result: TickResult) -> list[DecisionLine]:
        """Note what was active at a tick that decided something; what the ledger's file should hold of it."""
        if result.decisions:
            notes = tuple(ConditionNote(c.name, c.since_ns, c.text, c.evidence) for c in result.conditions if c.active)
            for decision in result.decisions:
                self._notes[decision.seq] = notes
            while len(self._notes) > self._state.config.control.decisions_max:
                self._notes.popitem(last=False)
        return [self._line(decision) for decision in (*result.decisions, *result.judged)]

    def decisions(
        self, limit: int = 100, since_seq: int | None = None, wanted: DecisionFilter = EVERYTHING
    ) -> list[dict[str, Any]]:
        """Ledger entries, oldest first: the newest ``limit``, or the first ``limit`` after ``since_seq``."""
        limit, ledger = min(limit, DECISIONS_PAGE_MAX), self._state.ledger
        if wanted == EVERYTHING:
            page = ledger.latest(limit) if since_seq is None else ledger.since(since_seq, limit)
        else:
            offset_ns = _wall_offset_ns()
            matching = [d for d in ledger.since(since_seq or 0, len(ledger)) if wanted.takes(d, d.at_ns + offset_ns)]
            page = matching[-limit:] if since_seq is None else matching[:limit]
        return [decision_state(self._line(decision), self._state.epoch) for decision in page]

    def _line(self, decision: Decision) -> DecisionLine:
        return DecisionLine(decision.at_ns + _wall_offset_ns(), decision, self._notes.get(decision.seq, ()))

    # --- conditions -------------------------------------------------------------------------------------------------

    def conditions(self) -> list[dict[str, Any]]:
        """Every named condition: whether it is active, its figures, and what to do about it."""
        last, at_ns = self._state.last, now_ns()
        found = {c.name: c for c in last.conditions} if last is not None else {}
        return [condition_state(spec, found.get(spec.name), at_ns) for spec in CONDITIONS]

    # --- overrides --------------------------------------------------------------------------------------------------

    def overrides(self) -> list[dict[str, Any]]:
        """Those in force, oldest first."""
        at_ns, wall = now_ns(), wall_ns()
        return [override_state(override, wall) for override in self._state.overrides.in_force(at_ns)]

    def set_override(self, asked: Override) -> dict[str, Any] | Refused:
        """Take ``asked``; its id is made here."""
        held = self._put(replace(asked, id=uuid.uuid4().hex[:12]))
        return held if isinstance(held, Refused) else override_state(held, wall_ns())

    def _put(self, override: Override) -> Override | Refused:
        at_ns = now_ns()
        if override.target != "*" and override.target not in self._replicas():
            known = ", ".join(sorted(self._replicas())) or "none"
            return Refused(f"there is no replica {override.target!r}; there are: {known}", "target")
        s_max = self._state.config.guard.override_s_max
        if not 0 < override.remaining_ms <= s_max * 1_000:
            why = f"must be above 0 and at most {s_max:g} s (guard.override_s_max), is {override.remaining_ms / 1e3:g}"
            return Refused(why, "expires_in_s")
        try:
            held = self._state.overrides.put(override, at_ns)
        except OverrideError as error:
            return Refused(error.message, error.field)
        self._record(OverrideLine(at_ns, held))
        logger.info("Override %s by key %r: %s.", held.id, held.by, _in_words(held))
        return held

    def drop_overrides(self, override_id: str | None, by: str) -> list[dict[str, Any]] | Refused:
        """Take back one override, or all of them; those that ended are the answer."""
        at_ns, wall = now_ns(), wall_ns()
        ids = [o.id for o in self._state.overrides.in_force(at_ns)] if override_id is None else [override_id]
        ended = [self._drop(each, by) for each in ids]
        if override_id is not None and ended == [None]:
            return Refused(f"no override {override_id!r} is in force; it may have ended by itself", "id", found=False)
        return [override_state(override, wall) for override in ended if override is not None]

    def _drop(self, override_id: str, by: str) -> Override | None:
        at_ns = now_ns()
        ended = self._state.overrides.drop(override_id, at_ns)
        if ended is not None:
            self._record(OverrideEndLine(at_ns, override_id))
            logger.info("Override %s taken back by key %r: %s.", override_id, by, _in_words(ended))
        return ended

    def _replicas(self) -> set[str]:
        last = self._state.last
        return set() if last is None else {replica.replica_id for replica in last.signals.replicas}

    # --- shadow mode ------------------------------------------------------------------------------------------------

    def shadow(self) -> list[dict[str, Any]]:
        """For every knob, whether decisions about it are acted on, what says so, and what the guard rails hold."""
        status = self._state.guard.status(now_ns())
        held = [*status.frozen, *status.rolled_back, *status.foreign]
        return [
            self._shadow_of(knob)
            | {"held": [hold_state(h) for h in held if h.knob == knob or (not h.knob and h.lever == knob.lever)]}
            for knob in Knob
        ]

    def _shadow_of(self, knob: Knob) -> dict[str, Any]:
        override = self._mode_override(knob)
        mode, because = self._configured(knob)
        if override is not None:
            mode, because = Mode(str(override.mode)), f"override {override.id}"
        return {
            "knob": knob.value,
            "lever": knob.lever.value,
            "mode": mode.value,
            "because": because,
            "expires_in_s": None if override is None else override.remaining_ms / 1_000,
        }

    def _configured(self, knob: Knob) -> tuple[Mode, str]:
        config = self._state.config
        guard = config.guard.knobs.get(knob.value)
        if guard is not None and guard.shadow:
            return Mode.SHADOW, f"guard.knobs.{knob.value}.shadow"
        return config.control.mode, "control.mode"

    def _mode_override(self, knob: Knob) -> Override | None:
        modes = {o.knob: o for o in self._state.overrides.in_force(now_ns()) if o.mode is not None}
        return modes.get(knob) or modes.get(None)

    def set_shadow(self, shadow: bool, asked: Override) -> list[dict[str, Any]] | Refused:
        """Turn shadow mode of ``asked.knob`` (``None``: of all) on or off, for as long as ``asked`` says.

        Off takes back what was turned on; an override to act is made only where the configuration says shadow.
        """
        knobs = list(Knob) if asked.knob is None else [asked.knob]
        if not shadow:
            for held in self._state.overrides.in_force(now_ns()):
                if held.mode is not None and (asked.knob is None or held.knob is asked.knob):
                    self._drop(held.id, asked.by)
            if all(self._shadow_of(knob)["mode"] == Mode.ACT for knob in knobs):
                return self.shadow()
        mode = Mode.SHADOW if shadow else Mode.ACT
        held_or_refused = self._put(replace(asked, id=uuid.uuid4().hex[:12], mode=mode.value, value=None))
        return held_or_refused if isinstance(held_or_refused, Refused) else self.shadow()

    # --- objectives -------------------------------------------------------------------------------------------------

    def set_objectives(self, user_config: Mapping[str, Any], by: str) -> Refused | None:
        """Steer by the objectives of a gateway's ``user_config`` from now on; the same again changes nothing."""
        try:
            config = self._settings.with_objectives(user_config).policy_config()
        except SettingsError as error:
            logger.error("Objectives of gateway %s are refused; those in force stay: %s", by, error)
            return Refused(str(error), "objectives")
        self.objectives = user_config
        now = self._state.config
        if (config.objectives, config.classes) != (now.objectives, now.classes):
            self._record(ObjectivesLine(now_ns(), config.objectives, config.classes))
            self._state.reconfigure(config.objectives, config.classes)
            logger.info("Other objectives from gateway %s: %s", by, plain(config.objectives))
        return None


def _wall_offset_ns() -> int:
    return wall_ns() - now_ns()


def _in_words(override: Override) -> str:
    what = "every knob" if override.knob is None else override.knob.value
    where = "" if override.target == "*" else f" of {override.target}"
    set_to = override.value if override.mode is None else override.mode
    why = f" ({override.why})" if override.why else ""
    return f"{what}{where} = {set_to} for {override.remaining_ms / 1_000:.0f} s{why}"
