"""Fine counts of token gaps: quantiles near the true ones, live buckets without error."""

from bisect import bisect_left
from itertools import pairwise
from random import Random

import pytest

from autoscaling.simulator.engine_steps import Gaps
from autoscaling.simulator.gaps import BOUNDS_MS, RATIO_MAX, GapCounts
from policies.types import LATENCY_BOUNDS_MS, Histogram


def test_bounds_are_close_and_hold_the_live_ones() -> None:
    assert set(LATENCY_BOUNDS_MS) <= set(BOUNDS_MS)
    assert all(1 < b / a <= RATIO_MAX + 1e-9 for a, b in pairwise(BOUNDS_MS))


@pytest.mark.parametrize("ms", [0.02, 0.7, 6.95, 50.1, 62.0, 1_234.0, 599_000.0])
@pytest.mark.parametrize("q", [0.0, 0.5, 0.99, 1.0])
def test_one_gap_again_and_again_is_every_quantile(ms: float, q: float) -> None:
    gaps = Gaps()
    gaps.add(round(ms * 1e6), 0, 100, 3, round(ms * 1e8))
    taken = gaps.take()
    assert taken.count == 300
    assert taken.quantile_ms(q) == pytest.approx(ms, rel=0.021)
    assert taken.mean_ms() == pytest.approx(ms)
    assert gaps.take().count == 0


def test_a_growing_run_counts_every_step_where_it_belongs() -> None:
    rng = Random("gaps")
    for _ in range(200):
        first, growth, steps = rng.randint(10**5, 10**8), rng.choice([0, 1, 37, 10**4, 10**6]), rng.randint(1, 300)
        lasting = [first + growth * i for i in range(steps)]
        gaps = Gaps()
        gaps.add(first, growth, steps, 2, sum(lasting))
        live = [0] * (len(LATENCY_BOUNDS_MS) + 1)
        for ns in lasting:
            live[bisect_left(LATENCY_BOUNDS_MS, ns / 1e6)] += 2
        taken = gaps.take()
        assert taken.live() == Histogram(tuple(live), taken.sum_ms)
        middle = sorted(lasting)[(steps - 1) // 2] / 1e6
        assert taken.quantile_ms((0.5 + (steps - 1) // 2) / steps) == pytest.approx(middle, rel=0.021)


def test_live_buckets_keep_their_counts_and_their_quantiles() -> None:
    histogram = Histogram((7, 0, 0, 40_000, 3, *(0,) * (len(LATENCY_BOUNDS_MS) - 5), 1), 400_000.0)
    gaps = GapCounts.of(histogram)
    assert gaps.live() == histogram
    assert gaps.quantile_ms(0.5) == pytest.approx(histogram.quantile_ms(0.5) or 0, rel=0.01)


def test_nothing_counted_is_unknown() -> None:
    assert GapCounts().quantile_ms(0.5) is None
    assert GapCounts().mean_ms() is None
