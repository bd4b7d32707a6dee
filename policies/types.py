"""Frozen values that cross the boundaries between gateways, replicas and the controller.

Conventions, everywhere in the project:

* ``None`` means "unknown" or "no opinion"; 0 means zero.
* Units come last in a name (``ttft_ms``, ``kv_tokens``). Time is one integer ``now_ns`` of the *receiver's* monotonic
  clock: a value that crosses a process carries a sequence number, never a timestamp to be compared with another clock.
  Whoever receives it notes its own ``received_ns`` (see :class:`Sampled`), and age is the difference of two readings of
  one clock.
* Token counts made before an engine has tokenised a prompt are estimates; names say so only where both exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Generic, TypeAlias, TypeVar

from policies.measures import ClassCounts, DepthUse, GpuReading, Roofline, TenantCounts
from policies.steering import AdmissionKnobs, Alternative, ColdModel, Override, Verdict

ReplicaId: TypeAlias = str
"""Serve's unique replica id (``ReplicaID.unique_id``)."""

BlockHash: TypeAlias = int
"""Unsigned 64-bit hash of one prompt block and of everything before it (a chain), salted by model and tenant."""

T = TypeVar("T")

LATENCY_BOUNDS_MS: tuple[float, ...] = (
    1, 2, 5, 10, 15, 20, 30, 40, 50, 75, 100, 150, 200, 300, 400, 500, 750, 1_000, 1_500, 2_000, 3_000, 4_000, 5_000,
    7_500, 10_000, 15_000, 20_000, 30_000, 60_000, 120_000, 300_000, 600_000,
)  # fmt: skip
"""Upper bounds in ms of every latency histogram of the project, from one token gap to ten minutes."""


@dataclass(frozen=True, slots=True)
class Sampled(Generic[T]):
    """A value with the receiver's time of receipt, so that its age is known wherever it is used."""

    value: T
    received_ns: int

    def age_ms(self, now_ns: int) -> float:
        """Age in ms at ``now_ns`` of the same clock."""
        return (now_ns - self.received_ns) / 1e6


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a decision came out as it did: a stable ``code`` for counting, a ``text`` for people."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts per bucket of :data:`LATENCY_BOUNDS_MS` (one more for everything above) and the sum of the values."""

    counts: tuple[int, ...] = (0,) * (len(LATENCY_BOUNDS_MS) + 1)
    sum_ms: float = 0.0

    @property
    def count(self) -> int:
        """Number of values recorded."""
        return sum(self.counts)

    def plus(self, other: Histogram) -> Histogram:
        """Sum of two histograms."""
        return Histogram(
            tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)), self.sum_ms + other.sum_ms
        )

    def quantile_ms(self, q: float) -> float | None:
        """Quantile ``q`` in [0, 1] by linear interpolation inside its bucket, in ms; ``None`` when empty."""
        total = self.count
        if total == 0:
            return None
        rank, seen = q * total, 0
        for i, n in enumerate(self.counts):
            if n and seen + n >= rank:
                low = LATENCY_BOUNDS_MS[i - 1] if i else 0.0
                high = LATENCY_BOUNDS_MS[i] if i < len(LATENCY_BOUNDS_MS) else LATENCY_BOUNDS_MS[-1]
                return low + (high - low) * max(0.0, min(1.0, (rank - seen) / n))
            seen += n
        return LATENCY_BOUNDS_MS[-1]

    def mean_ms(self) -> float | None:
        """Mean in ms; ``None`` when empty."""
        n = self.count
        return self.sum_ms / n if n else None


class Priority(StrEnum):
    """Classes of requests, most important first. A class never waits behind a less important one for long."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"

    @property
    def rank(self) -> int:
        """0 is the most important."""
        return _RANKS[self]


_RANKS = {priority: rank for rank, priority in enumerate(Priority)}


@dataclass(frozen=True, slots=True)
class Request:
    """What policies know of one request: sizes and identity, never its text."""

    request_id: str
    """The server's own id; the client's id never leaves the logs."""
    model: str
    endpoint: str
    """Path as routed, e.g. ``/v1/chat/completions``."""
    tenant: str
    prompt_tokens: int
    """Estimated from bytes until an engine reports the true count."""
    output_tokens_max: int | None
    blocks: tuple[BlockHash, ...]
    """Chain hashes of the prompt's full blocks, first block first."""
    block_tokens: int
    """Estimated tokens in one block."""
    stream: bool
    arrival_ns: int
    priority: Priority = Priority.STANDARD
    task: str = ""
    """Id of the user goal the request is a step of, unique within its tenant; empty: a goal of its own."""
    deadline_ns: int | None = None
    """When the whole answer must be there, on the gateway's clock; ``None``: the class's objectives count."""
    fingerprint: int = 0
    """Hash of the body as the client sent it: equal for its repetitions."""
    prompt_tokens_most: int | None = None
    """More than these it cannot be, for money; ``None``: the estimate stands."""
    output_tokens_most: int | None = None
    """Likewise, where the client names no limit."""


@dataclass(frozen=True, slots=True)
class StepCoefficients:
    """``step_ms = a_ms + b_ms*running + c_ms*kv_tokens/1000 + d_ms*prefill_tokens``.

    Source of the law: linear fits of public vLLM step logs (H100, 1.6-2.6 % mean error on decode steps).
    """

    a_ms: float
    b_ms: float
    c_ms: float
    d_ms: float
    samples: int = 0
    """Steps learned from; 0 for a configured prior."""
    error_share: float | None = None
    """Smoothed mean absolute relative error of the last predictions, 0.02 is 2 %."""
    drifts: int = 0
    """Times the engine was found to have changed its speed for good since its start."""
    batch_known: bool = True
    """Steps of unlike batches were seen: what a larger one takes is learned, and not the guess of the prior."""
    prompts_known: bool = True
    """The same for prompts in a step."""


@dataclass(frozen=True, slots=True)
class Knobs:
    """Engine settings that change between two steps. ``None``: no opinion, the engine keeps its start-up value."""

    running_seqs_max: int | None = None
    step_tokens_max: int | None = None
    speculative_depth: int | None = None


class ReplicaState(StrEnum):
    """Life of a replica as it tells it itself."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STUCK = "stuck"


@dataclass(slots=True)
class ReplicaReport:
    """One replica's signals for one window, pushed to the controller; a subset travels to the routers.

    To be read only; not frozen, because a large fleet makes a thousand of its many fields each second.
    """

    replica_id: ReplicaId
    model: str
    seq: int
    """Grows by one with each report of this replica's life."""
    window_ms: float
    state: ReplicaState
    running: int
    waiting: int
    http_inflight: int
    """Requests open at the replica's HTTP port."""
    kv_tokens_used: int
    kv_tokens_max: int
    prefill_tokens: int
    """Prompt tokens computed in the window (cached ones not counted)."""
    decode_tokens: int
    prefix_query_tokens: int
    """Prompt tokens looked up in the prefix cache in the window."""
    prefix_hit_tokens: int
    preemptions: int
    steps: int
    busy_share: float | None
    """Share of the window the engine spent inside steps."""
    gpu_utilisation_share: float | None
    """NVML's SM utilisation; ``None`` where there is no NVIDIA device. Never filled from ``busy_share``."""
    itl: Histogram
    """Durations of steps that decoded, one count per decoded sequence: the gap every stream saw."""
    step_model: StepCoefficients | None
    knobs: Knobs
    """In force now."""
    running_seqs_hard: int
    """Start-up ``max_num_seqs``: buffers are sized for it, no knob goes above."""
    step_tokens_hard: int
    """Start-up ``max_num_batched_tokens``, likewise."""
    finished: int
    aborted: int
    cold_start_ms: float | None
    """Measured from the actor's start to readiness."""
    plan_seq: int | None = None
    """Sequence number of the plan in force; ``None`` before the first and after a plan grew too old."""
    draft_tokens: int = 0
    """Tokens drafted in the window, and of those the ones that were kept."""
    accepted_tokens: int = 0
    depth_use: tuple[DepthUse, ...] = ()
    """Decode steps of the window by speculative depth and batch size; empty where the engine does not speculate."""
    speculative_depth_hard: int | None = None
    """Start-up depth, the most any knob can set; ``None``: the engine does not speculate."""
    gpu: GpuReading | None = None
    """``None`` where there is no NVIDIA device."""
    roofline: Roofline | None = None
    """``None`` where device or model is not known well enough."""


@dataclass(frozen=True, slots=True)
class GatewayReport:
    """One gateway's signals for one window, pushed to the controller."""

    gateway_id: str
    model: str
    seq: int
    window_ms: float
    ttft: Histogram
    itl: Histogram
    e2e: Histogram
    arrivals: int
    succeeded: int
    failed: Mapping[str, int]
    """Ended without success, by reason code."""
    prompt_tokens: int
    output_tokens: int
    inflight: int
    queued: int
    routed: Mapping[ReplicaId, int]
    """Requests dispatched in the window, by replica."""
    predicted_prompt_tokens: Mapping[ReplicaId, int]
    predicted_hit_tokens: Mapping[ReplicaId, int]
    """Prompt tokens the router believed cached at dispatch, by replica."""
    ttft_error_ms: Histogram
    """Absolute error of the router's TTFT prediction."""
    plan_seq: int | None = None
    met: int = 0
    """Succeeded within TTFT, token gap and end-to-end objectives of their class."""
    retries: int = 0
    """Extra attempts: retries, hedges, resumed streams."""
    repeats: int = 0
    """Arrivals whose body was refused or failed here before: clients that try again."""
    tasks_succeeded: int = 0
    tasks_failed: int = 0
    tasks_open: int = 0
    """Tasks begun here whose outcome is not known yet."""
    by_class: Mapping[str, ClassCounts] = field(default_factory=dict)
    """By ``Priority`` value."""
    by_tenant: Mapping[str, TenantCounts] = field(default_factory=dict)
    """The largest ones, and ``other``."""
    ejected: Mapping[ReplicaId, str] = field(default_factory=dict)
    """Replicas this gateway leaves alone now, and the code why."""
    overrides: tuple[Override, ...] = ()
    """Overrides of the last plan, told to a new life of the controller so that they outlive the old one."""


@dataclass(frozen=True, slots=True)
class FleetView:
    """What Serve says of the engine deployment, reported by the autoscaling policy that Serve calls."""

    replicas_running: int
    replicas_target: int
    replicas_min: int
    replicas_max: int
    unschedulable: int = 0
    """Replicas Ray found no room for, as far as Serve says."""
    capped: bool = False
    """``replicas_max`` is not what is configured but what the caps of the whole fleet leave this model."""


class Mode(StrEnum):
    """``shadow`` decides and writes down but changes nothing."""

    ACT = "act"
    SHADOW = "shadow"


@dataclass(frozen=True, slots=True)
class Plan:
    """All knobs of one tick. Everyone acts on the last plan received until it is ``ttl_ms`` old, then by local rule."""

    epoch: str
    """Identifies one life of the controller; ``seq`` starts again at 1 with each."""
    seq: int
    ttl_ms: float
    mode: Mode
    replicas_target: int | None = None
    affinity_strength: float | None = None
    """0 routes by load alone, 1 trusts predicted cache hits fully."""
    knobs: Mapping[ReplicaId, Knobs] = field(default_factory=dict)
    load_bound: float | None = None
    """Replaces ``routing.load_bound``."""
    admission: AdmissionKnobs = field(default_factory=AdmissionKnobs)
    prefill_replicas: int | None = None
    """Of a split fleet: how many replicas should prefill."""
    retired: frozenset[ReplicaId] = frozenset()
    """Replicas that should leave and be replaced: they fail their health checks, and Serve does the rest."""
    warm_replicas: int = 0
    """Replicas that should stand by, started and out of rotation, beside ``replicas_target``."""
    warm: frozenset[ReplicaId] = frozenset()
    """Those that do: routers send them nothing while anybody else takes requests."""
    asleep: frozenset[ReplicaId] = frozenset()
    """Those of them whose engines sleep, where they can: a request wakes them in seconds."""
    overrides: tuple[Override, ...] = ()
    """In force, so that gateways can tell them to the controller's next life."""
    cold: ColdModel | None = None
    """Of a model that may sleep, while no replica serves it."""

    @property
    def replicas_total(self) -> int | None:
        """What Serve is asked for: those that serve and those that stand by."""
        return None if self.replicas_target is None else self.replicas_target + self.warm_replicas


@dataclass(frozen=True, slots=True)
class Decision:
    """One entry of the ledger."""

    seq: int
    tick: int
    lever: str
    """A ``steering.Lever``, or ``guard`` for roll-backs, freezes, overrides and foreign writers."""
    target: str
    """Replica id or model name the decision is about."""
    before: Mapping[str, float | int | None]
    after: Mapping[str, float | int | None]
    acted: bool
    """False in shadow mode."""
    reason: Reason
    inputs: Mapping[str, float | int | str | None]
    predicted: Mapping[str, float] = field(default_factory=dict)
    at_ns: int = 0
    """The controller's clock at the tick."""
    conditions: tuple[str, ...] = ()
    """Names of the conditions that were active."""
    alternatives: tuple[Alternative, ...] = ()
    realised: Mapping[str, float] = field(default_factory=dict)
    """The same figures as ``predicted``, measured once the effect could be seen; empty before."""
    verdict: Verdict = Verdict.PENDING
    verdict_text: str = ""
    judged_tick: int | None = None


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One candidate as the router sees it: Serve's membership, the replica's last sample and the gateway's own counts.

    ``sample_*`` come from the replica and may be old or missing; ``local_*`` are this gateway's own, exact, counted at
    dispatch on every path and given back by the flow that raised them.
    """

    replica_id: ReplicaId
    local_requests: int
    local_prefill_tokens: int
    """Uncached prompt tokens dispatched and still without a first byte."""
    local_decode_tokens: int
    """Prompt plus output so far of streams that are past their first byte (estimate of KV held)."""
    sample_age_ms: float | None = None
    sample_running: int | None = None
    sample_waiting: int | None = None
    sample_prefill_backlog_tokens: int | None = None
    """Prompt tokens the engine still has to compute, all gateways together."""
    sample_kv_tokens_used: int | None = None
    sample_kv_tokens_max: int | None = None
    running_seqs_max: int | None = None
    step_tokens_max: int | None = None
    """Token budget of one engine step: the chunk size of its prefill."""
    step_model: StepCoefficients | None = None
    local_requests_at_sample: int | None = None
    """This gateway's own counts when the sample arrived: what changed since is not in the sample yet."""
    local_prefill_tokens_at_sample: int | None = None
    local_decode_tokens_at_sample: int | None = None
    available: bool = True
    """False when ejected, draining or stuck."""
    unavailable_reason: str = ""


@dataclass(frozen=True, slots=True)
class RouteChoice:
    """Ordered answer of the router: try ``tiers`` in order, any replica of a tier is as good as the next."""

    tiers: tuple[tuple[ReplicaId, ...], ...]
    reason: Reason
    predicted_ttft_ms: Mapping[ReplicaId, float]
    predicted_hit_tokens: Mapping[ReplicaId, int]

    @property
    def order(self) -> Sequence[ReplicaId]:
        """All tiers flattened, best first."""
        return [r for tier in self.tiers for r in tier]

    def led_by(self, replica_id: ReplicaId, reason: Reason) -> RouteChoice:
        """The same order with ``replica_id`` before all others, for ``reason``."""
        rest = tuple(kept for tier in self.tiers if (kept := tuple(r for r in tier if r != replica_id)))
        return replace(self, tiers=((replica_id,), *rest), reason=reason)
