"""A histogram that is still being written: what gateways count values into between two reports.

Values come in ns and go out in ms, in the bounds of :data:`policies.types.LATENCY_BOUNDS_MS`. It decides nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from operator import add

from policies.types import LATENCY_BOUNDS_MS, Histogram

_BOUNDS_NS = tuple(round(bound * 1e6) for bound in LATENCY_BOUNDS_MS)
_EMPTY = Histogram()


class Buckets:
    """Counts per bucket and the sum of the values, since the last :meth:`take`."""

    __slots__ = ("_counts", "_sum_ns")

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS_NS) + 1)
        self._sum_ns = 0

    def add(self, ns: int) -> None:
        """Count one value, in ns."""
        self._counts[bisect_left(_BOUNDS_NS, ns)] += 1
        self._sum_ns += ns

    def plus(self, histogram: Histogram) -> None:
        """Count a whole histogram."""
        self._counts = list(map(add, self._counts, histogram.counts))
        self._sum_ns += round(histogram.sum_ms * 1e6)

    def take(self) -> Histogram:
        """What was counted since the last call, in ms; the counts start again at zero."""
        if not any(self._counts):
            return _EMPTY
        taken = Histogram(tuple(self._counts), self._sum_ns / 1e6)
        self._counts = [0] * (len(_BOUNDS_NS) + 1)
        self._sum_ns = 0
        return taken
