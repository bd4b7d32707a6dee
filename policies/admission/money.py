"""What tokens cost, and the values by which budgets are shared between gateways. Decides nothing.

Money is counted in whole picodollars (1e-12 USD): sums are exact, so that what is given back is what was taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.config import PricesConfig

PUSD = 10**12
"""Picodollars of a dollar."""


def to_pusd(usd: float) -> int:
    """Dollars as whole picodollars."""
    return round(usd * PUSD)


class Tariff:
    """Prices of a token, in picodollars."""

    __slots__ = ("_cached", "_output", "_prompt")

    def __init__(self, prices: PricesConfig) -> None:
        self._prompt = to_pusd(prices.prompt_usd_per_mtok / 1e6)
        self._cached = to_pusd(prices.cached_usd_per_mtok / 1e6)
        self._output = to_pusd(prices.output_usd_per_mtok / 1e6)

    def worst(self, prompt_tokens: int, output_tokens: int) -> int:
        """Most that so many tokens can cost."""
        return prompt_tokens * max(self._prompt, self._cached) + output_tokens * self._output

    def cost(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> int:
        """What they cost; ``cached_tokens`` are those of the prompt that were found in the cache."""
        cached = min(max(cached_tokens, 0), prompt_tokens)
        return (prompt_tokens - cached) * self._prompt + cached * self._cached + output_tokens * self._output


@dataclass(frozen=True, slots=True)
class LeaseAsk:
    """What one gateway says of one tenant's budget. All but ``wanted_pusd`` are sums over the period."""

    period: int | None
    """Number of the period the sums belong to; ``None``: it knows of none, they are 0."""
    granted_pusd: int = 0
    """Granted to it, as far as it heard."""
    returned_pusd: int = 0
    """Given back by it."""
    used_pusd: int = 0
    """Spent, or set aside for requests in flight."""
    wanted_pusd: int = 0
    """What it would like to have at hand."""
    committed_pusd: int = 0
    """What all gateways together had been granted when it last heard: tells a new controller."""
    leaving: bool = False
    """It ends, and needs no more."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The controller's answer for one tenant."""

    period: int
    ends_in_ms: float
    """Until the period is over."""
    granted_pusd: int
    """Granted to this gateway in this period, all together."""
    committed_pusd: int
    """Granted to all gateways and not given back."""
    free_pusd: int
    """Left of the budget."""
