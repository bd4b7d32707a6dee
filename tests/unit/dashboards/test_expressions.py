"""What expressions name, and when an empty answer is a fault."""

from __future__ import annotations

import math

import pytest

from dashboards.catalogue import CATALOGUE, PREFIX
from dashboards.expressions import ABSENCES, Expression, base_name, judge, with_value

BURN = (
    'sum by (model, priority) (rate(tidegate_objective_missed_total{model=~"$model",priority=~"$class"}'
    "[$__rate_interval])) / max by (priority) (tidegate:objective_budget:share)"
)


def test_metrics_labels_and_variables_are_found() -> None:
    expression = Expression("x", BURN)
    assert expression.metrics == ["tidegate_objective_missed_total", "tidegate:objective_budget:share"]
    assert expression.labels == {"model", "priority"}
    assert expression.concrete() == (
        'sum by (model, priority) (rate(tidegate_objective_missed_total{model=~".*",priority=~".*"}[1m])) / '
        "max by (priority) (tidegate:objective_budget:share)"
    )
    assert not expression.filters


def test_series_of_a_histogram_belong_to_it_and_counters_keep_their_names() -> None:
    assert base_name("tidegate_ttft_seconds_bucket") == "tidegate_ttft_seconds"
    assert base_name("tidegate_task_cost_usd_sum") == "tidegate_task_cost_usd"
    assert base_name("tidegate_requests_total") == "tidegate_requests_total"


def test_absences_are_of_metrics_that_there_are() -> None:
    assert {PREFIX + name for name in ABSENCES} - CATALOGUE.keys() == set()


def test_nan_is_no_value() -> None:
    assert with_value([math.nan, 0.0, 1.0]) == 2


def test_a_share_of_nothing_is_no_fault_and_another_nan_is() -> None:
    share = Expression("x", "tidegate_tasks_total / tidegate_open_tasks")
    plain = Expression("x", "avg(tidegate_open_tasks)")
    assert judge(share, 0, dict.fromkeys(share.metrics, True), unknown=1).fine
    assert not judge(share, 0, dict.fromkeys(share.metrics, True)).fine
    assert not judge(plain, 0, dict.fromkeys(plain.metrics, True), unknown=1).fine


@pytest.mark.parametrize(
    ("text", "series", "has_data", "fine"),
    [
        ("tidegate_open_tasks", 1, True, True),
        ("tidegate_open_tasks", 0, False, False),
        ("tidegate_tasks_total", 0, False, True),
        ("tidegate_tasks_total / tidegate_open_tasks", 0, False, False),
        ("tidegate_tasks_total", 0, True, False),
        ('tidegate_tasks_total{ending="success"}', 0, True, True),
        ('tidegate_tasks_total{model=~"$model"}', 0, True, False),
        ("tidegate_control_condition_active > 0", 0, True, True),
        ("tidegate_control_condition_active > 0", 0, False, False),
    ],
)
def test_an_empty_answer_is_fine_where_it_is_written_why(text: str, series: int, has_data: bool, fine: bool) -> None:
    expression = Expression("x", text)
    assert judge(expression, series, dict.fromkeys(expression.metrics, has_data)).fine is fine
