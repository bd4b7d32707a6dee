"""Arithmetic of a run of like steps: the i-th lasts ``first_ns + i * growth_ns``. No step is looked at by itself.

While the same sequences decode, each step adds one token to each context and nothing else changes, so that durations
grow by a constant (the step law is linear in the context). Durations are integers of ns, hence every sum is exact and
time and step number convert into each other without error::

    end of step k = start + k * first_ns + growth_ns * k * (k - 1) / 2

Counts per bucket of the token gaps follow from the same line. It must not know why a run begins or ends.
"""

from __future__ import annotations

import math
from bisect import bisect_left

from policies.types import LATENCY_BOUNDS_MS, Histogram

_BOUNDS_NS = tuple(round(bound * 1e6) for bound in LATENCY_BOUNDS_MS)


def steps_ns(first_ns: int, growth_ns: int, steps: int) -> int:
    """Duration of the first ``steps`` steps of a run."""
    return steps * first_ns + growth_ns * (steps * (steps - 1) // 2)


def steps_within(first_ns: int, growth_ns: int, elapsed_ns: int) -> int:
    """Largest number of steps that end within ``elapsed_ns``; ``first_ns`` is at least 1, ``growth_ns`` at least 0."""
    if elapsed_ns < first_ns:
        return 0
    if growth_ns == 0:
        return elapsed_ns // first_ns
    linear = first_ns - growth_ns / 2
    steps = int((math.sqrt(linear * linear + 2.0 * growth_ns * elapsed_ns) - linear) / growth_ns)
    while steps_ns(first_ns, growth_ns, steps) > elapsed_ns:
        steps -= 1
    while steps_ns(first_ns, growth_ns, steps + 1) <= elapsed_ns:
        steps += 1
    return steps


class Gaps:
    """Token gaps per bucket, added a run at a time."""

    __slots__ = ("_counts", "_sum_ns")

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS_NS) + 1)
        self._sum_ns = 0

    def add(self, first_ns: int, growth_ns: int, steps: int, sequences: int, total_ns: int) -> None:
        """``sequences`` gaps for each of ``steps`` steps, which last ``total_ns`` together."""
        counts = self._counts
        bucket = bisect_left(_BOUNDS_NS, first_ns)
        last = bisect_left(_BOUNDS_NS, first_ns + growth_ns * (steps - 1))
        self._sum_ns += total_ns * sequences
        done = 0
        while bucket < last:
            within = (_BOUNDS_NS[bucket] - first_ns) // growth_ns + 1
            counts[bucket] += (within - done) * sequences
            done = within
            bucket += 1
        counts[last] += (steps - done) * sequences

    def take(self) -> Histogram:
        """Everything since the last call."""
        histogram = Histogram(tuple(self._counts), self._sum_ns / 1e6)
        self._counts = [0] * (len(_BOUNDS_NS) + 1)
        self._sum_ns = 0
        return histogram
