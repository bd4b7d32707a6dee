"""Tenants between gateways and the controller, without Ray: leases, usage, the secret of the cache, metrics."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from dashboards.catalogue import LABELS, Source
from deployments.cache_salt import SECRET_BYTES_MIN, CacheSalt, SaltFileError
from deployments.telemetry import Telemetry
from deployments.tenant_desk import ROWS_MAX, TenantDesk, TenantReport
from deployments.tenant_link import TenantLink, TenantMeter
from policies.admission.tenants import TenantBook, TenantUsage
from policies.config import PolicyConfig, PricesConfig, TenantConfig

S = 10**9
WALL = 1_700_000_000 * S
CONFIG = PolicyConfig(
    tenants={"t": TenantConfig(budget_usd_max=1.0), "shared": TenantConfig(isolate_cache=False)},
    prices=PricesConfig(prompt_usd_per_mtok=10.0, output_usd_per_mtok=40.0),
)


class Gateway:
    def __init__(self, name: str = "g", config: PolicyConfig = CONFIG) -> None:
        self.book = TenantBook(config)
        self.salt = CacheSalt()
        self.link = TenantLink(name, self.book, self.salt)

    def exchange(self, desk: TenantDesk, leaving: bool = False) -> None:
        report = pickle.loads(pickle.dumps(self.link.report(0, leaving)))
        self.link.take(pickle.loads(pickle.dumps(desk.take(report, WALL))), 0)

    def request(self, name: str, tenant: str = "t", prompt: int = 100, output: int = 10) -> str | None:
        refusal = self.book.take(name, tenant, prompt, output, 0)
        return None if refusal is None else refusal.code


def desk(epoch: str = "e1", config: PolicyConfig = CONFIG) -> TenantDesk:
    return TenantDesk(config, epoch, WALL)


def tenants(of: TenantDesk, at_ns: int = WALL) -> dict[str, Any]:
    found: dict[str, Any] = of.state(at_ns)["tenants"]
    return found


# --- leases -----------------------------------------------------------------------------------------------------------


def test_one_exchange_brings_the_lease_that_lets_a_tenant_with_a_budget_in() -> None:
    gateway, controller = Gateway(), desk()
    assert gateway.request("a") == "budget_unknown"
    assert gateway.link.urgent
    gateway.exchange(controller)
    assert not gateway.link.urgent
    assert gateway.request("a") is None


def test_a_new_controller_is_told_all_again_and_sells_nothing_twice() -> None:
    gateway, old, new = Gateway(), desk(), desk("e2")
    gateway.exchange(old)
    gateway.request("a", prompt=1_500)
    gateway.book.settle("a", 1_500, 0, 10, 0)
    gateway.exchange(old)
    for _ in range(3):
        gateway.exchange(new)
    assert tenants(new)["t"]["budget"] == tenants(old)["t"]["budget"]
    assert tenants(new)["t"]["usage"] == tenants(old)["t"]["usage"]


def test_a_gateway_that_leaves_in_order_returns_what_it_did_not_spend() -> None:
    gateway, controller = Gateway(), desk()
    gateway.exchange(controller)
    gateway.request("a")
    gateway.book.settle("a", 100, 0, 10, 0)
    gateway.exchange(controller, leaving=True)
    balance = tenants(controller)["t"]["budget"]
    assert balance["committed_usd"] == pytest.approx(0.0014)


def test_nothing_is_told_twice_while_nothing_changes() -> None:
    gateway, controller = Gateway(), desk()
    for _ in range(4):
        gateway.exchange(controller)
    report = gateway.link.report(0)
    assert (report.usage, report.asks, report.complete) == ({}, {}, False)


# --- usage ------------------------------------------------------------------------------------------------------------


def test_usage_is_summed_over_gateways_and_a_report_that_comes_twice_counts_once() -> None:
    controller = desk()
    for name in ("g1", "g2"):
        usage = {"x": TenantUsage(requests=3, prompt_tokens=10, spent_usd=0.5, inflight_requests=1)}
        for _ in range(2):
            controller.take(TenantReport(name, usage), WALL)
    usage = tenants(controller)["x"]["usage"]
    assert (usage["requests"], usage["prompt_tokens"], usage["spent_usd"]) == (6, 20, 1.0)
    assert usage["inflight_requests"] == 2


def test_a_gateway_that_is_gone_has_nothing_in_flight_but_its_usage_stays() -> None:
    controller = desk()
    controller.take(TenantReport("g", {"x": TenantUsage(requests=3, inflight_requests=2, inflight_tokens=9)}), WALL)
    usage = tenants(controller, WALL + 61 * S)["x"]["usage"]
    assert (usage["requests"], usage["inflight_requests"], usage["inflight_tokens"]) == (3, 0, 0)


@pytest.mark.slow
def test_rows_are_bounded_and_the_sum_of_those_that_go_stays() -> None:
    controller = desk()
    gateways, rows = 60, ROWS_MAX // 50
    for n in range(gateways):
        controller.take(TenantReport(f"g{n}", {f"t{i}": TenantUsage(requests=1) for i in range(rows)}), WALL)
    assert sum(map(len, controller._usage.values())) <= ROWS_MAX
    assert tenants(controller)["t0"]["usage"]["requests"] == gateways


def test_the_state_names_limits_and_budget_of_tenants_that_were_not_seen_yet() -> None:
    state = tenants(desk())
    assert state["t"]["limits"]["budget_usd_max"] == 1.0
    assert state["t"]["budget"] is None
    assert state["shared"]["usage"]["requests"] == 0


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_counters_of_a_tenant_follow_its_usage_and_count_nothing_twice() -> None:
    gateway, telemetry, meter = (
        Gateway(config=PolicyConfig(prices=CONFIG.prices)),
        Telemetry(Source.GATEWAY),
        TenantMeter(),
    )
    for n in range(3):
        gateway.request(f"r{n}", "x")
        meter.count(telemetry, gateway.book)
        gateway.book.settle(f"r{n}", 100, 40, 10, 0)
        meter.count(telemetry, gateway.book)
        meter.count(telemetry, gateway.book)
    text = telemetry.render().decode()
    assert 'tidegate_tenant_requests_total{tenant="x"} 3.0' in text
    assert 'tidegate_tenant_prompt_tokens_total{tenant="x"} 300.0' in text
    assert 'tidegate_tenant_cached_tokens_total{tenant="x"} 120.0' in text


def test_series_of_tenants_are_bounded() -> None:
    book, telemetry = TenantBook(PolicyConfig()), Telemetry(Source.GATEWAY)
    for n in range(LABELS["tenant"].values_max + 100):
        book.take(f"r{n}", f"t{n}", 1, 1, 0)
    TenantMeter().count(telemetry, book)
    series = telemetry["tidegate_tenant_requests_total"]
    assert len(series._numbers) == LABELS["tenant"].values_max + 1
    assert series._numbers[("other",)] == 100


def test_the_controller_shows_budgets_and_what_is_used_of_them() -> None:
    gateway, controller, telemetry = Gateway(), desk(), Telemetry(Source.CONTROLLER)
    gateway.exchange(controller)
    gateway.request("a", prompt=1_000, output=0)
    gateway.exchange(controller)
    controller.update_telemetry(telemetry, WALL)
    text = telemetry.render().decode()
    assert 'tidegate_tenant_budget_usd{tenant="t"} 1.0' in text
    assert 'tidegate_tenant_budget_used_usd{tenant="t"} 0.01' in text


# --- the cache's salt -------------------------------------------------------------------------------------------------


def test_gateways_of_one_application_make_the_same_salt_after_one_exchange() -> None:
    one, two, controller = Gateway("g1"), Gateway("g2"), desk()
    config = CONFIG.tenant("t")
    assert one.salt.of(config, "t", None) != two.salt.of(config, "t", None)
    one.exchange(controller)
    two.exchange(controller)
    assert one.salt.of(config, "t", None) == two.salt.of(config, "t", None)


def test_a_new_controller_keeps_the_secret_its_gateways_have() -> None:
    one, two = Gateway("g1"), Gateway("g2")
    for controller in (desk(), desk("e2")):
        one.exchange(controller)
        two.exchange(controller)
    before = one.salt.of(CONFIG.tenant("t"), "t", None)
    two.exchange(desk("e3"))
    assert two.salt.of(CONFIG.tenant("t"), "t", None) == before


def test_salts_differ_between_tenants_and_between_salts_of_one_tenants_clients() -> None:
    salt, config = CacheSalt(), TenantConfig()
    made = [salt.of(config, *who) for who in (("t", None), ("u", None), ("t", "a"), ("t", "b"), ("ta", None))]
    assert len({*made}) == 5
    assert all(one is not None and 40 <= len(one) <= 64 for one in made)
    assert salt.of(config, "t", 7) == made[0]  # not a salt
    assert salt.of(config, "t", "\ud800") is not None


def test_a_tenant_that_shares_its_cache_sends_what_its_client_sent() -> None:
    assert CacheSalt().of(CONFIG.tenant("shared"), "shared", "mine") is None


def test_a_secret_from_a_file_is_everybodys_and_is_told_to_nobody(tmp_path: Path) -> None:
    file = tmp_path / "salt"
    file.write_text("0123456789abcdef0123\nsecond line\n")
    one, two = CacheSalt(str(file)), CacheSalt(str(file))
    assert one.of(TenantConfig(), "t", None) == two.of(TenantConfig(), "t", None)
    assert one.offered is None
    one.take("f" * 64)
    assert one.of(TenantConfig(), "t", None) == two.of(TenantConfig(), "t", None)


@pytest.mark.parametrize("content", [None, "", "short", "x" * (SECRET_BYTES_MIN - 1), "x" * 2_000])
def test_a_secret_that_cannot_be_read_or_is_no_secret_stops_the_start(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "salt"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SaltFileError, match=r"gateway\.cache_salt_file"):
        CacheSalt(str(file))
