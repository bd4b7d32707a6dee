"""Windows of reports: what each reporter said lately, with the sums of its counts as reports come and go.

Each reporter's reports of the last :data:`WINDOW_MS`, at most :data:`WINDOW_REPORTS_MAX`, are kept. Counts, and times
in whole ns, are whole numbers, so sums that are raised and lowered as reports come and go stay exact, and a tick costs
nothing for what is only kept.

It must not know what is counted, and it must not read a clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from operator import add, sub
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from policies.config import ControlConfig
from policies.types import Sampled

WINDOW_MS = 12_000.0
"""Reports older than this do not count into rates and histograms."""

WINDOW_NS = 12_000_000_000
"""The same in ns."""

WINDOW_REPORTS_MAX = 32
"""Reports kept of one reporter."""

SETTLED_MS = 5_000.0
"""Time covered by reports from which on they are believed fully."""


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

Figures: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""What is summed of a report: counts, and times in ns."""


def whole_ns(ms: float) -> int:
    """A time in ms as whole ns; 0 for one that is not finite."""
    return round(ms * 1e6) if math.isfinite(ms) else 0


RowsOf: TypeAlias = Callable[[R], Mapping[str, tuple[int, ...]]]
"""Counts of a report by name, such as those of its tenants; of one length."""


class Ahead(NamedTuple, Generic[R]):
    """A reporter's window at a time that is still to come, if no other report comes before."""

    old: int
    """Reports that will have left it."""
    window: tuple[Sampled[R], ...]
    sums: list[int]
    times: list[int]
    from_ns: int
    until_ns: int
    """Between these times it is the window; never where it is empty."""


class Reporter(Generic[R]):
    """Window of one reporter's reports, newest last, with the sums of their counts.

    ``figures_of`` lists a report's counts and its times, always as many and in the same order; ``rows_of`` its counts
    by name.
    """

    def __init__(
        self, name: str, first: Sampled[R], figures_of: Callable[[R], Figures], rows_of: RowsOf[R] | None = None
    ) -> None:
        self.name = name
        self._figures_of = figures_of
        self._rows_of = rows_of
        self.rows: dict[str, list[int]] = {}
        """Sums by name over the window, after :meth:`window`."""
        self._window: deque[Sampled[R]] = deque()
        self._counts: deque[tuple[int, ...]] = deque()
        """Of each report in the window; empty where all are 0, as those of idle reporters are."""
        self._times: deque[tuple[int, ...]] = deque()
        self.times: list[int] = []
        """Sums of the times in ns of all reports in the window, after :meth:`window`; empty for an empty window."""
        self.sums: list[int] = []
        """Of all reports in the window, after :meth:`window`; empty for an empty window. Never changed in place."""
        self._ahead: Ahead[R] | None = None
        self.last = first
        self._keep(first)

    def add(self, report: R, now_ns: int, silent_after_ms: float) -> bool:
        """Keep ``report`` unless it is a duplicate or older than the last one.

        A lower sequence number after a silence is a new life of the same name and starts afresh.
        """
        if report.seq <= self.last.value.seq:
            if self.last.age_ms(now_ns) <= silent_after_ms or report.seq == self.last.value.seq:
                return False
            for kept in (self._window, self._counts, self._times, self.rows):
                kept.clear()
            self.sums, self.times, self._ahead = [], [], None
        self._turn(now_ns)
        self.last = Sampled(report, now_ns)
        self._keep(self.last)
        self._drop_old(now_ns)
        return True

    def ahead(self, then_ns: int) -> Ahead[R]:
        """The window and its sums as they will be at ``then_ns`` if no other report comes."""
        old, sums, times = 0, self.sums, self.times
        for sampled, counts, spans in zip(self._window, self._counts, self._times, strict=True):
            if then_ns - sampled.received_ns <= WINDOW_NS:
                break
            old += 1
            times = list(map(sub, times, spans))
            sums = list(map(sub, sums, counts)) if counts else sums
        window = tuple(islice(self._window, old, None))
        if window:
            from_ns = self._window[old - 1].received_ns + WINDOW_NS + 1 if old else 0
            ahead = Ahead(old, window, sums, times, from_ns, window[0].received_ns + WINDOW_NS)
        else:
            ahead = Ahead(old, (), [], [], 0, -1)
        self._ahead = ahead
        return ahead

    def _turn(self, now_ns: int) -> None:
        """Drop what :meth:`ahead` looked at as gone, with the sums it made, where that has come true."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or not ahead.old or not ahead.window or now_ns < ahead.from_ns:
            return
        for kept in (self._window, self._counts, self._times):
            for _ in range(ahead.old):
                kept.popleft()
        self.sums, self.times = ahead.sums, ahead.times

    def window(self, now_ns: int) -> tuple[Sampled[R], ...]:
        """Reports of the last :data:`WINDOW_MS`, oldest first; older ones are dropped."""
        self._turn(now_ns)
        self._drop_old(now_ns)
        return tuple(self._window)

    def _drop_old(self, now_ns: int) -> None:
        """Drop what is too old."""
        window = self._window
        while window and now_ns - window[0].received_ns > WINDOW_NS:
            self._drop()

    def confidence(self, first: Sampled[R] | None, now_ns: int, covered_ms: float, age_ms_max: float) -> float:
        """How far the window that begins with ``first`` can be trusted, in [0, 1]; ``covered_ms`` is the sum of its
        reports' windows.

        The product of three: recency (1 up to twice the reporter's own period, then falling to 0 at ``age_ms_max``),
        completeness (time covered of the time since the window's first report began: lost reports lower it) and length
        (:data:`SETTLED_MS` are enough).
        """
        last_ns = self.last.received_ns
        age_ms = (now_ns - last_ns) / 1e6
        if first is None or not covered_ms or age_ms > age_ms_max:
            return 0.0
        span_ms = (last_ns - first.received_ns) / 1e6 + first.value.window_ms
        trust = min(1.0, covered_ms / max(span_ms, covered_ms)) * min(1.0, covered_ms / SETTLED_MS)
        grace_ms = min(2 * self.last.value.window_ms, age_ms_max)
        return trust if age_ms <= grace_ms else trust * (age_ms_max - age_ms) / (age_ms_max - grace_ms)

    def _keep(self, sampled: Sampled[R]) -> None:
        if len(self._window) >= WINDOW_REPORTS_MAX:
            self._drop()
        counts, times = self._figures_of(sampled.value)
        if self._rows_of is not None:
            self._add_rows(self._rows_of(sampled.value))
        self._window.append(sampled)
        self._times.append(times)
        self.times = list(map(add, self.times, times)) if self.times else list(times)
        if not self.sums:
            self.sums = list(counts)
        elif any(counts):
            self.sums = list(map(add, self.sums, counts))
        else:
            counts = ()
        self._counts.append(counts)

    def _add_rows(self, rows: Mapping[str, tuple[int, ...]]) -> None:
        for name, counts in rows.items():
            row = self.rows.get(name)
            self.rows[name] = list(counts) if row is None else list(map(add, row, counts))

    def _take_rows(self, rows: Mapping[str, tuple[int, ...]]) -> None:
        for name, counts in rows.items():
            row = list(map(sub, self.rows.get(name, counts), counts))
            if any(row):
                self.rows[name] = row
            else:
                self.rows.pop(name, None)

    def _drop(self) -> None:
        oldest = self._window.popleft()
        if self._rows_of is not None:
            self._take_rows(self._rows_of(oldest.value))
        counts, times = self._counts.popleft(), self._times.popleft()
        if not self._window:
            self.sums, self.times = [], []
            return
        self.times = list(map(sub, self.times, times))
        if counts:
            self.sums = list(map(sub, self.sums, counts))


class Reporters(Generic[R]):
    """All reporters of one kind, at most ``reporters_max``."""

    def __init__(
        self,
        reporters_max: int,
        config: ControlConfig,
        figures_of: Callable[[R], Figures],
        rows_of: RowsOf[R] | None = None,
    ) -> None:
        self._max = reporters_max
        self._figures_of = figures_of
        self._rows_of = rows_of
        self._config = config
        self._by_id: dict[str, Reporter[R]] = {}
        self._sorted: list[Reporter[R]] | None = None
        self.refused = 0

    def receive(self, name: str, report: R, now_ns: int) -> Reporter[R] | None:
        """Keep a report; whose it was, or ``None`` for a duplicate, a nonsensical one, or when there is no room for a
        new reporter.
        """
        if not (math.isfinite(report.window_ms) and report.window_ms > 0):
            return None
        reporter = self._by_id.get(name)
        if reporter is not None:
            return reporter if reporter.add(report, now_ns, self._config.report_age_ms_max) else None
        if len(self._by_id) >= self._max and not self._make_room(now_ns):
            self.refused += 1
            return None
        self._sorted = None
        reporter = self._by_id[name] = Reporter(name, Sampled(report, now_ns), self._figures_of, self._rows_of)
        return reporter

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
