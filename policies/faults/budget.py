"""Decides whether the fleet can afford one more extra attempt: a token bucket paid by requests that were answered.

    burst:       max(1, retry_burst / gateways), 0 where retry_burst is 0
    on_success:  tokens = min(burst, tokens + retry_share_max)
    try_spend:   tokens >= 1, and then tokens -= 1

Extra attempts are retries, hedges and resumed streams alike. The bucket starts full. Over any run in which n requests
were answered at most ``burst + n * retry_share_max`` extra attempts happen, so that retries cannot multiply the load
of a fleet in trouble: where nobody answers, nobody pays.

What this must not do: choose a replica, or decide whether a request is safe to send again. That is the flow's part.
"""

from __future__ import annotations

from policies.config import FaultsConfig

_UNIT = 1_000_000
"""The bucket counts millionths in whole numbers: ten payments of a tenth are one attempt exactly."""


class RetryBudget:
    """One bucket for all requests of a gateway, which is one of ``gateways`` that share the configured burst."""

    def __init__(self, config: FaultsConfig, gateways: int = 1) -> None:
        if gateways < 1:
            raise ValueError(f"gateways must be at least 1, is {gateways}")
        self._share_units = round(config.retry_share_max * _UNIT)
        self._units_max = max(_UNIT, config.retry_burst * _UNIT // gateways) if config.retry_burst else 0
        self._units = self._units_max

    @property
    def attempts_left(self) -> float:
        """Extra attempts in the bucket now, fractions included."""
        return self._units / _UNIT

    def on_success(self) -> None:
        """A request that an engine answered pays its share. Failed and refused ones do not: trouble buys no retries."""
        self._units = min(self._units_max, self._units + self._share_units)

    def try_spend(self) -> bool:
        """Take one extra attempt out of the bucket; ``False`` when there is none."""
        if self._units < _UNIT:
            return False
        self._units -= _UNIT
        return True
