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

from autoscaling.simulator.gaps import BOUNDS_NS, GapCounts


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


class Run:
    """The run of like steps that an engine is in. ``steps`` is 0 between two runs and while the engine is idle."""

    __slots__ = ("counted", "end_ns", "first_ns", "growth_ns", "left_ns", "start_ns", "steps", "taken")

    def __init__(self) -> None:
        self.steps = self.start_ns = self.first_ns = self.growth_ns = 0
        self.end_ns: int | None = None
        """``None``: idle, or stopped in the middle of a step."""
        self.left_ns: int | None = None
        """What is left of the step in which it was stopped."""
        self.taken = 0
        """First steps whose blocks are held already."""
        self.counted = 0
        """First steps that are in the counts already."""

    def begin(self, at_ns: int, steps: int, first_ns: int, growth_ns: int, taken: int) -> None:
        """``steps`` steps begin at ``at_ns``."""
        self.start_ns, self.steps, self.first_ns, self.growth_ns = at_ns, steps, first_ns, growth_ns
        self.taken, self.counted = taken, 0
        self.end_ns = at_ns + (first_ns if steps == 1 else steps_ns(first_ns, growth_ns, steps))

    def elapsed(self, now_ns: int) -> int:
        """Steps that ended by ``now_ns``, which is before the end of the run."""
        if self.steps <= 1 or self.end_ns is None:
            return 0
        return min(self.steps - 1, steps_within(self.first_ns, self.growth_ns, now_ns - self.start_ns))

    def cut(self, now_ns: int, ahead: int) -> None:
        """End with the step under way (``ahead`` 1) or one of those after it."""
        if self.steps > ahead and self.end_ns is not None:
            steps = self.elapsed(now_ns) + ahead
            if steps < self.steps:
                self.steps = steps
                self.end_ns = self.start_ns + steps_ns(self.first_ns, self.growth_ns, steps)

    def total_ns(self, ended: int, now_ns: int) -> int:
        """Duration of the first ``ended`` steps; that of a single one is what it took by ``now_ns``, stops included."""
        return now_ns - self.start_ns if self.steps == 1 else steps_ns(self.first_ns, self.growth_ns, ended)

    def stop(self, now_ns: int, ended: int) -> None:
        """Stop in the step after the first ``ended`` ones, which are booked; it is all that is left of the run."""
        self.cut(now_ns, 1)
        assert self.end_ns is not None
        self.left_ns, self.end_ns = self.end_ns - now_ns, None
        self.start_ns += steps_ns(self.first_ns, self.growth_ns, ended)
        self.first_ns += self.growth_ns * ended
        self.steps, self.counted = 1, 0

    def go_on(self, now_ns: int) -> bool:
        """Go on with the step in which it was stopped; False: it was not."""
        if self.left_ns is None:
            return False
        self.end_ns, self.left_ns = now_ns + self.left_ns, None
        return True


class Gaps:
    """Token gaps per fine bucket, added a run at a time."""

    __slots__ = ("_counts", "_sum_ns")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._sum_ns = 0

    def add(self, first_ns: int, growth_ns: int, steps: int, sequences: int, total_ns: int) -> None:
        """``sequences`` gaps for each of ``steps`` steps, which last ``total_ns`` together."""
        counts = self._counts
        bucket = bisect_left(BOUNDS_NS, first_ns)
        last = bisect_left(BOUNDS_NS, first_ns + growth_ns * (steps - 1))
        self._sum_ns += total_ns * sequences
        done = 0
        while bucket < last:
            within = (BOUNDS_NS[bucket] - first_ns) // growth_ns + 1
            if within > done:
                counts[bucket] = counts.get(bucket, 0) + (within - done) * sequences
                done = within
            bucket += 1
        counts[last] = counts.get(last, 0) + (steps - done) * sequences

    def take(self) -> GapCounts:
        """Everything since the last call."""
        gaps = GapCounts()
        gaps.counts, gaps.sum_ms = self._counts, self._sum_ns / 1e6
        self._counts, self._sum_ns = {}, 0
        return gaps
