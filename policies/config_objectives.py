"""Objectives that hold for a part of the traffic only: for one class, for one model. As in ``policies/config.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from policies.config_base import need


@dataclass(frozen=True, slots=True)
class ObjectivesPart:
    """Objectives of one class of one model. ``None``: what holds without it."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    e2e_ms: float | None = None
    quantile: float | None = None
    availability: float | None = None

    def __post_init__(self) -> None:
        check_part(self.ttft_ms, self.itl_ms, self.e2e_ms, self.quantile, self.availability)


@dataclass(frozen=True, slots=True)
class ModelObjectives:
    """Objectives of one model, and of its classes. ``None``: what ``objectives`` says."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    e2e_ms: float | None = None
    quantile: float | None = None
    availability: float | None = None
    classes: Mapping[str, ObjectivesPart] = field(default_factory=dict)
    """By class: ``interactive``, ``standard``, ``batch``. They win over ``classes``."""

    def __post_init__(self) -> None:
        check_part(self.ttft_ms, self.itl_ms, self.e2e_ms, self.quantile, self.availability)


def check_part(
    ttft_ms: float | None,
    itl_ms: float | None,
    e2e_ms: float | None,
    quantile: float | None,
    availability: float | None,
) -> None:
    """Raise :class:`policies.config_base.ConfigError` where a given objective is out of its range."""
    for name, value in (("ttft_ms", ttft_ms), ("itl_ms", itl_ms), ("e2e_ms", e2e_ms)):
        need(value is None or value > 0, name, f"must be above 0, is {value}")
    for name, share in (("quantile", quantile), ("availability", availability)):
        need(share is None or 0.5 <= share < 1, name, f"must be in [0.5, 1), is {share}")
