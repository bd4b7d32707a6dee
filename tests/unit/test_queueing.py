"""The queue arithmetic on the step law: limits that can be worked out by hand, and its order of settings."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from policies.config import ObjectivesConfig
from policies.queueing import (
    NOISE_MIN,
    QUANTILE_WORTH,
    Estimate,
    Offered,
    Setting,
    decode_ms,
    estimate,
    noise_share,
    places,
    saturated_gap_ms,
    saturated_seqs,
    stretched_steps,
)
from policies.types import StepCoefficients

GPU = StepCoefficients(5.0, 0.025, 0.03, 0.015, samples=1_000, error_share=0.03)
"""About an H200 with an 8B model."""
CPU = StepCoefficients(25.0, 2.0, 0.5, 1.9, samples=1_000, error_share=0.05)
DYNAMO = Offered(6.0, 3_000.0, 300.0, 3_150.0, prompt_cv2=0.0)
TIGHT = ObjectivesConfig(ttft_ms=200.0, itl_ms=10.0)
KV = 945_024
WIDE = Setting(256, 8_192)


def judged(offered: Offered = DYNAMO, setting: Setting = WIDE, objectives: ObjectivesConfig = TIGHT) -> Estimate:
    return estimate(GPU, offered, setting, objectives, KV)


def test_an_engine_that_is_hardly_used_serves_everybody_at_the_pace_of_one_sequence() -> None:
    e = judged(replace(DYNAMO, arrivals_ps=0.01))
    assert e.met_share > 0.99
    assert e.gap_ms == pytest.approx(decode_ms(GPU, 1, 3_150), rel=0.01)
    assert e.ttft_ms == pytest.approx(3_000 * 0.015 + decode_ms(GPU, 1, 3_150), rel=0.01)
    assert e.running == 1


def test_no_load_at_all_is_no_division_by_zero() -> None:
    e = judged(replace(DYNAMO, arrivals_ps=0.0, prompt_tokens=0.0, output_tokens=0.0))
    assert e.met_share == pytest.approx(1.0, abs=0.01)
    assert e.utilisation == 0


def test_littles_law_below_capacity() -> None:
    e = judged(replace(DYNAMO, arrivals_ps=4.0))
    assert e.utilisation < 1
    assert e.running == pytest.approx(4.0 * 300 * e.gap_ms / 1_000, rel=0.01)


def test_the_gap_of_a_full_engine_is_a_step_with_the_prompts_that_join() -> None:
    n = 20
    e = judged(replace(DYNAMO, arrivals_ps=50.0), Setting(n, 8_192))
    assert e.utilisation > 1
    assert e.running == n
    assert e.gap_ms == pytest.approx(saturated_gap_ms(GPU, n, DYNAMO), rel=0.01)
    assert e.gap_ms == pytest.approx(decode_ms(GPU, n, 3_150) + 0.015 * 3_000 * (n - 1) / 300, rel=0.01)


def test_the_cap_for_a_gap_is_the_inverse_of_the_gap_for_a_cap() -> None:
    n = saturated_seqs(GPU, 9.5, DYNAMO)
    assert saturated_gap_ms(GPU, n, DYNAMO) == pytest.approx(9.5)
    assert saturated_seqs(StepCoefficients(5, 0, 0, 0), 9.5, DYNAMO) == float("inf")


def test_capacity_is_what_a_request_costs_with_all_places_taken() -> None:
    e = judged(setting=Setting(16, 8_192))
    assert e.capacity_ps == pytest.approx(1_000 / (3_000 * 0.015 + 300 * decode_ms(GPU, 16, 3_150) / 16), rel=0.01)


@pytest.mark.parametrize(
    ("setting", "kv_tokens_max", "expected"),
    [
        (Setting(16, 8_192), KV, 16),
        (
            Setting(256, 110),
            KV,
            10,
        ),  # 110 tokens a step are 10 decoding and 100 of prompts: ten to one, as the requests
        (Setting(256, 8_192), 31_500, 10),
        (Setting(256, 1), KV, 1),
        (Setting(256, 8_192), 0, 256),
    ],
)
def test_places(setting: Setting, kv_tokens_max: int, expected: float) -> None:
    assert places(setting, DYNAMO, kv_tokens_max) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("refusing", [True, False])
def test_under_overload_a_cap_pays_only_where_admission_refuses_the_rest(refusing: bool) -> None:
    offered = replace(DYNAMO, arrivals_ps=11.0, refusing=refusing)
    capped, wide = judged(offered, Setting(15, 8_192)), judged(offered, WIDE)
    assert capped.gap_ms < 10 < wide.gap_ms
    if refusing:
        assert capped.met_share > 0.3 > 10 * wide.met_share
        assert capped.served_share == pytest.approx(capped.capacity_ps / 11.0, rel=0.01)
    else:
        assert capped.met_share < 0.05, "the queue grows and everybody is late"
        assert capped.ttft_share < wide.ttft_share


def test_a_queue_that_is_there_already_costs_first_tokens() -> None:
    offered = replace(DYNAMO, arrivals_ps=4.0, refusing=False)
    shares = [judged(replace(offered, waiting=n)).ttft_share for n in (0, 5, 50, 500)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.9 > shares[-1]


def test_small_budgets_hold_gaps_and_cost_first_tokens() -> None:
    offered = Offered(1.0, 250.0, 20.0, 300.0, prompt_cv2=1.0, refusing=False)
    objectives = ObjectivesConfig(ttft_ms=2_000.0, itl_ms=300.0)
    found = [estimate(CPU, offered, Setting(128, tokens), objectives, 40_000) for tokens in (64, 128, 2_048)]
    assert [e.pace_share for e in found] == sorted([e.pace_share for e in found], reverse=True)
    assert [e.ttft_share for e in found] == sorted([e.ttft_share for e in found])
    assert max(found, key=lambda e: e.met_share) is found[1], "neither end is best"


def test_a_pace_kept_by_the_mean_alone_counts_for_most_of_it() -> None:
    offered = Offered(0.8, 300.0, 20.0, 300.0, prompt_cv2=0.0)
    objectives = ObjectivesConfig(ttft_ms=20_000.0, itl_ms=250.0)
    e = estimate(CPU, offered, Setting(128, 2_048), objectives, 40_000)
    assert e.gap_ms < 250 < e.step_ms
    assert 1 - QUANTILE_WORTH < e.pace_share < 1 - QUANTILE_WORTH / 4


@pytest.mark.parametrize(("cv2", "seed"), [(0.0, 1), (0.3, 2), (1.0, 3)])
@pytest.mark.parametrize("room", [100.0, 400.0, 4_000.0])
def test_stretched_steps_are_those_of_prompts_cut_into_chunks(cv2: float, seed: int, room: float) -> None:
    offered, rng = Offered(1.0, 1_000.0, 100.0, 500.0, prompt_cv2=cv2), random.Random(seed)
    limit_ms, decoding_ms, d_ms = 30.0, 20.0, 0.1
    steps, n = 0, 4_000
    for _ in range(n):
        deviation = 1_000.0 * math.sqrt(cv2)
        left = 1_000.0 - deviation + (rng.expovariate(1 / deviation) if deviation else 0.0)
        while left > 0:
            steps += decoding_ms + d_ms * min(left, room) > limit_ms
            left -= room
    found = stretched_steps(decoding_ms, room, d_ms, limit_ms, offered)
    assert found == pytest.approx(steps / n, rel=0.06, abs=0.01)
    assert (found == 0) == (room <= 100)


def test_steps_that_prove_longer_than_predicted_cost_gaps_and_no_mean() -> None:
    offered = Offered(1.8, 1_200.0, 300.0, 1_400.0)
    objectives = ObjectivesConfig(ttft_ms=3_000.0, itl_ms=60.0)
    model = StepCoefficients(19.5, 0.22, 0.04, 0.143, samples=1_000, error_share=0.02)
    fits = estimate(model, offered, Setting(256, 224), objectives, 371_072)
    late = estimate(model, offered, Setting(256, 224), objectives, 371_072, gap_share=0.7)
    assert fits.pace_share > 0.95
    assert 1 - QUANTILE_WORTH - 0.05 < late.pace_share < 1 - QUANTILE_WORTH + 0.05


def test_every_share_is_a_share() -> None:
    for arrivals in (0.0, 0.1, 5.0, 1e6):
        for setting in (Setting(1, 16), Setting(64, 512), WIDE):
            for refusing in (True, False):
                e = judged(replace(DYNAMO, arrivals_ps=arrivals, refusing=refusing, waiting=3.0), setting)
                for share in (e.met_share, e.served_share, e.ttft_share, e.pace_share):
                    assert 0 <= share <= 1
                assert e.ttft_ms >= 0 < e.gap_ms


def test_noise() -> None:
    assert noise_share(GPU) == NOISE_MIN
    assert noise_share(replace(GPU, error_share=None)) == NOISE_MIN
    assert noise_share(replace(GPU, error_share=0.2)) == pytest.approx(0.25)
