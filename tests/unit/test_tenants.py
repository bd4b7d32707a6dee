"""Limits of tenants at one gateway: what is refused, when to come again, and that all is given back."""

from __future__ import annotations

import random
from typing import Any

import pytest

from policies.admission.money import Lease, LeaseAsk
from policies.admission.rate import RateBucket
from policies.admission.tenants import OTHER, TENANTS_MAX, TenantBook
from policies.config import PolicyConfig, PricesConfig, TenantConfig

S = 10**9
PRICES = PricesConfig(prompt_usd_per_mtok=1.0, cached_usd_per_mtok=0.1, output_usd_per_mtok=4.0)


def book(gateways: int = 1, **limits: Any) -> TenantBook:
    return TenantBook(PolicyConfig(tenants={"t": TenantConfig(**limits)}, gateways=gateways, prices=PRICES))


def lend(tenants: TenantBook, usd: float, free_usd: float = 0.0, now_ns: int = 0, period: int = 1) -> None:
    pusd, free = round(usd * 1e12), round(free_usd * 1e12)
    tenants.receive(tenants.asks(now_ns), {"t": Lease(period, 50_000.0, pusd, pusd, free)}, now_ns)


def code(refusal: Any) -> str | None:
    return None if refusal is None else str(refusal.code)


# --- rates ------------------------------------------------------------------------------------------------------------


def test_a_minutes_worth_may_come_at_once_and_then_one_by_one_as_it_refills() -> None:
    tenants = book(requests_per_minute_max=6)
    assert [code(tenants.take(f"r{n}", "t", 1, 1, 0)) for n in range(7)] == [None] * 6 + ["tenant_request_rate"]
    refusal = tenants.take("later", "t", 1, 1, 4 * S)
    assert refusal is not None
    assert refusal.retry_after_s == pytest.approx(6)
    assert tenants.take("in time", "t", 1, 1, 10 * S) is None


def test_retry_after_of_a_token_rate_is_the_time_in_which_the_missing_tokens_refill() -> None:
    tenants = book(tokens_per_minute_max=6_000)
    assert tenants.take("a", "t", 5_000, 500, 0) is None
    refusal = tenants.take("b", "t", 900, 600, 0)
    assert refusal is not None
    assert refusal.code == "tenant_token_rate"
    assert refusal.retry_after_s == pytest.approx(10)
    assert tenants.take("b", "t", 900, 600, 10 * S) is None


def test_tokens_are_settled_to_what_they_really_were() -> None:
    tenants = book(tokens_per_minute_max=6_000)
    assert tenants.take("a", "t", 1_000, 5_000, 0) is None
    assert code(tenants.take("b", "t", 1_000, 1_000, 0)) == "tenant_token_rate"
    tenants.settle("a", 1_000, 0, 10, 0)
    assert tenants.take("b", "t", 1_000, 1_000, 0) is None


def test_a_request_above_a_whole_minute_passes_when_nothing_was_used_and_is_paid_off_after() -> None:
    tenants = book(tokens_per_minute_max=600)
    assert tenants.take("big", "t", 1_200, 0, 0) is None
    refusal = tenants.take("next", "t", 600, 0, 0)
    assert refusal is not None
    assert refusal.retry_after_s == pytest.approx(120)


def test_any_long_time_sees_no_more_than_the_rate_and_one_minutes_worth() -> None:
    rng = random.Random(3)
    bucket, taken, now_ns = RateBucket(1_000, 0), 0, 0
    for _ in range(20_000):
        now_ns += rng.randrange(S // 10)
        amount = rng.randrange(1, 300)
        if bucket.wait_s(amount, now_ns) == 0:
            bucket.take(amount)
            taken += amount
    assert 0.95 * now_ns / 60e9 * 1_000 <= taken <= now_ns / 60e9 * 1_000 + 1_000


def test_limits_are_split_between_gateways() -> None:
    tenants = book(gateways=4, requests_per_minute_max=40, concurrent_requests_max=8, tokens_per_minute_max=4_000)
    assert [code(tenants.take(f"r{n}", "t", 1, 1, 0)) for n in range(3)] == [None, None, "tenant_concurrency"]
    for n in range(2):
        tenants.settle(f"r{n}", 1, 0, 1, 0)
    for n in range(3, 11):
        assert tenants.take(f"r{n}", "t", 1, 1, 0) is None
        tenants.settle(f"r{n}", 1, 0, 1, 0)
    assert code(tenants.take("r11", "t", 1, 1, 0)) == "tenant_request_rate"


# --- concurrency ------------------------------------------------------------------------------------------------------


def test_retry_after_of_concurrency_is_the_mean_time_until_a_request_ends() -> None:
    tenants = book(concurrent_requests_max=2)
    tenants.take("a", "t", 1, 1, 0)
    tenants.settle("a", 1, 0, 1, 8 * S)
    tenants.take("b", "t", 1, 1, 8 * S)
    tenants.take("c", "t", 1, 1, 8 * S)
    refusal = tenants.take("d", "t", 1, 1, 8 * S)
    assert refusal is not None
    assert (refusal.code, refusal.retry_after_s) == ("tenant_concurrency", 4.0)


def test_a_request_above_a_gateways_part_of_the_tokens_passes_alone_but_not_above_the_whole() -> None:
    tenants = book(gateways=2, concurrent_tokens_max=1_000)
    assert tenants.take("a", "t", 700, 200, 0) is None
    assert code(tenants.take("b", "t", 1, 1, 0)) == "tenant_concurrent_tokens"
    tenants.settle("a", 700, 0, 200, 0)
    refusal = tenants.take("c", "t", 1_000, 1, 0)
    assert refusal is not None
    assert (refusal.code, refusal.retry_after_s, refusal.should_retry) == ("tenant_concurrent_tokens", None, False)


def test_a_tenant_without_limits_and_one_with_limits_do_not_touch_each_other() -> None:
    tenants = book(concurrent_requests_max=1)
    assert tenants.take("a", "t", 1, 1, 0) is None
    assert [tenants.take(f"r{n}", "free", 1, 1, 0) for n in range(50)] == [None] * 50
    assert code(tenants.take("b", "t", 1, 1, 0)) == "tenant_concurrency"


def test_tenants_without_configuration_have_the_defaults_limits_each_for_itself() -> None:
    config = PolicyConfig(tenants={"default": TenantConfig(concurrent_requests_max=1)})
    tenants = TenantBook(config)
    assert tenants.take("a", "x", 1, 1, 0) is None
    assert tenants.take("b", "y", 1, 1, 0) is None
    assert code(tenants.take("c", "x", 1, 1, 0)) == "tenant_concurrency"


# --- all or nothing, exactly once -------------------------------------------------------------------------------------


def test_a_refused_request_takes_nothing_from_the_limits_it_passed() -> None:
    tenants = book(requests_per_minute_max=2, tokens_per_minute_max=1_000, concurrent_requests_max=1)
    assert tenants.take("a", "t", 10, 10, 0) is None
    for n in range(50):
        assert code(tenants.take(f"x{n}", "t", 10, 10, 0)) == "tenant_concurrency"
    tenants.settle("a", 10, 0, 10, 0)
    assert tenants.take("b", "t", 10, 10, 0) is None


def test_a_request_is_settled_once_and_an_unknown_one_never() -> None:
    tenants = book(concurrent_requests_max=1)
    tenants.take("a", "t", 10, 10, 0)
    assert tenants.settle("nobody", 10, 0, 10, 0) == 0
    assert tenants.settle("a", 10, 0, 10, 0) == pytest.approx(10 * 1e-6 + 10 * 4e-6)
    assert tenants.settle("a", 10, 0, 10, 0) == 0
    usage = tenants.usage()["t"]
    assert (usage.requests, usage.prompt_tokens, usage.output_tokens, usage.inflight_requests) == (1, 10, 10, 0)


def test_an_id_that_is_counted_cannot_be_taken_again() -> None:
    tenants = book()
    tenants.take("a", "t", 1, 1, 0)
    with pytest.raises(ValueError, match="counted already"):
        tenants.take("a", "t", 1, 1, 0)


def test_a_request_that_is_not_charged_costs_nothing() -> None:
    tenants = book(tokens_per_minute_max=100, budget_usd_max=1.0)
    lend(tenants, 1.0)
    tenants.take("a", "t", 50, 50, 0)
    assert tenants.settle("a", 50, 0, 50, 0, charged=False) == 0
    usage = tenants.usage()["t"]
    assert (usage.prompt_tokens, usage.spent_usd, usage.inflight_tokens) == (0, 0.0, 0)
    assert tenants.take("b", "t", 50, 50, 0) is None


def test_counters_return_to_zero_after_any_mix_of_endings() -> None:
    rng = random.Random(1)
    tenants = book(concurrent_tokens_max=5_000, budget_usd_max=50.0)
    lend(tenants, 50.0)
    open_: list[str] = []
    for n in range(3_000):
        name = f"r{n}"
        if tenants.take(name, rng.choice(["t", "u"]), rng.randrange(400), rng.randrange(400), n) is None:
            open_.append(name)
        while open_ and rng.random() < 0.6:
            gone = open_.pop(rng.randrange(len(open_)))
            tenants.settle(gone, rng.randrange(400), rng.randrange(500), rng.randrange(400), n, rng.random() < 0.8)
    for name in open_:
        tenants.settle(name, 1, 0, 1, 3_000)
    assert tenants.requests == 0
    assert {(u.inflight_requests, u.inflight_tokens) for u in tenants.usage().values()} == {(0, 0)}
    ask = tenants.asks(3_000, again=True)["t"]
    assert ask.used_pusd == round(tenants.usage()["t"].spent_usd * 1e12)


# --- money ------------------------------------------------------------------------------------------------------------


def test_before_the_first_lease_nothing_that_costs_is_let_in_and_it_is_asked_for() -> None:
    tenants = book(budget_usd_max=1.0)
    refusal = tenants.take("a", "t", 1_000, 1_000, 0)
    assert refusal is not None
    assert (refusal.code, refusal.status, refusal.retry_after_s) == ("budget_unknown", 429, 1.0)
    assert tenants.wants_lease
    assert tenants.asks(0) == {"t": LeaseAsk(None, wanted_pusd=5_000 * 10**6)}
    assert not tenants.wants_lease


def test_the_worst_case_is_set_aside_and_the_true_cost_stays() -> None:
    tenants = book(budget_usd_max=1.0)
    lend(tenants, 0.009)
    assert tenants.take("a", "t", 1_000, 1_000, 0) is None  # 0.005
    assert code(tenants.take("b", "t", 1_000, 1_000, 0)) == "tenant_budget"
    assert tenants.settle("a", 1_000, 400, 100, 0) == pytest.approx(600e-6 + 40e-6 + 400e-6)
    assert tenants.take("b", "t", 1_000, 1_000, 0) is None
    assert tenants.usage()["t"].spent_usd == pytest.approx(0.00104)


def test_money_is_set_aside_for_the_longest_output_where_the_client_names_none() -> None:
    tenants = book(budget_usd_max=1.0)
    lend(tenants, 0.009)
    assert code(tenants.take("a", "t", 1_000, 256, 0, output_tokens_most=8_000)) == "tenant_budget"
    assert tenants.take("a", "t", 1_000, 256, 0) is None


def test_while_the_controller_has_money_left_a_client_is_told_to_come_soon_and_else_at_the_periods_end() -> None:
    tenants = book(budget_usd_max=1.0)
    lend(tenants, 0.001, free_usd=0.5)
    refusal = tenants.take("a", "t", 1_000, 1_000, 0)
    assert refusal is not None
    assert (refusal.code, refusal.retry_after_s) == ("budget_unknown", 1.0)
    lend(tenants, 0.001, free_usd=0.0)
    refusal = tenants.take("a", "t", 1_000, 1_000, 20 * S)
    assert refusal is not None
    assert (refusal.code, refusal.type, refusal.should_retry) == ("tenant_budget", "insufficient_quota", False)
    assert refusal.retry_after_s == pytest.approx(30)


def test_a_new_period_brings_new_money_and_a_request_of_the_old_one_takes_none_of_it() -> None:
    tenants = book(budget_usd_max=0.01)
    lend(tenants, 0.01)
    assert tenants.take("old", "t", 1_000, 2_000, 0) is None
    lend(tenants, 0.01, period=2)
    tenants.settle("old", 1_000, 0, 2_000, 0)
    assert tenants.asks(0, again=True)["t"].used_pusd == 0
    assert tenants.take("new", "t", 1_000, 2_000, 0) is None


def test_what_costs_nothing_needs_no_lease() -> None:
    tenants = TenantBook(PolicyConfig(tenants={"t": TenantConfig(budget_usd_max=0.0)}))
    assert tenants.take("a", "t", 1_000, 1_000, 0) is None


def test_a_budget_of_nothing_lets_nothing_in() -> None:
    tenants = book(budget_usd_max=0.0)
    assert code(tenants.take("a", "t", 1, 1, 0)) == "tenant_budget"


def test_cost_is_exact_over_many_small_requests() -> None:
    tenants = book(budget_usd_max=10.0)
    lend(tenants, 10.0)
    for n in range(10_000):
        tenants.take(f"r{n}", "t", 3, 1, n)
        tenants.settle(f"r{n}", 3, 1, 1, n)
    assert tenants.usage()["t"].spent_usd == pytest.approx(10_000 * 6.1e-6, abs=1e-15)


# --- bounds, and what is told -----------------------------------------------------------------------------------------


def test_tenants_beyond_the_bound_share_one_account() -> None:
    tenants = TenantBook(PolicyConfig())
    for n in range(TENANTS_MAX + 200):
        tenants.take(f"r{n}", f"t{n}", 1, 1, 0)
    usage = tenants.usage()
    assert len(usage) == TENANTS_MAX + 1
    assert usage[OTHER].requests == 200


def test_only_tenants_whose_usage_changed_are_told_again() -> None:
    tenants = book()
    tenants.take("a", "t", 1, 1, 0)
    tenants.take("b", "u", 1, 1, 0)
    version = tenants.version
    assert tenants.usage(version) == {}
    tenants.settle("b", 1, 0, 1, 0)
    assert set(tenants.usage(version)) == {"u"}
    assert set(tenants.usage()) == {"t", "u"}


def test_an_ask_is_repeated_only_when_there_is_something_new_or_the_period_is_over() -> None:
    tenants = book(budget_usd_max=1.0)
    lend(tenants, 0.1)
    asks = tenants.asks(0)
    tenants.receive(asks, {"t": Lease(1, 50_000.0, 10**11, 10**11, 10**12)}, 0)
    assert tenants.asks(S) == {}
    assert set(tenants.asks(50 * S)) == {"t"}
    assert set(tenants.asks(S, again=True)) == {"t"}
    tenants.take("a", "t", 10, 10, S)
    assert set(tenants.asks(S)) == {"t"}
