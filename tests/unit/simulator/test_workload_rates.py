"""Rate curves, gaps and lengths: the numbers that come out are the ones asked for."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import islice, pairwise
from random import Random

import pytest

from autoscaling.simulator.spec import SimRequest, SourceFactory
from autoscaling.simulator.workload.generators import bursty, from_curve, poisson, shared_prefix
from autoscaling.simulator.workload.lengths import Empirical, Fixed, Lengths, LogNormal, Quantiles
from autoscaling.simulator.workload.mixture import mixture
from autoscaling.simulator.workload.rates import RateCurve, arrivals_ns, gamma_gaps
from autoscaling.simulator.workload.trace import Options, TraceError


def drawn(factory: SourceFactory, seed: str = "1") -> list[SimRequest]:
    return list(factory(Random(seed)).arrivals())


def times_s(curve: RateCurve, options: Options, seed: str = "1") -> list[float]:
    return [at / 1e9 for at in arrivals_ns(curve, Random(seed), options)]


def test_poisson_has_its_rate_and_its_spread() -> None:
    rows = drawn(poisson(50.0, 100, 10, duration_s=200.0))
    assert len(rows) == pytest.approx(10_000, rel=0.03)
    gaps = [b.arrival_ns - a.arrival_ns for a, b in pairwise(rows)]
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(1.0, abs=0.05)
    assert [r.index for r in rows] == list(range(len(rows)))
    assert {(r.prompt_tokens, r.output_tokens) for r in rows} == {(100, 10)}


@pytest.mark.parametrize("cv", [0.0, 0.3, 3.0])
def test_gaps_have_their_coefficient_of_variation(cv: float) -> None:
    rng, gap = Random("1"), gamma_gaps(cv)
    gaps = [gap(rng) for _ in range(20_000)]
    mean = statistics.mean(gaps)
    assert mean == pytest.approx(1.0, rel=0.06)
    assert statistics.pstdev(gaps) / mean == pytest.approx(cv, rel=0.08)


def test_bursty_keeps_the_mean_rate() -> None:
    counts = [len(drawn(bursty(20.0, 3.0, Fixed(1, 1), duration_s=100.0), f"{seed}")) for seed in range(20)]
    assert statistics.mean(counts) == pytest.approx(2_000, rel=0.08)
    assert statistics.stdev(counts) > 90  # Poisson would have 45


def test_a_sinusoid_is_at_its_low_and_high_when_it_should() -> None:
    times = times_s(RateCurve.sinusoid(5.0, 45.0, 600.0), Options(duration_s=1_800.0))
    by_minute = [0] * 10
    for t in times:
        by_minute[int(t % 600 // 60)] += 1
    assert len(times) == pytest.approx(25 * 1_800, rel=0.03)
    assert by_minute[0] / 180 == pytest.approx(6.29, rel=0.1)  # mean of the first minute
    assert by_minute[5] / 180 == pytest.approx(43.71, rel=0.05)


def test_a_ramp_grows_along_its_line() -> None:
    times = times_s(RateCurve.ramp(0.0, 100.0, 100.0), Options())
    assert len(times) == pytest.approx(5_000, rel=0.05)
    assert sum(t < 50.0 for t in times) / len(times) == pytest.approx(0.25, abs=0.02)
    assert max(times) <= 100.0


def test_steps_and_crowds_come_and_go() -> None:
    steps = times_s(RateCurve.steps([(100.0, 1.0), (100.0, 0.0), (100.0, 10.0)]), Options())
    counts = [sum(low <= t < low + 100 for t in steps) for low in (0, 100, 200)]
    assert counts[1] == 0
    assert counts[0] == pytest.approx(100, abs=40)
    assert counts[2] == pytest.approx(1_000, rel=0.15)
    crowd = RateCurve.flash_crowd(2.0, 40.0, at_s=60.0, rise_s=5.0, hold_s=20.0, fall_s=10.0, duration_s=200.0)
    assert [crowd.rate_rps(t) for t in (0.0, 62.5, 70.0, 90.0, 150.0, 300.0)] == pytest.approx([2, 21, 40, 21, 2, 0])
    assert len(times_s(crowd, Options())) == pytest.approx(crowd.total, rel=0.15)


def test_scale_multiplies_a_rate_and_compress_shortens_its_time() -> None:
    curve = RateCurve.steps([(1_000.0, 4.0), (1_000.0, 8.0)])
    assert len(times_s(curve, Options(scale=0.5))) == pytest.approx(6_000, rel=0.05)
    fast = times_s(curve, Options(compress=10.0))
    assert len(fast) == pytest.approx(1_200, rel=0.1)
    assert max(fast) <= 200.0
    assert len(times_s(curve, Options(start_s=1_000.0))) == pytest.approx(8_000, rel=0.05)


def test_a_periodic_curve_starts_in_its_phase() -> None:
    curve = RateCurve.sinusoid(0.0, 10.0, 100.0).with_options(Options(start_s=130.0))
    whole = RateCurve.sinusoid(0.0, 10.0, 100.0)
    for t in (0.0, 10.0, 50.0, 69.0, 71.0, 99.0, 230.0):
        assert curve.rate_rps(t) == pytest.approx(whole.rate_rps(t + 30.0), abs=1e-6)
    assert curve.total == pytest.approx(whole.total)


def test_tiny_rates_and_tiny_periods_end() -> None:
    assert times_s(RateCurve.constant(1e-300), Options(limit=5)) == []
    assert times_s(RateCurve.sinusoid(0.0, 1e-9, 1e-6), Options(duration_s=1e6)) == []
    assert len(times_s(RateCurve.constant(1e6), Options(limit=1_000))) == 1_000
    assert len(times_s(RateCurve.constant(5.0), Options(limit=3, compress=1e6))) == 3


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: RateCurve.constant(0.0), "zero all the time"),
        (lambda: RateCurve.constant(-1.0), "rate must be in"),
        (lambda: RateCurve.constant(float("nan")), "rate must be in"),
        (lambda: RateCurve.constant(1e9), "rate must be in"),
        (lambda: RateCurve.steps([]), "at least two points"),
        (lambda: RateCurve.steps([(0.0, 1.0)]), "duration_s of a step"),
        (lambda: RateCurve.sinusoid(1.0, 2.0, 0.0), "period_s"),
        (lambda: RateCurve(((0.0, 1.0), (2.0, 1.0), (1.0, 1.0))), "times must grow"),
        (lambda: RateCurve.flash_crowd(1, 2, 10, 1, 1, 1, duration_s=5.0), "times must grow"),
        (lambda: poisson(1.0, 10, 10), "never ends; give duration or limit"),
        (lambda: poisson(1.0, 0, 10, limit=1), "prompt_tokens must be at least 1"),
        (lambda: poisson(1.0, 10, 10**9, limit=1), "output_tokens must be at least 1 and at most 10,000,000"),
        (lambda: gamma_gaps(-1.0), "cv must be"),
        (lambda: LogNormal(0.0, 1.0), "prompt_mean must be"),
        (lambda: Empirical([]), "no lengths"),
        (lambda: from_curve(RateCurve.ramp(0, 1, 10), Fixed(1, 1), Options(start_s=10.0)), "after the end at 10 s"),
        (lambda: from_curve(RateCurve.constant(1e7), Fixed(1, 1), Options(scale=2.0, limit=1)), "rate must be in"),
        (lambda: shared_prefix(RateCurve.constant(1.0), Options(limit=1), groups=0), "groups must be"),
        (mixture, "at least one source"),
    ],
)  # fmt: skip
def test_impossible_loads_are_named(make: Callable[[], object], expected: str) -> None:
    with pytest.raises(TraceError, match=expected):
        make()


@pytest.mark.parametrize(
    ("lengths", "prompt", "output"),
    [
        (LogNormal(1_000.0, 200.0, 1.5, 0.5), 1_000.0, 200.0),
        (Quantiles(((0.0, 10.0), (1.0, 30.0)), ((0.5, 4.0), (1.0, 8.0))), 20.0, 5.0),
        (Empirical([(1, 5), (3, 7)]), 2.0, 6.0),
    ],
)
def test_lengths_have_their_means(lengths: Lengths, prompt: float, output: float) -> None:
    rng = Random("1")
    pairs = [lengths.draw(rng) for _ in range(15_000)]
    assert statistics.mean(p for p, _ in pairs) == pytest.approx(prompt, rel=0.08)
    assert statistics.mean(o for _, o in pairs) == pytest.approx(output, rel=0.05)
    assert min(min(pair) for pair in pairs) >= 1


def test_groups_share_their_prefix_and_only_that() -> None:
    factory = shared_prefix(RateCurve.constant(10.0), Options(limit=100), groups=10, prompts=5, block_tokens=100)
    rows = drawn(factory)
    assert len({r.tenant for r in rows}) == 10
    assert len({r.blocks for r in rows[:50]}) == 50
    assert rows[50].blocks == rows[0].blocks  # each question again, in the same order
    assert rows[50].blocks_after != rows[0].blocks_after  # with another answer
    for row in rows:
        peers = [r for r in rows if r.tenant == row.tenant]
        assert len({r.blocks[:60] for r in peers}) == 1
        assert len({r.blocks[60] for r in peers}) == 5
    assert (rows[0].prompt_tokens, len(rows[0].blocks), len(rows[0].blocks_after)) == (7_200, 72, 82)


def test_a_mixture_is_in_order_numbered_once_and_each_part_is_as_alone() -> None:
    parts = (poisson(5.0, 10, 1, duration_s=100.0), poisson(50.0, 20, 1, duration_s=50.0))
    rows = drawn(mixture(*parts))
    assert [r.index for r in rows] == list(range(len(rows)))
    assert [r.arrival_ns for r in rows] == sorted(r.arrival_ns for r in rows)
    small = [r.arrival_ns for r in rows if r.prompt_tokens == 10]
    other = drawn(mixture(parts[0], poisson(1.0, 20, 1, duration_s=50.0)))
    assert small == [r.arrival_ns for r in other if r.prompt_tokens == 10]
    assert len(rows) - len(small) == pytest.approx(2_500, rel=0.1)


def test_a_million_arrivals_need_no_memory() -> None:
    source = poisson(1_000.0, 10, 10, limit=10**9)(Random("1"))
    assert len(list(islice(source.arrivals(), 10))) == 10
