"""What the control loop asks of whoever decides the number of replicas.

The decision itself lives in ``autoscaling/``, which may import policies; the loop is handed an object that answers
:class:`Scaler`, so that the dependency points one way only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from policies.control.signals import Signals
from policies.types import Reason


@dataclass(frozen=True, slots=True)
class ScaleAdvice:
    """How many replicas there should be, and why."""

    replicas: int | None
    """``None``: no opinion, nothing is known of the fleet yet."""
    reason: Reason
    """Of the stage that settled the answer."""
    inputs: Mapping[str, float | int | str | None] = field(default_factory=dict)
    """The figures it was computed from."""
    stages: tuple[Reason, ...] = ()
    """Every stage that spoke, in order: recommend, stabilise, bound."""
    held: bool = False
    """True when the load asked for something else and a stage held it back: worth a line in the ledger."""


class Scaler(Protocol):
    """Decides the number of replicas; keeps its own history between ticks."""

    def recommend(self, signals: Signals, now_ns: int) -> ScaleAdvice:
        """Called once per tick, with time that never goes back."""
        ...
