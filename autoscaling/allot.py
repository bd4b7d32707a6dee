"""Allot: how many replicas each model gets where the cluster cannot give all of them what they ask for.

    1. every model's minimum, more important models first
    2. level by level of importance, the rest of what is asked for; within one level the next replica goes to the model
       with the least share of its wish so far, so that like models are short alike

A replica is given where the GPUs of the cluster and its dollars per hour allow it. What one model cannot use for want
of the one may go to another that needs less of it. Pure function of the wishes: same wishes, same answer, whatever
their order.

What this must not do: decide what a model wishes for, or which replica leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies.types import Reason

TOLERANCE = 1e-9
"""Dollars that a cap may be exceeded by: last digits of floats."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What one model asks for."""

    model: str
    replicas: int
    replicas_min: int = 0
    gpus: float = 1.0
    """Of one replica."""
    usd_per_hour: float = 0.0
    """Of one replica; 0: no price is known, it costs nothing."""
    importance: int = 0
    """Models with more get theirs before others do."""

    def __post_init__(self) -> None:
        if min(self.replicas, self.replicas_min) < 0 or self.gpus < 0 or self.usd_per_hour < 0:
            raise ValueError(f"{self.model}: replicas, GPUs and prices must not be negative")


@dataclass(frozen=True, slots=True)
class Caps:
    """Of the whole fleet. ``None``: none."""

    gpus_max: float | None = None
    usd_per_hour_max: float | None = None


@dataclass(frozen=True, slots=True)
class Allotment:
    """What one model gets, and why not more: ``Granted``, ``BoundedByGpus``, ``BoundedByUsd``."""

    model: str
    replicas: int
    reason: Reason


def allot(wishes: Sequence[Wish], caps: Caps) -> tuple[Allotment, ...]:
    """Answer each of ``wishes``, in their order.

    Raises:
        ValueError: two wishes of one model.
    """
    if len({wish.model for wish in wishes}) != len(wishes):
        raise ValueError("a model wishes twice")
    given = {wish.model: 0 for wish in wishes}
    room = _Room(caps)
    for wish in sorted(wishes, key=lambda w: (-w.importance, w.model)):
        while given[wish.model] < wish.replicas_min and room.take(wish):
            given[wish.model] += 1
    for level in sorted({wish.importance for wish in wishes}, reverse=True):
        open_ = [w for w in wishes if w.importance == level and given[w.model] < w.replicas]
        while open_:
            wish = min(open_, key=lambda w: (given[w.model] / w.replicas, w.model))
            if room.take(wish):
                given[wish.model] += 1
            open_ = [w for w in open_ if given[w.model] < w.replicas and (w is not wish or room.fits(w))]
    return tuple(Allotment(w.model, given[w.model], room.why(w, given[w.model])) for w in wishes)


class _Room:
    """What is left of the caps."""

    def __init__(self, caps: Caps) -> None:
        self._caps = caps
        self._gpus = self._usd = 0.0

    def fits(self, wish: Wish) -> bool:
        """Whether one replica more does."""
        return self._gpus_fit(wish) and self._usd_fit(wish)

    def take(self, wish: Wish) -> bool:
        """Take one replica's part, if it fits."""
        if not self.fits(wish):
            return False
        self._gpus += wish.gpus
        self._usd += wish.usd_per_hour
        return True

    def why(self, wish: Wish, given: int) -> Reason:
        """Why ``given`` and not more."""
        wanted = max(wish.replicas, wish.replicas_min)
        if given >= wanted:
            return Reason("Granted", f"{given} replicas, all that is asked for")
        if not self._gpus_fit(wish):
            return Reason("BoundedByGpus", f"{given} of {wanted} replicas: {self._caps.gpus_max:g} GPUs are all in use")
        return Reason("BoundedByUsd", f"{given} of {wanted} replicas: ${self._caps.usd_per_hour_max:g}/h are spent")

    def _gpus_fit(self, wish: Wish) -> bool:
        return self._caps.gpus_max is None or self._gpus + wish.gpus <= self._caps.gpus_max + TOLERANCE

    def _usd_fit(self, wish: Wish) -> bool:
        most = self._caps.usd_per_hour_max
        return most is None or self._usd + wish.usd_per_hour <= most + TOLERANCE
