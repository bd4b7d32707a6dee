from __future__ import annotations

import pytest

from policies.config import PolicyConfig
from policies.config_guard import GuardConfig, KnobGuard, SpeculationConfig
from policies.speculation import NO_EXPLORATION, Bounds, DepthExplorer, exploration
from policies.speculation.explorer import BURST_STEPS, CREDIT_STEPS, QUIET_MAX
from policies.steering import ANY, Knob, Override
from policies.types import Knobs, Mode, Plan

BOUNDS = Bounds(share=0.02, steps=20)
STEP_MS = 25.0


def run(
    explorer: DepthExplorer, steps: int, asked: int, bounds: Bounds = BOUNDS, goodput: dict[int, float] | None = None
) -> list[int]:
    """Depths at which ``steps`` steps ran; a step at depth ``d`` brings ``goodput[d]`` tokens (default 1)."""
    ran = []
    for _ in range(steps):
        depth = explorer.choose(asked, bounds, 1)
        explorer.ran(depth, 1, round((goodput or {}).get(depth, 1)), STEP_MS)
        ran.append(depth)
    return ran


@pytest.mark.parametrize("asked", [0, 1, 2, 4])
def test_steps_at_other_depths_stay_within_the_share(asked: int) -> None:
    steps = 50_000
    ran = run(DepthExplorer(4), steps, asked)
    others = sum(depth != asked for depth in ran)
    assert 0.004 * steps < others <= 0.02 * steps + CREDIT_STEPS + BOUNDS.steps


def test_where_nothing_is_accepted_trials_become_rare() -> None:
    steps = 50_000
    others = sum(depth != 0 for depth in run(DepthExplorer(4), steps, 0))
    assert others <= 0.02 / 2**QUIET_MAX * steps + CREDIT_STEPS + 4 * BURST_STEPS


def test_a_trial_in_a_quick_moment_is_no_promise() -> None:
    explorer, ran = DepthExplorer(4), []
    for _ in range(5_000):
        depth = explorer.choose(0, BOUNDS, 1)
        explorer.ran(depth, 1, 1, STEP_MS / 3 if depth else STEP_MS)
        ran.append(depth)
    lengths = {len(burst) for burst in "".join(str(d) if d else " " for d in ran[100:]).split()}
    assert lengths == {BURST_STEPS}


def test_a_trial_that_pays_for_itself_costs_no_credit() -> None:
    explorer = DepthExplorer(4)
    run(explorer, 1_000, 0)
    others = [sum(depth != 0 for depth in run(explorer, 1_000, 0, goodput={1: 2, 2: 3, 4: 5})) for _ in range(10)]
    assert min(others) > 2 * 0.02 * 1_000, "more than the share, for nothing is lost"


def test_trials_come_one_by_one() -> None:
    explorer = DepthExplorer(4)
    run(explorer, 1_000, 0)
    run(explorer, 5_000, 0, NO_EXPLORATION)
    ran = run(explorer, 100, 0)
    assert sum(depth != 0 for depth in ran) <= CREDIT_STEPS + BURST_STEPS


def test_depth_0_is_measured_first() -> None:
    ran = run(DepthExplorer(4), 200, 4, goodput={4: 4})
    assert [depth for depth in ran if depth != 4][:BURST_STEPS] == [0] * BURST_STEPS


def test_every_depth_is_tried() -> None:
    assert set(run(DepthExplorer(4), 5_000, 0)) == {0, 1, 2, 4}


def test_without_a_share_nothing_is_tried() -> None:
    assert set(run(DepthExplorer(4), 5_000, 2, NO_EXPLORATION)) == {2}


def test_the_deepest_that_may_be_tried_is_bounded() -> None:
    assert set(run(DepthExplorer(4), 5_000, 0, Bounds(0.02, 20, depth_max=1))) == {0, 1}


def test_a_burst_that_brings_much_more_goes_on_to_a_whole_block() -> None:
    explorer = DepthExplorer(4)
    run(explorer, 5_000, 0)
    ran = run(explorer, 2_000, 0, goodput={4: 4})
    lengths = [len(burst) for burst in "".join("x" if d == 4 else " " for d in ran).split()]
    assert max(lengths) == BOUNDS.steps


def test_a_burst_ends_when_its_depth_is_asked_for_or_the_batch_grows() -> None:
    explorer = DepthExplorer(4)
    while (depth := explorer.choose(0, BOUNDS, 1)) == 0:
        explorer.ran(0, 1, 1, STEP_MS)
    assert explorer.choose(depth, BOUNDS, 1) == depth
    assert explorer.choose(0, BOUNDS, 16) == 0


def plan(knobs: Knobs | None, *overrides: Override) -> Plan:
    return Plan("e", 1, 1_000.0, Mode.ACT, knobs={} if knobs is None else {"r1": knobs}, overrides=overrides)


def by_hand(target: str, knob: Knob = Knob.SPECULATIVE_DEPTH) -> Override:
    return Override("o", knob, target, 0)


def test_exploration_follows_the_plan() -> None:
    config = PolicyConfig(speculation=SpeculationConfig(explore_share=0.05, steps_min=30))
    assert exploration(config, plan(Knobs(speculative_depth=2)), "r1") == Bounds(0.05, 30, None)
    assert exploration(config, plan(Knobs(8, 64)), "r1") == NO_EXPLORATION
    assert exploration(config, plan(None), "r1") == NO_EXPLORATION


def test_a_depth_set_by_hand_is_exactly_that() -> None:
    config, knobs = PolicyConfig(), Knobs(speculative_depth=0)
    assert exploration(config, plan(knobs, by_hand(ANY)), "r1") == NO_EXPLORATION
    assert exploration(config, plan(knobs, by_hand("r1")), "r1") == NO_EXPLORATION
    assert exploration(config, plan(knobs, by_hand("r2")), "r1") != NO_EXPLORATION
    assert exploration(config, plan(knobs, by_hand("r1", Knob.STEP_TOKENS_MAX)), "r1") != NO_EXPLORATION


def test_the_bounds_of_the_knob_hold_for_exploration() -> None:
    config = PolicyConfig(guard=GuardConfig(knobs={"speculative_depth": KnobGuard(max=2)}))
    assert exploration(config, plan(Knobs(speculative_depth=1)), "r1").depth_max == 2


def test_it_can_be_switched_off() -> None:
    config = PolicyConfig(speculation=SpeculationConfig(enabled=False))
    assert exploration(config, plan(Knobs(speculative_depth=1)), "r1") == NO_EXPLORATION
