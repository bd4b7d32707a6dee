"""What the fleet model predicts of a fleet, against what the simulated fleet then does.

No lever moves, so that both speak of the same fleet. The tolerance is of the met share, and holds up to the load that
the model calls the fleet's capacity. Beyond, the model takes it that admission keeps the pace of those that are let in,
which nobody does here.
"""

from __future__ import annotations

from statistics import fmean

import pytest

from autoscaling.simulator.spec import Pool, Scenario
from autoscaling.simulator.workload.generators import from_curve
from autoscaling.simulator.workload.lengths import LogNormal
from autoscaling.simulator.workload.rates import RateCurve
from autoscaling.simulator.world import run
from deployments.simulation.profile_files import load_profile
from policies.config import (
    AdmissionConfig,
    AffinityConfig,
    BatchingConfig,
    ObjectivesConfig,
    PolicyConfig,
    ScalingConfig,
)
from policies.control.fleet_model import FleetModel, Outlook
from policies.control.joint import Joint
from policies.control.levers import LeverView

OBJECTIVES = ObjectivesConfig(ttft_ms=3_000.0, itl_ms=60.0)
CONFIG = PolicyConfig(
    objectives=OBJECTIVES,
    admission=AdmissionConfig(inflight_requests_max=100_000, inflight_tokens_max=10_000_000_000, adaptive=False),
    batching=BatchingConfig(enabled=False),
    affinity=AffinityConfig(enabled=False),
    scaling=ScalingConfig(enabled=False),
)
WARM_S, END_S = 60.0, 300.0
SECOND = 1_000_000_000

TOLERANCE = 0.08

SHORT = LogNormal(1_200, 300, 0.8, 0.6, tokens_max=8_000)
LONG = LogNormal(6_400, 300, 0.4, 0.6, tokens_max=24_000)
CHAT = LogNormal(400, 150, 0.8, 0.6, tokens_max=4_000)


def compare(
    monkeypatch: pytest.MonkeyPatch, replicas: int, rate_ps: float, lengths: LogNormal, seed: int = 10
) -> tuple[float, list[Outlook]]:
    """Met share of the simulated fleet, and each second's prediction."""
    seen: list[Outlook] = []
    observe = Joint.observe

    def watched(joint: Joint, view: LeverView, now_ns: int) -> LeverView:
        answer = observe(joint, view, now_ns)
        model: FleetModel = joint.model
        if WARM_S <= now_ns / SECOND < END_S and (outlook := model.outlook(replicas)) is not None:
            seen.append(outlook)
        return answer

    monkeypatch.setattr(Joint, "observe", watched)
    source = from_curve(RateCurve.steps([(END_S, rate_ps * replicas)]), lengths)
    pool = Pool(load_profile("h200-llama-3.1-70b-fp8"), replicas)
    result = run(Scenario(name="fleet", source=source, pools=(pool,), seed=seed, config=CONFIG, gateways=2))
    rows = [r for r in result.records if r.arrival_ns >= WARM_S * SECOND]
    met = [r for r in rows if r.outcome == "succeeded" and r.ttft_ms <= 3_000 and not r.tpot_ms > 60]
    return len(met) / len(rows), seen


@pytest.mark.parametrize(
    ("replicas", "rate_ps", "lengths"),
    [(1, 1.5, SHORT), (1, 2.2, SHORT), (3, 2.2, SHORT), (1, 5.5, CHAT), (1, 0.5, LONG), (3, 0.45, LONG)],
)
def test_the_met_share_comes_out_as_predicted(
    monkeypatch: pytest.MonkeyPatch, replicas: int, rate_ps: float, lengths: LogNormal
) -> None:
    met, seen = compare(monkeypatch, replicas, rate_ps, lengths)
    assert fmean(o.met_share for o in seen) == pytest.approx(met, abs=TOLERANCE)
