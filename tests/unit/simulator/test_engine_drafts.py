"""Speculation of the modelled engine: tokens and time by depth, what the window says, the knob."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from autoscaling.simulator.engine import Job, SimEngine
from autoscaling.simulator.engine_drafts import tokens_per_step
from autoscaling.simulator.spec import EngineProfile, SimRequest, StepLaw
from policies.speculation import Bounds
from policies.speculation.explorer import QUIET_MAX
from policies.types import Knobs

MS = 1_000_000
LAW = StepLaw(a_ms=10.0, b_ms=0.0, c_ms=0.0, d_ms=1.0)
PROFILE = EngineProfile(
    "test", "none", 1, "none", LAW, 160_000, 80_000, 0.0, 0.0, "made up", step_tokens_max=512, speculative_depth=4
)


def decode_ms(
    depth: int | None, acceptance: float | None, tokens: int = 1_001, jobs: int = 1
) -> tuple[float, SimEngine]:
    """Time from first to last token of ``jobs`` like answers, and the engine."""
    engine = SimEngine(PROFILE, Random(1), learn=False)
    engine.set_knobs(Knobs(speculative_depth=depth), 0)
    for i in range(jobs):
        request = SimRequest(i, 0, 10, tokens, draft_acceptance=acceptance)
        engine.submit(Job(request, tokens), 0)
    first = last = 0
    while (at_ns := engine.wake_ns()) is not None:
        for event in engine.advance(at_ns):
            first, last = (event.at_ns, last) if event.kind == "first_token" else (first, event.at_ns)
    return (last - first) / MS, engine


@pytest.mark.parametrize(
    ("acceptance", "depth", "tokens"), [(None, 4, 1.0), (0.0, 4, 1.0), (1.0, 4, 5.0), (0.5, 2, 1.75), (0.9, 0, 1.0)]
)
def test_tokens_of_a_step(acceptance: float | None, depth: int, tokens: float) -> None:
    assert tokens_per_step(acceptance, depth) == pytest.approx(tokens)


@pytest.mark.parametrize("jobs", [1, 8])
@pytest.mark.parametrize(("acceptance", "depth"), [(None, 4), (0.0, 4), (0.7, 1), (0.7, 4), (1.0, 2), (0.7, 0)])
def test_an_answer_takes_as_long_as_its_steps(acceptance: float | None, depth: int, jobs: int) -> None:
    drafted = 0 if acceptance is None else depth
    expected = 1_000 / tokens_per_step(acceptance, depth) * (10.0 + 1.0 * drafted * jobs)
    assert decode_ms(depth, acceptance, jobs=jobs)[0] == pytest.approx(expected, rel=1e-3)


def test_without_an_opinion_the_start_up_depth_holds_and_no_knob_goes_beyond() -> None:
    assert decode_ms(None, 0.7)[0] == decode_ms(4, 0.7)[0] == decode_ms(9, 0.7)[0]


def test_an_engine_that_does_not_speculate_says_so() -> None:
    assert SimEngine(replace(PROFILE, speculative_depth=0), Random(1)).drafting.depth is None
    assert SimEngine(PROFILE, Random(1)).drafting.depth == 4


def test_the_window_tells_depths_drafts_and_what_was_kept() -> None:
    took_ms, engine = decode_ms(4, 0.5)
    window = engine.take_window(10**15)
    (use,) = window.depth_use
    assert (use.depth, use.batch_max, use.tokens) == (4, 1, 1_000)
    assert use.seqs == use.steps == pytest.approx(1_000 / tokens_per_step(0.5, 4), abs=1)
    assert use.busy_ms == pytest.approx(took_ms, rel=1e-3)
    assert window.draft_tokens == use.drafted == pytest.approx(4 * use.seqs, rel=0.01)
    assert window.accepted_tokens == pytest.approx(1_000 - use.seqs, abs=2)
    assert engine.take_window(10**15).depth_use == ()


def test_steps_are_told_by_class_of_batch_sizes() -> None:
    _, engine = decode_ms(4, 0.5, jobs=3)
    assert {use.batch_max for use in engine.take_window(10**15).depth_use} <= {1, 2, 4}


@pytest.mark.parametrize("acceptance", [0.5, 1.0])
def test_the_step_model_learns_from_steps_without_drafts_alone(acceptance: float) -> None:
    engine = SimEngine(PROFILE, Random(1), learn=True)
    now_ns = 0
    for i in range(60):
        engine.set_knobs(Knobs(speculative_depth=i % 5), now_ns)
        engine.submit(Job(SimRequest(i, now_ns, 10 + i, 50, draft_acceptance=acceptance), 50), now_ns)
        while (wake_ns := engine.wake_ns()) is not None:
            now_ns = wake_ns
            engine.advance(now_ns)
    model = engine.step_model()
    assert model.a_ms == pytest.approx(10.0)
    assert model.d_ms == pytest.approx(1.0)
    assert model.drifts == 0


def test_exploration_is_the_live_rule_and_stays_within_its_share() -> None:
    engine = SimEngine(PROFILE, Random(1), learn=False)
    engine.set_knobs(Knobs(speculative_depth=0), 0, Bounds(0.02, 20))
    engine.submit(Job(SimRequest(0, 0, 10, 20_000, draft_acceptance=0.0), 20_000), 0)
    while (at_ns := engine.wake_ns()) is not None:
        engine.advance(at_ns)
    uses = {use.depth: use.busy_ms for use in engine.take_window(10**15).depth_use}
    assert set(uses) == {0, 1, 2, 4}
    explored = sum(uses.values()) - uses[0]
    # text of which nothing is accepted: the share of 0.02 is halved for each of its first fruitless trials
    assert 0.5 * 0.02 / 2**QUIET_MAX * sum(uses.values()) < explored < 0.02 * sum(uses.values())
