"""Slots of engines that are kept free for tenants within their share, from those that are beyond theirs.

    share(t)   = slots of the fleet * weight of t / weights of all that were active lately
    wanted(t)  = min(share(t), most requests t had open at once lately) - requests t has at engines now
    kept(t)    = 0 while t has fewer requests at engines than its share, else the sum of wanted(u) of all others

An order of those that wait is not enough: engines do not give a slot back before its request has ended, so a tenant
that fills every slot makes whoever comes next wait for one of its own requests to end, however little that asks for.

"Lately" fades: the most of a tenant halves every :data:`HALF_LIFE_S`. Slots kept for a tenant that stays away are given
to the others as it does.

What this must not do: order, or refuse.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from policies.config import PolicyConfig

HALF_LIFE_S = 10.0
FORGOTTEN_BELOW = 0.5
"""A tenant whose most has faded below this is not active any more."""

TENANTS_MAX = 256
"""Tenants that are remembered; the one unheard of for longest goes."""


@dataclass(slots=True)
class _Lately:
    weight: float
    open: int = 0
    """Requests that wait or are at engines."""
    now: int = 0
    """At engines."""
    most: float = 0.0
    at_ns: int = 0

    def fade(self, now_ns: int) -> float:
        """The most it had open at once, faded to ``now_ns``."""
        if self.most > self.open and now_ns > self.at_ns:
            self.most = max(float(self.open), self.most * 0.5 ** ((now_ns - self.at_ns) / 1e9 / HALF_LIFE_S))
        self.at_ns = now_ns
        return self.most


class Reserve:
    """One per gateway: it sees the requests of this one only, and its part of the slots is what they use."""

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self._lately: OrderedDict[str, _Lately] = OrderedDict()

    def opened(self, tenant: str, now_ns: int) -> None:
        """A request of ``tenant`` was let in, to wait or not."""
        lately = self._lately.get(tenant)
        if lately is None:
            lately = self._lately[tenant] = _Lately(self._config.tenant(tenant).weight)
            if len(self._lately) > TENANTS_MAX:
                idle = next((t for t, known in self._lately.items() if not known.open and t != tenant), None)
                if idle is not None:
                    del self._lately[idle]
        self._lately.move_to_end(tenant)
        lately.open += 1
        lately.most = max(lately.fade(now_ns), float(lately.open))

    def sent(self, tenant: str) -> None:
        """It goes on to an engine."""
        lately = self._lately.get(tenant)
        if lately is not None:
            lately.now += 1

    def ended(self, tenant: str, was_sent: bool, now_ns: int) -> None:
        """It is over."""
        lately = self._lately.get(tenant)
        if lately is not None:
            lately.fade(now_ns)
            lately.open = max(0, lately.open - 1)
            lately.now = max(0, lately.now - was_sent)

    def kept(self, tenant: str, slots: int, now_ns: int) -> float:
        """Slots that must stay free when ``tenant`` is given one of ``slots``."""
        if len(self._lately) < 2:
            return 0.0
        gone = [t for t, known in self._lately.items() if known.fade(now_ns) < FORGOTTEN_BELOW]
        for name in gone:
            del self._lately[name]
        own = self._lately.get(tenant)
        if own is None or len(self._lately) < 2:
            return 0.0
        per_weight = slots / sum([known.weight for known in self._lately.values()])
        if own.now < per_weight * own.weight:
            return 0.0
        return sum(
            [
                max(0.0, min(per_weight * known.weight, known.most) - known.now)
                for known in self._lately.values()
                if known is not own
            ]
        )
