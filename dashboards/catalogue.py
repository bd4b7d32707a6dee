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
            Label("endpoint", 24, "Path as routed, from the gateway's own list of endpoints; unknown paths share one."),
            Label("outcome", 4, "How a request ended: succeeded, failed, cancelled or refused."),
            Label("reason", 64, "Reason code of a decision or an ending; codes are constants in policies/."),
            Label("lever", 16, "Knob a decision moved: replicas, batch, affinity."),
            Label("acted", 2, "true, or false in shadow mode."),
            Label("condition", 32, "Named condition of policies/control/detect.py."),
            Label("replica", 2_048, "Serve's replica id; its series go when the replica is forgotten."),
            Label("term", 4, "Term of the step model: base, sequence, kv_kilotoken, prefill_token."),
            Label("knob", 3, "Engine setting in force: running_seqs_max, step_tokens_max, speculative_depth."),
            Label("kind", 3, "Who reports to the controller: replica, gateway, fleet."),
            Label("state", 3, "running and target as Serve says, known as reports say."),
            Label("result", 2, "ok or failed; of lines to be recorded: ok or dropped."),
        )
    }
)


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

TICK_BUCKETS_S: tuple[float, ...] = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


def _gateway(name: str, kind: Kind, help_: str, *labels: str, unit: str = "") -> Metric:
    buckets = LATENCY_BUCKETS_S if kind is Kind.HISTOGRAM else ()
    return Metric(PREFIX + name, kind, Source.GATEWAY, labels, unit, help_, buckets)


def _control(name: str, kind: Kind, help_: str, *labels: str, unit: str = "") -> Metric:
    buckets = TICK_BUCKETS_S if kind is Kind.HISTOGRAM else ()
    return Metric(PREFIX + name, kind, Source.CONTROLLER, labels, unit, help_, buckets)


_COUNTER, _GAUGE, _HISTOGRAM = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

_GATEWAY_METRICS: tuple[Metric, ...] = (
    _gateway(
        "requests_total", _COUNTER, "Requests that ended, each once, by outcome.", "endpoint", "outcome", "reason"
    ),
    _gateway(
        "ttft_seconds",
        _HISTOGRAM,
        "Arrival to the first body byte of a stream.",
        "endpoint",
        unit="seconds",
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
    _gateway("queued_requests", _GAUGE, "Requests that wait for a replica.", unit="requests"),
    _gateway("retries_total", _COUNTER, "Attempts after the first, by why the last one failed.", "reason"),
    _gateway("routed_total", _COUNTER, "Routing choices, by reason.", "reason"),
    _gateway("plan_age_seconds", _GAUGE, "Age of the plan this gateway acts on; NaN before the first.", unit="seconds"),
    _gateway("prefix_index_blocks", _GAUGE, "Blocks in the prefix index.", unit="blocks"),
    _gateway("recording_lines_total", _COUNTER, "Lines of this gateway's recording, written or dropped.", "result"),
)

_CONTROL_METRICS: tuple[Metric, ...] = (
    _control("control_ticks_total", _COUNTER, "Ticks of the control loop.", "result"),
    _control("control_tick_seconds", _HISTOGRAM, "Duration of one tick.", unit="seconds"),
    _control(
        "control_recording_lines_total", _COUNTER, "Lines of the controller's recording, written or dropped.", "result"
    ),
    _control("control_plan_seq", _GAUGE, "Sequence number of the last plan of this controller's life."),
    _control("control_decisions_total", _COUNTER, "Entries written to the ledger.", "lever", "reason", "acted"),
    _control("control_condition_active", _GAUGE, "1 while a named condition holds.", "condition"),
    _control("control_reporters", _GAUGE, "Replicas and gateways known from their reports.", "kind"),
    _control("control_signal_age_seconds", _GAUGE, "Age of the oldest last report.", "kind", unit="seconds"),
    _control("control_affinity_strength_share", _GAUGE, "Prefix-affinity strength of the plan.", unit="share"),
    _control("replicas", _GAUGE, "Engine replicas.", "state"),
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
    _control("replica_knob", _GAUGE, "Engine setting in force.", "replica", "knob"),
    _control(
        "replica_itl_quantile_seconds",
        _GAUGE,
        "Token gap of the last window at the objectives' quantile.",
        "replica",
        unit="seconds",
    ),
    _control("replica_preemptions_total", _COUNTER, "Sequences put back for lack of KV cache.", "replica"),
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
