"""Every metric of the project, once: name, kind, labels, unit, help, buckets, and who reports it.

Code (``deployments/telemetry.py``), panels and alerts all read this table; a name that is not here cannot be exported,
and a test fails when one here is used nowhere.

Names follow Prometheus' conventions: prefix ``tidegate_``, base units (seconds, bytes), the unit as suffix, ``_total``
for counters only. Shares in [0, 1] end in ``_share``, the project's own word for a ratio. Every label is listed in
:data:`LABELS` with the number of values it can have, so the number of series is bounded by this file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from policies.types import LATENCY_BOUNDS_MS

PREFIX = "tidegate_"

OTHER = "other"
"""Label value that stands for everything beyond a label's ``values_max``."""

_NAME = re.compile(r"^tidegate_[a-z][a-z0-9]*(_[a-z0-9]+)*$")


class Kind(StrEnum):
    """Prometheus metric types in use."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Source(StrEnum):
    """Which process exports a metric."""

    GATEWAY = "gateway"
    CONTROLLER = "controller"


@dataclass(frozen=True, slots=True)
class Label:
    """One label and the bound of its values; values beyond it are counted under :data:`OTHER`."""

    name: str
    values_max: int
    help: str


LABELS: Mapping[str, Label] = MappingProxyType(
    {
        label.name: label
        for label in (
            Label("endpoint", 32, "Path as routed, from the gateway's own list of endpoints; unknown paths share one."),
            Label("outcome", 4, "How a request ended: succeeded, failed, cancelled or refused."),
            Label("reason", 64, "Reason code of a decision or an ending; codes are constants in policies/."),
            Label("lever", 16, "Lever a decision moved: affinity, batch, speculation, ..., or guard."),
            Label("verdict", 5, "What became of a decision: better, neutral, worse, overtaken, pending."),
            Label("acted", 2, "true, or false in shadow mode."),
            Label("condition", 32, "Named condition of policies/control/catalogue.py."),
            Label("tenant", 512, "Tenant's name, from configuration or an API key; budgets beyond are not shown."),
            Label("replica", 2_048, "Serve's replica id; its series go when the replica is forgotten."),
            Label("term", 4, "Term of the step model: base, sequence, kv_kilotoken, prefill_token."),
            Label("knob", 10, "Value the controller sets, by its name in policies/steering.py."),
            Label("kind", 6, "Who reports (replica, gateway, fleet), or why a knob is held (frozen, ...)."),
            Label("state", 4, "running, target and unschedulable as Serve says, known as reports say."),
            Label("bound", 3, "What limits a replica's steps: compute, memory, overhead."),
            Label("result", 4, "ok or failed; of lines and spans also dropped, of objectives refused."),
            Label("ending", 4, "How a task ended: success, failure, stopped (at a limit), unknown (nobody told)."),
            Label("phase", 6, "Of a replica's start: schedule, process, load, compile, open, first_token."),
            Label("priority", 3, "Class of a request: interactive, standard or batch."),
            Label("objective", 4, "What was promised: ttft, itl, e2e or availability."),
        )
    }
)

TARGET_LABELS: Mapping[str, str] = MappingProxyType(
    {
        "job": "tidegate-gateway or tidegate-controller, see dashboards/prometheus/prometheus.yml.",
        "instance": "Address that was scraped: one of each gateway.",
        "model": "Model that the application serves; of several, processes set it themselves and that wins.",
    }
)
"""Labels that no process sets: Prometheus adds them to whatever it scrapes, from its own configuration."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family. ``buckets``: upper bounds in ``unit``, ascending, without +Inf; only histograms have them."""

    name: str
    kind: Kind
    source: Source
    labels: tuple[str, ...]
    unit: str
    """``seconds``, ``tokens``, ``blocks``, ``share`` or "" for plain counts; counters carry it before ``_total``."""
    help: str
    buckets: tuple[float, ...] = ()

    @property
    def series_max(self) -> int:
        """Bound of the metric's label sets: the product of its labels' bounds, never above :data:`SERIES_MAX`."""
        product = 1
        for label in self.labels:
            product *= LABELS[label].values_max
        return min(product, SERIES_MAX)


SERIES_MAX = 8_192
"""Most label sets of one metric in one process."""

LATENCY_BUCKETS_S: tuple[float, ...] = tuple(
    ms / 1_000
    for ms in LATENCY_BOUNDS_MS
    if ms in (5, 10, 20, 30, 50, 100, 200, 300, 500, 750, 1_000, 1_500, 2_000, 3_000, 5_000, 10_000, 20_000, 30_000)
    or ms in (60_000, 120_000, 300_000, 600_000)
)
"""5 ms to 10 minutes; a subset of the bounds of :class:`policies.types.Histogram`, so that those add up exactly."""

SPLIT_BUCKETS_S: tuple[float, ...] = (0.0002, 0.0005, 0.001, 0.002, *LATENCY_BUCKETS_S)
"""For parts of a TTFT, of which the gateway's own is far below 5 ms."""

TICK_BUCKETS_S: tuple[float, ...] = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)

START_BUCKETS_S: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1_800.0)
"""Phases of a replica's start, from an open port to weights that are fetched."""

TASK_BUCKETS_S: tuple[float, ...] = (
    0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1_800.0, 3_600.0, 14_400.0, 86_400.0,
)  # fmt: skip
TASK_BUCKETS_CALLS: tuple[float, ...] = (1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 50.0, 100.0, 300.0, 1_000.0, 10_000.0)
TASK_BUCKETS_TOKENS: tuple[float, ...] = tuple(float(n * 10**e) for e in range(2, 8) for n in (1, 3))
TASK_BUCKETS_USD: tuple[float, ...] = tuple(float(f"{n}e{e}") for e in range(-5, 2) for n in (1, 3))
"""Of the last four: time, calls, tokens and cost of one task, from a single short call to an agent's day."""


def _gateway(
    name: str,
    kind: Kind,
    help_: str,
    *labels: str,
    unit: str = "",
    buckets: tuple[float, ...] = LATENCY_BUCKETS_S,
) -> Metric:
    buckets = buckets if kind is Kind.HISTOGRAM else ()
    return Metric(PREFIX + name, kind, Source.GATEWAY, labels, unit, help_, buckets)


def _control(
    name: str, kind: Kind, help_: str, *labels: str, unit: str = "", buckets: tuple[float, ...] = TICK_BUCKETS_S
) -> Metric:
    buckets = buckets if kind is Kind.HISTOGRAM else ()
    return Metric(PREFIX + name, kind, Source.CONTROLLER, labels, unit, help_, buckets)


_COUNTER, _GAUGE, _HISTOGRAM = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

_GATEWAY_METRICS: tuple[Metric, ...] = (
    _gateway(
        "requests_total", _COUNTER, "Requests that ended, each once, by outcome.", "endpoint", "outcome", "reason"
    ),
    _gateway("met_requests_total", _COUNTER, "Requests that kept the promises of their class.", "priority"),
    _gateway(
        "objective_requests_total", _COUNTER, "Requests of which one promise was judged.", "priority", "objective"
    ),
    _gateway("objective_missed_total", _COUNTER, "Those that broke this promise.", "priority", "objective"),
    _gateway(
        "ttft_seconds",
        _HISTOGRAM,
        "Arrival to the first body byte of a stream.",
        "endpoint",
        unit="seconds",
    ),
    _gateway(
        "queue_seconds",
        _HISTOGRAM,
        "Part of a stream's TTFT: waiting in the gateway, for its turn or for a replica.",
        "priority",
        unit="seconds",
        buckets=SPLIT_BUCKETS_S,
    ),
    _gateway(
        "route_seconds",
        _HISTOGRAM,
        "Part of a stream's TTFT: the gateway's own work, the client's sending of the body, attempts that failed.",
        unit="seconds",
        buckets=SPLIT_BUCKETS_S,
    ),
    _gateway(
        "engine_ttft_seconds",
        _HISTOGRAM,
        "Part of a stream's TTFT: from the dispatch of the attempt that answered to its first body byte.",
        unit="seconds",
        buckets=SPLIT_BUCKETS_S,
    ),
    _gateway("itl_seconds", _HISTOGRAM, "Gap between two chunks of a stream.", unit="seconds"),
    _gateway("e2e_seconds", _HISTOGRAM, "Arrival to the end of a successful response.", "endpoint", unit="seconds"),
    _gateway(
        "ttft_error_seconds",
        _HISTOGRAM,
        "Absolute error of the router's TTFT prediction for the replica it chose.",
        unit="seconds",
    ),
    _gateway("prompt_tokens_total", _COUNTER, "Prompt tokens of ended requests, as engines counted.", unit="tokens"),
    _gateway("output_tokens_total", _COUNTER, "Output tokens of ended requests, as engines counted.", unit="tokens"),
    _gateway(
        "predicted_hit_tokens_total", _COUNTER, "Prompt tokens believed cached where they were sent.", unit="tokens"
    ),
    _gateway("inflight_requests", _GAUGE, "Requests between arrival and their single end.", unit="requests"),
    _gateway("queued_requests", _GAUGE, "Requests that wait for their turn or for a replica.", unit="requests"),
    _gateway("queue_tokens", _GAUGE, "Cost in tokens of the requests that wait for their turn.", unit="tokens"),
    _gateway("serving_tokens_per_second", _GAUGE, "Tokens the fleet is believed to take from this gateway's queue."),
    _gateway("retry_budget_attempts", _GAUGE, "Extra attempts this gateway may make now.", unit="attempts"),
    _gateway("hedges_total", _COUNTER, "Second attempts beside the first of requests that ended."),
    _gateway("resumes_total", _COUNTER, "Streams continued at another replica, of requests that ended."),
    _gateway("ejected_replicas", _GAUGE, "Replicas this gateway leaves alone now.", unit="replicas"),
    _gateway("ejections_total", _COUNTER, "Replicas this gateway began to leave alone, by why.", "reason"),
    _gateway("quarantined_requests", _GAUGE, "Requests refused because they broke two replicas.", unit="requests"),
    _gateway("retries_total", _COUNTER, "Attempts after the first, by why the last one failed.", "reason"),
    _gateway("routed_total", _COUNTER, "Routing choices, by reason.", "reason"),
    _gateway("plan_age_seconds", _GAUGE, "Age of the plan this gateway acts on; NaN before the first.", unit="seconds"),
    _gateway("prefix_index_blocks", _GAUGE, "Blocks in the prefix index.", unit="blocks"),
    _gateway("auth_keys", _GAUGE, "API keys that are accepted now; not exported where none is needed."),
    _gateway("auth_key_reloads_total", _COUNTER, "Reads of a key file that had changed, good or not.", "result"),
    _gateway("objectives_reloads_total", _COUNTER, "Objectives that came with user_config, taken or not.", "result"),
    _gateway("tasks_total", _COUNTER, "Tasks that are over, each once, by how they ended.", "ending"),
    _gateway("open_tasks", _GAUGE, "Tasks remembered whose outcome is not known.", unit="tasks"),
    _gateway(
        "task_e2e_seconds",
        _HISTOGRAM,
        "Arrival of a task's first call to the end of its last one.",
        "ending",
        unit="seconds",
        buckets=TASK_BUCKETS_S,
    ),
    _gateway("task_calls", _HISTOGRAM, "Calls of a task.", "ending", unit="calls", buckets=TASK_BUCKETS_CALLS),
    _gateway(
        "task_tokens",
        _HISTOGRAM,
        "Prompt and output tokens of a task.",
        "ending",
        unit="tokens",
        buckets=TASK_BUCKETS_TOKENS,
    ),
    _gateway(
        "task_cost_usd",
        _HISTOGRAM,
        "What a task's tokens cost its tenant.",
        "ending",
        unit="usd",
        buckets=TASK_BUCKETS_USD,
    ),
    _gateway("tenant_requests_total", _COUNTER, "Requests of a tenant that its limits let in.", "tenant"),
    _gateway("tenant_refused_total", _COUNTER, "Requests of a tenant that its own limits refused.", "tenant"),
    _gateway(
        "tenant_prompt_tokens_total", _COUNTER, "Prompt tokens a tenant was charged for.", "tenant", unit="tokens"
    ),
    _gateway(
        "tenant_cached_tokens_total", _COUNTER, "Part of them that was found in the cache.", "tenant", unit="tokens"
    ),
    _gateway(
        "tenant_output_tokens_total", _COUNTER, "Output tokens a tenant was charged for.", "tenant", unit="tokens"
    ),
    _gateway("tenant_spent_usd_total", _COUNTER, "What a tenant's tokens cost it.", "tenant", unit="usd"),
    _gateway("recording_lines_total", _COUNTER, "Lines of this gateway's recording, written or dropped.", "result"),
    _gateway(
        "trace_spans_total",
        _COUNTER,
        "Spans a collector took, did not take, or that found no room in the queue.",
        "result",
    ),
)

_CONTROL_METRICS: tuple[Metric, ...] = (
    _control("control_ticks_total", _COUNTER, "Ticks of the control loop.", "result"),
    _control("control_tick_seconds", _HISTOGRAM, "Duration of one tick.", unit="seconds"),
    _control(
        "control_recording_lines_total", _COUNTER, "Lines of the controller's recording, written or dropped.", "result"
    ),
    _control("control_ledger_lines_total", _COUNTER, "Lines of the ledger's file, written or dropped.", "result"),
    _control("control_verdicts_total", _COUNTER, "Decisions whose effect was judged.", "lever", "verdict"),
    _control("control_overrides", _GAUGE, "Overrides in force, values and modes."),
    _control("control_holds", _GAUGE, "Knobs and levers that the guard rails hold.", "kind"),
    _control("control_met_share", _GAUGE, "Demand of the last tick served within its objectives.", unit="share"),
    _control("control_successes_per_usd", _GAUGE, "Tasks, or requests within objectives, per dollar.", unit="usd"),
    _control("control_usd_per_hour", _GAUGE, "Price of all replicas that run; 1 each where none is configured."),
    _control("control_predicted_met_share", _GAUGE, "Predicted by the decision judged last.", "lever", unit="share"),
    _control("control_realised_met_share", _GAUGE, "Measured after the decision judged last.", "lever", unit="share"),
    _control("control_objective_ttft_seconds", _GAUGE, "TTFT promised to a class.", "priority", unit="seconds"),
    _control("control_objective_itl_seconds", _GAUGE, "Token gap promised to a class.", "priority", unit="seconds"),
    _control(
        "control_objective_budget_share",
        _GAUGE,
        "Share of a class's requests that may break a promise.",
        "priority",
        "objective",
        unit="share",
    ),
    _control("control_plan_seq", _GAUGE, "Sequence number of the last plan of this controller's life."),
    _control("control_decisions_total", _COUNTER, "Entries written to the ledger.", "lever", "reason", "acted"),
    _control("control_condition_active", _GAUGE, "1 while a named condition holds.", "condition"),
    _control("control_reporters", _GAUGE, "Replicas and gateways known from their reports.", "kind"),
    _control("control_signal_age_seconds", _GAUGE, "Age of the oldest last report.", "kind", unit="seconds"),
    _control(
        "control_signal_confidence_share",
        _GAUGE,
        "How far signals can be trusted: recent, complete and long enough; silent reporters count as 0.",
        "kind",
        unit="share",
    ),
    _control("control_retries_per_second", _GAUGE, "Extra attempts: retries, hedges, resumed streams."),
    _control("control_repeats_per_second", _GAUGE, "Arrivals whose body was refused or failed before."),
    _control("class_demand_per_second", _GAUGE, "Requests of a class that ended and count.", "priority"),
    _control("class_met_share", _GAUGE, "Part of them that kept their promises.", "priority", unit="share"),
    _control("tenant_tokens_per_second", _GAUGE, "Prompt and output tokens of a tenant's requests.", "tenant"),
    _control("tenant_met_share", _GAUGE, "A tenant's requests that kept their promises.", "tenant", unit="share"),
    _control("tenant_budget_usd", _GAUGE, "A tenant's budget of its present period.", "tenant", unit="usd"),
    _control(
        "tenant_budget_used_usd",
        _GAUGE,
        "Spent of it, set aside, or held by gateways that are gone.",
        "tenant",
        unit="usd",
    ),
    _control("control_affinity_strength_share", _GAUGE, "Prefix-affinity strength of the plan.", unit="share"),
    _control("replicas", _GAUGE, "Engine replicas.", "state"),
    _control(
        "replica_start_seconds",
        _HISTOGRAM,
        "Phases of starts whose port opened; first_token waits for the first request.",
        "phase",
        unit="seconds",
        buckets=START_BUCKETS_S,
    ),
    _control("replica_running_seqs", _GAUGE, "Sequences in the batch.", "replica", unit="seqs"),
    _control("replica_waiting_seqs", _GAUGE, "Sequences that wait in the engine.", "replica", unit="seqs"),
    _control("replica_kv_used_share", _GAUGE, "KV cache in use.", "replica", unit="share"),
    _control("replica_busy_share", _GAUGE, "Share of time inside engine steps.", "replica", unit="share"),
    _control(
        "replica_gpu_utilisation_share",
        _GAUGE,
        "NVML's utilisation; NaN where there is no such device.",
        "replica",
        unit="share",
    ),
    _control(
        "replica_step_coefficient_seconds",
        _GAUGE,
        "Learned step model: seconds per step, sequence, 1,000 KV tokens, prefill token.",
        "replica",
        "term",
        unit="seconds",
    ),
    _control("replica_signal_confidence_share", _GAUGE, "Trust in what it says.", "replica", unit="share"),
    _control(
        "replica_compute_share", _GAUGE, "Peak FLOP/s used while busy; NaN: unknown device.", "replica", unit="share"
    ),
    _control(
        "replica_memory_share", _GAUGE, "Peak memory bandwidth used while busy, likewise.", "replica", unit="share"
    ),
    _control("replica_bound", _GAUGE, "1 for what limits its steps.", "replica", "bound"),
    _control(
        "replica_gpu_memory_utilisation_share",
        _GAUGE,
        "NVML: time in which device memory was read or written.",
        "replica",
        unit="share",
    ),
    _control("replica_gpu_memory_used_bytes", _GAUGE, "NVML: device memory in use.", "replica", unit="bytes"),
    _control("replica_gpu_power_watts", _GAUGE, "NVML: power drawn.", "replica", unit="watts"),
    _control("replica_gpu_power_limit_watts", _GAUGE, "NVML: power limit in force.", "replica", unit="watts"),
    _control("replica_gpu_temperature_celsius", _GAUGE, "NVML: hottest device.", "replica", unit="celsius"),
    _control("replica_gpu_throttle_reasons", _GAUGE, "NVML: reasons that hold clocks down now.", "replica"),
    _control("replica_gpu_ecc_errors", _GAUGE, "NVML: uncorrected memory errors since the driver's start.", "replica"),
    _control("replica_gpu_xid_errors", _GAUGE, "NVML: critical XID events since the replica's start.", "replica"),
    _control("replica_knob", _GAUGE, "Engine setting in force.", "replica", "knob"),
    _control(
        "replica_itl_quantile_seconds",
        _GAUGE,
        "Token gap of the last window at the objectives' quantile.",
        "replica",
        unit="seconds",
    ),
    _control("replica_preemptions_total", _COUNTER, "Sequences put back for lack of KV cache.", "replica"),
    _control("replica_draft_tokens_total", _COUNTER, "Draft tokens verified.", "replica", unit="tokens"),
    _control("replica_accepted_draft_tokens_total", _COUNTER, "Draft tokens kept.", "replica", unit="tokens"),
    _control(
        "replica_prefix_query_tokens_total", _COUNTER, "Prompt tokens looked up in the cache.", "replica", unit="tokens"
    ),
    _control(
        "replica_prefix_hit_tokens_total", _COUNTER, "Prompt tokens found in the cache.", "replica", unit="tokens"
    ),
)

CATALOGUE: Mapping[str, Metric] = MappingProxyType({m.name: m for m in _GATEWAY_METRICS + _CONTROL_METRICS})
"""All metrics by full name."""

ALL: tuple[Metric, ...] = _GATEWAY_METRICS + _CONTROL_METRICS
"""The rows of :data:`CATALOGUE` in order, duplicates included (there must be none)."""

OF_APPLICATION: frozenset[str] = frozenset(
    name
    for name in CATALOGUE
    if name.startswith((f"{PREFIX}auth_", f"{PREFIX}task", f"{PREFIX}tenant_budget", f"{PREFIX}trace_"))
    or name == f"{PREFIX}open_tasks"
    or (name.startswith(f"{PREFIX}tenant_") and name.endswith("_total"))
)
"""Metrics of the application as a whole. All others have the label ``model`` where it serves several."""


def problems(metric: Metric) -> list[str]:
    """What is wrong with one row, in words; empty when it follows the conventions."""
    found: list[str] = []
    if not _NAME.match(metric.name):
        found.append(f"{metric.name}: must be snake_case and start with {PREFIX}")
    if (metric.kind is Kind.COUNTER) != metric.name.endswith("_total"):
        found.append(f"{metric.name}: _total is for counters, and counters only")
    stem = metric.name.removesuffix("_total")
    if metric.unit and not stem.endswith("_" + metric.unit):
        found.append(f"{metric.name}: unit {metric.unit!r} must be the suffix")
    if re.search(r"(_ms|_us|_ns|_minutes|_kb|_mb|_gib|_percent)(_total)?$", metric.name):
        found.append(f"{metric.name}: only base units (seconds, bytes, shares)")
    if (metric.kind is Kind.HISTOGRAM) != bool(metric.buckets):
        found.append(f"{metric.name}: buckets belong to histograms, and each needs them")
    if list(metric.buckets) != sorted(set(metric.buckets)):
        found.append(f"{metric.name}: buckets must ascend")
    found += [f"{metric.name}: label {label!r} is not in LABELS" for label in metric.labels if label not in LABELS]
    if len(set(metric.labels)) != len(metric.labels):
        found.append(f"{metric.name}: a label appears twice")
    if not metric.help.endswith("."):
        found.append(f"{metric.name}: help must be a sentence")
    return found
