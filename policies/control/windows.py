"""Windows of reports: what each reporter said lately, with the sums of its counts as reports come and go.

Each reporter's reports of the last :data:`WINDOW_MS`, at most :data:`WINDOW_REPORTS_MAX`, are kept. Counts are whole
numbers, so sums that are raised and lowered stay exact; times are listed and summed by whoever needs them.

It must not know what is counted, and it must not read a clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from operator import add, sub
from typing import Generic, Protocol, TypeAlias, TypeVar

from policies.config import ControlConfig
from policies.types import Histogram, Sampled

WINDOW_MS = 12_000.0
"""Reports older than this do not count into rates and histograms."""

WINDOW_REPORTS_MAX = 32
"""Reports kept of one reporter."""


class Report(Protocol):
    """What is asked of any report."""

    @property
    def seq(self) -> int:
        """Grows by one with each report of a reporter's life."""
        ...

    @property
    def window_ms(self) -> float:
        """Time the report covers."""
        ...


R = TypeVar("R", bound=Report)

Figures: TypeAlias = tuple[tuple[int, ...], tuple[float, ...]]
"""What is summed of a report: counts, kept up to date because sums of whole numbers are exact, and times in ms, summed
anew because those of fractions are not."""


class Reporter(Generic[R]):
    """Window of one reporter's reports, newest last, with the sums of their counts.

    ``figures_of`` lists a report's counts and its times, always as many and in the same order.
    """

    def __init__(self, first: Sampled[R], figures_of: Callable[[R], Figures]) -> None:
        self._figures_of = figures_of
        self._window: deque[Sampled[R]] = deque()
        self._counts: deque[tuple[int, ...]] = deque()
        """Of each report in the window; empty where all are 0, as those of idle reporters are."""
        self.times: deque[tuple[float, ...]] = deque()
        """Of each report in the window, after :meth:`window`, oldest first."""
        self.sums: list[int] = []
        """Of all reports in the window, after :meth:`window`; empty for an empty window."""
        self.itl: Histogram | None = None
        """Gaps of the window, while no report with counts came or went since they were summed."""
        self.last = first
        self._keep(first)

    def add(self, report: R, now_ns: int, silent_after_ms: float) -> bool:
        """Keep ``report`` unless it is a duplicate or older than the last one.

        A lower sequence number after a silence is a new life of the same name and starts afresh.
        """
        if report.seq <= self.last.value.seq:
            if self.last.age_ms(now_ns) <= silent_after_ms or report.seq == self.last.value.seq:
                return False
            for kept in (self._window, self._counts, self.times):
                kept.clear()
            self.sums = []
        self.last = Sampled(report, now_ns)
        self._keep(self.last)
        return True

    def window(self, now_ns: int) -> tuple[Sampled[R], ...]:
        """Reports of the last :data:`WINDOW_MS`, oldest first."""
        window = self._window
        while window and (now_ns - window[0].received_ns) / 1e6 > WINDOW_MS:
            self._drop()
        return tuple(window)

    def _keep(self, sampled: Sampled[R]) -> None:
        if len(self._window) >= WINDOW_REPORTS_MAX:
            self._drop()
        counts, times = self._figures_of(sampled.value)
        self._window.append(sampled)
        self.times.append(times)
        if not self.sums:
            self.sums, self.itl = list(counts), None
        elif any(counts) or times[1]:
            self.sums, self.itl = list(map(add, self.sums, counts)), None
        else:
            counts = ()
        self._counts.append(counts)

    def _drop(self) -> None:
        self._window.popleft()
        self.times.popleft()
        counts = self._counts.popleft()
        if not self._window:
            self.sums = []
        elif counts:
            self.sums, self.itl = list(map(sub, self.sums, counts)), None


class Reporters(Generic[R]):
    """All reporters of one kind, at most ``reporters_max``."""

    def __init__(self, reporters_max: int, config: ControlConfig, figures_of: Callable[[R], Figures]) -> None:
        self._max = reporters_max
        self._figures_of = figures_of
        self._config = config
        self._by_id: dict[str, Reporter[R]] = {}
        self._sorted: list[Reporter[R]] | None = None
        self.refused = 0

    def receive(self, name: str, report: R, now_ns: int) -> bool:
        """Keep a report; ``False`` for a duplicate, a nonsensical one, or when there is no room for a new reporter."""
        if not (math.isfinite(report.window_ms) and report.window_ms > 0):
            return False
        reporter = self._by_id.get(name)
        if reporter is not None:
            return reporter.add(report, now_ns, self._config.report_age_ms_max)
        if len(self._by_id) >= self._max and not self._make_room(now_ns):
            self.refused += 1
            return False
        self._sorted = None
        self._by_id[name] = Reporter(Sampled(report, now_ns), self._figures_of)
        return True

    def _make_room(self, now_ns: int) -> bool:
        """Drop the reporter silent for longest, if one is silent."""
        name = max(sorted(self._by_id), key=lambda n: self._age_ms(n, now_ns))
        if self._age_ms(name, now_ns) <= self._config.report_age_ms_max:
            return False
        self._delete(name)
        return True

    def _delete(self, name: str) -> None:
        del self._by_id[name]
        self._sorted = None

    def _age_ms(self, name: str, now_ns: int) -> float:
        return self._by_id[name].last.age_ms(now_ns)

    def forget(self, now_ns: int) -> None:
        """Drop reporters unheard of for ``forget_after_ms``."""
        age_ms_max = self._config.forget_after_ms
        for name in [n for n, r in self._by_id.items() if (now_ns - r.last.received_ns) / 1e6 > age_ms_max]:
            self._delete(name)

    def items(self) -> list[Reporter[R]]:
        """Reporters sorted by name, so that no sum depends on the order of arrival."""
        if self._sorted is None:
            self._sorted = [self._by_id[name] for name in sorted(self._by_id)]
        return self._sorted

    def __len__(self) -> int:
        return len(self._by_id)
