"""Board *one replica*: everything that is known of one engine."""

from __future__ import annotations

from typing import Any

from dashboards.panels import Part, board, graph, query, row
from dashboards.promql import rate, worst

_EACH = ("replica",)


def _work() -> tuple[Part, ...]:
    return (
        row("Work"),
        graph(
            "Sequences",
            "In the batch, and waiting inside the engine.",
            "short",
            query(worst("replica_running_seqs", _EACH), "running: {{replica}}"),
            query(worst("replica_waiting_seqs", _EACH), "waiting: {{replica}}"),
        ),
        graph(
            "Busy and full",
            "Share of time inside steps, and of the KV cache in use.",
            "percentunit",
            query(worst("replica_busy_share", _EACH), "busy: {{replica}}"),
            query(worst("replica_kv_used_share", _EACH), "KV cache: {{replica}}"),
            most=1,
        ),
        graph(
            "Gap between tokens",
            "Of the last window, at the objectives' quantile.",
            "s",
            query(worst("replica_itl_quantile_seconds", _EACH), "{{replica}}"),
        ),
        graph(
            "Knobs",
            "In force in the engine.",
            "short",
            query(worst("replica_knob", (*_EACH, "knob")), "{{knob}}: {{replica}}"),
        ),
        graph(
            "Preemptions",
            "Sequences put back for lack of KV cache, a second.",
            "short",
            query(rate("replica_preemptions_total", _EACH), "{{replica}}"),
        ),
        graph(
            "Prefix cache",
            "Prompt tokens a second looked up, and found.",
            "short",
            query(rate("replica_prefix_query_tokens_total", _EACH), "looked up: {{replica}}"),
            query(rate("replica_prefix_hit_tokens_total", _EACH), "found: {{replica}}"),
        ),
        graph(
            "Speculation",
            "Draft tokens a second verified, and kept.",
            "short",
            query(rate("replica_draft_tokens_total", _EACH), "verified: {{replica}}"),
            query(rate("replica_accepted_draft_tokens_total", _EACH), "kept: {{replica}}"),
        ),
        graph(
            "Trust",
            "How far its reports can be trusted.",
            "percentunit",
            query(worst("replica_signal_confidence_share", _EACH), "{{replica}}"),
            most=1,
        ),
    )


def _speed() -> tuple[Part, ...]:
    return (
        row("Speed"),
        graph(
            "Step model",
            "Learned: seconds of a step, and per sequence, 1,000 KV tokens, prefill token. Twice its peers': a slow "
            "device.",
            "s",
            query(worst("replica_step_coefficient_seconds", (*_EACH, "term")), "{{term}}: {{replica}}"),
        ),
        graph(
            "Roofline",
            "Share of the device's peak that is used while busy. Absent for unknown devices.",
            "percentunit",
            query(worst("replica_compute_share", _EACH), "FLOP/s: {{replica}}"),
            query(worst("replica_memory_share", _EACH), "bandwidth: {{replica}}"),
            most=1,
        ),
        graph(
            "Bound",
            "1 for what limits its steps.",
            "short",
            query(worst("replica_bound", (*_EACH, "bound")), "{{bound}}: {{replica}}"),
        ),
    )


def _device() -> tuple[Part, ...]:
    return (
        row("Device"),
        graph(
            "Utilisation",
            "NVML: time with any kernel, and with memory reads or writes.",
            "percentunit",
            query(worst("replica_gpu_utilisation_share", _EACH), "kernels: {{replica}}"),
            query(worst("replica_gpu_memory_utilisation_share", _EACH), "memory: {{replica}}"),
            most=1,
        ),
        graph(
            "Memory",
            "Device memory in use.",
            "bytes",
            query(worst("replica_gpu_memory_used_bytes", _EACH), "{{replica}}"),
        ),
        graph(
            "Power",
            "Drawn, beside the limit in force.",
            "watt",
            query(worst("replica_gpu_power_watts", _EACH), "drawn: {{replica}}"),
            query(worst("replica_gpu_power_limit_watts", _EACH), "limit: {{replica}}"),
        ),
        graph(
            "Temperature",
            "Of the hottest device.",
            "celsius",
            query(worst("replica_gpu_temperature_celsius", _EACH), "{{replica}}"),
        ),
        graph(
            "Faults",
            "Reasons that hold clocks down now, memory errors, critical XID events. Anything above 0 wants a look.",
            "short",
            query(worst("replica_gpu_throttle_reasons", _EACH), "throttle reasons: {{replica}}"),
            query(worst("replica_gpu_ecc_errors", _EACH), "ECC: {{replica}}"),
            query(worst("replica_gpu_xid_errors", _EACH), "XID: {{replica}}"),
        ),
    )


def replica() -> dict[str, Any]:
    """See the module."""
    return board(
        "tidegate-replica",
        "One replica",
        "Everything that is known of one engine; choose it above.",
        *_work(),
        *_speed(),
        *_device(),
        decisions=True,
    )
