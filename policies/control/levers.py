"""Levers behind one protocol: each proposes moves and is told what stands.

A lever keeps its own history and its own arithmetic (``policies/affinity.py``, ``policies/batching/``, ...). At each
tick it is asked once with everything the tick knows (:class:`LeverView`) and answers with moves; :attr:`wishes` is then
what it would have stand at every place of its own. What really stands may differ, because the joint adaptation or the
guard said no: :meth:`LeverLoop.adopt` tells it, and it goes on from there instead of asking for the same again.

This module must not compute a value itself, and must not choose between levers (``joint.py`` does).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from policies.affinity import PREDICTED_SHARE_MIN, AffinityLoop, LoadBoundLoop
from policies.batching import BatchMove, BatchTuner, OfferedLoad
from policies.config import PolicyConfig
from policies.control.detect import Condition
from policies.control.moves import Move, Place, Value, Wishes
from policies.control.objective import ObjectiveSample
from policies.control.signals import Signals
from policies.control.turns import Turns
from policies.control.windows import WINDOW_NS
from policies.speculation import SpeculationTuner
from policies.steering import ANY, Knob, Lever
from policies.types import GatewayReport, Knobs, Reason, ReplicaId, ReplicaReport, Sampled

STRENGTH: Place = (Knob.AFFINITY_STRENGTH, ANY)
BOUND: Place = (Knob.LOAD_BOUND, ANY)
FORECAST: Place = (Knob.FORECAST_SHARE, ANY)
SHED: Place = (Knob.SHED_FACTOR, ANY)
TARGET: Place = (Knob.REPLICAS_TARGET, ANY)

SLOW_RELEASE_TICKS = 15
"""Ticks in a row that a slow replica must keep the pace before it gets its sequences back."""


@dataclass(frozen=True, slots=True)
class LeverView:
    """Everything a lever may look at in one tick."""

    signals: Signals
    conditions: Sequence[Condition]
    active: frozenset[str]
    """Names of the conditions that are active."""
    sample: ObjectiveSample
    offered: Mapping[ReplicaId, OfferedLoad] = field(default_factory=dict)
    """What is sent to each replica, where the joint adaptation knows it; empty in independent loops."""
    slow: frozenset[ReplicaId] = frozenset()
    """Replicas that cannot keep the pace with even one sequence while others can, likewise."""
    leaving: frozenset[ReplicaId] = frozenset()
    """Those of them that are being replaced."""


class LeverLoop(Protocol):
    """One lever with its history."""

    @property
    def lever(self) -> Lever:
        """Which one it is."""
        ...

    @property
    def wishes(self) -> Wishes:
        """What it would have stand at each of its places; to be read only."""
        ...

    def propose(self, view: LeverView, now_ns: int) -> Sequence[Move]:
        """Answer for one tick: changes, and holds worth knowing. Called once per tick."""
        ...

    def adopt(self, in_force: Wishes, now_ns: int) -> None:
        """Told what stands: where that is not its wish, its wish becomes that. Places that are missing stay."""
        ...


class AffinityLever:
    """Where requests go: trust in cache hits, and the bound on a replica's load."""

    lever = Lever.AFFINITY

    def __init__(self, config: PolicyConfig) -> None:
        self._loop = AffinityLoop(config.affinity, config.routing.affinity_strength)
        self._bound = LoadBoundLoop(config.routing.load_bound)

    def receive_replica(self, report: ReplicaReport) -> None:
        """Count an accepted report."""
        self._loop.receive_replica(report)

    def receive_gateway(self, report: GatewayReport) -> None:
        """Count an accepted report."""
        self._loop.receive_gateway(report)

    @property
    def wishes(self) -> Wishes:
        """Strength and bound."""
        return {STRENGTH: self._loop.strength, BOUND: self._bound.bound}

    def propose(self, view: LeverView, now_ns: int) -> Sequence[Move]:  # noqa: ARG002 - it counts prompts and ticks
        """At most one step of each."""
        if view.signals.blind:
            return ()
        hot_spot = "hot_spot" in view.active
        traffic = view.signals.traffic
        predicted = (traffic.predicted_hit_share if traffic is not None else None) or 0.0
        piles = hot_spot and not view.slow and predicted >= PREDICTED_SHARE_MIN
        moves = []
        for place, move in ((STRENGTH, self._loop.step(hot_spot)), (BOUND, self._bound.step(piles))):
            if move.changed:
                cures = _CURES.get(move.reason.code, frozenset())
                before, after = {place: move.before}, {place: move.after}
                moves.append(Move(self.lever, view.signals.model, before, after, move.reason, move.inputs, cures=cures))
        return moves

    def adopt(self, in_force: Wishes, now_ns: int) -> None:  # noqa: ARG002 - the protocol's arguments
        """Take over what stands."""
        if (strength := in_force.get(STRENGTH)) is not None:
            self._loop.strength = float(strength)
        if (bound := in_force.get(BOUND)) is not None:
            self._bound.bound = float(bound)


_CURES = {
    "HotSpot": frozenset({"hot_spot"}),
    "CacheCold": frozenset({"cache_cold"}),
    "PreemptionBrake": frozenset({"preemption_thrash", "kv_pressure"}),
    "OutcomeCorrection": frozenset({"decode_bound"}),
    "KeepsUp": frozenset({"prefill_bound", "queue_growing"}),
    "SlowDevice": frozenset({"grey_failure"}),
}
"""Conditions that a lever's reason is meant to end."""


class BatchLever:
    """Running sequences and token budget, one tuner per replica.

    A replica that cannot keep the pace with even one sequence while others can (``LeverView.slow``) is held at the
    fewest sequences, so that routers send what counts elsewhere; its tuner goes on beside that. Not so one that is
    being replaced: routers leave it alone, and what is inside should end soon.
    """

    lever = Lever.BATCH

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self._ids: tuple[ReplicaId, ...] = ()
        self._tuners: dict[ReplicaId, BatchTuner] = {}
        """One for each of :attr:`_ids`."""
        self._wishes: dict[Place, Value] = {}
        self._held: dict[ReplicaId, int] = {}
        """Slow replicas, and ticks since each was last found slow."""
        self._turns = Turns()

    def receive_replica(self, report: ReplicaReport, now_ns: int) -> None:
        """Count an accepted report."""
        tuner = self._tuners.get(report.replica_id)
        if tuner is not None:
            tuner.receive(Sampled(report, now_ns), now_ns - WINDOW_NS)

    @property
    def wishes(self) -> Wishes:
        """Both knobs of every known replica."""
        return self._wishes

    def propose(self, view: LeverView, now_ns: int) -> Sequence[Move]:
        """What each tuner says of its replica, of large fleets those whose turn it is (``turns.py``) or that have just
        preempted.
        """
        signals = view.signals
        if signals.ids != self._ids:
            self._arrange(signals.ids)
        moves: list[Move] = []
        due: Sequence[int] = self._turns.due(len(self._ids))
        if signals.preempting:
            due = sorted({*due, *signals.preempting})
        for place in due:
            replica, replica_id = signals.replicas[place], self._ids[place]
            if not replica.fresh:
                continue
            tuner = self._tuners[replica_id]
            before = tuner.wish
            move = tuner.step(replica.window, now_ns, view.offered.get(replica_id))
            if tuner.wish is not before:
                self._wishes |= self._places_of(replica_id)
            if move.changed:
                held = replica_id in self._held or replica_id in view.slow - view.leaving
                asked = _batch_move(replica_id, move)
                moves += [asked] if not held else _tokens_only(asked)
        if view.slow or self._held:
            moves += self._hold_slow(view)
        return moves

    def _arrange(self, ids: tuple[ReplicaId, ...]) -> None:
        """A tuner for each of ``ids``, and no others."""
        old, self._tuners, self._ids = self._tuners, {}, ids
        for replica_id in ids:
            tuner = old.pop(replica_id, None)
            if tuner is None:
                tuner = BatchTuner(self._config.batching, self._config.objectives)
                self._wishes |= _batch_places(replica_id, tuner.wish)
            self._tuners[replica_id] = tuner
        for replica_id in old:
            self._held.pop(replica_id, None)
            for place in _batch_places(replica_id, _NO_KNOBS):
                self._wishes.pop(place, None)

    def reconfigure(self, config: PolicyConfig) -> None:
        """Every tuner steers by the objectives of ``config`` from now on."""
        self._config = config
        for tuner in self._tuners.values():
            tuner.reconfigure(config.objectives)

    def _hold_slow(self, view: LeverView) -> list[Move]:
        """Begin or end to hold slow replicas at the fewest sequences."""
        moves: list[Move] = []
        fewest = self._config.batching.running_seqs_min
        slow = view.slow - view.leaving
        for replica_id in sorted(slow & self._tuners.keys()):
            if replica_id not in self._held:
                place = _places(replica_id)[0]
                text = f"one sequence alone misses the pace here while others keep it: at most {fewest} here"
                before, after = {place: self._wishes[place]}, {place: fewest}
                reason = Reason("SlowDevice", text)
                moves.append(
                    Move(self.lever, replica_id, before, after, reason, cures=_CURES["SlowDevice"], urgent=True)
                )
            self._held[replica_id] = 0
            self._wishes |= self._places_of(replica_id)
        for replica_id in sorted(self._held.keys() - slow):
            self._held[replica_id] += 1
            if self._held[replica_id] >= SLOW_RELEASE_TICKS and replica_id in self._tuners:
                del self._held[replica_id]
                place = _places(replica_id)[0]
                self._wishes |= self._places_of(replica_id)
                reason = Reason("SlowDeviceRecovered", "it keeps the pace again")
                moves.append(Move(self.lever, replica_id, {place: fewest}, {place: self._wishes[place]}, reason))
        return moves

    def _places_of(self, replica_id: ReplicaId) -> dict[Place, Value]:
        places = _batch_places(replica_id, self._tuners[replica_id].wish)
        if replica_id in self._held:
            places[_places(replica_id)[0]] = self._config.batching.running_seqs_min
        return places

    def adopt(self, in_force: Wishes, now_ns: int) -> None:
        """Take over the knobs that stand."""
        for replica_id, tuner in self._tuners.items():
            seqs_place, tokens_place = _places(replica_id)
            seqs, tokens = tuner.wish.running_seqs_max, tuner.wish.step_tokens_max
            if replica_id not in self._held:
                seqs = _whole(in_force.get(seqs_place, seqs))
            tokens = _whole(in_force.get(tokens_place, tokens))
            if seqs != tuner.wish.running_seqs_max or tokens != tuner.wish.step_tokens_max:
                tuner.adopt(Knobs(seqs, tokens), now_ns)
                self._wishes |= self._places_of(replica_id)


class SpeculationLever:
    """How many tokens are drafted ahead, one tuner per replica."""

    lever = Lever.SPECULATION

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config.speculation
        self._tuners: dict[ReplicaId, SpeculationTuner] = {}
        self._wishes: dict[Place, Value] = {}

    @property
    def wishes(self) -> Wishes:
        """The depth of every replica whose engine speculates."""
        return self._wishes

    def propose(self, view: LeverView, now_ns: int) -> Sequence[Move]:
        """What each tuner says of its replica."""
        tuners, self._tuners = self._tuners, {}
        moves = []
        for replica in view.signals.replicas:
            replica_id = replica.latest.replica_id
            tuner = tuners.pop(replica_id, None)
            if tuner is None and replica.latest.speculative_depth_hard is None:
                continue
            tuner = tuner or SpeculationTuner(self._config)
            self._tuners[replica_id] = tuner
            if not replica.fresh:
                continue
            move = tuner.step(replica.window, now_ns)
            self._note(replica_id, tuner)
            if move.changed and move.before is not None:
                place = (Knob.SPECULATIVE_DEPTH, replica_id)
                before, after = {place: move.before}, {place: move.after}
                moves.append(
                    Move(
                        self.lever, replica_id, before, after, move.reason, move.inputs, move.predicted,
                        urgent=move.urgent,
                    )
                )  # fmt: skip
        for replica_id in tuners:
            self._wishes.pop((Knob.SPECULATIVE_DEPTH, replica_id), None)
        return moves

    def _note(self, replica_id: ReplicaId, tuner: SpeculationTuner) -> None:
        place = (Knob.SPECULATIVE_DEPTH, replica_id)
        if tuner.wish is None:
            self._wishes.pop(place, None)
        else:
            self._wishes[place] = tuner.wish

    def adopt(self, in_force: Wishes, now_ns: int) -> None:  # noqa: ARG002 - the protocol's arguments
        """Take over the depths that stand."""
        for replica_id, tuner in self._tuners.items():
            depth = in_force.get((Knob.SPECULATIVE_DEPTH, replica_id), tuner.wish)
            if depth != tuner.wish:
                tuner.adopt(_whole(depth))
                self._note(replica_id, tuner)


def _whole(value: Value) -> int | None:
    return None if value is None else int(value)


_NO_KNOBS = Knobs()


def _places(replica_id: ReplicaId) -> tuple[Place, Place]:
    return (Knob.RUNNING_SEQS_MAX, replica_id), (Knob.STEP_TOKENS_MAX, replica_id)


def _batch_places(replica_id: ReplicaId, knobs: Knobs) -> dict[Place, Value]:
    seqs, tokens = _places(replica_id)
    return {seqs: knobs.running_seqs_max, tokens: knobs.step_tokens_max}


def _batch_move(replica_id: ReplicaId, move: BatchMove) -> Move:
    return Move(
        lever=Lever.BATCH,
        target=replica_id,
        before=_batch_places(replica_id, move.before),
        after=_batch_places(replica_id, move.after),
        reason=move.reason,
        inputs=move.inputs,
        predicted=move.predicted,
        cures=_CURES.get(move.reason.code, frozenset()),
        urgent=move.reason.code == "PreemptionBrake",
    )


def _tokens_only(move: Move) -> list[Move]:
    """What a tuner may still say of a replica whose sequences are held: the budget."""
    before, after = (
        {place: value for place, value in side.items() if place[0] is Knob.STEP_TOKENS_MAX}
        for side in (move.before, move.after)
    )
    return [replace(move, before=before, after=after)] if before != after else []


def knobs_of(wishes: Wishes) -> Mapping[ReplicaId, Knobs]:
    """Knobs of each replica that has any place in ``wishes``."""
    values: dict[ReplicaId, list[int | None]] = {}
    for (knob, target), value in wishes.items():
        index = _KNOB_INDEX.get(knob)
        if index is not None:
            of_replica = values.get(target)
            if of_replica is None:
                of_replica = values[target] = [None, None, None]
            of_replica[index] = None if value is None else int(value)
    return {replica_id: Knobs(*three) for replica_id, three in values.items()}


_KNOB_INDEX = {Knob.RUNNING_SEQS_MAX: 0, Knob.STEP_TOKENS_MAX: 1, Knob.SPECULATIVE_DEPTH: 2}
