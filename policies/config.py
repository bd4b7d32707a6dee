"""One frozen dataclass per policy family, units in names, checked on construction.

``deployments/settings.py`` mirrors these from ``serve_config.yaml``; the simulator builds them directly. A value out of
range raises :class:`ConfigError` naming the field, so that a wrong configuration never reaches a policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from policies.config_base import need
from policies.config_guard import GuardConfig, SpeculationConfig
from policies.config_objectives import ModelObjectives, check_part
from policies.types import Mode, Priority, StepCoefficients


@dataclass(frozen=True, slots=True)
class ObjectivesConfig:
    """What users were promised; every loop steers by these."""

    ttft_ms: float = 2_000.0
    """Time to first token at ``quantile``."""
    itl_ms: float = 200.0
    """Gap between two tokens of a stream at ``quantile``."""
    quantile: float = 0.95
    e2e_ms: float | None = None
    """Whole answer at ``quantile``; ``None``: no promise."""
    availability: float = 0.99
    """Share of requests that must not fail for a fault of ours."""
    models: Mapping[str, ModelObjectives] = field(default_factory=dict)
    """Objectives of single models, by the name clients ask for; ``policies/objectives.py`` puts them together."""

    def __post_init__(self) -> None:
        check_part(self.ttft_ms, self.itl_ms, self.e2e_ms, self.quantile, self.availability)
        for model, part in self.models.items():
            for name in part.classes:
                path = f"models.{model}.classes.{name}"
                need(name in set(Priority), path, f"is no class; there are: {', '.join(Priority)}")


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """Bounds on what one gateway holds at once."""

    inflight_requests_max: int = 1_000
    inflight_tokens_max: int = 4_000_000
    """Prompt plus maximal output tokens, summed over requests in flight."""
    output_tokens_estimate: int = 256
    """Stands for the maximal output tokens of a request whose client names none."""
    retry_after_s: float = 1.0
    """Told to refused clients at least."""
    retry_after_s_max: float = 300.0
    """Told to refused clients at most, however long the queue."""
    retry_after_jitter_share: float = 0.5
    """Each ``Retry-After`` is lengthened by up to this share, drawn evenly: those refused together do not come back
    together."""
    no_replica_wait_ms: float = 30_000.0
    """How long a request waits for the first replica to appear before it ends with 503."""
    engine_wait_share: float | None = 0.25
    """A request is sent on while some replica would begin with it within this share of the TTFT objective; else it
    waits here, where order, deadlines and leaving clients still count. ``None``: all are sent on at once."""
    queue_requests_max: int = 500
    """Requests that wait here; more are refused."""
    queue_tokens_max: int = 2_000_000
    """Their prompt plus expected output tokens, likewise."""
    forecast_share: float = 0.8
    """A request is let in while its predicted TTFT is below this share of what it is due; the rest is for what a
    prediction cannot know."""
    stretch: float = 2.0
    """A request whose TTFT on an idle fleet misses the objective is due at this multiple of it instead."""
    class_floor_share: float = 0.05
    """A class that waits gets at least this share of what is sent on, however much the classes above ask for."""
    adaptive: bool = True
    """The controller may move ``forecast_share`` and the classes' cut-offs."""
    brownout_share: float = 0.5
    """When what waits takes this share of the TTFT objective to serve, outputs are capped for tenants that allow it."""

    def __post_init__(self) -> None:
        need(self.inflight_requests_max >= 1, "inflight_requests_max", "must be at least 1")
        need(self.inflight_tokens_max >= 1, "inflight_tokens_max", "must be at least 1")
        need(self.output_tokens_estimate >= 1, "output_tokens_estimate", "must be at least 1")
        need(self.retry_after_s > 0, "retry_after_s", "must be above 0")
        need(self.retry_after_s_max >= self.retry_after_s, "retry_after_s_max", "must not be below retry_after_s")
        need(0 <= self.retry_after_jitter_share <= 2, "retry_after_jitter_share", "must be in [0, 2]")
        share = self.engine_wait_share
        need(share is None or 0 < share < 1, "engine_wait_share", "must be between 0 and 1, or null")
        need(self.queue_requests_max >= 0, "queue_requests_max", "must not be negative")
        need(self.queue_tokens_max >= 0, "queue_tokens_max", "must not be negative")
        need(0 < self.forecast_share <= 1, "forecast_share", "must be in (0, 1]")
        need(self.stretch >= 1, "stretch", "must be at least 1")
        need(0 <= self.class_floor_share <= 0.3, "class_floor_share", "must be in [0, 0.3]")
        need(self.brownout_share > 0, "brownout_share", "must be above 0")
        need(self.no_replica_wait_ms >= 0, "no_replica_wait_ms", "must not be negative")


@dataclass(frozen=True, slots=True)
class ClassConfig:
    """One class of requests."""

    ttft_ms: float | None = None
    """Its TTFT objective; ``None``: ``objectives.ttft_ms``."""
    itl_ms: float | None = None
    """Likewise, and so on."""
    e2e_ms: float | None = None
    quantile: float | None = None
    availability: float | None = None
    shed_share: float = 1.0
    """Refused while more important requests that wait take this share of ``objectives.ttft_ms`` to serve."""
    waits_for_start: bool = True
    """Requests for a model that sleeps are held until it has started; else they are refused, and wake it all the
    same."""

    def __post_init__(self) -> None:
        check_part(self.ttft_ms, self.itl_ms, self.e2e_ms, self.quantile, self.availability)
        need(self.shed_share > 0, "shed_share", "must be above 0")


@dataclass(frozen=True, slots=True)
class ClassesConfig:
    """Classes of requests, most important first."""

    interactive: ClassConfig = field(default_factory=ClassConfig)
    standard: ClassConfig = field(default_factory=lambda: ClassConfig(shed_share=0.5))
    batch: ClassConfig = field(default_factory=lambda: ClassConfig(ttft_ms=60_000.0, shed_share=0.1))

    def of(self, priority: Priority) -> ClassConfig:
        """The configuration of one class."""
        config: ClassConfig = getattr(self, priority.value)
        return config


@dataclass(frozen=True, slots=True)
class TenantConfig:
    """What one tenant may do. Limits are those of the whole application; each gateway enforces its part."""

    weight: float = 1.0
    """Share of the fleet beside other tenants that wait."""
    class_max: Priority = Priority.INTERACTIVE
    """The most important class it may ask for."""
    class_default: Priority = Priority.STANDARD
    """The class of requests that ask for none."""
    requests_per_minute_max: int | None = None
    tokens_per_minute_max: int | None = None
    """Prompt plus output tokens."""
    concurrent_requests_max: int | None = None
    concurrent_tokens_max: int | None = None
    """Prompt plus largest output tokens of its requests in flight."""
    budget_usd_max: float | None = None
    """Money for one period, by ``prices``."""
    budget_period_s: float = 86_400.0
    isolate_cache: bool = True
    """Its prefixes in the KV cache are its own: nobody else can tell from speed what they hold."""
    brownout_output_tokens_max: int | None = None
    """Under pressure its outputs are capped at this; ``None``: never."""

    def __post_init__(self) -> None:
        need(self.weight > 0, "weight", f"must be above 0, is {self.weight}")
        need(
            self.class_default.rank >= self.class_max.rank,
            "class_default",
            f"must not be more important than class_max ({self.class_max}), is {self.class_default}",
        )
        for name in (
            "requests_per_minute_max", "tokens_per_minute_max", "concurrent_requests_max", "concurrent_tokens_max",
            "brownout_output_tokens_max",
        ):  # fmt: skip
            value = getattr(self, name)
            need(value is None or value >= 1, name, f"must be at least 1, is {value}")
        need(self.budget_usd_max is None or self.budget_usd_max >= 0, "budget_usd_max", "must not be negative")
        need(self.budget_period_s >= 1, "budget_period_s", "must be at least 1")


DEFAULT_TENANT = "default"
"""Tenant of requests without a key, and whose limits hold for tenants that are not configured."""


@dataclass(frozen=True, slots=True)
class PricesConfig:
    """What tokens cost tenants, and what a replica costs."""

    prompt_usd_per_mtok: float = 0.0
    """A million computed prompt tokens."""
    cached_usd_per_mtok: float = 0.0
    """A million prompt tokens found in the cache."""
    output_usd_per_mtok: float = 0.0
    replica_usd_per_hour: float = 0.0
    """What one engine replica costs the operator."""
    missed_usd: float = 0.0
    """What a request costs the operator that is not served in time: what warm replicas are weighed by."""

    def __post_init__(self) -> None:
        names = (
            "prompt_usd_per_mtok",
            "cached_usd_per_mtok",
            "output_usd_per_mtok",
            "replica_usd_per_hour",
            "missed_usd",
        )
        for name in names:
            need(getattr(self, name) >= 0, name, "must not be negative")


@dataclass(frozen=True, slots=True)
class TasksConfig:
    """Tasks: the calls that serve one goal of a user, such as an agent's."""

    tasks_max: int = 10_000
    """Tasks one gateway remembers; the one without calls for longest goes."""
    idle_s_max: float = 3_600.0
    """A task without calls for this long is forgotten."""
    calls_max: int | None = None
    """Calls of a task that names no budget of its own."""
    tokens_max: int | None = None
    """Prompt plus output tokens of a task, likewise."""
    credit_tokens_max: int = 65_536
    """Tokens by which an older task may be served ahead of newcomers."""

    def __post_init__(self) -> None:
        need(self.tasks_max >= 1, "tasks_max", "must be at least 1")
        need(self.idle_s_max > 0, "idle_s_max", "must be above 0")
        need(self.calls_max is None or self.calls_max >= 1, "calls_max", "must be at least 1")
        need(self.tokens_max is None or self.tokens_max >= 1, "tokens_max", "must be at least 1")
        need(self.credit_tokens_max >= 0, "credit_tokens_max", "must not be negative")


@dataclass(frozen=True, slots=True)
class FaultsConfig:
    """When a request may be sent again, and which replicas are left alone."""

    attempts_max: int = 3
    """Replicas one request may be sent to, the first included."""
    retry_share_max: float = 0.2
    """Extra attempts (retries, hedges, resumed streams) as a share of requests that were answered (token bucket)."""
    retry_burst: int = 10
    """Extra attempts allowed before any request has paid into the budget, all gateways together; the budget never
    holds more."""
    retry_pause_ms: float = 50.0
    """Mean pause before an attempt is repeated, drawn from half to one and a half of it."""
    resume: bool = True
    """A stream that breaks off goes on at another replica where that can be exact."""
    hedge_after_factor: float | None = None
    """An interactive request without its first byte after this multiple of its predicted TTFT is sent to a second
    replica as well; ``None``: never."""
    hedge_after_ms_min: float = 100.0
    """Never earlier than this."""
    breaker_failures: int = 5
    """Failures of different requests in a row after which a replica gets none."""
    eject_ms: float = 5_000.0
    """Time without requests after the first ejection; doubled each time until it works again."""
    eject_ms_max: float = 120_000.0
    ejected_share_max: float = 0.5
    """Largest share of replicas that are left alone for being slow or failing more than their peers. Does not count
    those whose failures in a row opened their breaker."""
    probation_requests: int = 3
    """Requests a replica must answer after an ejection before it counts as well."""
    grey_factor: float = 3.0
    """A replica so many times slower than its own prediction, compared with its peers, is ejected."""
    grey_samples_min: int = 8
    """First bytes a replica must have given for that, since the last judgement."""
    quarantine_s: float = 600.0
    """A request that broke off on two replicas is refused for this long when it comes again."""
    draining_refusals_max: int = 16
    """Draining replicas one request may meet; their refusals cost neither an attempt nor budget."""

    def __post_init__(self) -> None:
        need(self.attempts_max >= 1, "attempts_max", "must be at least 1")
        need(0 <= self.retry_share_max <= 1, "retry_share_max", "must be in [0, 1]")
        need(self.retry_burst >= 0, "retry_burst", "must not be negative")
        need(self.draining_refusals_max >= 1, "draining_refusals_max", "must be at least 1")
        need(self.retry_pause_ms >= 0, "retry_pause_ms", "must not be negative")
        factor = self.hedge_after_factor
        need(factor is None or factor >= 1, "hedge_after_factor", "must be at least 1, or null")
        need(self.hedge_after_ms_min >= 0, "hedge_after_ms_min", "must not be negative")
        need(self.breaker_failures >= 1, "breaker_failures", "must be at least 1")
        need(self.eject_ms > 0, "eject_ms", "must be above 0")
        need(self.eject_ms_max >= self.eject_ms, "eject_ms_max", "must not be below eject_ms")
        need(0 <= self.ejected_share_max < 1, "ejected_share_max", "must be in [0, 1)")
        need(self.probation_requests >= 1, "probation_requests", "must be at least 1")
        need(self.grey_factor > 1, "grey_factor", "must be above 1")
        need(self.grey_samples_min >= 1, "grey_samples_min", "must be at least 1")
        need(self.quarantine_s >= 0, "quarantine_s", "must not be negative")


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
        need(16 <= self.block_bytes <= 65_536, "block_bytes", "must be in 16..65536")
        need(self.index_blocks_max >= 1, "index_blocks_max", "must be at least 1")
        need(self.request_blocks_max >= 1, "request_blocks_max", "must be at least 1")
        need(self.load_bound >= 1, "load_bound", f"must be at least 1, is {self.load_bound}")
        need(self.load_slack_tokens >= 0, "load_slack_tokens", "must not be negative")
        need(0 <= self.affinity_strength <= 1, "affinity_strength", "must be in [0, 1]")
        need(self.late_ms_max >= 0, "late_ms_max", "must not be negative")
        need(self.sample_age_ms_max > 0, "sample_age_ms_max", "must be above 0")
        need(self.strategy in ("affinity", "random"), "strategy", "must be 'affinity' or 'random'")


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
        need(self.running_seqs_min >= 1, "running_seqs_min", "must be at least 1")
        need(self.step_tokens_min >= 16, "step_tokens_min", "must be at least 16")
        need(self.step_tokens_up_factor_max > 1, "step_tokens_up_factor_max", "must be above 1")
        need(self.settle_ticks >= 0, "settle_ticks", "must not be negative")
        need(self.samples_min >= 1, "samples_min", "must be at least 1")
        need(0 < self.preemption_brake < 1, "preemption_brake", "must be between 0 and 1")


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
        need(0 < self.step <= 1, "step", "must be in (0, 1]")
        need(0 <= self.strength_min <= 1, "strength_min", "must be in [0, 1]")
        need(self.query_tokens_min >= 1, "query_tokens_min", "must be at least 1")


@dataclass(frozen=True, slots=True)
class ScalingConfig:
    """How many replicas: demand in tokens over what one replica carries within the objectives."""

    enabled: bool = True
    replicas_min: int = 1
    """0: the model sleeps while nobody asks for it, and the next request wakes it."""
    replicas_max: int = 2
    zero_after_s: float = 600.0
    """A model that may sleep does so when there was no request for this long. Used with ``replicas_min`` 0 only, as are
    the next five."""
    start_s_prior: float = 60.0
    """What a start is taken to last before one was measured."""
    start_s_max: float = 900.0
    """A start that takes longer has failed."""
    start_tries_max: int = 3
    """Failed starts in a row after which the model sleeps again ..."""
    start_backoff_s: float = 60.0
    """... and is not woken for this long, doubled each time up to sixteen times as long."""
    hold_s_max: float = 300.0
    """Longest time a request is held while the model starts."""
    up_ticks: int = 3
    """Consecutive ticks that must ask for more before the target rises."""
    down_window_s: float = 60.0
    """The target falls to the highest recommendation of this window."""
    headroom: float = 0.8
    """Share of one replica's capacity that is planned with."""
    up_replicas_max: int = 4
    """Largest rise of one decision."""
    warm_max: int = 0
    """Most replicas that stand by, started and out of rotation; how many do follows from ``prices``."""
    warm_min: int = 0
    """Fewest of them, whatever they cost."""
    asleep_price_share: float = 1.0
    """Part of a replica's price that one costs whose engine sleeps; 1: nothing is saved, and none does."""
    wake_s: float = 5.0
    """What waking such an engine takes."""
    inflight_target: int = 8
    """Open requests per replica, used by the local rule when no plan is in force."""
    forecast: bool = True
    """Replicas are for the load when they are ready, not for that of now, once forecasts of it have proved true."""
    forecast_quantile: float = 0.9
    """Odds with which the load stays below what replicas are there for."""
    seasons_s: tuple[float, ...] = (86_400.0, 604_800.0)
    """Lengths of the seasons a load may have: a day, a week. Their history is kept while the controller lives."""

    def __post_init__(self) -> None:
        need(self.replicas_min >= 0, "replicas_min", "must not be negative")
        need(self.replicas_max >= 1, "replicas_max", "must be at least 1")
        need(
            self.replicas_max >= self.replicas_min,
            "replicas_max",
            f"must not be below replicas_min ({self.replicas_min}), is {self.replicas_max}",
        )
        for name in ("zero_after_s", "start_s_prior", "start_s_max", "start_backoff_s", "hold_s_max"):
            need(getattr(self, name) > 0, name, "must be above 0")
        need(self.start_tries_max >= 1, "start_tries_max", "must be at least 1")
        need(self.warm_min >= 0, "warm_min", "must not be negative")
        need(0 <= self.asleep_price_share <= 1, "asleep_price_share", "must be in [0, 1]")
        need(self.wake_s > 0, "wake_s", "must be above 0")
        need(
            self.warm_max >= self.warm_min,
            "warm_max",
            f"must not be below warm_min ({self.warm_min}), is {self.warm_max}",
        )
        need(self.up_ticks >= 1, "up_ticks", "must be at least 1")
        need(self.down_window_s >= 0, "down_window_s", "must not be negative")
        need(0 < self.headroom <= 1, "headroom", "must be in (0, 1]")
        need(self.up_replicas_max >= 1, "up_replicas_max", "must be at least 1")
        need(self.inflight_target >= 1, "inflight_target", "must be at least 1")
        need(0.5 <= self.forecast_quantile < 1, "forecast_quantile", "must be in [0.5, 1)")
        need(len(self.seasons_s) <= 4, "seasons_s", f"must be at most 4, are {len(self.seasons_s)}")
        need(all(600 <= s <= 4e6 for s in self.seasons_s), "seasons_s", "must each be in 600 to 4,000,000")


@dataclass(frozen=True, slots=True)
class ControlConfig:
    """The controller's clock and memory."""

    mode: Mode = Mode.ACT
    joint: bool = True
    """All levers are weighed against each other; ``False``: each acts on its own (a baseline for comparison)."""
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
        need(self.tick_ms >= 50, "tick_ms", "must be at least 50")
        need(
            self.plan_ttl_ms > self.tick_ms,
            "plan_ttl_ms",
            f"must be above tick_ms ({self.tick_ms}), is {self.plan_ttl_ms}",
        )
        need(self.report_age_ms_max > 0, "report_age_ms_max", "must be above 0")
        need(self.forget_after_ms > self.report_age_ms_max, "forget_after_ms", "must be above report_age_ms_max")
        need(self.decisions_max >= 1, "decisions_max", "must be at least 1")


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Everything ``build_policies`` needs."""

    objectives: ObjectivesConfig = field(default_factory=ObjectivesConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    classes: ClassesConfig = field(default_factory=ClassesConfig)
    tenants: Mapping[str, TenantConfig] = field(default_factory=dict)
    """By name; :data:`DEFAULT_TENANT` holds for those that are not here."""
    prices: PricesConfig = field(default_factory=PricesConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)
    gateways: int = 1
    """Gateways of the application: budgets and limits of the whole are split between them."""
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    affinity: AffinityConfig = field(default_factory=AffinityConfig)
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)

    def tenant(self, name: str) -> TenantConfig:
        """What ``name`` may do."""
        return self.tenants.get(name) or self.tenants.get(DEFAULT_TENANT) or _ANY_TENANT


_ANY_TENANT = TenantConfig()
