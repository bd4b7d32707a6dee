"""Forecast: what a load will be when a replica asked for now is ready, and how far that can be wrong.

Several simple forecasters (``forecasters.py``) run side by side on each series. What each says now of the time one
start-up ahead is kept until that time has come, and then judged by what was::

    actual     mean of the series over a stretch around the time forecast, as long as the horizon (at least SPAN_S_MIN)
    residual   (actual - forecast) / max(forecast, FLOOR_SHARE of the long mean)      the last RESIDUALS_MAX are kept
    upper      forecast * (1 + residuals' quantile)
    score      mean pinball loss of upper, fading with SCORE_HALF_LIFE_S              Koenker & Bassett, 1978

Each is judged as it is used: with the margin its own past asks for. The one with the least score is used; it changes
only where another is better by :data:`BETTER_SHARE`, so that two like ones do not alternate. Until a forecaster has
:data:`RESIDUALS_MIN` residuals nothing is known of its errors and :attr:`Outlook.trusted` is false.

Work per tick is a few additions; once per grain a few dozen. Memory is bounded by constants and the horizon.
Scale-equivariant: twice the load gives twice the forecast and the same choices. Never negative.

What this must not do: know what a series is of, or decide how many replicas there are.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass

from autoscaling.forecasters import GRAIN_S, Forecaster, forecasters

SPAN_S_MIN = 30.0
"""Least stretch over which what was is averaged: single requests are no load."""

HORIZON_S_MAX = 3_600.0
"""Longer starts are forecast as if they took this long."""

RESIDUALS_MAX = 512
RESIDUALS_MIN = 24
"""Residuals from which a forecaster is believed."""

SCORE_HALF_LIFE_S = 1_800.0
BETTER_SHARE = 0.05
"""Another forecaster takes over when its score is lower by this share."""

FLOOR_SHARE = 0.1
"""Least part of the series' long mean that a residual is taken relative to."""

GAP_S_MAX = 60.0
"""After a longer time without values the series starts anew; what was learned of errors and seasons stays."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What one series will be one horizon ahead. Units are the series'."""

    value: float
    upper: float
    """Not exceeded with the odds of the quantile asked for."""
    by: str
    """Name of the forecaster."""
    trusted: bool
    """Its errors at this horizon are known."""


class _Judged:
    """One forecaster with what became of its forecasts."""

    def __init__(self, forecaster: Forecaster) -> None:
        self.forecaster = forecaster
        self.score = 0.0
        self.residuals: list[float] = []
        """Sorted."""
        self._order: deque[float] = deque()
        self._weight = 0.0
        self._judged = 0
        self._keep = 0.5 ** (GRAIN_S / SCORE_HALF_LIFE_S)

    @property
    def known(self) -> bool:
        """Whether its margin is known."""
        return len(self.residuals) >= RESIDUALS_MIN

    @property
    def trusted(self) -> bool:
        """Whether its forecasts with that margin have been judged."""
        return self._judged >= RESIDUALS_MIN

    def upper(self, value: float, floor: float, quantile: float) -> float:
        """``value`` with the margin its past asks for."""
        if not self.known:
            return value
        at = quantile * (len(self.residuals) - 1)
        low = int(at)
        high = min(low + 1, len(self.residuals) - 1)
        residual = self.residuals[low] + (at - low) * (self.residuals[high] - self.residuals[low])
        return max(0.0, value + residual * max(value, floor))

    def judge(self, actual: float, upper: float, scale: float, quantile: float) -> None:
        """Count the pinball loss of ``upper``, as a share of ``scale``."""
        error = (actual - upper) / scale
        loss = quantile * error if error >= 0 else (quantile - 1) * error
        self._judged += 1
        self._weight = self._weight * self._keep + 1.0
        self.score += (loss - self.score) / self._weight

    def learn(self, residual: float) -> None:
        """Keep a residual, and forget the oldest."""
        insort(self.residuals, residual)
        self._order.append(residual)
        if len(self._order) > RESIDUALS_MAX:
            del self.residuals[bisect_left(self.residuals, self._order.popleft())]


@dataclass(frozen=True, slots=True)
class _Said:
    """Forecasts that wait for their time."""

    due: int
    """Grains after which they are judged."""
    span: int
    """Grains that the actual mean is taken over."""
    each: list[tuple[float, float | None] | None]
    """Of each forecaster: value, and upper where its errors were known."""


class Series:
    """One series and its forecasters.

    Args:
        seasons_s: lengths of the seasons it may have, in seconds.
        quantile: of the margin, in (0, 1).
    """

    def __init__(self, seasons_s: tuple[float, ...], quantile: float) -> None:
        self._quantile = quantile
        self._judged = [_Judged(f) for f in forecasters(seasons_s)]
        self._used = self._judged[1]
        self._horizon_s = SPAN_S_MIN
        self._begin_ns: int | None = None
        self._grain = 0
        """Grains that have ended."""
        self._sum = self._weight = 0.0
        self._last_ns = 0
        self._tasks: float | None = None
        self._totals: deque[float] = deque([0.0])
        """Running sums of the newest grains: a mean over any stretch is one difference."""
        self._said: deque[_Said] = deque()
        self._long = 0.0
        self._long_weight = 0.0
        self._learned = 0

    def add(self, value: float, now_ns: int, horizon_s: float, tasks_open: float | None = None) -> None:
        """Take in what was measured at one tick; ``horizon_s`` is the time a replica takes to start."""
        self._horizon_s = min(HORIZON_S_MAX, max(GRAIN_S, horizon_s))
        begin_ns = self._begin_ns
        if begin_ns is None or now_ns - self._last_ns > GAP_S_MAX * 1e9:
            begin_ns = self._begin_anew(now_ns)
        self._tasks = tasks_open
        due = int((now_ns - begin_ns) / (GRAIN_S * 1e9))
        if due > self._grain and self._weight > 0:
            mean = self._sum / self._weight
            while self._grain < due:
                self._close(mean)
            self._sum = self._weight = 0.0
        elapsed_s = max(1e-3, (now_ns - self._last_ns) / 1e9)
        self._last_ns = now_ns
        self._sum += max(0.0, value) * elapsed_s
        self._weight += elapsed_s

    def outlook(self) -> Outlook | None:
        """What it will be one horizon ahead; ``None`` before the first grain has ended."""
        value = self._used.forecaster.ahead(self._horizon_s)
        if value is None:
            return None
        upper = self._used.upper(value, self._floor(), self._quantile)
        return Outlook(value, upper, self._used.forecaster.name, self._used.trusted)

    @property
    def scores(self) -> dict[str, float]:
        """Mean pinball loss of each forecaster that has one, by name, as a share of the series' long mean."""
        return {j.forecaster.name: j.score for j in self._judged if j.trusted}

    def _begin_anew(self, now_ns: int) -> int:
        """The first value, or the first after a long silence."""
        if self._begin_ns is not None:
            grains = int((now_ns - self._begin_ns) / (GRAIN_S * 1e9)) - self._grain
            for judged in self._judged:
                judged.forecaster.skip(grains)
        self._begin_ns, self._last_ns = now_ns - round(self._grain * GRAIN_S * 1e9), now_ns
        self._said.clear()
        self._sum = self._weight = 0.0
        return self._begin_ns

    # --- one grain ----------------------------------------------------------------------------------------------------

    def _close(self, mean: float) -> None:
        """A grain has ended."""
        self._grain += 1
        keep = 0.5 ** (GRAIN_S / SCORE_HALF_LIFE_S)
        self._long = self._long * keep + mean
        self._long_weight = self._long_weight * keep + 1.0
        self._totals.append(self._totals[-1] + mean)
        span = round(max(SPAN_S_MIN, self._horizon_s) / GRAIN_S)
        horizon = max(1, round(self._horizon_s / GRAIN_S))
        while len(self._totals) > span + 1:
            self._totals.popleft()
        if self._grain % 4096 == 0:  # running sums would lose digits
            first = self._totals[0]
            self._totals = deque(total - first for total in self._totals)
        for judged in self._judged:
            judged.forecaster.learn(mean, self._tasks)
        while self._said and self._said[0].due <= self._grain:
            self._mature(self._said.popleft())
        self._choose()
        said = [self._say(judged) for judged in self._judged]
        self._said.append(_Said(self._grain + horizon + span // 2, span, said))

    def _say(self, judged: _Judged) -> tuple[float, float | None] | None:
        value = judged.forecaster.ahead(self._horizon_s)
        if value is None:
            return None
        return value, judged.upper(value, self._floor(), self._quantile) if judged.known else None

    def _floor(self) -> float:
        return FLOOR_SHARE * self._long / self._long_weight if self._long_weight > 0 else 0.0

    def _mature(self, said: _Said) -> None:
        """What was forecast has come: judge it, and now and then keep the residual (neighbours say the same)."""
        span = min(said.span, len(self._totals) - 1)
        actual = (self._totals[-1] - self._totals[-1 - span]) / span
        scale = self._long / self._long_weight
        if scale <= 0:
            return
        every = max(1, span // 4)
        keep = self._grain - self._learned >= every
        for judged, forecast in zip(self._judged, said.each, strict=True):
            if forecast is None:
                continue
            value, upper = forecast
            if upper is not None:
                judged.judge(actual, upper, scale, self._quantile)
            if keep:
                judged.learn((actual - value) / max(value, self._floor()))
        if keep:
            self._learned = self._grain

    def _choose(self) -> None:
        able = [j for j in self._judged if j.trusted and j.forecaster.ahead(self._horizon_s) is not None]
        if not able:
            self._used = next((j for j in self._judged[1:2] if j.forecaster.ahead(0.0) is not None), self._judged[0])
            return
        best = min(able, key=lambda j: j.score)
        if self._used not in able or best.score < self._used.score * (1 - BETTER_SHARE):
            self._used = best
