"""Decides how much of a tenant's budget each gateway may spend. One book, at the controller.

    committed = sum over gateways of (granted - returned + overrun) + lost        never above the budget by a grant
    target    = what the gateway wants; at least budget / BASE_PARTS / gateways while money is not scarce
    grant     = min(budget - committed, target - what it has at hand)

A gateway that is not heard of any more keeps what it was granted: nobody knows what it spent. ``overrun`` is what a
request cost beyond what was set aside. Sums only grow within a period, so a report or an answer that is lost or comes
twice changes nothing. Periods are numbered by the wall clock (``wall_ns // period``), and never go back.

**A new controller** knows nothing. Gateways tell what they hold, and what all held when they last heard, which every
answer tells them; the difference to those it hears of is ``lost``. Until all gateways have reported, or
:attr:`LeaseBook.learn_ns` are over, it grants nothing new; gateways spend what they hold. Oversold can be only what a
gateway was granted after the others' last reports, when it and the controller end together.

What this must not do: price tokens, or refuse requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

from policies.admission.money import PUSD, Lease, LeaseAsk, to_pusd
from policies.admission.wallet import SCARCE_SHARE
from policies.config import PolicyConfig

BASE_PARTS = 50
"""A gateway holds this part of the budget, divided by the number of gateways, before anybody spends."""
HOLDERS_MAX = 512
"""Gateways of one period that are told apart; the grants of those first heard of are then counted as lost."""
TENANTS_MAX = 20_000
"""Tenants with a budget; those beyond get no lease."""


@dataclass(slots=True)
class _Holder:
    granted: int = 0
    returned: int = 0
    used: int = 0

    @property
    def net(self) -> int:
        """What it keeps the others from: its grants, or what it used if that is more."""
        return max(self.granted - self.returned, self.used)


@dataclass(slots=True)
class _Book:
    period: int
    holders: OrderedDict[str, _Holder] = field(default_factory=OrderedDict)
    lost: int = 0

    @property
    def committed(self) -> int:
        return self.lost + sum([holder.net for holder in self.holders.values()])


@dataclass(frozen=True, slots=True)
class Balance:
    """One tenant's budget in its present period, in USD."""

    budget_usd: float
    committed_usd: float
    """Granted to gateways and not returned."""
    used_usd: float
    """Spent or set aside, as gateways last said; those not heard of count with all they were granted."""
    ends_in_s: float


class LeaseBook:
    """See the module. ``wall_ns`` is the wall clock: periods outlive processes."""

    def __init__(self, config: PolicyConfig, wall_ns: int) -> None:
        self._config = config
        self._gateways = max(1, config.gateways)
        self.learn_ns = round(config.control.report_age_ms_max * 1e6)
        """Length of the silence of a new controller, in ns."""
        self._learned_ns = wall_ns + self.learn_ns
        self._heard: set[str] = set()
        self._books: dict[str, _Book] = {}
        self._changes = 0
        self._changed: OrderedDict[str, int] = OrderedDict()
        """Number of the last change of what is committed, by tenant; the latest stands last."""
        self._told: OrderedDict[str, int] = OrderedDict()
        """Number of the last change each gateway knows of."""

    def answer(
        self, gateway_id: str, asks: Mapping[str, LeaseAsk], wall_ns: int, complete: bool = True
    ) -> dict[str, Lease]:
        """Take one gateway's word, and grant what there is.

        ``complete``: it says all it knows, and not only what is new.
        """
        if complete and not self._learned(wall_ns):
            self._heard.add(gateway_id)
        learned = self._learned(wall_ns)
        leases: dict[str, Lease] = {}
        for tenant, ask in asks.items():
            budget_usd = self._config.tenant(tenant).budget_usd_max
            if budget_usd is None or (tenant not in self._books and len(self._books) >= TENANTS_MAX):
                continue
            leases[tenant] = self._lease(tenant, to_pusd(budget_usd), gateway_id, ask, learned, wall_ns)
        return leases | self._news(gateway_id, leases, wall_ns)

    def balances(self, wall_ns: int, tenants_max: int | None = None) -> dict[str, Balance]:
        """Budgets gateways asked for: of all tenants, or of the first ``tenants_max``."""
        found: dict[str, Balance] = {}
        for tenant, book in islice(self._books.items(), tenants_max):
            budget = self._config.tenant(tenant).budget_usd_max
            if budget is None:
                continue
            used = book.lost + sum([holder.used for holder in book.holders.values()])
            found[tenant] = Balance(
                budget, book.committed / PUSD, used / PUSD, self._ends_in_ms(tenant, book.period, wall_ns) / 1e3
            )
        return found

    def _news(self, gateway_id: str, leases: Mapping[str, Lease], wall_ns: int) -> dict[str, Lease]:
        """Leases of tenants it did not ask for, of which something changed since its last report."""
        told, news = self._told.get(gateway_id, 0), {}
        for tenant in reversed(self._changed):
            if self._changed[tenant] <= told:
                break
            book = self._books[tenant]
            holder = book.holders.get(gateway_id)
            if tenant not in leases and holder is not None:
                news[tenant] = self._lease_of(tenant, book, holder, wall_ns)
        self._told[gateway_id] = self._changes
        self._told.move_to_end(gateway_id)
        if len(self._told) > HOLDERS_MAX:
            self._told.popitem(last=False)
        return news

    def _learned(self, wall_ns: int) -> bool:
        return wall_ns >= self._learned_ns or len(self._heard) >= self._gateways

    def _lease(self, tenant: str, budget: int, gateway_id: str, ask: LeaseAsk, learned: bool, wall_ns: int) -> Lease:
        book = self._book(tenant, ask, wall_ns)
        before = book.committed
        holder = self._holder(book, gateway_id, ask)
        if learned and not ask.leaving:
            free = max(0, budget - book.committed)
            base = budget // (BASE_PARTS * self._gateways) if free >= SCARCE_SHARE * budget else 0
            at_hand = holder.granted - holder.returned - holder.used
            holder.granted += min(free, max(0, max(ask.wanted_pusd, base) - at_hand))
        if book.committed != before:
            self._changes += 1
            self._changed[tenant] = self._changes
            self._changed.move_to_end(tenant)
        return self._lease_of(tenant, book, holder, wall_ns)

    def _lease_of(self, tenant: str, book: _Book, holder: _Holder, wall_ns: int) -> Lease:
        budget = to_pusd(self._config.tenant(tenant).budget_usd_max or 0.0)
        committed = book.committed
        ends_in_ms = self._ends_in_ms(tenant, book.period, wall_ns)
        return Lease(book.period, ends_in_ms, holder.granted, committed, max(0, budget - committed))

    def _book(self, tenant: str, ask: LeaseAsk, wall_ns: int) -> _Book:
        book = self._books.get(tenant)
        period = wall_ns // self._period_ns(tenant)
        period = max(period, period if ask.period is None else ask.period)
        if book is None or book.period < period:
            book = self._books[tenant] = _Book(period)
        return book

    def _holder(self, book: _Book, gateway_id: str, ask: LeaseAsk) -> _Holder:
        holder = book.holders.get(gateway_id)
        known = holder is not None
        if holder is None:
            holder = _Holder()
        if ask.period == book.period:
            holder.granted = max(holder.granted, ask.granted_pusd)
            holder.returned = max(holder.returned, ask.returned_pusd)
            holder.used = ask.used_pusd
        if not known:
            book.lost = max(0, book.lost - holder.net)
            book.holders[gateway_id] = holder
            if len(book.holders) > HOLDERS_MAX:
                book.lost += book.holders.popitem(last=False)[1].net
        if ask.period == book.period and ask.committed_pusd > book.committed and not known:
            book.lost += ask.committed_pusd - book.committed
        return holder

    def _period_ns(self, tenant: str) -> int:
        return round(self._config.tenant(tenant).budget_period_s * 1e9)

    def _ends_in_ms(self, tenant: str, period: int, wall_ns: int) -> float:
        return max(0, (period + 1) * self._period_ns(tenant) - wall_ns) / 1e6
