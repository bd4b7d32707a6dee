"""The modelled engine, case by case; that it equals a plain one is in tests/property/test_sim_engine.py."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest

from autoscaling.simulator.engine import Job, SimEngine
from autoscaling.simulator.spec import EngineProfile, SimRequest, StepLaw
from policies.types import Knobs

MS = 1_000_000
LAW = StepLaw(a_ms=10.0, b_ms=0.0, c_ms=0.0, d_ms=0.0)
"""Every step takes 10 ms."""
PROFILE = EngineProfile("test", "none", 1, "none", LAW, 16_000, 8_000, 0.0, 0.0, "made up", step_tokens_max=512)


def request(
    index: int, prompt: int, output: int, blocks: tuple[int, ...] = (), after: tuple[int, ...] = ()
) -> SimRequest:
    return SimRequest(index, 0, prompt, output, blocks, 64, after)


def job(index: int, prompt: int, output: int, blocks: tuple[int, ...] = ()) -> Job:
    return Job(request(index, prompt, output, blocks), output)


def finish(engine: SimEngine) -> list[tuple[float, str, int]]:
    """Run dry; events as (ms, kind, index)."""
    events: list[tuple[float, str, int]] = []
    while (at_ns := engine.wake_ns()) is not None:
        events += [(e.at_ns / MS, e.kind, e.job.request.index) for e in engine.advance(at_ns)]
    return events


def engine_of(profile: EngineProfile = PROFILE, *, learn: bool = False) -> SimEngine:
    return SimEngine(profile, Random(1), learn)


# --- time -------------------------------------------------------------------------------------------------------------


def test_one_request_takes_a_step_for_its_prompt_and_one_for_each_further_token() -> None:
    engine = engine_of()
    engine.submit(job(0, 100, 5), 0)
    assert finish(engine) == [(10, "first_token", 0), (50, "finished", 0)]


def test_a_run_of_decode_steps_lasts_as_long_as_the_law_says_step_by_step() -> None:
    law = StepLaw(a_ms=8.123, b_ms=0.0517, c_ms=0.0613, d_ms=0.0291, e_ms=1.7)
    engine = engine_of(replace(PROFILE, law=law))
    engine.submit(job(0, 300, 1_001), 0)
    expected = law.step_ms(1, 0, 300, 300 * 150) + sum(law.step_ms(1, 300 + i) for i in range(1_000))
    assert finish(engine)[-1][0] == pytest.approx(expected, rel=5e-5)


def test_a_long_prompt_is_computed_in_chunks_that_cost_their_attention() -> None:
    law = StepLaw(a_ms=5.0, b_ms=0.5, c_ms=0.1, d_ms=0.02, e_ms=3.0)
    engine = engine_of(replace(PROFILE, law=law))
    engine.submit(job(0, 5 * 512 + 100, 1), 0)
    expected = sum(law.step_ms(1, 512 * i, 512, 512 * (512 * i + 256)) for i in range(5))
    expected += law.step_ms(1, 2_560, 100, 100 * (2_560 + 50))
    assert finish(engine)[0][0] == pytest.approx(expected, rel=1e-6)
    assert engine.take_window(10**12).steps == 6


def test_measured_batch_table_is_interpolated_and_goes_on_beyond_its_end() -> None:
    law = StepLaw(0, 0, 0, 0, batch=((1, 4.0), (8, 4.7), (64, 10.3)))
    assert [law.batch_ms(n) for n in (0, 1, 8, 36, 64, 120)] == pytest.approx([4.0, 4.0, 4.7, 7.5, 10.3, 15.9])
    assert StepLaw(1, 0, 0, 0, batch=((4, 2.0),)).batch_ms(9) == 2.0


def test_jitter_is_that_of_single_steps_and_repeats_with_the_seed() -> None:
    profile = replace(PROFILE, law=replace(LAW, jitter_share=0.1))

    def ends(seed: int, output: int) -> list[float]:
        engine = SimEngine(profile, Random(seed))
        for i in range(300):
            engine.submit(job(i, 100, output), i * 10**12)
        return [at for at, kind, _ in finish(engine) if kind == "finished"]

    assert ends(1, 2) == ends(1, 2) != ends(2, 2)
    engine = SimEngine(profile, Random(3))
    took: list[int] = []
    for i in range(400):
        begin = i * 10**12
        engine.submit(job(i, 100, 101), begin)
        while (at_ns := engine.wake_ns()) is not None:
            took += [e.at_ns - (e.job.first_token_ns or 0) for e in engine.advance(at_ns) if e.kind == "finished"]
    mean = sum(took) / len(took)
    deviation = math.sqrt(sum((t - mean) ** 2 for t in took) / len(took))
    assert mean == pytest.approx(1_000 * MS, rel=0.002)
    assert deviation == pytest.approx(10 * MS, rel=0.15)  # 10 ms * 0.1 * sqrt(100)


# --- who joins when ---------------------------------------------------------------------------------------------------


def test_an_arrival_joins_at_the_next_step_and_delays_nobody_else_by_more_than_its_prompt() -> None:
    engine = engine_of()
    engine.submit(job(0, 100, 20), 0)
    engine.submit(job(1, 100, 2), 95 * MS)
    assert finish(engine) == [
        (10, "first_token", 0), (110, "first_token", 1), (120, "finished", 1), (200, "finished", 0)
    ]  # fmt: skip


def test_with_async_scheduling_it_joins_one_step_later_unless_the_engine_is_idle() -> None:
    engine = engine_of(replace(PROFILE, async_scheduling=True))
    engine.submit(job(0, 100, 20), 0)
    engine.submit(job(1, 100, 2), 95 * MS)
    assert [e[0] for e in finish(engine) if e[1] == "first_token"] == [10, 120]


@pytest.mark.parametrize("scarce", [{"running_seqs_max": 2}, {"kv_tokens": 160, "context_tokens_max": 160}])
def test_with_async_scheduling_a_place_is_free_one_step_after_its_job_ended(scarce: dict[str, int]) -> None:
    for ahead, end, first in ((False, 50, 60), (True, 60, 80)):
        engine = engine_of(replace(PROFILE, async_scheduling=ahead, **scarce))  # type: ignore[arg-type]
        for one in (job(0, 10, 30), job(1, 100, 4), job(2, 100, 1)):
            engine.submit(one, 0)
        events = finish(engine)
        assert (end, "finished", 1) in events
        assert (first, "first_token", 2) in events


def test_decoding_goes_on_beside_a_long_prompt_and_gets_its_tokens_first() -> None:
    engine = engine_of()
    engine.submit(job(0, 100, 30), 0)
    engine.submit(job(1, 1_200, 1), 15 * MS)
    events = finish(engine)
    assert (50, "first_token", 1) in events  # 511 + 511 + 178 tokens from 20 ms on
    assert events[-1] == (300, "finished", 0)


def test_requests_are_admitted_in_order_and_never_more_than_the_limit() -> None:
    engine = engine_of(replace(PROFILE, running_seqs_max=2))
    for i in range(4):
        engine.submit(job(i, 10, 3), 0)
    assert engine.gauges(5 * MS).waiting == 3  # the first was alone when it came
    firsts = [(at, i) for at, kind, i in finish(engine) if kind == "first_token"]
    assert firsts == [(10, 0), (20, 1), (40, 2), (50, 3)]


def test_a_prompt_without_room_holds_up_those_behind_it_unless_only_chunks_are_reserved() -> None:
    small = replace(PROFILE, kv_tokens=1_600)
    for reserve, second in ((True, 310), (False, 50)):
        engine = engine_of(replace(small, reserve_full_prompt=reserve))
        engine.submit(job(0, 800, 30), 0)
        engine.submit(job(1, 900, 1), 5 * MS)
        engine.submit(job(2, 10, 1), 6 * MS)
        times = {i: at for at, kind, i in finish(engine) if kind == "first_token"}
        assert times[2] >= times[1]
        assert times[1] >= second


def test_live_settings_hold_from_the_next_step_and_never_throw_anyone_out() -> None:
    engine = engine_of()
    for i in range(3):
        engine.submit(job(i, 10, 50), 0)
    engine.set_knobs(Knobs(running_seqs_max=1, step_tokens_max=1), 25 * MS)
    engine.submit(job(3, 100, 1), 26 * MS)
    gauges = engine.gauges(40 * MS)
    assert (gauges.running, gauges.waiting, gauges.running_seqs_now, gauges.step_tokens_now) == (3, 1, 3, 16)
    engine.set_knobs(Knobs(), 45 * MS)
    assert (60, "first_token", 3) in finish(engine)


def test_a_small_token_budget_slows_prompts_only() -> None:
    engine = engine_of()
    engine.submit(job(0, 10, 20), 0)
    engine.set_knobs(Knobs(step_tokens_max=21), 5 * MS)
    engine.submit(job(1, 100, 1), 5 * MS)
    assert finish(engine) == [
        (10, "first_token", 0), (60, "first_token", 1), (60, "finished", 1), (200, "finished", 0)
    ]  # fmt: skip


# --- KV cache ---------------------------------------------------------------------------------------------------------


def test_a_known_beginning_is_not_computed_again() -> None:
    engine = engine_of()
    engine.submit(job(0, 300, 1, (1, 2, 3, 4)), 0)
    finish(engine)
    second, third = job(1, 300, 1, (1, 2, 3, 9)), job(2, 256, 1, (1, 2, 3, 4))
    engine.submit(second, 10**9)
    engine.submit(third, 2 * 10**9)
    finish(engine)
    window = engine.take_window(10**10)
    assert (second.cached_tokens, third.cached_tokens) == (192, 192)  # the last token is always computed
    assert (window.prefix_query_tokens, window.prefix_hit_tokens) == (856, 384)
    assert window.prefill_tokens == 856 - 384


def test_cached_blocks_that_nobody_holds_are_no_room_beside_themselves() -> None:
    engine = engine_of(replace(PROFILE, kv_tokens=160, context_tokens_max=160))
    engine.submit(job(0, 128, 1, (1, 2)), 0)
    engine.submit(job(1, 30, 3), 20 * MS)
    engine.submit(job(2, 140, 1, (1, 2)), 25 * MS)  # 8 of its 9 blocks are cached, and 8 are not held by others
    assert finish(engine)[2:] == [
        (30, "first_token", 1), (50, "finished", 1), (60, "first_token", 2), (60, "finished", 2)
    ]  # fmt: skip


def test_blocks_are_findable_in_the_step_that_computes_them() -> None:
    engine = engine_of(replace(PROFILE, law=replace(LAW, a_ms=10.0)))
    engine.submit(job(9, 10, 3), 0)
    first, second = job(0, 128, 1, (1, 2)), job(1, 130, 1, (1, 2))
    engine.submit(first, MS)
    engine.submit(second, 2 * MS)
    finish(engine)
    assert (first.cached_tokens, second.cached_tokens, first.first_token_ns) == (0, 128, second.first_token_ns)


def test_the_output_is_findable_where_its_hashes_are_known() -> None:
    engine = engine_of()
    engine.submit(Job(request(0, 100, 100, (1,), (1, 2, 3)), 100), 0)
    finish(engine)
    follow_up = job(1, 250, 1, (1, 2, 3))
    engine.submit(follow_up, 10**10)
    finish(engine)
    assert follow_up.cached_tokens == 192


def test_the_youngest_is_preempted_and_computes_its_text_again() -> None:
    profile = replace(PROFILE, kv_tokens=160, context_tokens_max=160, prefix_cache=False)
    engine = engine_of(profile)
    old, young = job(0, 64, 40), job(1, 64, 40)
    engine.submit(old, 0)
    engine.submit(young, MS)
    events = finish(engine)
    assert (old.preemptions, young.preemptions) == (0, 1)
    assert [e[2] for e in events if e[1] == "finished"] == [0, 1]
    window = engine.take_window(10**10)
    assert window.preemptions == 1
    assert window.prefill_tokens > 64 + 64
    assert window.decode_tokens == 80
    assert engine.gauges(10**10).kv_tokens_used == 0


def test_what_others_left_of_its_blocks_is_found_again_after_a_preemption() -> None:
    def recomputed(cached: bool) -> int:
        profile = replace(PROFILE, kv_tokens=320, context_tokens_max=320, prefix_cache=cached)
        engine = engine_of(profile)
        engine.submit(job(0, 64, 100), 0)
        engine.submit(job(1, 128, 100), MS)
        finish(engine)
        return engine.take_window(10**10).prefill_tokens - 192

    assert 0 < recomputed(cached=True) < recomputed(cached=False)


def test_kv_use_is_shown_in_whole_blocks_while_it_grows() -> None:
    engine = engine_of()
    engine.submit(job(0, 30, 100), 0)
    shown = [engine.gauges(at * MS).kv_tokens_used for at in (5, 15, 25, 35, 45, 195)]
    assert shown == [32, 32, 32, 48, 48, 64]  # token 31 in the step from 10 ms, 33 in that from 30 ms
    assert engine.gauges(5 * MS + 10**12).kv_tokens_used == 0


# --- split fleets -----------------------------------------------------------------------------------------------------


def test_a_prefill_job_ends_with_its_first_token_and_leaves_its_prompt_in_the_cache() -> None:
    engine = engine_of()
    engine.submit(Job(request(0, 200, 50, (1, 2, 3)), 50, prefill_only=True), 0)
    assert finish(engine) == [(10, "first_token", 0), (10, "finished", 0)]
    again = job(1, 200, 1, (1, 2, 3))
    engine.submit(again, 10**9)
    finish(engine)
    assert again.cached_tokens == 192


def test_a_job_whose_kv_came_with_it_takes_its_blocks_and_computes_one_token() -> None:
    engine = engine_of(replace(PROFILE, law=replace(LAW, d_ms=1.0)))
    ready = Job(request(0, 2_000, 3), 3, kv_ready=True)
    engine.submit(ready, 0)
    assert engine.gauges(MS).kv_tokens_used == 2_000
    assert finish(engine) == [(11, "first_token", 0), (31, "finished", 0)]
    window = engine.take_window(10**9)
    assert (window.prefill_tokens, window.prefix_query_tokens, ready.cached_tokens) == (1, 0, 0)


def test_a_job_whose_kv_came_with_it_waits_for_room_and_recomputes_after_a_preemption() -> None:
    engine = engine_of(replace(PROFILE, kv_tokens=256, context_tokens_max=256, prefix_cache=False))
    first, second = Job(request(0, 100, 100), 100, kv_ready=True), Job(request(1, 100, 100), 100, kv_ready=True)
    third = Job(request(2, 100, 2), 2, kv_ready=True)
    for i, one in enumerate((first, second, third)):
        engine.submit(one, i * MS)
    finish(engine)
    assert (first.preemptions, second.preemptions >= 1) == (0, True)
    assert engine.take_window(10**11).prefill_tokens > 100
    assert second.finished_ns is not None
    assert third.first_token_ns is not None
    assert third.first_token_ns > second.first_token_ns  # type: ignore[operator]


# --- ends, faults, limits ---------------------------------------------------------------------------------------------


def test_an_aborted_job_is_silent_and_gives_its_blocks_back_at_the_boundary() -> None:
    engine = engine_of()
    running, kept = job(0, 100, 50), job(1, 100, 5)
    engine.submit(running, 0)
    engine.submit(kept, 0)
    engine.abort(running, 35 * MS)
    engine.abort(running, 36 * MS)
    assert (running.aborted, running.output_done) == (True, 3)
    assert engine.gauges(36 * MS).running == 2
    assert engine.gauges(41 * MS).running == 1
    assert [e[2] for e in finish(engine) if e[1] == "finished"] == [1]
    window = engine.take_window(10**9)
    assert (window.finished, window.aborted) == (1, 1)
    engine.abort(kept, 10**9)
    assert not kept.aborted


def test_an_aborted_head_of_the_queue_lets_the_next_one_in() -> None:
    engine = engine_of(replace(PROFILE, kv_tokens=1_600))
    engine.submit(job(0, 800, 100), 0)
    blocked = job(1, 900, 1)
    engine.submit(blocked, MS)
    engine.submit(job(2, 10, 1), 2 * MS)
    engine.abort(blocked, 105 * MS)
    assert (120, "first_token", 2) in finish(engine)


def test_a_slow_engine_takes_longer_from_the_next_step_on() -> None:
    engine = engine_of()
    engine.submit(job(0, 10, 5), 0)
    engine.set_speed(3.0, 15 * MS)
    engine.set_speed(1.0, 55 * MS)
    assert finish(engine)[-1] == (20 + 30 + 30 + 10, "finished", 0)


def test_a_frozen_engine_does_nothing_until_it_is_set_back() -> None:
    engine = engine_of()
    engine.submit(job(0, 10, 5), 0)
    engine.set_speed(math.inf, 34 * MS)
    assert engine.wake_ns() == 10 * MS  # what happened before the freeze is still told
    assert [e.kind for e in engine.advance(35 * MS)] == ["first_token"]
    engine.submit(job(1, 10, 1), 50 * MS)
    assert engine.wake_ns() is None
    assert engine.advance(10**9) == []
    assert (engine.gauges(10**9).running, engine.gauges(10**9).waiting) == (1, 1)
    engine.set_speed(1.0, 2 * 10**9)
    assert finish(engine) == [(2_016, "finished", 0), (2_016, "first_token", 1), (2_016, "finished", 1)]
    assert engine.take_window(3 * 10**9).finished == 2


def test_an_idle_engine_can_be_frozen_too() -> None:
    engine = engine_of()
    engine.set_speed(math.inf, 0)
    engine.submit(job(0, 10, 1), MS)
    assert engine.wake_ns() is None
    engine.set_speed(1.0, 10**9)
    assert finish(engine) == [(1_010, "first_token", 0), (1_010, "finished", 0)]


def test_impossible_prompts_are_refused_and_output_ends_with_the_context() -> None:
    engine = engine_of(replace(PROFILE, kv_tokens=1_000, context_tokens_max=900))
    assert engine.tokens_max == 900
    with pytest.raises(ValueError, match=r"900 tokens: 1\.\.899"):
        engine.submit(job(0, 900, 1), 0)
    with pytest.raises(ValueError, match="multiple of 16"):
        engine.submit(Job(SimRequest(1, 0, 30, 1, (1,), block_tokens=24), 1), 0)
    with pytest.raises(ValueError, match="speed factor"):
        engine.set_speed(0, 0)
    with pytest.raises(ValueError, match="profile test"):
        engine_of(replace(PROFILE, kv_tokens=15))
    long = job(2, 890, 500)
    engine.submit(long, 0)
    finish(engine)
    assert long.output_done == 10


# --- signals ----------------------------------------------------------------------------------------------------------


def test_windows_split_a_run_of_steps_without_losing_any() -> None:
    def total(looks: list[int]) -> tuple[int, int, float, int, float]:
        engine = engine_of(replace(PROFILE, law=replace(LAW, c_ms=20.0)))
        for i in range(3):
            engine.submit(job(i, 100, 200), i)
        windows = [engine.take_window(at * MS) for at in looks]
        finish(engine)
        windows.append(engine.take_window(10**12))
        counts = sum(w.itl.count for w in windows)
        return (
            sum(w.steps for w in windows), sum(w.decode_tokens for w in windows),
            round(sum(w.busy_ms for w in windows), 6), counts, round(sum(w.itl.sum_ms for w in windows), 6),
        )  # fmt: skip

    assert total([]) == total([7, 33, 34, 500, 501, 2_000])
    assert total([])[:2] == (201, 600)


def test_the_step_model_is_learned_from_runs_and_is_the_law_otherwise() -> None:
    law = StepLaw(a_ms=8.0, b_ms=0.1, c_ms=0.05, d_ms=0.03)
    models = []
    for learn in (True, False):
        engine = SimEngine(replace(PROFILE, law=law), Random(1), learn)
        rng, at_ns = Random(2), 0
        for i in range(300):
            at_ns += int(rng.expovariate(20) * 1e9)
            engine.submit(job(i, rng.randrange(50, 500), rng.randrange(2, 60)), at_ns)
        finish(engine)
        models.append(engine.step_model())
    assert models[0].samples > 300
    assert models[0].d_ms == pytest.approx(law.d_ms, rel=0.05)
    assert models[0].a_ms + 8 * models[0].b_ms == pytest.approx(law.a_ms + 8 * law.b_ms, rel=0.05)
    assert (models[1].a_ms, models[1].samples) == (8.0, 1_000)
