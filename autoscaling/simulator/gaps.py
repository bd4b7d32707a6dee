"""Token gaps of a run, counted finely enough that a quantile can be held against an objective.

The live histograms have bounds a third to a half apart (10, 15, 20, 30 ms, ...): good for a graph, too coarse for a
verdict. Here each of their buckets is cut into equal ratios of at most :data:`RATIO_MAX`, so that a quantile is within
2 % of the true one, and what is counted here folds into the live bounds without error. Only buckets in use take room.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from policies.types import LATENCY_BOUNDS_MS, Histogram

RATIO_MAX = 1.02
"""Largest ratio of two neighbouring bounds, from 1 ms on."""


def _cut() -> Iterator[tuple[float, int]]:
    """Upper bounds in ms and the live bucket each lies in."""
    low = LATENCY_BOUNDS_MS[0] / 100
    for i, high in enumerate(LATENCY_BOUNDS_MS):
        parts = math.ceil(math.log(high / low) / math.log(RATIO_MAX) - 1e-9)
        yield from ((low * (high / low) ** (n / parts), i) for n in range(1, parts))
        yield high, i
        low = high


_CUT = tuple(_cut())
BOUNDS_MS = tuple(bound for bound, _ in _CUT)
"""Upper bounds of the fine buckets; one more for everything above."""

BOUNDS_NS = tuple(round(bound * 1e6) for bound in BOUNDS_MS)
"""The same in ns."""

_LIVE_BUCKET = (*(i for _, i in _CUT), len(LATENCY_BOUNDS_MS))


class GapCounts:
    """Counts by fine bucket, and the sum of the gaps in ms."""

    __slots__ = ("counts", "sum_ms")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.sum_ms = 0.0

    @classmethod
    def of(cls, histogram: Histogram) -> GapCounts:
        """Gaps known only by live buckets, taken to lie evenly within each."""
        gaps = cls()
        gaps.sum_ms = histogram.sum_ms
        low_ms, at = 0.0, 0
        for i, n in enumerate(histogram.counts):
            high_ms = LATENCY_BOUNDS_MS[i] if i < len(LATENCY_BOUNDS_MS) else math.inf
            placed = 0
            while at < len(_LIVE_BUCKET) and _LIVE_BUCKET[at] == i:
                share = (BOUNDS_MS[at] - low_ms) / (high_ms - low_ms) if at < len(BOUNDS_MS) else 1.0
                here = round(n * share) - placed
                if here:
                    gaps.counts[at] = here
                    placed += here
                at += 1
            low_ms = high_ms
        return gaps

    def add(self, other: GapCounts) -> None:
        """Take in everything ``other`` counted."""
        counts = self.counts
        for bucket, n in other.counts.items():
            counts[bucket] = counts.get(bucket, 0) + n
        self.sum_ms += other.sum_ms

    @property
    def count(self) -> int:
        """Gaps counted."""
        return sum(self.counts.values())

    def mean_ms(self) -> float | None:
        """Mean in ms; ``None`` when empty."""
        n = self.count
        return self.sum_ms / n if n else None

    def quantile_ms(self, q: float) -> float | None:
        """Quantile ``q`` in [0, 1], linear inside its bucket, in ms; ``None`` when empty."""
        total = self.count
        if total == 0:
            return None
        rank, seen = q * total, 0
        for bucket in sorted(self.counts):
            n = self.counts[bucket]
            if seen + n >= rank and bucket < len(BOUNDS_MS):
                low = BOUNDS_MS[bucket - 1] if bucket else 0.0
                return low + (BOUNDS_MS[bucket] - low) * max(0.0, min(1.0, (rank - seen) / n))
            seen += n
        return BOUNDS_MS[-1]

    def live(self) -> Histogram:
        """The same in the live buckets."""
        counts = [0] * (len(LATENCY_BOUNDS_MS) + 1)
        for bucket, n in self.counts.items():
            counts[_LIVE_BUCKET[bucket]] += n
        return Histogram(tuple(counts), self.sum_ms)
