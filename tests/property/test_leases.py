"""A tenant's budget is never oversold: gateways, controllers, reports and answers may come, go, be lost or be late."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from policies.admission.lease_book import LeaseBook
from policies.admission.money import PUSD, Tariff, to_pusd
from policies.admission.tenants import TenantBook
from policies.config import PolicyConfig, PricesConfig, TenantConfig
from tests.examples import examples

GATEWAYS = 3
PERIOD_S = 120
BUDGET_USD = 1.0
S = 10**9
CONFIG = PolicyConfig(
    tenants={"t": TenantConfig(budget_usd_max=BUDGET_USD, budget_period_s=PERIOD_S)},
    prices=PricesConfig(prompt_usd_per_mtok=10.0, cached_usd_per_mtok=1.0, output_usd_per_mtok=40.0),
    gateways=GATEWAYS,
)
TARIFF = Tariff(CONFIG.prices)


@dataclass
class Gateway:
    name: str
    book: TenantBook = field(default_factory=lambda: TenantBook(CONFIG))
    epoch: int = -1
    open: dict[str, tuple[int, int, int | None]] = field(default_factory=dict)
    """Prompt, output, and the period whose lease pays."""


class LeaseMachine(RuleBasedStateMachine):
    """The rules of the world; the invariant is the claim of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 1_000 * PERIOD_S * S
        self.names = 0
        self.epoch = 0
        self.controller = LeaseBook(CONFIG, self.now_ns)
        self.gateways = [self.gateway() for _ in range(GATEWAYS)]
        self.spent: Counter[int | None] = Counter()
        """Picodollars by the period whose lease paid; of requests in flight the worst case."""

    def gateway(self) -> Gateway:
        self.names += 1
        return Gateway(f"g{self.names}")

    @rule(n=st.integers(0, GATEWAYS - 1), prompt=st.integers(1, 5_000), output=st.integers(1, 3_000))
    def request(self, n: int, prompt: int, output: int) -> None:
        gateway = self.gateways[n]
        self.names += 1
        name = f"r{self.names}"
        if gateway.book.take(name, "t", prompt, output, self.now_ns) is None:
            period = gateway.book._taken[name].period
            gateway.open[name] = (prompt, output, period)
            self.spent[period] += TARIFF.worst(prompt, output)

    @rule(n=st.integers(0, GATEWAYS - 1))
    def flood(self, n: int) -> None:
        """So many requests that all money at hand is set aside, and reports that ask for more."""
        for _ in range(3):
            for _ in range(12):
                self.request(n, 2_000, 1_000)
            self.exchange(self.gateways[n], "arrives", leaving=False)

    @rule(n=st.integers(0, GATEWAYS - 1), share=st.floats(0, 1), charged=st.booleans())
    def end(self, n: int, share: float, charged: bool) -> None:
        gateway = self.gateways[n]
        if not gateway.open:
            return
        name = next(iter(gateway.open))
        prompt, output, period = gateway.open.pop(name)
        cached, real = int(prompt * share), int(output * share)
        usd = gateway.book.settle(name, prompt, cached, real, self.now_ns, charged)
        self.spent[period] += to_pusd(usd) - TARIFF.worst(prompt, output)

    @rule(n=st.integers(0, GATEWAYS - 1), fate=st.sampled_from(["arrives"] * 4 + ["report lost", "answer lost"]))
    def report(self, n: int, fate: str) -> None:
        self.exchange(self.gateways[n], fate, leaving=False)

    @rule()
    def report_all(self) -> None:
        for gateway in self.gateways:
            self.exchange(gateway, "arrives", leaving=False)

    def exchange(self, gateway: Gateway, fate: str, leaving: bool) -> None:
        complete = gateway.epoch < 0
        asks = gateway.book.asks(self.now_ns, again=complete, leaving=leaving)
        if fate == "report lost":
            return
        leases = self.controller.answer(gateway.name, asks, self.now_ns, complete)
        if fate == "answer lost":
            return
        gateway.book.receive(asks, leases, self.now_ns)
        known = gateway.epoch in {-1, self.epoch}
        gateway.epoch = self.epoch if known else -1

    @rule(seconds=st.integers(1, 40))
    def time_passes(self, seconds: int) -> None:
        """Gateways that live are heard of before a new controller stops waiting for them."""
        for gateway in self.gateways * 2:
            self.exchange(gateway, "arrives", leaving=False)
        self.now_ns += seconds * S

    @precondition(lambda self: sum(gateway.epoch >= 0 for gateway in self.gateways) >= 2)
    @rule(n=st.integers(0, GATEWAYS - 1), in_order=st.booleans())
    def replace_gateway(self, n: int, in_order: bool) -> None:
        """It ends, with or without a last word; its requests end with it and count as they were set aside.

        Somebody else who has heard of the budget lives on: what nobody knows any more cannot be kept.
        """
        if in_order and not self.gateways[n].open:
            self.exchange(self.gateways[n], "arrives", leaving=True)
        self.gateways[n] = self.gateway()

    @precondition(lambda self: all(gateway.epoch == self.epoch for gateway in self.gateways))
    @rule()
    def replace_controller(self) -> None:
        """All gateways have heard of the last one lately: what they hold together is known to each of them."""
        for gateway in self.gateways * 2:
            self.exchange(gateway, "arrives", leaving=False)
        self.epoch += 1
        self.controller = LeaseBook(CONFIG, self.now_ns)

    @invariant()
    def no_period_is_oversold(self) -> None:
        for period, spent in self.spent.items():
            assert spent == 0 or period is not None
            assert spent <= to_pusd(BUDGET_USD), f"period {period}: {spent / PUSD:.4f} USD"


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)


def test_under_steady_demand_nearly_all_of_a_budget_can_be_spent() -> None:
    now_ns = 1_000 * PERIOD_S * S
    controller, books = LeaseBook(CONFIG, now_ns), [TenantBook(CONFIG) for _ in range(GATEWAYS)]
    spent, name = 0.0, 0
    for second in range(100):
        at_ns = now_ns + second * S
        for number, book in enumerate(books):
            asks = book.asks(at_ns, again=second == 0)
            book.receive(asks, controller.answer(f"g{number}", asks, at_ns, second == 0), at_ns)
            for _ in range(5):
                name += 1
                if book.take(f"r{name}", "t", 100, 50, at_ns) is None:
                    spent += book.settle(f"r{name}", 100, 0, 50, at_ns)
    assert 0.99 * BUDGET_USD <= spent <= BUDGET_USD
