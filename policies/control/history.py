"""What a fleet was seen to carry at the settings that stand: the most requests per second that kept their promises.

    proven   = max over stretches of ``span`` ticks in a row at these settings of  met / seconds / replicas serving

*These settings*: every large change begins a new stretch of settings. It is known to be as good as the one before once
its experiment found no harm, and it is the one before again once it was taken back. So a proof is a lower bound of
what can be carried, whatever was tried in between. Per replica, because their number may have changed.

This module must not judge, and must not know what a change was.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from policies.control.objective import ObjectiveSample

TICKS_MAX = 240
"""Older stretches prove nothing: prompts, caches and devices change."""


@dataclass(frozen=True, slots=True)
class _Tick:
    settings: int
    met: int
    seconds: float
    serving: int


class History:
    """The last ticks with the settings that stood in them."""

    def __init__(self) -> None:
        self._ticks: deque[_Tick] = deque(maxlen=TICKS_MAX)
        self._now = 0
        self._last = 0
        self._same: dict[int, int] = {}
        """Settings that are as good as earlier ones."""

    @property
    def settings(self) -> int:
        """Number of the settings that stand."""
        return self._now

    def note(self, sample: ObjectiveSample, serving: int) -> None:
        """One tick at the settings that stand."""
        self._ticks.append(_Tick(self._now, sample.met, sample.seconds, serving))

    def changed(self) -> None:
        """Other settings stand from now on."""
        self._last += 1
        self._now = self._last

    def harmless(self, settings: int, before: int) -> None:
        """``settings`` were found to be at least as good as those that stood ``before`` them."""
        if self._root(settings) != self._root(before):
            self._same[self._root(settings)] = self._root(before)
            alive = {t.settings for t in self._ticks} | {self._now, before}
            self._same = {one: self._root(one) for one in alive if self._root(one) != one}

    def restored(self, before: int) -> None:
        """The settings of ``before`` stand again."""
        self._now = before

    def proven_ps(self, settings: int, span: int) -> float:
        """Requests per second and replica that kept their promises in the best stretch of ``span`` ticks; 0: none."""
        best = met = seconds = 0.0
        recent: deque[_Tick] = deque()
        for tick in self._ticks:
            if self._root(tick.settings) != self._root(settings) or tick.serving <= 0:
                recent.clear()
                met = seconds = 0.0
                continue
            recent.append(tick)
            met, seconds = met + tick.met / tick.serving, seconds + tick.seconds
            if len(recent) > span:
                old = recent.popleft()
                met, seconds = met - old.met / old.serving, seconds - old.seconds
            if len(recent) == span and seconds > 0:
                best = max(best, met / seconds)
        return best

    def _root(self, settings: int) -> int:
        while settings in self._same:
            settings = self._same[settings]
        return settings
