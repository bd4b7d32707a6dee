"""The one reading of time the rest of ``deployments`` passes on to the policies.

Monotonic but for :func:`wall_ns`, so that ages never jump with the wall clock. Values of two processes must not be
compared: what crosses a process carries a sequence number and gets the receiver's time.
"""

from __future__ import annotations

import time


def now_ns() -> int:
    """Nanoseconds of this machine's monotonic clock."""
    return time.monotonic_ns()


def wall_ns() -> int:
    """Nanoseconds since 1970 by this machine's wall clock: for what outlives processes, such as a budget's period."""
    return time.time_ns()
