"""A warm pool against none: bursts that are over before a start is, with two prices of a request that is missed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from autoscaling.recommend import ReplicaScaler
from autoscaling.simulator.records import RunResult
from autoscaling.simulator.report import Summary, summarise
from autoscaling.simulator.spec import Pool, SimRequest
from autoscaling.simulator.world import run
from policies.config import ObjectivesConfig, PolicyConfig, PricesConfig, ScalingConfig
from tests.sim.worlds import SECOND, SLOW, Watcher, listed, settled

PROFILE = replace(SLOW, gpus=1, cold_start_ms=90_000.0, running_seqs_max=16)
BURST_S, EVERY_S, TIMES, BASE_PS, LAST_S = 45, 240, 4, 3.0, 720
USD_PH, DEAR_USD, CHEAP_USD = 3.0, 0.05, 0.0001


def load() -> list[SimRequest]:
    """Evenly spaced, and four times as many in each burst."""
    requests: list[SimRequest] = []
    at_s = 1.0
    while at_s < LAST_S:
        requests.append(SimRequest(len(requests), round(at_s * SECOND), 200, 40, output_tokens_max=60))
        at_s += 1 / (BASE_PS * (TIMES if at_s % EVERY_S > EVERY_S - BURST_S else 1))
    return requests


@cache
def outcome(warm_max: int, missed_usd: float) -> tuple[RunResult, Summary, Watcher]:
    config = PolicyConfig(
        objectives=ObjectivesConfig(ttft_ms=4_000.0, itl_ms=150.0),
        prices=PricesConfig(replica_usd_per_hour=USD_PH, missed_usd=missed_usd),
        scaling=ScalingConfig(replicas_max=6, warm_max=warm_max),
    )
    watcher = Watcher()
    result = run(listed(load(), pools=(Pool(PROFILE, 1, scaler=ReplicaScaler),), config=config), observer=watcher)
    return result, summarise(result, config.objectives), watcher


def cost_usd(warm_max: int, missed_usd: float) -> float:
    """Replicas that lived, and requests that were not served in time."""
    result, summary, _ = outcome(warm_max, missed_usd if warm_max else 0.0)  # without a pool the price changes nothing
    return result.pools[0].usd + (summary.requests - summary.successes) * missed_usd


def test_bursts_are_cheaper_with_a_pool_where_a_missed_request_is_dear() -> None:
    result, _, watcher = outcome(2, DEAR_USD)
    settled(result, watcher)
    assert cost_usd(2, DEAR_USD) < 0.8 * cost_usd(0, DEAR_USD)
    assert any(d.reason.code == "WarmPays" for d in result.decisions)
    assert any(d.reason.code == "WakesWarm" for d in result.decisions)


def test_none_is_kept_where_idling_costs_more_than_what_is_missed() -> None:
    result, _, watcher = outcome(2, CHEAP_USD)
    settled(result, watcher)
    assert not any(tick.plan.warm_replicas or tick.plan.warm for _, _, tick in watcher.ticks)
    assert cost_usd(2, CHEAP_USD) == pytest.approx(cost_usd(0, CHEAP_USD))
