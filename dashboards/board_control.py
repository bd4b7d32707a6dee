"""Board *control plane*: what the controller believes, what it did, and whether it was right."""

from __future__ import annotations

from typing import Any

from dashboards.panels import Part, board, graph, number, query, row
from dashboards.promql import quantile, rate, total, worst


def _now() -> tuple[Part, ...]:
    return (
        row("Now"),
        number("Conditions", "Named conditions that hold.", "short", total("control_condition_active")),
        number("Held", "Knobs and levers the guard rails hold.", "short", total("control_holds")),
        number("Overrides", "Set by people, in force.", "short", total("control_overrides")),
        number("Plan's age", "At the gateway that is furthest behind.", "s", worst("plan_age_seconds")),
        number("Replicas heard", "From their reports.", "short", total("control_reporters", kind="replica")),
        number("Gateways heard", "From their reports.", "short", total("control_reporters", kind="gateway")),
    )


def _conditions_and_decisions() -> tuple[Part, ...]:
    return (
        row("Conditions and decisions"),
        graph(
            "Active conditions",
            "What each means and what to do: policies/control/CONDITIONS.md.",
            "short",
            query(f"{total('control_condition_active', ('condition',))} > 0", "{{condition}}"),
            stacked=True,
        ),
        graph(
            "Decisions",
            "Entries of the ledger a second, by lever and reason. Not acted: shadow mode.",
            "short",
            query(
                rate("control_decisions_total", ("lever", "reason", "acted")), "{{lever}}: {{reason}} acted {{acted}}"
            ),
            stacked=True,
        ),
        graph(
            "Verdicts",
            "What became of decisions once their effect was seen. Many *worse*: ask `decisions --lever` about it.",
            "short",
            query(rate("control_verdicts_total", ("lever", "verdict")), "{{lever}}: {{verdict}}"),
            stacked=True,
        ),
        graph(
            "Held by guard rails",
            "Frozen: turned back and forth, or did harm repeatedly. Rolled back: rests. Foreign: somebody else set it.",
            "short",
            query(total("control_holds", ("kind",)), "{{kind}}"),
        ),
    )


def _predicted_against_realised() -> tuple[Part, ...]:
    return (
        row("Predicted against realised"),
        graph(
            "Requests within their promises",
            "Predicted by the decision judged last, of each lever, and measured after it.",
            "percentunit",
            query(worst("control_predicted_met_share", ("lever",)), "predicted: {{lever}}"),
            query(worst("control_realised_met_share", ("lever",)), "realised: {{lever}}"),
            most=1,
        ),
        graph(
            "Prefix hits",
            "Prompt tokens a second that routing believed cached where it sent them, and those engines found.",
            "short",
            query(rate("predicted_hit_tokens_total"), "predicted"),
            query(rate("replica_prefix_hit_tokens_total"), "realised"),
        ),
        graph(
            "Prediction of TTFT",
            "Absolute error of the router's prediction for the replica it chose.",
            "s",
            query(quantile(0.5, "ttft_error_seconds"), "p50"),
            query(quantile(0.95, "ttft_error_seconds"), "p95"),
        ),
        graph(
            "Objective",
            "What decisions are judged by.",
            "short",
            query(worst("control_successes_per_usd"), "successes per dollar"),
        ),
    )


def _signals() -> tuple[Part, ...]:
    return (
        row("Signals"),
        graph(
            "Age of the oldest report",
            "Above a few report intervals the controller no longer trusts its picture.",
            "s",
            query(worst("control_signal_age_seconds", ("kind",)), "{{kind}}"),
        ),
        graph(
            "Confidence",
            "How far signals can be trusted; at low confidence the controller holds what is.",
            "percentunit",
            query(worst("control_signal_confidence_share", ("kind",)), "{{kind}}"),
            most=1,
        ),
        graph(
            "Retries and repeats",
            "Extra attempts of gateways, and arrivals whose body was refused or failed before.",
            "reqps",
            query(total("control_retries_per_second"), "retries, hedges, resumed streams"),
            query(total("control_repeats_per_second"), "repeated by clients"),
        ),
        graph(
            "Duration of a tick",
            "The loop has a second.",
            "s",
            query(quantile(0.5, "control_tick_seconds"), "p50"),
            query(quantile(0.99, "control_tick_seconds"), "p99"),
        ),
    )


def _knobs() -> tuple[Part, ...]:
    return (
        row("Knobs"),
        graph(
            "Affinity strength",
            "How far routing trusts predicted prefix hits.",
            "percentunit",
            query(worst("control_affinity_strength_share"), "strength"),
            most=1,
        ),
        graph(
            "Engine knobs",
            "In force, by replica.",
            "short",
            query(worst("replica_knob", ("replica", "knob")), "{{knob}}: {{replica}}"),
        ),
        graph(
            "Plans",
            "Number of the last plan; begins again at 1 with each life of the controller.",
            "short",
            query(worst("control_plan_seq"), "last plan"),
        ),
        graph(
            "Lines written",
            "Of ledger and recording; dropped ones are lost.",
            "short",
            query(rate("control_ledger_lines_total", ("result",)), "ledger: {{result}}"),
            query(rate("control_recording_lines_total", ("result",)), "recording: {{result}}"),
        ),
    )


def control() -> dict[str, Any]:
    """See the module."""
    return board(
        "tidegate-control",
        "Control plane",
        "What the controller believes, what it did, and whether it was right. `explain` tells one decision in full.",
        *_now(),
        *_conditions_and_decisions(),
        *_predicted_against_realised(),
        *_signals(),
        *_knobs(),
        decisions=True,
    )
