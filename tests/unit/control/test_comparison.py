"""Comparison of two stretches: noise, load, trends, cost."""

from __future__ import annotations

import random

import pytest

from policies.control.comparison import Span, compare, span_of
from policies.control.objective import ObjectiveSample
from policies.steering import Verdict


def stretch(
    rng: random.Random, share: float, *, ticks: int = 15, demand: float = 40, usd: float = 4.0, slope: float = 0.0
) -> Span:
    samples = []
    for i in range(ticks):
        n = round(demand * rng.uniform(0.8, 1.2))
        met = sum(rng.random() < share + slope * i for _ in range(n))
        samples.append(ObjectiveSample(met, n, n, 0, 0, 0, usd, 1.0))
    span = span_of(samples)
    assert span is not None
    return span


def verdicts(
    before: dict[str, float], after: dict[str, float], costs: bool = False, runs: int = 400
) -> dict[str, float]:
    """Share of each verdict over many draws."""
    rng = random.Random(7)
    found = [
        compare(stretch(rng, **before), stretch(rng, **after), 0.05, costs, 20).verdict  # type: ignore[arg-type]
        for _ in range(runs)
    ]
    return {v.value: found.count(v) / runs for v in Verdict}


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95, 1.0])
def test_noise_alone_is_hardly_ever_called_better_or_worse(share: float) -> None:
    found = verdicts({"share": share}, {"share": share})
    assert found["worse"] + found["better"] <= 0.01


def test_a_clear_fall_is_found_and_a_clear_rise_too() -> None:
    assert verdicts({"share": 0.95}, {"share": 0.75})["worse"] >= 0.99
    assert verdicts({"share": 0.75}, {"share": 0.95})["better"] >= 0.99


def test_less_than_the_noise_share_is_neutral_however_many_requests_say_so() -> None:
    found = verdicts({"share": 0.95, "demand": 2_000}, {"share": 0.93, "demand": 2_000}, runs=30)
    assert found["neutral"] == 1.0


def test_a_fleet_that_is_full_is_not_blamed_for_a_load_that_grew() -> None:
    found = verdicts({"share": 0.8, "demand": 40}, {"share": 0.8 / 1.2, "demand": 48})
    assert found["worse"] <= 0.02


@pytest.mark.slow
def test_beyond_a_third_more_or_less_load_nothing_is_said() -> None:
    assert verdicts({"share": 0.9, "demand": 40}, {"share": 0.3, "demand": 80})["overtaken"] == 1.0
    assert verdicts({"share": 0.9, "demand": 40}, {"share": 0.8, "demand": 20})["overtaken"] >= 0.99
    assert verdicts({"share": 0.9, "demand": 40}, {"share": 0.3, "demand": 20})["worse"] == 1.0, (
        "less load is no excuse"
    )


@pytest.mark.parametrize("proven_ps", [0.0, 33.0])
def test_no_load_that_was_carried_before_excuses_a_fall(proven_ps: float) -> None:
    """A fleet that keeps 26 promises a second, whatever it is asked for."""
    rng = random.Random(7)

    def full(demand: float) -> Span:
        asked = [round(demand * rng.uniform(0.8, 1.2)) for _ in range(15)]
        span = span_of([ObjectiveSample(min(n, rng.randint(25, 27)), n, n, 0, 0, 0, 4.0, 1.0) for n in asked])
        assert span is not None
        return span

    pairs = [(full(26), full(33)) for _ in range(200)]
    found = [compare(a, b, 0.05, costs=False, distance=20, proven_ps=proven_ps).verdict for a, b in pairs]
    worse = found.count(Verdict.WORSE) / len(found)
    assert worse >= 0.9 if proven_ps else worse == 0


@pytest.mark.parametrize("of", ["prompt_tokens", "output_tokens"])
def test_prompts_and_answers_that_became_longer_are_another_load(of: str) -> None:
    rng = random.Random(7)

    def span(share: float, prompt: int) -> Span:
        samples = []
        for _ in range(15):
            n = round(40 * rng.uniform(0.8, 1.2))
            tokens = sum(round(prompt * rng.uniform(0.5, 1.5)) for _ in range(n))
            samples.append(ObjectiveSample(round(share * n), n, n, 0, 0, 0, 4.0, 1.0, **{of: tokens}))
        found = span_of(samples)
        assert found is not None
        return found

    assert compare(span(0.95, 300), span(0.7, 450), 0.05, costs=False).verdict is Verdict.OVERTAKEN
    assert compare(span(0.95, 300), span(0.7, 310), 0.05, costs=False).verdict is Verdict.WORSE
    assert compare(span(0.95, 450), span(0.5, 300), 0.05, costs=False).verdict is Verdict.WORSE


@pytest.mark.parametrize("open_share", [0.3, 1.0])
def test_what_is_open_when_a_stretch_begins_and_ends_is_no_noise(open_share: float) -> None:
    """Every request keeps its promise three ticks after it came: arrivals and endings of a block are not the same."""
    rng = random.Random(5)
    errors = []
    for _ in range(100):
        arrivals = [rng.randint(5, 13) for _ in range(18)]
        ended = [round(open_share * arrivals[i] + (1 - open_share) * arrivals[i + 3]) for i in range(15)]
        span = span_of([ObjectiveSample(e, a, e, 0, 0, 0, 4.0, 1.0) for a, e in zip(arrivals[3:], ended, strict=True)])
        assert span is not None
        errors.append((span.share, span.error))
    assert min(share for share, _ in errors) >= 0.97
    assert max(error for _, error in errors) <= 0.02


def test_a_share_that_was_falling_already_is_expected_to_go_on() -> None:
    falling = {"share": 1.0, "slope": -0.025, "demand": 100}
    assert verdicts(falling, {"share": 0.35, "demand": 100}, runs=100)["worse"] <= 0.05
    assert verdicts({"share": 0.83, "demand": 100}, {"share": 0.35, "demand": 100}, runs=100)["worse"] == 1.0


def test_what_waits_has_not_met_its_promise() -> None:
    """A setting that starves the engine ends no request at all: the share of ended ones would say nothing."""
    rng = random.Random(3)
    hung = span_of([ObjectiveSample(0, 40, 0, 0, 0, 0, 4.0, 1.0) for _ in range(15)])
    assert hung is not None
    assert compare(stretch(rng, 0.9), hung, 0.05, costs=False).verdict is Verdict.WORSE


@pytest.mark.slow
def test_cost_counts_where_the_share_is_the_same_and_the_change_was_about_cost() -> None:
    dear, cheap = {"share": 0.95, "usd": 5.0}, {"share": 0.95, "usd": 4.0}
    assert verdicts(dear, cheap, costs=True)["better"] >= 0.9
    assert verdicts(cheap, dear, costs=True)["worse"] >= 0.9
    assert verdicts(cheap, dear, costs=False)["neutral"] >= 0.97
    assert verdicts(dear, {"share": 0.6, "usd": 2.0}, costs=True)["worse"] >= 0.99, "the promise comes before the price"


def test_too_few_ticks_or_requests_are_no_stretch() -> None:
    assert span_of([]) is None
    assert span_of([ObjectiveSample(9, 9, 9, 0, 0, 0, 1.0, 1.0)] * 3) is None
    assert span_of([ObjectiveSample(1, 1, 1, 0, 0, 0, 1.0, 1.0)] * 15) is None
