"""Simple forecasters of one series, which ``forecast.py`` lets compete: none of them is right for every load.

    last        the newest value                                      unbeaten on a random walk
    ewma        exponentially weighted mean, half-life L              unbeaten on noise around a level
    holt        level and trend, the trend damped                     ramps; Gardner and McKenzie, 1985
    season      the level of now, times what followed upon the level of the same time of the last day (week)
    agents      open tasks times tokens per second and open task      tasks open before their calls come

All are linear in the series (twice the load, twice the forecast), need a few numbers each, and never say less than 0.
Values come one per :data:`GRAIN_S`, the mean of what was measured in it. A forecast is of the mean rate around the time
asked for. What this must not do: choose among them, or know what is forecast.
"""

from __future__ import annotations

from typing import Protocol

GRAIN_S = 5.0
"""One value of a series stands for this time."""

SEASON_SLOTS = 288
"""Means kept of one season: five minutes of a day."""

SEASON_RATIO_MAX = 4.0
"""A season says at most that the load will be this many times its level of now."""

EWMA_HALF_LIVES_S = (20.0, 120.0, 600.0)
HOLT_LEVEL_S = 40.0
"""Half-life of Holt's level."""
HOLT_TREND_S = 120.0
"""Half-life of Holt's trend."""
HOLT_DAMPING_S = 240.0
"""Time in which an expected trend halves."""


class Forecaster(Protocol):
    """One way to look ahead."""

    name: str

    def learn(self, value: float, tasks_open: float | None) -> None:
        """Take in the next grain's mean, and how many tasks were open."""
        ...

    def skip(self, grains: int) -> None:
        """So many grains passed without a value."""
        ...

    def ahead(self, horizon_s: float) -> float | None:
        """The value ``horizon_s`` after the last grain, at least 0; ``None`` while it cannot tell."""
        ...


class Clockless:
    """A forecaster to whom the time of day means nothing."""

    def skip(self, grains: int) -> None:
        """So many grains passed without a value."""


class Last(Clockless):
    """The newest value."""

    name = "last"

    def __init__(self) -> None:
        self._value: float | None = None

    def learn(self, value: float, tasks_open: float | None) -> None:  # noqa: ARG002 - the protocol's arguments
        """See the protocol."""
        self._value = value

    def ahead(self, horizon_s: float) -> float | None:  # noqa: ARG002
        """See the protocol."""
        return self._value


class Ewma(Clockless):
    """Exponentially weighted mean; from the first value on it is the mean of all, so that it does not start at 0."""

    def __init__(self, half_life_s: float) -> None:
        self.name = f"ewma {half_life_s:g} s"
        self._keep = 0.5 ** (GRAIN_S / half_life_s)
        self._sum = 0.0
        self._weight = 0.0

    def learn(self, value: float, tasks_open: float | None) -> None:  # noqa: ARG002
        """See the protocol."""
        self._sum = self._sum * self._keep + value
        self._weight = self._weight * self._keep + 1.0

    def ahead(self, horizon_s: float) -> float | None:  # noqa: ARG002
        """See the protocol."""
        return self._sum / self._weight if self._weight > 0 else None


class Holt(Clockless):
    """Level and damped trend."""

    name = "holt"

    def __init__(self) -> None:
        self._level: float | None = None
        self._trend = 0.0
        """Per grain."""
        self._alpha = 1 - 0.5 ** (GRAIN_S / HOLT_LEVEL_S)
        self._beta = 1 - 0.5 ** (GRAIN_S / HOLT_TREND_S)
        self._phi = 0.5 ** (GRAIN_S / HOLT_DAMPING_S)

    def learn(self, value: float, tasks_open: float | None) -> None:  # noqa: ARG002
        """See the protocol."""
        if self._level is None:
            self._level = value
            return
        before, expected = self._level, self._level + self._phi * self._trend
        self._level = expected + self._alpha * (value - expected)
        self._trend = self._phi * self._trend + self._beta * (self._level - before - self._phi * self._trend)

    def ahead(self, horizon_s: float) -> float | None:
        """See the protocol: the trend's sum over the horizon is a geometric series."""
        if self._level is None:
            return None
        grains = horizon_s / GRAIN_S
        damped: float = self._phi * (1 - self._phi**grains) / (1 - self._phi)
        return max(0.0, self._level + self._trend * damped)


class Season:
    """The level of now, carried on as it went on a season ago.

    Both levels are the same kind of mean, so that what a mean lags behind cancels.
    """

    def __init__(self, name: str, season_s: float) -> None:
        self.name = name
        self._season_s = season_s
        self._slot_s = season_s / SEASON_SLOTS
        self._level = Ewma(EWMA_HALF_LIVES_S[1])
        self._size = SEASON_SLOTS + 8
        self._slots: list[tuple[int, float, float] | None] = [None] * self._size
        """Number of a slot since the start, its mean, and the level in it: a ring a little longer than the season."""
        self._now_s = 0.0
        self._slot = 0
        self._sums = [0.0, 0.0]
        self._count = 0

    def learn(self, value: float, tasks_open: float | None) -> None:
        """See the protocol."""
        self._level.learn(value, tasks_open)
        self._now_s += GRAIN_S
        slot = int((self._now_s - GRAIN_S / 2) / self._slot_s)
        if slot != self._slot and self._count:
            mean, level = (total / self._count for total in self._sums)
            for passed in range(self._slot, min(slot, self._slot + self._size)):
                self._slots[passed % self._size] = (passed, mean, level)
            self._sums, self._count = [0.0, 0.0], 0
        self._slot = slot
        self._sums[0] += value
        self._sums[1] += self._level.ahead(0.0) or 0.0
        self._count += 1

    def skip(self, grains: int) -> None:
        """See the protocol: the season goes on, and nothing is known of what passed."""
        self._now_s += grains * GRAIN_S
        self._slot = int(self._now_s / self._slot_s)
        self._sums, self._count = [0.0, 0.0], 0

    def ahead(self, horizon_s: float) -> float | None:
        """See the protocol."""
        level, past_s = self._level.ahead(horizon_s), self._now_s - self._season_s
        then, next_ = self._around(past_s, 2), self._around(past_s + horizon_s, 1)
        if level is None or then is None or next_ is None:
            return None
        if then <= 0:
            return next_
        return level * min(SEASON_RATIO_MAX, next_ / then)

    def _around(self, at_s: float, column: int) -> float | None:
        """Mean (1) or level (2) around ``at_s`` over three slots, linear between their centres."""
        place = at_s / self._slot_s - 0.5
        low = int(place // 1)
        share = place - low
        found = [self._value(slot, column) for slot in range(low - 1, low + 3)]
        known = [value for value in found if value is not None]
        if len(known) < len(found):
            return None
        a, b, c, d = known
        return ((1 - share) * (a + b + c) + share * (b + c + d)) / 3

    def _value(self, slot: int, column: int) -> float | None:
        kept = self._slots[slot % self._size] if slot >= 0 else None
        return kept[column] if kept is not None and kept[0] == slot else None


class Agents(Clockless):
    """Open tasks times what one of them asks for per second, as it was of late.

    A storm of tasks is seen when they open; their calls follow for as long as they are open.
    """

    name = "agents"

    def __init__(self) -> None:
        self._keep = 0.5 ** (GRAIN_S / EWMA_HALF_LIVES_S[2])
        self._demand = 0.0
        self._task_grains = 0.0
        self._tasks: float | None = None

    def learn(self, value: float, tasks_open: float | None) -> None:
        """See the protocol."""
        self._tasks = tasks_open
        if tasks_open is None:
            return
        self._demand = self._demand * self._keep + value
        self._task_grains = self._task_grains * self._keep + tasks_open

    def ahead(self, horizon_s: float) -> float | None:  # noqa: ARG002
        """See the protocol; nothing while no task was open."""
        if self._tasks is None or self._task_grains < 1.0:
            return None
        return self._tasks * self._demand / self._task_grains


def forecasters(seasons_s: tuple[float, ...]) -> list[Forecaster]:
    """One of each, with a season's for each length in ``seasons_s``."""
    seasons: list[Forecaster] = [Season(f"season {length_s:g} s", length_s) for length_s in seasons_s]
    return [Last(), *(Ewma(half_life_s) for half_life_s in EWMA_HALF_LIVES_S), Holt(), *seasons, Agents()]
