"""Decides whether the fleet can afford one more extra attempt: a token bucket paid by the requests themselves.

    on_request:  tokens = min(retry_burst, tokens + retry_share_max)
    try_spend:   tokens >= 1, and then tokens -= 1

The bucket starts full. Over any run of n admitted requests at most ``retry_burst + n * retry_share_max`` extra attempts
happen, so that retries cannot multiply the load of a fleet in trouble.

What this must not do: choose a replica, or decide whether a request is safe to send again. That is the flow's part.
"""

from __future__ import annotations

from policies.config import FaultsConfig

_UNIT = 1_000_000
"""The bucket counts millionths in whole numbers: ten payments of a tenth are one attempt exactly."""


class RetryBudget:
    """One bucket for all requests of a gateway."""

    def __init__(self, config: FaultsConfig) -> None:
        self._share_units = round(config.retry_share_max * _UNIT)
        self._units_max = config.retry_burst * _UNIT
        self._units = self._units_max

    @property
    def attempts_left(self) -> float:
        """Extra attempts in the bucket now, fractions included."""
        return self._units / _UNIT

    def on_request(self) -> None:
        """An admitted request pays its share. Refused ones do not: overload must not buy retries."""
        self._units = min(self._units_max, self._units + self._share_units)

    def try_spend(self) -> bool:
        """Take one extra attempt out of the bucket; ``False`` when there is none."""
        if self._units < _UNIT:
            return False
        self._units -= _UNIT
        return True
