"""Tenants in whole runs: a budget of two gateways whose controller dies, and a small tenant beside one that floods."""

from __future__ import annotations

from collections import Counter
from random import Random

from autoscaling.simulator.records import RunResult
from autoscaling.simulator.spec import Fault, Scenario, SimRequest
from autoscaling.simulator.world import run
from policies.config import PolicyConfig, PricesConfig, TenantConfig
from tests.sim.worlds import SECOND, SLOW, Watcher, listed, settled

PRICES = PricesConfig(prompt_usd_per_mtok=1.0, cached_usd_per_mtok=0.1, output_usd_per_mtok=4.0)


def traffic(seconds: float, prompt: int, output: int, **rate_ps: float) -> list[SimRequest]:
    """Steady random arrivals of each tenant."""
    rng, found = Random(5), []
    for tenant, rate in rate_ps.items():
        at_s = rng.expovariate(rate)
        while at_s < seconds:
            found.append(SimRequest(0, round(at_s * SECOND), prompt, output, output_tokens_max=output, tenant=tenant))
            at_s += rng.expovariate(rate)
    found.sort(key=lambda r: r.arrival_ns)
    return [
        SimRequest(i, r.arrival_ns, prompt, output, output_tokens_max=output, tenant=r.tenant)
        for i, r in enumerate(found)
    ]


def result_of(scenario: Scenario) -> RunResult:
    watcher = Watcher()
    result = run(scenario, observer=watcher)
    settled(result, watcher)
    return result


def ttft_p95_ms(result: RunResult, tenant: str) -> float:
    values = sorted(r.ttft_ms for r in result.records if r.tenant == tenant and r.outcome == "succeeded")
    return values[int(0.95 * len(values))]


def test_a_budget_is_sold_once_by_two_gateways_although_the_controller_dies_twice() -> None:
    cost = 1_000 * 1e-6 + 50 * 4e-6
    budget = 60 * cost
    config = PolicyConfig(tenants={"poor": TenantConfig(budget_usd_max=budget)}, prices=PRICES)
    requests = traffic(60, 1_000, 50, poor=4, rich=2)
    faults = tuple(Fault("controller", at * SECOND, duration_ns=3 * SECOND) for at in (8, 20))
    result = result_of(listed(requests, replicas=3, config=config, gateways=2, faults=faults))
    ends: dict[str, Counter[str]] = {"poor": Counter(), "rich": Counter()}
    for record in result.records:
        ends[record.tenant][record.outcome] += 1
        assert record.outcome == "succeeded" or record.reason in {"tenant_budget", "budget_unknown"}
    assert set(ends["rich"]) == {"succeeded"}
    assert 54 <= ends["poor"]["succeeded"] <= 60


def test_beside_a_tenant_that_floods_a_small_one_loses_nothing_and_waits_for_engines_only() -> None:
    result = result_of(listed(traffic(180, 400, 20, small=0.4, flood=150), profile=SLOW, replicas=2))
    ended = Counter((record.tenant, record.outcome) for record in result.records)
    assert ended["flood", "refused"] > ended["flood", "succeeded"] > 1_000
    assert {outcome for tenant, outcome in ended if tenant == "small"} == {"succeeded"}
    assert ttft_p95_ms(result, "small") < 0.75 * ttft_p95_ms(result, "flood")
