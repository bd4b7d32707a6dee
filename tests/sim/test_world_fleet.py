"""Serve and the controller over the simulated fleet: numbers follow the plan, starts take time, nothing is cut."""

from dataclasses import replace
from typing import Any

import pytest

from autoscaling.recommend import ReplicaScaler
from autoscaling.simulator.spec import ClientSpec, Fault, Pool, Scenario, SimRequest
from autoscaling.simulator.world import run
from deployments.scaling import decide
from policies.config import ControlConfig, FaultsConfig, PolicyConfig, ScalingConfig
from policies.control.scaler import ScaleAdvice
from policies.control.signals import Signals
from policies.types import Mode, Reason
from tests.sim.worlds import PROFILE, SECOND, SLOW, Watcher, listed, poisson, settled

SCALING = PolicyConfig(scaling=ScalingConfig(replicas_max=6, down_window_s=10))


class Script:
    """A scaler that asks for given numbers at given seconds."""

    def __init__(self, steps: dict[int, int]) -> None:
        self._steps = steps

    def recommend(self, signals: Signals, now_ns: int) -> ScaleAdvice:
        number = None
        for second, replicas in self._steps.items():
            if now_ns >= second * SECOND:
                number = replicas
        return ScaleAdvice(number, Reason("Script", "as written"))


def scripted(steps: dict[int, int], replicas: int, seconds: float = 36, rate_ps: float = 5, **more: Any) -> Scenario:
    pool = Pool(PROFILE, replicas, scaler=lambda _: Script(steps))
    return poisson(rate_ps=5, seconds=seconds, pool=pool, config=SCALING, output=120, **more)


def test_more_replicas_come_after_their_cold_start() -> None:
    watcher = Watcher()
    result = run(scripted({5: 3}, 1, families=10**6), observer=watcher)
    settled(result, watcher)
    starts, ready = watcher.times("starting")[1:], watcher.times("ready")[1:]
    assert len(starts) == 2
    assert 5 <= starts[0] <= 7.1
    assert [r - s for s, r in zip(starts, ready, strict=True)] == [10.0, 10.0]
    assert result.pools[0].starts == result.pools[0].replicas_max == 3
    assert {r.replica for r in result.records if r.arrival_ns > 20 * SECOND} == {f"replica-{i:05d}" for i in range(3)}
    phases = [(s.target, s.starting, s.ready) for s in result.pools[0].timeline]
    assert (1, 0, 1) in phases
    assert (3, 2, 1) in phases
    assert (3, 0, 3) in phases


def test_fewer_replicas_drain_without_cutting_a_stream() -> None:
    watcher = Watcher()
    result = run(scripted({10: 1}, 4), observer=watcher)
    settled(result, watcher)
    assert result.counters["succeeded"] == len(result.records)
    assert result.counters["cut"] == 0
    assert result.counters["stops"] == 3
    draining = {r for _, r, p in watcher.phases if p == "draining"}
    assert draining == {"replica-00001", "replica-00002", "replica-00003"}
    stopped = {r: at for at, r, p in watcher.phases if p == "stopped"}
    for replica in draining:
        last = max(at for at, r, _, kind, _ in watcher.engines if r == replica and kind == "finish")
        assert last <= stopped[replica]
        refusing = next(at for at, r, p in watcher.phases if r == replica and p == "refusing")
        began = next(at for at, r, p in watcher.phases if r == replica and p == "draining")
        assert refusing - began == 2 * SECOND
    hours = result.pools[0].replica_hours * 3600
    assert hours == pytest.approx(result.end_ns / 1e9 + sum(stopped[r] for r in draining) / 1e9)


def test_those_still_starting_go_first() -> None:
    watcher = Watcher()
    result = run(scripted({3: 5, 8: 2}, 1), observer=watcher)
    settled(result, watcher)
    assert watcher.times("draining") == []
    ready = {r for _, r, p in watcher.phases if p == "ready"}
    assert ready == {"replica-00000", "replica-00001"}


def test_a_stream_longer_than_the_drain_time_is_cut_and_counted() -> None:
    base = listed([SimRequest(i, i, 50, 4_000) for i in range(4)])
    scenario = replace(
        base,
        pools=(Pool(PROFILE, 2, scaler=lambda _: Script({2: 1})),),
        config=replace(SCALING, faults=FaultsConfig(resume=False)),
        network=replace(base.network, drain_ms_max=5_000),
    )
    result = run(scenario)
    broken = [r for r in result.records if r.reason == "stream_broken"]
    assert len(broken) == result.counters["cut"] > 0
    assert all(1 < r.output_tokens < 4_000 and r.outcome == "failed" for r in broken)


def test_the_live_scaler_follows_load_up_and_down() -> None:
    watcher = Watcher()
    quiet = [SimRequest(100_000 + i, (60 + 2 * i) * SECOND, 50, 10) for i in range(45)]
    busy = [SimRequest(i, i * SECOND // 3, 4_000, 50) for i in range(60 * 3)]
    pools = (Pool(SLOW, 1, scaler=ReplicaScaler),)
    clients = ClientSpec(retries_max=50)  # those that are refused until there is room come again
    result = run(listed([*busy, *quiet], pools=pools, config=SCALING, clients=clients), observer=watcher)
    settled(result, watcher)
    assert result.counters["succeeded"] == len(result.records)
    targets = [s.target for s in result.pools[0].timeline]
    assert max(targets) >= 3
    assert targets[-1] < max(targets)
    assert result.counters["stops"] >= 1
    reasons = {d.reason.code for d in result.decisions if d.lever == "replicas"}
    assert reasons & {"UpConfirmed", "RiseLimited", "KeepsPromises"}
    assert reasons & {"DownConfirmed", "FewerSuffice"}


def test_a_dead_controller_changes_nothing_and_its_successor_knows_nothing() -> None:
    watcher = Watcher()
    fault = Fault("controller", 10 * SECOND, 15 * SECOND)
    result = run(scripted({12: 4, 28: 2}, 3, faults=(fault,)), observer=watcher)
    settled(result, watcher)
    assert result.counters["succeeded"] == len(result.records)
    ticks = [at / SECOND for at, _, _ in watcher.ticks]
    assert not [t for t in ticks if 10 < t < 26]
    epochs = [t.plan.epoch for _, _, t in watcher.ticks]
    assert sorted(set(epochs)) == ["pool0-life1", "pool0-life3"]
    target = {s.at_ns // SECOND: s.target for s in result.pools[0].timeline}
    assert target[24] == 3
    assert target[27] == 4
    assert target[31] == 2


def test_without_a_plan_the_local_rule_may_raise_the_number() -> None:
    fault = Fault("controller", SECOND, 200 * SECOND)
    pool = Pool(SLOW, 1, scaler=lambda _: Script({}))
    load: dict[str, Any] = {"rate_ps": 4, "seconds": 30, "prompt": 3_000, "config": SCALING, "faults": (fault,)}
    alone = run(poisson(pool=pool, **load))
    ruled = run(poisson(pool=pool, local_rule=decide, **load))
    assert {s.target for s in alone.pools[0].timeline} == {1}
    assert max(s.target for s in ruled.pools[0].timeline) > 1


def test_in_shadow_mode_decisions_are_written_and_not_followed() -> None:
    config = PolicyConfig(scaling=ScalingConfig(replicas_max=6, up_ticks=1), control=ControlConfig(mode=Mode.SHADOW))
    pool = Pool(SLOW, 1, scaler=ReplicaScaler)
    result = run(poisson(rate_ps=5, seconds=30, prompt=3_500, pool=pool, config=config))
    assert any(d.lever == "replicas" and not d.acted for d in result.decisions)
    assert {s.target for s in result.pools[0].timeline} == {1}


def test_the_fleet_can_settle_after_the_last_answer() -> None:
    result = run(scripted({50: 2}, 1, seconds=10, settle_ns=60 * SECOND))
    assert result.pools[0].timeline[-1].ready == 2
    assert result.end_ns > 70 * SECOND
