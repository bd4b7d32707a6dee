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
from collections.abc import Sequence

from policies.types import BlockHash, ReplicaId

RETIRED_MAX = 64
"""Bits of removed replicas that may wait for a sweep."""


class PrefixIndex:
    """Least-recently-used map from block hash to the replicas believed to hold the block."""

    def __init__(self, blocks_max: int) -> None:
        if blocks_max < 1:
            raise ValueError(f"blocks_max must be at least 1, is {blocks_max}")
        self._blocks_max = blocks_max
        self._masks: OrderedDict[BlockHash, int] = OrderedDict()
        self._bits: dict[ReplicaId, int] = {}
        self._owners: dict[int, ReplicaId] = {}
        self._live = 0
        self._free: list[int] = []
        self._retired: list[int] = []

    def __len__(self) -> int:
        return len(self._masks)

    def hit_blocks(self, blocks: Sequence[BlockHash]) -> dict[ReplicaId, int]:
        """Leading blocks each replica is believed to hold; replicas that hold none are absent. O(blocks)."""
        get = self._masks.get
        holders = self._live
        hits: dict[ReplicaId, int] = {}
        for n, block in enumerate(blocks):
            still = holders & get(block, 0)
            if still != holders:
                if n:
                    self._note(holders & ~still, n, hits)
                if not still:
                    return hits
                holders = still
        if blocks:
            self._note(holders, len(blocks), hits)
        return hits

    def add(self, blocks: Sequence[BlockHash], replica_id: ReplicaId) -> None:
        """Believe that ``replica_id`` holds ``blocks``, first block first; more than ``blocks_max`` are cut off."""
        if not blocks:
            return
        bit = self._bits.get(replica_id) or self._assign(replica_id)
        masks = self._masks
        for block in reversed(blocks[: self._blocks_max]):
            masks[block] = masks.get(block, 0) | bit
            masks.move_to_end(block)
        for _ in range(len(masks) - self._blocks_max):
            masks.popitem(last=False)

    def remove_replica(self, replica_id: ReplicaId) -> None:
        """Forget what a replica holds; unknown ids change nothing."""
        bit = self._bits.pop(replica_id, None)
        if bit is None:
            return
        del self._owners[bit]
        self._live &= ~bit
        self._retired.append(bit)
        if len(self._retired) >= max(RETIRED_MAX, len(self._bits)):
            self._sweep()

    def _assign(self, replica_id: ReplicaId) -> int:
        bit = self._free.pop() if self._free else 1 << (len(self._bits) + len(self._retired))
        self._bits[replica_id] = bit
        self._owners[bit] = replica_id
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

    def _note(self, mask: int, count: int, hits: dict[ReplicaId, int]) -> None:
        while mask:
            bit = mask & -mask
            hits[self._owners[bit]] = count
            mask ^= bit
