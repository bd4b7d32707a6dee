"""What a run was worth: every definition of report.py and comparison.py on rows small enough to check by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from autoscaling.simulator.comparison import METRIC_BY_KEY, METRICS, compare, comparison_json, summary_json
from autoscaling.simulator.gaps import GapCounts
from autoscaling.simulator.records import FleetSample, PoolUse, Records, Row, RunResult
from autoscaling.simulator.report import Summary, direction_changes, percentile, summarise
from policies.config import ObjectivesConfig
from policies.types import Histogram

OBJECTIVES = ObjectivesConfig(ttft_ms=1_000, itl_ms=50, quantile=0.9)
GOOD = Row(0, 0, 100, 11, 40, 500.0, 900.0, "succeeded", "", 1, 1, "r1", "a", "", True)
"""TPOT is 40 ms."""


def pool(**changed: object) -> PoolUse:
    values: dict[str, object] = {
        "profile": "h100-8b", "role": "both", "replica_hours": 2.0, "gpu_hours": 4.0, "usd": 8.0, "starts": 3,
        "replicas_max": 3, "preemptions": 7, "prefix_query_tokens": 400, "prefix_hit_tokens": 100, "busy_share": 0.5,
        "itl": GapCounts.of(Histogram((0,) * 6 + (10_000,) + (0,) * 26, 250_000.0)),
    }  # fmt: skip
    return PoolUse(**{**values, **changed})  # type: ignore[arg-type]


def run(*rows: Row, name: str = "x", seed: int = 1, pools: list[PoolUse] | None = None) -> RunResult:
    records = Records()
    for row in rows:
        records.add(row)
    return RunResult(name, seed, records, [pool()] if pools is None else pools, [], {"ticks": 2}, 3_600 * 10**9, "d")


def judged(*rows: Row) -> Summary:
    return summarise(run(*rows), OBJECTIVES)


def test_a_success_is_whole_in_time_and_in_pace() -> None:
    late = replace(GOOD, ttft_ms=1_001.0, e2e_ms=1_400.0)
    slow = replace(GOOD, e2e_ms=1_001.0)
    edge = replace(GOOD, ttft_ms=1_000.0, e2e_ms=1_500.0)
    failed = replace(GOOD, outcome="failed", reason="CutStream")
    summary = judged(GOOD, late, slow, edge, failed)
    assert (summary.requests, summary.completed, summary.successes) == (5, 4, 2)
    assert summary.attainment == 2 / 5
    assert (summary.ttft_kept, summary.tpot_kept) == (4, 3)


def test_one_token_has_no_pace_to_keep() -> None:
    summary = judged(replace(GOOD, output_tokens=1, e2e_ms=500.0))
    assert summary.successes == 1
    assert summary.tpot.count == 0
    assert math.isnan(summary.tpot.p50_ms)


def test_who_leaves_while_promises_hold_counts_neither_way_and_who_waited_in_vain_counts_against_us() -> None:
    early = replace(GOOD, outcome="cancelled", ttft_ms=math.nan, output_tokens=0, e2e_ms=300.0)
    middle = replace(GOOD, outcome="cancelled", output_tokens=5, e2e_ms=600.0)
    in_vain = replace(early, e2e_ms=5_000.0)
    stalled = replace(middle, e2e_ms=4_000.0)
    summary = judged(GOOD, early, middle, in_vain, stalled)
    assert summary.left == 2
    assert summary.attainment == 1 / 3
    assert summary.tasks == 3, "each is a task of its own"


def test_a_task_needs_all_its_requests_and_its_last() -> None:
    first, last = replace(GOOD, task="t", task_last=False), replace(GOOD, task="t")
    spoilt = [replace(first, task="u", ttft_ms=2_000.0, e2e_ms=2_100.0), replace(last, task="u")]
    unfinished = replace(first, task="v")
    summary = judged(GOOD, first, last, *spoilt, unfinished)
    assert (summary.tasks, summary.tasks_succeeded) == (4, 2)
    assert summary.tasks_per_usd == 2 / 8


def test_rates_run_to_the_end_of_the_last_request() -> None:
    second = replace(GOOD, arrival_ns=9_100_000_000)
    summary = judged(GOOD, second)
    assert summary.span_s == pytest.approx(10.0)
    assert summary.goodput_ps == pytest.approx(0.2)
    assert summary.output_tps == pytest.approx(2.2)
    assert summary.hit_share == 0.25
    assert summary.successes_per_usd == 2 / 8
    assert summary.goodput_per_gpu == pytest.approx(2 / (4 * 3_600))
    assert summary.pools[0].replicas_mean == pytest.approx(2.0)


def test_endings_and_repetitions_are_counted_by_reason() -> None:
    refused = replace(GOOD, outcome="refused", reason="Full", attempts=0, tries=4, ttft_ms=math.nan)
    summary = judged(GOOD, replace(GOOD, attempts=3), refused, refused, replace(refused, reason="Late"))
    assert summary.endings == {"refused": {"Full": 2, "Late": 1}}
    assert list(summary.endings["refused"]) == ["Full", "Late"]
    assert (summary.retries, summary.client_retries) == (2, 9)
    assert (summary.ended("refused"), summary.ended("lost")) == (3, 0)


@pytest.mark.parametrize(
    ("values", "q", "expected"), [([5.0], 0.99, 5.0), ([1.0, 3.0], 0.5, 2.0), ([0.0, 1.0, 2.0, 3.0, 4.0], 0.9, 3.6)]
)
def test_percentiles_are_linear_between_ranks(values: list[float], q: float, expected: float) -> None:
    assert percentile(values, q) == pytest.approx(expected)


def test_gaps_come_from_the_engines_histograms() -> None:
    summary = judged(GOOD)
    assert summary.itl.mean_ms == 25.0
    assert 20 <= summary.itl.p50_ms <= 30
    assert summary.itl_quantile_ms == pytest.approx(29.0, rel=0.001)


def test_direction_changes_count_turns_not_moves() -> None:
    line = [FleetSample(i, target, 0, 0, 0, 0, 0) for i, target in enumerate([1, 2, 3, 3, 2, 2, 1, 4])]
    assert direction_changes(line) == 2
    assert direction_changes([]) == 0


def test_an_empty_run_is_reported_not_divided_by() -> None:
    summary = summarise(run(pools=[]), OBJECTIVES)
    assert summary.requests == 0
    assert math.isnan(summary.attainment)
    assert math.isnan(summary.successes_per_usd)
    text = json.dumps(summary_json(summary), allow_nan=False)
    assert json.loads(text)["attainment_share"] is None


def test_json_has_every_figure_under_its_stable_key() -> None:
    content = summary_json(judged(GOOD))
    assert {m.key for m in METRICS} <= set(content)
    assert len(METRIC_BY_KEY) == len(METRICS)
    json.dumps(content, allow_nan=False)


def test_ratios_are_taken_seed_by_seed() -> None:
    slow = replace(GOOD, ttft_ms=2_000.0, e2e_ms=2_400.0)
    base = [judged(GOOD), replace(judged(GOOD, GOOD), seed=2), replace(judged(GOOD, GOOD, slow, slow), seed=3)]
    other = [judged(GOOD, GOOD), replace(judged(GOOD, GOOD), seed=2), replace(judged(GOOD), seed=3)]
    first, second = compare([base, other])
    assert first.ratios["successes_per_usd"].low == first.ratios["successes_per_usd"].high == 1.0
    assert second.ratios["successes_per_usd"].median == 1.0
    assert (second.ratios["successes_per_usd"].low, second.ratios["successes_per_usd"].high) == (0.5, 2.0)
    assert second.figures["attainment_share"].median == 1.0
    assert math.isnan(second.ratios["refused"].median), "nothing was refused in the first arm: no ratio"
    json.dumps(comparison_json([first, second]), allow_nan=False)


def test_an_arm_without_runs_is_an_error() -> None:
    with pytest.raises(ValueError, match="no run"):
        compare([[judged(GOOD)], []])
