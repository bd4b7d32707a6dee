"""How the controller's values are shown: JSON for ``/control/...``, metrics, words for the log.

Pure functions of values; nothing is decided here. JSON has no NaN and no infinity: both become ``None``, "unknown".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from deployments.telemetry import Telemetry
from policies.control.loop import TickResult
from policies.control.signals import ReplicaSignals, Signals
from policies.types import Decision, FleetView, GatewayReport, Histogram, Knobs, Plan, ReplicaReport, Sampled


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


def wire_plan(plan: Plan) -> dict[str, Any]:
    """The part of a plan that the autoscaling policy follows."""
    return {
        "epoch": plan.epoch,
        "seq": plan.seq,
        "ttl_ms": plan.ttl_ms,
        "mode": plan.mode.value,
        "replicas_target": plan.replicas_target,
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
        "wishes": {
            "replicas_target": wishes.replicas_target,
            "affinity_strength": plain(wishes.affinity_strength),
            "knobs": plain(wishes.knobs),
        },
    }


def _replica_state(replica: ReplicaSignals, signals: Signals, at_ns: int, quantile: float) -> dict[str, Any]:
    latest = replica.latest
    state: dict[str, Any] = plain(latest)
    state |= {
        "age_ms": replica.age_ms + (at_ns - signals.now_ns) / 1e6,
        "fresh": replica.fresh,
        "prefill_tokens_per_s": plain(replica.prefill_tps),
        "decode_tokens_per_s": plain(replica.decode_tps),
        "kv_used_share": latest.kv_tokens_used / latest.kv_tokens_max if latest.kv_tokens_max > 0 else None,
        "itl": histogram_state(replica.itl),
        "itl_quantile_ms": replica.itl.quantile_ms(quantile),
    }
    return state


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
    telemetry["tidegate_replica_prefix_query_tokens_total"].inc(max(0, report.prefix_query_tokens), replica=replica)
    telemetry["tidegate_replica_prefix_hit_tokens_total"].inc(max(0, report.prefix_hit_tokens), replica=replica)


def update_telemetry(telemetry: Telemetry, result: TickResult, quantile: float) -> None:
    """Set every gauge of the controller to what this tick saw and planned."""
    signals, plan = result.signals, result.plan
    telemetry["tidegate_control_plan_seq"].set(plan.seq)
    telemetry["tidegate_control_affinity_strength_share"].set(plan.affinity_strength)
    for decision in result.decisions:
        telemetry["tidegate_control_decisions_total"].inc(
            lever=decision.lever, reason=decision.reason.code, acted=str(decision.acted).lower()
        )
    _conditions(telemetry, result)
    reporters, ages = telemetry["tidegate_control_reporters"], telemetry["tidegate_control_signal_age_seconds"]
    reporters.set(len(signals.replicas), kind="replica")
    reporters.set(signals.gateways_known, kind="gateway")
    ages.set(max((r.age_ms for r in signals.replicas), default=math.nan) / 1_000, kind="replica")
    fleet, replicas = signals.fleet, telemetry["tidegate_replicas"]
    replicas.set(len(signals.replicas), state="known")
    replicas.set(None if fleet is None else fleet.replicas_running, state="running")
    replicas.set(plan.replicas_target, state="target")
    known = {replica.replica_id for replica in signals.replicas}
    for replica_id in telemetry["tidegate_replica_running_seqs"].values_of("replica") - known:
        telemetry.remove_replica(replica_id)
    for replica in signals.replicas:
        _replica(telemetry, replica, quantile)


def _conditions(telemetry: Telemetry, result: TickResult) -> None:
    for condition in result.conditions:
        telemetry["tidegate_control_condition_active"].set(float(condition.active), condition=condition.name)


def _replica(telemetry: Telemetry, replica: ReplicaSignals, quantile: float) -> None:
    latest, name = replica.latest, replica.replica_id
    telemetry["tidegate_replica_running_seqs"].set(latest.running, replica=name)
    telemetry["tidegate_replica_waiting_seqs"].set(latest.waiting, replica=name)
    kv_share = latest.kv_tokens_used / latest.kv_tokens_max if latest.kv_tokens_max > 0 else None
    telemetry["tidegate_replica_kv_used_share"].set(kv_share, replica=name)
    telemetry["tidegate_replica_busy_share"].set(replica.busy_share, replica=name)
    telemetry["tidegate_replica_gpu_utilisation_share"].set(latest.gpu_utilisation_share, replica=name)
    itl_ms = replica.itl.quantile_ms(quantile)
    telemetry["tidegate_replica_itl_quantile_seconds"].set(None if itl_ms is None else itl_ms / 1_000, replica=name)
    _knobs(telemetry, name, latest.knobs)
    if latest.step_model is not None:
        step, gauge = latest.step_model, telemetry["tidegate_replica_step_coefficient_seconds"]
        gauge.set(step.a_ms / 1_000, replica=name, term="base")
        gauge.set(step.b_ms / 1_000, replica=name, term="sequence")
        gauge.set(step.c_ms / 1_000, replica=name, term="kv_kilotoken")
        gauge.set(step.d_ms / 1_000, replica=name, term="prefill_token")


def _knobs(telemetry: Telemetry, replica: str, knobs: Knobs) -> None:
    gauge = telemetry["tidegate_replica_knob"]
    gauge.set(knobs.running_seqs_max, replica=replica, knob="running_seqs_max")
    gauge.set(knobs.step_tokens_max, replica=replica, knob="step_tokens_max")
    gauge.set(knobs.speculative_depth, replica=replica, knob="speculative_depth")
