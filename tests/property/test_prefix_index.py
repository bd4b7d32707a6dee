"""The prefix index against a plain model: sets of blocks per replica, and a strict order of use."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.routing.prefix_index import PrefixIndex
from tests.examples import examples

REPLICAS = "abcdef"

# Prompts are paths in a small tree, hashed as chains: equal beginnings give equal blocks.
paths = st.lists(st.integers(0, 2), min_size=0, max_size=6)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(REPLICAS), paths),
        st.tuples(st.just("remove"), st.sampled_from(REPLICAS), st.just([])),
    ),
    max_size=60,
)


def blocks(path: list[int]) -> tuple[int, ...]:
    chain, out = 17, []
    for step in path:
        chain = (chain * 1_000_003 + step + 1) % 2**64
        out.append(chain)
    return tuple(out)


class Model:
    def __init__(self, blocks_max: int) -> None:
        self.max = blocks_max
        self.order: list[int] = []
        self.holders: dict[int, set[str]] = {}

    def add(self, chain: tuple[int, ...], replica: str) -> None:
        for block in reversed(chain[: self.max]):
            self.holders.setdefault(block, set()).add(replica)
            if block in self.order:
                self.order.remove(block)
            self.order.append(block)
        while len(self.order) > self.max:
            del self.holders[self.order.pop(0)]

    def remove(self, replica: str) -> None:
        for held in self.holders.values():
            held.discard(replica)

    def hits(self, chain: tuple[int, ...]) -> dict[str, int]:
        found = {}
        for replica in REPLICAS:
            count = 0
            while count < len(chain) and replica in self.holders.get(chain[count], set()):
                count += 1
            if count:
                found[replica] = count
        return found


@settings(max_examples=examples(300), deadline=None)
@given(operations, st.integers(1, 30), st.lists(paths, min_size=1, max_size=5))
def test_equals_the_model(ops: list[tuple[str, str, list[int]]], blocks_max: int, lookups: list[list[int]]) -> None:
    index, model = PrefixIndex(blocks_max), Model(blocks_max)
    for kind, replica, path in ops:
        if kind == "add":
            index.add(blocks(path), replica)
            model.add(blocks(path), replica)
        else:
            index.remove_replica(replica)
            model.remove(replica)
        assert len(index) <= blocks_max
    for path in [*lookups, *(p for _, _, p in ops)]:
        assert index.hit_blocks(blocks(path)) == model.hits(blocks(path))
