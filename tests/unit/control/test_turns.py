"""Turns: everybody within a bounded number of ticks, evenly, and all at once in a small fleet."""

from __future__ import annotations

import pytest

from policies.control.turns import PER_TICK, TURNS_MAX, Turns


@pytest.mark.parametrize("replicas", [0, 1, PER_TICK])
def test_a_small_fleet_is_looked_at_whole_in_every_tick(replicas: int) -> None:
    turns = Turns()
    for _ in range(5):
        assert list(turns.due(replicas)) == list(range(replicas))


@pytest.mark.parametrize("replicas", [PER_TICK + 1, 1_000, PER_TICK * TURNS_MAX, 2_048])
def test_a_large_fleet_takes_turns_evenly(replicas: int) -> None:
    turns = Turns()
    needed = min(TURNS_MAX, -(-replicas // PER_TICK))
    for _ in range(3):
        rounds = [list(turns.due(replicas)) for _ in range(needed)]
        assert sorted(number for one in rounds for number in one) == list(range(replicas))
        assert max(len(one) for one in rounds) <= -(-replicas // needed)
