"""Gauges of replicas and of what gateways see, set when Prometheus asks and not with each tick.

A fleet of a thousand replicas has some thirty series each: set once a scrape they cost the controller nothing between
scrapes, and show the same values, those of the last tick. Unknown values are NaN. Nothing is decided here.
"""

from __future__ import annotations

from deployments.telemetry import Telemetry
from policies.control.signals import ReplicaSignals, Signals, Traffic
from policies.measures import GpuReading
from policies.roofline import Bound
from policies.types import Knobs, Priority

_BOUNDS = tuple(bound for bound in Bound if bound is not Bound.UNKNOWN)


def show_signals(telemetry: Telemetry, signals: Signals, quantile: float) -> None:
    """Set every gauge that has a series per replica, class or tenant; series of replicas that left are dropped."""
    known = {replica.replica_id for replica in signals.replicas}
    for replica_id in telemetry["tidegate_replica_running_seqs"].values_of("replica") - known:
        telemetry.remove_replica(replica_id)
    for replica in signals.replicas:
        _replica(telemetry, replica, quantile)
        _utilisation(telemetry, replica)
        if replica.latest.gpu is not None:
            _gpu(telemetry, replica.replica_id, replica.latest.gpu)
    _traffic(telemetry, signals.traffic)


def _traffic(telemetry: Telemetry, traffic: Traffic | None) -> None:
    for priority in Priority:
        one = traffic.by_class.get(priority.value) if traffic is not None else None
        telemetry["tidegate_class_demand_per_second"].set(one.demand_ps if one else 0.0, priority=priority.value)
        telemetry["tidegate_class_met_share"].set(one.met_share if one else None, priority=priority.value)
    if traffic is None:
        return
    gone = telemetry["tidegate_tenant_tokens_per_second"].values_of("tenant") - traffic.by_tenant.keys()
    for name, tenant in (*traffic.by_tenant.items(), *[(name, None) for name in sorted(gone)]):
        telemetry["tidegate_tenant_tokens_per_second"].set(tenant.tokens_ps if tenant else 0.0, tenant=name)
        ended_ps = tenant.succeeded_ps + tenant.refused_ps if tenant else 0.0
        telemetry["tidegate_tenant_met_share"].set(
            tenant.met_ps / ended_ps if tenant and ended_ps else None, tenant=name
        )


def _replica(telemetry: Telemetry, replica: ReplicaSignals, quantile: float) -> None:
    latest, name = replica.latest, replica.replica_id
    telemetry["tidegate_replica_running_seqs"].set(latest.running, replica=name)
    telemetry["tidegate_replica_waiting_seqs"].set(latest.waiting, replica=name)
    kv_share = latest.kv_tokens_used / latest.kv_tokens_max if latest.kv_tokens_max > 0 else None
    telemetry["tidegate_replica_kv_used_share"].set(kv_share, replica=name)
    telemetry["tidegate_replica_busy_share"].set(replica.busy_share, replica=name)
    telemetry["tidegate_replica_signal_confidence_share"].set(replica.confidence, replica=name)
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


def _utilisation(telemetry: Telemetry, replica: ReplicaSignals) -> None:
    name, found = replica.replica_id, replica.utilisation
    telemetry["tidegate_replica_compute_share"].set(found.compute_share if found else None, replica=name)
    telemetry["tidegate_replica_memory_share"].set(found.memory_share if found else None, replica=name)
    for bound in _BOUNDS:
        telemetry["tidegate_replica_bound"].set(
            float(found is not None and found.bound is bound), replica=name, bound=bound
        )


def _gpu(telemetry: Telemetry, name: str, gpu: GpuReading) -> None:
    """Readings of the replica's devices; a replica without any has no such series."""
    telemetry["tidegate_replica_gpu_memory_utilisation_share"].set(gpu.memory_share, replica=name)
    telemetry["tidegate_replica_gpu_memory_used_bytes"].set(gpu.memory_used_bytes, replica=name)
    telemetry["tidegate_replica_gpu_power_watts"].set(gpu.power_w, replica=name)
    telemetry["tidegate_replica_gpu_power_limit_watts"].set(gpu.power_limit_w, replica=name)
    telemetry["tidegate_replica_gpu_temperature_celsius"].set(gpu.temperature_c, replica=name)
    telemetry["tidegate_replica_gpu_throttle_reasons"].set(len(gpu.throttle), replica=name)
    telemetry["tidegate_replica_gpu_ecc_errors"].set(gpu.ecc_errors, replica=name)
    telemetry["tidegate_replica_gpu_xid_errors"].set(gpu.xid_errors, replica=name)
