"""The catalogue of metrics: names by convention, no duplicates, and the same set of names in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dashboards.catalogue import ALL, CATALOGUE, LABELS, LATENCY_BUCKETS_S, Kind, Metric, Source, problems
from policies.types import LATENCY_BOUNDS_MS

DEPLOYMENTS = Path(__file__).parents[2] / "deployments"

_GOOD = Metric("tidegate_good_seconds", Kind.GAUGE, Source.GATEWAY, ("replica",), "seconds", "Fine.")


_NAME = re.compile(r"tidegate_[a-z0-9_]+")


def _constants(*, as_key: bool) -> Iterator[tuple[str, str]]:
    """String constants of deployments/ that read like a metric's name, with their file; only ``x["..."]`` if as_key."""
    for path in sorted(DEPLOYMENTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            found = node.slice if as_key and isinstance(node, ast.Subscript) else None if as_key else node
            if isinstance(found, ast.Constant) and isinstance(found.value, str) and _NAME.fullmatch(found.value):
                yield found.value, str(path.relative_to(DEPLOYMENTS.parent))


@pytest.mark.parametrize("metric", ALL, ids=lambda m: m.name)
def test_every_metric_follows_the_conventions(metric: Metric) -> None:
    assert problems(metric) == []


def test_no_name_appears_twice() -> None:
    assert len(CATALOGUE) == len(ALL)


@pytest.mark.slow
def test_nothing_is_used_that_the_catalogue_does_not_have() -> None:
    used = set(_constants(as_key=True))
    assert {(name, path) for name, path in used if name not in CATALOGUE} == set()
    assert len(used) >= len(CATALOGUE)  # the search finds what it looks for


def test_everything_in_the_catalogue_is_used() -> None:
    assert set(CATALOGUE) - {name for name, _ in _constants(as_key=False)} == set()


def test_every_label_is_used_and_has_a_bound() -> None:
    assert {label for metric in ALL for label in metric.labels} == set(LABELS)
    assert all(label.values_max >= 1 for label in LABELS.values())


def test_latency_buckets_run_from_5_ms_to_10_minutes_on_bounds_of_the_shared_histogram() -> None:
    assert (LATENCY_BUCKETS_S[0], LATENCY_BUCKETS_S[-1]) == (0.005, 600.0)
    assert {round(bound * 1_000) for bound in LATENCY_BUCKETS_S} <= set(LATENCY_BOUNDS_MS)


def test_the_lint_accepts_a_good_name() -> None:
    assert problems(_GOOD) == []


@pytest.mark.parametrize(
    ("name", "kind", "labels", "unit", "buckets", "words"),
    [
        ("other_good_seconds", Kind.GAUGE, (), "seconds", (), "must be snake_case and start with"),
        ("tidegate_BadCase", Kind.GAUGE, (), "", (), "must be snake_case"),
        ("tidegate_things", Kind.COUNTER, (), "", (), "_total is for counters"),
        ("tidegate_things_total", Kind.GAUGE, (), "", (), "_total is for counters"),
        ("tidegate_wait_ms", Kind.GAUGE, (), "", (), "only base units"),
        ("tidegate_wait", Kind.GAUGE, (), "seconds", (), "must be the suffix"),
        ("tidegate_wait_seconds", Kind.HISTOGRAM, (), "seconds", (), "each needs them"),
        ("tidegate_wait_seconds", Kind.GAUGE, (), "seconds", (1.0,), "belong to histograms"),
        ("tidegate_wait_seconds", Kind.HISTOGRAM, (), "seconds", (2.0, 1.0), "must ascend"),
        ("tidegate_wait_seconds", Kind.GAUGE, ("nonsense",), "seconds", (), "not in LABELS"),
        ("tidegate_wait_seconds", Kind.GAUGE, ("replica", "replica"), "seconds", (), "appears twice"),
    ],
)
def test_the_lint_finds_each_mistake(
    name: str, kind: Kind, labels: tuple[str, ...], unit: str, buckets: tuple[float, ...], words: str
) -> None:
    found = problems(Metric(name, kind, Source.GATEWAY, labels, unit, "Help.", buckets))
    assert any(re.search(words, problem) for problem in found), found
