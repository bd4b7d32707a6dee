"""What simulated gateways and replicas report adds up to what happened to their clients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autoscaling.simulator.records import RunResult
from autoscaling.simulator.spec import ClientSpec, Fault, NetworkSpec, Scenario
from autoscaling.simulator.world import run
from policies.config import AdmissionConfig, FaultsConfig, ObjectivesConfig, PolicyConfig
from policies.control.loop import ControlState
from policies.types import GatewayReport, ReplicaReport
from tests.sim.worlds import SECOND, SLOW, poisson

OBJECTIVES = ObjectivesConfig(ttft_ms=600, itl_ms=75)


class Heard:
    """Every report that a controller accepted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gateways: list[GatewayReport] = []
        self.replicas: list[ReplicaReport] = []
        receive_gateway, receive_replica = ControlState.receive_gateway, ControlState.receive_replica

        def gateway(state: ControlState, report: GatewayReport, now_ns: int) -> bool:
            self.gateways.append(report)
            return receive_gateway(state, report, now_ns)

        def replica(state: ControlState, report: ReplicaReport, now_ns: int) -> bool:
            self.replicas.append(report)
            return receive_replica(state, report, now_ns)

        monkeypatch.setattr(ControlState, "receive_gateway", gateway)
        monkeypatch.setattr(ControlState, "receive_replica", replica)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    return Heard(monkeypatch)


def world(rate_ps: float, **more: Any) -> Scenario:
    config = PolicyConfig(objectives=OBJECTIVES, admission=AdmissionConfig(queue_requests_max=20))
    scenario = poisson(rate_ps, 15.0, 2, profile=SLOW, prompt=150, output=20)
    return replace(
        scenario, **{"config": config, "network": NetworkSpec(client_ms=0.0), "settle_ns": 5 * SECOND, **more}
    )


def kept(result: RunResult) -> int:
    """Requests that kept their promises, by the clients' own rows."""
    count = 0
    for row in result.records:
        gap = (row.e2e_ms - row.ttft_ms) / (row.output_tokens - 1) if row.output_tokens > 1 else 0.0
        count += row.outcome == "succeeded" and row.ttft_ms <= OBJECTIVES.ttft_ms and gap <= OBJECTIVES.itl_ms
    return count


def test_met_and_demand_are_what_the_clients_saw(heard: Heard) -> None:
    result = run(world(70.0))
    outcomes = [row.outcome for row in result.records]
    classes = [counts for report in heard.gateways for counts in report.by_class.values()]
    met, succeeded = sum(c.met for c in classes), sum(c.succeeded for c in classes)
    assert 0 < met < succeeded
    assert abs(met - kept(result)) <= 0.01 * succeeded  # clients count the gateway's own millisecond
    assert met == sum(r.met for r in heard.gateways)
    assert succeeded == outcomes.count("succeeded")
    assert sum(c.refused for c in classes) == outcomes.count("refused") > 0
    assert sum(c.demand for c in classes) == sum(c.arrivals for c in classes) == len(outcomes)
    assert sum(c.late_itl for c in classes) > 0
    tenants = [counts for report in heard.gateways for counts in report.by_tenant.values()]
    assert sum(t.arrivals for t in tenants) == len(outcomes)
    assert sum(t.met for t in tenants) == met


def test_clients_that_try_again_are_told_from_new_ones(heard: Heard) -> None:
    run(world(90.0))
    assert sum(r.repeats for r in heard.gateways) == 0
    heard.gateways.clear()
    result = run(world(90.0, clients=ClientSpec(retries_max=2, retry_pause_ms=500.0)))
    tries = sum(row.tries for row in result.records) - len(result.records)
    assert tries > 50
    assert 0.3 * tries <= sum(r.repeats for r in heard.gateways) <= tries  # another gateway does not know the body


def test_extra_attempts_are_those_the_gateways_made(heard: Heard) -> None:
    faults = (Fault("errors", 2 * SECOND, 8 * SECOND, replica=0), Fault("kill", 11 * SECOND, replica=1))
    result = run(world(5.0, faults=faults))
    counters = result.counters
    made = counters["retries"] + counters["hedges"] + counters["resumes"] - counters["refused_draining"]
    assert made > 3
    assert sum(r.retries for r in heard.gateways) == made
    assert any("failures" in r.ejected.values() for r in heard.gateways)


def test_a_gateway_says_whom_it_leaves_alone_for_being_slow(heard: Heard) -> None:
    faults = (Fault("slow", 2 * SECOND, 60 * SECOND, replica=0, factor=8.0),)
    config = PolicyConfig(objectives=OBJECTIVES, faults=FaultsConfig(grey_samples_min=4, eject_ms=20_000))
    run(world(6.0, faults=faults, config=config))
    codes = {code for report in heard.gateways for code in report.ejected.values()}
    assert codes & {"grey_ttft", "grey_steps", "silent"}


def test_replicas_of_known_devices_report_a_roofline_and_no_readings(heard: Heard) -> None:
    from deployments.simulation.profile_files import load_profile

    run(poisson(4.0, 5.0, 1, profile=load_profile("h100-llama-3.1-8b-bf16")))
    assert all(r.roofline is not None and r.gpu is None and r.gpu_utilisation_share is None for r in heard.replicas)
