"""KV blocks: what stays findable, what goes first, and that nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaling.simulator.kv import KvCache


def filled(kv: KvCache, units: list[int], unit_blocks: int = 2, full: int = 0, tail: int = 0) -> None:
    """A request takes, remembers and gives back ``units`` and blocks of its own."""
    kv.take(len(units) * unit_blocks + full + tail)
    for unit in units:
        assert kv.remember(unit)
    kv.release(object(), units, unit_blocks, full, tail)


def test_released_units_are_found_again_and_cost_nothing_while_held_by_others() -> None:
    kv = KvCache(10)
    filled(kv, [1, 2, 3])
    assert (kv.known([1, 2, 9, 3], 4), kv.known([1, 2, 3], 2), kv.known([7], 1)) == (2, 2, 0)
    assert kv.available == 10
    kv.hold([1, 2])
    assert (kv.available, kv.idle([1, 2, 3])) == (6, 1)
    kv.hold([1])
    assert kv.available == 6
    kv.release(None, [1, 2], 2, 0, 0)
    assert kv.available == 8


def test_a_requests_last_unit_goes_first_and_older_requests_before_newer_ones() -> None:
    kv = KvCache(8)
    filled(kv, [1, 2])
    filled(kv, [3, 4])
    kv.take(2)
    assert (kv.known([1, 2], 2), kv.known([3, 4], 2)) == (1, 2)
    kv.take(4)
    assert (kv.known([1], 1), kv.known([3, 4], 2)) == (0, 1)


def test_a_unit_is_lost_with_its_first_block_and_the_rest_of_it_is_used_next() -> None:
    kv = KvCache(8)
    filled(kv, [1], 4)
    filled(kv, [2], 4)
    for _ in range(4):
        kv.take(1)
        assert (kv.known([1], 1), kv.known([2], 1)) == (0, 1)
    kv.take(1)
    assert kv.known([2], 1) == 0


def test_use_makes_a_unit_young_again() -> None:
    kv = KvCache(4)
    filled(kv, [1])
    filled(kv, [2])
    kv.hold([1])
    kv.release(None, [1], 2, 0, 0)
    kv.take(2)
    assert (kv.known([1], 1), kv.known([2], 1)) == (1, 0)


def test_unfinished_blocks_are_used_first_and_finished_ones_without_a_hash_wait_their_turn() -> None:
    kv = KvCache(6)
    filled(kv, [1])
    filled(kv, [], full=3, tail=1)
    kv.take(1)
    assert kv.known([1], 1) == 1
    kv.take(1)
    assert kv.known([1], 1) == 0


def test_blocks_left_over_shrink_from_their_end_and_can_be_reclaimed_once() -> None:
    kv, name = KvCache(6), object()
    kv.take(6)
    kv.release(name, [], 1, 5, 1)
    kv.take(3)
    assert kv.left_over(name) == 3
    kv.reclaim(name, 2)
    assert (kv.left_over(name), kv.available) == (0, 1)


def test_first_copy_of_a_unit_keeps_its_name() -> None:
    kv = KvCache(6)
    kv.take(4)
    assert kv.remember(1)
    assert not kv.remember(1)


def test_nothing_is_findable_without_caching() -> None:
    kv = KvCache(6, caching=False)
    kv.take(4)
    assert not kv.remember(1)
    kv.release(object(), [], 2, 3, 1)
    assert (kv.known([1], 1), kv.available) == (0, 6)


def test_taking_more_than_there_is_is_an_error_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="more blocks"):
        KvCache(3).take(4)


@given(st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=4, unique=True), st.integers(0, 3)), max_size=30))
def test_blocks_are_conserved(requests: list[tuple[list[int], int]]) -> None:
    kv = KvCache(9)
    held: list[tuple[list[int], int]] = []
    for wanted, full in requests:
        found = kv.known(wanted, len(wanted))
        need = (len(wanted) - found) * 2 + full
        if kv.idle(wanted[:found]) * 2 + need > kv.available:
            for units, own in held:
                kv.release(object(), units, 2, own, 0)
            held = []
            assert kv.available == 9
            continue
        kv.hold(wanted[:found])
        kv.take(need)
        added = [unit for unit in wanted[found:] if kv.remember(unit)]
        held.append((wanted[:found] + added, full + 2 * (len(wanted) - found - len(added))))
        distinct = {unit for units, _ in held for unit in units}
        assert kv.available == 9 - 2 * len(distinct) - sum(own for _, own in held)


def test_an_emptied_cache_finds_nothing_but_what_is_held_and_loses_no_block() -> None:
    kv = KvCache(20)
    filled(kv, [1, 2], full=3, tail=1)
    filled(kv, [3])
    kv.hold([3])
    kv.flush()
    assert (kv.known([1], 1), kv.known([3], 1), kv.available) == (0, 1, 18)
    kv.release(None, [3], 2, 0, 0)
    kv.take(20)
    assert kv.available == 0
