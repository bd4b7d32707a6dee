"""The controller's part in tenants: leases of their budgets, their usage at all gateways, the secret of the cache.

It decides nothing: ``policies.admission.lease_book`` does. Usage is what gateways say of their whole lives, so a report
that is lost or comes twice changes nothing, and a new controller soon knows again what the gateways of today let in.

Bounded: :data:`ROWS_MAX` rows of gateways times tenants; the gateway unheard of for longest is then only a sum.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dashboards.catalogue import LABELS
from deployments.telemetry import Telemetry
from policies.admission.lease_book import LeaseBook
from policies.admission.money import Lease, LeaseAsk
from policies.admission.tenants import TenantUsage
from policies.config import PolicyConfig

ROWS_MAX = 100_000
"""Rows of usage that are kept by gateway."""
TENANTS_MAX = 20_000
"""Tenants whose usage is summed; those beyond are left out."""


@dataclass(frozen=True, slots=True)
class TenantReport:
    """What a gateway tells."""

    gateway_id: str
    usage: Mapping[str, TenantUsage] = field(default_factory=dict)
    """Of tenants whose usage changed since the last report that was answered."""
    asks: Mapping[str, LeaseAsk] = field(default_factory=dict)
    """Budgets of which there is something new."""
    complete: bool = False
    """Nothing is left out for being old."""
    cache_secret: str | None = None


@dataclass(frozen=True, slots=True)
class TenantAnswer:
    """What the controller answers."""

    epoch: str
    """A controller of another epoch knows nothing of what was reported before."""
    leases: Mapping[str, Lease] = field(default_factory=dict)
    cache_secret: str | None = None


class TenantDesk:
    """See the module. ``wall_ns`` is the wall clock, by which budgets' periods are numbered."""

    def __init__(self, config: PolicyConfig, epoch: str, wall_ns: int) -> None:
        self._config = config
        self._epoch = epoch
        self._book = LeaseBook(config, wall_ns)
        self._usage: OrderedDict[str, dict[str, TenantUsage]] = OrderedDict()
        self._heard_ns: dict[str, int] = {}
        self._gone: dict[str, TenantUsage] = {}
        self._rows = 0
        self._secret: str | None = None

    def take(self, report: TenantReport, wall_ns: int) -> TenantAnswer:
        """Take a gateway's report; leases are the answer."""
        rows = self._usage.setdefault(report.gateway_id, {})
        self._usage.move_to_end(report.gateway_id)
        self._heard_ns[report.gateway_id] = wall_ns
        before = len(rows)
        rows.update(report.usage)
        self._rows += len(rows) - before
        while self._rows > ROWS_MAX and len(self._usage) > 1:
            self._forget_oldest()
        self._secret = self._secret or report.cache_secret
        leases = self._book.answer(report.gateway_id, report.asks, wall_ns, report.complete)
        return TenantAnswer(self._epoch, leases, self._secret)

    def state(self, wall_ns: int) -> dict[str, Any]:
        """Usage, budget and limits by tenant, JSON-able. Money in USD."""
        balances = self._book.balances(wall_ns)
        usage = self._sums(wall_ns)
        names = sorted(usage.keys() | balances.keys() | self._config.tenants.keys())
        return {
            "tenants": {
                name: {
                    "usage": asdict(usage.get(name, TenantUsage())),
                    "budget": asdict(balances[name]) if name in balances else None,
                    "limits": asdict(self._config.tenant(name)),
                }
                for name in names
            }
        }

    def update_telemetry(self, telemetry: Telemetry, wall_ns: int) -> None:
        """Set the gauges of budgets."""
        for name, balance in self._book.balances(wall_ns, LABELS["tenant"].values_max).items():
            telemetry["tidegate_tenant_budget_usd"].set(balance.budget_usd, tenant=name)
            telemetry["tidegate_tenant_budget_used_usd"].set(balance.used_usd, tenant=name)

    def _sums(self, wall_ns: int) -> dict[str, TenantUsage]:
        """Usage of all gateways; what is in flight counts for those heard of lately only."""
        sums = dict(self._gone)
        forget_ns = self._config.control.forget_after_ms * 1e6
        for gateway_id, rows in self._usage.items():
            lives = wall_ns - self._heard_ns[gateway_id] <= forget_ns
            for name, usage in rows.items():
                _add(sums, name, usage, inflight=lives)
        return sums

    def _forget_oldest(self) -> None:
        gateway_id, rows = self._usage.popitem(last=False)
        del self._heard_ns[gateway_id]
        self._rows -= len(rows)
        for name, usage in rows.items():
            _add(self._gone, name, usage, inflight=False)


def _add(sums: dict[str, TenantUsage], name: str, usage: TenantUsage, inflight: bool) -> None:
    """Add ``usage`` to the sum of one tenant."""
    if name not in sums and len(sums) >= TENANTS_MAX:
        return
    so_far = sums.get(name, TenantUsage())
    sums[name] = TenantUsage(
        requests=so_far.requests + usage.requests,
        refused=so_far.refused + usage.refused,
        prompt_tokens=so_far.prompt_tokens + usage.prompt_tokens,
        cached_tokens=so_far.cached_tokens + usage.cached_tokens,
        output_tokens=so_far.output_tokens + usage.output_tokens,
        spent_usd=so_far.spent_usd + usage.spent_usd,
        inflight_requests=so_far.inflight_requests + usage.inflight_requests * inflight,
        inflight_tokens=so_far.inflight_tokens + usage.inflight_tokens * inflight,
    )
