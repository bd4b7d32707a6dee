"""Burn of the error budgets: how fast objectives are missed, over several windows at once.

An objective at quantile ``q`` allows a share of ``1 - q`` to miss it (availability: ``1 - availability``)::

    burn = missed / counted / (1 - q)            1: the budget is used up exactly as fast as it is earned

A burn is believed when a long window and a short one agree: the long one says that it matters, the short one that it
still goes on (multiwindow, multi-burn-rate alerts: The Site Reliability Workbook, chapter 5; there over hours against a
month, here over seconds against an hour, because levers act within seconds). The short window is a twelfth of the long.
Of a long window, the time before the first report counts as time without a miss. ::

    fast   burn >= 3   over 60 s and 5 s           slow   burn >= 1.5 over 720 s and 60 s

What counts, per class as gateways told (``policies/attainment.py``)::

    ttft           late first bytes, refused for want of capacity, left after waiting too long
                   of all that succeeded, were refused or left
    itl            streams with late gaps of all that succeeded; as class ``all``, gaps of all gaps
    e2e            late answers of all that succeeded
    availability   failed for a fault of ours of all that succeeded or failed

Where no report counts by class (``all``), they are judged by their histograms. Memory is bounded by the windows. What
this must not do: name a condition, or read a clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from operator import add, sub
from typing import NamedTuple

from policies.config import ObjectivesConfig, PolicyConfig
from policies.measures import ClassCounts
from policies.objectives import objectives_for
from policies.types import LATENCY_BOUNDS_MS, GatewayReport, Histogram, Priority

OBJECTIVES = ("ttft", "itl", "e2e", "availability")
ALL = "all"
CLASSES = (ALL, *(p.value for p in Priority))
SLIS = tuple(f"{name}/{objective}" for name in CLASSES for objective in OBJECTIVES)
"""Everything that is counted, ``CLASS/OBJECTIVE``, in the order of a window's sums."""

SECOND_NS = 1_000_000_000
SHORT, MIDDLE, LONG = range(3)
"""The windows: 5 s, 60 s, 720 s."""
SPANS = ((5, 1), (60, 1), (720, 10))
"""Length and resolution of each, in s."""

_PARTS = 1_000
"""Counts are kept in thousandths, as whole numbers: sums that are raised and lowered stay exact."""


class Burn(NamedTuple):
    """One objective of one class over one window."""

    sli: str
    """``CLASS/OBJECTIVE``."""
    burn: float
    missed: float
    counted: float
    budget: float
    """Share that may miss it."""
    covered: float = 1.0
    """Share of the window since the first report."""

    @property
    def share(self) -> float:
        """Share that missed it."""
        return self.missed / self.counted if self.counted else 0.0

    @property
    def spent(self) -> float:
        """:attr:`burn`, as much of the window as there was."""
        return self.burn * self.covered


class Window:
    """Sums of a fixed number of counts over the last ``span_s``, by buckets of ``bucket_s``."""

    def __init__(self, span_s: int, bucket_s: int, width: int) -> None:
        self._span, self._bucket_ns = span_s // bucket_s, bucket_s * SECOND_NS
        self._buckets: deque[tuple[int, list[int]]] = deque()
        self.sums = [0] * width

    def add(self, counts: Sequence[int], now_ns: int) -> None:
        """Count ``counts`` at ``now_ns``, which must not go back, and forget what is too old."""
        at = now_ns // self._bucket_ns
        while self._buckets and self._buckets[0][0] <= at - self._span:
            self.sums = list(map(sub, self.sums, self._buckets.popleft()[1]))
        if not any(counts):
            return
        self.sums = list(map(add, self.sums, counts))
        if self._buckets and self._buckets[-1][0] == at:
            self._buckets[-1] = at, list(map(add, self._buckets[-1][1], counts))
        else:
            self._buckets.append((at, list(counts)))

    def __len__(self) -> int:
        return len(self._buckets)


class BurnMeter:
    """Counts what every accepted gateway report adds; :meth:`step` closes a tick."""

    def __init__(self, config: PolicyConfig) -> None:
        self._windows = [Window(span, bucket, 2 * len(SLIS)) for span, bucket in SPANS]
        self._pending = [0] * (2 * len(SLIS))
        self._first_ns: int | None = None
        self._now_ns = 0
        self._classed = False
        """Reports tell classes: one without them saw no request end, and what first bytes it has are counted then."""
        self.reconfigure(config)

    def reconfigure(self, config: PolicyConfig) -> None:
        """Other objectives from now on; what was counted under the old ones stays."""
        self._config = config
        self._of_model = config.objectives
        of_class = {ALL: budgets(config.objectives)}
        for priority in Priority:
            # Settings have put the model's own objectives in; so the name of the model does not matter here.
            of_class[priority.value] = budgets(objectives_for(config, "", priority))
        self._budgets = tuple(of_class[name][objective] for name in CLASSES for objective in OBJECTIVES)

    def receive(self, report: GatewayReport) -> None:
        """Count one gateway's window."""
        self._classed = self._classed or bool(report.by_class)
        for name, counts in report.by_class.items():
            if name in CLASSES:
                self._count_class(name, counts)
        itl_ms = self._of_model.itl_ms
        self._count(ALL, 1, above(report.itl, itl_ms), report.itl.count)
        if not self._classed:
            self._count_unclassed(report)

    def _count_class(self, name: str, c: ClassCounts) -> None:
        for objective, (missed, counted) in enumerate(judged(c).values()):
            self._count(name, objective, missed, counted)

    def _count_unclassed(self, report: GatewayReport) -> None:
        objectives = self._of_model
        self._count(ALL, 0, above(report.ttft, objectives.ttft_ms), report.ttft.count)
        if objectives.e2e_ms is not None:
            self._count(ALL, 2, above(report.e2e, objectives.e2e_ms), report.e2e.count)

    def _count(self, name: str, objective: int, missed: float, counted: int) -> None:
        if counted:
            place = 2 * (CLASSES.index(name) * len(OBJECTIVES) + objective)
            self._pending[place] += round(missed * _PARTS)
            self._pending[place + 1] += counted * _PARTS

    def step(self, now_ns: int) -> None:
        """Put what was received since the last tick into the windows."""
        self._now_ns = now_ns
        if self._first_ns is None and any(self._pending):
            self._first_ns = now_ns
        for window in self._windows:
            window.add(self._pending, now_ns)
        self._pending = [0] * (2 * len(SLIS))

    def burns(self, window: int) -> list[Burn]:
        """Every objective of every class over one window, in the order of :data:`SLIS`."""
        sums = self._windows[window].sums
        age_ns = 0 if self._first_ns is None else self._now_ns - self._first_ns + SECOND_NS
        covered = min(1.0, age_ns / (SPANS[window][0] * SECOND_NS))
        return [
            Burn(sli, _burn(missed, counted, budget), missed / _PARTS, counted / _PARTS, budget, covered)
            for sli, missed, counted, budget in zip(SLIS, sums[::2], sums[1::2], self._budgets, strict=True)
        ]

    def worst(self, objective: str, window: int) -> Burn | None:
        """The class that burns ``objective`` fastest over one window; ``None`` where nothing was counted."""
        first = OBJECTIVES.index(objective)
        found = [b for b in self.burns(window)[first :: len(OBJECTIVES)] if b.counted]
        return max(found, key=lambda b: b.burn, default=None)


def above(histogram: Histogram, limit_ms: float) -> float:
    """Values of ``histogram`` above ``limit_ms``; those of the bucket that holds it by linear interpolation."""
    i = bisect_left(LATENCY_BOUNDS_MS, limit_ms)
    counts = histogram.counts
    if i >= len(LATENCY_BOUNDS_MS):
        return float(counts[-1])
    low = LATENCY_BOUNDS_MS[i - 1] if i else 0.0
    high = LATENCY_BOUNDS_MS[i]
    return sum(counts[i + 1 :]) + counts[i] * (high - limit_ms) / (high - low)


def judged(c: ClassCounts) -> Mapping[str, tuple[int, int]]:
    """Requests that missed an objective and those it was judged of, by its name, in the order of :data:`OBJECTIVES`."""
    turned_away = c.refused + c.abandoned
    return {
        "ttft": (c.late_ttft + turned_away, c.succeeded + turned_away),
        "itl": (c.late_itl, c.succeeded),
        "e2e": (c.late_e2e, c.succeeded),
        "availability": (c.failed, c.succeeded + c.failed),
    }


def budgets(objectives: ObjectivesConfig) -> Mapping[str, float]:
    """Share of requests that may miss each objective."""
    late = 1 - objectives.quantile
    return {"ttft": late, "itl": late, "e2e": late, "availability": 1 - objectives.availability}


def _burn(missed: float, counted: float, budget: float) -> float:
    return missed / counted / budget if counted else 0.0
