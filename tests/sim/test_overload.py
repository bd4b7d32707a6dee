"""Ten times capacity in whole runs: who is let in is served in time, the fleet stays full, also with an ill replica."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

from autoscaling.simulator.records import Row
from autoscaling.simulator.spec import Fault, Pool, Scenario, SimRequest, StepLaw
from autoscaling.simulator.world import World
from policies.config import ObjectivesConfig, PolicyConfig, TenantConfig
from tests.sim.worlds import SECOND, SLOW, Poisson

ENGINE = replace(
    SLOW, name="overload", law=StepLaw(30.0, 1.0, 0.0, 0.05), running_seqs_max=4, step_tokens_max=512, kv_tokens=32_768
)
"""Four slots; some 3.5 requests of 32 output tokens a second, and few enough that one too many is late."""
REPLICAS, CAPACITY_PS, SECONDS = 4, 13.0, 40
CONFIG = PolicyConfig()


def run(rate_ps: float, slow: bool) -> list[Row]:
    fault = Fault(at_ns=0, kind="slow", duration_ns=1_000 * SECOND, factor=10.0, replica=0)
    scenario = Scenario(
        "overload",
        lambda rng: Poisson(rng, rate_ps, SECONDS, prompt=120, output=32, families=10**6),
        (Pool(ENGINE, REPLICAS),),
        seed=3,
        config=CONFIG,
        gateways=1,
        faults=(fault,) if slow else (),
    )
    return list(World(scenario, None).run(None, lambda: False).records)


def good(rows: list[Row]) -> int:
    """Answered, the first token within the objective."""
    return sum(row.outcome == "succeeded" and row.ttft_ms <= CONFIG.objectives.ttft_ms for row in rows)


def late(rows: list[Row]) -> int:
    return sum(row.outcome == "succeeded" for row in rows) - good(rows)


def test_ten_times_capacity_is_served_in_time_and_at_full_speed() -> None:
    best = max(good(run(share * CAPACITY_PS, False)) for share in (0.8, 0.9, 1.0))
    flood = run(10 * CAPACITY_PS, False)
    assert good(flood) >= 0.9 * best
    assert late(flood) <= 0.01 * good(flood)


def test_one_of_four_ten_times_slower_makes_nobody_else_late() -> None:
    best = max(good(run(share * CAPACITY_PS * 3 / 4, True)) for share in (0.8, 0.9, 1.0))
    flood = run(10 * CAPACITY_PS, True)
    assert good(flood) >= 0.9 * best
    assert late(flood) <= 0.02 * good(flood)


class Neighbours:
    """Tenant B sends a long prompt every other second; tenant A sends short ones at ``rate_ps``."""

    name = "neighbours"

    def __init__(self, rng: Random, rate_ps: float) -> None:
        self._rng, self._rate_ps = rng, rate_ps

    def arrivals(self) -> Iterator[SimRequest]:
        rng, at_s = self._rng, 0.0
        found = [(n * 2 + rng.uniform(0, 0.4), "b", 2_000, 16) for n in range(50)]
        while self._rate_ps and (at_s := at_s + rng.expovariate(self._rate_ps)) < 100:
            found.append((at_s, "a", rng.randint(20, 80), rng.randint(10, 90)))
        for i, (at, tenant, prompt, output) in enumerate(sorted(found)):
            blocks = tuple(i * 1_000 + n for n in range(prompt // 64))
            yield SimRequest(i, round(at * SECOND), prompt, output, blocks, 64, output_tokens_max=output, tenant=tenant)

    def follow_ups(self, request: SimRequest, succeeded: bool, now_ns: int) -> Sequence[SimRequest]:
        return ()


def of_b(rate_ps: float) -> list[Row]:
    """B's requests while A offers so much."""
    law = StepLaw(15.0, 0.2, 0.0, 0.4)
    engine = replace(ENGINE, law=law, running_seqs_max=16, kv_tokens=131_072, context_tokens_max=8_192)
    config = PolicyConfig(
        objectives=ObjectivesConfig(ttft_ms=1_000.0), tenants={"a": TenantConfig(), "b": TenantConfig()}
    )
    source = lambda rng: Neighbours(rng, rate_ps)  # noqa: E731
    scenario = Scenario("neighbours", source, (Pool(engine, 2),), seed=3, config=config, gateways=1)
    rows = World(scenario, None).run(None, lambda: False).records
    return [row for row in rows if row.tenant == "b"]


def test_a_tenant_that_offers_twenty_times_its_share_does_not_push_another_out() -> None:
    alone, beside = of_b(0.0), of_b(260.0)
    assert [row.outcome for row in alone + beside] == ["succeeded"] * 100
    p95_alone, p95_beside = (sorted(row.ttft_ms for row in rows)[47] for rows in (alone, beside))
    assert p95_beside <= 1.5 * p95_alone
