"""Sharing caps between models: priority first, fair among equals, never above the caps, nobody limited without need."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaling.share import Caps, Claim, share

A = Claim(asks=4, held=1, least=1, most=8, gpus=1, usd_per_hour=2.0)


def test_without_caps_everybody_may_have_what_is_configured() -> None:
    assert share({"a": A, "b": replace(A, most=3, gpus=0)}, Caps()) == {"a": 8, "b": 3}


def test_a_cap_that_does_not_bind_limits_nobody() -> None:
    assert share({"a": A, "b": replace(A, most=3)}, Caps(gpus=11)) == {"a": 8, "b": 3}


def test_the_more_important_model_gets_what_it_asks_for_and_the_other_keeps_its_minimum() -> None:
    claims = {"a": replace(A, asks=8), "b": replace(A, asks=6, priority=5)}
    assert share(claims, Caps(gpus=7)) == {"a": 1, "b": 6}


def test_equals_share_in_proportion_to_what_they_ask_for() -> None:
    claims = {"a": replace(A, asks=8), "b": replace(A, asks=4)}
    assert share(claims, Caps(gpus=6)) == {"a": 4, "b": 2}


def test_what_is_not_asked_for_goes_to_whoever_may_need_it() -> None:
    claims = {"a": replace(A, asks=1), "b": replace(A, asks=2)}
    found = share(claims, Caps(gpus=8))
    assert sum(found.values()) == 8
    assert found["b"] >= 2


def test_dollars_bind_like_gpus_and_a_cheap_model_may_still_fit_where_a_dear_one_does_not() -> None:
    claims = {"dear": replace(A, usd_per_hour=9.0, priority=1, asks=3), "cheap": replace(A, usd_per_hour=1.0)}
    assert share(claims, Caps(usd_per_hour=13.0)) == {"dear": 1, "cheap": 4}


def test_one_that_rises_waits_until_the_other_has_given_back() -> None:
    holds = replace(A, asks=1, held=6)
    rises = replace(A, asks=6, held=1, priority=9)
    claims = {"holds": holds, "rises": rises}
    assert share(claims, Caps(gpus=8)) == {"holds": 1, "rises": 2}
    claims["holds"] = replace(holds, held=2)
    assert share(claims, Caps(gpus=8)) == {"holds": 1, "rises": 6}


@pytest.mark.parametrize("cap", [Caps(gpus=0), Caps(usd_per_hour=0.5)])
def test_caps_win_over_minima(cap: Caps) -> None:
    assert share({"a": replace(A, held=0)}, cap) == {"a": 0}


COUNTS = st.integers(0, 6)
CLAIMS = st.builds(
    Claim, COUNTS, COUNTS, st.integers(0, 2), st.integers(2, 8), st.sampled_from([0, 0.5, 1, 2]),
    st.sampled_from([0, 1.5, 4]), st.integers(0, 2),
)  # fmt: skip
CAPS = st.builds(Caps, st.none() | st.integers(0, 20), st.none() | st.integers(0, 40))


@given(st.lists(CLAIMS, min_size=1, max_size=5), CAPS)
def test_nothing_goes_above_the_caps_that_was_not_there_before(claims: list[Claim], caps: Caps) -> None:
    named = {f"m{i}": claim for i, claim in enumerate(claims)}
    most = share(named, caps)
    assert all(0 <= most[name] <= claim.most for name, claim in named.items())
    held = {name: claim.held for name, claim in named.items()}
    after = {name: max(most[name], claim.held) for name, claim in named.items()}
    assert caps.allow(named, after) or after == held
    assert caps.allow(named, most)
    assert share(named, caps) == most


@given(st.lists(CLAIMS, min_size=1, max_size=5), CAPS)
def test_who_is_not_given_what_it_asks_for_could_not_have_one_more(claims: list[Claim], caps: Caps) -> None:
    named = {f"m{i}": replace(claim, held=0) for i, claim in enumerate(claims)}
    most = share(named, caps)
    for name, claim in named.items():
        if most[name] < claim.most:
            assert not caps.allow(named, {**most, name: most[name] + 1})
