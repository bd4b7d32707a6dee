from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autoscaling.capacity import KV_SHARE_PLANNED, Capacities, Capacity, replica_capacity
from autoscaling.demand import Demand
from policies.config import ControlConfig, ObjectivesConfig
from policies.control.signals import ReplicaSignals, SignalBook
from policies.step_model import predict_step_ms
from policies.types import Knobs, StepCoefficients
from tests.unit.control.fleet import CPU_STEP, replica_report

OBJECTIVES = ObjectivesConfig(itl_ms=200)
NOTHING = Demand(0, 0, None, None, 0, 0, 0, None, None, None, None)


def replicas(**reports: dict[str, Any]) -> tuple[ReplicaSignals, ...]:
    book = SignalBook(ControlConfig())
    for name, changes in reports.items():
        book.receive_replica(replica_report(name, 1, **changes), 0)
    return book.signals(0).replicas


def test_the_batch_is_the_largest_within_the_itl_objective() -> None:
    c = replica_capacity(CPU_STEP, 256, 1_000_000, 300, OBJECTIVES)
    assert predict_step_ms(CPU_STEP, c.batch, c.batch * 300, 0) <= 200
    assert predict_step_ms(CPU_STEP, c.batch + 1, (c.batch + 1) * 300, 0) > 200
    assert c.decode_token_ms == pytest.approx(predict_step_ms(CPU_STEP, c.batch, c.batch * 300, 0) / c.batch)


def test_the_batch_is_bounded_by_the_engine_and_by_its_kv() -> None:
    assert replica_capacity(CPU_STEP, 16, 1_000_000, 300, OBJECTIVES).batch == 16
    assert replica_capacity(CPU_STEP, 16, 2_000, 300, OBJECTIVES).batch == int(2_000 * KV_SHARE_PLANNED / 300)
    assert replica_capacity(CPU_STEP, 16, 0, 300, OBJECTIVES).batch == 16


def test_one_sequence_is_assumed_possible_whatever_the_objective() -> None:
    assert replica_capacity(CPU_STEP, 16, 100, 300, replace(OBJECTIVES, itl_ms=1)).batch == 1
    assert replica_capacity(CPU_STEP, 0, 0, None, OBJECTIVES).batch == 1


def test_the_share_is_engine_time_per_second_and_kv_per_cache() -> None:
    c = Capacity(batch=16, decode_token_ms=4.0, prefill_token_ms=2.0, kv_tokens=1_000)
    assert c.share(prefill_tps=100, decode_tps=100, kv_tokens=0) == pytest.approx(0.6)
    assert c.share(prefill_tps=0, decode_tps=0, kv_tokens=1_500) == pytest.approx(1.5)
    assert c.share(0, 0, 0) == 0
    assert c.requests_ps(100, 50) == pytest.approx(2.5)
    assert c.requests_ps(0, 0) is None


def test_models_that_cannot_be_trusted_are_left_out() -> None:
    few = {"step_model": replace(CPU_STEP, samples=31)}
    wrong = {"step_model": replace(CPU_STEP, error_share=0.8)}
    assert Capacities().mean(replicas(a=few, b=wrong, c={"step_model": None}), NOTHING, OBJECTIVES, 32) is None
    assert Capacities().mean((), NOTHING, OBJECTIVES, 32) is None
    c = Capacities().mean(replicas(a=few, b={}), NOTHING, OBJECTIVES, 32)
    assert c is not None
    assert c.prefill_token_ms == pytest.approx(CPU_STEP.d_ms)


def test_speeds_are_averaged_not_times() -> None:
    fast = StepCoefficients(0.0, 1.0, 0.0, 1.0, 100)
    slow = StepCoefficients(0.0, 3.0, 0.0, 3.0, 100)
    c = Capacities().mean(replicas(a={"step_model": fast}, b={"step_model": slow}), NOTHING, OBJECTIVES, 32)
    assert c is not None
    assert c.prefill_token_ms == pytest.approx(1.5)
    assert c.decode_token_ms == pytest.approx(1.5)


def test_a_free_phase_stays_free() -> None:
    free = StepCoefficients(5.0, 1.0, 0.0, 0.0, 100)
    c = Capacities().mean(replicas(a={"step_model": free}, b={}), NOTHING, OBJECTIVES, 32)
    assert c is not None
    assert c.prefill_token_ms == 0


def test_the_knob_in_force_bounds_the_batch() -> None:
    c = Capacities().mean(replicas(a={"knobs": Knobs(4, None, None)}), NOTHING, OBJECTIVES, 32)
    assert c is not None
    assert c.batch == 4
