from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaling.allot import Allotment, Caps, Wish, allot


def replicas(found: tuple[Allotment, ...]) -> list[int]:
    return [a.replicas for a in found]


def test_everybody_gets_all_where_there_is_room() -> None:
    found = allot([Wish("a", 3), Wish("b", 5, gpus=2)], Caps(gpus_max=13))
    assert replicas(found) == [3, 5]
    assert [a.reason.code for a in found] == ["Granted", "Granted"]


def test_minimums_go_before_the_wishes_of_more_important_models() -> None:
    found = allot([Wish("a", 8, importance=1), Wish("b", 4, replicas_min=2)], Caps(gpus_max=8))
    assert replicas(found) == [6, 2]
    assert [a.reason.code for a in found] == ["BoundedByGpus", "BoundedByGpus"]


def test_where_not_even_minimums_fit_the_more_important_model_has_its_own() -> None:
    found = allot([Wish("a", 2, 2), Wish("b", 2, 2, importance=5)], Caps(gpus_max=3))
    assert replicas(found) == [1, 2]


def test_like_models_are_short_alike() -> None:
    assert replicas(allot([Wish("a", 8), Wish("b", 4)], Caps(gpus_max=6))) == [4, 2]


def test_dollars_bound_as_gpus_do() -> None:
    found = allot([Wish("a", 8, usd_per_hour=2.5)], Caps(usd_per_hour_max=10.0))
    assert replicas(found) == [4]
    assert found[0].reason.code == "BoundedByUsd"


def test_what_is_too_large_for_one_goes_to_another() -> None:
    assert replicas(allot([Wish("a", 2, gpus=8, importance=1), Wish("b", 9)], Caps(gpus_max=12))) == [1, 4]


def test_a_model_wishes_once() -> None:
    with pytest.raises(ValueError, match="twice"):
        allot([Wish("a", 1), Wish("a", 2)], Caps())


WISHES = st.lists(
    st.builds(
        Wish,
        model=st.uuids().map(str),
        replicas=st.integers(0, 12),
        replicas_min=st.integers(0, 3),
        gpus=st.sampled_from([1.0, 2.0, 8.0]),
        usd_per_hour=st.floats(0, 20),
        importance=st.integers(0, 2),
    ),
    max_size=6,
    unique_by=lambda w: w.model,
)


@given(WISHES, st.floats(0, 60), st.floats(0, 200), st.randoms(use_true_random=False))
def test_caps_hold_nobody_gets_more_than_asked_for_and_order_is_nothing(
    wishes: list[Wish], gpus_max: float, usd_max: float, shuffle: random.Random
) -> None:
    caps = Caps(gpus_max, usd_max)
    found = allot(wishes, caps)
    pairs = list(zip(wishes, found, strict=True))
    assert sum(a.replicas * w.gpus for w, a in pairs) <= gpus_max + 1e-6
    assert sum(a.replicas * w.usd_per_hour for w, a in pairs) <= usd_max + 1e-6
    assert all(a.replicas <= max(w.replicas, w.replicas_min) for w, a in pairs)
    for w, a in pairs:
        short = a.replicas < max(w.replicas, w.replicas_min)
        assert (a.reason.code == "Granted") != short
    mixed = list(wishes)
    shuffle.shuffle(mixed)
    again = {a.model: a.replicas for a in allot(mixed, caps)}
    assert again == {a.model: a.replicas for a in found}
