"""What is steered: levers, their knobs, and what people and the ledger say about them.

A *lever* is a way to act on the fleet, a *knob* one value it sets. Levers are ordered by what it costs to use them; the
joint adaptation (``policies/control/``) asks for the cheapest that helps.

Values only. What this must not do: decide.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

ANY = "*"
"""Target of an override that holds for every replica (or for the model)."""


class Lever(StrEnum):
    """Ways to act, cheapest first."""

    AFFINITY = "affinity"
    """Where requests go: trust in prefix hits, bound on a replica's load."""
    BATCH = "batch"
    """How many sequences a replica runs at once and how many tokens one step may hold."""
    SPECULATION = "speculation"
    """How many tokens are drafted ahead."""
    ADMISSION = "admission"
    """Who is let in."""
    ROLES = "roles"
    """How many replicas prefill and how many decode, in a split fleet."""
    REPLICAS = "replicas"
    """How many replicas there are."""

    @property
    def rank(self) -> int:
        """0 is the cheapest."""
        return _RANKS[self]


_RANKS = {lever: rank for rank, lever in enumerate(Lever)}


class Knob(StrEnum):
    """Every value the controller sets, by the name that configuration, API, command line and ledger use."""

    AFFINITY_STRENGTH = "affinity_strength"
    LOAD_BOUND = "load_bound"
    RUNNING_SEQS_MAX = "running_seqs_max"
    STEP_TOKENS_MAX = "step_tokens_max"
    SPECULATIVE_DEPTH = "speculative_depth"
    FORECAST_SHARE = "forecast_share"
    SHED_FACTOR = "shed_factor"
    PREFILL_REPLICAS = "prefill_replicas"
    REPLICAS_TARGET = "replicas_target"
    WARM_REPLICAS = "warm_replicas"
    RETIRED = "retired"

    __hash__ = str.__hash__  # as it compares; and places, of which each is the half, are looked up by the thousand

    @property
    def lever(self) -> Lever:
        """The lever that sets it."""
        return LEVER_OF[self]

    @property
    def per_replica(self) -> bool:
        """Whether each replica has a value of its own; else there is one for the model."""
        return self in PER_REPLICA

    @property
    def whole(self) -> bool:
        """Whether it is a whole number."""
        return self not in FRACTIONS


PER_REPLICA = frozenset({Knob.RUNNING_SEQS_MAX, Knob.STEP_TOKENS_MAX, Knob.SPECULATIVE_DEPTH, Knob.RETIRED})
FRACTIONS = frozenset({Knob.AFFINITY_STRENGTH, Knob.LOAD_BOUND, Knob.FORECAST_SHARE, Knob.SHED_FACTOR})

LEVER_OF = MappingProxyType(
    {
        Knob.AFFINITY_STRENGTH: Lever.AFFINITY,
        Knob.LOAD_BOUND: Lever.AFFINITY,
        Knob.RUNNING_SEQS_MAX: Lever.BATCH,
        Knob.STEP_TOKENS_MAX: Lever.BATCH,
        Knob.SPECULATIVE_DEPTH: Lever.SPECULATION,
        Knob.FORECAST_SHARE: Lever.ADMISSION,
        Knob.SHED_FACTOR: Lever.ADMISSION,
        Knob.PREFILL_REPLICAS: Lever.ROLES,
        Knob.REPLICAS_TARGET: Lever.REPLICAS,
        Knob.WARM_REPLICAS: Lever.REPLICAS,
        Knob.RETIRED: Lever.REPLICAS,
    }
)


@dataclass(frozen=True, slots=True)
class AdmissionKnobs:
    """What a plan says of admission. ``None``: no opinion, the configured value holds."""

    forecast_share: float | None = None
    """Replaces ``admission.forecast_share``."""
    shed_factor: float | None = None
    """Multiplies every class's ``shed_share``; below 1 less important classes are cut off earlier."""
    coming: int = 0
    """Replicas that start."""
    coming_s: float = 0.0
    """Time until all of them should serve."""


class ColdPhase(StrEnum):
    """Why no replica serves a model that may sleep."""

    ASLEEP = "asleep"
    """Nobody asked for it; a request wakes it."""
    STARTING = "starting"
    FAILED = "failed"
    """Its starts failed; requests wake it again once :attr:`ColdModel.retry_after_s` is over."""


@dataclass(frozen=True, slots=True)
class ColdModel:
    """What gateways must know of a model that no replica serves."""

    phase: ColdPhase
    start_s: float
    """From the first request to a replica that serves: the longest of the last starts, or what is configured."""
    measured: bool
    """``start_s`` was measured."""
    elapsed_s: float = 0.0
    """Since the start under way began."""
    retry_after_s: float = 0.0
    """Of a failed model: time until a request may wake it."""
    why: str = ""
    """Of a failed model: what is known of it."""


@dataclass(frozen=True, slots=True)
class Override:
    """What a person set by hand. It wins over every decision, freeze and bound but the engine's own, until it ends.

    Either ``value`` is given (the knob stands at it) or ``mode`` (``shadow``: decided and written down, not acted on;
    ``act``: acted on although the configuration says shadow).
    """

    id: str
    """Server-made, unique."""
    knob: Knob | None
    """``None`` with ``mode``: every knob."""
    target: str = ANY
    """A replica id for knobs that are per replica; :data:`ANY` for all of them and for knobs of the model."""
    value: float | int | None = None
    mode: str | None = None
    """``act`` or ``shadow``."""
    remaining_ms: float = 0.0
    """Time left when this was written; each receiver counts down on its own clock."""
    by: str = ""
    """Id of the key that set it; empty where keys are off."""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Alternative:
    """Something that was considered instead of a decision."""

    lever: str
    change: str
    """What it would have set, in words."""
    predicted: dict[str, float] = field(default_factory=dict)
    """Of the whole fleet with it: ``successes_per_usd``, ``met_share``, ``ttft_ms``, ``itl_ms``, as far as known."""
    why_not: str = ""


class Verdict(StrEnum):
    """What became of a decision."""

    PENDING = "pending"
    """Its effect is not known yet."""
    BETTER = "better"
    """The objective rose beyond noise."""
    NEUTRAL = "neutral"
    """No difference beyond noise."""
    WORSE = "worse"
    """It fell beyond noise."""
    OVERTAKEN = "overtaken"
    """Load or fleet changed so much that nothing can be said."""
