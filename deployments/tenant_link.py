"""The gateway's part in tenants: usage and asks out, leases and the cache's secret in. Requests never wait for it.

Once per report interval, and within :data:`URGENT_S` when a request was refused because its tenant's lease was too
small. While the controller is away gateways spend the leases they hold.
"""

from __future__ import annotations

from collections.abc import Mapping

from deployments.cache_salt import CacheSalt
from deployments.telemetry import Telemetry
from deployments.tenant_desk import TenantAnswer, TenantReport
from policies.admission.money import LeaseAsk
from policies.admission.tenants import TenantBook, TenantUsage

URGENT_S = 0.05
"""How soon a lease is asked for that somebody was refused for."""


class TenantLink:
    """What one gateway and the controller tell each other of tenants."""

    def __init__(self, gateway_id: str, book: TenantBook, salt: CacheSalt) -> None:
        self._gateway_id = gateway_id
        self._book = book
        self._salt = salt
        self._epoch: str | None = None
        self._told_version = -1
        self._asks: Mapping[str, LeaseAsk] = {}
        self._version = 0

    @property
    def urgent(self) -> bool:
        """Somebody was refused for want of a lease."""
        return self._book.wants_lease

    def report(self, at_ns: int, leaving: bool = False) -> TenantReport:
        """What is new since the last report that was answered."""
        complete = self._epoch is None
        self._asks = self._book.asks(at_ns, again=complete, leaving=leaving)
        self._version = self._book.version
        usage = self._book.usage(self._told_version)
        return TenantReport(self._gateway_id, usage, self._asks, complete, self._salt.offered)

    def take(self, answer: TenantAnswer, at_ns: int) -> None:
        """Take the answer to the last report."""
        self._told_version = self._version
        if answer.epoch != self._epoch:
            new, self._epoch = self._epoch is not None, answer.epoch
            if new:  # it has not heard what its predecessor was told: tell all again
                self._told_version, self._epoch = -1, None
        self._salt.take(answer.cache_secret)
        self._book.receive(self._asks, answer.leases, at_ns)


class TenantMeter:
    """Counts of tenants for Prometheus: what grew since they were last taken."""

    def __init__(self) -> None:
        self._counted: dict[str, TenantUsage] = {}
        self._version = -1

    def count(self, telemetry: Telemetry, book: TenantBook) -> None:
        """Raise the counters to what ``book`` says."""
        for name, usage in book.usage(self._version).items():
            before = self._counted.get(name, TenantUsage())
            self._counted[name] = usage
            counts = (
                (telemetry["tidegate_tenant_requests_total"], usage.requests - before.requests),
                (telemetry["tidegate_tenant_refused_total"], usage.refused - before.refused),
                (telemetry["tidegate_tenant_prompt_tokens_total"], usage.prompt_tokens - before.prompt_tokens),
                (telemetry["tidegate_tenant_cached_tokens_total"], usage.cached_tokens - before.cached_tokens),
                (telemetry["tidegate_tenant_output_tokens_total"], usage.output_tokens - before.output_tokens),
                (telemetry["tidegate_tenant_spent_usd_total"], usage.spent_usd - before.spent_usd),
            )
            for series, grown in counts:
                if grown > 0:
                    series.inc(grown, tenant=name)
        self._version = book.version
