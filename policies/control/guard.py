"""Guard rails: what of the levers' wishes really stands, and what is taken back.

For each place, the first of these that says something decides what stands::

    override       what a person set, until it ends                          overrides.py
    shadow         by configuration nothing; by hand what stood already.     configuration, or an override of the mode
                   Moves are only written down
    foreign        what somebody else set, for foreign_hold_s                foreign.py
    roll-back      what stood before a change that did harm                  trial.py, comparison.py
    freeze, rest   what stands already                                       holds.py
    bounds, pace   the lever's wish within guard.knobs
    the wish

Every change that is acted on is an experiment with a verdict. One that did harm beyond noise is taken back, its places
rest for as long as a new experiment needs a baseline (of replicas: once those that were sold by it run again), and
after ``rollbacks_max`` of them they are frozen. A roll-back is no experiment itself: nothing takes it back. More
replicas than needed are never taken back either, they only cost money and the scaler lowers them with its own patience.

When an override or a hold ends, what stands is what the levers last wanted. The levers are told what stands
(``Adapter.adopt``), so a new controller, whose levers begin with what engines follow, finds nothing foreign.

This module must not compute what a lever wants, and must not read a clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from policies.config import PolicyConfig
from policies.control.adapt import Adaptation
from policies.control.foreign import ForeignWatch
from policies.control.guarded import (
    Guarded,
    GuardStatus,
    Judgement,
    foreign_draft,
    guard_draft,
    held,
    idle_draft,
    lever_draft,
    over_draft,
    override_draft,
    turned_draft,
)
from policies.control.holds import ALL, FOREIGN, FROZEN, LEVER_ROLLBACKS_FACTOR, ROLLED_BACK, Hold, Holds
from policies.control.ledger import Draft
from policies.control.levers import TARGET, knobs_of
from policies.control.moves import Move, Place, Value
from policies.control.objective import ObjectiveSample
from policies.control.overrides import OverrideBook
from policies.control.signals import Signals
from policies.control.trial import REACH_LARGE, SETTLE_TICKS, Outcome, Trial, Trials, reach_of
from policies.steering import ANY, PER_REPLICA, Knob, Lever, Override
from policies.types import Decision, Knobs, Mode, Reason, ReplicaId

TELL_AGAIN_NS = 60_000_000_000
"""A move that comes to nothing is written down again at most this often per place."""

ONE_AT_A_TIME_NS = 120_000_000_000
"""Levers move one at a time for this long after two of them met in one span and the objective fell."""

KEEP_TICKS = 60
"""What is remembered of replicas that are gone is forgotten every so many ticks."""


@dataclass(slots=True)
class _Step:
    """Working values of one tick."""

    signals: Signals
    now_ns: int
    replicas: int
    in_force: dict[Place, Value]
    written: list[Draft] = field(default_factory=list)
    judged: list[Judgement] = field(default_factory=list)
    restored: dict[Place, Value] = field(default_factory=dict)
    """What a roll-back of this tick puts back."""
    taken_back: list[Trial] = field(default_factory=list)
    """The trials that did harm."""
    granted: dict[Place, Value] = field(default_factory=dict)
    """What levers may set in this tick."""
    stopped: set[Place] = field(default_factory=set)
    """Where they may not."""


class Guard:
    """See the module.

    Args:
        config: guard, control mode and objectives are read.
        overrides: what people set.
    """

    def __init__(self, config: PolicyConfig, overrides: OverrideBook) -> None:
        self._overrides = overrides
        self._holds = Holds(config.guard)
        self._trials = Trials(config.guard, config.objectives.quantile)
        self._watch = ForeignWatch()
        self._standing: dict[Place, Value] = {}
        """What the last plan said."""
        self._knobs: Mapping[ReplicaId, Knobs] = {}
        """The same by replica; :attr:`_stale` where a value was corrected since."""
        self._stale = False
        self._wanted: dict[Place, Value] = {}
        """Of places with an override: what the levers last wanted there."""
        self._seen: dict[str, Override] = {}
        """Overrides of the last tick, by id."""
        self._shadowed: frozenset[Knob] = frozenset()
        self._told_ns: dict[Place, int] = {}
        self._one_at_a_time_until_ns = 0
        self._unnumbered: list[tuple[int, Trial]] = []
        self._tick = 0
        self.reconfigure(config)

    def reconfigure(self, config: PolicyConfig) -> None:
        """Follow a new configuration; holds and trials go on."""
        self._config = config
        self._holds.config = config.guard
        self._trials.reconfigure(config.guard, config.objectives.quantile)

    def step(self, adaptation: Adaptation, signals: Signals, sample: ObjectiveSample, now_ns: int) -> Guarded:
        """One tick: judge what is due, then let through what may move."""
        self._tick += 1
        step = _Step(signals, now_ns, len(signals.serving), dict(adaptation.wishes))
        overrides = self._overrides.in_force(now_ns)
        self._shadow(step)
        self._thaw(step)
        self._find_foreign(step)
        self._judge(step, sample)
        self._move(adaptation.moves, step)
        self._compose(step)
        self._override(overrides, step)
        if self._stale or step.in_force != self._standing:
            self._knobs, self._stale = knobs_of(step.in_force), False
        self._standing = step.in_force
        if self._tick % KEEP_TICKS == 0:
            self._holds.keep(step.in_force)
            self._told_ns = {p: t for p, t in self._told_ns.items() if now_ns - t < TELL_AGAIN_NS}
        acting = step.in_force
        if self._shadowed:
            acting = {p: v for p, v in acting.items() if p[0] not in self._shadowed or p in self._wanted}
        return Guarded(acting, step.in_force, self._knobs, tuple(step.written), tuple(step.judged), overrides)

    def number(self, decisions: Sequence[Decision]) -> None:
        """Told which entries of the ledger :attr:`Guarded.written` became, in the same order."""
        for index, trial in self._unnumbered:
            trial.note(decisions[index].seq)
        self._unnumbered = []

    def allowed(self, knob: Knob, wish: int) -> tuple[int, bool]:
        """``wish`` within the configured bounds of ``knob``, and whether it is acted on: for knobs whose changes are no
        experiments.
        """
        return int(self._bounded(knob, wish, None, paced=False) or 0), knob not in self._shadowed

    def status(self, now_ns: int) -> GuardStatus:
        """What is held now."""
        holds = sorted([held(k, h, now_ns) for k, h in self._holds.all()], key=lambda h: (h.lever, h.knob, h.target))
        frozen, rested, foreign = (tuple(h for h in holds if h.kind == k) for k in (FROZEN, ROLLED_BACK, FOREIGN))
        shadow = tuple(knob.value for knob in Knob if self._is_shadow(knob, now_ns))
        return GuardStatus(frozen, rested, foreign, shadow, tuple(sorted(lever.value for lever in self._trials.open)))

    # --- before the levers --------------------------------------------------------------------------------------------

    def _is_shadow(self, knob: Knob, now_ns: int) -> bool:
        mode = self._overrides.mode_of(knob, now_ns)
        if mode is not None:
            return mode is Mode.SHADOW
        knob_guard = self._config.guard.knobs.get(knob.value)
        return self._config.control.mode is Mode.SHADOW or (knob_guard is not None and knob_guard.shadow)

    def _shadow(self, step: _Step) -> None:
        """Knobs that begin or end to be acted on change what stands without a lever's doing."""
        shadowed = frozenset(knob for knob in Knob if self._is_shadow(knob, step.now_ns))
        if shadowed != self._shadowed:
            begun = shadowed ^ self._shadowed
            self._disturb([place for place in step.in_force if place[0] in begun], step)
        self._shadowed = shadowed

    def _thaw(self, step: _Step) -> None:
        """Holds that are over; a number of replicas that was put back rests until it is reached, if there is room."""
        resting, fleet = self._holds.places.get(TARGET), step.signals.fleet
        if resting is not None and resting.kind == ROLLED_BACK and fleet is not None and not fleet.unschedulable:
            target = self._standing.get(TARGET)
            if target is not None and fleet.replicas_running < target:
                resting.until_ns = max(resting.until_ns, step.now_ns + self._rest_ns)
        for key, hold in self._holds.expire(step.now_ns):
            if hold.kind != ROLLED_BACK:
                step.written.append(over_draft(key, hold, self._standing))

    def _find_foreign(self, step: _Step) -> None:
        """Places that somebody else moved: theirs for a while."""
        hold_s = self._config.guard.foreign_hold_s
        for foreign in self._watch.step(self._standing, self._knobs, step.signals, self._tick):
            place = foreign.place
            if self._overrides.value_at(place, step.now_ns) is not None:
                continue
            draft = foreign_draft(place, foreign.asked, foreign.found, hold_s)
            self._holds.hold(place, FOREIGN, draft.reason.text, step.now_ns + round(hold_s * 1e9))
            self._standing[place], self._stale = foreign.found, True
            self._disturb([place], step)
            step.written.append(draft)

    def _judge(self, step: _Step, sample: ObjectiveSample) -> None:
        """Verdicts that are due, and what must be put back."""
        for outcome in self._trials.step(sample, step.signals):
            step.judged.extend(
                Judgement(seq, outcome.verdict, outcome.text, outcome.realised) for seq in outcome.trial.seqs
            )
            if outcome.crowded:
                self._one_at_a_time_until_ns = step.now_ns + ONE_AT_A_TIME_NS
            if outcome.harmful and self._config.guard.rollback:
                self._roll_back(outcome, step)
        if step.restored:
            self._trials.taken_back(step.taken_back, step.restored, step.replicas)

    def _roll_back(self, outcome: Outcome, step: _Step) -> None:
        trial, now_ns = outcome.trial, step.now_ns
        back = {p: value for p, value in trial.before.items() if p in step.in_force and self._ours(p, trial, now_ns)}
        if not back:
            return
        step.restored |= back
        step.taken_back.append(trial)
        self._holds.forget_turns(back)
        for place in back:
            self._holds.hold(place, ROLLED_BACK, f"rests after a roll-back: {outcome.text}", now_ns + self._rest_ns)
        targets = sorted({target for _, target in back})
        reason = Reason("RolledBack", f"taken back: {outcome.text}")
        inputs = {"lever": trial.lever.value, "reach": round(trial.reach, 4), **outcome.realised}
        for target in targets:
            places = {place: value for place, value in back.items() if place[1] == target}
            after = {place: trial.after[place] for place in places}
            step.written.append(guard_draft(target, after, places, reason, inputs))
        for target in self._holds.count_rollback(trial.lever, targets, now_ns) if outcome.counts else ():
            self._freeze(trial.lever, target, back, step)

    @property
    def _rest_ns(self) -> int:
        """Time that a new experiment needs for its baseline."""
        return round((SETTLE_TICKS + self._config.guard.effect_ticks) * self._config.control.tick_ms * 1e6)

    def _ours(self, place: Place, trial: Trial, now_ns: int) -> bool:
        """Whether a place still stands as the trial left it, differs from before, and is ours to put back."""
        before, after = trial.before[place], trial.after[place]
        hold = self._holds.places.get(place)
        theirs = self._overrides.value_at(place, now_ns) is not None or (hold is not None and hold.kind == FOREIGN)
        grew = place[0] is Knob.REPLICAS_TARGET and before is not None and after is not None and after > before
        return before != after and not theirs and not grew and self._standing.get(place) == after

    def _freeze(self, lever: Lever, target: str, back: Mapping[Place, Value], step: _Step) -> None:
        """A lever that did harm too often at ``target``."""
        guard = self._config.guard
        until_ns = step.now_ns + round(guard.freeze_s * 1e9)
        whole = target == ALL
        times = guard.rollbacks_max * (LEVER_ROLLBACKS_FACTOR if whole else 1)
        where = "" if whole or target == ANY else f" at {target}"
        span = f"within {guard.window_s:.0f} s"
        text = f"{lever}{where} was rolled back {times} times {span}: frozen for {guard.freeze_s:.0f} s"
        values = {place: value for place, value in back.items() if whole or place[1] == target}
        if whole:
            self._holds.levers[lever] = Hold(FROZEN, text, until_ns)
        for place in values:
            self._holds.hold(place, FROZEN, text, until_ns)
        inputs = {"lever": lever.value, "rollbacks": times, "freeze_s": guard.freeze_s}
        step.written.append(guard_draft(target, values, values, Reason("Frozen", text), inputs))

    def _disturb(self, places: Iterable[Place], step: _Step) -> None:
        some = dict.fromkeys(places)
        if some:
            self._trials.disturbed(some, step.replicas)

    # --- the levers' moves --------------------------------------------------------------------------------------------

    def _move(self, moves: Iterable[Move], step: _Step) -> None:
        """What may move: granted, written down, and watched as experiments."""
        for move in moves:
            if not move.changes or all(knob in self._shadowed for knob, _ in move.after):
                step.written.append(idle_draft(move))
            else:
                self._grant(move, step)

    def _grant(self, move: Move, step: _Step) -> None:
        before = {place: self._standing.get(place, move.before.get(place)) for place in move.after}
        after = dict(before)
        why = ""
        for place, value in move.after.items():
            if value == before[place] or place[0] in self._shadowed:
                continue
            stopped = self._stops(place, move, before[place], value, step)
            if stopped:
                why = stopped
                step.stopped.add(place)
            else:
                after[place] = self._bounded(place[0], value, before[place], paced=not move.urgent)
        changed = {place: value for place, value in after.items() if value != before[place]}
        if not changed:
            step.stopped.update(move.after)
            self._tell(move, why or "nothing is left of it within bounds and pace", step)
            return
        step.granted |= changed
        trial = self._trials.changed(move.lever, before, changed, step.replicas)
        self._unnumbered.append((len(step.written), trial))
        step.written.append(lever_draft(move, before, after, why))
        for place, value in changed.items():
            if not move.free and self._holds.count_move(place, before[place], value, step.now_ns):
                self._freeze_turning(place, value, step)

    def _stops(self, place: Place, move: Move, before: Value, after: Value, step: _Step) -> str:
        """What keeps a lever from moving ``place``; empty: nothing."""
        override = self._overrides.value_at(place, step.now_ns)
        if override is not None:
            self._wanted[place] = after
            return f"held at {override.value} by an override"
        hold = self._holds.stops(place, move, before, after)
        if hold is not None:
            return hold.text
        if move.urgent or step.now_ns >= self._one_at_a_time_until_ns:
            return ""
        others = [t.lever for t in self._trials.open.values() if t.lever is not move.lever and t.reach >= REACH_LARGE]
        large = reach_of(move.after, step.replicas) >= REACH_LARGE
        return f"waits until the effect of {others[0]} is known" if large and others else ""

    def _freeze_turning(self, place: Place, value: Value, step: _Step) -> None:
        guard = self._config.guard
        draft = turned_draft(place, value, guard.turns_of(place[0]), guard.window_s, guard.freeze_s)
        self._holds.hold(place, FROZEN, draft.reason.text, step.now_ns + round(guard.freeze_s * 1e9))
        step.written.append(draft)

    def _tell(self, move: Move, why: str, step: _Step) -> None:
        """Write down a move that came to nothing, now and then."""
        last_ns = max([self._told_ns.get(place, -TELL_AGAIN_NS) for place in move.after])
        if step.now_ns - last_ns >= TELL_AGAIN_NS:
            self._told_ns |= dict.fromkeys(move.after, step.now_ns)
            step.written.append(idle_draft(move, why))

    def _bounded(self, knob: Knob, want: Value, standing: Value, *, paced: bool) -> Value:
        """``want`` within the bounds of the configuration, and within one step's pace of what stands."""
        guard = self._config.guard.knobs.get(knob.value)
        if guard is None or want is None:
            return want
        value = float(want)
        if paced and guard.change_share_max is not None and standing is not None:
            most = max(abs(standing) * guard.change_share_max, 1.0 if knob.whole else 0.0)
            value = max(standing - most, min(standing + most, value))
        value = value if guard.max is None else min(value, guard.max)
        value = value if guard.min is None else max(value, guard.min)
        if value == want:
            return want
        if not knob.whole:
            return round(value, 4)
        return math.floor(value) if value < want else math.ceil(value)

    # --- what stands --------------------------------------------------------------------------------------------------

    def _compose(self, step: _Step) -> None:
        """Turn the wishes in ``step.in_force`` into what stands, without overrides."""
        standing, in_force = self._standing, step.in_force
        silent: list[Place] = []
        if in_force != standing:
            for place, want in in_force.items():
                if place not in standing:
                    in_force[place] = self._bounded(place[0], want, None, paced=False)
                elif standing[place] != want and place not in step.granted:
                    kept = place in step.stopped or self._holds.at(place) is not None
                    in_force[place] = standing[place] if kept else self._bounded(place[0], want, None, paced=False)
                    if not kept:
                        silent.append(place)
            self._disturb(silent, step)
        in_force |= step.restored
        in_force |= {place: value for place, value in step.granted.items() if place in in_force}
        by_hand = {k for k in self._shadowed if self._overrides.mode_of(k, step.now_ns) is Mode.SHADOW}
        for place in [p for p in in_force if p[0] in self._shadowed] if self._shadowed else ():
            if place in standing and place[0] in by_hand:
                in_force[place] = standing[place]
            else:
                del in_force[place]

    def _override(self, overrides: Sequence[Override], step: _Step) -> None:
        """Put what people set over everything, and what levers want back where an override ended."""
        now = self._overridden_places(overrides, step)
        ended = [place for place in self._wanted if place not in now]
        for place in ended:
            wanted = self._wanted.pop(place)
            if wanted is None and place[0] in self._shadowed:
                step.in_force.pop(place, None)
            elif place in step.in_force:
                step.in_force[place] = self._bounded(place[0], wanted, None, paced=False)
        begun = [place for place in now if place not in self._wanted]
        for place in begun:
            self._wanted[place] = step.in_force.get(place)
        self._disturb([*ended, *begun], step)
        self._write_overrides(overrides, step)
        step.in_force |= now

    def _overridden_places(self, overrides: Sequence[Override], step: _Step) -> dict[Place, Value]:
        """The value of every place that an override is for; the one that names a replica beats the one for all."""
        values: dict[Place, Value] = {}
        for override in sorted(overrides, key=lambda o: o.target != ANY):
            knob = override.knob
            if knob is None or override.value is None:
                continue
            if knob not in PER_REPLICA:
                values[knob, ANY] = override.value
                continue
            for replica in step.signals.replicas:
                if override.target in (ANY, replica.replica_id):
                    values[knob, replica.replica_id] = override.value
        return values

    def _write_overrides(self, overrides: Sequence[Override], step: _Step) -> None:
        """Overrides that began or ended since the last tick."""
        now = {o.id: o for o in overrides}
        for override in self._seen.values():
            if override.id not in now:
                step.written.append(override_draft(override, override.value, self._at(override, step), ended=True))
        for override in overrides:
            if override.id not in self._seen:
                step.written.append(override_draft(override, self._at(override, step), override.value, ended=False))
        self._seen = now

    def _at(self, override: Override, step: _Step) -> Value:
        """What stands at its place without it; unknown for all replicas together."""
        return step.in_force.get((override.knob, override.target)) if override.knob is not None else None
