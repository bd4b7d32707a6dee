from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from policies.batching.brake import BRAKE_QUIET_TICKS
from policies.batching.outcome import ITL_SHARE_MIN
from policies.batching.pace import RAISE_SHARE_MIN, RAISE_TICKS
from policies.batching.solve import (
    BATCH_FACTOR_MIN,
    DECODE_SHARE,
    KEEP_UP_STEPS,
    OUT_OF_REACH_FACTOR,
    PREFILL_TOKENS_MIN,
    BatchPoint,
    solve,
    step_tokens_floor,
    trusted,
)
from policies.config import ObjectivesConfig
from policies.step_model import predict_step_ms
from policies.types import Knobs, StepCoefficients
from tests.unit.batching_rig import CONFIG, OBJECTIVES, Replica, point
from tests.unit.control.fleet import CPU_STEP, histogram

# --- solve ------------------------------------------------------------------------------------------------------------


def test_a_long_prompt_joining_16_streams_stretches_a_gap_to_a_fifth_of_the_untuned_engines_at_most() -> None:
    knobs, reason, predicted = solve(point(), OBJECTIVES, CONFIG)
    assert predict_step_ms(CPU_STEP, 16, 4_800, 0) == pytest.approx(60, abs=1)
    assert knobs.step_tokens_max is not None
    assert 80 <= knobs.step_tokens_max <= 128
    assert reason.code == "WithinItl"
    assert predicted["itl_ms"] <= OBJECTIVES.itl_ms
    untuned_ms = predict_step_ms(CPU_STEP, 16, 4_800, 900)
    assert predicted["itl_ms"] <= untuned_ms / 5


def test_the_budget_is_the_largest_that_the_model_allows() -> None:
    knobs, _, _ = solve(point(), OBJECTIVES, CONFIG)
    assert knobs.step_tokens_max is not None
    more = knobs.step_tokens_max + 8 - 16
    assert predict_step_ms(CPU_STEP, 16, 4_800, more) > OBJECTIVES.itl_ms


def test_one_stream_gets_about_the_same_budget_as_sixteen_because_prefill_is_what_costs() -> None:
    one, _, _ = solve(point(running=1, kv_tokens=300), OBJECTIVES, CONFIG)
    many, _, _ = solve(point(), OBJECTIVES, CONFIG)
    assert one.step_tokens_max is not None
    assert many.step_tokens_max is not None
    assert abs(one.step_tokens_max - many.step_tokens_max) <= 16


def test_a_fast_engine_keeps_its_start_up_budget() -> None:
    h200 = StepCoefficients(6.1, 0.02, 0.029, 0.015, samples=1_000)
    knobs, _, _ = solve(point(model=h200), OBJECTIVES, CONFIG)
    assert knobs == Knobs(16, 2_048)


def test_an_objective_out_of_reach_leaves_the_floor_and_says_so() -> None:
    knobs, reason, predicted = solve(point(), replace(OBJECTIVES, itl_ms=50.0), CONFIG)
    assert knobs.step_tokens_max == CONFIG.step_tokens_min
    assert reason.code == "OutOfReach"
    assert predicted["itl_ms"] > 50


def test_beyond_the_objective_a_prompt_progresses_and_at_most_doubles_the_gap() -> None:
    knobs, reason, _ = solve(point(running=100, running_seqs_hard=128), replace(OBJECTIVES, itl_ms=10.0), CONFIG)
    assert reason.code == "OutOfReach"
    assert knobs.step_tokens_max is not None
    assert knobs.step_tokens_max >= 100 + PREFILL_TOKENS_MIN
    decode_ms = predict_step_ms(CPU_STEP, 100, point().kv_tokens, 0)
    full_ms = predict_step_ms(CPU_STEP, 100, point().kv_tokens, knobs.step_tokens_max - 100)
    assert full_ms <= OUT_OF_REACH_FACTOR * decode_ms


def test_the_floor_never_exceeds_the_start_up_value() -> None:
    assert step_tokens_floor(running=100, step_tokens_hard=64, config=CONFIG) == 64
    knobs, _, _ = solve(point(step_tokens_hard=32), OBJECTIVES, CONFIG)
    assert knobs.step_tokens_max == 32


def test_prefill_alone_gets_the_whole_budget() -> None:
    knobs, reason, _ = solve(point(prefill_only=True), OBJECTIVES, CONFIG)
    assert knobs.step_tokens_max == 2_048
    assert reason.code == "PrefillOnly"


def test_running_sequences_are_capped_where_their_decode_step_would_miss_the_objective() -> None:
    knobs, _, _ = solve(point(running_seqs_hard=256), OBJECTIVES, CONFIG)
    assert knobs.running_seqs_max is not None
    n = knobs.running_seqs_max
    limit = OBJECTIVES.itl_ms * DECODE_SHARE
    assert predict_step_ms(CPU_STEP, n, n * 300, 0) <= limit < predict_step_ms(CPU_STEP, n + 1, (n + 1) * 300, 0)


def test_running_sequences_are_capped_where_their_kv_would_not_fit() -> None:
    knobs, _, _ = solve(
        point(running=8, kv_tokens=4_000, kv_tokens_max=6_000, running_seqs_hard=64), OBJECTIVES, CONFIG
    )
    assert knobs.running_seqs_max == 12


def test_a_few_long_sequences_in_an_empty_cache_do_not_cap_the_batch() -> None:
    knobs, _, _ = solve(point(running=2, kv_tokens=4_000, kv_tokens_max=20_000), OBJECTIVES, CONFIG)
    assert knobs.running_seqs_max == 16


def test_unknown_kv_leaves_the_start_up_value() -> None:
    assert solve(point(running=1, kv_tokens=0), OBJECTIVES, CONFIG)[0].running_seqs_max == 16
    assert solve(point(kv_tokens_max=0), OBJECTIVES, CONFIG)[0].running_seqs_max == 16


def test_the_least_allowed_number_of_sequences_holds() -> None:
    steep = replace(CPU_STEP, b_ms=500.0)
    knobs, _, _ = solve(point(model=steep), replace(OBJECTIVES, itl_ms=5.0), replace(CONFIG, running_seqs_min=4))
    assert knobs.running_seqs_max == 4


def test_an_objective_that_not_even_one_sequence_meets_does_not_starve_the_engine() -> None:
    knobs, _, _ = solve(point(running_seqs_hard=64), replace(OBJECTIVES, itl_ms=5.0), CONFIG)
    n, per_seq = knobs.running_seqs_max, point().kv_tokens / point().running
    assert n is not None
    one_ms = predict_step_ms(CPU_STEP, 1, per_seq, 0)
    assert predict_step_ms(CPU_STEP, n, n * per_seq, 0) <= BATCH_FACTOR_MIN * one_ms
    assert predict_step_ms(CPU_STEP, n + 1, (n + 1) * per_seq, 0) > BATCH_FACTOR_MIN * one_ms


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (None, False),
        (replace(CPU_STEP, samples=31), False),
        (replace(CPU_STEP, samples=32), True),
        (replace(CPU_STEP, error_share=None), True),
        (replace(CPU_STEP, error_share=0.9), False),
    ],
)
def test_a_model_is_trusted_after_enough_steps_it_predicts_well(model: StepCoefficients | None, expected: bool) -> None:
    assert trusted(model, CONFIG) is expected


# --- tuner ------------------------------------------------------------------------------------------------------------


def test_nothing_is_touched_before_the_model_is_trusted() -> None:
    r = Replica()
    move = r.second(step_model=replace(CPU_STEP, samples=0))
    assert not move.changed
    assert move.reason.code == "ModelUntrusted"
    assert r.tuner.wish == Knobs()


def test_a_safe_budget_is_set_as_soon_as_the_model_is_known_even_when_idle() -> None:
    r = Replica()
    move = r.second(running=0, kv_tokens_used=0, steps=0, decode_tokens=0, itl=histogram())
    assert move.changed
    assert move.after.step_tokens_max is not None
    assert 80 <= move.after.step_tokens_max <= 128


def test_a_steady_load_changes_nothing_more() -> None:
    r = Replica()
    r.seconds(60)
    assert len(r.changes) == 1
    assert r.moves[-1].reason.code == "Steady"


def test_silence_and_idleness_keep_the_wish() -> None:
    r = Replica()
    r.seconds(5)
    wish = r.tuner.wish
    assert r.tuner.step([], r.now_ns).after == wish
    moves = r.seconds(30, running=0, kv_tokens_used=0, steps=0, decode_tokens=0, itl=histogram())
    assert {m.after for m in moves} == {wish}
    assert moves[-1].reason.code == "Idle"


def test_a_new_controller_takes_over_the_knobs_in_force() -> None:
    r = Replica()
    r.second(knobs=Knobs(16, 84, None))
    assert r.moves[0].before.step_tokens_max == 84
    assert not r.changes[:1] or r.changes[0].before.step_tokens_max == 84
    assert r.tuner.wish.step_tokens_max == 84


def test_the_engine_is_left_alone_while_it_settles() -> None:
    r = Replica(replace(CONFIG, settle_ticks=3))
    r.second()
    slow = replace(CPU_STEP, d_ms=6.0)
    moves = r.seconds(4, step_model=slow)
    assert [m.changed for m in moves] == [False, False, False, True]
    assert moves[0].reason.code == "Settling"


def test_a_slower_engine_is_relieved_at_once_a_faster_one_is_pushed_slowly_and_by_a_bounded_factor() -> None:
    r = Replica(replace(CONFIG, settle_ticks=0))
    r.second()
    assert r.second(step_model=replace(CPU_STEP, d_ms=3.8)).changed
    low = r.tuner.wish.step_tokens_max
    moves = r.seconds(RAISE_TICKS, step_model=replace(CPU_STEP, d_ms=0.1))
    assert [m.changed for m in moves[:-1]] == [False] * (RAISE_TICKS - 1)
    assert moves[-1].changed
    assert low is not None
    assert r.tuner.wish.step_tokens_max == pytest.approx(low * CONFIG.step_tokens_up_factor_max, abs=1)


def test_a_budget_rises_even_with_a_small_bound_on_its_factor() -> None:
    r = Replica(replace(CONFIG, settle_ticks=0, step_tokens_up_factor_max=1.1))
    r.second()
    before = r.tuner.wish.step_tokens_max
    r.seconds(RAISE_TICKS, step_model=replace(CPU_STEP, d_ms=0.1))
    assert before is not None
    assert before < (r.tuner.wish.step_tokens_max or 0) <= before * 1.1


def test_changes_below_a_tenth_are_not_made() -> None:
    r = Replica(replace(CONFIG, settle_ticks=0))
    r.second()
    r.seconds(30, step_model=replace(CPU_STEP, d_ms=CPU_STEP.d_ms * 1.05))
    r.seconds(30, step_model=replace(CPU_STEP, d_ms=CPU_STEP.d_ms * 0.95))
    assert len(r.changes) == 1


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_a_fifth_changes_direction_at_most_once_in_ten_minutes(seed: int) -> None:
    rng = random.Random(seed)
    r = Replica()
    for _ in range(600):
        r.second(
            step_model=replace(CPU_STEP, d_ms=CPU_STEP.d_ms * rng.uniform(0.8, 1.2)), running=rng.choice((13, 16, 16))
        )
    values = [m.after.step_tokens_max or 0 for m in r.changes]
    signs = [b > a for a, b in itertools.pairwise(values)]
    assert sum(a != b for a, b in itertools.pairwise(signs)) <= 1


def test_more_streams_than_the_budget_has_room_for_raise_it_at_once() -> None:
    r = Replica(replace(CONFIG, settle_ticks=0))
    r.second(running_seqs_hard=256)
    move = r.second(running=120, kv_tokens_used=12_000, running_seqs_hard=256)
    assert move.changed
    assert (move.after.step_tokens_max or 0) >= 120 + PREFILL_TOKENS_MIN


def test_prompts_without_any_decoding_raise_the_budget_to_the_start_up_value() -> None:
    r = Replica(replace(CONFIG, settle_ticks=0))
    r.second()
    r.seconds(80, running=1, kv_tokens_used=500, prefill_tokens=500, decode_tokens=1, itl=histogram())
    assert r.tuner.wish.step_tokens_max == 2_048
    assert r.changes[-1].reason.code == "PrefillOnly"


def test_gaps_above_the_objective_shrink_the_budget_by_the_measured_ratio() -> None:
    r = Replica()
    r.seconds(5)
    before = r.tuner.wish.step_tokens_max or 0
    moves = r.seconds(12, itl=histogram(*[390.0] * 20))
    changed = [m for m in moves if m.changed]
    assert changed[0].reason.code == "OutcomeCorrection"
    measured = histogram(390.0).quantile_ms(0.95)
    assert measured is not None
    room_ms = OBJECTIVES.itl_ms * OBJECTIVES.itl_ms / measured - predict_step_ms(CPU_STEP, 16, 4_800, 0)
    expected = 16 + room_ms / CPU_STEP.d_ms
    assert changed[0].after.step_tokens_max == pytest.approx(max(expected, 64), abs=8)
    assert changed[0].after.step_tokens_max is not None
    assert changed[0].after.step_tokens_max < before


def test_the_correction_is_bounded_and_one_outcome_is_judged_once() -> None:
    r = Replica(replace(CONFIG, step_tokens_min=16))
    r.seconds(300, itl=histogram(*[3_000.0] * 20))
    assert r.changes[-1].inputs["itl_share"] is not None
    assert float(r.changes[-1].inputs["itl_share"]) >= ITL_SHARE_MIN
    assert (r.tuner.wish.step_tokens_max or 0) >= 16 + PREFILL_TOKENS_MIN
    assert len(r.changes) <= 4


def test_one_outcome_shrinks_the_aim_once() -> None:
    r = Replica(replace(CONFIG, step_tokens_min=88, settle_ticks=0))
    r.second(itl=histogram(), prefill_tokens=0)
    r.seconds(2, itl=histogram(*[250.0] * 25))
    aim = r.tuner._outcome.itl_share
    assert aim < 0.8
    r.seconds(20, itl=histogram(*[250.0] * 25))
    assert r.tuner._outcome.itl_share == aim, "the same again says nothing new of the same budget"
    r.seconds(12, itl=histogram(*[390.0] * 25))
    assert r.tuner._outcome.itl_share < aim


def test_the_models_value_returns_when_gaps_are_well_below_the_objective() -> None:
    r = Replica()
    r.seconds(5)
    before = r.tuner.wish.step_tokens_max or 0
    r.seconds(12, itl=histogram(*[390.0] * 20))
    lowered = r.tuner.wish.step_tokens_max or 0
    r.seconds(120, itl=histogram(*[60.0] * 20))
    after = r.tuner.wish.step_tokens_max or 0
    assert lowered < after <= before
    assert after * (1 + RAISE_SHARE_MIN) > before


def test_outcomes_of_other_knobs_than_the_wish_are_not_judged() -> None:
    r = Replica()
    r.second()
    r.seconds(30, obey=False, knobs=Knobs(16, 2_048, None), itl=histogram(*[3_000.0] * 20))
    assert len(r.changes) == 1


def test_preemptions_brake_running_sequences_once_per_outcome() -> None:
    r = Replica(replace(CONFIG, settle_ticks=2))
    r.seconds(5)
    move = r.second(preemptions=3)
    assert move.reason.code == "PreemptionBrake"
    assert move.after.running_seqs_max == 12
    moves = r.seconds(6, running=12)
    assert not any(m.changed for m in moves)


def test_the_brake_starts_from_what_ran_when_that_was_less() -> None:
    r = Replica()
    r.seconds(20, running=4, kv_tokens_used=1_200)
    move = r.second(preemptions=1, running=4, kv_tokens_used=1_200)
    assert move.after.running_seqs_max == 3


def test_the_brake_never_goes_below_the_least_allowed() -> None:
    r = Replica(replace(CONFIG, settle_ticks=0, running_seqs_min=2))
    for _ in range(40):
        running = r.tuner.wish.running_seqs_max or 16
        r.second(preemptions=1, running=running, kv_tokens_used=300 * running)
    assert r.tuner.wish.running_seqs_max == 2


def test_the_brake_works_for_shares_close_to_one() -> None:
    r = Replica(replace(CONFIG, preemption_brake=0.99))
    r.seconds(5)
    assert r.second(preemptions=1).after.running_seqs_max == 15


def test_the_brake_is_released_slowly_to_the_models_value() -> None:
    r = Replica()
    r.seconds(5)
    r.second(preemptions=1)
    assert r.tuner.wish.running_seqs_max == 12
    r.seconds(BRAKE_QUIET_TICKS)
    assert r.tuner.wish.running_seqs_max == 12
    r.seconds(20 * BRAKE_QUIET_TICKS)
    assert r.tuner.wish.running_seqs_max == 16


# --- keeping up with prompts ------------------------------------------------------------------------------------------

GPU = StepCoefficients(a_ms=7.0, b_ms=0.025, c_ms=0.05, d_ms=0.02, samples=1_000, error_share=0.02)
"""About an H100 with an 8B model: 16 streams of 10,000 tokens take 15.4 ms a step."""
TIGHT = ObjectivesConfig(itl_ms=50.0)


def gpu_point(**changes: Any) -> BatchPoint:
    values: dict[str, Any] = {"model": GPU, "kv_tokens": 160_000, "kv_tokens_max": 450_000, "step_tokens_hard": 8_192}
    return point(**(values | changes))


def test_few_prompts_leave_the_budget_to_the_gaps() -> None:
    knobs, reason, _ = solve(gpu_point(prefill_tps=2_000.0), TIGHT, CONFIG)
    assert reason.code == "WithinItl"
    assert knobs.step_tokens_max == solve(gpu_point(), TIGHT, CONFIG)[0].step_tokens_max


def test_an_aim_that_shrank_does_not_let_prompts_queue() -> None:
    # 10,000 tokens/s, three times as fast: 30 a ms. room * (1 - 0.6) = 30 * 15.4: 1,155 tokens beside 16 streams.
    shrunk = gpu_point(itl_share=0.35)
    assert (solve(shrunk, TIGHT, CONFIG)[0].step_tokens_max or 0) < 150
    knobs, reason, _ = solve(replace(shrunk, prefill_tps=10_000.0), TIGHT, CONFIG)
    assert reason.code == "KeepsUp"
    assert knobs.step_tokens_max == pytest.approx(1_171, abs=2)


def test_keeping_up_stretches_a_step_to_the_objective_or_three_decode_steps_at_most() -> None:
    def step_ms(p: BatchPoint) -> float:
        tokens = solve(p, TIGHT, CONFIG)[0].step_tokens_max or 0
        return predict_step_ms(GPU, p.running, p.kv_tokens, tokens - p.running)

    flood = gpu_point(prefill_tps=40_000.0, itl_share=0.25)
    assert step_ms(flood) == pytest.approx(50.0, abs=0.1)
    heavy = replace(flood, kv_tokens=400_000)
    assert step_ms(heavy) == pytest.approx(KEEP_UP_STEPS * predict_step_ms(GPU, 16, 400_000, 0), abs=0.1)
    assert solve(replace(flood, step_tokens_hard=512), TIGHT, CONFIG)[0].step_tokens_max == 512


def test_a_flood_of_prompts_raises_a_shrunk_budget_at_once_and_a_lull_does_not_lower_it_at_once() -> None:
    r = Replica(replace(CONFIG, settle_ticks=0), TIGHT)
    quiet: dict[str, Any] = {
        "step_model": GPU, "kv_tokens_used": 160_000, "kv_tokens_max": 450_000, "step_tokens_hard": 8_192,
        "running_seqs_hard": 256, "itl": histogram(*[20.0] * 20),
    }  # fmt: skip
    r.seconds(3, **quiet)
    r.tuner._outcome.itl_share = 0.35
    r.seconds(3, **quiet)
    low = r.tuner.wish.step_tokens_max or 0
    flood = r.second(**quiet, prefill_tokens=120_000)
    assert flood.reason.code == "KeepsUp"
    assert (flood.after.step_tokens_max or 0) > 2 * low
    high = flood.after.step_tokens_max or 0
    r.tuner._outcome.itl_share = 0.35
    assert all(m.after.step_tokens_max == high for m in r.seconds(8, **quiet))
