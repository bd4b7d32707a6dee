"""Board *tenants and tasks*: who uses what, what it costs them, and what became of their tasks."""

from __future__ import annotations

from typing import Any

from dashboards.panels import Part, board, graph, number, query, row
from dashboards.promql import quantile, rate, total, worst


def _now() -> tuple[Part, ...]:
    succeeded, paid = rate("tasks_total", ending="success"), rate("task_cost_usd", (), "_sum")
    return (
        row("Now"),
        number(
            "Tasks per dollar",
            "Successful tasks per dollar of their tenants' prices.",
            "short",
            f"{succeeded} / {paid}",
        ),
        number("Open tasks", "Remembered, outcome not known.", "short", total("open_tasks")),
        number("Tokens per second", "Prompt and output, all tenants.", "short", total("tenant_tokens_per_second")),
        number(
            "Spent per hour",
            "By all tenants, in their prices.",
            "currencyUSD",
            f"3600 * {rate('tenant_spent_usd_total')}",
        ),
    )


def _tenants() -> tuple[Part, ...]:
    return (
        row("Tenants"),
        graph(
            "Tokens per second",
            "The largest tenants of each report; the others are summed as other.",
            "short",
            query(total("tenant_tokens_per_second", ("tenant",)), "{{tenant}}"),
            stacked=True,
        ),
        graph(
            "Within their promises",
            "Share of a tenant's requests that kept their promises.",
            "percentunit",
            query(worst("tenant_met_share", ("tenant",)), "{{tenant}}"),
            most=1,
        ),
        graph(
            "Requests",
            "Let in, and refused by the tenant's own limits.",
            "reqps",
            query(rate("tenant_requests_total", ("tenant",)), "let in: {{tenant}}"),
            query(rate("tenant_refused_total", ("tenant",)), "refused: {{tenant}}"),
        ),
        graph(
            "Tokens charged",
            "Prompt and output tokens a second.",
            "short",
            query(rate("tenant_prompt_tokens_total", ("tenant",)), "prompt: {{tenant}}"),
            query(rate("tenant_output_tokens_total", ("tenant",)), "output: {{tenant}}"),
        ),
        graph(
            "Found in the cache",
            "Share of a tenant's prompt tokens that were cached.",
            "percentunit",
            query(
                f"{rate('tenant_cached_tokens_total', ('tenant',))}"
                f" / {rate('tenant_prompt_tokens_total', ('tenant',))}",
                "{{tenant}}",
            ),
            most=1,
        ),
        graph(
            "Budget used",
            "Spent, set aside, or held by gateways that are gone, over the period's budget. Tenants without a budget "
            "are not here.",
            "percentunit",
            query(
                f"{worst('tenant_budget_used_usd', ('tenant',))} / {worst('tenant_budget_usd', ('tenant',))}",
                "{{tenant}}",
            ),
        ),
        graph(
            "Spent",
            "Dollars an hour in the tenant's prices.",
            "currencyUSD",
            query(f"3600 * {rate('tenant_spent_usd_total', ('tenant',))}", "{{tenant}}"),
            stacked=True,
        ),
    )


def _tasks() -> tuple[Part, ...]:
    return (
        row("Tasks"),
        graph(
            "Tasks that ended",
            "Success or failure as clients told, stopped at a limit, unknown: nobody told.",
            "reqps",
            query(rate("tasks_total", ("ending",)), "{{ending}}"),
            stacked=True,
        ),
        graph(
            "Time of a task",
            "First call to the end of the last one, p95.",
            "s",
            query(quantile(0.95, "task_e2e_seconds", ("ending",)), "{{ending}}"),
        ),
        graph(
            "Size of a task",
            "Calls and tokens, p95.",
            "short",
            query(quantile(0.95, "task_calls", ("ending",)), "calls: {{ending}}"),
            query(quantile(0.95, "task_tokens", ("ending",)), "tokens: {{ending}}"),
        ),
        graph(
            "Cost of a task",
            "In the tenant's prices, p95.",
            "currencyUSD",
            query(quantile(0.95, "task_cost_usd", ("ending",)), "{{ending}}"),
        ),
    )


def tenants() -> dict[str, Any]:
    """See the module."""
    return board(
        "tidegate-tenants",
        "Tenants and tasks",
        "Who uses what, what it costs them, and what became of their tasks.",
        *_now(),
        *_tenants(),
        *_tasks(),
    )
