"""Replicas that fail or fall behind in whole runs: gateways leave them alone, and take them back."""

from __future__ import annotations

from dataclasses import replace
from statistics import quantiles

import pytest

from autoscaling.simulator.checks import Checker
from autoscaling.simulator.records import RunResult
from autoscaling.simulator.spec import ClientSpec, Fault, NetworkSpec, Scenario
from autoscaling.simulator.world import World
from policies.config import AdmissionConfig, ControlConfig, FaultsConfig, PolicyConfig
from tests.sim.worlds import SECOND, SLOW, poisson

AT_S = 10
FAULTY = "replica-00000"
FAULTS = FaultsConfig(eject_ms=2_000, eject_ms_max=8_000)


class Run:
    """One run under the checker."""

    def __init__(self, scenario: Scenario) -> None:
        checker = Checker(scenario)
        self.world = World(scenario, checker)
        checker.watch(self.world)
        self.result: RunResult = self.world.run(None, lambda: False)

    def ejections(self) -> dict[str, int]:
        """By code, all gateways together."""
        counts: dict[str, int] = {}
        for gateway in self.world.gateways:
            for code, n in gateway.policies.flow_context.health.ejections().items():
                counts[code] = counts.get(code, 0) + n
        return {code: n for code, n in counts.items() if n}

    def answered(self, begin_s: float, end_s: float, replica: str = "") -> int:
        """Requests that came between two times and were answered, by one replica if it is named."""
        return sum(
            r.outcome == "succeeded" and begin_s <= r.arrival_ns / SECOND < end_s and r.replica.startswith(replica)
            for r in self.result.records
        )

    def ttft_p95_ms(self, begin_s: float, end_s: float) -> float:
        values = [
            r.ttft_ms
            for r in self.result.records
            if r.outcome == "succeeded" and begin_s <= r.arrival_ns / SECOND < end_s
        ]
        return quantiles(values, n=20)[-1]


def world(*faults: Fault, rate_ps: float = 8, seconds: float = 40, gateways: int = 1, **more: object) -> Scenario:
    """Four slow engines at a third of what they carry; the joint plan, which limits slow ones as well, is off."""
    admission = AdmissionConfig(no_replica_wait_ms=2_000, retry_after_s_max=4)
    config = PolicyConfig(faults=FAULTS, admission=admission, control=ControlConfig(joint=False))
    network = NetworkSpec(stats_period_ms=1_000, first_byte_timeout_ms=20_000, idle_timeout_ms=20_000)
    settings = {"config": config, "network": network, "families": 10**6, **more}
    return poisson(rate_ps, seconds, 4, faults=faults, gateways=gateways, profile=SLOW, output=20, **settings)


def faults(kind: str, seconds: float, replicas: int = 1, factor: float = 1.0) -> tuple[Fault, ...]:
    return tuple(Fault(kind, AT_S * SECOND, round(seconds * SECOND), n, factor) for n in range(replicas))


@pytest.mark.parametrize("rate_ps", [2, 8, 20])
def test_without_a_fault_nobody_is_ejected(rate_ps: float) -> None:
    assert Run(world(rate_ps=rate_ps)).ejections() == {}


def test_a_replica_that_becomes_slower_under_load_is_left_alone_and_taken_back() -> None:
    run = Run(world(*faults("slow", 15, factor=6), rate_ps=24))
    assert set(run.ejections()) == {"grey_ttft"}
    assert run.answered(AT_S + 4, AT_S + 15, FAULTY) <= 10
    assert run.answered(35, 40, FAULTY) >= 20
    assert run.ttft_p95_ms(AT_S + 4, AT_S + 15) < 1.6 * run.ttft_p95_ms(0, AT_S), "three carry what four did"


def test_a_replica_that_stays_slow_is_found_by_few_requests() -> None:
    run = Run(world(*faults("slow", 120, factor=10), rate_ps=8, seconds=100))
    assert set(run.ejections()) <= {"grey_ttft", "grey_steps"}, "or the router alone leaves it alone"
    assert run.answered(40, 100, FAULTY) <= 20


@pytest.mark.parametrize("kind", ["errors", "unavailable"])
def test_a_replica_that_answers_errors_is_left_alone_and_taken_back(kind: str) -> None:
    run = Run(world(*faults(kind, 15)))
    assert set(run.ejections()) == {"failures"}
    failed = [r for r in run.result.records if r.outcome != "succeeded"]
    assert failed == []
    assert run.result.counters["retries"] <= FAULTS.breaker_failures + 10
    assert run.answered(AT_S + 5, AT_S + 15, FAULTY) == 0
    assert run.answered(35, 40, FAULTY) >= 5


def test_a_silent_replica_is_left_alone_before_it_says_that_it_is_stuck() -> None:
    run = Run(world(*faults("freeze", 25), rate_ps=16))
    assert "silent" in run.ejections()


@pytest.mark.parametrize("kind", ["errors", "unavailable"])
def test_when_all_fail_hardly_any_attempt_is_repeated_and_all_recover(kind: str) -> None:
    clients = ClientSpec(retries_max=3, retry_pause_ms=500)
    run = Run(world(*faults(kind, 20, replicas=4), rate_ps=10, seconds=50, gateways=2, clients=clients))
    counters = run.result.counters
    asked = len(run.result.records) + counters["client_retries"]
    assert counters["dispatches"] <= 1.2 * asked
    assert counters["retries"] <= FAULTS.retry_burst + FAULTS.retry_share_max * counters["succeeded"]
    late = [r for r in run.result.records if r.arrival_ns > (AT_S + 20 + 10) * SECOND]
    assert late
    assert all(r.outcome == "succeeded" for r in late), "it recovers within ten seconds"


def test_while_all_fail_engines_get_probes_and_no_load() -> None:
    run = Run(world(*faults("errors", 20, replicas=4), rate_ps=20, seconds=30))
    in_trouble = sum(AT_S + 2 <= r.arrival_ns / SECOND < AT_S + 20 for r in run.result.records)
    sent = sum(r.attempts for r in run.result.records if AT_S + 2 <= r.arrival_ns / SECOND < AT_S + 20)
    assert in_trouble > 300
    assert sent < 0.2 * in_trouble


def test_no_more_than_the_share_is_ejected_when_most_are_slow() -> None:
    scenario = world(*faults("slow", 15, replicas=3, factor=10))
    run = Run(replace(scenario, config=replace(scenario.config, faults=replace(FAULTS, ejected_share_max=0.25))))
    assert run.answered(0, 100) > 0.5 * len(run.result.records)
