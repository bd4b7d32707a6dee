"""Settings that proved good, by class of load, so that a load that comes back finds its setting at once.

A class of load is the power of two of arrivals, prompt and output tokens, with a dead band so that noise at a boundary
does not change it; from few requests only a larger difference says that the load is another one. A setting has proved
good in a class after :data:`PROVEN_TICKS` ticks in force without a preemption, a gap above the objective or a queue
longer than TTFT allows. It is forgotten when the engine is not the same any more: other drifts, or a full step that
takes another time by :data:`CHANGED_SHARE`.

It must not decide when a setting is taken.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeAlias

from policies.queueing import Offered
from policies.types import Knobs

LoadClass: TypeAlias = tuple[int, int, int]
"""Powers of two of arrivals per minute, prompt tokens and output tokens."""

Sizes: TypeAlias = tuple[float, float, float]
"""The same, not rounded."""

CLASSES_MAX = 32
"""Classes remembered of one replica; the one not used for longest goes."""

DEAD_BAND = 0.85
"""Distance from a class, in powers of two, at which a load belongs to another (half would be the boundary)."""

ERRORS = 3.0
"""Standard errors by which a load must be beyond the dead band."""

CHANGE_TICKS = 3
"""Ticks in a row in another class before the load has changed."""

PROVEN_TICKS = 15
"""Ticks in force after which a setting has proved good."""

CHANGED_SHARE = 0.25
"""Relative change of a full step after which the engine is another one."""


@dataclass(frozen=True, slots=True)
class Good:
    """A setting that proved good."""

    knobs: Knobs
    itl_share: float
    drifts: int
    step_ms: float
    """Full step with it when it was remembered."""


def sizes_of(offered: Offered) -> Sizes:
    """Powers of two of a load, not rounded."""
    arrivals, prompt, output = offered.arrivals_ps * 60, offered.prompt_tokens, offered.output_tokens
    return math.log2(max(1.0, arrivals)), math.log2(max(1.0, prompt)), math.log2(max(1.0, output))


def distance(sizes: Sizes, load: LoadClass) -> float:
    """Largest difference of any size, in powers of two."""
    return max(abs(sizes[0] - load[0]), abs(sizes[1] - load[1]), abs(sizes[2] - load[2]))


class Classes:
    """The class of the present load, slow to change."""

    def __init__(self) -> None:
        self.now: LoadClass | None = None
        self._ticks = 0

    def step(self, sizes: Sizes, error: float = 0.0) -> bool:
        """Look at the load of one tick, known within a relative standard ``error``; true when its class has changed.

        Not for the first one.
        """
        band = DEAD_BAND + ERRORS * math.log2(1 + error)
        if self.now is not None and distance(sizes, self.now) <= band:
            self._ticks = 0
            return False
        self._ticks += 1
        if self.now is not None and self._ticks < CHANGE_TICKS:
            return False
        first, self._ticks = self.now is None, 0
        self.now = round(sizes[0]), round(sizes[1]), round(sizes[2])
        return not first


class KnownGood:
    """At most :data:`CLASSES_MAX` settings."""

    def __init__(self) -> None:
        self._by_class: OrderedDict[LoadClass, Good] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_class)

    def keep(self, load: LoadClass, good: Good) -> None:
        """Remember what proved good."""
        self._by_class[load] = good
        self._by_class.move_to_end(load)
        if len(self._by_class) > CLASSES_MAX:
            self._by_class.popitem(last=False)

    def find(self, sizes: Sizes, drifts: int) -> Good | None:
        """What proved good for the class nearest to ``sizes`` on the engine as it is after ``drifts``."""
        near = [(distance(sizes, load), load) for load, good in self._by_class.items() if good.drifts == drifts]
        if not near or min(near)[0] > DEAD_BAND:
            return None
        load = min(near)[1]
        self._by_class.move_to_end(load)
        return self._by_class[load]
