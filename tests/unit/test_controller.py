"""The controller without Ray: reports in, plans out, ticks that survive, and a memory that does not grow."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from deployments import control_view
from deployments.controller import FAILED_TICKS_MAX, GATEWAYS_MAX, TICKS_KEPT, Controller, next_due_ns
from policies.measures import StartPhase, StartReport
from policies.steering import Verdict
from policies.tasks import TaskCounts, TaskUse
from policies.types import (
    Decision,
    GatewayReport,
    Histogram,
    Knobs,
    Mode,
    Plan,
    Reason,
    ReplicaReport,
    ReplicaState,
    StepCoefficients,
)

FLEET = {"replicas_running": 1, "replicas_target": 1, "replicas_min": 1, "replicas_max": 2}


def _fail(*_: Any) -> None:
    raise AssertionError("the controller gave up")


def _controller(on_broken: Any = _fail, **sections: Any) -> Controller:
    return Controller(sections, on_broken)


def _replica(replica_id: str = "r1", seq: int = 1, **changes: Any) -> ReplicaReport:
    values: dict[str, Any] = {
        "replica_id": replica_id,
        "model": "m",
        "seq": seq,
        "window_ms": 1_000.0,
        "state": ReplicaState.READY,
        "running": 3,
        "waiting": 1,
        "http_inflight": 4,
        "kv_tokens_used": 250,
        "kv_tokens_max": 1_000,
        "prefill_tokens": 100,
        "decode_tokens": 60,
        "prefix_query_tokens": 100,
        "prefix_hit_tokens": 40,
        "preemptions": 2,
        "steps": 20,
        "busy_share": 0.5,
        "gpu_utilisation_share": None,
        "itl": Histogram((0,) * 8 + (60,) + (0,) * 24, 60 * 45.0),
        "step_model": StepCoefficients(30.0, 1.0, 0.5, 1.8, samples=100, error_share=0.02),
        "knobs": Knobs(16, 512),
        "running_seqs_hard": 16,
        "step_tokens_hard": 2_048,
        "finished": 1,
        "aborted": 0,
        "cold_start_ms": 31_000.0,
    }
    return ReplicaReport(**(values | changes))


def _gateway(gateway_id: str = "g1", seq: int = 1) -> GatewayReport:
    return GatewayReport(
        gateway_id=gateway_id,
        model="m",
        seq=seq,
        window_ms=1_000.0,
        ttft=Histogram(),
        itl=Histogram(),
        e2e=Histogram(),
        arrivals=1,
        succeeded=1,
        failed={"timeout": 1},
        prompt_tokens=100,
        output_tokens=60,
        inflight=4,
        queued=0,
        routed={"r1": 1},
        predicted_prompt_tokens={"r1": 100},
        predicted_hit_tokens={"r1": 40},
        ttft_error_ms=Histogram(),
    )


def _samples(controller: Controller) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(controller.telemetry().render().decode())
        for sample in family.samples
    }


# --- reports and plans ------------------------------------------------------------------------------------------------


def test_before_the_first_tick_there_is_no_plan_and_afterwards_every_report_is_answered_with_it() -> None:
    controller = _controller()
    assert controller.report_replica(_replica()) is None
    assert controller.report_gateway(_gateway()) is None
    assert controller.fleet(FLEET) is None
    controller.tick()
    plan = controller.report_replica(_replica(seq=2))
    assert plan is not None
    assert (plan.epoch, plan.seq, plan.mode) == (controller.epoch, 1, Mode.ACT)
    assert controller.report_gateway(_gateway(seq=2)) == plan
    assert controller.fleet(FLEET) == {
        "epoch": plan.epoch,
        "seq": 1,
        "ttl_ms": plan.ttl_ms,
        "mode": "act",
        "replicas_target": plan.replicas_target,
    }


def test_two_lives_have_two_epochs_and_a_new_one_leaves_the_number_of_replicas_open() -> None:
    one, two = _controller(), _controller()
    two.tick()
    assert one.epoch != two.epoch
    assert two.plan is not None
    assert two.plan.replicas_target is None


def test_a_fleet_view_with_other_fields_is_refused() -> None:
    with pytest.raises(TypeError):
        _controller().fleet({"replicas": 1})


def test_in_shadow_mode_the_plan_is_empty_and_the_wishes_are_shown() -> None:
    controller = _controller(control={"mode": "shadow"})
    controller.fleet(FLEET)
    controller.report_replica(_replica())
    controller.report_gateway(_gateway())
    controller.tick()
    state = controller.state()
    assert (state["mode"], state["plan"]["replicas_target"], state["plan"]["knobs"]) == ("shadow", None, {})
    assert state["wishes"]["replicas_target"] == 1


# --- ticks ------------------------------------------------------------------------------------------------------------


async def test_it_ticks_by_itself_until_closed() -> None:
    controller = _controller(control={"tick_ms": 50})
    controller.start()
    async with asyncio.timeout(30):
        while controller.plan is None or controller.plan.seq < 3:  # noqa: ASYNC110 - nothing tells of a tick
            await asyncio.sleep(0.01)
    await controller.close()
    seq = controller.plan.seq
    await asyncio.sleep(0.2)
    assert controller.plan.seq == seq


def test_a_failing_tick_is_counted_and_the_next_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = _controller()
    with monkeypatch.context() as patch:
        patch.setattr("deployments.controller.tick", _fail)
        for _ in range(FAILED_TICKS_MAX - 1):
            controller.tick()
    controller.tick()
    assert controller.plan is not None
    samples = _samples(controller)
    assert samples["tidegate_control_ticks_total", (("result", "failed"),)] == FAILED_TICKS_MAX - 1
    assert samples["tidegate_control_ticks_total", (("result", "ok"),)] == 1


def test_ticks_that_keep_failing_end_the_process_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []
    controller = _controller(lambda: ended.append(True))
    monkeypatch.setattr("deployments.controller.tick", _fail)
    for _ in range(FAILED_TICKS_MAX + 3):
        controller.tick()
    assert ended == [True]


@given(
    st.integers(0, 2**62), st.integers(0, 10**12), st.sampled_from([1, 50_000_000, 1_000_000_000])
)  # fmt: skip
def test_the_next_tick_is_the_first_on_the_grid_after_now(due: int, late: int, period: int) -> None:
    at = due + late
    following = next_due_ns(due, at, period)
    assert (following - due) % period == 0
    assert at < following <= at + period


def test_a_tick_that_is_early_still_gets_the_next_place_on_the_grid() -> None:
    assert next_due_ns(1_000, 990, 100) == 1_100


# --- what people see --------------------------------------------------------------------------------------------------


def test_state_is_json_without_nan_and_has_ages_knobs_and_objectives() -> None:
    controller = _controller()
    controller.fleet(FLEET)
    controller.report_replica(_replica(busy_share=math.nan, step_model=StepCoefficients(math.inf, 1.0, 0.5, 1.8)))
    controller.report_gateway(_gateway())
    controller.tick()
    state = json.loads(json.dumps(controller.state(), allow_nan=False))
    assert (state["epoch"], state["tick"], state["mode"]) == (controller.epoch, 1, "act")
    assert state["objectives"]["ttft_ms"] == 2_000
    (replica,) = state["replicas"]
    assert replica["knobs"] == {"running_seqs_max": 16, "step_tokens_max": 512, "speculative_depth": None}
    assert (replica["kv_used_share"], replica["step_model"]["a_ms"], replica["fresh"]) == (0.25, None, True)
    assert replica["itl"]["count"] == 60
    assert replica["age_ms"] >= 0
    (gateway,) = state["gateways"]
    assert (gateway["gateway_id"], gateway["failed"]) == ("g1", {"timeout": 1})
    assert state["fleet"]["replicas_max"] == 2
    assert 0 < replica["confidence"] < 1  # a second of reports
    (heard,) = state["gateway_signals"]
    assert (heard["gateway_id"], heard["fresh"]) == ("g1", True)
    assert 0 < heard["confidence"] < 1
    assert state["models"]["m"]["replicas"] == 1
    assert {"name", "active", "evidence"} <= state["conditions"][0].keys()


def test_state_of_a_controller_that_knows_nothing_has_the_same_keys() -> None:
    new, ticked = _controller(), _controller()
    ticked.tick()
    assert new.state().keys() == ticked.state().keys()
    json.dumps(new.state(), allow_nan=False)


def test_the_state_of_the_last_ticks_can_be_asked_for_and_does_not_change() -> None:
    controller = _controller()
    controller.fleet(FLEET)
    for seq in range(1, TICKS_KEPT + 3):
        controller.report_replica(_replica(seq=seq, running=seq))
        controller.tick()
    last = TICKS_KEPT + 2
    assert [controller.state_at(tick) for tick in (0, 1, 2, last + 1)] == [None] * 4
    states = [controller.state_at(tick) for tick in range(3, last + 1)]
    assert [(s["tick"], s["plan"]["seq"], s["work"]["running"]) for s in states if s] == [
        (tick, tick, tick) for tick in range(3, last + 1)
    ]
    for state in states:
        json.dumps(state, allow_nan=False)
        assert state is not None
        assert state.keys() <= controller.state().keys()
        assert state["epoch"] == controller.epoch
        assert state["replicas"][0]["age_ms"] < 1_000


def test_decisions_page_by_sequence_number_within_their_bound() -> None:
    controller = _controller(control={"decisions_max": 5})
    for seq in range(1, 9):
        controller._control.ledger.write(_draft(seq), seq, True)
    every = controller.desk.decisions()
    assert [d["seq"] for d in every] == [4, 5, 6, 7, 8]  # bounded by decisions_max
    assert [d["seq"] for d in controller.desk.decisions(2)] == [7, 8]
    assert [d["seq"] for d in controller.desk.decisions(2, since_seq=5)] == [6, 7]
    assert controller.desk.decisions(2, since_seq=8) == []
    assert controller.desk.decisions(0) == []
    assert controller.desk.decisions(-1) == []
    json.dumps(every, allow_nan=False)


def _draft(seq: int) -> Any:
    from policies.control.ledger import Draft

    before, after = {"replicas_target": seq}, {"replicas_target": seq + 1}
    return Draft("replicas", "m", before, after, Reason("Demand", "the load fills 1.9 replicas"), {"queue": math.nan})


def test_a_decision_reads_as_one_sentence() -> None:
    before, after, reason = {"replicas_target": None}, {"replicas_target": 2}, Reason("Demand", "it is full")
    decision = Decision(1, 7, "replicas", "m", before, after, False, reason, {})
    assert control_view.in_words(decision) == (
        "replicas of m: replicas_target unknown -> 2; it is full [Demand] (shadow: not acted on)"
    )


def test_a_decision_names_what_changed_or_that_nothing_did() -> None:
    reason = Reason("HeldPartial", "one is silent")
    batch = Decision(1, 7, "batch", "r1", {"a": 4, "b": 512}, {"a": 4, "b": 256.5}, True, reason, {})
    assert control_view.in_words(batch) == "batch of r1: b 512 -> 256.5; one is silent [HeldPartial]"
    hold = Decision(1, 7, "replicas", "m", {"replicas_target": 2}, {"replicas_target": 2}, True, reason, {})
    assert control_view.in_words(hold) == "replicas of m: replicas_target stays 2; one is silent [HeldPartial]"


def test_metrics_show_the_replica_and_drop_it_when_it_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = _controller()
    controller.report_replica(_replica())
    controller.report_replica(_replica())  # a duplicate counts once
    controller.fleet(FLEET)
    controller.tick()
    samples, where = _samples(controller), ("replica", "r1")
    assert samples["tidegate_replica_running_seqs", (where,)] == 3
    assert samples["tidegate_replica_kv_used_share", (where,)] == 0.25
    assert samples["tidegate_replica_preemptions_total", (where,)] == 2
    assert samples["tidegate_replica_step_coefficient_seconds", (where, ("term", "base"))] == pytest.approx(0.03)
    assert samples["tidegate_replica_knob", (("knob", "step_tokens_max"), where)] == 512
    assert math.isnan(samples["tidegate_replica_gpu_utilisation_share", (where,)])
    assert samples["tidegate_replicas", (("state", "running"),)] == 1
    monkeypatch.setattr("deployments.controller.now_ns", lambda: controller._started_ns + 10**12)
    controller.tick()
    assert 'replica="r1"' not in controller.telemetry().render().decode()


def test_starts_are_shown_with_their_phases_and_counted_once() -> None:
    controller = _controller()
    controller.report_start(StartReport("a", "m", StartPhase.LOAD, 1_500.0, {StartPhase.PROCESS: 500.0}))
    controller.tick()
    (under_way,) = controller.state()["starts"]["under_way"]
    assert (under_way["replica_id"], under_way["phase"], under_way["phases_ms"]) == ("a", "load", {"process": 500.0})
    phases = {StartPhase.PROCESS: 500.0, StartPhase.LOAD: 7_000.0, StartPhase.OPEN: 500.0}
    for _ in range(2):
        controller.report_start(StartReport("a", "m", StartPhase.FIRST_TOKEN, 8_000.0, phases))
    controller.report_start(StartReport("b", "m", StartPhase.LOAD, 900.0, failed="OSError: no weights"))
    controller.tick()
    starts = controller.state()["starts"]
    assert (starts["under_way"], starts["last"]["total_ms"], starts["typical_ms"]["load"]) == ([], 8_000.0, 7_000.0)
    assert (starts["failed_in_a_row"], starts["failed_why"]) == (1, "OSError: no weights")
    samples = _samples(controller)
    assert samples["tidegate_replica_start_seconds_sum", (("phase", "load"),)] == 7.0
    assert samples["tidegate_replica_start_seconds_count", (("phase", "load"),)] == 1


def test_gateways_are_bounded_and_the_longest_silent_one_goes() -> None:
    controller = _controller()
    for i in range(GATEWAYS_MAX + 5):
        controller.report_gateway(_gateway(f"g{i}"))
    names = {g["gateway_id"] for g in controller.state()["gateways"]}
    assert len(names) == GATEWAYS_MAX
    assert "g0" not in names


def test_plans_travel_to_serve_as_plain_values() -> None:
    wire = control_view.wire_plan(Plan("e", 3, 1_000.0, Mode.SHADOW, replicas_target=2, knobs={"r": Knobs(1)}))
    assert wire == {"epoch": "e", "seq": 3, "ttl_ms": 1_000.0, "mode": "shadow", "replicas_target": 2}
    assert type(wire["mode"]) is str


def test_gateways_hear_of_each_others_tasks_through_the_controller() -> None:
    controller = _controller()
    use = TaskUse("a", "t", TaskCounts(calls=2, tokens=50), 0.0, 0.0)
    first = controller.exchange_tasks("g1", "", 0, [use])
    assert first.epoch == controller.epoch
    second = controller.exchange_tasks("g2", "", 0, [])
    assert [(u.task, u.counts.calls, u.counts.tokens) for u in second.uses] == [("t", 2, 50)]
    assert controller.exchange_tasks("g2", second.epoch, second.seq, []).uses == ()


def test_what_a_decision_promised_stands_beside_what_it_did_once_it_is_judged() -> None:
    controller = _controller()
    controller.tick()
    result = controller._last
    assert result is not None
    decision = Decision(
        1, 1, "batch", "r1", {}, {}, acted=True, reason=Reason("WithinItl", ""), inputs={},
        predicted={"met_share": 0.95}, realised={"met_share": 0.8}, verdict=Verdict.WORSE,
    )  # fmt: skip
    control_view.update_telemetry(controller._telemetry, replace(result, judged=(decision,)))
    samples = _samples(controller)
    assert samples["tidegate_control_predicted_met_share", (("lever", "batch"),)] == 0.95
    assert samples["tidegate_control_realised_met_share", (("lever", "batch"),)] == 0.8
