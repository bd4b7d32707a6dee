"""Levers that do harm on purpose, and the scenarios in which they must be stopped; and a load that is only noise.

And levers that do no harm, whose changes must not be taken back. Used by ``test_guard.py`` (one seed) and
``tests/bench/rollback.py`` (ten).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from autoscaling.recommend import ReplicaScaler
from autoscaling.simulator.spec import EngineProfile, Pool, Scenario, SimRequest, Source, StepLaw
from autoscaling.simulator.workload.generators import from_curve
from autoscaling.simulator.workload.lengths import LogNormal
from autoscaling.simulator.workload.rates import RateCurve
from autoscaling.simulator.world import run
from policies.config import (
    AffinityConfig,
    BatchingConfig,
    ControlConfig,
    ObjectivesConfig,
    PolicyConfig,
    ScalingConfig,
)
from policies.config_guard import SpeculationConfig
from policies.control.levers import LeverView
from policies.control.loop import TickResult
from policies.control.moves import Move, Place, Value, Wishes
from policies.control.scaler import ScaleAdvice
from policies.control.signals import Signals
from policies.steering import ANY, PER_REPLICA, Knob, Lever
from policies.types import Reason
from tests.sim.troubles import PROFILE
from tests.sim.worlds import Watcher

CALM_TICKS = 90
"""The levers do nothing before."""

SECONDS = 400

OBJECTIVES = ObjectivesConfig(ttft_ms=2_000.0, itl_ms=100.0)

LENGTHS = LogNormal(300, 40, 0.3, 0.3, tokens_max=2_000)

NOISE = 0.2


class Harmful:
    """A lever that sets ``knob`` to ``value`` everywhere, and again whenever it finds it elsewhere.

    With ``again_ticks`` above 1 it goes to and fro between ``value`` and ``start`` every so often instead.
    """

    def __init__(self, knob: Knob, value: float, start: Value, again_ticks: int = 1) -> None:
        self.lever: Lever = knob.lever
        self._knob, self._value, self._start = knob, value, start
        self._again_ticks = again_ticks
        self._values: dict[Place, Value] = {}
        self._ticks = 0

    @property
    def wishes(self) -> Wishes:
        return self._values

    def propose(self, view: LeverView, now_ns: int) -> Sequence[Move]:
        self._ticks += 1
        targets = [r.replica_id for r in view.signals.replicas] if self._knob in PER_REPLICA else [ANY]
        self._values = {(self._knob, t): self._values.get((self._knob, t), self._start) for t in targets}
        if self._ticks < CALM_TICKS or self._ticks % self._again_ticks:
            return ()
        to_and_fro = self._again_ticks > 1 and self._ticks // self._again_ticks % 2
        wanted = self._start if to_and_fro else self._value
        moves = []
        for place, value in list(self._values.items()):
            if value != wanted:
                reason = Reason("Harm", "on purpose")
                moves.append(Move(self.lever, place[1], {place: value}, {place: wanted}, reason))
                self._values[place] = wanted
        return moves

    def adopt(self, in_force: Wishes, now_ns: int) -> None:
        self._values = {place: in_force.get(place, value) for place, value in self._values.items()}


class NoOpinion:
    """A scaler that leaves the number to the lever that does harm."""

    def recommend(self, signals: Signals, now_ns: int) -> ScaleAdvice:
        return ScaleAdvice(None, Reason("NoOpinion", "left to another lever"))


class Drafted:
    """Another source's requests, of whose drafts none is ever kept."""

    name = "drafted"

    def __init__(self, source: Source) -> None:
        self._source = source

    def arrivals(self) -> Iterator[SimRequest]:
        for request in self._source.arrivals():
            yield replace(request, draft_acceptance=0.0)

    def follow_ups(self, request: SimRequest, succeeded: bool, now_ns: int) -> Sequence[SimRequest]:
        return self._source.follow_ups(request, succeeded, now_ns)


@dataclass(frozen=True, slots=True)
class Harm:
    """One lever that does harm."""

    name: str
    knob: Knob
    value: float
    start: Value
    config: PolicyConfig
    """All other levers act as they would."""
    profile: EngineProfile = PROFILE
    rate_ps: float = 9.0


_BASE = PolicyConfig(objectives=OBJECTIVES, scaling=ScalingConfig(enabled=False))
_NO_TUNERS = BatchingConfig(enabled=False)
_DRAFTING = replace(PROFILE, law=StepLaw(30.0, 1.0, 0.1, 1.0, jitter_share=0.02), speculative_depth=12)
"""A drafted token costs a millisecond, so that drafts that never come true double a step of few sequences."""

HARMS = (
    Harm("one sequence at a time", Knob.RUNNING_SEQS_MAX, 1, 16, replace(_BASE, batching=_NO_TUNERS)),
    Harm("tiny steps", Knob.STEP_TOKENS_MAX, 20, 2_048, replace(_BASE, batching=_NO_TUNERS)),
    Harm(
        "drafts never kept", Knob.SPECULATIVE_DEPTH, 12, 0,
        replace(_BASE, batching=_NO_TUNERS, speculation=SpeculationConfig(enabled=False)), _DRAFTING, rate_ps=5.0,
    ),
    Harm(
        "one replica for all", Knob.REPLICAS_TARGET, 1, 4,
        replace(_BASE, control=ControlConfig(joint=False), scaling=ScalingConfig(replicas_min=1, replicas_max=4)),
    ),
)  # fmt: skip

HARMLESS = (
    Harm("a little fewer", Knob.RUNNING_SEQS_MAX, 15, 16, replace(_BASE, batching=_NO_TUNERS)),
    Harm("a looser bound", Knob.LOAD_BOUND, 1.6, 1.5, replace(_BASE, affinity=AffinityConfig(enabled=False))),
)
"""Changes that nobody can feel at this load, made over and over."""


@dataclass
class Played:
    """What the guard made of one lever."""

    first_ticks: int | None
    """From the first harmful change to its roll-back."""
    rollbacks: int
    frozen_after: int | None
    """Roll-backs before the freeze."""
    harmless_at_end: bool
    """Whether the knob stands where it was at the end."""
    texts: list[str] = field(default_factory=list)


def play(harm: Harm, seed: int, rates: Sequence[tuple[float, float]], again_ticks: int = 1) -> list[TickResult]:
    """One run under Poisson load of ``rates`` (seconds, per second)."""
    scaler = (lambda _: NoOpinion()) if harm.knob is Knob.REPLICAS_TARGET else None
    lever = Harmful(harm.knob, harm.value, harm.start, again_ticks)
    pool = Pool(harm.profile, 4, levers=lambda _: (lever,), scaler=scaler)
    curve = from_curve(RateCurve.steps(rates), LENGTHS)
    source = (lambda rng: Drafted(curve(rng))) if harm.profile.speculative_depth else curve
    watcher = Watcher()
    run(Scenario(harm.name, source, (pool,), seed, harm.config), observer=watcher)
    return [result for _, _, result in watcher.ticks]


def play_harmless(harm: Harm, seed: int, seconds: int = 600) -> tuple[int, list[str]]:
    """Changes made to and fro every minute under a load that is redrawn within 20 %; and what was said of those that
    were called harmful.
    """
    results = play(harm, seed, noisy_rates(f"harmless/{seed}", harm.rate_ps, seconds), again_ticks=60)
    own = [d for r in results for d in r.decisions]
    made = {d.tick for d in own if d.reason.code == "Harm" and d.acted}
    return len(made), [d.reason.text for d in own if d.reason.code == "RolledBack"]


def play_harm(harm: Harm, seed: int) -> Played:
    """One run."""
    results = play(harm, seed, [(SECONDS, harm.rate_ps)])
    own = [d for r in results for d in r.decisions]
    begin = next((d.tick for d in own if d.reason.code == "Harm" and d.acted), None)
    back = sorted({d.tick for d in own if d.reason.code == "RolledBack" and d.inputs["lever"] == harm.knob.lever.value})
    frozen = [d for d in own if d.reason.code == "Frozen" and d.inputs["lever"] == harm.knob.lever.value]
    stands = _values(results[-1], harm.knob)
    return Played(
        first_ticks=back[0] - begin if back and begin is not None else None,
        rollbacks=len(back),
        frozen_after=sum(tick <= frozen[0].tick for tick in back) if frozen else None,
        harmless_at_end=bool(stands) and all(value == harm.start for value in stands.values()),
        texts=[d.reason.text for d in own if d.lever == "guard"],
    )


def _values(result: TickResult, knob: Knob) -> dict[Place, Value]:
    plan = result.plan
    if knob is Knob.FORECAST_SHARE:
        return {(knob, ANY): plan.admission.forecast_share}
    if knob is Knob.REPLICAS_TARGET:
        return {(knob, ANY): plan.replicas_target}
    return {(knob, name): getattr(knobs, knob.value) for name, knobs in plan.knobs.items()}


# --- noise ------------------------------------------------------------------------------------------------------------


def noisy_rates(name: str, rate_ps: float, seconds: int) -> list[tuple[float, float]]:
    """A rate that is redrawn within 20 % each 5 s."""
    rng = Random(name)
    return [(5.0, rate_ps * rng.uniform(1 - NOISE, 1 + NOISE)) for _ in range(seconds // 5)]


@dataclass(frozen=True, slots=True)
class Noisy:
    """What happened under noise."""

    turns: dict[Place, int]
    """Changes of direction of every knob in the last ten minutes."""
    taken_back: list[str]
    """What was said of changes that were taken back or frozen, from the beginning on."""


def play_noise(seed: int, seconds: int = 900, settle_s: int = 300, rate_ps: float = 12.0) -> Noisy:
    """All levers under a load that is nothing but noise."""
    config = PolicyConfig(objectives=OBJECTIVES, scaling=ScalingConfig(replicas_min=1, replicas_max=8))
    pool = Pool(PROFILE, 4, scaler=ReplicaScaler)
    watcher = Watcher()
    curve = RateCurve.steps(noisy_rates(f"noise/{seed}", rate_ps, seconds))
    run(Scenario("noise", from_curve(curve, LENGTHS), (pool,), seed, config), observer=watcher)
    own = [d for _, _, result in watcher.ticks for d in result.decisions if d.reason.code in ("RolledBack", "Frozen")]
    late = [result for at_ns, _, result in watcher.ticks if at_ns >= settle_s * 1e9]
    return Noisy(turns(late), [d.reason.text for d in own])


def turns(results: Sequence[TickResult]) -> dict[Place, int]:
    """Changes of direction of every knob in the plans."""
    last: dict[Place, float] = {}
    sign: dict[Place, int] = {}
    count: dict[Place, int] = {}
    for result in results:
        for place, value in _stands(result).items():
            before = last.get(place)
            last[place] = value
            count.setdefault(place, 0)
            if before is None or before == value:
                continue
            now = 1 if value > before else -1
            count[place] += sign.get(place, now) != now
            sign[place] = now
    return count


def _stands(result: TickResult) -> dict[Place, float]:
    plan = result.plan
    of_model: dict[Knob, Callable[[], float | int | None]] = {
        Knob.AFFINITY_STRENGTH: lambda: plan.affinity_strength,
        Knob.LOAD_BOUND: lambda: plan.load_bound,
        Knob.FORECAST_SHARE: lambda: plan.admission.forecast_share,
        Knob.SHED_FACTOR: lambda: plan.admission.shed_factor,
        Knob.REPLICAS_TARGET: lambda: plan.replicas_target,
    }
    found = {(knob, ANY): value for knob, get in of_model.items() if (value := get()) is not None}
    for name, knobs in plan.knobs.items():
        for knob in PER_REPLICA - {Knob.RETIRED}:
            value = getattr(knobs, knob.value)
            if value is not None:
                found[knob, name] = value
    return found
