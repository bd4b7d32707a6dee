"""The last reports of one replica, boiled down as they come, so that a tick costs what is new and not what is kept.

It decides nothing, and keeps exactly the reports of the window it was last shown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from policies.batching.solve import BatchPoint
from policies.types import ReplicaReport, Sampled, StepCoefficients

ROWS_MAX = 64
"""Rows kept between two looks: the longest window, and as many reports again."""


class Row(NamedTuple):
    """What is asked of one report."""

    seq: int
    received_ns: int
    running: int
    kv_tokens: int
    prefill_tokens: int
    window_ms: float
    decoded: bool
    worked: bool
    preempted: bool
    late: bool
    """It has gaps in the buckets that are too long."""
    report: ReplicaReport


class Recent:
    """Rows of the sliding window, oldest first."""

    def __init__(self) -> None:
        self._rows: deque[Row] = deque()
        self._high_bucket = 0
        self._worked_ns = self._preempted_ns = self._late_ns = -1
        """When the last report that worked, that saw preemptions, and that has gaps that are too long was received."""

    def receive(self, sampled: Sampled[ReplicaReport], high_bucket: int, left_ns: int = 0) -> bool:
        """Take in one report as it comes, so that :meth:`look` finds it done; whether it was taken in.

        Only what follows the rows that are there: first reports, new lives and floods are left to :meth:`look`. What
        was received before ``left_ns`` has left the window for good.
        """
        rows = self._rows
        if not rows or high_bucket != self._high_bucket or not rows[-1].seq < sampled.value.seq:
            return False
        if len(rows) >= ROWS_MAX:
            return False
        self._keep(sampled)
        while rows[0].received_ns < left_ns:
            rows.popleft()
        return True

    def _keep(self, sampled: Sampled[ReplicaReport]) -> None:
        row = _row(sampled, self._high_bucket)
        self._rows.append(row)
        if row.worked:
            self._worked_ns = row.received_ns
        if row.preempted:
            self._preempted_ns = row.received_ns
        if row.late:
            self._late_ns = row.received_ns

    def look(self, window: Sequence[Sampled[ReplicaReport]], high_bucket: int) -> list[ReplicaReport]:
        """Take in the window, whose gaps from ``high_bucket`` on are too long; answers the reports that are new."""
        rows, newest = self._rows, window[-1].value.seq
        last = rows[-1].seq if rows else -1
        known = last
        if newest < last or high_bucket != self._high_bucket:
            known = -1 if newest < last else last
            rows.clear()
            last, self._high_bucket = -1, high_bucket
            self._worked_ns = self._preempted_ns = self._late_ns = -1
        new = []
        for sampled in reversed(window):
            if sampled.value.seq <= last:
                break
            new.append(sampled)
        for sampled in reversed(new):
            self._keep(sampled)
        oldest = window[0].value.seq
        while rows[0].seq < oldest:
            rows.popleft()
        return [s.value for s in reversed(new) if s.value.seq > known]

    @property
    def worked(self) -> bool:
        """Whether the engine did anything in the window."""
        return self._holds(self._worked_ns)

    def preempted(self, after_ns: int) -> bool:
        """Whether a report received after ``after_ns`` saw preemptions."""
        return self._preempted_ns > after_ns and self._holds(self._preempted_ns)

    def late(self, after_ns: int) -> bool:
        """Whether a report received after ``after_ns`` has gaps that are too long."""
        return self._late_ns > after_ns and self._holds(self._late_ns)

    def _holds(self, received_ns: int) -> bool:
        """Whether a report of that time is still in the window."""
        return bool(self._rows) and received_ns >= self._rows[0].received_ns

    def since(self, after_ns: int) -> list[ReplicaReport]:
        """Reports received after ``after_ns``."""
        return [row.report for row in self._rows if row.received_ns > after_ns]

    def point(self, model: StepCoefficients) -> BatchPoint:
        """The heaviest moment of the window: most sequences at once, and the KV they held."""
        latest = self._rows[-1].report
        running = kv_tokens = prefill_tokens = 0
        window_ms, decoding = 0.0, False
        for row in self._rows:
            if row.running > running or (row.running == running and row.kv_tokens > kv_tokens):
                running, kv_tokens = row.running, row.kv_tokens
            prefill_tokens += row.prefill_tokens
            window_ms += row.window_ms
            decoding = decoding or row.decoded
        return BatchPoint(
            model=model,
            running=max(1, running),
            kv_tokens=kv_tokens if running else 0,
            kv_tokens_max=latest.kv_tokens_max,
            running_seqs_hard=latest.running_seqs_hard,
            step_tokens_hard=latest.step_tokens_hard,
            prefill_only=prefill_tokens > 0 and not decoding,
            prefill_tps=prefill_tokens / (window_ms / 1000 or 1.0),
        )


def _row(sampled: Sampled[ReplicaReport], high_bucket: int) -> Row:
    report = sampled.value
    counts = report.itl.counts
    return Row(
        report.seq,
        sampled.received_ns,
        report.running,
        report.kv_tokens_used,
        report.prefill_tokens,
        report.window_ms,
        any(counts),
        bool(report.steps or report.prefill_tokens or report.preemptions),
        report.preemptions > 0,
        any(counts[high_bucket:]),
        report,
    )
