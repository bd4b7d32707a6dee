"""A fleet of prefill and decode replicas: prefill is routed, KV travels, decode answers."""

from dataclasses import replace
from typing import Any

import pytest

from autoscaling.recommend import ReplicaScaler
from autoscaling.simulator.records import RunResult
from autoscaling.simulator.spec import Fault, NetworkSpec, Pool, Scenario, SimRequest
from autoscaling.simulator.world import run
from policies.config import PolicyConfig, ScalingConfig
from tests.sim.worlds import PROFILE, SECOND, Watcher, listed, poisson, settled

MOVES = replace(PROFILE, kv_bytes_per_token=100_000, kv_transfer_gb_s=1.0)
"""0.1 ms a token."""


def split(prefill: int = 2, decode: int = 2, **more: Any) -> Scenario:
    pools = (Pool(MOVES, prefill, "prefill"), Pool(MOVES, decode, "decode", more.pop("ongoing_max", None)))
    return poisson(pools=pools, **({"rate_ps": 8, "seconds": 12} | more))


def watched(scenario: Scenario) -> tuple[RunResult, Watcher]:
    watcher = Watcher()
    result = run(scenario, observer=watcher)
    settled(result, watcher)
    return result, watcher


def test_each_request_is_prefilled_here_and_decoded_there() -> None:
    result, watcher = watched(split())
    assert result.counters["succeeded"] == result.counters["handovers"] == len(result.records)
    for kind in ("submit", "first_token", "finish"):
        roles = [r.split("-")[0] for _, r, _, k, _ in watcher.engines if k == kind]
        assert roles.count("prefill") == roles.count("decode") == len(result.records)
    assert {p.role: (p.starts, p.profile) for p in result.pools} == {"prefill": (2, "test"), "decode": (2, "test")}
    assert {r.replica for r in result.records} == {"prefill-00000", "prefill-00001"}
    assert any(r.cached_tokens for r in result.records)


def test_the_transfer_takes_its_time() -> None:
    pools = (Pool(MOVES, 1, "prefill"), Pool(MOVES, 1, "decode"))
    row = run(listed([SimRequest(0, 0, 4_000, 20)], pools=pools)).records.row(0)
    together = run(listed([SimRequest(0, 0, 4_000, 20)])).records.row(0)
    step_ms = PROFILE.law.step_ms(1, 4_000)
    assert row.ttft_ms - together.ttft_ms == pytest.approx(400 + step_ms, rel=0.02)
    assert row.tpot_ms == pytest.approx(together.tpot_ms, rel=0.01)
    assert row.output_tokens == 20


def test_without_a_decode_replica_requests_wait_for_one() -> None:
    network = NetworkSpec(health_period_ms=1_000)
    fault = Fault("kill", 5 * SECOND, replica=2)
    result, _ = watched(split(prefill=2, decode=1, rate_ps=4, faults=(fault,), network=network))
    waited = [r for r in result.records if 6 < r.arrival_ns / SECOND < 10]
    assert waited
    assert all(r.outcome == "succeeded" and r.ttft_ms > 5_000 for r in waited)


def test_a_prefill_replica_that_dies_costs_a_retry() -> None:
    result, _ = watched(split(prefill=3, decode=2, rate_ps=10, faults=(Fault("kill", 5 * SECOND),)))
    assert result.counters["succeeded"] >= len(result.records) - 1
    assert result.counters["kills"] == 1


def test_the_decode_pool_respects_its_bound() -> None:
    result, watcher = watched(split(decode=2, ongoing_max=2, rate_ps=12, seconds=10))
    assert result.counters["succeeded"] == len(result.records)
    inside: dict[str, int] = {}
    for _, replica, _, kind, _ in watcher.engines:
        inside[replica] = inside.get(replica, 0) + {"submit": 1, "finish": -1, "abort": -1}.get(kind, 0)
        assert inside[replica] <= 2 or replica.startswith("prefill")


def test_each_pool_has_a_controller_of_its_own() -> None:
    pools = (Pool(MOVES, 1, "prefill", scaler=ReplicaScaler), Pool(MOVES, 1, "decode", scaler=ReplicaScaler))
    config = PolicyConfig(scaling=ScalingConfig(replicas_max=4))
    _, watcher = watched(poisson(pools=pools, rate_ps=5, seconds=10, config=config))
    models = {pool: t.signals.model for _, pool, t in watcher.ticks}
    assert models == {0: "m/prefill", 1: "m/decode"}
    known = {pool: {r.replica_id.split("-")[0] for r in t.signals.replicas} for _, pool, t in watcher.ticks}
    assert known == {0: {"prefill"}, 1: {"decode"}}


def test_scaling_a_split_fleet_cuts_nothing_and_repeats() -> None:
    scenario = split(prefill=2, decode=3, faults=(Fault("kill", 4 * SECOND, replica=3),), seconds=12)
    first, _ = watched(scenario)
    assert run(scenario).digest == first.digest


def test_decode_replicas_that_refuse_for_a_while_get_the_work_afterwards() -> None:
    faults = tuple(Fault("refuse", 2 * SECOND, 5 * SECOND, replica=2 + i) for i in range(2))
    result, watcher = watched(split(seconds=4, faults=faults))
    assert result.counters["succeeded"] == len(result.records)
    decoded = [at / SECOND for at, r, _, kind, _ in watcher.engines if r.startswith("decode") and kind == "submit"]
    assert not [t for t in decoded if 2 < t < 7]
    assert [t for t in decoded if t > 7]
