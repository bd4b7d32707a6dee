"""KV cache of a modelled engine: blocks held and free, the prefix cache, what is evicted first.

Counted in engine blocks; what can be found again is counted in *units*, the prefix blocks of requests (one unit is one
or more engine blocks), so that a prompt of 12,000 tokens costs 24 look-ups instead of 750. Rules of vLLM 0.29
(``vllm/v1/core/block_pool.py``, ``kv_cache_manager.py``):

* a unit is findable from the step on that computes its last token; the first with a hash keeps it;
* full blocks that nobody holds stay in order of their release, a request's last block before its first, and the oldest
  goes first when a block is needed; blocks without a hash (a partial tail) are free at once and are used first;
* full blocks whose hash nobody here can know (the output) take their place in that order too: they displace what others
  could have found, and the request they belonged to finds them when it comes back after a preemption.

A unit of several engine blocks is lost as a whole when its first engine block is taken; the others are free then. A
second copy of a known unit keeps no place of its own among the findable ones.

Pure bookkeeping: it knows neither time nor requests, and it must not decide who gets blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence


class KvCache:
    """``blocks_max`` engine blocks. :attr:`available` of them can be taken, the rest is held."""

    __slots__ = ("_free", "_references", "_released", "available", "blocks_max", "caching")

    def __init__(self, blocks_max: int, caching: bool = True) -> None:
        """``caching`` off: nothing is findable, every block released is free."""
        self.blocks_max = blocks_max
        self.caching = caching
        self.available = blocks_max
        """Blocks that can be taken: empty ones and those that only the prefix cache still wants."""
        self._free = blocks_max
        self._references: dict[int, int] = {}
        self._released: OrderedDict[Hashable, int] = OrderedDict()

    def known(self, units: Sequence[int], units_max: int) -> int:
        """Length of the longest findable beginning of ``units``, at most ``units_max``."""
        references, found = self._references, 0
        for unit in units[:units_max] if units_max < len(units) else units:
            if unit not in references:
                break
            found += 1
        return found

    def idle(self, units: Iterable[int]) -> int:
        """How many of these findable units nobody holds."""
        references = self._references
        return sum(1 for unit in units if references[unit] == 0)

    def hold(self, units: Iterable[int]) -> None:
        """Hold findable units; the blocks of those nobody held are available no longer."""
        references = self._references
        for unit in units:
            if references[unit] == 0:
                self.available -= self._released.pop(unit)
            references[unit] += 1

    def remember(self, unit: int) -> bool:
        """Make blocks that the caller holds findable as ``unit``, held once; False: the unit is known already."""
        if not self.caching or unit in self._references:
            return False
        self._references[unit] = 1
        return True

    def take(self, blocks: int) -> None:
        """Hold ``blocks`` blocks with nothing in them; there must be as many available."""
        assert blocks <= self.available, "more blocks were taken than there are"
        self.available -= blocks
        if blocks > self._free:
            self._evict(blocks)
        self._free -= blocks

    def left_over(self, owner: Hashable) -> int:
        """Blocks of ``owner`` that :meth:`release` left and nobody has taken yet, from its first one on."""
        return self._released.get(owner, 0)

    def reclaim(self, owner: Hashable, blocks: int) -> None:
        """Hold the first ``blocks`` of what was left over from ``owner``; the rest is free."""
        rest = self._released.pop(owner) - blocks
        assert rest >= 0, "more blocks were reclaimed than were left over"
        self.available -= blocks
        self._free += rest

    def release(self, owner: Hashable, units: Sequence[int], unit_blocks: int, full: int, tail: int) -> None:
        """Let go of a request's ``units`` (of ``unit_blocks`` each, first one first) and of its other blocks.

        Those are ``full`` blocks after the units, left over in the name of ``owner`` (unique), and ``tail`` unfinished.
        """
        self.available += full + tail
        if not self.caching:
            self._free += full + tail
            return
        self._free += tail
        references, released = self._references, self._released
        if full:
            released[owner] = full
        for unit in reversed(units):
            count = references[unit] - 1
            references[unit] = count
            if count == 0:
                released[unit] = unit_blocks
                self.available += unit_blocks

    def flush(self) -> None:
        """Forget all that nobody holds: vLLM's ``reset_prefix_cache``, as after an update of the weights."""
        references = self._references
        for key, size in self._released.items():
            if key in references:
                del references[key]
            self._free += size
        self._released.clear()

    def _evict(self, blocks: int) -> None:
        """Empty blocks, those released first first, until ``blocks`` are free."""
        references, released = self._references, self._released
        while self._free < blocks:
            key, size = released.popitem(last=False)
            if key in references:
                del references[key]
                self._free += size
                continue
            used = min(size, blocks - self._free)
            self._free += used
            if used < size:
                released[key] = size - used
                released.move_to_end(key, last=False)
