"""Every expression of boards and rules, what it names, and why it may have no data.

Pure: whoever asks Prometheus (``deployments/dashboard_check.py``) gets expressions without variables from here, and
gives what came back to :func:`judge`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dashboards.alerts import groups
from dashboards.catalogue import CATALOGUE, PREFIX, Kind

WINDOW = "1m"
"""In place of Grafana's interval, where there is no Grafana."""
_VARIABLE_VALUES = re.compile(r"label_values\((.+), (\w+)\)$")
_SELECTOR = re.compile(r"\b(tidegate[a-z0-9_:]*)(\{[^}]*\})?")
_MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
_GROUPING = re.compile(r"\b(?:by|on|without|ignoring|group_left|group_right) ?\(([^)]*)\)")

ABSENCES: Mapping[str, str] = MappingProxyType(
    {
        "auth_key_reloads_total": "no key file has changed since the gateway's start",
        "auth_keys": "auth is none, so there are no keys",
        "class_met_share": "no request of any class ended in the last window",
        "control_decisions_total": "nothing was decided yet",
        "control_met_share": "no request's fate became known in the last tick",
        "control_predicted_met_share": "no decision that predicted this was judged yet",
        "control_realised_met_share": "no decision was judged yet",
        "control_verdicts_total": "no decision was judged yet",
        "disaggregation_total": "disaggregation.enabled is false, or no request came",
        "e2e_seconds": "no request has succeeded",
        "ejections_total": "no replica was ever left alone",
        "engine_ttft_seconds": "no stream has begun",
        "itl_seconds": "no stream had a second chunk",
        "met_requests_total": "no request kept its promise",
        "objective_missed_total": "no request of any class ended",
        "objective_requests_total": "no request of any class ended",
        "objectives_reloads_total": "objectives did not come with user_config",
        "plan_age_seconds": "the gateway has no plan yet",
        "prefill_leg_seconds": "no prompt was computed for another replica",
        "queue_seconds": "no stream has begun",
        "recording_lines_total": "recording.folder is null",
        "replica_compute_share": "device or model is not one whose peak is known",
        "replica_gpu_ecc_errors": "no NVIDIA device",
        "replica_gpu_memory_used_bytes": "no NVIDIA device",
        "replica_gpu_memory_utilisation_share": "no NVIDIA device",
        "replica_gpu_power_limit_watts": "no NVIDIA device",
        "replica_gpu_power_watts": "no NVIDIA device",
        "replica_gpu_temperature_celsius": "no NVIDIA device",
        "replica_gpu_throttle_reasons": "no NVIDIA device",
        "replica_gpu_utilisation_share": "no NVIDIA device",
        "replica_gpu_xid_errors": "no NVIDIA device",
        "replica_start_seconds": "no replica has started since the controller did",
        "replica_itl_quantile_seconds": "no stream had a second chunk in the last window",
        "replica_memory_share": "device or model is not one whose peak is known",
        "replica_step_coefficient_seconds": "engines have not made enough steps to learn from",
        "requests_total": "no request has ended",
        "retries_total": "no attempt has failed",
        "route_seconds": "no stream has begun",
        "routed_total": "no request was sent to a replica",
        "serving_tokens_per_second": "the gateway has not seen what the fleet serves",
        "task_calls": "no task is over",
        "task_cost_usd": "no task is over",
        "task_e2e_seconds": "no task is over",
        "task_tokens": "no task is over",
        "tasks_total": "no task is over",
        "tenant_budget_usd": "no tenant has a budget",
        "tenant_budget_used_usd": "no tenant has a budget",
        "tenant_cached_tokens_total": "no tenant has asked for anything",
        "tenant_met_share": "no tenant's request ended in the last window",
        "tenant_output_tokens_total": "no tenant has asked for anything",
        "tenant_prompt_tokens_total": "no tenant has asked for anything",
        "tenant_refused_total": "no tenant has asked for anything",
        "tenant_requests_total": "no tenant has asked for anything",
        "tenant_spent_usd_total": "no tenant has asked for anything",
        "tenant_tokens_per_second": "no tenant has asked for anything",
        "trace_spans_total": "tracing.otlp_endpoint is null",
        "ttft_error_seconds": "no stream was sent on with a prediction",
        "ttft_seconds": "no stream has begun",
    }
)
"""Metric, without its prefix -> why a healthy system may have no value of it. What is not here must always have one."""


@dataclass(frozen=True, slots=True)
class Expression:
    """One expression and where it stands: ``board / panel``, or the name of a rule."""

    place: str
    text: str

    @property
    def selectors(self) -> list[str]:
        """Each selector in it, without its range."""
        return [match[0] for match in _SELECTOR.finditer(self.text)]

    @property
    def metrics(self) -> list[str]:
        """Metrics of the catalogue it reads, and recorded series by their own names."""
        return list(dict.fromkeys(base_name(match[1]) for match in _SELECTOR.finditer(self.text)))

    @property
    def labels(self) -> set[str]:
        """Every label it matches or groups by, ``le`` and ``factor`` left out."""
        grouped = {name.strip() for match in _GROUPING.finditer(self.text) for name in match[1].split(",")}
        matched = {match[1] for match in _MATCHER.finditer(self.text)}
        return (grouped | matched) - {"le", "factor", ""}

    @property
    def filters(self) -> bool:
        """Whether it may rightly be empty though its metrics have values: a comparison, or one value of a label."""
        literal = any("$" not in match[3] for match in _MATCHER.finditer(self.text))
        return literal or bool(re.search(r"[<>]|==", self.text)) or "unless" in self.text

    def concrete(self) -> str:
        """With *All* for each variable."""
        return re.sub(r'"\$\w+"', '".*"', self.text.replace("$__rate_interval", WINDOW))


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one expression."""

    expression: Expression
    series: int
    """How many have a value; NaN is none."""
    absence: str = ""
    """Why there is none, where that is no fault."""

    @property
    def fine(self) -> bool:
        """Data, or a documented absence."""
        return self.series > 0 or bool(self.absence)


def base_name(name: str) -> str:
    """The metric that a series belongs to: ``..._bucket`` and its like belong to their histogram."""
    stem = re.sub(r"_(bucket|sum|count)$", "", name)
    return stem if stem in CATALOGUE and CATALOGUE[stem].kind is Kind.HISTOGRAM else name


def of_boards(documents: Iterable[Mapping[str, Any]]) -> Iterator[Expression]:
    """Expressions of panels and annotations."""
    for document in documents:
        for panel in document["panels"]:
            for target in panel.get("targets", ()):
                yield Expression(f"{document['title']} / {panel['title']}", target["expr"])
        for annotation in document["annotations"].get("list", ()):
            yield Expression(f"{document['title']} / annotation {annotation['name']}", annotation["expr"])


def of_rules() -> Iterator[Expression]:
    """Expressions of recording rules and alerts."""
    for group in groups():
        for rule in group["rules"]:
            yield Expression(rule.get("alert") or rule["record"], rule["expr"])


def variables(documents: Iterable[Mapping[str, Any]]) -> Mapping[str, tuple[str, str]]:
    """Every query variable of the boards: series without variables, and the label whose values it has."""
    found: dict[str, tuple[str, str]] = {}
    for document in documents:
        for variable in document["templating"]["list"]:
            if match := _VARIABLE_VALUES.match(str(variable.get("query"))):
                found[variable["name"]] = Expression("", match[1]).concrete(), match[2]
    return found


def with_value(values: Sequence[float]) -> int:
    """How many of a query's values say something."""
    return sum(not math.isnan(value) for value in values)


def absence(name: str) -> str:
    """Why a healthy system may have no value of a metric or recorded series; empty: it always has one."""
    recorded = name.startswith("tidegate:objective_missed:")
    return ABSENCES.get("objective_missed_total" if recorded else name.removeprefix(PREFIX), "")


def judge(expression: Expression, series: int, has_data: Mapping[str, bool], unknown: int = 0) -> Answer:
    """The answer to an expression that gave ``series`` values and ``unknown`` times NaN.

    ``has_data``: of each metric it reads, alone.
    """
    if series:
        return Answer(expression, series)
    missing = [name for name in expression.metrics if not has_data[name]]
    reasons = [absence(name) for name in missing]
    if missing:
        return Answer(expression, 0, "; ".join(dict.fromkeys(reasons)) if all(reasons) else "")
    if unknown and ("/" in expression.text or "histogram_quantile" in expression.text):
        return Answer(expression, 0, f"nothing of it happened within {WINDOW}")
    return Answer(expression, 0, "its metrics have values, none of them is one of these" if expression.filters else "")
