"""The controller's book of leases: what is granted, what is kept for gateways that are gone, what a new book learns."""

from __future__ import annotations

import pytest

from policies.admission.lease_book import HOLDERS_MAX, TENANTS_MAX, LeaseBook
from policies.admission.money import PUSD, LeaseAsk
from policies.config import PolicyConfig, TenantConfig

S = 10**9
DAY = 86_400 * S
START = 1_000 * DAY


def config(budget_usd: float = 1.0, gateways: int = 1, period_s: float = 86_400.0) -> PolicyConfig:
    tenant = TenantConfig(budget_usd_max=budget_usd, budget_period_s=period_s)
    return PolicyConfig(tenants={"t": tenant}, gateways=gateways)


def ask(used: float = 0.0, wanted: float = 0.0, granted: float = 0.0, **changes: object) -> LeaseAsk:
    pusd = [round(usd * PUSD) for usd in (granted, used, wanted)]
    values: dict[str, object] = {"period": 1_000, "granted_pusd": pusd[0], "used_pusd": pusd[1], "wanted_pusd": pusd[2]}
    return LeaseAsk(**(values | changes))  # type: ignore[arg-type]


def granted(book: LeaseBook, gateway: str, said: LeaseAsk, at_ns: int = START) -> float:
    return book.answer(gateway, {"t": said}, at_ns)["t"].granted_pusd / PUSD


def test_a_gateway_gets_a_small_part_at_once_and_what_it_wants_later() -> None:
    book = LeaseBook(config(), START)
    assert granted(book, "g", LeaseAsk(None)) == pytest.approx(0.02)
    assert granted(book, "g", ask(used=0.015, wanted=0.3, granted=0.02)) == pytest.approx(0.315)


def test_grants_of_all_gateways_never_exceed_the_budget() -> None:
    book = LeaseBook(config(gateways=3), START)
    for gateway in "abc":
        granted(book, gateway, LeaseAsk(None))
    total = sum(granted(book, gateway, ask(wanted=0.7)) for gateway in "abc")
    assert total == pytest.approx(1.0)
    lease = book.answer("c", {"t": ask(wanted=0.7)}, START)["t"]
    assert (lease.free_pusd, lease.committed_pusd) == (0, PUSD)


def test_an_answer_that_was_lost_is_repeated_and_grants_nothing_twice() -> None:
    book = LeaseBook(config(), START)
    first = granted(book, "g", ask(wanted=0.4))
    assert granted(book, "g", ask(wanted=0.4)) == first


def test_a_gateway_that_is_gone_keeps_its_lease() -> None:
    book = LeaseBook(config(gateways=2), START)
    granted(book, "gone", LeaseAsk(None))
    granted(book, "lives", LeaseAsk(None))
    granted(book, "gone", ask(wanted=0.6))
    assert granted(book, "lives", ask(wanted=1.0), START + 3_600 * S) == pytest.approx(0.4)


def test_what_is_returned_can_be_granted_again() -> None:
    book = LeaseBook(config(gateways=2), START)
    granted(book, "a", LeaseAsk(None))
    granted(book, "b", LeaseAsk(None))
    all_of_it = granted(book, "a", ask(wanted=1.0))
    assert granted(book, "b", ask(wanted=0.5)) == pytest.approx(0.01)
    granted(book, "a", ask(used=0.2, granted=all_of_it, returned_pusd=round((all_of_it - 0.2) * PUSD)))
    assert granted(book, "b", ask(wanted=0.5)) == pytest.approx(0.5)


def test_what_was_spent_beyond_a_lease_is_kept_from_the_others() -> None:
    book = LeaseBook(config(gateways=2), START)
    granted(book, "a", LeaseAsk(None))
    granted(book, "b", LeaseAsk(None))
    granted(book, "a", ask(used=0.9, granted=0.01))
    assert granted(book, "b", ask(wanted=1.0)) == pytest.approx(0.1)


def test_a_new_period_has_a_new_budget_and_the_clock_does_not_bring_the_old_one_back() -> None:
    book = LeaseBook(config(period_s=60.0), START)
    period = START // (60 * S)
    granted(book, "g", ask(wanted=1.0, period=period))
    later = book.answer("g", {"t": ask(used=1.0, wanted=1.0, granted=1.0, period=period)}, START + 60 * S)["t"]
    assert (later.period, later.granted_pusd) == (period + 1, PUSD)
    assert later.ends_in_ms == pytest.approx(60_000)
    back = book.answer("g", {"t": ask(used=1.0, wanted=1.0, granted=1.0, period=period + 1)}, START + 59 * S)["t"]
    assert (back.period, back.granted_pusd) == (period + 1, PUSD)


def test_a_new_controller_grants_nothing_until_it_heard_of_all_gateways() -> None:
    book = LeaseBook(config(gateways=2), START)
    assert granted(book, "a", ask(granted=0.3, wanted=1.0)) == pytest.approx(0.3)
    assert granted(book, "b", ask(granted=0.5, wanted=0.0)) == pytest.approx(0.5)
    assert granted(book, "a", ask(granted=0.3, wanted=1.0)) == pytest.approx(0.5)


def test_a_new_controller_waits_for_silent_gateways_only_so_long() -> None:
    book = LeaseBook(config(gateways=2), START)
    assert granted(book, "a", ask(wanted=0.5)) == 0
    assert granted(book, "a", ask(wanted=0.5), START + book.learn_ns) == pytest.approx(0.5)


def test_a_partial_word_does_not_count_as_having_heard_of_a_gateway() -> None:
    book = LeaseBook(config(), START)
    assert book.answer("g", {"t": ask(wanted=1.0)}, START, complete=False)["t"].granted_pusd == 0
    assert book.answer("g", {"t": ask(wanted=1.0)}, START, complete=True)["t"].granted_pusd == PUSD


def test_a_new_controller_learns_from_others_what_a_gateway_that_is_gone_was_granted() -> None:
    book = LeaseBook(config(gateways=2), START)
    committed = round(0.9 * PUSD)
    granted(book, "a", ask(granted=0.3, committed_pusd=committed))
    granted(book, "b", ask(granted=0.2, committed_pusd=committed))
    assert granted(book, "a", ask(granted=0.3, wanted=1.0)) == pytest.approx(0.4)
    assert book.balances(START)["t"].used_usd == pytest.approx(0.4)  # nobody knows what it spent


def test_a_tenant_without_a_budget_gets_no_lease() -> None:
    book = LeaseBook(PolicyConfig(), START)
    assert book.answer("g", {"x": LeaseAsk(None)}, START) == {}


def test_gateways_of_a_period_are_bounded_and_what_they_were_granted_is_not_forgotten() -> None:
    book = LeaseBook(config(budget_usd=1_000.0), START)
    granted(book, "g", LeaseAsk(None))
    for n in range(HOLDERS_MAX + 100):
        granted(book, f"g{n}", ask(wanted=1.0))
    balance = book.balances(START)["t"]
    assert len(book._books["t"].holders) == HOLDERS_MAX
    assert balance.committed_usd >= HOLDERS_MAX + 100


@pytest.mark.slow
def test_tenants_with_a_budget_are_bounded() -> None:
    book = LeaseBook(PolicyConfig(tenants={"default": TenantConfig(budget_usd_max=1.0)}), START)
    asks = {f"t{n}": LeaseAsk(None) for n in range(TENANTS_MAX + 100)}
    assert len(book.answer("g", asks, START)) == TENANTS_MAX
    assert len(book.balances(START)) == TENANTS_MAX
