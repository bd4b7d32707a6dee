"""When did the objective change: the likeliest beginning of a step in the share of kept promises.

    step at b      ticks before b have one share, those from b on another
    likelihood     sum over both sides of  met * ln p + (ended - met) * ln(1 - p),   p = met / ended of the side
    evidence       likelihood of the best step of one cause less that of the best of all others, over the dispersion

A change owns the steps in the ``lag`` ticks that follow it, alone or with others that come as soon; what happened
before the first change owns the earlier ones. Ticks of one queue are not independent, so that a likelihood counts for
as much less as their shares scatter more than a binomial one does. Sources: change point by maximum likelihood
(Hinkley, Biometrika 57, 1970), quasi-likelihood (McCullagh and Nelder, Generalized Linear Models, ch. 9).

This module must not know what a change was, and must not act.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

DECISIVE = 3.0
"""Difference of log-likelihoods, 20 to 1, from which one beginning is believed and another is not."""

SHARE_LEAST = 1e-3
"""Shares are kept this far from 0 and 1, where one request would decide."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Requests whose fate became known in one tick."""

    number: int
    """Of the tick."""
    met: int
    ended: int


def evidence(ticks: Sequence[Ended], own: Collection[int], others: Collection[int], lag: int) -> float:
    """How much likelier a step began with the changes at ticks ``own`` than with anything else; below 0: less likely.

    Args:
        ticks: in order, from before the changes on.
        own: ticks of the changes that are asked about, at least one.
        others: ticks of other changes.
        lag: ticks within which a change begins to show.
    """
    steps = _steps(ticks)
    mine = {b for b in steps if any(one < b <= one + lag for one in own)}
    theirs = {b for b in steps if b <= min(own) or any(other < b <= other + lag for other in others)}
    best = max((steps[b] for b in mine), default=-math.inf)
    rest = max((steps[b] for b in theirs), default=-math.inf)
    if best == rest:
        return 0.0
    if math.isinf(best) or math.isinf(rest):
        return math.copysign(math.inf, best - rest)
    return (best - rest) / _dispersion(ticks, max(steps, key=lambda b: steps[b]))


def _steps(ticks: Sequence[Ended]) -> dict[int, float]:
    """Log-likelihood of a step at the beginning of each tick but the first."""
    met, ended = sum(t.met for t in ticks), sum(t.ended for t in ticks)
    found: dict[int, float] = {}
    met_before = ended_before = 0
    for tick, following in pairwise(ticks):
        met_before, ended_before = met_before + tick.met, ended_before + tick.ended
        found[following.number] = _side(met_before, ended_before) + _side(met - met_before, ended - ended_before)
    return found


def _side(met: int, ended: int) -> float:
    if ended <= 0:
        return 0.0
    share = min(1 - SHARE_LEAST, max(SHARE_LEAST, met / ended))
    return met * math.log(share) + (ended - met) * math.log(1 - share)


def _dispersion(ticks: Sequence[Ended], step: int) -> float:
    """Variance of the ticks' shares around the two sides of a step, over the binomial one; at least 1."""
    squares, degrees = 0.0, 0
    for side in ([t for t in ticks if t.number < step], [t for t in ticks if t.number >= step]):
        ended = sum(t.ended for t in side)
        if not ended:
            continue
        share = min(1 - SHARE_LEAST, max(SHARE_LEAST, sum(t.met for t in side) / ended))
        some = [t for t in side if t.ended]
        squares += math.fsum((t.met - share * t.ended) ** 2 / (t.ended * share * (1 - share)) for t in some)
        degrees += len(some) - 1
    return max(1.0, squares / degrees) if degrees > 0 else 1.0
