"""Decides which plan a gateway or a replica acts on: the last one received, while it is young enough.

    age_ms(now)  = time since the plan in force was first received, on the receiver's own clock
    current(now) = that plan while age_ms <= plan.ttl_ms, else None: the follower falls back to its local safe rule

Within one epoch (one life of the controller) only a higher ``seq`` replaces the plan in force. The same plan received
again does not grow younger: a controller that answers but no longer ticks is as good as none. Another epoch always
replaces, whatever its ``seq``: a restarted controller counts from 1 again.

What this must not do: compare clocks of two processes, or decide what the local safe rule is.
"""

from __future__ import annotations

from dataclasses import replace

from policies.steering import ColdModel, ColdPhase, Override
from policies.types import Plan, Sampled


class PlanFollower:
    """Holds at most one plan."""

    def __init__(self) -> None:
        self._last: Sampled[Plan] | None = None

    def receive(self, plan: Plan, now_ns: int) -> bool:
        """Take a plan from the controller; ``True`` when it is now the one in force."""
        if self._last is not None and plan.epoch == self._last.value.epoch and plan.seq <= self._last.value.seq:
            return False
        self._last = Sampled(plan, now_ns)
        return True

    def current(self, now_ns: int) -> Plan | None:
        """The plan to act on; ``None`` before the first and once the last is older than its ``ttl_ms``."""
        if self._last is None or self._last.age_ms(now_ns) > self._last.value.ttl_ms:
            return None
        return self._last.value

    def overrides(self, now_ns: int) -> tuple[Override, ...]:
        """What people set by hand, with the time that is left of it, however old the plan that said so.

        A new life of the controller learns it from here.
        """
        if self._last is None:
            return ()
        age_ms = self._last.age_ms(now_ns)
        left = [replace(o, remaining_ms=o.remaining_ms - age_ms) for o in self._last.value.overrides]
        return tuple(o for o in left if o.remaining_ms > 0)

    def says_awake(self, now_ns: int) -> bool:
        """Whether the plan in force says that some replica serves a model that may sleep."""
        plan = self.current(now_ns)
        return plan is not None and plan.cold is None and bool(plan.replicas_target)

    def cold(self, now_ns: int) -> ColdModel | None:
        """What the last plan said of a model that sleeps or starts, its times as they are now, however old it is."""
        if self._last is None or (cold := self._last.value.cold) is None:
            return None
        age_s = self._last.age_ms(now_ns) / 1_000
        elapsed_s = cold.elapsed_s + (age_s if cold.phase is ColdPhase.STARTING else 0.0)
        return replace(cold, elapsed_s=elapsed_s, retry_after_s=max(0.0, cold.retry_after_s - age_s))

    def age_ms(self, now_ns: int) -> float | None:
        """Age in ms of the last plan received, in force or not; ``None`` before the first."""
        return None if self._last is None else self._last.age_ms(now_ns)
