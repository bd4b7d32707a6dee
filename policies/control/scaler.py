"""What the control loop asks of whoever decides the number of replicas.

The decision itself lives in ``autoscaling/``, which may import policies; the loop is handed an object that answers
:class:`Scaler`, so that the dependency points one way only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from policies.config import PolicyConfig
from policies.control.signals import Signals
from policies.steering import ColdModel
from policies.types import Reason


@dataclass(frozen=True, slots=True)
class Ahead:
    """The load when a replica asked for now is ready, in what it asks for per second."""

    horizon_s: float
    """How far ahead: the measured start-up time."""
    prefill_tps: float
    """Uncached prompt tokens."""
    decode_tps: float
    """Output tokens."""
    kv_tokens: float
    """Held at once."""
    margin: float
    """Part of it that stands for what forecasts of this load have missed at this horizon."""
    trusted: bool
    """Those errors are known; else this is the load of now."""
    by: str
    """Forecaster of the decoded tokens."""


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
    ahead: Ahead | None = None
    """``None``: no forecast, it is off or nothing is known yet."""
    cold: ColdModel | None = None
    """Of a model that may sleep, while no replica serves it; then ``replicas`` is not to be changed."""


class Scaler(Protocol):
    """Decides the number of replicas; keeps its own history between ticks."""

    def recommend(self, signals: Signals, now_ns: int) -> ScaleAdvice:
        """Called once per tick, with time that never goes back."""
        ...


@runtime_checkable
class Reconfigurable(Protocol):
    """Whoever steers by objectives and can go on with others."""

    def reconfigure(self, config: PolicyConfig) -> None:
        """Steer by the objectives and classes of ``config``; everything else in it is as before."""
        ...


@runtime_checkable
class Overrulable(Protocol):
    """A scaler that can go on from another number than its own; the baselines of the simulator cannot."""

    def adopt(self, target: int, now_ns: int) -> None:
        """Told that ``target`` stands and not the number it advised at this tick."""
        ...
