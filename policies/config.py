"""One frozen dataclass per policy family, units in names, checked on construction.

``deployments/settings.py`` mirrors these from ``serve_config.yaml``; the simulator builds them directly. A value out of
range raises :class:`ConfigError` naming the field, so that a wrong configuration never reaches a policy.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from policies.types import Mode, StepCoefficients


class ConfigError(ValueError):
    """A configuration value is out of range; ``field`` is its name inside its family."""

    def __init__(self, field_name: str, message: str) -> None:
        super().__init__(f"{field_name}: {message}")
        self.field = field_name


def _need(ok: bool, field_name: str, message: str) -> None:
    if not ok:
        raise ConfigError(field_name, message)


@dataclass(frozen=True, slots=True)
class ObjectivesConfig:
    """What users were promised; every loop steers by these."""

    ttft_ms: float = 2_000.0
    """Time to first token at ``quantile``."""
    itl_ms: float = 200.0
    """Gap between two tokens of a stream at ``quantile``."""
    quantile: float = 0.95

    def __post_init__(self) -> None:
        _need(self.ttft_ms > 0, "ttft_ms", f"must be above 0, is {self.ttft_ms}")
        _need(self.itl_ms > 0, "itl_ms", f"must be above 0, is {self.itl_ms}")
        _need(0.5 <= self.quantile < 1, "quantile", f"must be in [0.5, 1), is {self.quantile}")


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """Bounds on what one gateway holds at once."""

    inflight_requests_max: int = 1_000
    inflight_tokens_max: int = 4_000_000
    """Prompt plus maximal output tokens, summed over requests in flight."""
    output_tokens_estimate: int = 256
    """Stands for the maximal output tokens of a request whose client names none."""
    retry_after_s: float = 1.0
    """Told to refused clients."""
    no_replica_wait_ms: float = 30_000.0
    """How long a request waits for the first replica to appear before it ends with 503."""

    def __post_init__(self) -> None:
        _need(self.inflight_requests_max >= 1, "inflight_requests_max", "must be at least 1")
        _need(self.inflight_tokens_max >= 1, "inflight_tokens_max", "must be at least 1")
        _need(self.output_tokens_estimate >= 1, "output_tokens_estimate", "must be at least 1")
        _need(self.retry_after_s > 0, "retry_after_s", "must be above 0")
        _need(self.no_replica_wait_ms >= 0, "no_replica_wait_ms", "must not be negative")


@dataclass(frozen=True, slots=True)
class FaultsConfig:
    """When a request may be sent again. Only before its first byte, always to another replica."""

    attempts_max: int = 3
    """Replicas one request may be sent to, the first included."""
    retry_share_max: float = 0.2
    """Extra attempts as a share of requests, over a sliding budget (token bucket)."""
    retry_burst: int = 10
    """Extra attempts allowed before any request has paid into the budget; the budget never holds more."""
    draining_refusals_max: int = 16
    """Draining replicas one request may meet; their refusals cost neither an attempt nor budget."""

    def __post_init__(self) -> None:
        _need(self.attempts_max >= 1, "attempts_max", "must be at least 1")
        _need(0 <= self.retry_share_max <= 1, "retry_share_max", "must be in [0, 1]")
        _need(self.retry_burst >= 0, "retry_burst", "must not be negative")
        _need(self.draining_refusals_max >= 1, "draining_refusals_max", "must be at least 1")


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """Prefix-affinity routing by predicted TTFT."""

    block_bytes: int = 256
    """Prompt bytes in one prefix block of the gateway's index."""
    index_blocks_max: int = 200_000
    """Entries of the prefix index, least recently used go first."""
    request_blocks_max: int = 2_048
    """Blocks of one prompt that are hashed and indexed; what lies beyond counts as uncached."""
    load_bound: float = 1.5
    """A replica takes no request while its load in tokens is above this multiple of the mean (bounded load)."""
    load_slack_tokens: int = 2_048
    """Load below this is never called unbalanced."""
    affinity_strength: float = 1.0
    """Used until a plan says otherwise and when the plan is too old."""
    sample_age_ms_max: float = 5_000.0
    """Older replica samples are ignored: the router falls back to its own counts."""
    late_ms_max: float = 60_000.0
    """Longest predicted TTFT that a request is given which no replica can serve within the objective, so that others
    are served in time; 0: such requests go where they are served soonest, like all others."""
    step_prior: StepCoefficients = field(default_factory=lambda: StepCoefficients(20.0, 0.5, 0.5, 0.5))
    """Step model of a replica that has not reported one yet."""
    strategy: str = "affinity"
    """``affinity`` or ``random`` (a baseline for comparison)."""

    def __post_init__(self) -> None:
        _need(16 <= self.block_bytes <= 65_536, "block_bytes", "must be in 16..65536")
        _need(self.index_blocks_max >= 1, "index_blocks_max", "must be at least 1")
        _need(self.request_blocks_max >= 1, "request_blocks_max", "must be at least 1")
        _need(self.load_bound >= 1, "load_bound", f"must be at least 1, is {self.load_bound}")
        _need(self.load_slack_tokens >= 0, "load_slack_tokens", "must not be negative")
        _need(0 <= self.affinity_strength <= 1, "affinity_strength", "must be in [0, 1]")
        _need(self.late_ms_max >= 0, "late_ms_max", "must not be negative")
        _need(self.sample_age_ms_max > 0, "sample_age_ms_max", "must be above 0")
        _need(self.strategy in ("affinity", "random"), "strategy", "must be 'affinity' or 'random'")


@dataclass(frozen=True, slots=True)
class BatchingConfig:
    """Bounds and pace of the batch tuner (running sequences and token budget per step)."""

    enabled: bool = True
    running_seqs_min: int = 1
    step_tokens_min: int = 64
    step_tokens_up_factor_max: float = 2.0
    """A tick raises the token budget at most by this factor; lowering is not limited."""
    settle_ticks: int = 3
    """Ticks a replica is left alone after a change."""
    samples_min: int = 32
    """Steps a step model must have seen before it is trusted."""
    preemption_brake: float = 0.8
    """Running sequences are multiplied by this when a window saw preemptions."""

    def __post_init__(self) -> None:
        _need(self.running_seqs_min >= 1, "running_seqs_min", "must be at least 1")
        _need(self.step_tokens_min >= 16, "step_tokens_min", "must be at least 16")
        _need(self.step_tokens_up_factor_max > 1, "step_tokens_up_factor_max", "must be above 1")
        _need(self.settle_ticks >= 0, "settle_ticks", "must not be negative")
        _need(self.samples_min >= 1, "samples_min", "must be at least 1")
        _need(0 < self.preemption_brake < 1, "preemption_brake", "must be between 0 and 1")


@dataclass(frozen=True, slots=True)
class AffinityConfig:
    """Pace of the affinity loop."""

    enabled: bool = True
    step: float = 0.1
    """Largest change of the strength per adjustment."""
    strength_min: float = 0.2
    query_tokens_min: int = 2_000
    """Prompt tokens that must have been looked up since the last adjustment."""

    def __post_init__(self) -> None:
        _need(0 < self.step <= 1, "step", "must be in (0, 1]")
        _need(0 <= self.strength_min <= 1, "strength_min", "must be in [0, 1]")
        _need(self.query_tokens_min >= 1, "query_tokens_min", "must be at least 1")


@dataclass(frozen=True, slots=True)
class ScalingConfig:
    """How many replicas: demand in tokens over what one replica carries within the objectives."""

    enabled: bool = True
    replicas_min: int = 1
    replicas_max: int = 2
    up_ticks: int = 3
    """Consecutive ticks that must ask for more before the target rises."""
    down_window_s: float = 60.0
    """The target falls to the highest recommendation of this window."""
    headroom: float = 0.8
    """Share of one replica's capacity that is planned with."""
    up_replicas_max: int = 4
    """Largest rise of one decision."""
    inflight_target: int = 8
    """Open requests per replica, used by the local rule when no plan is in force."""

    def __post_init__(self) -> None:
        _need(self.replicas_min >= 1, "replicas_min", "must be at least 1")
        _need(
            self.replicas_max >= self.replicas_min,
            "replicas_max",
            f"must not be below replicas_min ({self.replicas_min}), is {self.replicas_max}",
        )
        _need(self.up_ticks >= 1, "up_ticks", "must be at least 1")
        _need(self.down_window_s >= 0, "down_window_s", "must not be negative")
        _need(0 < self.headroom <= 1, "headroom", "must be in (0, 1]")
        _need(self.up_replicas_max >= 1, "up_replicas_max", "must be at least 1")
        _need(self.inflight_target >= 1, "inflight_target", "must be at least 1")


@dataclass(frozen=True, slots=True)
class ControlConfig:
    """The controller's clock and memory."""

    mode: Mode = Mode.ACT
    tick_ms: float = 1_000.0
    plan_ttl_ms: float = 10_000.0
    """A plan older than this is not followed any more."""
    report_age_ms_max: float = 5_000.0
    """Reports older than this are unknown; when all are, the controller is blind and holds."""
    forget_after_ms: float = 60_000.0
    """A reporter unheard of for this long is removed."""
    decisions_max: int = 1_000
    """Decisions kept in memory."""

    def __post_init__(self) -> None:
        _need(self.tick_ms >= 50, "tick_ms", "must be at least 50")
        _need(
            self.plan_ttl_ms > self.tick_ms,
            "plan_ttl_ms",
            f"must be above tick_ms ({self.tick_ms}), is {self.plan_ttl_ms}",
        )
        _need(self.report_age_ms_max > 0, "report_age_ms_max", "must be above 0")
        _need(self.forget_after_ms > self.report_age_ms_max, "forget_after_ms", "must be above report_age_ms_max")
        _need(self.decisions_max >= 1, "decisions_max", "must be at least 1")


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Everything ``build_policies`` needs."""

    objectives: ObjectivesConfig = field(default_factory=ObjectivesConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    affinity: AffinityConfig = field(default_factory=AffinityConfig)
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
