"""Gauges and state of what replicas and gateways say: right values, unknown ones NaN, none of those that left."""

from __future__ import annotations

import math
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dashboards.catalogue import Source
from deployments.control_view import utilisation_state
from deployments.replica_metrics import show_signals
from deployments.telemetry import Telemetry
from policies.config import ControlConfig
from policies.control.signals import SignalBook, Signals
from policies.measures import ClassCounts, GpuReading, TenantCounts
from policies.roofline import ModelFigures, roofline_of
from policies.types import StepCoefficients
from tests.unit.control.fleet import SECOND_NS, gateway_report, replica_report

STEP = StepCoefficients(6.6, 0.02, 0.05, 0.02, 1_000, 0.02)
ROOFLINE = roofline_of("NVIDIA H100 80GB HBM3", 1, ModelFigures(8.03e9, 8.03e9, 16, 131_072))
GPU = GpuReading(
    sm_share=0.99, memory_share=0.7, memory_used_bytes=70_000_000_000, memory_total_bytes=85_000_000_000, power_w=650.0,
    power_limit_w=700.0, temperature_c=66.0, throttle=("sw_power_cap",), ecc_errors=0, xid_errors=1,
)  # fmt: skip


def decoding(seconds: int = 5, **changes: Any) -> SignalBook:
    """A book that heard one replica decode 32 sequences at full speed, and one gateway."""
    book = SignalBook(ControlConfig())
    figures: dict[str, Any] = {
        "steps": 130, "decode_tokens": 130 * 32, "running": 32, "kv_tokens_used": 32_000, "busy_share": 1.0,
        "step_model": STEP, "roofline": ROOFLINE, "gpu": GPU, "gpu_utilisation_share": GPU.sm_share,
    }  # fmt: skip
    counts = ClassCounts(arrivals=10, succeeded=8, met=6, refused=2, late_ttft=2)
    tenants = {"acme": TenantCounts(10, 8, 6, 2, 3_000)}
    for second in range(1, seconds + 1):
        book.receive_replica(replica_report("a", second, **(figures | changes)), second * SECOND_NS)
        gateway = gateway_report(seq=second, by_class={"standard": counts}, by_tenant=tenants, met=6, retries=3)
        book.receive_gateway(gateway, second * SECOND_NS)
    return book


def shown(telemetry: Telemetry, signals: Signals) -> dict[tuple[str, ...], float]:
    show_signals(telemetry, signals, 0.95)
    families = text_string_to_metric_families(telemetry.render().decode())
    return {(s.name, *[s.labels[k] for k in sorted(s.labels)]): s.value for f in families for s in f.samples}


def test_a_replica_shows_what_limits_it_and_what_its_devices_say() -> None:
    samples = shown(Telemetry(Source.CONTROLLER), decoding().signals(5 * SECOND_NS))
    assert samples["tidegate_replica_memory_share", "a"] == pytest.approx(0.786, abs=0.001)
    assert samples["tidegate_replica_compute_share", "a"] == pytest.approx(0.068, abs=0.001)
    bounds = {labels[1]: value for labels, value in samples.items() if labels[0] == "tidegate_replica_bound"}
    assert bounds == {"memory": 1.0, "compute": 0.0, "overhead": 0.0}
    assert samples["tidegate_replica_signal_confidence_share", "a"] == 1.0
    assert samples["tidegate_replica_gpu_memory_utilisation_share", "a"] == 0.7
    assert samples["tidegate_replica_gpu_power_watts", "a"] == 650
    assert samples["tidegate_replica_gpu_temperature_celsius", "a"] == 66
    assert samples["tidegate_replica_gpu_throttle_reasons", "a"] == 1
    assert samples["tidegate_replica_gpu_xid_errors", "a"] == 1


def test_classes_and_tenants_show_their_demand_and_how_much_of_it_was_served_as_promised() -> None:
    samples = shown(Telemetry(Source.CONTROLLER), decoding().signals(5 * SECOND_NS))
    assert samples["tidegate_class_demand_per_second", "standard"] == 10
    assert samples["tidegate_class_met_share", "standard"] == 0.6
    assert samples["tidegate_class_demand_per_second", "batch"] == 0
    assert math.isnan(samples["tidegate_class_met_share", "batch"])
    assert samples["tidegate_tenant_tokens_per_second", "acme"] == 3_000
    assert samples["tidegate_tenant_met_share", "acme"] == 0.6


def test_what_is_not_known_is_nan_and_a_replica_without_devices_has_no_series_of_them() -> None:
    unknown: dict[str, Any] = {"roofline": None, "gpu": None, "gpu_utilisation_share": None}
    samples = shown(Telemetry(Source.CONTROLLER), decoding(**unknown).signals(5 * SECOND_NS))
    assert math.isnan(samples["tidegate_replica_memory_share", "a"])
    assert math.isnan(samples["tidegate_replica_gpu_utilisation_share", "a"])
    assert samples["tidegate_replica_bound", "memory", "a"] == 1  # by the step model
    assert not [labels for labels in samples if labels[0].startswith("tidegate_replica_gpu_power")]


def test_series_of_replicas_and_tenants_that_are_gone_do_not_stay_as_they_were() -> None:
    telemetry, book = Telemetry(Source.CONTROLLER), decoding()
    shown(telemetry, book.signals(5 * SECOND_NS))
    later = 70 * SECOND_NS
    book.receive_replica(replica_report("b", 1), later)
    book.receive_gateway(gateway_report(seq=99), later)
    samples = shown(telemetry, book.signals(later))
    assert not [labels for labels in samples if "a" in labels]
    assert samples["tidegate_replica_running_seqs", "b"] == 0
    assert samples["tidegate_tenant_tokens_per_second", "acme"] == 0


def test_the_utilisation_ratio_is_of_the_busy_time_even_when_the_last_report_is_of_none() -> None:
    busy = decoding().signals(5 * SECOND_NS).replicas[0].utilisation
    book = decoding()
    book.receive_replica(replica_report("a", 6, step_model=STEP, roofline=ROOFLINE), 6 * SECOND_NS)
    after = book.signals(6 * SECOND_NS).replicas[0].utilisation
    assert busy is not None
    assert after is not None
    assert after.memory_share == pytest.approx(busy.memory_share)
    assert after.bound is busy.bound


def test_the_state_of_utilisation_says_the_ratio() -> None:
    (replica,) = decoding().signals(5 * SECOND_NS).replicas
    state = utilisation_state(replica.utilisation)
    assert state is not None
    assert (state["bound"], state["nvml_agrees"]) == ("memory", True)
    assert state["ratio"] == state["memory_share"]
    idle = decoding(steps=0, busy_share=0.0).signals(5 * SECOND_NS).replicas[0]
    assert utilisation_state(idle.utilisation) is None
