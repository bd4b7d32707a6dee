"""The loop over a tiny fleet: what a load does to replicas, knobs and affinity."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from policies.config import BatchingConfig, ControlConfig, PolicyConfig, RoutingConfig, ScalingConfig
from policies.control.joint import COLD_START_MS
from policies.control.loop import ControlState, tick
from policies.control.scaler import ScaleAdvice
from policies.control.signals import GATEWAYS_MAX, REPLICAS_MAX, Signals
from policies.control.turns import PER_TICK
from policies.measures import StartPhase, StartReport
from policies.steering import ColdModel, ColdPhase
from policies.step_model import predict_step_ms
from policies.types import FleetView, Knobs, Mode, Reason
from tests.unit.control.fleet import (
    CPU_STEP,
    SECOND_NS,
    TinyFleet,
    decisions,
    gateway_report,
    histogram,
    noisy,
    replica_report,
)

CONFIG = PolicyConfig(
    scaling=ScalingConfig(replicas_max=4, up_ticks=3, down_window_s=60), control=ControlConfig(joint=False)
)
"""Each lever on its own: what they do together is tested in test_joint.py."""
ONE_PS = 2.4
"""About the requests per second of 100 + 60 tokens that one emulated replica carries."""


class FixedScaler:
    """Always asks for the same."""

    def __init__(self, replicas: int | None = 1, held: bool = False) -> None:
        self.advice = ScaleAdvice(replicas, Reason("Fixed", "always"), held=held)

    def recommend(self, signals: Signals, now_ns: int) -> ScaleAdvice:
        return self.advice


# --- replicas ---------------------------------------------------------------------------------------------------------


def test_a_load_that_needs_two_replicas_brings_the_second_and_its_end_sends_it_away() -> None:
    fleet = TinyFleet(CONFIG)
    fleet.run(30, ONE_PS * 0.3)
    assert fleet.target == 1
    fleet.run(60, ONE_PS * 1.2)
    assert fleet.target == 2
    first = fleet.targets.index(2)
    assert first - 30 <= 15
    fleet.run(40, 0.0)
    assert fleet.target == 2
    fleet.run(60, 0.0)
    assert fleet.target == 1
    assert [d.after["replicas_target"] for d in decisions(fleet, "replicas")] == [2, 1]


def test_the_reason_and_the_figures_of_a_rise_are_written_down() -> None:
    fleet = TinyFleet(CONFIG)
    fleet.run(60, ONE_PS * 1.2)
    entry = decisions(fleet, "replicas")[0]
    assert entry.reason.code == "UpConfirmed"
    assert entry.acted
    assert entry.before == {"replicas_target": 1}
    assert entry.inputs["replicas_running"] == 1
    assert entry.inputs["capacity_decode_token_ms"] == pytest.approx(60 / 16, rel=0.05)
    assert entry.target == "m"


@pytest.mark.slow
@pytest.mark.parametrize("start_s", [0.0, 5.0, 90.0])
def test_pending_replicas_count_so_a_slow_start_never_runs_away(start_s: float) -> None:
    fleet = TinyFleet(replace(CONFIG, scaling=replace(CONFIG.scaling, replicas_max=32, headroom=0.8)), start_s=start_s)
    fleet.run(300, ONE_PS * 2.6)
    assert fleet.target == 4
    assert max(fleet.targets) == 4
    rises = [a for a, b in zip(fleet.targets[1:], fleet.targets, strict=False) if a > b]
    assert rises == sorted(rises)


@pytest.mark.slow
@pytest.mark.parametrize(("load", "seed"), [(0.5, 0), (0.75, 1), (0.85, 2), (0.85, 3), (1.3, 4)])
def test_noise_of_a_fifth_changes_direction_at_most_once_in_ten_minutes(load: float, seed: int) -> None:
    fleet = TinyFleet(CONFIG)
    fleet.run(60, ONE_PS * load)
    fleet.targets.clear()
    fleet.run(600, noisy(ONE_PS * load, 0.2, seed))
    steps = [b - a for a, b in zip(fleet.targets, fleet.targets[1:], strict=False) if b != a]
    turns = sum((a > 0) != (b > 0) for a, b in itertools.pairwise(steps))
    assert turns <= 1


@pytest.mark.slow
def test_blind_holds_everything_and_sight_lets_go_again() -> None:
    fleet = TinyFleet(CONFIG)
    fleet.run(60, ONE_PS * 1.2)
    knobs = fleet.results[-1].plan.knobs
    fleet.mute = {"gateway", "r1", "r2", "fleet"}
    fleet.run(50, 0.0)
    result = fleet.results[-1]
    assert result.signals.blind
    assert result.plan.replicas_target == 2
    assert result.plan.knobs == knobs
    assert [d.reason.code for d in decisions(fleet, "replicas")][-1] == "HeldBlind"
    fleet.mute = set()
    fleet.run(80, 0.0)
    assert fleet.target == 1


@pytest.mark.slow
def test_one_silent_replica_keeps_the_number_from_falling() -> None:
    fleet = TinyFleet(CONFIG)
    fleet.run(60, ONE_PS * 1.2)
    fleet.mute = {"r2"}
    fleet.run(300, 0.0)
    assert fleet.target == 2
    assert decisions(fleet, "replicas")[-1].reason.code == "HeldPartial"
    fleet.mute = set()
    fleet.run(70, 0.0)
    assert fleet.target == 1


def test_without_serves_word_the_number_does_not_fall() -> None:
    fleet = TinyFleet(CONFIG)
    fleet.run(60, ONE_PS * 1.2)
    fleet.mute = {"fleet"}
    fleet.run(200, 0.0)
    assert fleet.target == 2


def test_a_new_controller_starts_from_what_runs() -> None:
    fleet = TinyFleet(CONFIG)
    fleet.run(60, ONE_PS * 1.2)
    fleet.state = TinyFleet(CONFIG).state
    fleet.run(30, ONE_PS * 0.2)
    assert set(fleet.targets[60:]) == {2}
    assert {r.plan.replicas_target for r in fleet.results[60:]} == {2}
    assert fleet.results[60].plan.seq == 1


# --- batch ------------------------------------------------------------------------------------------------------------


def test_the_budget_is_safe_before_the_long_prompt_comes() -> None:
    fleet = TinyFleet(CONFIG, output_tokens=200)
    fleet.run(20, 1.0)
    knobs = fleet.results[-1].plan.knobs["r1"]
    assert knobs.step_tokens_max is not None
    running = fleet.results[-1].signals.replicas[0].latest.running
    untuned_ms = predict_step_ms(CPU_STEP, 16, 16 * 300, 900)
    tuned_ms = predict_step_ms(CPU_STEP, 16, 16 * 300, knobs.step_tokens_max - 16)
    assert running > 1
    assert tuned_ms <= untuned_ms / 5


def test_knobs_are_the_full_wish_of_every_known_replica_each_tick() -> None:
    fleet = TinyFleet(CONFIG)
    fleet.run(60, ONE_PS * 1.2)
    fleet.mute = {"r2"}
    fleet.run(20, ONE_PS * 0.2)
    for result in fleet.results[40:]:
        assert set(result.plan.knobs) == {r.replica_id for r in result.signals.replicas}
        assert result.plan.knobs["r1"].step_tokens_max is not None


def test_old_reports_of_a_silent_replica_move_no_knob() -> None:
    state = ControlState(replace(CONFIG, batching=BatchingConfig(settle_ticks=6)), FixedScaler(), "e")
    state.receive_replica(replica_report("r1", 1, steps=5, running=1), SECOND_NS)
    wish = tick(state, SECOND_NS).plan.knobs
    slow = replace(CPU_STEP, d_ms=6.0)
    state.receive_replica(replica_report("r1", 2, steps=5, running=1, step_model=slow), 2 * SECOND_NS)
    plans = [tick(state, i * SECOND_NS).plan for i in range(2, 12)]
    assert all(plan.knobs == wish for plan in plans)


def test_forgotten_replicas_leave_the_plan() -> None:
    state = ControlState(CONFIG, FixedScaler(), "e")
    state.receive_replica(replica_report("gone", 1), 0)
    assert set(tick(state, SECOND_NS).plan.knobs) == {"gone"}
    assert tick(state, 62 * SECOND_NS).plan.knobs == {}


def test_unlike_replicas_get_unlike_knobs() -> None:
    state = ControlState(CONFIG, FixedScaler(), "e")
    state.receive_replica(replica_report("slow", 1), 0)
    state.receive_replica(replica_report("fast", 1, step_model=replace(CPU_STEP, a_ms=5, b_ms=0.1, d_ms=0.1)), 0)
    knobs = tick(state, 0).plan.knobs
    assert (knobs["slow"].step_tokens_max or 0) < (knobs["fast"].step_tokens_max or 0)


def test_preemptions_brake_one_replica_and_the_ledger_says_so() -> None:
    state = ControlState(CONFIG, FixedScaler(), "e")
    for i in range(1, 12):
        for name in ("r1", "r2"):
            report = replica_report(
                name, i, running=16, kv_tokens_used=4_800, steps=5, preemptions=int(name == "r1" and i == 8)
            )
            state.receive_replica(report, i * SECOND_NS)
        result = tick(state, i * SECOND_NS)
    assert result.plan.knobs["r1"].running_seqs_max == 12
    assert result.plan.knobs["r2"].running_seqs_max == 16
    entry = state.ledger.latest(1)[0]
    assert (entry.lever, entry.target, entry.reason.code) == ("batch", "r1", "PreemptionBrake")
    assert entry.after["running_seqs_max"] == 12


@pytest.mark.slow
def test_in_a_large_fleet_tuners_take_turns_and_preemptions_do_not_wait_for_theirs() -> None:
    state = ControlState(CONFIG, FixedScaler(), "e")
    names = [f"r{i:03d}" for i in range(PER_TICK + 2)]
    braked: set[tuple[int, str]] = set()
    for i in range(1, 31):
        for name in names:
            preempts = i == 30 and name in ("r004", "r005")
            report = replica_report(name, i, running=16, kv_tokens_used=4_800, steps=5, preemptions=int(preempts))
            state.receive_replica(report, i * SECOND_NS)
        result = tick(state, i * SECOND_NS)
        if i <= 2:
            begun = {d.target for d in result.decisions if d.lever == "batch"}
            assert begun == set(names[-i % 2 :: 2])
        braked |= {(i, d.target) for d in result.decisions if d.reason.code == "PreemptionBrake"}
    assert braked == {(30, "r004"), (30, "r005")}


# --- affinity ---------------------------------------------------------------------------------------------------------


def test_cold_caches_lower_the_affinity_and_the_plan_carries_it() -> None:
    state = ControlState(CONFIG, FixedScaler(), "e")
    for i in range(1, 30):
        report = replica_report("r1", i, prefix_query_tokens=1_000, prefix_hit_tokens=100, steps=5, running=1)
        state.receive_replica(report, i * SECOND_NS)
        state.receive_gateway(
            gateway_report(seq=i, predicted_prompt_tokens={"r1": 1_000}, predicted_hit_tokens={"r1": 800}),
            i * SECOND_NS,
        )
        result = tick(state, i * SECOND_NS)
    assert result.plan.affinity_strength == CONFIG.affinity.strength_min
    entries = [d for d in state.ledger.latest(100) if d.lever == "affinity"]
    assert all(d.reason.code == "CacheCold" for d in entries)
    assert len(entries) == 8


def test_the_strength_starts_at_the_configured_one() -> None:
    config = replace(CONFIG, routing=RoutingConfig(affinity_strength=0.6))
    assert tick(ControlState(config, FixedScaler(), "e"), 0).plan.affinity_strength == 0.6


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_every_plan_names_its_life_its_number_and_its_time() -> None:
    state = ControlState(CONFIG, FixedScaler(3), "life")
    plans = [tick(state, i * SECOND_NS).plan for i in range(3)]
    assert [(p.epoch, p.seq) for p in plans] == [("life", 1), ("life", 2), ("life", 3)]
    assert {(p.ttl_ms, p.mode, p.replicas_target) for p in plans} == {(10_000.0, Mode.ACT, 3)}


def test_shadow_decides_and_writes_and_changes_nothing() -> None:
    shadow = TinyFleet(replace(CONFIG, control=ControlConfig(mode=Mode.SHADOW, joint=False)))
    shadow.run(60, ONE_PS * 1.2)
    for result in shadow.results:
        assert result.plan.mode is Mode.SHADOW
        assert result.plan.replicas_target is None
        assert result.plan.affinity_strength is None
        assert result.plan.knobs == {}
    assert set(shadow.targets) == {1}
    assert shadow.results[-1].adaptation.replicas_target == 2
    entries = shadow.state.ledger.latest(100)
    assert {d.lever for d in entries} == {"batch", "replicas"}
    assert not any(d.acted for d in entries)
    assert len(entries) <= 4


@pytest.mark.parametrize("family", ["batching", "affinity", "scaling"])
def test_a_lever_that_is_switched_off_has_no_opinion(family: str) -> None:
    config = replace(CONFIG, **{family: replace(getattr(CONFIG, family), enabled=False)})
    fleet = TinyFleet(config)
    fleet.run(40, ONE_PS * 1.5)
    plan = fleet.results[-1].plan
    has_opinion = {
        "batching": bool(plan.knobs),
        "affinity": plan.affinity_strength is not None,
        "scaling": plan.replicas_target is not None,
    }
    assert [name for name, has in has_opinion.items() if not has] == [family]


# --- the ledger -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_steady_fleet_writes_nothing() -> None:
    fleet = TinyFleet(CONFIG)
    fleet.run(60, ONE_PS * 0.5)
    written = fleet.state.ledger.last_seq
    fleet.run(300, ONE_PS * 0.5)
    assert fleet.state.ledger.last_seq == written
    assert written <= 2


def test_a_hold_is_written_when_it_begins_and_not_each_tick() -> None:
    state = ControlState(CONFIG, FixedScaler(2, held=True), "e")
    for i in range(600):
        state.receive_gateway(gateway_report(seq=i), i * SECOND_NS)
        tick(state, i * SECOND_NS)
    assert state.ledger.last_seq == 1


def test_a_hold_that_comes_and_goes_is_written_once_a_minute_at_most() -> None:
    scaler = FixedScaler(2)
    state = ControlState(CONFIG, scaler, "e")
    for i in range(180):
        scaler.advice = replace(scaler.advice, held=i % 2 == 0)
        state.receive_gateway(gateway_report(seq=i), i * SECOND_NS)
        tick(state, i * SECOND_NS)
    assert state.ledger.last_seq == 3


def test_a_controller_that_never_heard_anyone_writes_nothing() -> None:
    state = ControlState(CONFIG, FixedScaler(None, held=True), "e")
    for i in range(60):
        tick(state, i * SECOND_NS)
    assert state.ledger.last_seq == 0


def test_the_ledger_is_bounded() -> None:
    config = replace(
        CONFIG, control=ControlConfig(decisions_max=5, joint=False), batching=BatchingConfig(settle_ticks=0)
    )
    state = ControlState(config, FixedScaler(), "e")
    for i in range(1, 40):
        model = replace(CPU_STEP, d_ms=1.0 * 1.3**i)
        state.receive_replica(replica_report("r1", i, step_model=model, steps=5, running=1), i * SECOND_NS)
        state.receive_replica(
            replica_report(f"x{i}", 1, step_model=replace(CPU_STEP, d_ms=1.0), steps=5, running=1), i * SECOND_NS
        )
        tick(state, i * SECOND_NS)
    assert len(state.ledger) == 5
    assert state.ledger.last_seq > 5


# --- bounds and order -------------------------------------------------------------------------------------------------


def test_reporters_are_bounded() -> None:
    state = ControlState(CONFIG, FixedScaler(), "e")
    for i in range(REPLICAS_MAX + 10):
        state.receive_replica(replica_report(f"r{i}", 1), 0)
    for i in range(GATEWAYS_MAX + 10):
        state.receive_gateway(gateway_report(f"g{i}", 1), 0)
    result = tick(state, 0)
    assert len(result.plan.knobs) == REPLICAS_MAX
    assert result.signals.gateways_known == GATEWAYS_MAX


def test_a_duplicate_report_counts_once_for_every_lever() -> None:
    def after(times: int) -> float | None:
        state = ControlState(CONFIG, FixedScaler(), "e")
        for _ in range(times):
            state.receive_replica(replica_report("r1", 1, prefix_query_tokens=1_500), 0)
            state.receive_gateway(
                gateway_report(seq=1, predicted_prompt_tokens={"r1": 9}, predicted_hit_tokens={"r1": 9}), 0
            )
        return tick(state, 0).plan.affinity_strength

    assert after(1) == after(10) == 1.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_figures_that_are_no_numbers_break_no_tick(value: float) -> None:
    state = ControlState(CONFIG, FixedScaler(), "e")
    broken = replace(CPU_STEP, d_ms=value)
    state.receive_replica(replica_report("r1", 1, step_model=broken, busy_share=value, running=3, steps=3), 0)
    state.receive_gateway(gateway_report(seq=1, ttft=histogram(1.0)), 0)
    state.receive_fleet(FleetView(1, 1, 1, 2), 0)
    knobs = tick(state, 0).plan.knobs["r1"]
    assert knobs == Knobs() or (knobs.step_tokens_max or 0) >= CONFIG.batching.step_tokens_min


def test_the_result_of_the_last_tick_is_kept() -> None:
    state = ControlState(CONFIG, FixedScaler(), "e")
    assert state.last is None
    result: Any = tick(state, 0)
    assert state.last is result


# --- starts that fail -------------------------------------------------------------------------------------------------


def test_gateways_are_told_that_a_model_that_may_not_sleep_cannot_start_while_nobody_serves_it() -> None:
    state = ControlState(CONFIG, FixedScaler(), "epoch")

    def at(second: int, running: int, *failed: str) -> ColdModel | None:
        now_ns = second * SECOND_NS
        for name in failed:
            state.receive_start(StartReport(name, "m", StartPhase.LOAD, 1_000.0, failed="no such model"), now_ns)
        for i in range(running):
            state.receive_replica(replica_report(f"r{i}", second), now_ns)
        state.receive_gateway(gateway_report(seq=second), now_ns)
        state.receive_fleet(FleetView(running, 1, 1, 4), now_ns)
        return tick(state, now_ns).plan.cold

    assert at(1, 0, "a", "b") is None
    assert at(2, 1, "c") is None, "one serves"
    cold = at(60, 0)
    assert cold is not None
    assert (cold.phase, cold.why) == (ColdPhase.FAILED, "3 starts failed: no such model")
    assert cold.retry_after_s == COLD_START_MS / 1_000
    ready = StartReport("d", "m", StartPhase.FIRST_TOKEN, 9_000.0)
    state.receive_start(ready, 61 * SECOND_NS)
    assert at(61, 0) is None, "one started"
