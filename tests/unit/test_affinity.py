from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from policies.affinity import REQUESTS_MIN, AffinityLoop, AffinityMove
from policies.config import AffinityConfig
from tests.unit.control.fleet import gateway_report, replica_report

CONFIG = AffinityConfig(step=0.1, strength_min=0.2, query_tokens_min=2_000)


def feed(
    loop: AffinityLoop, realised: float, predicted: float, tokens: int = 2_000, hot_spot: bool = False
) -> AffinityMove:
    loop.receive_replica(replica_report(prefix_query_tokens=tokens, prefix_hit_tokens=round(realised * tokens)))
    loop.receive_gateway(
        gateway_report(
            predicted_prompt_tokens={"r1": 2 * tokens}, predicted_hit_tokens={"r1": round(2 * predicted * tokens)}
        )
    )
    return loop.step(hot_spot)


def test_evicted_caches_lower_the_strength_by_at_most_one_step() -> None:
    loop = AffinityLoop(CONFIG, 1.0)
    move = feed(loop, realised=0.1, predicted=0.8)
    assert (move.before, move.after) == (1.0, 0.9)
    assert move.reason.code == "CacheCold"
    assert move.inputs["realised_hit_share"] == 0.1
    assert "10%" in move.reason.text
    assert "80%" in move.reason.text


def test_the_strength_falls_to_the_trust_and_not_below_the_minimum() -> None:
    loop = AffinityLoop(CONFIG, 1.0)
    for _ in range(20):
        feed(loop, realised=0.4, predicted=0.8)
    assert loop.strength == 0.5
    for _ in range(20):
        feed(loop, realised=0.0, predicted=0.8)
    assert loop.strength == CONFIG.strength_min


def test_a_strength_already_below_the_trust_does_not_rise_while_caches_are_cold() -> None:
    loop = AffinityLoop(CONFIG, 0.3)
    assert not feed(loop, realised=0.4, predicted=0.8).changed


def test_predictions_that_come_true_raise_the_strength_to_one() -> None:
    loop = AffinityLoop(CONFIG, 0.25)
    values = [feed(loop, realised=0.8, predicted=0.8).after for _ in range(12)]
    assert values[0] == 0.35
    assert values[-1] == 1.0
    assert all(b - a <= CONFIG.step + 1e-9 for a, b in itertools.pairwise(values))


@pytest.mark.parametrize("realised", [0.6, 0.7, 0.79])
def test_an_unclear_trust_changes_nothing(realised: float) -> None:
    loop = AffinityLoop(CONFIG, 0.5)
    assert not feed(loop, realised=realised, predicted=1.0).changed


def test_nothing_predicted_is_nothing_to_compare() -> None:
    loop = AffinityLoop(CONFIG, 0.5)
    move = feed(loop, realised=0.9, predicted=0.0)
    assert not move.changed
    assert move.reason.code == "NothingPredicted"


def test_too_few_tokens_wait_for_more() -> None:
    loop = AffinityLoop(CONFIG, 1.0)
    assert feed(loop, realised=0.0, predicted=0.8, tokens=1_000).reason.code == "TooLittleSeen"
    assert feed(loop, realised=0.0, predicted=0.8, tokens=1_000).changed
    assert not loop.step(hot_spot=False).changed


def test_realised_hits_alone_say_nothing() -> None:
    loop = AffinityLoop(CONFIG, 1.0)
    loop.receive_replica(replica_report(prefix_query_tokens=10_000))
    assert loop.step(hot_spot=False).reason.code == "TooLittleSeen"


def test_a_hot_spot_lowers_the_strength_unless_predictions_come_true() -> None:
    loop = AffinityLoop(CONFIG, 1.0)
    move = feed(loop, realised=0.5, predicted=0.8, hot_spot=True)
    assert move.after == 0.9
    assert move.reason.code == "HotSpot"
    assert feed(loop, realised=0.8, predicted=0.8, hot_spot=True).reason.code == "PredictionsTrue"


def test_a_few_long_prompts_say_nothing() -> None:
    loop = AffinityLoop(CONFIG, 1.0)
    for _ in range(REQUESTS_MIN // 8 - 1):
        loop.receive_gateway(
            gateway_report(
                routed={"r1": 8}, predicted_prompt_tokens={"r1": 80_000}, predicted_hit_tokens={"r1": 60_000}
            )
        )
        loop.receive_replica(replica_report(prefix_query_tokens=80_000))
        assert loop.step(hot_spot=False).reason.code == "TooLittleSeen"
    loop.receive_replica(replica_report(prefix_query_tokens=80_000))
    assert loop.step(hot_spot=False).reason.code == "CacheCold"


def test_a_start_value_outside_the_bounds_is_brought_inside() -> None:
    assert AffinityLoop(CONFIG, 0.0).strength == CONFIG.strength_min
    assert AffinityLoop(replace(CONFIG, strength_min=0.0), 0.0).strength == 0.0
