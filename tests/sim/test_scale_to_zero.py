"""A model that may sleep: reached and left reliably, whatever faults and counts that nobody gives back."""

from __future__ import annotations

import pytest

from autoscaling.recommend import ReplicaScaler
from autoscaling.simulator.spec import ClientSpec, Pool, SimRequest
from autoscaling.simulator.world import run
from policies.config import ClassConfig, ClassesConfig, PolicyConfig, ScalingConfig
from tests.sim.idle import WINDOW_S, ZERO_AFTER_S, idle
from tests.sim.worlds import PROFILE, SECOND, listed, settled


@pytest.mark.parametrize("seed", range(5))
def test_the_fleet_is_at_zero_in_time_after_the_load_and_serves_the_next_request(seed: int) -> None:
    found = idle(seed)
    settled(found.result, found.watcher)
    assert found.asleep_s is not None, found.words
    assert found.asleep_s - found.busy_until_s <= ZERO_AFTER_S + WINDOW_S, found.words
    assert found.late == "succeeded", found.words
    assert found.asleep_at_end, found.words


@pytest.mark.parametrize("waits", [True, False])
def test_a_request_that_finds_the_model_asleep_is_served_whether_it_is_held_or_told_when_to_come_again(
    waits: bool,
) -> None:
    """Those that are refused come once more, when they were told to, and then the model serves."""
    requests = [SimRequest(i, (2 + 60 * (i // 10)) * SECOND + i * SECOND // 10, 200, 30) for i in range(40)]
    config = PolicyConfig(
        scaling=ScalingConfig(replicas_min=0, zero_after_s=15.0, start_s_prior=12.0),
        classes=ClassesConfig(standard=ClassConfig(waits_for_start=waits)),
    )
    pool = Pool(PROFILE, 0, scaler=ReplicaScaler)
    scenario = listed(requests, pools=(pool,), config=config, clients=ClientSpec(retries_max=1), start_spread_share=0.1)
    result = run(scenario)
    assert result.counters["starts"] >= 4, "it slept in between"
    assert result.counters["succeeded"] == len(requests)
    assert (result.counters["client_retries"] > 0) is not waits
