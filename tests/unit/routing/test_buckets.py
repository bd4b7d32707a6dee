"""Rough order of replicas by one figure."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from policies.routing.buckets import MOST_MAX, Buckets


def filled(values: dict[str, float]) -> Buckets:
    buckets = Buckets()
    for replica_id, value in values.items():
        buckets.put(replica_id, value)
    return buckets


def test_the_least_come_first_and_skipped_ones_never() -> None:
    buckets = filled({"a": 100.0, "b": 10.0, "c": 1_000.0, "d": 0.0})
    assert buckets.least(4, 0.0, ()) == ["d", "b", "a", "c"]
    assert buckets.least(2, 0.0, {"d"}) == ["b", "a"]
    assert buckets.least(9, 0.0, set("abcd")) == []
    assert buckets.least(0, 0.0, ()) == []


def test_equals_are_taken_from_where_the_caller_begins() -> None:
    buckets = filled(dict.fromkeys("abcd", 50.0))
    assert buckets.least(2, 0.0, ()) == ["a", "b"]
    assert buckets.least(2, 0.5, ()) == ["c", "d"]
    assert buckets.least(4, 0.99, ()) == ["d", "a", "b", "c"]


def test_a_replica_moves_with_its_figure_and_is_dropped_once() -> None:
    buckets = filled({"a": 1.0, "b": 10.0, "c": 100.0})
    buckets.put("a", 1_000.0)
    assert buckets.least(3, 0.0, ()) == ["b", "c", "a"]
    for _ in range(2):
        buckets.drop("b")
    assert buckets.least(3, 0.0, ()) == ["c", "a"]
    assert buckets.level("c") < buckets.level("a")


def test_about_as_good_as_the_least() -> None:
    buckets = filled({"a": 100.0, "b": 104.0, "c": 130.0})
    level_max = buckets.level_max(0.1, 5.0)
    assert [buckets.level(r) <= level_max for r in "abc"] == [True, True, False]
    assert filled({"a": 0.0, "b": 4.0}).level_max(0.1, 5.0) >= filled({"b": 4.0}).level("b")
    assert Buckets().level_max(0.1, 5.0) >= 0


def test_any_history_ends_in_the_order_of_the_last_figures() -> None:
    rng = Random(1)
    buckets, values = Buckets(), dict[str, float]()
    for _ in range(3_000):
        replica_id = f"r{rng.randrange(40)}"
        if rng.random() < 0.2:
            buckets.drop(replica_id)
            values.pop(replica_id, None)
        else:
            values[replica_id] = rng.choice((0.0, rng.uniform(0, 10), rng.uniform(0, 1e6)))
            buckets.put(replica_id, values[replica_id])
    order = buckets.least(100, rng.random(), ())
    assert sorted(order) == sorted(values)
    assert all(values[b] >= values[a] / 1.11 - 0.2 for a, b in pairwise(order))
    for replica_id in order:
        buckets.drop(replica_id)
    assert buckets.least(100, 0.0, ()) == []
    assert not buckets._levels
    assert not buckets._buckets


def test_the_most_are_found_from_the_top_and_large_buckets_are_not_searched() -> None:
    buckets = filled({"a": 10.0, "b": 5_000.0, "c": 90_000.0, "d": 90_000.0})
    assert buckets.most(3, {"c"}) == ["d", "b", "a"]
    assert buckets.most(1, set()) == ["c"]
    crowd = filled({f"r{i}": 70.0 for i in range(MOST_MAX + 1)} | {"one": 1.0})
    assert crowd.most(2, set()) == ["one"]
