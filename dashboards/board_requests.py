"""Board *request path*: where time to the first token goes, what fails and why."""

from __future__ import annotations

from typing import Any

from dashboards.panels import Part, board, graph, query, row
from dashboards.promql import mean, quantile, rate, total, worst


def _time_to_first_token() -> tuple[Part, ...]:
    return (
        row("Time to first token"),
        graph(
            "TTFT by endpoint",
            "Arrival to the first byte of a stream.",
            "s",
            query(quantile(0.5, "ttft_seconds", ("endpoint",)), "p50 {{endpoint}}"),
            query(quantile(0.95, "ttft_seconds", ("endpoint",)), "p95 {{endpoint}}"),
        ),
        graph(
            "Where it goes",
            "Mean of the three parts; their sum is the mean TTFT. Queue: waiting in the gateway. Route: its own "
            "work, the client's sending, attempts that failed. Engine: from the dispatch that answered.",
            "s",
            query(mean("queue_seconds"), "queue"),
            query(mean("route_seconds"), "route"),
            query(mean("engine_ttft_seconds"), "engine"),
            stacked=True,
        ),
        graph(
            "Queue, p95",
            "Waiting in the gateway, by class. Rises for the least important class first.",
            "s",
            query(quantile(0.95, "queue_seconds", ("priority",)), "{{priority}}"),
        ),
        graph(
            "Route and engine, p95",
            "Route above some milliseconds: slow clients, retries, a gateway short of CPU. Engine: prefill, or a queue "
            "inside the engine.",
            "s",
            query(quantile(0.95, "route_seconds"), "route"),
            query(quantile(0.95, "engine_ttft_seconds"), "engine"),
        ),
    )


def _streams_and_whole_answers() -> tuple[Part, ...]:
    return (
        row("Streams and whole answers"),
        graph(
            "Gap between tokens",
            "Between two chunks of a stream.",
            "s",
            query(quantile(0.5, "itl_seconds"), "p50"),
            query(quantile(0.95, "itl_seconds"), "p95"),
            query(quantile(0.99, "itl_seconds"), "p99"),
        ),
        graph(
            "Whole answers",
            "Arrival to the end of a successful answer, p95.",
            "s",
            query(quantile(0.95, "e2e_seconds", ("endpoint",)), "{{endpoint}}"),
        ),
    )


def _what_does_not_succeed() -> tuple[Part, ...]:
    return (
        row("What does not succeed"),
        graph(
            "Errors by reason",
            "Failed for a fault of ours. Reasons: deployments/README.md.",
            "reqps",
            query(rate("requests_total", ("reason",), outcome="failed"), "{{reason}}"),
            stacked=True,
        ),
        graph(
            "Refused and cancelled by reason",
            "Refused with 429 or 4xx, or left by their clients.",
            "reqps",
            query(
                rate("requests_total", ("outcome", "reason"), outcome="~refused|cancelled"), "{{outcome}}: {{reason}}"
            ),
            stacked=True,
        ),
        graph(
            "Second attempts",
            "Retries by why the attempt before failed, hedges, streams that went on at another replica.",
            "reqps",
            query(rate("retries_total", ("reason",)), "retry: {{reason}}"),
            query(rate("hedges_total"), "hedge"),
            query(rate("resumes_total"), "resumed stream"),
        ),
        graph(
            "Replicas left alone",
            "Ejected now by each gateway, and ejections by why.",
            "short",
            query(worst("ejected_replicas", ("instance",)), "ejected now: {{instance}}"),
            query(rate("ejections_total", ("reason",)), "per second: {{reason}}"),
        ),
    )


def _two_replicas() -> tuple[Part, ...]:
    return (
        row("Prompts computed at a replica of their own"),
        graph(
            "Split or not",
            "Requests by what became of them where replicas have roles. Codes: deployments/README.md.",
            "reqps",
            query(rate("disaggregation_total", ("reason",)), "{{reason}}"),
            stacked=True,
        ),
        graph(
            "Prompt at the prefill replica",
            "From its dispatch to the end of its computation, p50 and p95.",
            "s",
            query(quantile(0.5, "prefill_leg_seconds"), "p50"),
            query(quantile(0.95, "prefill_leg_seconds"), "p95"),
        ),
    )


def _waiting_and_admission() -> tuple[Part, ...]:
    return (
        row("Waiting and admission"),
        graph(
            "Requests inside",
            "By gateway.",
            "short",
            query(total("inflight_requests", ("instance",)), "in flight: {{instance}}"),
            query(total("queued_requests", ("instance",)), "waiting: {{instance}}"),
        ),
        graph(
            "Queue in tokens",
            "Cost of what waits, and the tokens a second the fleet is believed to take of it. Their ratio is the time "
            "to serve it.",
            "short",
            query(total("queue_tokens"), "tokens waiting"),
            query(total("serving_tokens_per_second"), "tokens served per second"),
        ),
        graph(
            "Budget of extra attempts",
            "At 0 no request is tried twice: retries cannot become a storm.",
            "short",
            query(total("retry_budget_attempts", ("instance",)), "{{instance}}"),
        ),
        graph(
            "Quarantined",
            "Requests that broke off on two replicas and are refused for a while.",
            "short",
            query(total("quarantined_requests"), "requests"),
        ),
    )


def _routing() -> tuple[Part, ...]:
    return (
        row("Routing"),
        graph(
            "Choices by reason",
            "Why requests went where they did.",
            "reqps",
            query(rate("routed_total", ("reason",)), "{{reason}}"),
            stacked=True,
        ),
        graph(
            "Prediction of TTFT",
            "Absolute error of the router's prediction for the replica it chose.",
            "s",
            query(quantile(0.5, "ttft_error_seconds"), "p50"),
            query(quantile(0.95, "ttft_error_seconds"), "p95"),
        ),
        graph(
            "Prefix index",
            "Blocks of prompts that a gateway remembers the place of.",
            "short",
            query(total("prefix_index_blocks", ("instance",)), "{{instance}}"),
        ),
        graph(
            "Keys, objectives, recording, traces",
            "Reloads of files, lines and spans, by result. Anything but ok wants a look.",
            "short",
            query(total("auth_keys", ("instance",)), "keys accepted: {{instance}}"),
            query(rate("auth_key_reloads_total", ("result",)), "key file: {{result}}"),
            query(rate("objectives_reloads_total", ("result",)), "objectives: {{result}}"),
            query(rate("recording_lines_total", ("result",)), "recording: {{result}}"),
            query(rate("trace_spans_total", ("result",)), "spans: {{result}}"),
        ),
    )


def requests() -> dict[str, Any]:
    """See the module."""
    return board(
        "tidegate-requests",
        "Request path",
        "Where the time of requests goes, what fails and why; from the gateways.",
        *_time_to_first_token(),
        *_streams_and_whole_answers(),
        *_what_does_not_succeed(),
        *_two_replicas(),
        *_waiting_and_admission(),
        *_routing(),
        decisions=True,
    )
