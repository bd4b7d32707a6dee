"""Detect: named conditions with evidence, confidence and hysteresis.

Names, formulas and next steps are in ``catalogue.py``; rules in ``conditions_slo.py`` (promises and traffic),
``conditions_engine.py`` (engines) and ``conditions_fleet.py`` (size of the fleet). A condition becomes active after its
rule said *high* for ``on_ticks`` ticks in a row and inactive after *low* for ``off_ticks``; in between, and while its
figures are unknown, it keeps its state. ::

    confidence = confidence of the signals it is read from (signals.py) * certainty(samples)

A condition explains; it does not act. Work per tick grows with replicas and gateways, memory with nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from policies.config import PolicyConfig
from policies.control import conditions_engine as engine
from policies.control import conditions_fleet as fleet
from policies.control import conditions_slo as slo
from policies.control.catalogue import CONDITIONS
from policies.control.facts import Facts, Memory
from policies.control.findings import Condition as Condition  # noqa: PLC0414 - the public name is here
from policies.control.findings import Finding, Hysteresis
from policies.control.signals import Signals
from policies.types import GatewayReport

Rule: TypeAlias = Callable[[Facts], Finding]

RULES: dict[str, Rule] = {
    "cache_cold": engine.cache_cold,
    "cold_start_gap": fleet.cold_start_gap,
    "decode_bound": engine.decode_bound,
    "grey_failure": engine.grey_failure,
    "hot_spot": engine.hot_spot,
    "kv_pressure": engine.kv_pressure,
    "over_provisioned": fleet.over_provisioned,
    "preemption_thrash": engine.preemption_thrash,
    "prefill_bound": engine.prefill_bound,
    "queue_growing": slo.queue_growing,
    "retry_storm": slo.retry_storm,
    "signal_loss": slo.signal_loss,
    "slo_burn_fast": slo.slo_burn_fast,
    "slo_burn_slow": slo.slo_burn_slow,
    "stuck_replica": engine.stuck_replica,
    "stuck_scale_up": fleet.stuck_scale_up,
}
"""One rule for each condition of the catalogue."""

FROM_GATEWAYS = frozenset({"retry_storm", "slo_burn_fast", "slo_burn_slow"})
FROM_REPLICAS = frozenset({
    "grey_failure", "hot_spot", "kv_pressure", "over_provisioned", "preemption_thrash", "stuck_replica",
})  # fmt: skip
FROM_BOTH = frozenset({"cache_cold", "cold_start_gap", "decode_bound", "prefill_bound", "queue_growing"})
"""Whose confidence a condition's confidence depends on; silence itself and Serve's word need nobody's."""


class Detector:
    """Turns signals into conditions, tick by tick."""

    def __init__(self, config: PolicyConfig) -> None:
        self._memory = Memory(config)
        self._states = [(Hysteresis(spec), RULES[spec.name]) for spec in CONDITIONS]

    def reconfigure(self, config: PolicyConfig) -> None:
        """Judge by other objectives and bounds from the next tick on; what is active stays until its rule says else."""
        self._memory.reconfigure(config)

    def receive_gateway(self, report: GatewayReport) -> None:
        """Count an accepted report: error budgets are kept by what each report adds."""
        self._memory.receive_gateway(report)

    def step(self, signals: Signals, now_ns: int) -> tuple[Condition, ...]:
        """Conditions at this tick, sorted by name. Call it once per tick."""
        facts = self._memory.facts(signals, now_ns)
        replicas = signals.work.confidence if signals.work is not None else 0.0
        gateways = signals.traffic.confidence if signals.traffic is not None else 0.0
        by_name = {
            **dict.fromkeys(FROM_GATEWAYS, gateways),
            **dict.fromkeys(FROM_REPLICAS, replicas),
            **dict.fromkeys(FROM_BOTH, min(replicas, gateways)),
        }
        return tuple(
            [state.step(rule(facts), by_name.get(state.spec.name, 1.0), now_ns) for state, rule in self._states]
        )
