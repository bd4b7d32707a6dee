from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from policies.config_guard import SpeculationConfig
from policies.measures import DepthUse
from policies.speculation import SpeculationTuner
from policies.step_model import predict_step_ms
from policies.types import ReplicaReport, Sampled, StepCoefficients
from tests.unit.speculation.engine import (
    HARD,
    MISLEADING,
    REPETITIVE,
    SECOND_NS,
    UNDRAFTABLE,
    SpeculatingEngine,
    Steered,
    Text,
)

GPU_STEP = StepCoefficients(6.1, 0.02, 0.029, 0.015)


def tps(steered: Steered, seconds: int) -> float:
    """Tokens per second of decode time over the next ``seconds``."""
    engine = steered.engine
    tokens, busy_ms = engine.tokens, engine.busy_ms
    steered.seconds(seconds)
    return 1_000 * (engine.tokens - tokens) / (engine.busy_ms - busy_ms)


def fixed_tps(depth: int, text: Text, **engine: object) -> float:
    """The same for an engine that stays at ``depth``."""
    fixed = SpeculatingEngine(text=text, share=0.0, **engine)  # type: ignore[arg-type]
    for _ in range(60):
        fixed.second(depth)
    return 1_000 * fixed.tokens / fixed.busy_ms


@pytest.mark.parametrize("seed", range(5))
def test_depth_follows_the_text_both_ways(seed: int) -> None:
    steered = Steered(SpeculatingEngine(noise=0.2, seed=seed))
    steered.seconds(30)
    assert steered.tuner.wish == HARD
    steered.engine.text = MISLEADING
    steered.seconds(30)
    assert steered.tuner.wish == 0
    steered.engine.text = REPETITIVE
    steered.seconds(40)
    assert steered.tuner.wish == HARD


@pytest.mark.parametrize("text", [MISLEADING, UNDRAFTABLE])
@pytest.mark.parametrize("seed", range(3))
def test_text_that_cannot_be_drafted_loses_at_most_three_percent(text: Text, seed: int) -> None:
    steered = Steered(SpeculatingEngine(text=text, seed=seed))
    steered.seconds(30)
    assert tps(steered, 300) >= 0.97 * fixed_tps(0, text)


@pytest.mark.parametrize("text", [MISLEADING, Text(1.0, 0.12)])
@pytest.mark.parametrize("seed", range(6))
def test_on_a_machine_whose_pace_wanders_nothing_is_lost_either(text: Text, seed: int) -> None:
    steered = Steered(SpeculatingEngine(text=text, seed=seed, wander=0.5, noise=0.2, hard=16, verify_ms=3.0))
    steered.seconds(60)
    assert steered.tuner.wish == 0
    engine, tokens, work_ms = steered.engine, steered.engine.tokens, steered.engine.work_ms
    assert not [m for m in steered.seconds(300) if m.changed]
    plain_ms = predict_step_ms(engine.law, 1, engine.kv_per_seq, 0)
    assert (engine.tokens - tokens) * plain_ms >= 0.97 * (engine.work_ms - work_ms)


@pytest.mark.parametrize("seed", range(6))
def test_on_such_a_machine_the_depth_still_follows_the_text(seed: int) -> None:
    steered = Steered(SpeculatingEngine(text=MISLEADING, seed=seed, wander=0.5, noise=0.2, hard=16, verify_ms=3.0))
    steered.seconds(60)
    steered.engine.text = REPETITIVE
    steered.seconds(60)
    assert steered.tuner.wish == 16
    steered.engine.text = MISLEADING
    steered.seconds(40)
    assert steered.tuner.wish == 0


@pytest.mark.parametrize("seed", range(3))
def test_text_that_turns_again_and_again_is_found_each_time(seed: int) -> None:
    steered = Steered(SpeculatingEngine(text=MISLEADING, seed=seed, hard=16, verify_ms=3.0))
    for _ in range(6):
        steered.engine.text = MISLEADING
        steered.seconds(90)
        assert steered.tuner.wish == 0
        steered.engine.text = REPETITIVE
        steered.seconds(45)
        assert steered.tuner.wish == 16


def test_the_deepest_drafts_are_not_judged_by_what_they_were_on_another_text() -> None:
    engine, tuner = SpeculatingEngine(hard=16), SpeculationTuner(SpeculationConfig())

    def report(second: int, *uses: DepthUse) -> int | None:
        value = engine.second(tuner.wish)
        value.depth_use = uses
        return tuner.step([Sampled(value, second * SECOND_NS)], second * SECOND_NS).after

    assert report(0, DepthUse(16, 1, 30, 30, 31, 5_000.0, 480), DepthUse(0, 1, 30, 30, 30, 2_000.0)) == 0
    assert report(30, DepthUse(2, 1, 20, 20, 59, 1_700.0, 40)) == 16  # a clear gain, and 16 was not measured just now
    assert report(31, DepthUse(16, 1, 6, 6, 100, 1_000.0, 96)) == 16  # less than a block: nothing is known yet
    assert report(33, DepthUse(16, 1, 14, 14, 230, 2_300.0, 224)) == 16
    assert report(37, DepthUse(16, 1, 24, 24, 26, 4_000.0, 384)) == 0  # measured, and bad


def test_repetitive_text_keeps_what_the_deepest_drafts_bring() -> None:
    steered = Steered(SpeculatingEngine())
    steered.seconds(60)
    assert tps(steered, 300) >= 0.95 * fixed_tps(HARD, REPETITIVE)
    assert tps(steered, 60) >= 2.5 * fixed_tps(0, REPETITIVE)


def test_the_choice_is_goodput_and_not_acceptance() -> None:
    engine = SpeculatingEngine(text=Text(1.0, 0.9), verify_ms=30.0)
    steered = Steered(engine)
    steered.seconds(60)
    assert steered.tuner.wish == 0  # nine drafts of ten come true, and each costs more than a step


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_a_burst_brings_the_depth_down_with_the_first_report(noise: float) -> None:
    steered = Steered(SpeculatingEngine(text=Text(1.0, 0.8), verify_ms=6.0, noise=noise))
    steered.seconds(30)
    assert (steered.tuner.wish or 0) > 0
    steered.engine.batch = 16
    move = steered.second()
    assert (move.after, move.reason.code, move.urgent) == (0, "BatchGrew", True)


def test_requests_that_wait_and_fit_count_as_running() -> None:
    steered = Steered(SpeculatingEngine(text=Text(1.0, 0.8), verify_ms=6.0))
    steered.seconds(30)
    steered.engine.waiting = 31
    assert steered.second().after == 0


def test_without_any_knowledge_a_burst_halves_the_depth_for_each_doubling() -> None:
    engine, tuner = SpeculatingEngine(share=0.0), SpeculationTuner(SpeculationConfig())

    def report(batch: int) -> Sampled[ReplicaReport]:
        engine.batch = batch
        value = engine.second(HARD)
        value.step_model, value.depth_use = None, ()
        return Sampled(value, engine.seq * SECOND_NS)

    assert not tuner.step([report(1)], SECOND_NS).changed
    move = tuner.step([report(4)], 2 * SECOND_NS)
    assert (move.before, move.after, move.urgent) == (HARD, HARD // 4, True)


def test_a_smaller_batch_raises_the_depth_only_after_the_window() -> None:
    steered = Steered(SpeculatingEngine(text=Text(1.0, 0.8), verify_ms=6.0, batch=16))
    steered.seconds(30)
    assert steered.tuner.wish == 0
    steered.engine.batch = 1
    assert {m.after for m in steered.seconds(10)} == {0}
    steered.seconds(20)
    assert (steered.tuner.wish or 0) > 0


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("batch", [1, 16])
def test_at_most_one_change_of_direction_in_ten_minutes_of_noise(seed: int, batch: int) -> None:
    steered = Steered(SpeculatingEngine(noise=0.2, seed=seed, batch=batch, text=Text(0.5, 0.4)))
    steered.seconds(600)
    ups = [(m.after or 0) > (m.before or 0) for m in steered.changes]
    assert sum(a != b for a, b in itertools.pairwise(ups)) <= 1


def test_contexts_that_grow_do_not_look_like_drafts_that_lose() -> None:
    law = StepCoefficients(25.0, 2.0, 5.0, 1.9)
    steered = Steered(SpeculatingEngine(law=law, text=Text(1.0, 0.6), share=0.0))
    for depth in (0, HARD):
        steered.tuner.adopt(depth)
        steered.seconds(3)
        steered.tuner.adopt(depth)
    assert steered.tuner.wish == HARD
    for _ in range(40):  # steps come to last twice as long, and depth 0 is not measured again
        steered.engine.kv_per_seq += 200
        steered.second()
    assert steered.tuner.wish == HARD
    assert not [m for m in steered.moves[-40:] if m.changed]


def test_a_changed_engine_is_measured_anew() -> None:
    steered = Steered(SpeculatingEngine(text=Text(1.0, 0.9), verify_ms=30.0))
    steered.seconds(60)
    assert steered.tuner.wish == 0
    engine = steered.engine
    engine.verify_ms, engine.drifts = 1.0, 1  # verification became cheap
    steered.seconds(60)
    assert (steered.tuner.wish or 0) > 0


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_an_engine_that_becomes_slower_or_faster_keeps_its_depth(factor: float) -> None:
    steered = Steered(SpeculatingEngine(text=Text(1.0, 0.9)))
    steered.seconds(60)
    wish, engine = steered.tuner.wish, steered.engine
    law = engine.law
    engine.law = replace(law, a_ms=law.a_ms * factor, b_ms=law.b_ms * factor, c_ms=law.c_ms * factor)
    engine.verify_ms, engine.drifts = engine.verify_ms * factor, 1
    steered.seconds(60)
    assert steered.tuner.wish == wish
    assert not [m for m in steered.moves[-60:] if m.changed]


def test_a_new_controller_goes_on_from_what_the_engine_runs() -> None:
    steered = Steered(SpeculatingEngine(text=MISLEADING))
    steered.seconds(30)
    assert steered.tuner.wish == 0
    move = SpeculationTuner(SpeculationConfig()).step(steered.window, steered.now_ns)
    assert (move.after, move.changed) == (0, False)


def test_what_stands_is_gone_on_from() -> None:
    steered = Steered(SpeculatingEngine(text=REPETITIVE))
    steered.seconds(30)
    steered.tuner.adopt(1)
    assert steered.tuner.wish == 1


def test_engines_that_do_not_speculate_have_no_wish() -> None:
    steered = Steered(SpeculatingEngine(hard=0))
    assert steered.second().reason.code == "NoSpeculation"
    assert steered.tuner.wish is None


def test_silence_and_idleness_hold() -> None:
    steered = Steered(SpeculatingEngine())
    steered.seconds(20)
    wish = steered.tuner.wish
    assert steered.tuner.step((), steered.now_ns).reason.code == "Silent"
    steered.engine.batch = 0
    assert steered.seconds(14)[-1].reason.code == "Idle"
    assert steered.tuner.wish == wish


def test_a_gpu_settles_within_seconds() -> None:
    steered = Steered(SpeculatingEngine(law=GPU_STEP, verify_ms=0.3))
    steered.seconds(5)
    assert steered.tuner.wish == HARD
    steered.engine.text = MISLEADING
    steered.seconds(20)
    assert steered.tuner.wish in (0, 1)
    steered.engine.text = REPETITIVE
    steered.seconds(10)
    assert steered.tuner.wish == HARD


def test_the_reason_tells_what_was_measured() -> None:
    steered = Steered(SpeculatingEngine())
    steered.seconds(30)
    steered.engine.text = MISLEADING
    steered.seconds(30)
    move = steered.changes[-1]
    assert move.reason.code == "LessGoodput"
    assert "measured" in move.reason.text
    assert {"batch", "batch_max", "tps_depth_0", "tps_depth_4"} <= set(move.inputs)
    assert move.predicted["decode_tps"] == pytest.approx(fixed_tps(0, MISLEADING), rel=0.1)
    assert move.predicted["itl_ms"] == pytest.approx(1_000 / fixed_tps(0, MISLEADING), rel=0.1)
