"""Decides whether a tenant may send one more request: rates, concurrency, money. One book per gateway.

In this order, all or nothing; each limit of the application is divided by its number of gateways:

    requests per minute    token bucket (rate.py)                                        429 tenant_request_rate
    tokens per minute      prompt plus largest output, settled to the true ones          429 tenant_token_rate
    concurrent requests    at least one per gateway                                      429 tenant_concurrency
    concurrent tokens      prompt plus largest output; alone, up to the whole limit      429 tenant_concurrent_tokens
    money                  worst case against a lease of the budget (wallet.py)          429 tenant_budget,
                                                                                             budget_unknown

``Retry-After`` is the time in which the bucket refills, the mean time until one of the tenant's requests ends, or the
rest of the budget's period.

Every request that was let in is settled once: concurrency ends, tokens and money become what they really were. A
request that is not charged costs neither tokens nor money. Usage is counted for every tenant, with limits or without.

Bounded: :data:`TENANTS_MAX` tenants have an account of their own; those beyond share one named :data:`OTHER`, and its
limits are the default tenant's. Requests are bounded by admission.

What this must not do: look at load, or queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from policies.admission.money import PUSD, Lease, LeaseAsk, Tariff, to_pusd
from policies.admission.rate import RateBucket
from policies.admission.refusal import Refusal
from policies.admission.wallet import BUDGET_UNKNOWN, Wallet
from policies.config import PolicyConfig, TenantConfig

TENANTS_MAX = 10_000
"""Tenants with an account of their own."""
OTHER = "other"
"""Name of the account that the tenants beyond share."""
CONCURRENCY_RETRY_S = 1.0
"""When to come again after a limit on concurrency, before any request of the tenant has ended."""
DURATION_WEIGHT = 0.1
"""Weight of one request in the mean duration."""


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What one tenant used at one gateway since its start."""

    requests: int = 0
    """Let in."""
    refused: int = 0
    """Refused by its own limits."""
    prompt_tokens: int = 0
    """Of settled requests that were charged, cached ones included."""
    cached_tokens: int = 0
    output_tokens: int = 0
    spent_usd: float = 0.0
    inflight_requests: int = 0
    inflight_tokens: int = 0
    """Prompt plus largest output tokens."""


@dataclass(slots=True)
class _Taken:
    account: _Account
    tokens: int
    reserved_pusd: int
    period: int | None
    taken_ns: int


class _Account:
    """One tenant at this gateway."""

    __slots__ = ("cached_tokens", "concurrent_requests", "concurrent_tokens", "config", "duration_s", "inflight_tokens",
                 "name", "output_tokens", "prompt_tokens", "refused", "request_rate", "requests", "running",
                 "spent_pusd", "token_rate", "version", "wallet")  # fmt: skip

    def __init__(self, name: str, config: TenantConfig, gateways: int, now_ns: int) -> None:
        def bucket(limit: int | None) -> RateBucket | None:
            return None if limit is None else RateBucket(limit / gateways, now_ns)

        self.name = name
        self.config = config
        self.request_rate = bucket(config.requests_per_minute_max)
        self.token_rate = bucket(config.tokens_per_minute_max)
        requests, tokens = config.concurrent_requests_max, config.concurrent_tokens_max
        self.concurrent_requests = None if requests is None else max(1, requests // gateways)
        self.concurrent_tokens = None if tokens is None else tokens / gateways
        self.wallet = None if config.budget_usd_max is None else Wallet(to_pusd(config.budget_usd_max))
        self.requests = self.refused = 0
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.spent_pusd = 0
        self.running = self.inflight_tokens = 0
        self.duration_s: float | None = None
        self.version = 0

    def refusal(self, tokens: int, pusd: int, now_ns: int) -> Refusal | None:
        """The first limit that is in the way."""
        wait_s = 0.0 if self.request_rate is None else self.request_rate.wait_s(1, now_ns)
        if wait_s > 0:
            limit = self.config.requests_per_minute_max
            return Refusal("tenant_request_rate", f"{limit} requests per minute are allowed", retry_after_s=wait_s)
        wait_s = 0.0 if self.token_rate is None else self.token_rate.wait_s(tokens, now_ns)
        if wait_s > 0:
            limit = self.config.tokens_per_minute_max
            return Refusal("tenant_token_rate", f"{limit} tokens per minute are allowed", retry_after_s=wait_s)
        if self.concurrent_requests is not None and self.running >= self.concurrent_requests:
            text = f"{self.running} requests are in flight here, {self.concurrent_requests} are allowed"
            return Refusal("tenant_concurrency", text, retry_after_s=self._next_end_s())
        refusal = self._concurrent_tokens_refusal(tokens)
        if refusal is None and self.wallet is not None:
            refusal = self.wallet.refusal(pusd, now_ns)
        return refusal

    def usage(self) -> TenantUsage:
        """What it used so far."""
        return TenantUsage(
            self.requests, self.refused, self.prompt_tokens, self.cached_tokens, self.output_tokens,
            self.spent_pusd / PUSD, self.running, self.inflight_tokens,
        )  # fmt: skip

    def ended(self, duration_s: float) -> None:
        """One of its requests took so long."""
        mean = self.duration_s
        self.duration_s = duration_s if mean is None else mean + DURATION_WEIGHT * (duration_s - mean)

    def _concurrent_tokens_refusal(self, tokens: int) -> Refusal | None:
        part, whole = self.concurrent_tokens, self.config.concurrent_tokens_max
        if part is None or whole is None or self.inflight_tokens + tokens <= part:
            return None
        if tokens > whole:
            text = f"the request may come to {tokens} tokens, {whole} are allowed at once"
            return Refusal("tenant_concurrent_tokens", text, should_retry=False)
        if not self.running:
            return None
        text = f"{self.inflight_tokens} tokens are in flight here and this request may come to {tokens}"
        return Refusal("tenant_concurrent_tokens", text, retry_after_s=self._next_end_s())

    def _next_end_s(self) -> float:
        """Mean time until one of its requests ends."""
        return CONCURRENCY_RETRY_S if self.duration_s is None else self.duration_s / max(1, self.running)


class TenantBook:
    """See the module."""

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self._gateways = max(1, config.gateways)
        self._tariff = Tariff(config.prices)
        self._accounts: dict[str, _Account] = {}
        self._taken: dict[str, _Taken] = {}
        self._version = 0
        self.wants_lease = False
        """A request was refused for want of a lease since the last :meth:`asks`."""
        for name, tenant in config.tenants.items():
            if tenant.budget_usd_max is not None:
                self._account(name, 0)

    # --- one request --------------------------------------------------------------------------------------------------

    def take(
        self,
        request_id: str,
        tenant: str,
        prompt_tokens: int,
        output_tokens: int,
        now_ns: int,
        output_tokens_most: int | None = None,
        prompt_tokens_most: int | None = None,
    ) -> Refusal | None:
        """Let a request in and count it, or say why not; then nothing is counted.

        Args:
            request_id: the server's own.
            tenant: whose it is.
            prompt_tokens: as estimated.
            output_tokens: largest or, where the client names none, expected output.
            now_ns: time.
            output_tokens_most: output that it cannot exceed, for money; ``None``: ``output_tokens``.
            prompt_tokens_most: likewise for the prompt.

        Raises:
            ValueError: the id is known already, which is a programming error.
        """
        if request_id in self._taken:
            raise ValueError(f"request {request_id} is counted already")
        account = self._account(tenant, now_ns)
        tokens = prompt_tokens + output_tokens
        pusd = self._tariff.worst(
            prompt_tokens if prompt_tokens_most is None else prompt_tokens_most,
            output_tokens if output_tokens_most is None else output_tokens_most,
        )
        refusal = account.refusal(tokens, pusd, now_ns)
        self._changed(account)
        if refusal is not None:
            account.refused += 1
            self.wants_lease |= refusal.code == BUDGET_UNKNOWN
            return refusal
        if account.request_rate is not None:
            account.request_rate.take(1)
        if account.token_rate is not None:
            account.token_rate.take(tokens)
        account.requests += 1
        account.running += 1
        account.inflight_tokens += tokens
        period = account.wallet.reserve(pusd) if account.wallet is not None else None
        self._taken[request_id] = _Taken(account, tokens, pusd, period, now_ns)
        return None

    def settle(
        self,
        request_id: str,
        prompt_tokens: int,
        cached_tokens: int,
        output_tokens: int,
        now_ns: int,
        charged: bool = True,
    ) -> float:
        """A request is over, with these tokens as engines counted. Unknown ids, and a second call, change nothing.

        Returns what it cost its tenant, in USD.
        """
        taken = self._taken.pop(request_id, None)
        if taken is None:
            return 0.0
        account = taken.account
        self._changed(account)
        account.running -= 1
        account.inflight_tokens -= taken.tokens
        account.ended(max(0, now_ns - taken.taken_ns) / 1e9)
        tokens = prompt_tokens + output_tokens if charged else 0
        spent = self._tariff.cost(prompt_tokens, cached_tokens, output_tokens) if charged else 0
        if account.token_rate is not None:
            account.token_rate.wait_s(0, now_ns)
            account.token_rate.take(tokens - taken.tokens)
        if account.wallet is not None:
            account.wallet.settle(taken.period, taken.reserved_pusd, spent)
        account.spent_pusd += spent
        if charged:
            account.prompt_tokens += prompt_tokens
            account.cached_tokens += min(cached_tokens, prompt_tokens)
            account.output_tokens += output_tokens
        return spent / PUSD

    # --- what is told -------------------------------------------------------------------------------------------------

    @property
    def requests(self) -> int:
        """Requests let in and not yet settled."""
        return len(self._taken)

    @property
    def version(self) -> int:
        """Grows with each change of any tenant's usage."""
        return self._version

    def usage(self, since_version: int = -1) -> Mapping[str, TenantUsage]:
        """What tenants used since the gateway's start: those that changed after ``since_version``."""
        return {name: a.usage() for name, a in self._accounts.items() if a.version > since_version}

    def asks(self, now_ns: int, again: bool = False, leaving: bool = False) -> dict[str, LeaseAsk]:
        """What to tell the controller of budgets; see :meth:`Wallet.ask`."""
        asks: dict[str, LeaseAsk] = {}
        self.wants_lease = False
        for name, account in self._accounts.items():
            ask = None if account.wallet is None else account.wallet.ask(now_ns, again, leaving)
            if ask is not None:
                asks[name] = ask
        return asks

    def receive(self, asks: Mapping[str, LeaseAsk], leases: Mapping[str, Lease], now_ns: int) -> None:
        """Take the controller's answer to ``asks``."""
        for name, lease in leases.items():
            account = self._accounts.get(name)
            if account is not None and account.wallet is not None:
                account.wallet.receive(asks.get(name), lease, now_ns)

    def _account(self, tenant: str, now_ns: int) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            name = tenant if len(self._accounts) < TENANTS_MAX else OTHER
            if name != tenant and name in self._accounts:
                return self._accounts[name]
            account = _Account(name, self._config.tenant(name), self._gateways, now_ns)
            self._accounts[name] = account
        return account

    def _changed(self, account: _Account) -> None:
        self._version += 1
        account.version = self._version
