"""Roles of one fleet: the plan's number of prefill replicas follows what is asked of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autoscaling.recommend import ReplicaScaler
from policies.config import ControlConfig, ObjectivesConfig, PolicyConfig, ScalingConfig
from policies.config_guard import DisaggregationConfig, GuardConfig
from policies.control.loop import ControlState, tick
from policies.steering import ANY, Knob, Override
from policies.types import Decision
from tests.unit.control.fleet import SECOND_NS, gateway_report, replica_report

SPLIT = DisaggregationConfig(enabled=True, prefill_replicas=2)
CONFIG = PolicyConfig(
    objectives=ObjectivesConfig(ttft_ms=4_000),
    disaggregation=SPLIT,
    scaling=ScalingConfig(enabled=False),
    control=ControlConfig(joint=False),
    guard=GuardConfig(rollback=False),
)
PROMPTS = {"routed": {"r0": 4}, "predicted_prompt_tokens": {"r0": 2_400}, "arrivals": 4, "output_tokens": 8}
ANSWERS = {"routed": {"r0": 4}, "predicted_prompt_tokens": {"r0": 80}, "arrivals": 4, "output_tokens": 900}


class Fleet:
    """Reports of a load, and the plans that come of them."""

    def __init__(self, config: PolicyConfig = CONFIG, replicas: int = 6) -> None:
        self.state = ControlState(config, ReplicaScaler(config), "life")
        self.replicas, self.second = replicas, 0
        self.decisions: list[Decision] = []

    def run(self, seconds: int, load: dict[str, Any] | None, samples: int = 1_000) -> int | None:
        plan = None
        for _ in range(seconds):
            self.second += 1
            now = self.second * SECOND_NS
            for i in range(self.replicas):
                report = replica_report(f"r{i}", self.second, running=2, kv_tokens_used=800)
                assert report.step_model is not None
                report.step_model = replace(report.step_model, samples=samples)
                self.state.receive_replica(report, now)
            if load is not None:
                self.state.receive_gateway(gateway_report(seq=self.second, **load), now)
            result = tick(self.state, now)
            plan = result.plan
            self.decisions += [d for d in result.decisions if d.lever == "roles"]
        return None if plan is None else plan.prefill_replicas


def test_the_ratio_follows_the_load_and_comes_back() -> None:
    fleet = Fleet()
    assert fleet.run(1, PROMPTS) == 2
    assert (fleet.run(60, PROMPTS) or 0) >= 4
    assert {d.reason.code for d in fleet.decisions} == {"MoreToPrefill"}
    assert fleet.run(90, ANSWERS) == 1
    assert fleet.decisions[-1].reason.code == "MoreToDecode"


def test_nothing_moves_without_traffic_or_with_new_step_models() -> None:
    assert Fleet().run(40, None) == 2
    assert Fleet().run(40, PROMPTS, samples=1) == 2


def test_a_fleet_of_one_asks_for_nothing() -> None:
    fleet = Fleet(replicas=1)
    fleet.run(40, PROMPTS)
    assert fleet.decisions == []


def test_a_ratio_set_by_hand_stands() -> None:
    fleet = Fleet()
    fleet.state.overrides.put(Override("o", Knob.PREFILL_REPLICAS, ANY, 0, remaining_ms=3_600_000.0), 0)
    assert fleet.run(40, PROMPTS) == 0


def test_without_roles_or_with_a_fixed_ratio_the_plan_has_no_opinion() -> None:
    for split in (DisaggregationConfig(), replace(SPLIT, adaptive=False)):
        assert Fleet(replace(CONFIG, disaggregation=split)).run(3, PROMPTS) is None


def test_roles_move_beside_all_other_levers() -> None:
    fleet = Fleet(
        PolicyConfig(objectives=CONFIG.objectives, disaggregation=SPLIT, scaling=ScalingConfig(replicas_max=6))
    )
    assert (fleet.run(60, PROMPTS) or 0) >= 4
    assert {d.reason.code for d in fleet.decisions if d.acted} == {"MoreToPrefill"}
