"""One tick of the controller: sense, detect, adapt, guard, and the plan that comes of it.

:func:`tick` is a function of the reports received and the time passed in: the same inputs give the same plan, whatever
order reports of different senders arrived in. The live controller calls it once per ``tick_ms``; the simulator calls
the same function.

A plan carries all that stands in full, so that a lost message heals with the next one. In shadow mode nothing stands
but what people set by hand, and the ledger's entries say ``acted=False``. This module must not do input or output, and
must not decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from policies.config import ClassesConfig, ObjectivesConfig, PolicyConfig
from policies.control.adapt import Adaptation, Adapter
from policies.control.detect import Condition, Detector
from policies.control.guard import Guard
from policies.control.guarded import Guarded
from policies.control.joint import cold_start_ms
from policies.control.ledger import Ledger
from policies.control.levers import STRENGTH, TARGET, LeverLoop
from policies.control.objective import ObjectiveMeter, ObjectiveSample
from policies.control.overrides import OverrideBook
from policies.control.pool import Pool, Spares
from policies.control.scaler import Scaler
from policies.control.signals import SignalBook, Signals
from policies.control.starts import Start, coming_s
from policies.measures import StartReport
from policies.steering import ANY, AdmissionKnobs, ColdModel, ColdPhase, Knob
from policies.types import Decision, FleetView, GatewayReport, Mode, Plan, ReplicaReport


@dataclass(frozen=True, slots=True)
class TickResult:
    """What one tick knew, thought and wants."""

    plan: Plan
    decisions: tuple[Decision, ...]
    """New entries of the ledger; empty in a steady fleet."""
    conditions: tuple[Condition, ...]
    """All conditions, active or not, sorted by name."""
    signals: Signals
    adaptation: Adaptation
    """Wishes before the mode was applied: in shadow mode the plan has none, this has."""
    objective: ObjectiveSample
    """What the objective did since the tick before."""
    judged: tuple[Decision, ...] = ()
    """Older entries of the ledger whose verdict was found in this tick."""


class ControlState:
    """Everything the controller remembers between ticks.

    Args:
        config: all families; the loop reads objectives, batching, affinity, scaling, control and the routing bounds.
        scaler: decides the number of replicas.
        epoch: identifies this life of the controller; plans of another epoch may carry any sequence number.
        levers: more of them, asked after the usual ones; where two want the same place, these win.
        pool: keeps replicas beside those that serve; ``None``: there are none.
    """

    def __init__(
        self,
        config: PolicyConfig,
        scaler: Scaler,
        epoch: str,
        levers: Sequence[LeverLoop] = (),
        pool: Pool | None = None,
    ) -> None:
        self.config = config
        self.epoch = epoch
        self.ledger = Ledger(config.control.decisions_max)
        self.book = SignalBook(config.control)
        self.detector = Detector(config)
        self.adapter = Adapter(config, scaler, levers)
        self.objective = ObjectiveMeter(config.prices)
        self.overrides = OverrideBook(config.guard)
        self.guard = Guard(config, self.overrides)
        self.pool = pool
        self.ticks = 0
        self.last: TickResult | None = None

    def receive_replica(self, report: ReplicaReport, now_ns: int) -> bool:
        """Take a replica's report; ``False`` when it was a duplicate, made no sense, or there was no room."""
        accepted = self.book.receive_replica(report, now_ns)
        if accepted:
            self.adapter.receive_replica(report, now_ns)
        return accepted

    def receive_gateway(self, report: GatewayReport, now_ns: int) -> bool:
        """Take a gateway's report; ``False`` as for replicas."""
        accepted = self.book.receive_gateway(report, now_ns)
        if accepted:
            self.adapter.receive_gateway(report)
            self.detector.receive_gateway(report)
            self.objective.receive_gateway(report)
            if report.overrides:
                self.overrides.adopt(report.overrides, now_ns)
        return accepted

    def receive_fleet(self, view: FleetView, now_ns: int) -> None:
        """Take Serve's word on the fleet."""
        self.book.receive_fleet(view, now_ns)

    def receive_start(self, report: StartReport, now_ns: int) -> Start | None:
        """Take what a replica says of its start; what came of it (:meth:`SignalBook.receive_start`)."""
        return self.book.receive_start(report, now_ns)

    def reconfigure(self, objectives: ObjectivesConfig, classes: ClassesConfig) -> None:
        """Steer by these objectives from now on; nothing that was learned or measured is lost."""
        self.config = config = replace(self.config, objectives=objectives, classes=classes)
        self.detector.reconfigure(config)
        self.adapter.reconfigure(config)
        self.guard.reconfigure(config)


def tick(state: ControlState, now_ns: int) -> TickResult:
    """One tick at ``now_ns``, which must not be before the last one's."""
    state.ticks += 1
    seen = state.book.signals(now_ns)
    signals = state.pool.hot(seen, now_ns) if state.pool is not None else seen
    conditions = state.detector.step(signals, now_ns)
    sample = state.objective.tick(now_ns, seen)
    adaptation = state.adapter.step(signals, conditions, sample, now_ns)
    guarded = state.guard.step(adaptation, signals, sample, now_ns)
    state.adapter.adopt(guarded.acting, now_ns)
    spares = _stand_by(state, seen, signals, guarded, adaptation, now_ns)
    active = tuple(c.name for c in conditions if c.active)
    decisions = tuple([state.ledger.write(draft, state.ticks, now_ns, active) for draft in guarded.written])
    state.guard.number(decisions)
    decisions += tuple([state.ledger.write(draft, state.ticks, now_ns, active) for draft in spares.written])
    judged = [state.ledger.judge(j.seq, j.verdict, j.text, j.realised, state.ticks) for j in guarded.judged]
    state.last = TickResult(
        plan=_plan(state, guarded, adaptation, spares, seen, signals),
        decisions=decisions,
        conditions=conditions,
        signals=signals,
        adaptation=adaptation,
        objective=sample,
        judged=tuple([d for d in judged if d is not None]),
    )
    return state.last


def _stand_by(
    state: ControlState, seen: Signals, hot: Signals, guarded: Guarded, adaptation: Adaptation, now_ns: int
) -> Spares:
    """Replicas beside those that serve."""
    if state.pool is None:
        return Spares()
    target = guarded.in_force.get(TARGET)
    by_hand = guarded.in_force.get((Knob.WARM_REPLICAS, ANY))

    def allowed(wish: int) -> tuple[int, bool]:
        return state.guard.allowed(Knob.WARM_REPLICAS, wish) if by_hand is None else (int(by_hand), True)

    return state.pool.step(seen, hot, None if target is None else int(target), adaptation.advice, allowed, now_ns)


def _coming(signals: Signals) -> tuple[int, float]:
    """How many replicas start, and in how many seconds all of them should serve."""
    fleet = signals.fleet
    missing = fleet.replicas_target - fleet.replicas_running - fleet.unschedulable if fleet is not None else 0
    if missing <= 0:
        return 0, 0.0
    return missing, round(coming_s(signals.starts, missing, cold_start_ms(signals) / 1_000), 1)


def _cold(state: ControlState, seen: Signals, adaptation: Adaptation) -> ColdModel | None:
    """What gateways must know of a model that nobody serves: all of one that may sleep, else that its starts fail."""
    if adaptation.advice is not None and adaptation.advice.cold is not None:
        return adaptation.advice.cold
    starts, scaling = seen.starts, state.config.scaling
    if scaling.replicas_min == 0 or starts.failed_in_a_row < scaling.start_tries_max:
        return None
    if seen.serving or seen.fleet is None or seen.fleet.replicas_running:
        return None
    start_s = cold_start_ms(seen) / 1_000
    why = f"{starts.failed_in_a_row} starts failed: {starts.failed_why or 'they do not say why'}"
    after_s = coming_s(starts, 1, start_s)
    return ColdModel(ColdPhase.FAILED, start_s, bool(starts.ended), retry_after_s=after_s, why=why)


def _plan(
    state: ControlState, guarded: Guarded, adaptation: Adaptation, spares: Spares, seen: Signals, signals: Signals
) -> Plan:
    """What stands, in the form in which it is sent."""
    stands = guarded.in_force
    target, prefill = stands.get(TARGET), stands.get((Knob.PREFILL_REPLICAS, ANY))
    share, factor = stands.get((Knob.FORECAST_SHARE, ANY)), stands.get((Knob.SHED_FACTOR, ANY))
    return Plan(
        epoch=state.epoch,
        seq=state.ticks,
        ttl_ms=state.config.control.plan_ttl_ms,
        mode=Mode.ACT if stands else state.config.control.mode,
        replicas_target=None if target is None else int(target),
        affinity_strength=stands.get(STRENGTH),
        knobs=guarded.knobs,
        load_bound=stands.get((Knob.LOAD_BOUND, ANY)),
        admission=AdmissionKnobs(share, factor, *_coming(signals)),
        prefill_replicas=None if prefill is None else int(prefill),
        retired=frozenset([target for (knob, target), value in stands.items() if knob is Knob.RETIRED and value]),
        warm_replicas=spares.wanted,
        warm=spares.warm,
        asleep=spares.asleep,
        overrides=guarded.overrides,
        cold=_cold(state, seen, adaptation),
    )
