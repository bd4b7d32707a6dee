"""Board *capacity and cost*: how full the fleet is, what limits it, and what a token costs."""

from __future__ import annotations

from typing import Any

from dashboards.panels import Part, board, graph, number, query, row
from dashboards.promql import mean, rate, total, worst


def _cost() -> tuple[Part, ...]:
    spent = total("control_usd_per_hour")
    return (
        row("Cost"),
        number("Cost per hour", "Of all replicas that run.", "currencyUSD", spent),
        number("Successes per dollar", "Requests within their promises.", "short", worst("control_successes_per_usd")),
        number(
            "Dollars per million output tokens",
            "Cost of all replicas over the output tokens of the same time.",
            "currencyUSD",
            f"1e6 * {spent} / (3600 * {rate('output_tokens_total')})",
        ),
        number("Replicas running", "As Serve says.", "short", total("replicas", state="running")),
        number(
            "No room for", "Replicas that Ray finds no node for.", "short", total("replicas", state="unschedulable")
        ),
        number(
            "Mean busy share",
            "Time inside engine steps, all replicas.",
            "percentunit",
            f"avg({worst('replica_busy_share', ('replica',))} >= 0)",
        ),
    )


def _replicas() -> tuple[Part, ...]:
    spent = total("control_usd_per_hour")
    return (
        row("Replicas"),
        graph(
            "Replicas",
            "Target and running as Serve says, known from their reports, and those Ray finds no room for.",
            "short",
            query(total("replicas", ("state",)), "{{state}}"),
        ),
        graph(
            "Cost and goodput",
            "Dollars an hour beside requests within their promises a second.",
            "short",
            query(spent, "dollars an hour"),
            query(rate("met_requests_total"), "met per second"),
        ),
        graph(
            "Cold starts",
            "Mean seconds of each phase of the starts that ended meanwhile.",
            "s",
            query(mean("replica_start_seconds", ("phase",)), "{{phase}}"),
            stacked=True,
        ),
    )


def _how_full() -> tuple[Part, ...]:
    return (
        row("How full"),
        graph(
            "Busy",
            "Share of time inside engine steps.",
            "percentunit",
            query(worst("replica_busy_share", ("replica",)), "{{replica}}"),
            most=1,
        ),
        graph(
            "KV cache",
            "Share in use. Above 0.9 sequences are about to be put back.",
            "percentunit",
            query(worst("replica_kv_used_share", ("replica",)), "{{replica}}"),
            most=1,
        ),
        graph(
            "Sequences",
            "Running in batches and waiting inside engines, all replicas.",
            "short",
            query(total("replica_running_seqs"), "running"),
            query(total("replica_waiting_seqs"), "waiting"),
            stacked=True,
        ),
        graph(
            "Preemptions",
            "Sequences put back for lack of KV cache, a second.",
            "short",
            query(rate("replica_preemptions_total", ("replica",)), "{{replica}}"),
        ),
        graph(
            "Tokens per second",
            "Of requests that ended.",
            "short",
            query(rate("prompt_tokens_total"), "prompt"),
            query(rate("output_tokens_total"), "output"),
        ),
        graph(
            "Prefix cache",
            "Share of prompt tokens that engines found in their caches.",
            "percentunit",
            query(
                f"{rate('replica_prefix_hit_tokens_total', ('replica',))}"
                f" / {rate('replica_prefix_query_tokens_total', ('replica',))}",
                "{{replica}}",
            ),
            most=1,
        ),
    )


def _what_limits() -> tuple[Part, ...]:
    return (
        row("What limits"),
        graph(
            "Bound",
            "Replicas whose steps are limited by compute, memory bandwidth or overhead.",
            "short",
            query(total("replica_bound", ("bound",)), "{{bound}}"),
            stacked=True,
        ),
        graph(
            "Roofline",
            "Share of the device's peak that is used while busy. Absent for unknown devices.",
            "percentunit",
            query(worst("replica_compute_share", ("replica",)), "FLOP/s: {{replica}}"),
            query(worst("replica_memory_share", ("replica",)), "bandwidth: {{replica}}"),
            most=1,
        ),
        graph(
            "GPU",
            "NVML's utilisation, which counts any kernel: a full line says little; see Bound.",
            "percentunit",
            query(worst("replica_gpu_utilisation_share", ("replica",)), "kernels: {{replica}}"),
            query(worst("replica_gpu_memory_utilisation_share", ("replica",)), "memory: {{replica}}"),
            most=1,
        ),
        graph(
            "Power",
            "Of all devices, beside the limits in force.",
            "watt",
            query(total("replica_gpu_power_watts"), "drawn"),
            query(total("replica_gpu_power_limit_watts"), "limit"),
        ),
    )


def capacity() -> dict[str, Any]:
    """See the module."""
    return board(
        "tidegate-capacity",
        "Capacity and cost",
        "How full the fleet is, what limits it, and what it costs.",
        *_cost(),
        *_replicas(),
        *_how_full(),
        *_what_limits(),
        decisions=True,
    )
