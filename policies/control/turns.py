"""Whose turn it is in a large fleet: what is worked out per replica is bounded by a count per tick.

    turns   = min(TURNS_MAX, ceil(replicas / PER_TICK))
    due     = every ``turns``-th replica of the sorted fleet, from another one at each tick

A fleet of up to :data:`PER_TICK` is looked at whole in every tick. In a larger one what is worked out of a replica (its
capacity, its tuner's answer) is up to ``turns`` ticks old, which is less than the window of reports that it is read
from. What must not wait (a preemption, a replica that is new) does not ask.

This module must not know what is worked out.
"""

from __future__ import annotations

PER_TICK = 128
"""Replicas that are looked at in one tick, as long as that takes no more than :data:`TURNS_MAX` ticks for all."""

TURNS_MAX = 8
"""Ticks within which everybody has had a turn, so that no report leaves its window unseen."""


class Turns:
    """Counts the ticks of one user."""

    def __init__(self) -> None:
        self._tick = 0

    def due(self, replicas: int) -> range:
        """Places in the sorted fleet of those whose turn it is. Call it once per tick."""
        turns = max(1, min(TURNS_MAX, -(-replicas // PER_TICK)))
        self._tick += 1
        return range(-self._tick % turns, replicas, turns)
