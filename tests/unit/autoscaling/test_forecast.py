from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaling.forecast import RESIDUALS_MAX, Outlook, Series
from autoscaling.forecasters import GRAIN_S, SEASON_SLOTS, Agents, Ewma, Holt, Season, forecasters

HORIZON_S = 60.0
SECOND_NS = 1_000_000_000


class Play:
    """A load played second by second, with what was said and what came."""

    def __init__(
        self,
        load: Callable[[int], float],
        seconds: int,
        *,
        noise: float = 0.0,
        seasons_s: tuple[float, ...] = (),
        tasks: Callable[[int], int] | None = None,
        scale: float = 1.0,
        seed: int = 1,
    ) -> None:
        rng = Random(seed)
        self.series = Series(seasons_s, 0.9)
        self.load, self.seconds = load, seconds
        self.said: list[Outlook | None] = []
        for t in range(seconds):
            value = load(t) * max(0.0, 1 + noise * rng.gauss(0, 1)) * scale
            self.series.add(value, t * SECOND_NS, HORIZON_S, tasks(t) if tasks else None)
            self.said.append(self.series.outlook())

    def actual(self, t: int) -> float:
        """Mean load around one horizon after ``t``."""
        middle, half = t + round(HORIZON_S), round(HORIZON_S) // 2
        return sum(self.load(middle + d) for d in range(-half, half)) / (2 * half)

    def judged(self, begin: int) -> tuple[float, float]:
        """From ``begin`` on: share of the time that the load stayed below, and upper over actual on average."""
        pairs = [(o.upper, self.actual(t)) for t in range(begin, self.seconds - 90) if (o := self.said[t]) is not None]
        return sum(a <= u for u, a in pairs) / len(pairs), sum(u / a for u, a in pairs if a > 0) / len(pairs)

    def used(self, begin: int) -> str:
        """The forecaster that was used most from ``begin`` on."""
        names = [o.by for o in self.said[begin:] if o is not None]
        return max(set(names), key=names.count)


def day(t: int) -> float:
    return 5 + 4 * math.sin(2 * math.pi * t / 3_600)


def test_a_level_with_noise_is_a_mean_and_not_much_margin() -> None:
    play = Play(lambda _t: 5.0, 6_000, noise=0.3)
    below, over = play.judged(3_000)
    assert below >= 0.9
    assert over < 1.12
    assert play.used(3_000).startswith("ewma")


def test_a_ramp_is_followed_by_its_trend() -> None:
    play = Play(lambda t: 1 + t / 300, 6_000, noise=0.05)
    below, over = play.judged(3_000)
    assert below > 0.85
    assert over < 1.1
    assert play.used(3_000) == "holt"


@pytest.mark.slow
def test_a_day_that_comes_again_is_known_from_the_day_before() -> None:
    play = Play(day, 14_400, noise=0.1, seasons_s=(3_600.0,))
    below, over = play.judged(7_200)
    assert play.used(7_200) == "season 3600 s"
    assert below > 0.85
    assert over < 1.12
    _, without = Play(day, 14_400, noise=0.1).judged(7_200)
    assert over < without


def test_steps_are_covered_as_often_as_asked_for() -> None:
    below, over = Play(lambda t: 2.0 if t // 1_500 % 2 else 6.0, 15_000, noise=0.1).judged(6_000)
    assert below > 0.85
    assert over < 1.2


def test_a_storm_of_agents_is_seen_in_open_tasks_before_their_calls_come() -> None:
    def tasks(t: int) -> int:
        return 20 if t % 1_000 < 300 else 2

    play = Play(lambda t: 0.2 * tasks(t - 60), 12_000, noise=0.1, tasks=tasks)
    assert play.used(6_000) == "agents"
    below, over = play.judged(6_000)
    assert below > 0.8
    assert over < 1.25


def test_nothing_is_trusted_before_errors_are_known() -> None:
    play = Play(lambda _t: 5.0, 1_200, noise=0.2)
    first = next(o for o in play.said if o is not None)
    assert not first.trusted
    assert first.upper == first.value
    last = play.said[-1]
    assert last is not None
    assert last.trusted
    assert last.upper > last.value


def test_two_like_forecasters_do_not_alternate() -> None:
    play = Play(lambda _t: 5.0, 12_000, noise=0.3)
    names = [o.by for o in play.said if o is not None]
    assert sum(a != b for a, b in pairwise(names)) <= 6


@pytest.mark.parametrize("scale", [1e-3, 1e5])
def test_the_forecast_grows_with_the_load_and_nothing_else_changes(scale: float) -> None:
    one, other = (Play(day, 5_000, noise=0.2, seasons_s=(3_600.0,), scale=s) for s in (1.0, scale))
    for a, b in zip(one.said, other.said, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert (a.by, a.trusted) == (b.by, b.trusted)
            assert b.upper == pytest.approx(a.upper * scale, rel=1e-6)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.floats(0, 1e9), min_size=5, max_size=400),
    st.floats(0, 1e6),
    st.lists(st.sampled_from([1, 1, 1, 5, 90, 4_000]), min_size=1, max_size=20),
)
def test_never_negative_never_nan_and_bounded(values: list[float], horizon_s: float, pauses: list[int]) -> None:
    series, now_ns = Series((600.0,), 0.95), 0
    for i, value in enumerate(values * 2):
        now_ns += pauses[i % len(pauses)] * SECOND_NS
        series.add(value, now_ns, horizon_s, i % 3)
        outlook = series.outlook()
        if outlook is not None:
            assert math.isfinite(outlook.value)
            assert math.isfinite(outlook.upper)
            assert outlook.value >= 0
            assert outlook.upper >= 0
    for judged in series._judged:
        assert len(judged.residuals) <= RESIDUALS_MAX
    assert len(series._said) <= 3_600 * 2 / GRAIN_S


def test_no_load_is_no_load() -> None:
    outlook = Play(lambda _t: 0.0, 1_500).said[-1]
    assert outlook is not None
    assert outlook.upper == 0


def test_after_a_long_silence_the_day_goes_on() -> None:
    series = Series((3_600.0,), 0.9)
    for t in [*range(9_000), *range(9_600, 16_500)]:
        series.add(day(t), t * SECOND_NS, HORIZON_S)
    outlook = series.outlook()
    assert outlook is not None
    assert outlook.by == "season 3600 s"
    assert outlook.value == pytest.approx(day(16_560), rel=0.1)


def test_the_trend_of_holt_is_damped() -> None:
    holt = Holt()
    for i in range(200):
        holt.learn(float(i), None)
    near, far, farther = (holt.ahead(s) or 0.0 for s in (60.0, 3_600.0, 36_000.0))
    assert near == pytest.approx(199 + 60 / GRAIN_S, rel=0.05)
    assert near < far
    assert farther - far < 0.01 * far


def test_a_mean_does_not_start_at_zero() -> None:
    ewma = Ewma(600.0)
    ewma.learn(7.0, None)
    assert ewma.ahead(60.0) == 7.0


def test_agents_say_nothing_where_nobody_has_tasks() -> None:
    agents = Agents()
    agents.learn(5.0, 0)
    assert agents.ahead(60.0) is None
    agents.learn(5.0, 4)
    assert agents.ahead(60.0) is not None


def test_a_season_needs_one_behind_it() -> None:
    season = Season("day", SEASON_SLOTS * GRAIN_S)
    for i in range(SEASON_SLOTS):
        season.learn(1.0 + i % 7, None)
    assert season.ahead(60.0) is None
    for i in range(60):
        season.learn(1.0 + i % 7, None)
    assert season.ahead(60.0) is not None
    assert [f.name for f in forecasters((86_400.0,))].count("season 86400 s") == 1
