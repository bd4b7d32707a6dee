"""Adapt: asks the levers of one tick and answers with one set of wishes and the moves that lead there.

Levers are asked in the order of what they cost (``levers.py``). With ``control.joint`` their moves are weighed against
each other and the number of replicas by its predicted objective (``joint.py``, ``fleet_model.py``); without it each
acts on its own. It must not act, and it must not compute a lever's value itself. When blind it holds everything: the
last wishes stand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from policies.config import PolicyConfig
from policies.control.detect import Condition
from policies.control.joint import Joint
from policies.control.levers import (
    BOUND,
    FORECAST,
    SHED,
    STRENGTH,
    TARGET,
    AffinityLever,
    BatchLever,
    LeverLoop,
    LeverView,
    SpeculationLever,
    knobs_of,
)
from policies.control.levers_model import AdmissionLever, ReplicasLever
from policies.control.levers_roles import RolesLever
from policies.control.moves import Move, Place, Value, Wishes
from policies.control.objective import ObjectiveSample
from policies.control.scaler import Reconfigurable, ScaleAdvice, Scaler
from policies.control.signals import Signals
from policies.steering import AdmissionKnobs
from policies.types import GatewayReport, Knobs, ReplicaId, ReplicaReport


@dataclass(frozen=True, slots=True)
class Adaptation:
    """What should stand after one tick, and what changes for it."""

    wishes: Wishes
    """A value for every place of every lever that is switched on."""
    moves: tuple[Move, ...]
    """Changes, and holds worth knowing, cheapest lever first."""
    advice: ScaleAdvice | None

    @property
    def replicas_target(self) -> int | None:
        """The wish for the number of replicas."""
        value = self.wishes.get(TARGET)
        return None if value is None else int(value)

    @property
    def affinity_strength(self) -> float | None:
        """The wish for the affinity strength."""
        return self.wishes.get(STRENGTH)

    @property
    def load_bound(self) -> float | None:
        """The wish for the bound on a replica's load."""
        return self.wishes.get(BOUND)

    @property
    def admission(self) -> AdmissionKnobs:
        """The wishes for admission."""
        return AdmissionKnobs(self.wishes.get(FORECAST), self.wishes.get(SHED))

    @property
    def knobs(self) -> Mapping[ReplicaId, Knobs]:
        """The wishes for each replica."""
        return knobs_of(self.wishes)


class Adapter:
    """The levers, and what stands.

    Args:
        config: which levers there are, and whether they are weighed against each other.
        scaler: decides the number of replicas, or advises on it.
        extra: more levers, asked after these; where two want the same place, these win.
    """

    def __init__(self, config: PolicyConfig, scaler: Scaler, extra: Sequence[LeverLoop] = ()) -> None:
        self._affinity = AffinityLever(config) if config.affinity.enabled else None
        self._batch = BatchLever(config) if config.batching.enabled else None
        speculation = SpeculationLever(config) if config.speculation.enabled else None
        admission = AdmissionLever(config) if config.admission.adaptive else None
        split = config.disaggregation
        roles = RolesLever(config) if split.enabled and split.adaptive else None
        self._replicas = ReplicasLever(scaler) if config.scaling.enabled else None
        own: tuple[LeverLoop | None, ...] = (self._affinity, self._batch, speculation, admission, roles, *extra)
        self._levers: list[LeverLoop] = [lever for lever in own if lever is not None]
        self._extra = tuple(extra)
        replaces = self._replicas is not None and self._replicas.overrulable
        self._joint = Joint(config, replaces=replaces) if config.control.joint else None
        self._wishes: dict[Place, Value] = {}
        self._target: int | None = None
        """Number of replicas that stands."""

    def receive_replica(self, report: ReplicaReport, now_ns: int) -> None:
        """Feed an accepted report to the levers that count between ticks."""
        if self._affinity is not None:
            self._affinity.receive_replica(report)
        if self._batch is not None:
            self._batch.receive_replica(report, now_ns)

    def receive_gateway(self, report: GatewayReport) -> None:
        """Feed an accepted report to the levers that count between ticks."""
        if self._affinity is not None:
            self._affinity.receive_gateway(report)

    def step(
        self, signals: Signals, conditions: Sequence[Condition], sample: ObjectiveSample, now_ns: int
    ) -> Adaptation:
        """One tick over all levers."""
        view = LeverView(signals, conditions, frozenset(c.name for c in conditions if c.active), sample)
        if self._joint is not None:
            view = self._joint.observe(view, now_ns)
        moves: list[Move] = []
        for lever in self._levers:
            moves.extend(lever.propose(view, now_ns))
        refused: list[Move] = []
        if self._joint is not None:
            moves, refused = self._joint.choose(moves, now_ns)
        wishes: dict[Place, Value] = {}
        for lever in self._levers:
            wishes.update(lever.wishes)
        if refused:
            self._take_back(refused, moves, wishes, now_ns)
        if self._replicas is not None:
            moves.extend(self._count(self._replicas, view, wishes, now_ns))
        for lever in self._extra:
            wishes.update(lever.wishes)
        self._wishes = wishes
        advice = self._replicas.advice if self._replicas is not None else None
        return Adaptation(wishes, tuple(moves), advice)

    def _take_back(
        self, refused: Sequence[Move], made: Sequence[Move], wishes: dict[Place, Value], now_ns: int
    ) -> None:
        """Levers whose moves are not made, or not in full, go on from where they are."""
        for move in refused:
            wishes.update(move.before)
        for move in made:
            wishes.update(move.after)
        for lever in self._levers:
            lever.adopt(wishes, now_ns)

    def _count(
        self, replicas: ReplicasLever, view: LeverView, wishes: dict[Place, Value], now_ns: int
    ) -> Sequence[Move]:
        """The number of replicas: the scaler's, or the joint one where the scaler can go on from another."""
        moves = replicas.propose(view, now_ns)
        if self._joint is not None and replicas.overrulable and replicas.advice is not None:
            before = self._target
            moves = self._joint.count(view, moves, before, replicas.advice, now_ns)
            if self._joint.target is not None:
                replicas.adopt({TARGET: self._joint.target}, now_ns)
            wishes.update(self._joint.wishes)
        wishes.update(replicas.wishes)
        target = wishes[TARGET]
        self._target = None if target is None else int(target)
        return moves

    def adopt(self, in_force: Wishes, now_ns: int) -> None:
        """Tell the levers what stands after the guard rails had their say."""
        if in_force is self._wishes or in_force == self._wishes:
            return
        for lever in self._levers:
            lever.adopt(in_force, now_ns)
        if self._joint is not None:
            self._joint.adopt(in_force)
        if self._replicas is not None:
            self._replicas.adopt(in_force, now_ns)
            target = in_force.get(TARGET, self._target)
            self._target = None if target is None else int(target)

    def reconfigure(self, config: PolicyConfig) -> None:
        """Every lever steers by the objectives of ``config`` from now on."""
        for lever in (*self._levers, self._replicas, self._joint):
            if isinstance(lever, Reconfigurable):
                lever.reconfigure(config)
