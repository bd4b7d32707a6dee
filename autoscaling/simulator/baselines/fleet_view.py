"""What all baseline scalers read from the control loop's signals: replicas, target, bounds, open requests.

What this must not do: recommend anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from policies.config import ScalingConfig
from policies.control.scaler import ScaleAdvice
from policies.control.signals import Signals
from policies.types import Reason


@dataclass(frozen=True, slots=True)
class FleetState:
    """Replicas of one pool at one tick."""

    running: int
    """Ready ones."""
    target: int
    """The number asked for last: those that start are in it."""


def fleet_state(signals: Signals) -> FleetState | None:
    """Serve's word; without it those that report, taken for the target too; ``None`` while nobody has spoken."""
    if signals.fleet is not None:
        return FleetState(signals.fleet.replicas_running, signals.fleet.replicas_target)
    running = len(signals.serving) + signals.unknown_replicas
    return FleetState(running, running) if running else None


def open_requests(signals: Signals) -> int | None:
    """Requests open at the gateways, those that wait for a replica included; from the replicas where no gateway
    reports; ``None`` when nobody does.
    """
    if signals.traffic is not None:
        return signals.traffic.inflight
    if signals.work is not None:
        return signals.work.running + signals.work.waiting
    return None


def bounded(replicas: int, config: ScalingConfig) -> int:
    """Within the configured minimum and maximum."""
    return max(config.replicas_min, min(config.replicas_max, replicas))


def advice(
    replicas: int | None, code: str, text: str, inputs: Mapping[str, float | int | str | None] | None = None
) -> ScaleAdvice:
    """An answer of one stage."""
    return ScaleAdvice(replicas, Reason(code, text), inputs or {})


def unknown() -> ScaleAdvice:
    """No opinion: nothing is known of the fleet yet."""
    return advice(None, "Unknown", "nothing is known of the fleet yet")
