"""Decides whether one gateway has the money for one request of a tenant: from a lease of the tenant's budget.

    at hand = granted - returned - used            used: spent, and the worst case of requests in flight
    admitted when the worst case is at hand; settled to the true cost at the end

The lease comes from the controller's book (policies/admission/lease_book.py), which never grants more than the budget,
so gateways that do not talk never spend it twice. Without a controller a gateway goes on until its lease is used up. A
lease outlives its period until the next one arrives: its money is that of the old period.

A request that costs more than was set aside (its prompt was estimated too small) takes the difference all the same:
``at hand`` may fall below zero, and the book counts it.

What this must not do: ask the controller (it says what it wants), or know prices.
"""

from __future__ import annotations

from policies.admission.money import Lease, LeaseAsk
from policies.admission.refusal import QUOTA, Refusal

BUDGET_UNKNOWN = "budget_unknown"
"""Code of a refusal until the controller has answered."""
RETRY_S = 1.0
"""When to come again while a lease is on its way: by then a report has been answered."""
IDLE_REPORTS = 5
"""A gateway that has not been asked to pay for so many reports returns what it has, once money is scarce."""
SCARCE_SHARE = 0.25
"""Money is scarce when less than this share of the budget is left."""


class Wallet:
    """One tenant's lease at one gateway."""

    __slots__ = ("_asked", "_budget", "_committed", "_ends_ns", "_free", "_granted", "_idle_reports", "_recent",
                 "_refused", "_returned", "_used", "period")  # fmt: skip

    def __init__(self, budget_pusd: int) -> None:
        self._budget = budget_pusd
        self._granted = self._returned = self._used = 0
        self._committed = self._free = 0
        self._ends_ns = 0
        self._recent = 0
        self._refused = 0
        self._idle_reports = 0
        self._asked: LeaseAsk | None = None
        self.period: int | None = None
        """Number of the period the lease is for; ``None`` before the first."""

    @property
    def at_hand(self) -> int:
        """Picodollars that may still be set aside."""
        return self._granted - self._returned - self._used

    def refusal(self, pusd: int, now_ns: int) -> Refusal | None:
        """Why a request that may cost ``pusd`` is not let in; ``None``: the money is there."""
        if pusd <= self.at_hand or pusd == 0:
            return None
        if pusd > self._budget or (self.period is not None and pusd > self.at_hand + self._free):
            return Refusal(
                "tenant_budget",
                "the budget of this period is used up",
                type=QUOTA,
                retry_after_s=max(RETRY_S, (self._ends_ns - now_ns) / 1e9) if self.period is not None else None,
                should_retry=False,
            )
        self._refused += pusd
        return Refusal(BUDGET_UNKNOWN, "what is left of the budget is being asked for", retry_after_s=RETRY_S)

    def reserve(self, pusd: int) -> int | None:
        """Set the worst case of a request aside; the answer is to be given to :meth:`settle`."""
        self._used += pusd
        self._recent += pusd
        return self.period

    def settle(self, period: int | None, reserved_pusd: int, spent_pusd: int) -> None:
        """A request is over. One of an earlier period changes nothing: that period's lease is gone."""
        if period == self.period:
            self._used += spent_pusd - reserved_pusd

    # --- with the controller ------------------------------------------------------------------------------------------

    def ask(self, now_ns: int, again: bool, leaving: bool) -> LeaseAsk | None:
        """What to tell the controller; ``None``: nothing new.

        Args:
            now_ns: time of the receiver's clock.
            again: tell it in any case; the controller may be a new one.
            leaving: this gateway ends: it returns what it has.
        """
        wanted = self._refused + 2 * self._recent
        self._idle_reports = 0 if wanted else self._idle_reports + 1
        scarce = self._free < SCARCE_SHARE * self._budget
        if self.at_hand > 0 and (leaving or (scarce and self._idle_reports >= IDLE_REPORTS)):
            self._returned += self.at_hand
        self._recent = self._refused = 0
        ask = LeaseAsk(self.period, self._granted, self._returned, self._used, wanted, self._committed, leaving)
        ended = self.period is None or now_ns >= self._ends_ns
        if not again and not ended and ask == self._asked:
            return None
        return ask

    def receive(self, asked: LeaseAsk | None, lease: Lease, now_ns: int) -> None:
        """Take the controller's answer to ``asked``; ``None``: it was not asked."""
        if self.period is not None and lease.period < self.period:
            return
        if lease.period != self.period:
            self.period = lease.period
            self._granted = self._returned = self._used = 0
        self._granted = max(self._granted, lease.granted_pusd)
        self._committed, self._free = lease.committed_pusd, lease.free_pusd
        self._ends_ns = now_ns + round(lease.ends_in_ms * 1e6)
        self._asked = asked or self._asked
