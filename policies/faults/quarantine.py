"""Remembers requests that broke off on two engines: they may be what breaks them, and are not sent to a third.

    holds(fingerprint, now) = it was added less than quarantine_s ago, and is among the last requests_max added

A client's repetition of the same body has the same fingerprint (:attr:`policies.types.Request.fingerprint`), so it is
refused for as long.

What this must not do: decide what counts as breaking off. That is the flow's part.
"""

from __future__ import annotations

from collections import OrderedDict

from policies.config import FaultsConfig

REQUESTS_MAX = 1_024
"""Requests remembered; the one added first goes first."""

UNKNOWN = 0
"""Fingerprint of a request nobody made one of. It is never held: it would stand for all the others like it."""


class Quarantine:
    """What one gateway refuses to send to an engine again. Bounded by :data:`REQUESTS_MAX`."""

    def __init__(self, config: FaultsConfig, requests_max: int = REQUESTS_MAX) -> None:
        self._span_ns = round(config.quarantine_s * 1e9)
        self._requests_max = requests_max
        self._until_ns: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until_ns)

    def add(self, fingerprint: int, now_ns: int) -> None:
        """Hold ``fingerprint`` for ``quarantine_s`` from now on, also when it was held already."""
        if fingerprint == UNKNOWN or not self._span_ns:
            return
        held = self._until_ns
        held[fingerprint] = now_ns + self._span_ns
        held.move_to_end(fingerprint)
        while len(held) > self._requests_max or next(iter(held.values())) <= now_ns:
            held.popitem(last=False)

    def holds(self, fingerprint: int, now_ns: int) -> bool:
        """Whether the request must not be sent to an engine now."""
        until_ns = self._until_ns.get(fingerprint)
        if until_ns is None:
            return False
        if until_ns <= now_ns:
            del self._until_ns[fingerprint]
            return False
        return True

    def left_s(self, fingerprint: int, now_ns: int) -> float | None:
        """Seconds for which it is still held; ``None``: it is not."""
        return (self._until_ns[fingerprint] - now_ns) / 1e9 if self.holds(fingerprint, now_ns) else None
