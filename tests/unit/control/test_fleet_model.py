"""The fleet model: its law against plain arithmetic, its order, and how it follows what is measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.config import ControlConfig, ObjectivesConfig
from policies.control.fleet_model import LOAD_FACTOR_MAX, PACE_SHARE, FleetModel, Outlook
from policies.control.signals import SignalBook
from policies.measures import ClassCounts
from policies.types import StepCoefficients
from tests.unit.control.fleet import SECOND_NS, gateway_report, histogram, replica_report

OBJECTIVES = ObjectivesConfig(ttft_ms=3_000, itl_ms=60)
H200 = StepCoefficients(a_ms=20.0, b_ms=0.1, c_ms=0.05, d_ms=0.14, samples=1_000, error_share=0.02)
PROMPT, OUTPUT, KV = 1_000, 300, 1_200


def watched(
    rate_ps: int,
    laws: list[StepCoefficients],
    ticks: int = 40,
    *,
    gap_ms: float | None = None,
    met: float = 1.0,
    **work: int,
) -> FleetModel:
    """A model that watched a fleet of these engines for a while; ``gap_ms`` is measured, not predicted."""
    model, book = FleetModel(OBJECTIVES, 2.0, 32), SignalBook(ControlConfig())
    for i in range(1, ticks + 1):
        now_ns = i * SECOND_NS
        for n, law in enumerate(laws):
            report = replica_report(
                f"r{n}", i, step_model=law, running=10, kv_tokens_used=10 * KV, kv_tokens_max=400_000, steps=30,
                decode_tokens=1_000, prefix_query_tokens=PROMPT, step_tokens_hard=8_192,
                itl=histogram(*[gap_ms] * 20) if gap_ms else histogram(), **work,
            )  # fmt: skip
            book.receive_replica(report, now_ns)
        kept = round(met * rate_ps)
        book.receive_gateway(
            gateway_report(
                seq=i, arrivals=rate_ps, succeeded=kept, met=kept, output_tokens=kept * OUTPUT, routed={"r0": rate_ps},
                predicted_prompt_tokens={"r0": rate_ps * PROMPT},
                by_class={"standard": ClassCounts(rate_ps, kept, kept, refused=rate_ps - kept)},
            ),
            now_ns,
        )  # fmt: skip
        model.observe(book.signals(now_ns), now_ns)
    return model


def outlook(model: FleetModel, replicas: int) -> Outlook:
    found = model.outlook(replicas)
    assert found is not None
    return found


def test_the_gap_is_the_fixed_step_cost_stretched_by_the_work() -> None:
    model = watched(8, [H200] * 4)
    work_s = (PROMPT * H200.d_ms + OUTPUT * (H200.b_ms + H200.c_ms * KV / 1_000)) / 1_000
    assert outlook(model, 4).itl_ms == pytest.approx(H200.a_ms / (1 - 2.0 * work_s), rel=1e-6)
    assert outlook(model, 4).successes_per_usd == pytest.approx(outlook(model, 4).met_share * 8 * 3_600 / (4 * 2.0))


def test_unlike_engines_share_the_load_so_that_their_gaps_are_alike() -> None:
    fast = replace(H200, a_ms=10.0, d_ms=0.07)
    model = watched(8, [H200, H200, fast])
    offered = model.offered(SignalBook(ControlConfig()).signals(0), refusing=True)
    rates = {name: load.arrivals_ps or 0.0 for name, load in offered.items()}
    assert sum(rates.values()) == pytest.approx(8)
    assert rates["r2"] > 1.5 * rates["r0"]


def test_more_replicas_never_keep_fewer_promises_and_each_costs() -> None:
    model = watched(12, [H200] * 3)
    plans = [outlook(model, n) for n in range(1, 20)]
    shares = [p.met_share for p in plans]
    assert shares == sorted(shares)
    assert [p.itl_ms for p in plans] == sorted((p.itl_ms for p in plans), reverse=True)
    assert plans[-1].successes_per_usd < max(p.successes_per_usd for p in plans)


def test_the_fewest_that_keep_the_promises_are_found() -> None:
    model = watched(12, [H200] * 3)
    least = model.least(1, 20)
    assert least is not None
    best = outlook(model, 20).met_share
    assert outlook(model, least).met_share >= OBJECTIVES.quantile * best
    assert outlook(model, least - 1).met_share < OBJECTIVES.quantile * best


def test_a_burst_beyond_capacity_is_met_as_far_as_capacity_goes() -> None:
    model = watched(40, [H200] * 3)
    plan = outlook(model, 3)
    assert 0.7 * plan.capacity_ps / 40 < plan.met_share < plan.capacity_ps / 40
    assert plan.itl_ms == pytest.approx(PACE_SHARE * OBJECTIVES.itl_ms)


def test_a_slow_device_is_named_and_carries_nothing() -> None:
    model = watched(6, [H200, H200, replace(H200, a_ms=80.0)])
    assert model.slow == ("r2",)
    alike = watched(6, [H200, H200])
    assert outlook(model, 3).capacity_ps == pytest.approx(outlook(alike, 2).capacity_ps)
    assert outlook(model, 3).met_share < model.outlook(3, without_slow=True).met_share  # type: ignore[union-attr]


def test_a_fleet_that_is_slow_as_a_whole_has_no_slow_device() -> None:
    assert watched(6, [replace(H200, a_ms=80.0)] * 3).slow == ()


def test_the_work_factor_follows_measured_gaps() -> None:
    truth = 1.3
    work_s = truth * (PROMPT * H200.d_ms + OUTPUT * (H200.b_ms + H200.c_ms * KV / 1_000)) / 1_000
    model = watched(8, [H200] * 4, ticks=200, gap_ms=H200.a_ms / (1 - 2.0 * work_s))
    assert model.work_factor == pytest.approx(truth, rel=0.05)


def test_promises_broken_while_requests_are_refused_make_the_load_heavier() -> None:
    broken = watched(8, [H200] * 4, ticks=200, met=0.75)
    assert broken.load_factor == LOAD_FACTOR_MAX
    assert outlook(broken, 4).met_share < outlook(watched(8, [H200] * 4), 4).met_share
    assert watched(8, [H200] * 4, ticks=200).load_factor == 1.0


def test_nothing_is_predicted_before_requests_were_seen_or_without_a_trusted_law() -> None:
    assert watched(8, [H200], ticks=0).outlook(1) is None
    assert watched(8, [replace(H200, samples=3)]).outlook(1) is None
    assert watched(8, [replace(H200, samples=3)]).least(1, 4) is None


@pytest.mark.slow
def test_a_thousand_engines_are_no_other_law() -> None:
    model = watched(2_000, [H200] * 1_000, ticks=14)
    few = watched(8, [H200] * 4, ticks=14)
    assert outlook(model, 1_000).itl_ms == pytest.approx(outlook(few, 4).itl_ms, rel=0.01)
