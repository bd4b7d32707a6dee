"""Which depths are considered, and which class a batch size belongs to.

Classes are powers of two: ``batch_class(n) = 2 ** ceil(log2(n))``. Depths are 0, powers of two, and the start-up depth,
so that a handful of measurements covers any range: between two neighbours the goodput changes little.
"""

from __future__ import annotations

from functools import lru_cache

DEPTH_MAX = 64
"""Deepest draft that is considered, whatever an engine offers."""


def batch_class(batch: int) -> int:
    """Upper bound of the class of ``batch`` sequences: the least power of two that holds them, at least 1."""
    return 1 << max(0, batch - 1).bit_length()


@lru_cache(maxsize=DEPTH_MAX + 1)
def depths(hard: int) -> tuple[int, ...]:
    """Depths worth measuring up to the start-up depth ``hard``, ascending; ``(0,)`` for 0."""
    hard = max(0, min(hard, DEPTH_MAX))
    powers = (1 << i for i in range(hard.bit_length()))
    return tuple(sorted({0, hard, *(p for p in powers if p <= hard)}))
