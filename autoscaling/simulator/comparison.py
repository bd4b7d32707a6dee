"""Runs side by side: the one list of figures that everything shows, ratios to the first arm, spread over seeds.

An arm is one set-up; its runs differ in their seed. Ratios are taken seed by seed, then the median and the range of
them are shown: what a seed's luck does to every arm alike cancels. Decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from autoscaling.simulator.report import (
    CANCELLED,
    FAILED,
    LOST,
    REFUSED,
    Latency,
    Summary,
    median,
    percentile,
    ratio,
    sorted_known,
)

Json: TypeAlias = "Mapping[str, Json] | Sequence[Json] | str | int | float | bool | None"
"""What the JSON reports are made of; never NaN or infinite."""

# --- metrics: one list for tables, JSON and comparisons ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of a summary as people and programs know it."""

    key: str
    """In JSON: stable."""
    label: str
    unit: str
    better: Literal["higher", "lower", ""]
    """Empty: neither is."""
    value: Callable[[Summary], float]


def _quantiles(key: str, label: str, latency: Callable[[Summary], Latency]) -> tuple[Metric, ...]:
    return (
        Metric(f"{key}_p50_ms", f"{label} p50", "ms", "lower", lambda s: latency(s).p50_ms),
        Metric(f"{key}_p90_ms", f"{label} p90", "ms", "lower", lambda s: latency(s).p90_ms),
        Metric(f"{key}_p95_ms", f"{label} p95", "ms", "lower", lambda s: latency(s).p95_ms),
        Metric(f"{key}_p99_ms", f"{label} p99", "ms", "lower", lambda s: latency(s).p99_ms),
    )


METRICS: tuple[Metric, ...] = (
    Metric("requests", "requests", "", "", lambda s: s.requests),
    Metric("attainment_share", "objectives kept", "share", "higher", lambda s: s.attainment),
    Metric("goodput_ps", "goodput", "successes/s", "higher", lambda s: s.goodput_ps),
    Metric("throughput_ps", "throughput", "answers/s", "higher", lambda s: s.throughput_ps),
    Metric("output_tps", "output", "tokens/s", "higher", lambda s: s.output_tps),
    *_quantiles("ttft", "TTFT", lambda s: s.ttft),
    *_quantiles("itl", "ITL", lambda s: s.itl),
    *_quantiles("tpot", "TPOT", lambda s: s.tpot),
    *_quantiles("e2e", "E2E", lambda s: s.e2e),
    Metric("ttft_kept_share", "TTFT in time", "share", "higher", lambda s: ratio(s.ttft_kept, s.requests)),
    Metric("tpot_kept_share", "TPOT in time", "share", "higher", lambda s: ratio(s.tpot_kept, s.completed)),
    Metric("hit_share", "prefix cache hits", "share", "higher", lambda s: s.hit_share),
    Metric("refused", "refused", "", "lower", lambda s: s.ended(REFUSED)),
    Metric("failed", "failed", "", "lower", lambda s: s.ended(FAILED)),
    Metric("cancelled", "cancelled by clients", "", "lower", lambda s: s.ended(CANCELLED)),
    Metric("lost", "open at the end", "", "lower", lambda s: s.ended(LOST)),
    Metric("retries", "retries by gateways", "", "lower", lambda s: s.retries),
    Metric("client_retries", "retries by clients", "", "lower", lambda s: s.client_retries),
    Metric("preemptions", "preemptions", "", "lower", lambda s: sum(p.preemptions for p in s.pools)),
    Metric("replicas_mean", "replicas, mean", "", "", lambda s: math.fsum(p.replicas_mean for p in s.pools)),
    Metric("replicas_max", "replicas, most", "", "", lambda s: sum(p.replicas_max for p in s.pools)),
    Metric("starts", "replica starts", "", "lower", lambda s: sum(p.starts for p in s.pools)),
    Metric(
        "direction_changes", "turns of the target", "", "lower", lambda s: sum(p.direction_changes for p in s.pools)
    ),
    Metric("gpu_hours", "GPU-hours", "h", "lower", lambda s: s.gpu_hours),
    Metric("usd", "cost", "$", "lower", lambda s: s.usd),
    Metric("successes_per_usd", "successes per dollar", "1/$", "higher", lambda s: s.successes_per_usd),
    Metric("tasks", "tasks", "", "", lambda s: s.tasks),
    Metric("task_attainment_share", "tasks that succeeded", "share", "higher", lambda s: s.task_attainment),
    Metric("tasks_per_usd", "successful tasks per dollar", "1/$", "higher", lambda s: s.tasks_per_usd),
    Metric("goodput_per_gpu", "goodput per GPU", "1/s", "higher", lambda s: s.goodput_per_gpu),
)
"""Every figure that is shown, in order."""

METRIC_BY_KEY: Mapping[str, Metric] = {m.key: m for m in METRICS}


# --- several runs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spread:
    """One figure over several seeds; NaN where no run has it."""

    median: float
    low: float
    high: float


def spread(values: Iterable[float]) -> Spread:
    """Median and range of the values that are known."""
    known = sorted_known(values)
    return Spread(percentile(known, 0.5), known[0], known[-1]) if known else Spread(math.nan, math.nan, math.nan)


@dataclass(frozen=True, slots=True)
class Compared:
    """One arm of a comparison: its runs over the seeds, and each figure with its ratio to the first arm."""

    name: str
    runs: tuple[Summary, ...]
    figures: Mapping[str, Spread]
    """By the key of the metric."""
    ratios: Mapping[str, Spread]
    """To the first arm: by pairs of runs with one seed where both have the same seeds, else of the medians. NaN where
    the first arm has 0 or nothing."""


def compare(arms: Sequence[Sequence[Summary]]) -> tuple[Compared, ...]:
    """Put arms side by side; each is the runs of one set-up over its seeds, the first arm is what ratios refer to.

    Raises:
        ValueError: an arm without a run.
    """
    if any(not runs for runs in arms):
        raise ValueError("an arm of the comparison has no run")
    return tuple(_compared(tuple(runs), tuple(arms[0])) for runs in arms)


def _compared(runs: tuple[Summary, ...], first: tuple[Summary, ...]) -> Compared:
    paired = [r.seed for r in runs] == [f.seed for f in first]
    figures, ratios = {}, {}
    for metric in METRICS:
        own, base = [metric.value(r) for r in runs], [metric.value(f) for f in first]
        figures[metric.key] = spread(own)
        pairs = zip(own, base, strict=True) if paired else [(median(own), median(base))]
        ratios[metric.key] = spread(ratio(a, b) for a, b in pairs)
    return Compared(runs[0].name, runs, figures, ratios)


# --- JSON -------------------------------------------------------------------------------------------------------------


def summary_json(summary: Summary) -> dict[str, Json]:
    """Return ``summary`` as plain values with stable keys; what is not known is ``None``."""
    return {
        "name": summary.name,
        "seed": summary.seed,
        "digest": summary.digest,
        "objectives": {"ttft_ms": summary.ttft_ms_max, "itl_ms": summary.itl_ms_max, "quantile": summary.quantile},
        "span_s": finite(summary.span_s),
        "completed": summary.completed,
        "successes": summary.successes,
        "left": summary.left,
        "tasks_succeeded": summary.tasks_succeeded,
        "ttft_quantile_ms": finite(summary.ttft_quantile_ms),
        "itl_quantile_ms": finite(summary.itl_quantile_ms),
        "prompt_tokens": summary.prompt_tokens,
        "output_tokens": summary.output_tokens,
        **{m.key: finite(m.value(summary)) for m in METRICS},
        "endings": {outcome: dict(reasons) for outcome, reasons in summary.endings.items()},
        "pools": [
            {
                "profile": p.profile,
                "role": p.role,
                "gpu_hours": finite(p.gpu_hours),
                "usd": finite(p.usd),
                "starts": p.starts,
                "replicas_max": p.replicas_max,
                "replicas_mean": finite(p.replicas_mean),
                "direction_changes": p.direction_changes,
                "preemptions": p.preemptions,
                "busy_share": finite(p.busy_share),
            }
            for p in summary.pools
        ],
        "counters": dict(summary.counters),
    }


def comparison_json(compared: Sequence[Compared]) -> list[Json]:
    """Return a comparison as plain values: per arm its median, range and ratio of each metric."""
    return [
        {
            "name": arm.name,
            "seeds": [r.seed for r in arm.runs],
            "figures": {key: _spread_json(value) for key, value in arm.figures.items()},
            "ratios": {key: _spread_json(value) for key, value in arm.ratios.items()},
        }
        for arm in compared
    ]


def _spread_json(value: Spread) -> dict[str, Json]:
    return {"median": finite(value.median), "low": finite(value.low), "high": finite(value.high)}


def finite(value: float) -> float | None:
    """Return ``value``, or ``None`` for what JSON cannot say."""
    return value if math.isfinite(value) else None
