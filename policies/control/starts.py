"""Starts of replicas: who starts, in which phase, what ended starts took, and how many failed in a row.

A start begins with its first report, ends well when its port is open, and has failed when it says so, or says nothing
for :data:`SILENT_NS` (its process is gone) while Serve still wants it; one that Serve wants no more was called off. Its
*schedule* phase is measured here, because a process that does not run yet cannot::

    schedule = receipt of its first report - age of its process then - time of the rise of Serve's target, at least 0

Each replica that a rise asks for is found in one start; one that takes a dead replica's place answers no rise, and its
schedule phase is not known.

What this must not do: decide what becomes of a model that does not start.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from policies.measures import StartPhase, StartReport
from policies.types import FleetView, Sampled

SILENT_NS = 15_000_000_000
"""A start that says nothing for this long is over: reports come each second, from a thread of their own."""

STARTS_MAX = 4_096
"""Starts followed at once; the oldest goes."""

ENDED_MAX = 64
"""Ended starts whose phases are kept."""

WHY_CHARS_MAX = 300
"""Of what a failed start says."""


@dataclass(frozen=True, slots=True)
class Start:
    """One start as it is now, or as it ended."""

    replica_id: str
    phase: StartPhase
    age_ms: float
    """Since its process began, when it was last heard of."""
    phases_ms: Mapping[StartPhase, float]
    """Phases that are over, the schedule phase included."""

    @property
    def total_ms(self) -> float:
        """From the wish for it to its open port, as far as both are known."""
        return self.phases_ms.get(StartPhase.SCHEDULE, 0.0) + self.age_ms


@dataclass(frozen=True, slots=True)
class Starts:
    """What is known of starts."""

    under_way: tuple[Start, ...] = ()
    """By replica id."""
    ended: tuple[Start, ...] = ()
    """The last ones whose port opened, oldest first."""
    failed_in_a_row: int = 0
    """Since one ended well."""
    failed_why: str = ""
    """What the last one that failed said."""


@dataclass(slots=True)
class _Followed:
    last: Sampled[StartReport]
    schedule_ms: float | None
    counted: bool = False
    """Its end was counted."""


@dataclass(slots=True)
class StartBook:
    """Receives start reports and Serve's target."""

    _starts: OrderedDict[str, _Followed] = field(default_factory=OrderedDict)
    _ended: deque[Start] = field(default_factory=lambda: deque(maxlen=ENDED_MAX))
    _failed: int = 0
    _why: str = ""
    _target: int | None = None
    _running: int = 0
    _asked_ns: deque[int] = field(default_factory=lambda: deque(maxlen=STARTS_MAX))
    """When Serve's target rose, once for each replica that it asked for and that did not begin yet."""

    def receive_fleet(self, view: FleetView, now_ns: int) -> None:
        """Follow Serve's target."""
        if self._target is not None and view.replicas_target > self._target:
            self._asked_ns.extend([now_ns] * (view.replicas_target - self._target))
        self._target, self._running = view.replicas_target, view.replicas_running
        if view.replicas_running >= view.replicas_target:
            self._asked_ns.clear()

    def receive(self, report: StartReport, now_ns: int) -> Start | None:
        """Take a report; the start, where it has just ended well or given its first token."""
        known = self._starts.get(report.replica_id)
        if known is None:
            known = _Followed(Sampled(report, now_ns), self._schedule_ms(report, now_ns))
            self._starts[report.replica_id] = known
            if len(self._starts) > STARTS_MAX:
                self._starts.popitem(last=False)
        known.last = Sampled(report, now_ns)
        if report.failed:
            self._fail(known, report.failed)
        elif report.phase is StartPhase.FIRST_TOKEN:
            return self._open(known)
        return None

    def step(self, now_ns: int) -> Starts:
        """Everything known at ``now_ns``; those that fell silent have failed."""
        silent = [f for f in self._starts.values() if not f.counted and now_ns - f.last.received_ns > SILENT_NS]
        speaking = sum(not f.counted for f in self._starts.values()) - len(silent)
        for followed in silent:
            if self._target is not None and self._running + speaking < self._target:
                self._fail(followed, "its process ended without a word")
            followed.counted = True
        self._starts = OrderedDict(
            (name, f) for name, f in self._starts.items() if now_ns - f.last.received_ns <= SILENT_NS or not f.counted
        )
        under_way = tuple(_start(f) for _, f in sorted(self._starts.items()) if not f.counted)
        return Starts(under_way, tuple(self._ended), self._failed, self._why)

    def _schedule_ms(self, report: StartReport, now_ns: int) -> float | None:
        if not self._asked_ns:
            return None
        return max(0.0, (now_ns - self._asked_ns.popleft()) / 1e6 - report.age_ms)

    def _fail(self, followed: _Followed, why: str) -> None:
        if not followed.counted:
            followed.counted = True
            self._failed += 1
            self._why = why[:WHY_CHARS_MAX]

    def _open(self, followed: _Followed) -> Start | None:
        first = not followed.counted
        followed.counted = True
        start = _start(followed)
        if first:
            self._failed, self._why = 0, ""
            self._ended.append(start)
            return start
        if StartPhase.FIRST_TOKEN not in start.phases_ms:
            return None
        for at, ended in enumerate(self._ended):
            if ended.replica_id == start.replica_id and StartPhase.FIRST_TOKEN not in ended.phases_ms:
                self._ended[at] = start
                return replace(start, phases_ms={StartPhase.FIRST_TOKEN: start.phases_ms[StartPhase.FIRST_TOKEN]})
        return None


OVERDUE_SHARE = 0.2
"""A start that takes longer than those before is taken to need this share of one more."""

LAST = 5
"""The longest of so many starts stands for those under way: what clients are told must be true."""


def coming_s(starts: Starts, missing: int, start_s: float) -> float:
    """Seconds until ``missing`` replicas that were asked for serve; ``start_s`` is a start where none has ended."""
    last = [start.total_ms / 1_000 for start in starts.ended[-LAST:] if start.age_ms > 0]
    longest_s = max(last, default=start_s)
    begun = [start.total_ms / 1_000 for start in starts.under_way]
    since_s = min(begun) if len(begun) >= missing else 0.0
    return max(longest_s - since_s, OVERDUE_SHARE * longest_s)


def _start(followed: _Followed) -> Start:
    report = followed.last.value
    schedule = {} if followed.schedule_ms is None else {StartPhase.SCHEDULE: followed.schedule_ms}
    return Start(report.replica_id, report.phase, report.age_ms, {**schedule, **report.phases_ms})
