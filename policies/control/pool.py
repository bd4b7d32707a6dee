"""What the control loop asks of whoever keeps replicas beside those that serve: started, and out of rotation.

    hot     serves; the scaler, the joint plan and the guard rails decide how many there are
    warm    started, and routers send it nothing while anybody else takes requests; counted by a :class:`Pool`
    asleep  warm, and its engine has given its device's memory back: it wakes in seconds
    cold    not there

Levers and conditions see the hot fleet alone (:meth:`Pool.hot`); what Serve is asked for is both together
(``Plan.replicas_total``). The decision lives in ``autoscaling/``, which may import policies, not the other way round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from policies.control.ledger import Draft
from policies.control.scaler import ScaleAdvice
from policies.control.signals import Signals
from policies.types import ReplicaId


@dataclass(frozen=True, slots=True)
class Spares:
    """What stands beside the hot fleet after one tick."""

    wanted: int = 0
    """Warm replicas that there should be."""
    warm: frozenset[ReplicaId] = frozenset()
    """Those that are."""
    asleep: frozenset[ReplicaId] = frozenset()
    """Those of them whose engines should sleep."""
    written: tuple[Draft, ...] = ()
    """For the ledger."""


class Pool(Protocol):
    """Decides how many are warm, and which; keeps its own history between ticks."""

    def hot(self, signals: Signals, now_ns: int) -> Signals:
        """``signals`` as if the warm replicas were not there; ``Signals.warm`` says how many are left out."""
        ...

    def step(
        self,
        seen: Signals,
        hot: Signals,
        target: int | None,
        advice: ScaleAdvice | None,
        allowed: Callable[[int], tuple[int, bool]],
        now_ns: int,
    ) -> Spares:
        """One tick.

        Args:
            seen: everything that is known.
            hot: the same without the warm ones, as the levers saw it.
            target: replicas that should serve; ``None``: nobody says, and none is warm.
            advice: of the scaler at this tick.
            allowed: what the guard rails make of a wish: how many warm ones, and whether that is acted on.
            now_ns: the tick's time.
        """
        ...
