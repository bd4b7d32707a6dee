"""Shares what all models together may hold: at most so many GPUs, and so many dollars an hour.

    grant   each model's fewest replicas first, then what it asks for, one replica at a time: the highest priority
            first, among equals the one that has the smallest part of what it asks for
    spare   what nobody asks for is given on in the same order: a cap that does not bind limits nobody
    most    a model above its grant gives back when its own loop says so; until then whoever would rise waits,
            the lowest priority first, so that all together never hold more than the caps allow

The answer is the largest number of replicas each model may have now; its own control loop decides below that.

What this must not do: decide how many replicas a model needs, or take one away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """One model's part in the sharing."""

    asks: int
    """Replicas its load asks for, whatever it may have."""
    held: int
    """Replicas it has or has been promised: of running ones and its target the larger number."""
    least: int
    """Its configured minimum; also what it begins with."""
    most: int
    """Its configured maximum."""
    gpus: float
    """GPUs of one replica."""
    usd_per_hour: float
    """Price of one replica."""
    priority: int = 0
    """Larger is more important."""


@dataclass(frozen=True, slots=True)
class Caps:
    """Of all models together. ``None``: no bound."""

    gpus: float | None = None
    usd_per_hour: float | None = None

    def allow(self, claims: Mapping[str, Claim], replicas: Mapping[str, int]) -> bool:
        """Whether so many replicas of each model are within the caps."""
        gpus = sum(claims[name].gpus * n for name, n in replicas.items())
        usd = sum(claims[name].usd_per_hour * n for name, n in replicas.items())
        return (self.gpus is None or gpus <= self.gpus + _EPSILON) and (
            self.usd_per_hour is None or usd <= self.usd_per_hour + _EPSILON
        )


_EPSILON = 1e-9


def share(claims: Mapping[str, Claim], caps: Caps) -> dict[str, int]:
    """Most replicas of each model, by its name. Where nothing is capped these are the configured maxima."""
    given = dict.fromkeys(claims, 0)
    for goal in (
        {name: claim.least for name, claim in claims.items()},
        {name: max(claim.least, min(claim.asks, claim.most)) for name, claim in claims.items()},
        {name: claim.most for name, claim in claims.items()},
    ):
        _give(given, goal, claims, caps)
    return _after_those_that_hold(given, claims, caps)


def _give(given: dict[str, int], goal: Mapping[str, int], claims: Mapping[str, Claim], caps: Caps) -> None:
    """Raise ``given`` towards ``goal``, as far as the caps allow."""
    open_ = [name for name in claims if given[name] < goal[name]]
    while open_:
        name = min(open_, key=lambda n: (-claims[n].priority, given[n] / goal[n], n))
        given[name] += 1
        if not caps.allow(claims, given):
            given[name] -= 1
            open_.remove(name)
        elif given[name] >= goal[name]:
            open_.remove(name)


def _after_those_that_hold(given: Mapping[str, int], claims: Mapping[str, Claim], caps: Caps) -> dict[str, int]:
    """``given``, less what others have not given back yet."""
    most = dict(given)
    rising = sorted((n for n in claims if most[n] > claims[n].held), key=lambda n: (claims[n].priority, n))
    for name in rising:
        while most[name] > claims[name].held and not caps.allow(
            claims, {n: max(most[n], claim.held) for n, claim in claims.items()}
        ):
            most[name] -= 1
    return most
