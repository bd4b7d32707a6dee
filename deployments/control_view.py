"""How the controller's values are shown: JSON for ``/control/...``, metrics, words for the log.

Pure functions of values; nothing is decided here. JSON has no NaN and no infinity: both become ``None``, "unknown".
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import Enum
from typing import Any

from autoscaling.simulator.recorded import DecisionLine
from deployments.telemetry import Telemetry
from policies.config import PolicyConfig
from policies.control.burn import budgets
from policies.control.catalogue import SPECS, ConditionSpec
from policies.control.findings import Condition
from policies.control.guarded import GuardStatus, Held
from policies.control.loop import TickResult
from policies.control.signals import GatewaySignals, ModelSignals, ReplicaSignals, Signals, Utilisation
from policies.control.starts import Starts
from policies.objectives import FIELDS, objectives_for
from policies.steering import Override
from policies.types import Decision, FleetView, GatewayReport, Histogram, Plan, Priority, ReplicaReport, Sampled


def plain(value: Any) -> Any:
    """Return ``value`` made of dicts, lists, strings, finite numbers, booleans and ``None``."""
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, Histogram):
        return histogram_state(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [plain(item) for item in value]
    return str(value)


def histogram_state(histogram: Histogram) -> dict[str, float | int | None]:
    """Count, mean and two quantiles, in ms."""
    return {
        "count": histogram.count,
        "mean_ms": histogram.mean_ms(),
        "p50_ms": histogram.quantile_ms(0.5),
        "p95_ms": histogram.quantile_ms(0.95),
    }


def promises(config: PolicyConfig, model: str) -> dict[str, Any]:
    """What requests of each class are promised."""
    return {
        priority.value: {name: getattr(objectives, name) for name in FIELDS}
        for priority in Priority
        for objectives in [objectives_for(config, model, priority)]
    }


def wire_plan(plan: Plan) -> dict[str, Any]:
    """The part of a plan that the autoscaling policy follows."""
    return {
        "epoch": plan.epoch,
        "seq": plan.seq,
        "ttl_ms": plan.ttl_ms,
        "mode": plan.mode.value,
        "replicas_target": plan.replicas_total,
    }


def in_words(decision: Decision) -> str:
    """One line for the log."""
    before, after = decision.before, decision.after
    changes = [
        f"{key} {_number(before.get(key))} -> {_number(value)}"
        for key, value in after.items()
        if before.get(key) != value
    ]
    what = ", ".join(changes or [f"{key} stays {_number(value)}" for key, value in after.items()])
    acted = "" if decision.acted else " (shadow: not acted on)"
    return f"{decision.lever} of {decision.target}: {what}; {decision.reason.text} [{decision.reason.code}]{acted}"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:g}"


def utc(unix_ns: int) -> str:
    """ISO 8601 with milliseconds."""
    return datetime.fromtimestamp(unix_ns / 1e9, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# --- what people ask --------------------------------------------------------------------------------------------------


def decision_state(line: DecisionLine, epoch: str) -> dict[str, Any]:
    """One entry of the ledger with its time of day and the figures of the conditions that were active."""
    at_ns = line.decision.at_ns
    notes = [
        {
            "name": note.name,
            "title": SPECS[note.name].title if note.name in SPECS else note.name,
            "active_s": None if note.since_ns is None else max(0, at_ns - note.since_ns) / 1e9,
            "text": note.text,
            "evidence": plain(note.evidence),
        }
        for note in line.conditions
    ]
    state: dict[str, Any] = plain(line.decision)
    return state | {"at": utc(line.at_unix_ns), "epoch": epoch, "condition_details": notes}


def condition_state(spec: ConditionSpec, condition: Condition | None, at_ns: int) -> dict[str, Any]:
    """One named condition: how it is now, and how it is judged."""
    state: dict[str, Any] = {"name": spec.name, "title": spec.title, "active": False, "since_s": None}
    if condition is not None:
        known = plain(condition)
        known.pop("since_ns")
        since_ns = condition.since_ns
        state |= known | {"since_s": None if since_ns is None else (at_ns - since_ns) / 1e9}
    return state | {
        "begin": spec.begin,
        "end": spec.end,
        "detect_s": spec.detect_s,
        "levers": plain(spec.levers),
        "next_step": spec.next_step,
    }


def override_state(override: Override, at_unix_ns: int) -> dict[str, Any]:
    """One override as people see it, with the time of day it ends at."""
    left_s = override.remaining_ms / 1_000
    return {
        "id": override.id,
        "object": "override",
        "knob": plain(override.knob),
        "target": override.target,
        "value": plain(override.value),
        "mode": override.mode,
        "expires_in_s": left_s,
        "expires_at": utc(at_unix_ns + round(left_s * 1e9)),
        "by": override.by,
        "why": override.why,
    }


def hold_state(held: Held) -> dict[str, Any]:
    """One knob or lever that the guard rails hold."""
    state: dict[str, Any] = plain(held)
    return state | {"expires_in_s": state.pop("remaining_ms") / 1_000}


# --- state ------------------------------------------------------------------------------------------------------------


def tick_state(result: TickResult | None, at_ns: int, quantile: float) -> dict[str, Any]:
    """What the last tick knew and wished; ages as of ``at_ns``. In shadow mode the plan is empty, ``wishes`` is not."""
    if result is None:
        return {
            "blind": True,
            "model": None,
            "unknown_replicas": None,
            "replicas": [],
            "conditions": [],
            "traffic": None,
            "work": None,
            "models": {},
            "gateway_signals": [],
            "starts": None,
            "wishes": None,
        }
    signals, wishes = result.signals, result.adaptation
    return {
        "blind": signals.blind,
        "model": signals.model,
        "unknown_replicas": signals.unknown_replicas,
        "replicas": [_replica_state(r, signals, at_ns, quantile) for r in signals.replicas],
        "conditions": [plain(c) for c in result.conditions],
        "traffic": plain(signals.traffic),
        "work": plain(signals.work),
        "models": {name: _model_state(of_model) for name, of_model in signals.by_model.items()},
        "gateway_signals": [_gateway_signals(g, signals, at_ns) for g in signals.gateways],
        "starts": start_state(signals.starts),
        "wishes": {
            "replicas_target": wishes.replicas_target,
            "affinity_strength": plain(wishes.affinity_strength),
            "knobs": plain(wishes.knobs),
        },
    }


def start_state(starts: Starts) -> dict[str, Any]:
    """Replicas that start, with what phases took lately (``typical_ms``), and why starts fail."""
    ended: dict[str, list[float]] = {}
    for start in starts.ended:
        for phase, ms in start.phases_ms.items():
            ended.setdefault(str(phase), []).append(ms)
    return {
        "under_way": [plain(start) | {"total_ms": start.total_ms} for start in starts.under_way],
        "last": plain(starts.ended[-1]) | {"total_ms": starts.ended[-1].total_ms} if starts.ended else None,
        "typical_ms": {phase: statistics.median(ms) for phase, ms in ended.items()},
        "failed_in_a_row": starts.failed_in_a_row,
        "failed_why": starts.failed_why,
    }


def _replica_state(replica: ReplicaSignals, signals: Signals, at_ns: int, quantile: float) -> dict[str, Any]:
    latest = replica.latest
    state: dict[str, Any] = plain(latest)
    state |= {
        "age_ms": replica.age_ms + (at_ns - signals.now_ns) / 1e6,
        "fresh": replica.fresh,
        "confidence": replica.confidence,
        "utilisation": utilisation_state(replica.utilisation),
        "prefill_tokens_per_s": plain(replica.prefill_tps),
        "decode_tokens_per_s": plain(replica.decode_tps),
        "kv_used_share": latest.kv_tokens_used / latest.kv_tokens_max if latest.kv_tokens_max > 0 else None,
        "itl": histogram_state(replica.itl),
        "itl_quantile_ms": replica.itl.quantile_ms(quantile),
    }
    return state


def utilisation_state(found: Utilisation | None) -> dict[str, Any] | None:
    """What limits a replica, and how much of that limit it uses; ``None``: idle, or unknown."""
    if found is None:
        return None
    state: dict[str, Any] = plain(found)
    return state | {"ratio": plain(found.ratio)}


def _model_state(of_model: ModelSignals) -> dict[str, Any]:
    traffic, work = of_model.traffic, of_model.work
    return {
        "replicas": of_model.replicas,
        "arrivals_per_s": None if traffic is None else plain(traffic.arrivals_ps),
        "met_share": None if traffic is None else plain(traffic.met_share),
        "decode_tokens_per_s": None if work is None else plain(work.decode_tps),
        "kv_used_share": None if work is None else plain(work.kv_share),
        "gateway_confidence": 0.0 if traffic is None else plain(traffic.confidence),
        "replica_confidence": 0.0 if work is None else plain(work.confidence),
    }


def _gateway_signals(gateway: GatewaySignals, signals: Signals, at_ns: int) -> dict[str, Any]:
    return {
        "gateway_id": gateway.gateway_id,
        "age_ms": gateway.age_ms + (at_ns - signals.now_ns) / 1e6,
        "fresh": gateway.fresh,
        "confidence": gateway.confidence,
    }


def gateway_state(sample: Sampled[GatewayReport], at_ns: int) -> dict[str, Any]:
    """One gateway's last report and its age."""
    state: dict[str, Any] = plain(sample.value)
    return state | {"age_ms": sample.age_ms(at_ns)}


def fleet_state(sample: Sampled[FleetView] | None, at_ns: int) -> dict[str, Any] | None:
    """Serve's last word and its age; ``None`` before the first."""
    if sample is None:
        return None
    state: dict[str, Any] = plain(sample.value)
    return state | {"age_ms": sample.age_ms(at_ns)}


# --- metrics ----------------------------------------------------------------------------------------------------------


def count_report(telemetry: Telemetry, report: ReplicaReport) -> None:
    """Counters that grow with each accepted report of a replica."""
    replica = report.replica_id
    telemetry["tidegate_replica_preemptions_total"].inc(max(0, report.preemptions), replica=replica)
    telemetry["tidegate_replica_draft_tokens_total"].inc(max(0, report.draft_tokens), replica=replica)
    telemetry["tidegate_replica_accepted_draft_tokens_total"].inc(max(0, report.accepted_tokens), replica=replica)
    telemetry["tidegate_replica_prefix_query_tokens_total"].inc(max(0, report.prefix_query_tokens), replica=replica)
    telemetry["tidegate_replica_prefix_hit_tokens_total"].inc(max(0, report.prefix_hit_tokens), replica=replica)


def update_telemetry(telemetry: Telemetry, result: TickResult) -> None:
    """Count what this tick decided, and set the gauges that have one series; others are set when they are asked for."""
    signals, plan = result.signals, result.plan
    telemetry["tidegate_control_plan_seq"].set(plan.seq)
    telemetry["tidegate_control_affinity_strength_share"].set(plan.affinity_strength)
    for decision in result.decisions:
        telemetry["tidegate_control_decisions_total"].inc(
            lever=decision.lever, reason=decision.reason.code, acted=str(decision.acted).lower()
        )
    for decision in result.judged:
        telemetry["tidegate_control_verdicts_total"].inc(lever=decision.lever, verdict=decision.verdict.value)
        predicted, realised = decision.predicted.get("met_share"), decision.realised.get("met_share")
        telemetry["tidegate_control_predicted_met_share"].set(predicted, lever=decision.lever)
        telemetry["tidegate_control_realised_met_share"].set(realised, lever=decision.lever)
    telemetry["tidegate_control_met_share"].set(result.objective.met_share)
    telemetry["tidegate_control_successes_per_usd"].set(result.objective.successes_per_usd)
    telemetry["tidegate_control_usd_per_hour"].set(result.objective.usd_per_hour)
    telemetry["tidegate_control_overrides"].set(len(plan.overrides))
    _conditions(telemetry, result)
    reporters, ages = telemetry["tidegate_control_reporters"], telemetry["tidegate_control_signal_age_seconds"]
    reporters.set(len(signals.replicas), kind="replica")
    reporters.set(signals.gateways_known, kind="gateway")
    ages.set(max((r.age_ms for r in signals.replicas), default=math.nan) / 1_000, kind="replica")
    ages.set(max((g.age_ms for g in signals.gateways), default=math.nan) / 1_000, kind="gateway")
    trust = telemetry["tidegate_control_signal_confidence_share"]
    trust.set(signals.work.confidence if signals.work else 0.0, kind="replica")
    trust.set(signals.traffic.confidence if signals.traffic else 0.0, kind="gateway")
    telemetry["tidegate_control_retries_per_second"].set(signals.traffic.retries_ps if signals.traffic else None)
    telemetry["tidegate_control_repeats_per_second"].set(signals.traffic.repeats_ps if signals.traffic else None)
    fleet, replicas = signals.fleet, telemetry["tidegate_replicas"]
    replicas.set(len(signals.replicas), state="known")
    replicas.set(None if fleet is None else fleet.replicas_running + signals.warm, state="running")
    replicas.set(signals.warm, state="warm")
    replicas.set(None if fleet is None else fleet.unschedulable, state="unschedulable")
    replicas.set(plan.replicas_total, state="target")


def show_objectives(telemetry: Telemetry, config: PolicyConfig, model: str) -> None:
    """Set the gauges of what every class is promised."""
    for priority in Priority:
        objectives = objectives_for(config, model, priority)
        telemetry["tidegate_control_objective_ttft_seconds"].set(objectives.ttft_ms / 1_000, priority=priority.value)
        telemetry["tidegate_control_objective_itl_seconds"].set(objectives.itl_ms / 1_000, priority=priority.value)
        for objective, budget in budgets(objectives).items():
            telemetry["tidegate_control_objective_budget_share"].set(
                budget, priority=priority.value, objective=objective
            )


def show_guard(telemetry: Telemetry, status: GuardStatus) -> None:
    """Set the gauges of what the guard rails hold."""
    gauge = telemetry["tidegate_control_holds"]
    gauge.set(len(status.frozen), kind="frozen")
    gauge.set(len(status.rolled_back), kind="rolled_back")
    gauge.set(len(status.foreign), kind="foreign")


def _conditions(telemetry: Telemetry, result: TickResult) -> None:
    for condition in result.conditions:
        telemetry["tidegate_control_condition_active"].set(float(condition.active), condition=condition.name)
