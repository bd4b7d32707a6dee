"""Parts of the batch tuner: load and its classes, known good settings, pace, aim, and the choice of both knobs."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from policies.batching.choose import MARGIN, candidates, choose
from policies.batching.load import LoadMeter, OfferedLoad
from policies.batching.memory import CHANGE_TICKS, CLASSES_MAX, Classes, Good, KnownGood, sizes_of
from policies.batching.outcome import ITL_SHARE_MAX, Outcome
from policies.batching.pace import PRICE, TURN_FACTOR, TURN_TICKS, Pace
from policies.batching.recent import Recent
from policies.batching.solve import BatchPoint, solve_gaps
from policies.config import BatchingConfig, ObjectivesConfig
from policies.queueing import Offered, saturated_seqs
from policies.types import Knobs, ReplicaReport, Sampled, StepCoefficients
from tests.unit.control.fleet import CPU_STEP, SECOND_NS, histogram, replica_report

CONFIG = BatchingConfig()
GPU = StepCoefficients(5.0, 0.025, 0.03, 0.015, samples=1_000, error_share=0.03)
TIGHT = ObjectivesConfig(ttft_ms=200.0, itl_ms=10.0)
LONG = Offered(6.0, 3_000.0, 300.0, 3_150.0, prompt_cv2=0.0)


def gpu_point(**changes: Any) -> BatchPoint:
    values: dict[str, Any] = {
        "model": GPU, "running": 20, "kv_tokens": 63_000, "kv_tokens_max": 945_024, "running_seqs_hard": 256,
        "step_tokens_hard": 8_192,
    }  # fmt: skip
    return BatchPoint(**(values | changes))


# --- load -------------------------------------------------------------------------------------------------------------


def busy(seq: int, **changes: Any) -> ReplicaReport:
    """Two requests of 100 and 50 tokens come and go each second; four run."""
    values = {"seq": seq, "running": 4, "finished": 2, "prefill_tokens": 200, "decode_tokens": 100, "steps": 30,
              "kv_tokens_used": 520}  # fmt: skip
    return replica_report(**(values | changes))


def test_the_load_is_read_from_the_reports() -> None:
    meter = LoadMeter()
    for seq in range(1, 60):
        meter.receive(busy(seq))
    offered = meter.offered(waiting=3, told=None)
    assert offered is not None
    assert offered.arrivals_ps == pytest.approx(2.0, rel=0.05)
    assert offered.prompt_tokens == pytest.approx(100, rel=0.05)
    assert offered.output_tokens == pytest.approx(50, rel=0.05)
    assert offered.kv_tokens_seq == pytest.approx(130)
    assert offered.waiting == 3
    assert meter.prefill_tps == pytest.approx(200)


def test_nothing_is_said_before_a_few_requests_came_and_went() -> None:
    meter = LoadMeter()
    assert meter.offered(0, None) is None
    meter.receive(busy(1, finished=0))
    meter.receive(busy(2, finished=2))
    assert meter.offered(0, None) is None
    told = OfferedLoad(arrivals_ps=9.0, prompt_tokens_mean=10.0, output_tokens_mean=5.0, waiting=2.0, refusing=False)
    offered = meter.offered(1, told)
    assert offered == Offered(9.0, 10.0, 5.0, 130.0, waiting=3.0, refusing=False)


def test_the_error_of_a_load_falls_with_the_requests_it_rests_on_and_few_are_remembered_for_longer() -> None:
    errors, counted = {}, {}
    for every in (1, 10):
        meter = LoadMeter()
        for seq in range(1, 1_200):
            meter.receive(busy(seq, finished=2 if seq % every == 0 else 0))
        errors[every], counted[every] = meter.error, meter.offered(0, None)
    assert errors[1] == pytest.approx(math.sqrt(2 / 130), rel=0.15), "2 requests/s for (1 + 0.97) / (1 - 0.97) seconds"
    assert errors[10] < math.sqrt(2 / 26), "0.2 requests/s for twice as long and more"
    assert counted[10] is not None
    assert counted[10].arrivals_ps == pytest.approx(0.2, rel=0.2)
    assert LoadMeter().error == 1.0


def test_a_report_counts_once_and_a_new_life_starts_afresh() -> None:
    meter = LoadMeter()
    for seq in (1, 2, 2, 2, 3, 4):
        meter.receive(busy(seq))
    once = meter.offered(0, None)
    assert once is not None
    assert once.arrivals_ps == pytest.approx(1.5, rel=0.1), "what the first report's requests did before is not known"
    meter.receive(busy(1))
    assert meter.offered(0, None) is None


def test_waiting_requests_count_as_arrivals_when_they_come_not_when_they_begin() -> None:
    meter = LoadMeter()
    meter.receive(busy(1))
    meter.receive(busy(2, waiting=10))
    for seq in range(3, 6):
        meter.receive(busy(seq, waiting=10))
    offered = meter.offered(10, OfferedLoad(prompt_tokens_mean=1.0, output_tokens_mean=1.0))
    assert offered is not None
    assert offered.arrivals_ps == pytest.approx((10 + 8) / 5, rel=0.1)


def test_the_window_is_kept_as_it_is_shown() -> None:
    recent = Recent()
    window: list[Sampled[ReplicaReport]] = []
    for seq in range(1, 30):
        window = [*window, Sampled(busy(seq, running=seq), seq * SECOND_NS)][-12:]
        assert [r.seq for r in recent.look(window, 5)] == [seq]
    assert recent.point(CPU_STEP).running == 29
    assert len(recent.since(0)) == 12
    assert [r.seq for r in recent.since(27 * SECOND_NS)] == [28, 29]
    assert recent.look(window, 3) == [], "another objective looks at the same reports again, and none is new"
    assert len(recent.since(0)) == 12
    assert [r.seq for r in recent.look([Sampled(busy(1, running=2), 99 * SECOND_NS)], 3)] == [1]
    assert recent.point(CPU_STEP).running == 2


# --- cap and budget together ------------------------------------------------------------------------------------------


def chosen(offered: Offered, wish: Knobs | None = None, objectives: ObjectivesConfig = TIGHT) -> Knobs:
    point = gpu_point()
    gaps, _, _ = solve_gaps(point, objectives, CONFIG)
    return choose(point, offered, gaps, wish or Knobs(), objectives, CONFIG).knobs


def test_a_full_engine_runs_as_many_as_keep_their_mean_gap_with_the_prompts_that_join() -> None:
    knobs = chosen(replace(LONG, arrivals_ps=8.0))
    assert knobs.running_seqs_max == int(saturated_seqs(GPU, 9.5, LONG))
    decoding_alone, _, _ = solve_gaps(gpu_point(), TIGHT, CONFIG)
    assert (decoding_alone.running_seqs_max or 0) > 1.3 * (knobs.running_seqs_max or 0)
    assert knobs.step_tokens_max is not None
    assert knobs.step_tokens_max > 500, "prompts of 3,000 tokens must come through in 200 ms"


def test_where_nobody_refuses_gaps_are_not_bought_with_a_queue_that_grows() -> None:
    overload = replace(LONG, arrivals_ps=11.0)
    assert (chosen(overload).running_seqs_max or 0) < 20
    assert chosen(replace(overload, refusing=False)) == Knobs(256, 8_192), "nobody meets both: work it off"


def test_what_stands_stays_unless_something_is_better_by_the_margin() -> None:
    point, gaps = gpu_point(), solve_gaps(gpu_point(), TIGHT, CONFIG)[0]
    best = choose(point, replace(LONG, arrivals_ps=8.0), gaps, Knobs(), TIGHT, CONFIG)
    near = Knobs((best.knobs.running_seqs_max or 0) - 1, best.knobs.step_tokens_max)
    again = choose(point, replace(LONG, arrivals_ps=8.0), gaps, near, TIGHT, CONFIG)
    assert again.knobs == near
    assert again.gain <= MARGIN
    far = Knobs(60, 8_192)
    moved = choose(point, replace(LONG, arrivals_ps=8.0), gaps, far, TIGHT, CONFIG)
    assert moved.knobs == best.knobs
    assert moved.gain > MARGIN


def test_candidates_stay_within_the_start_up_values_and_begin_with_the_safest() -> None:
    rng = random.Random(5)
    for _ in range(200):
        point = gpu_point(
            running=rng.randint(1, 200), running_seqs_hard=rng.randint(1, 256), step_tokens_hard=rng.randint(64, 8_192)
        )
        offered = Offered(rng.uniform(0, 30), rng.uniform(1, 9_000), rng.uniform(1, 900), 500.0, 0, rng.random() < 0.5)
        gaps = solve_gaps(point, TIGHT, CONFIG)[0]
        pairs = candidates(point, offered, gaps, TIGHT, CONFIG)
        assert len(set(pairs)) == len(pairs) <= 12
        for knobs in pairs:
            assert 1 <= (knobs.running_seqs_max or 0) <= point.running_seqs_hard
            assert 1 <= (knobs.step_tokens_max or 0) <= point.step_tokens_hard
        assert pairs[0].running_seqs_max == gaps.running_seqs_max


# --- pace, aim --------------------------------------------------------------------------------------------------------


LOW, HIGH = Knobs(16, 100), Knobs(16, 900)


def ticks_until_set(pace: Pace, gain: float, before: Knobs = LOW, after: Knobs = HIGH) -> int:
    for n in range(1, 10_000):
        pace.tick()
        if pace.lose(gain, before, after):
            pace.settle()
            return n
    raise AssertionError("never")


def test_a_better_pair_is_set_when_what_is_lost_by_staying_exceeds_the_price_of_a_change() -> None:
    assert ticks_until_set(Pace(), 0.25) == math.ceil(PRICE / 0.25)
    assert ticks_until_set(Pace(), PRICE) == 1
    pace = Pace()
    answers = [pace.lose(gain, LOW, HIGH) for gain in [0.3, -0.1, 0.3, -0.1, 0.3, -0.9, 0.3, 0.3, 0.3, 0.3]]
    assert answers == [False] * 9 + [True], "what was gained by staying counts as well, but not in advance"


def test_a_knob_that_moved_goes_back_only_for_much_and_forth_again_only_for_very_much() -> None:
    pace = Pace()
    prices = []
    for before, after in ((LOW, HIGH), (HIGH, LOW), (LOW, HIGH)):
        prices.append(ticks_until_set(pace, 0.5, before, after) * 0.5)
        pace.moved(before, after)
    assert prices == [PRICE, PRICE * TURN_FACTOR, PRICE * TURN_FACTOR**2]
    for _ in range(TURN_TICKS + 1):
        pace.tick()
    assert ticks_until_set(pace, 0.5, HIGH, LOW) * 0.5 == PRICE, "long ago"
    pace.moved(HIGH, LOW)
    pace.forget()
    assert ticks_until_set(pace, 0.5, LOW, HIGH) * 0.5 == PRICE, "another load, another engine"


def test_only_gaps_that_are_surely_too_long_shrink_the_aim() -> None:
    outcome = Outcome(ObjectivesConfig(itl_ms=60.0))

    def measured(gap_ms: float) -> bool:
        report = busy(1, knobs=Knobs(16, 88, None), itl=histogram(*[gap_ms] * 60))
        return outcome.judge([report], step_tokens_max=88, full_step_ms=55.0)

    assert not measured(55.0), "55 and 74 ms are counted in one bucket"
    assert not outcome.bad
    assert measured(80.0)
    assert outcome.bad


def test_the_aim_leaves_room_for_the_spread_of_steps() -> None:
    outcome = Outcome(ObjectivesConfig(itl_ms=200.0, quantile=0.95))
    assert outcome.aim(replace(CPU_STEP, error_share=None)) == ITL_SHARE_MAX
    assert outcome.aim(replace(CPU_STEP, error_share=0.01)) == ITL_SHARE_MAX
    assert outcome.aim(replace(CPU_STEP, error_share=0.12)) == pytest.approx(1 / (1 + 1.645 * 0.15), rel=0.01)
    outcome.reconfigure(ObjectivesConfig(itl_ms=200.0, quantile=0.99))
    assert outcome.aim(replace(CPU_STEP, error_share=0.12)) == pytest.approx(1 / (1 + 2.326 * 0.15), rel=0.01)


def test_an_outcome_needs_gaps_measured_with_the_budget_in_question() -> None:
    outcome = Outcome(ObjectivesConfig(itl_ms=200.0))
    late = [busy(1, knobs=Knobs(16, 88, None), itl=histogram(*[390.0] * 60))]
    assert not outcome.judge(late, step_tokens_max=96, full_step_ms=190.0)
    assert not outcome.judge(late, step_tokens_max=88, full_step_ms=900.0), "it was not meant to hold the objective"
    assert outcome.judge(late, step_tokens_max=88, full_step_ms=190.0)
    assert outcome.bad
    assert outcome.itl_share < ITL_SHARE_MAX


# --- known good settings ----------------------------------------------------------------------------------------------


def test_noise_does_not_change_the_class_of_a_load_and_another_load_does_after_some_ticks() -> None:
    classes, rng = Classes(), random.Random(2)
    for _ in range(600):
        noisy = replace(LONG, arrivals_ps=6 * rng.uniform(0.8, 1.2), prompt_tokens=2_900 * rng.uniform(0.8, 1.2))
        assert not classes.step(sizes_of(noisy))
    before = classes.now
    three_times = sizes_of(replace(LONG, arrivals_ps=18.0))
    assert not any(classes.step(three_times, error=0.6) for _ in range(20)), "three requests are no other load"
    changes = [classes.step(sizes_of(replace(LONG, prompt_tokens=100.0))) for _ in range(CHANGE_TICKS + 2)]
    assert changes.index(True) == CHANGE_TICKS - 1
    assert sum(changes) == 1
    assert classes.now != before


def test_the_memory_is_bounded_and_forgets_another_engine() -> None:
    known = KnownGood()
    for n in range(3 * CLASSES_MAX):
        known.keep((n, 0, 0), Good(Knobs(n, n), 0.95, 0, 100.0))
    assert len(known) == CLASSES_MAX
    last = 3 * CLASSES_MAX - 1
    assert known.find((0.0, 0.0, 0.0), drifts=0) is None
    found = known.find((last + 0.3, 0.6, 0.0), drifts=0)
    assert found is not None
    assert found.knobs == Knobs(last, last)
    assert known.find((last + 0.3, 1.6, 0.0), drifts=0) is None
    assert known.find((float(last), 0.0, 0.0), drifts=1) is None
