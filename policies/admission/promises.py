"""When a request that is refused may come again, so that it is served then: a queue in time instead of one in memory.

    room        each second ahead has room for ``SHARE * rate / kept`` tokens of promised work
    promised    the first whole second, once what waits now has drained, that has room for the request
    redeemed    the same body comes again between EARLY_S before that time and LATE_S after it: it is let in
    kept        share of the last promises that were redeemed; at least KEPT_MIN where room is divided by it
    ahead       promised work that is due before a newcomer would be served, and was due no longer than GRACE_S ago,
                times kept: a newcomer counts it as waiting before it, so that it is refused where the time is promised;
                of other tenants no more than what they are served, by weight, while the newcomer's own is

Without ``ahead`` newcomers take the room that those who come back were told of: at four times the load of a replica
41 % of them were refused a second time. Clients that never come back hold nobody off for long: ``kept`` falls. A class
counts promises of its own and of more important classes. A tenant that floods is promised nearly all there is, and
holds off itself alone: counted in full, its promises left another, which asked for a tenth of the fleet, a quarter of
that. A promise is known at the gateway that made it, and by the
body's hash alone.
A call of a task that has begun waits for no promise.
Replicas that start count from the time at which they should serve (``AdmissionKnobs.coming``).

What this must not do: know the queue, or refuse anybody.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from policies.types import Priority

SHARE = 0.85
"""Share of what is served in a second that is promised: the rest is for what a rate cannot know."""

EARLY_S, LATE_S = 0.5, 10.0
"""A client's clock and way, before; its patience, after."""

GRACE_S = 1.5
"""Room is kept for somebody who is late for this long."""

KEPT_SMOOTHING, KEPT_MIN = 0.02, 0.2
"""Weight of the newest promise in ``kept``; no more than five times the room is promised."""

PROMISES_MAX = 16_384
"""Promises remembered; beyond, clients are told a time and nothing is kept for them."""

AHEAD_S_MAX = 60
"""Promises that are due later than this are ahead of nobody."""

SECOND_NS = 1_000_000_000


class _Promise(NamedTuple):
    due_ns: int
    tenant: str
    rank: int
    room: tuple[tuple[int, float], ...]
    """Seconds that it takes room in, and how much."""


@dataclass(slots=True)
class _Taken:
    """Promised tokens of each class, by second."""

    by_second: dict[int, list[float]] = field(default_factory=dict)
    weight: float = 1.0
    promises: int = 0

    def change(self, second: int, rank: int, tokens: float) -> None:
        row = self.by_second.setdefault(second, [0.0] * len(Priority))
        row[rank] = max(0.0, row[rank] + tokens)

    def within(self, begin: float, end: float, rank: int) -> float:
        """Tokens of classes up to ``rank`` between two times."""
        total = 0.0
        for second in range(math.floor(begin), math.floor(end) + 1):
            if (row := self.by_second.get(second)) is not None:
                total += sum(row[: rank + 1]) * (min(second + 1, end) - max(second, begin))
        return total

    def forget(self, before: int) -> None:
        self.by_second = {second: row for second, row in self.by_second.items() if second >= before}


class Promises:
    """Of one gateway."""

    def __init__(self) -> None:
        self._made: OrderedDict[int, _Promise] = OrderedDict()
        """By fingerprint; oldest first."""
        self._taken = _Taken(weight=0.0)
        """Of all; its weight is that of all tenants who were promised something."""
        self._tenants: dict[str, _Taken] = {}
        self._kept = 1.0
        self._looked = 0
        """The last second in which what is over was forgotten."""

    def __len__(self) -> int:
        return len(self._made)

    def give(
        self,
        fingerprint: int,
        priority: Priority,
        tokens: int,
        after_s: float,
        rate_in: Callable[[float], float],
        max_s: float,
        now_ns: int,
        tenant: str = "",
        weight: float = 1.0,
    ) -> float | None:
        """Seconds after which the request is served; ``None``: nothing can be promised within ``max_s``.

        Args:
            fingerprint: of the body; 0: not known, and nobody could come back.
            priority: its class.
            tokens: what it costs.
            after_s: until what waits now has drained so far that it could begin.
            rate_in: tokens that will be served per second, by seconds from now on.
            max_s: longest time.
            now_ns: of the refusal.
            tenant: who is promised.
            weight: its share among tenants.
        """
        self._forget(now_ns)
        known = self._made.get(fingerprint)
        if known is not None and known.due_ns > now_ns:
            return (known.due_ns - now_ns) / 1e9
        self._drop(fingerprint)
        if not fingerprint or len(self._made) >= PROMISES_MAX:
            return None
        now_s = now_ns // SECOND_NS

        def most(second: int) -> float:
            return SHARE * rate_in(second - now_s) / max(KEPT_MIN, self._kept)

        second, last = now_s + max(1, math.ceil(after_s)), now_s + math.floor(max_s)
        while second <= last and self._free(second, most) < min(tokens, most(second)):
            second += 1
        if second > last:
            return None
        due_ns = second * SECOND_NS + now_ns % SECOND_NS
        room = self._room(second, tokens, second + last - now_s, most)
        self._made[fingerprint] = promise = _Promise(due_ns, tenant, priority.rank, room)
        self._take(promise, weight)
        return (due_ns - now_ns) / 1e9

    def redeem(self, fingerprint: int, now_ns: int) -> bool:
        """Whether a request comes as it was told to; its room is its own from now on."""
        made = self._made.get(fingerprint)
        if made is None or now_ns < made.due_ns - EARLY_S * 1e9:
            return False
        self._drop(fingerprint)
        kept = now_ns <= made.due_ns + LATE_S * 1e9
        self._learn(kept)
        return kept

    def ahead(
        self, priority: Priority, within_s: float, now_ns: int, tenant: str = "", weight: float = 1.0, tokens: int = 0
    ) -> float:
        """Promised tokens that are due within this time and count before a newcomer of this class, which costs
        ``tokens`` and whose tenant weighs ``weight``.
        """
        if not self._made:
            return 0.0
        begin, end = now_ns / SECOND_NS - GRACE_S, now_ns / SECOND_NS + min(within_s, AHEAD_S_MAX)
        total = self._taken.within(begin, end, priority.rank)
        own, others_weight = 0.0, self._taken.weight
        if (taken := self._tenants.get(tenant)) is not None:
            own, others_weight = taken.within(begin, end, priority.rank), others_weight - taken.weight
        return (own + max(0.0, min(total - own, (own + tokens) * others_weight / weight))) * self._kept

    def _learn(self, kept: bool) -> None:
        self._kept += KEPT_SMOOTHING * (kept - self._kept)

    def _free(self, second: int, most: Callable[[int], float]) -> float:
        row = self._taken.by_second.get(second)
        return most(second) if row is None else most(second) - sum(row)

    def _room(
        self, second: int, tokens: float, last: int, most: Callable[[int], float]
    ) -> tuple[tuple[int, float], ...]:
        """Room from ``second`` to ``last``, as it is free."""
        room = []
        while tokens > 0 and second <= last:
            part = min(tokens, self._free(second, most))
            if part > 0:
                room.append((second, part))
                tokens -= part
            second += 1
        return tuple(room)

    def _take(self, promise: _Promise, weight: float) -> None:
        taken = self._tenants.get(promise.tenant)
        if taken is None:
            taken = self._tenants[promise.tenant] = _Taken(weight=weight)
            self._taken.weight += weight
        taken.promises += 1
        for second, part in promise.room:
            self._taken.change(second, promise.rank, part)
            taken.change(second, promise.rank, part)

    def _drop(self, fingerprint: int) -> None:
        made = self._made.pop(fingerprint, None)
        if made is None:
            return
        taken = self._tenants[made.tenant]
        for second, part in made.room:
            if second in self._taken.by_second:
                self._taken.change(second, made.rank, -part)
                taken.change(second, made.rank, -part)
        taken.promises -= 1
        if not taken.promises:
            del self._tenants[made.tenant]
            self._taken.weight = max(0.0, self._taken.weight - taken.weight)

    def _forget(self, now_ns: int) -> None:
        """Once a second: whoever is too late is a newcomer, and time that is over has no room."""
        second = now_ns // SECOND_NS
        if second == self._looked:
            return
        self._looked, over_ns = second, now_ns - round(LATE_S * 1e9)
        for fingerprint in [f for f, made in self._made.items() if made.due_ns < over_ns]:
            self._drop(fingerprint)
            self._learn(False)
        for taken in (self._taken, *self._tenants.values()):
            taken.forget(second - math.ceil(GRACE_S))
