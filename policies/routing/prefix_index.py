"""Which replica is believed to hold which prompt prefix, from what this gateway sent where.

Keys are chain hashes: a block's hash covers everything before it, so a replica that holds block n holds 0..n-1, and a
lookup walks from the front until no replica is left. Values are sets of replicas as bits of one integer.

Bounded by ``blocks_max`` entries; the least recently added go first, of one prompt the last blocks before the first,
because a block without its predecessors can never be found. It is a belief: engines evict by rules of their own, and
how well it holds is measured by the affinity loop, not here.

Removing a replica costs O(1): its bit is switched off. Bits are used again after one sweep over all entries, which
happens once :data:`RETIRED_MAX` bits (or as many as are in use) wait for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from policies.types import BlockHash, ReplicaId

Levels: TypeAlias = list[tuple[int, int]]
"""Who holds how much of a prompt: leading blocks and the set of those that hold exactly so many, most blocks first."""

RETIRED_MAX = 64
"""Bits of removed replicas that may wait for a sweep."""


def hit_blocks(levels: Levels, bit: int) -> int:
    """Leading blocks that the replica with ``bit`` is believed to hold."""
    for n, holders in levels:
        if holders & bit:
            return n
    return 0


class PrefixIndex:
    """Least-recently-used map from block hash to the replicas believed to hold the block."""

    def __init__(self, blocks_max: int) -> None:
        if blocks_max < 1:
            raise ValueError(f"blocks_max must be at least 1, is {blocks_max}")
        self._blocks_max = blocks_max
        self.blocks_bound: int | None = None
        """Entries that are kept where that is less than ``blocks_max``: what engines can hold, as far as is known."""
        self._masks: OrderedDict[BlockHash, int] = OrderedDict()
        self._bits: dict[ReplicaId, int] = {}
        self._owners: list[ReplicaId] = []
        """Replica by position of its bit; that of a removed one stays until its bit is used again."""
        self._live = 0
        self._free: list[int] = []
        self._retired: list[int] = []

    def __len__(self) -> int:
        return len(self._masks)

    def levels(self, blocks: Sequence[BlockHash]) -> Levels:
        """Who holds how much of ``blocks``; empty when nobody holds the first. O(blocks), however many replicas."""
        get = self._masks.get
        holders = self._live
        levels: Levels = []
        if not holders:
            return levels
        n = 0
        for block in blocks:
            still = holders & get(block, 0)
            if still != holders:
                if n:
                    levels.append((n, holders ^ still))
                holders = still
                if not still:
                    break
            n += 1
        if holders and n:
            levels.append((n, holders))
        levels.reverse()
        return levels

    def hit_blocks(self, blocks: Sequence[BlockHash]) -> dict[ReplicaId, int]:
        """Leading blocks each replica is believed to hold; replicas that hold none are absent. O(blocks + replicas)."""
        return {replica_id: n for n, holders in self.levels(blocks) for replica_id in self.owners(holders)}

    def owners(self, holders: int, start: int = 0) -> Iterator[ReplicaId]:
        """Replicas of a set of :meth:`levels`, in a fixed order, from bit ``start`` on and around."""
        owners = self._owners
        low = holders & ((1 << start) - 1)
        for part in (holders ^ low, low):
            rest = part
            while rest:
                bit = rest & -rest
                yield owners[bit.bit_length() - 1]
                rest ^= bit

    def bit(self, replica_id: ReplicaId) -> int:
        """The replica's bit in the sets of :meth:`levels`; 0 for one that was never sent anything."""
        return self._bits.get(replica_id, 0)

    @property
    def bits(self) -> int:
        """Positions of bits in use."""
        return len(self._owners)

    def add(self, blocks: Sequence[BlockHash], replica_id: ReplicaId) -> None:
        """Believe that ``replica_id`` holds ``blocks``, first block first; more than ``blocks_max`` are cut off."""
        if not blocks:
            return
        bit = self._bits.get(replica_id) or self._assign(replica_id)
        masks = self._masks
        get, move_to_end = masks.get, masks.move_to_end
        for block in reversed(blocks[: self._blocks_max]):
            masks[block] = get(block, 0) | bit
            move_to_end(block)
        bound = self._blocks_max
        if self.blocks_bound is not None and self.blocks_bound < bound:
            bound = max(len(blocks), self.blocks_bound)
        for _ in range(len(masks) - min(bound, self._blocks_max)):
            masks.popitem(last=False)

    def held(self, blocks: Sequence[BlockHash], replica_id: ReplicaId) -> int:
        """Leading blocks that ``replica_id`` is believed to hold."""
        bit, get = self._bits.get(replica_id, 0), self._masks.get
        for n, block in enumerate(blocks):
            if not get(block, 0) & bit:
                return n
        return len(blocks)

    def withdraw(self, blocks: Sequence[BlockHash], replica_id: ReplicaId) -> None:
        """Believe no more that ``replica_id`` holds ``blocks``; what is not believed changes nothing."""
        bit, masks = self._bits.get(replica_id, 0), self._masks
        for block in blocks:
            mask = masks.get(block, 0)
            if mask & bit:
                masks[block] = mask ^ bit
                if mask == bit:
                    del masks[block]

    def remove_replica(self, replica_id: ReplicaId) -> None:
        """Forget what a replica holds; unknown ids change nothing."""
        bit = self._bits.pop(replica_id, None)
        if bit is None:
            return
        self._live &= ~bit
        self._retired.append(bit)
        if len(self._retired) >= max(RETIRED_MAX, len(self._bits)):
            self._sweep()

    def _assign(self, replica_id: ReplicaId) -> int:
        if self._free:
            bit = self._free.pop()
            self._owners[bit.bit_length() - 1] = replica_id
        else:
            bit = 1 << len(self._owners)
            self._owners.append(replica_id)
        self._bits[replica_id] = bit
        self._live |= bit
        return bit

    def _sweep(self) -> None:
        live = self._live
        for block in [b for b, mask in self._masks.items() if not mask & live]:
            del self._masks[block]
        for block, mask in self._masks.items():
            self._masks[block] = mask & live
        self._free.extend(self._retired)
        self._retired.clear()
