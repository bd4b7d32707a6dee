"""Decides which plan a gateway or a replica acts on: the last one received, while it is young enough.

    age_ms(now)  = time since the plan in force was first received, on the receiver's own clock
    current(now) = that plan while age_ms <= plan.ttl_ms, else None: the follower falls back to its local safe rule

Within one epoch (one life of the controller) only a higher ``seq`` replaces the plan in force. The same plan received
again does not grow younger: a controller that answers but no longer ticks is as good as none. Another epoch always
replaces, whatever its ``seq``: a restarted controller counts from 1 again.

What this must not do: compare clocks of two processes, or decide what the local safe rule is.
"""

from __future__ import annotations

import math

from policies.types import Plan


class PlanFollower:
    """Holds at most one plan."""

    def __init__(self) -> None:
        self._last: Plan | None = None
        self._received_ns = 0
        self._young_until_ns = 0
        """Up to then the last plan is surely in force; beyond, its age decides."""

    def receive(self, plan: Plan, now_ns: int) -> bool:
        """Take a plan from the controller; ``True`` when it is now the one in force."""
        last = self._last
        if last is not None and plan.epoch == last.epoch and plan.seq <= last.seq:
            return False
        self._last, self._received_ns = plan, now_ns
        self._young_until_ns = now_ns + int(plan.ttl_ms * 1e6) if plan.ttl_ms < math.inf else now_ns
        return True

    def current(self, now_ns: int) -> Plan | None:
        """The plan to act on; ``None`` before the first and once the last is older than its ``ttl_ms``."""
        last = self._last
        if last is None:
            return None
        if now_ns > self._young_until_ns and (now_ns - self._received_ns) / 1e6 > last.ttl_ms:
            return None
        return last

    def age_ms(self, now_ns: int) -> float | None:
        """Age in ms of the last plan received, in force or not; ``None`` before the first."""
        return None if self._last is None else (now_ns - self._received_ns) / 1e6
