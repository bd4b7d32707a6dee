"""Gives pages that are free inside the C heap back to the system, now and then.

glibc keeps what was freed. Bodies of all sizes come and go between small things that stay, so each peak of requests
that are open together leaves the heap a little larger than the peak before: resident memory climbs for as long as
higher peaks come, while what is in use stays the same. ``malloc_trim`` returns whole free pages wherever they lie.

Where the C library has no such call nothing happens. It must not run often: pages that are returned cost a fault each
when they are used again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

TRIM_EVERY_NS = 5 * 1_000_000_000
"""Time between two calls. One takes well below a millisecond in a heap of 50 MiB."""


class HeapTrimmer:
    """See the module."""

    def __init__(self, trim: Callable[[int], int] | None = None) -> None:
        self._trim = trim or _malloc_trim()
        self._due_ns = 0

    def trim(self, now_ns: int) -> bool:
        """Do it where :data:`TRIM_EVERY_NS` have passed since the last time; whether it was done."""
        if self._trim is None or now_ns < self._due_ns:
            return False
        self._due_ns = now_ns + TRIM_EVERY_NS
        self._trim(0)
        return True


def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's; ``None``: another C library."""
    found = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if found is None:
        return None
    found.argtypes, found.restype = [ctypes.c_size_t], ctypes.c_int
    trim: Callable[[int], int] = found
    return trim
