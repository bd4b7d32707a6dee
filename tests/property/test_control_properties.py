"""Properties of the control loop, whatever is reported and in whatever order."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaling.recommend import ReplicaScaler
from autoscaling.stabilise import Ask, DownWindow, Stabiliser
from policies.affinity import AffinityLoop
from policies.batching import BatchTuner
from policies.batching.solve import OUT_OF_REACH_FACTOR, BatchPoint, solve, step_tokens_floor
from policies.config import (
    AffinityConfig,
    BatchingConfig,
    ControlConfig,
    ObjectivesConfig,
    PolicyConfig,
    ScalingConfig,
)
from policies.control.loop import ControlState, TickResult, tick
from policies.step_model import predict_step_ms
from policies.types import (
    FleetView,
    GatewayReport,
    Knobs,
    Reason,
    ReplicaReport,
    ReplicaState,
    Sampled,
    StepCoefficients,
)
from tests.examples import examples
from tests.unit.control.fleet import SECOND_NS, gateway_report, histogram, replica_report

CONFIG = PolicyConfig(scaling=ScalingConfig(replicas_max=6, down_window_s=5))
COEFFICIENTS = st.builds(
    StepCoefficients,
    st.floats(0, 200),
    st.floats(0, 10),
    st.floats(0, 10),
    st.floats(0, 5),
    st.integers(0, 1_000),
    st.none() | st.floats(0, 1),
)
COUNTS = st.integers(0, 5_000)
SMALL = st.integers(0, 40)


@st.composite
def replica_values(draw: st.DrawFn) -> dict[str, Any]:
    itl_ms = draw(st.floats(1, 10_000))
    hit = draw(COUNTS)
    return {
        "state": draw(st.sampled_from(list(ReplicaState))),
        "running": draw(SMALL),
        "waiting": draw(SMALL),
        "kv_tokens_used": draw(COUNTS),
        "kv_tokens_max": draw(st.sampled_from([0, 4_000, 40_000])),
        "prefill_tokens": draw(COUNTS),
        "decode_tokens": draw(COUNTS),
        "prefix_hit_tokens": hit,
        "prefix_query_tokens": hit + draw(COUNTS),
        "preemptions": draw(st.integers(0, 3)),
        "steps": draw(SMALL),
        "busy_share": draw(st.none() | st.floats(0, 1)),
        "itl": histogram(*[itl_ms] * draw(st.integers(0, 60))),
        "step_model": draw(st.none() | COEFFICIENTS),
    }


@st.composite
def gateway_values(draw: st.DrawFn) -> dict[str, Any]:
    prompt = draw(COUNTS)
    return {
        "arrivals": draw(SMALL),
        "prompt_tokens": draw(COUNTS),
        "output_tokens": draw(COUNTS),
        "succeeded": draw(SMALL),
        "inflight": draw(SMALL),
        "queued": draw(SMALL),
        "ttft": histogram(*[draw(st.floats(1, 100_000))] * draw(st.integers(0, 8))),
        "predicted_prompt_tokens": {"r0": prompt},
        "predicted_hit_tokens": {"r0": draw(st.integers(0, prompt))},
    }


SECONDS = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from(["r0", "r1", "r2"]), replica_values(), max_size=3),
        st.dictionaries(st.sampled_from(["g0", "g1"]), gateway_values(), max_size=2),
        st.none() | st.builds(FleetView, st.integers(0, 3), st.integers(1, 6), st.just(1), st.just(6)),
        st.integers(1, 8),
    ),
    min_size=1,
    max_size=12,
)


def run(config: PolicyConfig, seconds: Any, *, backwards: bool = False, twice: bool = False) -> list[TickResult]:
    state = ControlState(config, ReplicaScaler(config), "e")
    now_ns, results = 0, []
    for seq, (replicas, gateways, fleet, gap_s) in enumerate(seconds, start=1):
        now_ns += gap_s * SECOND_NS
        reports: list[ReplicaReport | GatewayReport] = [
            *(replica_report(name, seq, **values) for name, values in replicas.items()),
            *(gateway_report(name, seq, **values) for name, values in gateways.items()),
        ]
        for report in (reports[::-1] if backwards else reports) * (2 if twice else 1):
            if isinstance(report, ReplicaReport):
                state.receive_replica(report, now_ns)
            else:
                state.receive_gateway(report, now_ns)
        if fleet is not None:
            state.receive_fleet(fleet, now_ns)
        results.append(tick(state, now_ns))
    return results


@given(SECONDS)
@settings(max_examples=examples(60), deadline=None)
def test_order_of_arrival_and_duplicates_change_nothing(seconds: Any) -> None:
    plain = run(CONFIG, seconds)
    for other in (run(CONFIG, seconds, backwards=True), run(CONFIG, seconds, twice=True)):
        assert [(r.plan, r.decisions, r.conditions) for r in other] == [
            (r.plan, r.decisions, r.conditions) for r in plain
        ]


@given(SECONDS)
@settings(max_examples=examples(60), deadline=None)
def test_every_plan_is_within_its_bounds(seconds: Any) -> None:
    for result in run(CONFIG, seconds):
        plan = result.plan
        assert plan.replicas_target is None or 0 <= plan.replicas_target <= 6
        assert plan.affinity_strength is not None
        assert CONFIG.affinity.strength_min <= plan.affinity_strength <= 1
        for replica_id, knobs in plan.knobs.items():
            latest = next(r.latest for r in result.signals.replicas if r.replica_id == replica_id)
            assert knobs.running_seqs_max is None or 1 <= knobs.running_seqs_max <= latest.running_seqs_hard
            assert knobs.step_tokens_max is None or 16 <= knobs.step_tokens_max <= latest.step_tokens_hard


@given(SECONDS)
@settings(max_examples=examples(40), deadline=None)
def test_a_blind_tick_changes_no_wish(seconds: Any) -> None:
    before = None
    for result in run(CONFIG, seconds):
        if before is not None and result.signals.blind and result.signals.fleet is None:
            assert result.adaptation.replicas_target == before.adaptation.replicas_target
            assert result.adaptation.affinity_strength == before.adaptation.affinity_strength
            assert set(result.adaptation.knobs.items()) <= set(before.adaptation.knobs.items())
        before = result


@given(SECONDS)
@settings(max_examples=examples(40), deadline=None)
def test_shadow_acts_on_nothing_and_a_change_is_always_written(seconds: Any) -> None:
    from policies.types import Mode

    shadow = replace(CONFIG, control=ControlConfig(mode=Mode.SHADOW))
    before: int | None = None
    for result in run(shadow, seconds):
        assert (result.plan.replicas_target, result.plan.affinity_strength, result.plan.knobs) == (None, None, {})
        assert not any(d.acted for d in result.decisions)
        after = result.adaptation.replicas_target
        if before is not None and after is not None and after != before:
            assert [d for d in result.decisions if d.lever == "replicas" and d.after == {"replicas_target": after}]
        before = after


@given(
    COEFFICIENTS,
    st.integers(1, 300),
    COUNTS,
    st.integers(1, 256),
    st.integers(16, 8_192),
    st.floats(5, 2_000),
)
def test_solved_knobs_keep_what_can_be_reached_or_are_the_floor(
    model: StepCoefficients, running: int, kv_tokens: int, seqs_hard: int, tokens_hard: int, itl_ms: float
) -> None:
    config, objectives = BatchingConfig(), ObjectivesConfig(itl_ms=itl_ms)
    point = BatchPoint(model, running, kv_tokens, 40_000, seqs_hard, tokens_hard)
    knobs, _, predicted = solve(point, objectives, config)
    assert knobs.step_tokens_max is not None
    assert knobs.running_seqs_max is not None
    floor = step_tokens_floor(running, tokens_hard, config)
    assert floor <= knobs.step_tokens_max <= tokens_hard
    assert 1 <= knobs.running_seqs_max <= seqs_hard
    room = max(0, knobs.step_tokens_max - running)
    step_ms = predict_step_ms(model, running, kv_tokens, room)
    assert predicted["itl_ms"] == step_ms
    reach_ms = max(itl_ms, OUT_OF_REACH_FACTOR * predicted["decode_itl_ms"])
    assert knobs.step_tokens_max == floor or step_ms <= reach_ms + 1e-6


@given(st.lists(replica_values(), min_size=1, max_size=40))
@settings(max_examples=examples(40), deadline=None)
def test_an_engine_has_quiet_after_each_change_and_no_small_ones(reports: list[dict[str, Any]]) -> None:
    config = BatchingConfig(settle_ticks=3)
    tuner = BatchTuner(config, ObjectivesConfig())
    window: list[Sampled[ReplicaReport]] = []
    changed_at = []
    for i, values in enumerate(reports, start=1):
        window = [*window, Sampled(replica_report("r", i, **values), i * SECOND_NS)][-12:]
        move = tuner.step(window, i * SECOND_NS)
        assert move.after == tuner.wish
        if move.changed:
            changed_at.append(i)
    assert all(b - a > 3 for a, b in itertools.pairwise(changed_at))


@given(st.lists(st.tuples(COUNTS, COUNTS, COUNTS, COUNTS, st.booleans()), max_size=60), st.floats(0, 1))
def test_the_strength_moves_by_one_step_at_most_within_its_bounds(
    feeds: list[tuple[int, int, int, int, bool]], start: float
) -> None:
    config = AffinityConfig(step=0.1, strength_min=0.2, query_tokens_min=1_000)
    loop = AffinityLoop(config, start)
    for query, hit, prompt, predicted, hot_spot in feeds:
        loop.receive_replica(replica_report(prefix_query_tokens=query, prefix_hit_tokens=min(hit, query)))
        loop.receive_gateway(
            gateway_report(predicted_prompt_tokens={"r": prompt}, predicted_hit_tokens={"r": min(predicted, prompt)})
        )
        move = loop.step(hot_spot)
        assert abs(move.after - move.before) <= config.step + 1e-4
        assert config.strength_min <= move.after <= 1


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.booleans()), min_size=1, max_size=150))
def test_a_target_rises_after_up_ticks_asks_and_falls_only_to_what_the_window_saw(
    asks: list[tuple[int, int, bool]],
) -> None:
    config = ScalingConfig(replicas_max=6, up_ticks=3, down_window_s=8, up_replicas_max=2)
    stabiliser, target, history = Stabiliser(config), 2, []
    for i, (up, more, held) in enumerate(asks, start=1):
        serve = FleetView(target, target, 1, 6)
        stabiliser.adopt(serve, target, i * SECOND_NS)
        hold = Reason("HeldPartial", "") if held else None
        result = stabiliser.step(Ask(up, up + more - 1, Reason("Demand", "")), target, serve, hold, i * SECOND_NS)
        history.append((up, up + more - 1, held))
        assert 1 <= result.target <= 6
        if result.target > target:
            assert all(a > target for a, _, _ in history[-3:])
            assert result.target <= target + 2
        if result.target < target:
            assert not held
            assert len(history) > 8
            assert result.target >= min(6, max(d for _, d, h in history[-8:] if not h))
        target = result.target


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 3_000)), min_size=1, max_size=200))
def test_the_down_window_never_forgets_too_early(asks: list[tuple[int, int]]) -> None:
    window_ns = 10 * SECOND_NS
    window, now_ns, seen = DownWindow(window_ns), 0, []
    for ask, gap_ms in asks:
        now_ns += gap_ms * 1_000_000
        window.add(ask, now_ns)
        seen.append((now_ns, ask))
        highest = window.highest(now_ns)
        if highest is not None:
            assert highest >= max(a for t, a in seen if t > now_ns - window_ns)
            assert highest <= max(a for t, a in seen if t >= now_ns - window_ns * 2)


def test_knobs_without_opinion_are_left_out_of_no_plan() -> None:
    state = ControlState(CONFIG, ReplicaScaler(CONFIG), "e")
    state.receive_replica(replica_report("r0", 1, step_model=None), 0)
    assert tick(state, 0).plan.knobs == {"r0": Knobs()}
