"""A device that becomes slow is replaced in whole runs: it leaves through its health checks, the number stays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoscaling.recommend import ReplicaScaler
from autoscaling.simulator.checks import Checker
from autoscaling.simulator.records import RunResult
from autoscaling.simulator.spec import Fault, Pool
from autoscaling.simulator.world import World
from policies.config import ControlConfig, ObjectivesConfig, PolicyConfig, ScalingConfig
from policies.types import Mode
from tests.sim.worlds import PROFILE, SECOND, poisson

SLOW_S, END_S = 90, 160
SLOW = "replica-00001"
CONFIG = PolicyConfig(
    objectives=ObjectivesConfig(ttft_ms=2_000.0, itl_ms=40.0), scaling=ScalingConfig(replicas_min=3, replicas_max=5)
)
"""Three carry ten requests a second with ease; eight ms a step become eighty."""


def run(config: PolicyConfig) -> RunResult:
    fault = Fault("slow", SLOW_S * SECOND, (END_S - SLOW_S) * SECOND, replica=1, factor=10.0)
    pool = Pool(PROFILE, 3, scaler=ReplicaScaler)
    scenario = poisson(10.0, END_S, pool=pool, config=config, faults=(fault,))
    checker = Checker(scenario)
    world = World(scenario, checker)
    checker.watch(world)
    return world.run(None, lambda: False)


def met(result: RunResult, begin_s: float) -> float:
    rows = [r for r in result.records if r.arrival_ns >= begin_s * SECOND]
    kept = [r for r in rows if r.outcome == "succeeded" and r.ttft_ms <= 2_000 and not r.tpot_ms > 40]
    return len(kept) / len(rows)


def test_the_slow_one_leaves_another_comes_and_the_number_stays() -> None:
    result = run(CONFIG)
    retired = [d for d in result.decisions if "retired" in d.after]
    assert [(d.target, d.after, d.acted) for d in retired] == [(SLOW, {"retired": 1}, True)]
    assert SLOW_S < retired[0].at_ns / SECOND < SLOW_S + 30
    pool = result.pools[0]
    assert {sample.target for sample in pool.timeline} == {3}
    assert pool.starts == 4
    assert met(result, SLOW_S + 60) > 0.99
    assert not any(r.replica == SLOW for r in result.records if r.arrival_ns > (SLOW_S + 60) * SECOND)


@pytest.mark.parametrize(
    "config",
    [
        replace(CONFIG, control=ControlConfig(joint=False)),
        replace(CONFIG, control=ControlConfig(mode=Mode.SHADOW)),
        replace(CONFIG, scaling=replace(CONFIG.scaling, enabled=False)),
    ],
    ids=["independent loops", "shadow", "no lever for replicas"],
)
def test_nobody_leaves_where_the_plan_may_not_act(config: PolicyConfig) -> None:
    result = run(config)
    assert result.pools[0].starts == 3
    assert not any(d.acted for d in result.decisions if "retired" in d.after)
