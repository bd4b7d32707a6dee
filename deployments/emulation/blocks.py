"""KV cache of the emulated engine: blocks with reference counts, a prefix cache, least recently used eviction.

A full block is known by the hash of its tokens and of everything before it (and of the request's cache salt). A block
nobody holds stays known until it is needed for something else; the one that was free for longest goes first, and of
one request's blocks the last goes before the first, so that common beginnings live longest. Source of the rule: vLLM
0.29, ``vllm/v1/core/block_pool.py``.

Pure bookkeeping: no time, no input or output. Holds at most ``blocks_max`` blocks by construction.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import xxhash


def block_hashes(tokens: Sequence[int], block_tokens: int, salt: str = "", known: Sequence[int] = ()) -> list[int]:
    """Chain hash of each full block of ``tokens``; ``known`` are those of the first blocks, computed before."""
    hashes = list(known)
    parent = hashes[-1] if hashes else xxhash.xxh64_intdigest(salt.encode("utf-8", "replace"))
    for start in range(len(hashes) * block_tokens, len(tokens) - block_tokens + 1, block_tokens):
        block = ",".join(map(str, tokens[start : start + block_tokens]))
        parent = xxhash.xxh64_intdigest(f"{parent}/{block}".encode())
        hashes.append(parent)
    return hashes


class BlockPool:
    """``blocks_max`` blocks of ``block_tokens`` tokens."""

    def __init__(self, blocks_max: int, block_tokens: int) -> None:
        self.blocks_max = blocks_max
        self.block_tokens = block_tokens
        self._references = [0] * blocks_max
        self._hash: list[int | None] = [None] * blocks_max
        self._known: dict[int, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks_max))

    @property
    def free_blocks(self) -> int:
        """Blocks that can be taken, known ones included."""
        return len(self._free)

    @property
    def used_tokens(self) -> int:
        """Tokens held by requests, in whole blocks."""
        return (self.blocks_max - len(self._free)) * self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens."""
        return -(-tokens // self.block_tokens)

    def known_prefix(self, hashes: Sequence[int]) -> list[int]:
        """Blocks that hold the longest known beginning of ``hashes``; nothing is taken yet."""
        found: list[int] = []
        for value in hashes:
            block = self._known.get(value)
            if block is None:
                break
            found.append(block)
        return found

    def take_known(self, blocks: Sequence[int]) -> None:
        """Hold blocks found by :meth:`known_prefix`."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def take_new(self, count: int) -> list[int] | None:
        """``count`` blocks with nothing in them; ``None`` and no change when there are not as many."""
        if count > len(self._free):
            return None
        taken: list[int] = []
        for _ in range(count):
            block, _nothing = self._free.popitem(last=False)
            value = self._hash[block]
            if value is not None:
                self._hash[block] = None
                if self._known.get(value) == block:
                    del self._known[value]
            self._references[block] = 1
            taken.append(block)
        return taken

    def remember(self, block: int, value: int) -> None:
        """A held block is full now and can be found by its hash. The first block with a hash keeps it."""
        if self._hash[block] is None and value not in self._known:
            self._hash[block] = value
            self._known[value] = block

    def give_back(self, blocks: Sequence[int]) -> None:
        """Let go of one request's blocks, given in order."""
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0, "a block was given back twice"
            if self._references[block] == 0:
                self._free[block] = None

    def forget_all(self) -> None:
        """Drop the prefix cache; held blocks stay held."""
        self._known.clear()
        self._hash = [None] * self.blocks_max
