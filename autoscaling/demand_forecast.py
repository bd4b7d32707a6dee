"""Demand ahead: tokens per second and KV tokens at the horizon of the measured start-up time, by class.

    class's share   of the arrivals, fading with HALF_LIFE_S; gateways count arrivals by class, tokens only in all
    series          prefill tokens/s, decode tokens/s, KV tokens held, of each class: one ``forecast.Series`` each
    together        sum of the values + root of the summed squares of the margins (errors of classes are independent);
                    batch counts without its margin, because it may wait

What clients repeat because it was refused is no demand of its own and left out; so is what waits (``demand.py``).
Agent trees multiply calls: the series are told how many tasks are open, and one of the forecasters follows those.

What this must not do: know what a replica carries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autoscaling.demand import HALF_LIFE_S, Demand
from autoscaling.forecast import Outlook, Series
from policies.config import ScalingConfig
from policies.control.scaler import Ahead
from policies.control.signals import Signals
from policies.types import Priority

KINDS = ("prefill", "decode", "kv")


class DemandForecast:
    """Forecast of one model's demand, tick by tick."""

    def __init__(self, config: ScalingConfig) -> None:
        self._config = config
        self._series: dict[str, tuple[Series, Series, Series]] = {}
        self._shares: dict[str, float] = {}
        self._total = 0.0
        self._last_ns: int | None = None
        self._horizon_s = 0.0

    def measure(self, demand: Demand, signals: Signals, horizon_s: float, now_ns: int) -> None:
        """Take in one tick; without a gateway's or a replica's word the tick leaves no mark."""
        traffic = signals.traffic
        prefill_tps, decode_tps = demand.offered_prefill_tps, demand.offered_decode_tps
        if traffic is None or signals.work is None or prefill_tps is None or decode_tps is None:
            return
        self._horizon_s = horizon_s
        elapsed_s = 0.0 if self._last_ns is None else max(0.0, (now_ns - self._last_ns) / 1e9)
        self._last_ns = now_ns
        by_class = {name: c.arrivals_ps for name, c in traffic.by_class.items()}
        self._follow(by_class or {Priority.STANDARD.value: traffic.arrivals_ps}, elapsed_s)
        fresh = max(0.0, 1 - traffic.repeats_ps / traffic.arrivals_ps) if traffic.arrivals_ps > 0 else 1.0
        for name, series in self._series.items():
            share = self._shares[name] / self._total if self._total > 0 else 1 / len(self._series)
            values = prefill_tps * fresh * share, decode_tps * fresh * share, demand.kv_tokens * share
            for each, value in zip(series, values, strict=True):
                each.add(value, now_ns, horizon_s, traffic.tasks_open)

    def ahead(self) -> Ahead | None:
        """The joined forecast; ``None`` before anything is known."""
        by_class = self.by_class()
        if not by_class:
            return None
        found = [[outlooks[kind] for outlooks in by_class.values()] for kind in range(len(KINDS))]
        counted = [name != Priority.BATCH.value for name in by_class]
        prefill, decode, kv = (_together(outlooks, counted) for outlooks in found)
        leader = max(found[1], key=lambda o: o.value)
        plain = math.fsum(o.value for o in found[1])
        margin = decode / plain - 1 if plain > 0 else 0.0
        return Ahead(self._horizon_s, prefill, decode, kv, margin, leader.trusted, leader.by)

    def by_class(self) -> Mapping[str, tuple[Outlook, Outlook, Outlook]]:
        """Of each class that has asked for anything: prefill and decode tokens per second, KV tokens."""
        known = {}
        for name, series in self._series.items():
            prefill, decode, kv = (each.outlook() for each in series)
            if prefill is not None and decode is not None and kv is not None:
                known[name] = (prefill, decode, kv)
        return known

    def _follow(self, arrivals_ps: Mapping[str, float], elapsed_s: float) -> None:
        """Shares of the classes, and a series for each that is new."""
        keep = 0.5 ** (elapsed_s / HALF_LIFE_S)
        for name, rate in arrivals_ps.items():
            if rate > 0 and name not in self._series:
                seasons_s, quantile = self._config.seasons_s, self._config.forecast_quantile
                self._series[name] = tuple(Series(seasons_s, quantile) for _ in KINDS)  # type: ignore[assignment]
                self._shares[name] = 0.0
        for name in self._shares:
            self._shares[name] = self._shares[name] * keep + arrivals_ps.get(name, 0.0) * max(elapsed_s, 1e-3)
        self._total = math.fsum(self._shares.values())


def _together(outlooks: list[Outlook], counted: list[bool]) -> float:
    """Upper demand of several classes; ``counted``: with its margin."""
    margins = [o.upper - o.value for o, counts in zip(outlooks, counted, strict=True) if counts]
    above = math.sqrt(math.fsum(m * m for m in margins if m > 0))
    return max(0.0, math.fsum(o.value for o in outlooks) + above + math.fsum(m for m in margins if m < 0))
