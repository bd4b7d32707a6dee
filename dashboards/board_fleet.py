"""Board *fleet overview*: is what users were promised kept, and what does it cost."""

from __future__ import annotations

from typing import Any

from dashboards.panels import Part, board, graph, number, query, row
from dashboards.promql import quantile, rate, total, worst


def burn() -> str:
    """Broken promises over those that may be broken; 1 uses an error budget up exactly as fast as it is earned."""
    by = ("model", "priority", "objective")
    missed, judged = rate("objective_missed_total", by), rate("objective_requests_total", by)
    return f"({missed} / {judged}) / {worst('control_objective_budget_share', by)}"


def _the_objective() -> tuple[Part, ...]:
    return (
        row("The objective"),
        number(
            "Goodput", "Requests within the promises of their class, per second.", "reqps", rate("met_requests_total")
        ),
        number(
            "Successes per dollar",
            "What every decision is judged by: requests within their promises per dollar of replicas that run. Without "
            "a price in the configuration each replica costs one dollar an hour.",
            "short",
            worst("control_successes_per_usd"),
        ),
        number(
            "SLO attainment",
            "Share of requests whose fate became known in the last tick that kept their promises.",
            "percentunit",
            worst("control_met_share"),
            good=(0.9, 0.95),
        ),
        number(
            "Cost per hour", "Of all replicas that run, busy or idle.", "currencyUSD", total("control_usd_per_hour")
        ),
        number("Replicas running", "As Ray Serve says.", "short", total("replicas", state="running")),
        number(
            "Conditions",
            "Named conditions that hold now; see the board Control plane.",
            "short",
            total("control_condition_active"),
        ),
    )


def _promises() -> tuple[Part, ...]:
    return (
        row("Promises"),
        graph(
            "Goodput and demand",
            "Demand is what ended and counts: not what clients withdrew or their own limits refused. The gap was "
            "missed.",
            "reqps",
            query(rate("met_requests_total", ("priority",)), "met: {{priority}}"),
            query(total("class_demand_per_second", ("priority",)), "demand: {{priority}}"),
        ),
        graph(
            "SLO attainment by class",
            "Share of a class's demand within its promises; absent while a class has no demand.",
            "percentunit",
            query(worst("class_met_share", ("priority",)), "{{priority}}"),
            most=1,
        ),
        graph(
            "Burn of error budgets",
            "1 uses a budget up exactly as fast as it is earned. Alerts begin at 14.4, 6, 3 and 1 over an hour, six "
            "hours, a day and three days.",
            "short",
            query(burn(), "{{priority}} {{objective}}"),
        ),
        graph(
            "Requests by outcome",
            "Each request ends once.",
            "reqps",
            query(rate("requests_total", ("outcome",)), "{{outcome}}"),
            stacked=True,
        ),
        graph(
            "TTFT",
            "Arrival to the first byte of a stream, beside what classes were promised.",
            "s",
            query(quantile(0.5, "ttft_seconds"), "p50"),
            query(quantile(0.95, "ttft_seconds"), "p95"),
            query(worst("control_objective_ttft_seconds", ("priority",)), "promised: {{priority}}"),
        ),
        graph(
            "Gap between tokens",
            "Between two chunks of a stream, beside what classes were promised.",
            "s",
            query(quantile(0.5, "itl_seconds"), "p50"),
            query(quantile(0.95, "itl_seconds"), "p95"),
            query(worst("control_objective_itl_seconds", ("priority",)), "promised: {{priority}}"),
        ),
    )


def _fleet() -> tuple[Part, ...]:
    return (
        row("Fleet"),
        graph(
            "Replicas",
            "Target and running as Serve says, known from their reports, and those Ray finds no room for.",
            "short",
            query(total("replicas", ("state",)), "{{state}}"),
        ),
        graph(
            "Active conditions",
            "Named conditions while they hold. What each means and what to do: policies/control/CONDITIONS.md.",
            "short",
            query(f"{total('control_condition_active', ('condition',))} > 0", "{{condition}}"),
            stacked=True,
        ),
        graph(
            "Work",
            "Requests inside gateways, and those of them that wait for their turn or for a replica.",
            "short",
            query(total("inflight_requests"), "in flight"),
            query(total("queued_requests"), "waiting"),
        ),
        graph(
            "Tokens per second",
            "Of requests that ended, as engines counted them.",
            "short",
            query(rate("prompt_tokens_total"), "prompt"),
            query(rate("output_tokens_total"), "output"),
            query(rate("replica_prefix_hit_tokens_total"), "prompt, found in a cache"),
        ),
    )


def _who_answers() -> tuple[Part, ...]:
    return (
        row("Who answers"),
        graph(
            "Age of plans",
            "Above control.plan_ttl_ms a gateway no longer follows its plan. Grows while the controller is away; "
            "requests go on.",
            "s",
            query(worst("plan_age_seconds", ("instance",)), "{{instance}}"),
        ),
        graph(
            "Ticks of the controller",
            "About one a second in all; failed ticks change nothing, and ten in a row end the controller.",
            "short",
            query(rate("control_ticks_total", ("result",)), "{{result}}"),
        ),
    )


def fleet() -> dict[str, Any]:
    """See the module."""
    return board(
        "tidegate-fleet",
        "Fleet overview",
        "Is what users were promised kept, and what does it cost.",
        *_the_objective(),
        *_promises(),
        *_fleet(),
        *_who_answers(),
        decisions=True,
    )
