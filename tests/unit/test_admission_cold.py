"""Requests for a model that no replica serves: held within bounds, or told truly when to come again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policies.admission.gate import Entry
from policies.build import Policies, build_policies
from policies.config import AdmissionConfig, ClassConfig, ClassesConfig, PolicyConfig, ScalingConfig
from policies.steering import ColdModel, ColdPhase
from policies.types import Mode, Plan, Priority, Request

SECOND = 1_000_000_000
CONFIG = PolicyConfig(
    scaling=ScalingConfig(replicas_min=0, start_s_prior=40.0, hold_s_max=100.0),
    admission=AdmissionConfig(queue_requests_max=2, retry_after_jitter_share=0.0),
    classes=ClassesConfig(batch=ClassConfig(waits_for_start=False)),
)


def the_policies(config: PolicyConfig = CONFIG) -> Policies:
    return build_policies(config, 1)


def a_request(number: int = 0, **more: Any) -> Request:
    fields: dict[str, Any] = {
        "request_id": f"r{number}", "model": "m", "endpoint": "/v1/completions", "tenant": "t", "prompt_tokens": 10,
        "output_tokens_max": 10, "blocks": (), "block_tokens": 16, "stream": True, "arrival_ns": 0,
    }  # fmt: skip
    return Request(**fields | more)


def tell(policies: Policies, cold: ColdModel | None, now_ns: int = 0, seq: int = 1) -> None:
    policies.plan_follower.receive(
        Plan("e", seq, 10_000.0, Mode.ACT, replicas_target=0 if cold else 1, cold=cold), now_ns
    )


ASLEEP = ColdModel(ColdPhase.ASLEEP, 50.0, measured=True)


def test_requests_are_held_until_the_first_replica_comes_and_then_go_on_in_order() -> None:
    policies = the_policies()
    gate = policies.flow_context.admission
    for number in range(2):
        assert gate.arrive(a_request(number), 0).entry is Entry.QUEUED
    assert policies.pump(10 * SECOND).granted == ()
    policies.update_members({"a": None}, 20 * SECOND)
    assert policies.pump(20 * SECOND).granted == ("r0",)


def test_the_queue_s_bounds_hold_and_those_beyond_are_told_when_the_model_will_have_started() -> None:
    gate = the_policies().flow_context.admission
    for number in range(2):
        gate.arrive(a_request(number), 0)
    refusal = gate.arrive(a_request(2), 0).refusal
    assert refusal is not None
    assert (refusal.code, refusal.status, refusal.retry_after_s) == ("queue_full", 429, 43.0)


@pytest.mark.parametrize(
    ("cold", "after_s"),
    [
        (ASLEEP, 53.0),
        (replace(ASLEEP, phase=ColdPhase.STARTING, elapsed_s=20.0), 30.0),
        (replace(ASLEEP, phase=ColdPhase.STARTING, elapsed_s=49.0), 10.0),
        (replace(ASLEEP, phase=ColdPhase.STARTING, elapsed_s=200.0), 10.0),
    ],
)
def test_a_class_that_does_not_wait_is_told_what_is_left_of_the_measured_start(
    cold: ColdModel | None, after_s: float
) -> None:
    policies = the_policies()
    tell(policies, cold)
    refusal = policies.flow_context.admission.arrive(a_request(priority=Priority.BATCH), 0).refusal
    assert refusal is not None
    assert (refusal.code, refusal.status, refusal.retry_after_s) == ("model_starting", 503, after_s)


def test_what_was_told_grows_older_and_is_still_the_best_there_is_when_the_plan_is_too_old() -> None:
    policies = the_policies()
    tell(policies, replace(ASLEEP, phase=ColdPhase.STARTING, elapsed_s=10.0))
    refusal = policies.flow_context.admission.arrive(a_request(priority=Priority.BATCH), 25 * SECOND).refusal
    assert refusal is not None
    assert refusal.retry_after_s == 15.0


@pytest.mark.parametrize(("deadline_s", "held"), [(None, True), (60.0, True), (52.0, False)])
def test_a_request_is_held_where_its_deadline_leaves_the_time(deadline_s: float | None, held: bool) -> None:
    policies = the_policies()
    tell(policies, ASLEEP)
    deadline_ns = None if deadline_s is None else round(deadline_s * SECOND)
    assert (policies.flow_context.admission.arrive(a_request(deadline_ns=deadline_ns), 0).refusal is None) is held


def test_a_start_that_takes_longer_than_anybody_is_held_ends_with_503() -> None:
    policies = the_policies()
    gate = policies.flow_context.admission
    gate.arrive(a_request(), 0)
    assert policies.pump(99 * SECOND).expired == ()
    assert policies.pump(100 * SECOND).expired == ("r0",)
    refusal = gate.gave_up(a_request(), 100 * SECOND)
    assert (refusal.code, refusal.status) == ("model_starting", 503)


def test_a_model_that_cannot_start_refuses_those_that_are_held_and_those_that_come_until_it_is_tried_again() -> None:
    policies = the_policies()
    gate = policies.flow_context.admission
    gate.arrive(a_request(), 0)
    tell(policies, replace(ASLEEP, phase=ColdPhase.FAILED, retry_after_s=30.0, why="no such model"), SECOND)
    assert policies.pump(SECOND).expired == ("r0",)
    for refusal in (gate.gave_up(a_request(), SECOND), gate.arrive(a_request(1), 11 * SECOND).refusal):
        assert refusal is not None
        assert (refusal.code, refusal.status) == ("model_cannot_start", 503)
        assert "no such model" in refusal.text
    assert gate.cannot_start(11 * SECOND) == "no such model"
    assert gate.arrive(a_request(2), 32 * SECOND).entry is Entry.QUEUED
    assert gate.cannot_start(32 * SECOND) is None


def test_the_last_replica_that_leaves_makes_it_cold_and_one_that_is_left_alone_does_not() -> None:
    policies = the_policies()
    gate = policies.flow_context.admission
    policies.update_members({"a": {"seq": 1, "state": "ready"}}, 0)
    assert not gate.is_cold(0)
    policies.fleet.block(frozenset({"a"}), 0)
    assert not gate.is_cold(0)
    policies.update_members({"a": {"seq": 2, "state": "draining"}}, SECOND)
    assert gate.is_cold(SECOND)


def test_a_replica_that_cannot_be_reached_is_no_start_to_wait_for() -> None:
    policies = the_policies()
    gate = policies.flow_context.admission
    tell(policies, None)
    assert gate.is_cold(0)
    assert not gate.sleeps(0)
    assert gate.arrive(a_request(priority=Priority.BATCH), 0).entry is Entry.QUEUED
    assert policies.pump(5 * SECOND).granted == ()
    tell(policies, None, 29 * SECOND, seq=2)
    assert policies.pump(30 * SECOND).expired == ("r0",)
    assert gate.gave_up(a_request(), 30 * SECOND).code == "queue_timeout"
    assert gate.start_wait_ms(a_request(), 30 * SECOND) == 0
    tell(policies, ASLEEP, 31 * SECOND, seq=3)
    assert gate.start_wait_ms(a_request(), 40 * SECOND) == 60_000


def test_a_model_that_may_not_sleep_is_never_cold() -> None:
    policies = the_policies(PolicyConfig())
    gate = policies.flow_context.admission
    assert not gate.is_cold(0)
    assert gate.cannot_start(0) is None
    assert not gate.holds_for_starts
    assert gate.arrive(a_request(), 0).entry is Entry.ADMITTED


def test_one_that_may_not_sleep_and_cannot_start_refuses_at_once_until_it_serves_or_nothing_says_so() -> None:
    policies = the_policies(PolicyConfig(admission=AdmissionConfig(retry_after_jitter_share=0.0)))
    gate = policies.flow_context.admission
    tell(policies, replace(ASLEEP, phase=ColdPhase.FAILED, retry_after_s=50.0, why="no such model"))
    refusal = gate.arrive(a_request(), 10 * SECOND).refusal
    assert refusal is not None
    assert (refusal.code, refusal.status, refusal.retry_after_s) == ("model_cannot_start", 503, 40.0)
    assert "no such model" in refusal.text
    assert gate.start_wait_ms(a_request(), 10 * SECOND) == 0
    assert gate.arrive(a_request(1), 51 * SECOND).entry is Entry.ADMITTED, "no plan says so any more"
    tell(policies, replace(ASLEEP, phase=ColdPhase.FAILED, retry_after_s=50.0, why="no such model"), 52 * SECOND, 2)
    policies.update_members({"a": {"seq": 1, "state": "ready"}}, 52 * SECOND)
    assert gate.arrive(a_request(2), 52 * SECOND).refusal is None, "one serves"


@pytest.mark.parametrize(("priority", "waits"), [(Priority.STANDARD, True), (Priority.BATCH, False)])
def test_a_request_that_came_before_it_was_known_that_the_last_replica_died_waits_for_its_start(
    priority: Priority, waits: bool
) -> None:
    policies = the_policies()
    tell(policies, None)
    gate = policies.flow_context.admission
    assert gate.arrive(a_request(priority=priority), 0).entry is Entry.QUEUED
    tell(policies, replace(ASLEEP, phase=ColdPhase.STARTING), SECOND, seq=2)
    assert policies.pump(30 * SECOND).expired == (() if waits else ("r0",))
    if waits:
        assert policies.pump(99 * SECOND).expired == ()
        assert policies.pump(100 * SECOND).expired == ("r0",)
