"""The capacity planner on small cases whose answers can be worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from autoscaling.planner import Goal, Plan, Task, plan
from autoscaling.planning.fleets import ttft_floor_ms, unreachable, work_of
from autoscaling.planning.load import LoadError, faster, measure, part_of
from autoscaling.planning.trials import gateways_for
from autoscaling.simulator.spec import EngineProfile, NetworkSpec, SourceFactory, StepLaw
from autoscaling.simulator.workload.generators import from_curve
from autoscaling.simulator.workload.lengths import Fixed, LogNormal
from autoscaling.simulator.workload.rates import RateCurve
from autoscaling.simulator.workload.trace import Options
from policies.config import AdmissionConfig, ControlConfig, ObjectivesConfig, PolicyConfig

PROFILE = EngineProfile(
    name="plain", gpu="P1", gpus=1, model="m", law=StepLaw(1.0, 0.0, 0.0, 1.0), kv_tokens=100_000,
    context_tokens_max=50_000, cold_start_ms=2_000.0, usd_per_gpu_hour=1.0, source="a test", step_tokens_max=4_096,
)  # fmt: skip
"""A prompt of 1,000 tokens takes 1,001 ms; a token takes 1 ms whatever the batch."""

GOAL = Goal(ObjectivesConfig(ttft_ms=4_000, itl_ms=2_000, quantile=0.95), 0.95)

CLOCK = ControlConfig(tick_ms=5_000, plan_ttl_ms=20_000)
"""The controller has little to do in fleets whose number stays."""


def steady(rate_rps: float, prompt: int = 1_000, output: int = 1, duration_s: float = 24.0) -> SourceFactory:
    """Like clockwork: every request alike, gaps without chance."""
    curve = RateCurve.constant(rate_rps)
    return from_curve(curve, Fixed(prompt, output), Options(duration_s=duration_s), cv=0.0)


def task(load: SourceFactory, *profiles: EngineProfile, goal: Goal = GOAL, **changed: object) -> Task:
    values: dict[str, object] = {"divided": False, "autoscaled": False, "gateways": 1} | changed
    config = PolicyConfig(objectives=goal.objectives, control=CLOCK, admission=AdmissionConfig(engine_wait_share=None))
    return Task("test", load, profiles or (PROFILE,), goal, config, **values)  # type: ignore[arg-type]


def words(found: Plan) -> str | None:
    return found.best.candidate.words() if found.best else None


# --- known answers ----------------------------------------------------------------------------------------------------


def test_the_number_is_the_load_over_what_one_engine_does() -> None:
    found = plan(task(steady(4.5)))
    assert words(found) == "5 x plain, static", "4.5 s of prompts a second"
    assert found.best is not None
    assert found.best.usd_per_hour == 5.0
    assert found.complete
    below = found.next_cheaper
    assert below is not None
    assert below.candidate.replicas == 4
    assert {b.objective for b in below.broken} == {"TTFT", "attainment"}
    assert below.broken[0].cause == "prefill"
    assert below.broken[0].at_s >= 10, "the queue grows, the end is worst"
    held, broke = found.room
    assert (held, broke) in ((1.1, 1.2), (1.2, 1.3)), "5 engines carry 1.11 times the load, a little more for a while"


@pytest.mark.parametrize(("price", "expected"), [(1.9, "5 x plain, static"), (1.6, "3 x quick, static")])
def test_the_cheaper_of_two_kinds_wins_and_the_other_is_the_runner_up(price: float, expected: str) -> None:
    quick = replace(PROFILE, name="quick", gpu="P2", law=StepLaw(1.0, 0.0, 0.0, 0.5), usd_per_gpu_hour=price)
    found = plan(task(steady(4.5), PROFILE, quick))
    assert words(found) == expected
    assert found.runner_up is not None
    assert found.runner_up.candidate.profile.name == ("quick" if price == 1.9 else "plain")


def test_a_kind_whose_least_costs_more_is_never_simulated() -> None:
    dear = replace(PROFILE, name="dear", usd_per_gpu_hour=50.0)
    found = plan(task(steady(4.5), PROFILE, dear))
    assert {t.candidate.profile.name for t in found.trials} == {"plain"}
    assert {o.words: o.status for o in found.outcomes}["dear"] == "too dear"


def test_a_load_with_a_peak_is_cheaper_with_a_number_that_moves() -> None:
    curve = RateCurve.steps([(30, 0.4), (40, 3.0), (70, 0.4)])
    load = from_curve(curve, Fixed(1_000, 1), cv=0.0)
    goal = Goal(ObjectivesConfig(ttft_ms=12_000, itl_ms=2_000, quantile=0.9), 0.9)
    scaling = replace(PolicyConfig().scaling, down_window_s=8.0, up_ticks=1)
    base = task(load, replace(PROFILE, cold_start_ms=500.0), goal=goal, autoscaled=True)
    control = ControlConfig(tick_ms=2_000)
    found = plan(replace(base, config=replace(base.config, scaling=scaling, control=control)))
    assert found.best is not None
    assert found.best.candidate.mode == "autoscaled", [t.candidate.words() for t in found.trials if t.holds]
    static = min(t.usd_per_hour for t in found.trials if t.holds and t.candidate.mode == "static")
    assert found.best.usd_per_hour < static


def test_dividing_pays_where_prompts_disturb_tokens() -> None:
    law = StepLaw(5.0, 0.01, 0.0, 0.5)
    goal = Goal(ObjectivesConfig(ttft_ms=3_000, itl_ms=10, quantile=0.95), 0.95)
    load = from_curve(RateCurve.constant(1.2), Fixed(1_000, 60), Options(duration_s=25.0))
    found = plan(task(load, replace(PROFILE, law=law), goal=goal, divided=True))
    assert found.best is not None
    assert found.best.candidate.divided
    mixed = [
        t for t in found.trials if not t.candidate.divided and t.candidate.replicas <= found.best.candidate.replicas
    ]
    assert mixed
    assert all(b.objective in ("ITL", "attainment") for t in mixed for b in t.broken)


def test_the_same_task_gives_the_same_plan() -> None:
    load = from_curve(RateCurve.constant(4.0), LogNormal(800, 20), Options(duration_s=15.0))
    first, second = (plan(task(load)) for _ in range(2))
    assert [t.candidate for t in first.trials] == [t.candidate for t in second.trials]
    assert first.best is not None
    assert second.best is not None
    assert first.best.worst.summary.digest == second.best.worst.summary.digest


# --- impossible -------------------------------------------------------------------------------------------------------


def test_a_ttft_below_one_prompt_is_said_at_once_with_what_could_be() -> None:
    goal = Goal(ObjectivesConfig(ttft_ms=500, itl_ms=2_000), 0.95)
    found = plan(task(steady(1.0), goal=goal))
    assert found.impossible
    assert found.best is None
    assert found.runs == 0
    [(name, reason)] = found.out_of_reach
    assert (name, reason.objective) == ("plain", "TTFT")
    assert reason.reachable == pytest.approx(1_001, abs=5)
    held = plan(task(steady(0.3), goal=Goal(replace(goal.objectives, ttft_ms=reason.reachable + 1), 0.95)))
    assert held.best is not None, "what is said to be reachable is"


def test_a_gap_below_one_step_is_said_at_once() -> None:
    slow = replace(PROFILE, law=StepLaw(20.0, 1.0, 0.0, 0.1))
    found = plan(task(steady(1.0, output=10), slow, goal=Goal(ObjectivesConfig(ttft_ms=5_000, itl_ms=15), 0.95)))
    assert [u.objective for _, u in found.out_of_reach] == ["ITL"]
    assert found.out_of_reach[0][1].reachable == pytest.approx(21.0)
    assert found.runs == 0


def test_requests_longer_than_the_context_are_said_at_once() -> None:
    short = replace(PROFILE, context_tokens_max=900)
    found = plan(task(steady(1.0), short))
    assert [u.objective for _, u in found.out_of_reach] == ["context"]


def test_what_only_some_prompts_miss_is_not_impossible() -> None:
    goal = Goal(ObjectivesConfig(ttft_ms=1_500, itl_ms=2_000, quantile=0.5), 0.5)
    load = measure(
        from_curve(RateCurve.constant(5.0), LogNormal(1_200, 1), Options(duration_s=60.0)), 1, goal.objectives
    )
    assert unreachable(PROFILE, load, goal, NetworkSpec()) is None
    assert unreachable(PROFILE, load, replace(goal, attainment=0.99), NetworkSpec()) is not None


def test_growing_that_does_not_help_ends_the_search() -> None:
    # One gateway that takes one request at a time: engines are not what is short.
    limits = AdmissionConfig(inflight_requests_max=1)
    base = task(steady(8.0, duration_s=20.0))
    found = plan(replace(base, config=replace(base.config, admission=limits)))
    assert found.best is None
    assert found.complete
    assert [o.status for o in found.outcomes] == ["not found"]
    assert found.trials[-1].broken[0].cause == "refused"
    assert found.runs < 12


# --- ends early -------------------------------------------------------------------------------------------------------


def stopped_after(looks: int) -> Callable[[], bool]:
    count = iter(range(1_000_000))
    return lambda: next(count) >= looks


def test_ctrl_c_leaves_the_best_so_far_marked_as_such() -> None:
    stopped: list[str] = []

    def stop() -> bool:
        return bool(stopped)

    def tell(text: str) -> None:
        if "best so far" in text:
            stopped.append(text)

    found = plan(task(steady(4.5)), tell=tell, stop=stop)
    assert len(stopped) == 1
    assert not found.complete
    assert found.why_incomplete == "ended by the user"
    assert found.best is not None
    assert found.best.holds


def test_ctrl_c_before_anything_holds_leaves_nothing() -> None:
    found = plan(task(steady(4.5)), stop=stopped_after(0))
    assert found.best is None
    assert not found.complete
    assert not found.impossible


def test_the_number_of_simulations_is_bounded() -> None:
    found = plan(task(steady(4.5), runs_max=2))
    assert found.runs == 2
    assert not found.complete
    assert "used up" in found.why_incomplete


def test_a_largest_fleet_is_heeded() -> None:
    found = plan(task(steady(4.5), replicas_max=3))
    assert found.best is None
    assert "3 replicas, the most allowed" in found.outcomes[0].text


# --- parts ------------------------------------------------------------------------------------------------------------


def test_a_load_is_measured_with_every_prefix_cached_that_can_be() -> None:
    load = measure(steady(2.0, duration_s=10.0), 1, GOAL.objectives)
    assert load.requests == 20
    assert load.uncached_mean == load.prompt_mean == 1_000
    assert load.context_mean == 1_000.5
    assert not load.closed
    work = work_of(PROFILE, load, GOAL)
    assert work.prefill_ms == 1.0
    assert work.guess == math.ceil(2.0 / 0.8)


def test_an_empty_load_cannot_be_planned_for() -> None:
    empty = from_curve(RateCurve.constant(0.001), Fixed(1, 1), Options(duration_s=1.0))
    with pytest.raises(LoadError, match="no request"):
        plan(task(empty))


def test_long_loads_are_searched_on_their_hardest_windows() -> None:
    curve = RateCurve.steps([(600, 3.0), (300, 9.0), (600, 3.0)])
    load = measure(from_curve(curve, Fixed(100, 1)), 1, GOAL.objectives)
    windows = load.windows(1.0, 1.0)
    assert windows
    assert 570 <= windows[0].judged_s <= 630
    assert windows[0].end_s - windows[0].judged_s == 300
    assert windows[0].judged_s - windows[0].begin_s == 120


def test_views_play_a_part_or_the_whole_faster() -> None:
    from random import Random

    load = steady(2.0, duration_s=10.0)
    whole = [r.arrival_ns for r in load(Random("1")).arrivals()]
    quick = [r.arrival_ns for r in faster(load, 2.0)(Random("1")).arrivals()]
    assert quick == [round(t / 2) for t in whole]
    window = replace(measure(load, 1, GOAL.objectives)._window(5), begin_s=2.0, end_s=4.0)
    part = [r.arrival_ns for r in part_of(load, window)(Random("1")).arrivals()]
    assert part == [t - 2 * 10**9 for t in whole if 2e9 <= t < 4e9]


def test_gateways_keep_out_of_the_way() -> None:
    load = measure(steady(100.0, duration_s=5.0), 1, GOAL.objectives)
    base = task(steady(1.0))
    tight = replace(base.config, admission=AdmissionConfig(inflight_requests_max=10))
    assert gateways_for(load, replace(base, config=tight, gateways=None)) > gateways_for(load, base) == 2


def test_the_floor_of_the_ttft_counts_chunks() -> None:
    network = NetworkSpec(client_ms=0, hop_ms=0, gateway_ms=0)
    assert ttft_floor_ms(PROFILE, network, 10_000, 10_000) == pytest.approx(10_000 + 3)
    assert ttft_floor_ms(PROFILE, network, 10_000, 1) == pytest.approx(2)


@pytest.mark.parametrize("attainment", [0.0, 1.5, -1.0, math.nan])
def test_a_goal_nobody_can_mean_is_refused(attainment: float) -> None:
    with pytest.raises(ValueError, match="attainment must be"):
        Goal(ObjectivesConfig(), attainment)
