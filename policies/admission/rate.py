"""Decides whether a rate leaves room: a token bucket that holds one minute's worth.

    level += per_minute / 60 per second, up to per_minute;   taken while level >= min(amount, per_minute)

An amount above a whole minute's worth is taken when the bucket is full, and leaves it below zero: it can pass, and
what comes after waits until it is paid off. So any minute sees at most twice the limit, any longer time the limit.

What this must not do: know what is counted.
"""

from __future__ import annotations


class RateBucket:
    """One limit of one tenant at one gateway."""

    __slots__ = ("_at_ns", "_level", "_per_minute")

    def __init__(self, per_minute: float, now_ns: int) -> None:
        self._per_minute = per_minute
        self._level = per_minute
        self._at_ns = now_ns

    def wait_s(self, amount: float, now_ns: int) -> float:
        """Seconds until ``amount`` may be taken; 0: now."""
        elapsed_s = max(0, now_ns - self._at_ns) / 1e9
        self._at_ns = max(self._at_ns, now_ns)
        self._level = min(self._per_minute, self._level + elapsed_s * self._per_minute / 60)
        missing = min(amount, self._per_minute) - self._level
        return 0.0 if missing <= 1e-9 else missing * 60 / self._per_minute

    def take(self, amount: float) -> None:
        """Take ``amount``; a negative one is given back."""
        self._level = min(self._per_minute, self._level - amount)
