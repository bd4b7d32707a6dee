"""Who is believed to hold which prefix."""

from __future__ import annotations

import pytest

from policies.routing.prefix_index import RETIRED_MAX, PrefixIndex
from tests.unit.routing.build import chain


def test_hits_stop_for_each_replica_at_its_first_missing_block() -> None:
    index, blocks = PrefixIndex(100), chain(0, 10)
    index.add(blocks, "a")
    index.add(blocks[:4], "b")
    index.add(blocks[:1], "c")
    index.add(chain(1, 3), "d")
    assert index.hit_blocks(blocks) == {"a": 10, "b": 4, "c": 1}
    assert index.hit_blocks(blocks[:2]) == {"a": 2, "b": 2, "c": 1}
    assert index.hit_blocks(chain(1, 10)) == {"d": 3}


def test_a_gap_ends_a_hit() -> None:
    index, blocks = PrefixIndex(100), chain(0, 5)
    index.add(blocks[:2], "a")
    index.add(blocks[3:], "a")
    assert index.hit_blocks(blocks) == {"a": 2}
    index.add(blocks[1:], "b")
    assert index.hit_blocks(blocks) == {"a": 2}


def test_empty_and_unknown() -> None:
    index = PrefixIndex(10)
    assert index.hit_blocks(()) == {}
    assert index.hit_blocks(chain(0, 3)) == {}
    index.add((), "a")
    assert len(index) == 0
    index.add(chain(0, 3), "a")
    assert index.hit_blocks(()) == {}
    index.remove_replica("unknown")
    assert index.hit_blocks(chain(0, 3)) == {"a": 3}


def test_bounded_and_the_oldest_prompt_goes_first() -> None:
    index = PrefixIndex(30)
    for prefix in range(3):
        index.add(chain(prefix, 10), "a")
    assert len(index) == 30
    index.add(chain(0, 10), "a")  # used again: now prompt 1 is the oldest
    index.add(chain(3, 10), "a")
    assert len(index) == 30
    assert index.hit_blocks(chain(1, 10)) == {}
    for prefix in (0, 2, 3):
        assert index.hit_blocks(chain(prefix, 10)) == {"a": 10}


def test_of_the_oldest_prompt_the_last_blocks_go_first() -> None:
    index = PrefixIndex(12)
    index.add(chain(0, 10), "a")
    index.add(chain(1, 5), "a")
    assert index.hit_blocks(chain(0, 10)) == {"a": 7}


def test_a_prompt_longer_than_the_index_keeps_its_front() -> None:
    index = PrefixIndex(4)
    index.add(chain(0, 10), "a")
    assert len(index) == 4
    assert index.hit_blocks(chain(0, 10)) == {"a": 4}


def test_many_unique_prompts_never_exceed_the_bound() -> None:
    index = PrefixIndex(500)
    for prefix in range(2_000):
        index.add(chain(prefix, 7), f"r{prefix % 5}")
        assert len(index) <= 500
    assert len(index) == 500


def test_a_removed_replica_is_gone_and_comes_back_empty() -> None:
    index, blocks = PrefixIndex(100), chain(0, 5)
    index.add(blocks, "a")
    index.add(blocks, "b")
    index.remove_replica("a")
    assert index.hit_blocks(blocks) == {"b": 5}
    index.add(blocks[:2], "a")
    assert index.hit_blocks(blocks) == {"a": 2, "b": 5}


def test_many_replicas_may_come_and_go() -> None:
    index, blocks = PrefixIndex(100), chain(0, 5)
    index.add(blocks, "stays")
    for i in range(20 * RETIRED_MAX):
        index.add(blocks, f"r{i}")
        assert index.hit_blocks(blocks) == {"stays": 5, f"r{i}": 5}
        index.remove_replica(f"r{i}")
    assert max(mask.bit_length() for mask in index._masks.values()) <= RETIRED_MAX + 2


def test_a_sweep_drops_entries_of_removed_replicas() -> None:
    index = PrefixIndex(10_000)
    for i in range(RETIRED_MAX):
        index.add(chain(i, 3), f"r{i}")
    index.add(chain(1_000, 3), "stays")
    for i in range(RETIRED_MAX):
        index.remove_replica(f"r{i}")
    assert len(index) == 3
    index.add(chain(5, 3), "new")
    assert index.hit_blocks(chain(5, 3)) == {"new": 3}
    assert index.hit_blocks(chain(6, 3)) == {}


def test_a_bit_used_again_after_a_sweep_starts_empty() -> None:
    index, shared = PrefixIndex(1_000), chain(0, 3)
    index.add(shared, "stays")
    for i in range(RETIRED_MAX):
        index.add(shared, f"r{i}")
    for i in range(RETIRED_MAX):
        index.remove_replica(f"r{i}")
    for i in range(RETIRED_MAX):
        index.add(chain(1, 3), f"new{i}")
    assert index.hit_blocks(shared) == {"stays": 3}


def test_more_replicas_than_one_machine_word() -> None:
    index, blocks = PrefixIndex(100), chain(0, 3)
    for i in range(200):
        index.add(blocks[: 1 + i % 3], f"r{i}")
    hits = index.hit_blocks(blocks)
    assert hits == {f"r{i}": 1 + i % 3 for i in range(200)}


def test_the_bound_must_allow_an_entry() -> None:
    with pytest.raises(ValueError, match="blocks_max"):
        PrefixIndex(0)


def test_what_engines_can_hold_bounds_the_belief_but_not_one_prompt() -> None:
    index = PrefixIndex(100)
    index.blocks_bound = 6
    index.add(chain(0, 4), "a")
    index.add(chain(1, 4), "b")
    assert len(index) == 6
    assert index.hit_blocks(chain(0, 4)) == {"a": 2}
    assert index.hit_blocks(chain(1, 4)) == {"b": 4}
    index.add(chain(2, 9), "c")
    assert index.hit_blocks(chain(2, 9)) == {"c": 9}
    index.blocks_bound = None
    index.add(chain(0, 4), "a")
    assert len(index) == 13


def test_what_is_withdrawn_is_believed_of_others_still() -> None:
    index, blocks = PrefixIndex(100), chain(0, 5)
    index.add(blocks, "a")
    index.add(blocks[:4], "b")
    assert (index.held(blocks, "a"), index.held(blocks, "b"), index.held(blocks, "stranger")) == (5, 4, 0)
    index.withdraw(blocks[2:], "a")
    assert index.hit_blocks(blocks) == {"a": 2, "b": 4}
    assert len(index) == 4, "nobody holds the last block any more"
    index.withdraw(blocks, "stranger")
    index.withdraw(chain(1, 3), "a")
    assert index.hit_blocks(blocks) == {"a": 2, "b": 4}
    index.add(blocks, "a")
    assert index.held(blocks, "a") == 5
