"""The objective, measured: successes within their promises per dollar, in increments of one tick.

    met share           = met / (met + missed)      missed: came late, refused, given up, failed for a fault of ours
    successes per USD   = met per hour / (replicas running * prices.replica_usd_per_hour)

Increments, not sliding windows: two ticks share no request, so that whoever compares a stretch before a change with
one after it (``trial.py``) may treat ticks as separate samples. Retries, hedges, warm and idle replicas are paid for,
because the cost is that of everything that runs. Where no price is configured a replica costs
:data:`USD_PER_HOUR_UNPRICED`: the ratio of two plans is the same whatever the price.

What this must not do: decide, or know why the figures are what they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from policies.config import PricesConfig
from policies.control.signals import Signals
from policies.types import GatewayReport

USD_PER_HOUR_UNPRICED = 1.0
"""Price of a replica where ``prices.replica_usd_per_hour`` is 0."""


@dataclass(frozen=True, slots=True)
class ObjectiveSample:
    """What came in between two ticks, or over several (:func:`total`)."""

    met: int
    """Succeeded within the promises of their class."""
    demand: int
    """Arrived and not withdrawn by their clients."""
    succeeded: int
    """Answered in full, however late."""
    refused: int
    failed: int
    """Ended without success for a fault of ours."""
    tasks_succeeded: int
    usd_per_hour: float
    """Of all replicas that run, busy or idle."""
    seconds: float
    """Since the last tick; 0 at the first."""
    abandoned: int = 0
    """Left by clients that had waited for their first byte past its objective."""
    prompt_tokens: int = 0
    """Of the requests that succeeded."""
    output_tokens: int = 0
    """Of their answers."""

    @property
    def ended(self) -> int:
        """Requests whose fate is known: answered, refused, failed or given up by their clients."""
        return self.succeeded + self.refused + self.failed + self.abandoned

    @property
    def met_share(self) -> float | None:
        """Share of the requests whose fate became known that kept their promises; ``None`` where none did."""
        return min(1.0, self.met / self.ended) if self.ended > 0 else None

    @property
    def usd(self) -> float:
        """Spent in these seconds."""
        return self.usd_per_hour * self.seconds / 3_600

    @property
    def successes_per_usd(self) -> float | None:
        """The objective; ``None`` where nothing was spent."""
        return self.met / self.usd if self.usd > 0 else None


NOTHING = ObjectiveSample(0, 0, 0, 0, 0, 0, 0.0, 0.0)
"""A sample of no time at all."""


def total(samples: Iterable[ObjectiveSample]) -> ObjectiveSample:
    """Sum of several ticks; the cost is their mean by time."""
    some = list(samples)
    seconds = math.fsum(s.seconds for s in some)
    return ObjectiveSample(
        met=sum(s.met for s in some),
        demand=sum(s.demand for s in some),
        succeeded=sum(s.succeeded for s in some),
        refused=sum(s.refused for s in some),
        failed=sum(s.failed for s in some),
        tasks_succeeded=sum(s.tasks_succeeded for s in some),
        usd_per_hour=math.fsum(s.usd_per_hour * s.seconds for s in some) / seconds if seconds > 0 else 0.0,
        seconds=seconds,
        abandoned=sum(s.abandoned for s in some),
        prompt_tokens=sum(s.prompt_tokens for s in some),
        output_tokens=sum(s.output_tokens for s in some),
    )


class ObjectiveMeter:
    """Counts accepted reports between ticks."""

    def __init__(self, prices: PricesConfig) -> None:
        self._replica_usd_per_hour = prices.replica_usd_per_hour or USD_PER_HOUR_UNPRICED
        self._last_ns: int | None = None
        self._clear()

    def _clear(self) -> None:
        self._met = self._demand = self._succeeded = self._refused = self._failed = self._tasks = 0
        self._abandoned = self._prompt_tokens = self._output_tokens = 0

    def receive_gateway(self, report: GatewayReport) -> None:
        """Count one window of one gateway; call it once per accepted report."""
        self._met += report.met
        self._demand += report.arrivals
        self._succeeded += report.succeeded
        self._tasks += report.tasks_succeeded
        self._prompt_tokens += report.prompt_tokens
        self._output_tokens += report.output_tokens
        for counts in report.by_class.values():
            self._refused += counts.refused
            self._failed += counts.failed
            self._abandoned += counts.abandoned

    def tick(self, now_ns: int, signals: Signals) -> ObjectiveSample:
        """What was counted since the last call."""
        seconds = 0.0 if self._last_ns is None else max(0.0, (now_ns - self._last_ns) / 1e9)
        self._last_ns = now_ns
        running = signals.fleet.replicas_running if signals.fleet else len(signals.replicas) + signals.unknown_replicas
        sample = ObjectiveSample(
            met=self._met,
            demand=self._demand,
            succeeded=self._succeeded,
            refused=self._refused,
            failed=self._failed,
            tasks_succeeded=self._tasks,
            usd_per_hour=running * self._replica_usd_per_hour,
            seconds=seconds,
            abandoned=self._abandoned,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
        )
        self._clear()
        return sample
