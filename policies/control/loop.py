"""One tick of the controller: sense, detect, adapt, and the plan that comes of it.

:func:`tick` is a function of the reports received and the time passed in: the same inputs give the same plan, whatever
order reports of different senders arrived in. The live controller calls it once per ``tick_ms``; the simulator calls
the same function.

A plan carries every wish in full, so that a lost message heals with the next one. In shadow mode it carries none, and
the ledger's entries say ``acted=False``. This module must not do input or output, and must not decide.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.config import PolicyConfig
from policies.control.adapt import Adaptation, Adapter
from policies.control.detect import Condition, Detector
from policies.control.ledger import Ledger
from policies.control.scaler import Scaler
from policies.control.signals import SignalBook, Signals
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


class ControlState:
    """Everything the controller remembers between ticks.

    Args:
        config: all families; the loop reads objectives, batching, affinity, scaling, control and the routing bounds.
        scaler: decides the number of replicas.
        epoch: identifies this life of the controller; plans of another epoch may carry any sequence number.
    """

    def __init__(self, config: PolicyConfig, scaler: Scaler, epoch: str) -> None:
        self.config = config
        self.epoch = epoch
        self.ledger = Ledger(config.control.decisions_max)
        self.book = SignalBook(config.control)
        self.detector = Detector(config)
        self.adapter = Adapter(config, scaler)
        self.ticks = 0
        self.last: TickResult | None = None

    def receive_replica(self, report: ReplicaReport, now_ns: int) -> bool:
        """Take a replica's report; ``False`` when it was a duplicate, made no sense, or there was no room."""
        accepted = self.book.receive_replica(report, now_ns)
        if accepted:
            self.adapter.receive_replica(report)
        return accepted

    def receive_gateway(self, report: GatewayReport, now_ns: int) -> bool:
        """Take a gateway's report; ``False`` as for replicas."""
        accepted = self.book.receive_gateway(report, now_ns)
        if accepted:
            self.adapter.receive_gateway(report)
        return accepted

    def receive_fleet(self, view: FleetView, now_ns: int) -> None:
        """Take Serve's word on the fleet."""
        self.book.receive_fleet(view, now_ns)


def tick(state: ControlState, now_ns: int) -> TickResult:
    """One tick at ``now_ns``, which must not be before the last one's."""
    state.ticks += 1
    signals = state.book.signals(now_ns)
    conditions = state.detector.step(signals, now_ns)
    adaptation = state.adapter.step(signals, conditions, now_ns)
    mode = state.config.control.mode
    acting = mode is Mode.ACT
    decisions = tuple(state.ledger.write(draft, state.ticks, acting) for draft in adaptation.drafts)
    plan = Plan(
        epoch=state.epoch,
        seq=state.ticks,
        ttl_ms=state.config.control.plan_ttl_ms,
        mode=mode,
        replicas_target=adaptation.replicas_target if acting else None,
        affinity_strength=adaptation.affinity_strength if acting else None,
        knobs=adaptation.knobs if acting else {},
    )
    state.last = TickResult(plan, decisions, conditions, signals, adaptation)
    return state.last
