"""A fleet whose replicas start slowly, under a load that it cannot carry yet."""

from __future__ import annotations

from dataclasses import replace

from autoscaling.recommend import ReplicaScaler
from autoscaling.simulator.spec import Pool, Scenario, StepLaw
from autoscaling.simulator.workload.generators import poisson
from autoscaling.simulator.world import run
from deployments.scaling import decide
from policies.config import AdmissionConfig, PolicyConfig, ScalingConfig
from tests.sim.worlds import PROFILE


def test_a_queue_that_grows_while_replicas_start_buys_no_more_of_them() -> None:
    """Four replicas carry the load. The KV tokens of what waited counted as demand once: sixteen were started."""
    law = StepLaw(30.0, 0.05, 0.02, 0.03)
    profile = replace(PROFILE, law=law, kv_tokens=5_000, running_seqs_max=32, cold_start_ms=40_000.0)
    scenario = Scenario(
        name="slow start",
        source=poisson(8.0, 400, 100, duration_s=100.0),
        pools=(Pool(profile, 2, scaler=ReplicaScaler),),
        seed=1,
        config=PolicyConfig(
            admission=AdmissionConfig(inflight_requests_max=2_000, engine_wait_share=None),
            scaling=ScalingConfig(replicas_max=16),
        ),
        local_rule=decide,
    )
    result = run(scenario)
    assert result.counters["succeeded"] == result.counters["requests"]
    assert 3 <= result.pools[0].replicas_max <= 5
