"""The clock of a run: a heap of (time, sequence number, call, argument).

Times are integers in ns. Events of one time run in the order in which they were made, so a run depends on nothing but
its inputs. Making and taking an event costs O(log n). Nothing is ever taken out of the middle: whoever may change its
mind keeps a version (a time, a flag, a number) and ignores events that carry an old one.

What this must not do: know what an event means.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, TypeAlias

Call: TypeAlias = Callable[[int, Any], None]
"""Takes the time of the event in ns and the argument it was made with."""

LOOK_EVENTS = 2_048
"""Events between two looks at the outside (progress, a wish to stop)."""


class EventQueue:
    """Pending events, and the time of the one that runs."""

    __slots__ = ("_heap", "_seq", "events", "now_ns", "over")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Call, Any]] = []
        self._seq = 0
        self.now_ns = 0
        """Time of the event that runs, or of the last one."""
        self.events = 0
        """Events run so far."""
        self.over = False
        """Set by an event: nothing runs after it."""

    def at(self, at_ns: int, call: Call, argument: Any = None) -> None:
        """Run ``call(at_ns, argument)`` at ``at_ns``, which must not lie in the past."""
        if at_ns < self.now_ns:
            raise ValueError(f"an event for {at_ns} ns was made at {self.now_ns} ns: it lies in the past")
        self._seq += 1
        heappush(self._heap, (at_ns, self._seq, call, argument))

    def __len__(self) -> int:
        return len(self._heap)

    def run(self, look: Callable[[], bool] | None = None) -> None:
        """Run events until there are none, one sets ``over``, or ``look`` says ``True`` (asked now and then)."""
        heap, left = self._heap, LOOK_EVENTS
        while heap and not self.over:
            at_ns, _, call, argument = heappop(heap)
            self.now_ns = at_ns
            self.events += 1
            call(at_ns, argument)
            left -= 1
            if left == 0:
                left = LOOK_EVENTS
                if look is not None and look():
                    return
