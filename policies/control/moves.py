"""What levers ask for in one tick, in the form that the joint adaptation and the guard rails weigh.

A *place* is a knob and its target: a replica id for knobs that are per replica, :data:`policies.steering.ANY` for those
of the model. A *wish* is the value that should stand there; ``None``: no opinion, the configured value holds.

Values only. What this must not do: decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from policies.steering import Alternative, Knob, Lever
from policies.types import Reason

Place: TypeAlias = tuple[Knob, str]
Value: TypeAlias = float | int | None
Wishes: TypeAlias = Mapping[Place, Value]


@dataclass(frozen=True, slots=True)
class Move:
    """One change that a lever asks for, or a hold worth knowing (``before == after``)."""

    lever: Lever
    target: str
    """Replica id or model name, as people read it."""
    before: Mapping[Place, Value]
    after: Mapping[Place, Value]
    reason: Reason
    inputs: Mapping[str, float | int | str | None] = field(default_factory=dict)
    predicted: Mapping[str, float] = field(default_factory=dict)
    """Keys as in ``policies.steering.Alternative.predicted``, and what is the lever's own."""
    cures: frozenset[str] = frozenset()
    """Names of the conditions it is meant to end; empty: it is housekeeping and fights over nothing."""
    urgent: bool = False
    """A brake that must not wait for others: preemptions, a replica that is gone, a model that sleeps or wakes."""
    free: bool = False
    """Taking it back costs nothing: a warm replica wakes or rests. It is no turn, however often."""
    alternatives: tuple[Alternative, ...] = ()
    """What else was considered for the same end."""

    @property
    def changes(self) -> bool:
        """Whether anything would be set."""
        return self.before != self.after
