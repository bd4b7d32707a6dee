"""Configuration of guard rails, of speculation, and of prefill apart from decode. As in ``policies/config.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from policies.config_base import need
from policies.steering import Knob


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Depth of speculative decoding, by measured goodput per batch size."""

    enabled: bool = True
    explore_share: float = 0.02
    """Largest share of decode time spent on depths that are not the best known."""
    steps_min: int = 20
    """Decode steps at one depth and batch size before its goodput is believed."""

    def __post_init__(self) -> None:
        need(0 <= self.explore_share <= 0.2, "explore_share", "must be in [0, 0.2]")
        need(self.steps_min >= 1, "steps_min", "must be at least 1")


@dataclass(frozen=True, slots=True)
class DisaggregationConfig:
    """Long prompts computed at replicas that prefill, their answers written at replicas that decode."""

    enabled: bool = False
    uncached_tokens_min: int = 512
    """A prompt with fewer uncached tokens stays where its answer is written."""
    prefill_replicas: int = 1
    """How many replicas prefill while no plan says so; one at least always decodes."""
    adaptive: bool = True
    """The controller moves replicas between the roles."""
    prefill_timeout_ms: float = 30_000.0
    """Longest time from a prompt's dispatch to a prefill replica to the end of its computation."""
    pull_timeout_ms: float = 15_000.0
    """Longest time from the dispatch to a decode replica to its first byte; then it computes the prompt itself. Below
    ``model.stuck_after_s``: an engine that waits for blocks alone makes no step."""
    lease_s: int = 30
    """Blocks that no decode replica asks for are freed at the prefill replica after this long."""

    def __post_init__(self) -> None:
        need(self.uncached_tokens_min >= 1, "uncached_tokens_min", "must be at least 1")
        need(self.prefill_replicas >= 1, "prefill_replicas", "must be at least 1")
        for name in ("prefill_timeout_ms", "pull_timeout_ms"):
            need(getattr(self, name) > 0, name, "must be above 0")
        need(self.lease_s >= 6, "lease_s", "must be at least 6: decode replicas renew it six times in its length")


DEPTH_TURNS_MAX = 60
"""Changes of direction of the speculative depth before it is frozen: it follows texts, which change from request to
request, and a turn costs nothing."""


@dataclass(frozen=True, slots=True)
class KnobGuard:
    """Bounds and pace of one knob. ``None``: none beside those of its lever."""

    min: float | None = None
    max: float | None = None
    change_share_max: float | None = None
    """Largest change of one decision, as a share of the value before."""
    shadow: bool = False
    """Decided and written down, not acted on."""
    turns_max: int | None = None
    """Replaces ``guard.turns_max``; ``None``: that one, or :data:`DEPTH_TURNS_MAX` for the speculative depth."""

    def __post_init__(self) -> None:
        need(self.turns_max is None or self.turns_max >= 1, "turns_max", "must be at least 1")
        low, high = self.min, self.max
        need(low is None or high is None or low <= high, "max", f"must not be below min ({low}), is {high}")
        share = self.change_share_max
        need(share is None or share > 0, "change_share_max", f"must be above 0, is {share}")


@dataclass(frozen=True, slots=True)
class GuardConfig:
    """What keeps decisions from doing harm."""

    rollback: bool = True
    """A decision after which the objective got worse beyond noise is taken back."""
    effect_ticks: int = 15
    """Ticks after a change settled over which its effect is measured."""
    noise_share: float = 0.05
    """Smaller relative differences of the objective are noise, whatever statistics say."""
    rollbacks_max: int = 3
    """Roll-backs of one lever at one target within ``window_s`` after which it is frozen."""
    turns_max: int = 3
    """Changes of direction of one knob within ``window_s`` after which it is frozen."""
    window_s: float = 600.0
    freeze_s: float = 600.0
    foreign_hold_s: float = 600.0
    """A knob that someone else set is left to them for this long."""
    override_s_max: float = 86_400.0
    """Longest life of an override."""
    knobs: Mapping[str, KnobGuard] = field(default_factory=dict)
    """By the names of ``policies.steering.Knob``."""

    def __post_init__(self) -> None:
        need(self.effect_ticks >= 1, "effect_ticks", "must be at least 1")
        need(0 <= self.noise_share < 1, "noise_share", "must be in [0, 1)")
        need(self.rollbacks_max >= 1, "rollbacks_max", "must be at least 1")
        need(self.turns_max >= 1, "turns_max", "must be at least 1")
        for name in ("window_s", "freeze_s", "foreign_hold_s", "override_s_max"):
            need(getattr(self, name) > 0, name, "must be above 0")
        for name in self.knobs:
            need(name in set(Knob), f"knobs.{name}", f"is no knob; there are: {', '.join(Knob)}")

    def turns_of(self, knob: Knob) -> int:
        """Changes of direction of ``knob`` within ``window_s`` after which it is frozen."""
        of_knob = self.knobs.get(knob)
        if of_knob is not None and of_knob.turns_max is not None:
            return of_knob.turns_max
        return max(self.turns_max, DEPTH_TURNS_MAX) if knob is Knob.SPECULATIVE_DEPTH else self.turns_max
