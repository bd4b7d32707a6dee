"""Prometheus' rules: recording rules of error budgets, and alerts, as ``dashboards/prometheus/rules.yaml`` holds them.

Budgets burn as in ``policies/control/burn.py``, over hours and days where levers look at seconds. After *The Site
Reliability Workbook*, chapter 5, an alert wants a long window and a short one above the limit, so that it matters and
still goes on::

    14.4 x over 1 h and 5 min, 6 x over 6 h and 30 min: somebody is called
    3 x over 1 d and 2 h, 1 x over 3 d and 6 h: somebody looks within a day

A budget of a tenth cannot burn 14.4 times: the limit is never above half way between the budget and everything. Fewer
than :data:`MISSED_MIN` broken promises are no alert, whatever share of a quiet night they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dashboards.promql import bare

RUNBOOKS = "dashboards/RUNBOOKS.md"
HANDOVERS = "split|prefill_failed|prefill_timeout"
"""Codes of requests that were to be split; what fails after ``split`` is counted beside it."""
MISSED_MIN = 5
KEYS = "model, priority, objective"


@dataclass(frozen=True, slots=True)
class Burn:
    """One pair of windows."""

    factor: float
    long: str
    short: str
    severity: str


BURNS = (
    Burn(14.4, "1h", "5m", "page"),
    Burn(6, "6h", "30m", "page"),
    Burn(3, "1d", "2h", "ticket"),
    Burn(1, "3d", "6h", "ticket"),
)


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert. ``step``: what to do first, in one line; ``anchor``: heading of :data:`RUNBOOKS` that says more."""

    name: str
    expr: str
    severity: str
    summary: str
    step: str
    anchor: str
    held: str = "0s"
    """How long it must hold."""

    def rule(self) -> dict[str, Any]:
        """As Prometheus reads it."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.held,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "runbook": self.step, "runbook_url": f"{RUNBOOKS}#{self.anchor}"},
        }


def _record(name: str, expr: str, labels: Mapping[str, str] | None = None) -> dict[str, Any]:
    return {"record": name, "expr": expr} | ({"labels": dict(labels)} if labels else {})


def _sum(name: str, function: str, window: str) -> str:
    return f"sum by ({KEYS}) ({function}({bare(name)}[{window}]))"


def recordings() -> list[dict[str, Any]]:
    """Share of broken promises over each window, budgets, and the limits of each burn."""
    windows = dict.fromkeys(window for burn in BURNS for window in (burn.short, burn.long))
    missed = [
        _record(
            f"tidegate:objective_missed:share{window}",
            f"{_sum('objective_missed_total', 'rate', window)} / {_sum('objective_requests_total', 'rate', window)}",
        )
        for window in windows
    ]
    # The controller may be away: then the last budget it told counts.
    budget = bare("control_objective_budget_share")
    budgets = _record("tidegate:objective_budget:share", f"max by ({KEYS}) (last_over_time({budget}[1h]))")
    half = "(1 + tidegate:objective_budget:share) / 2"
    limits = [
        _record(
            "tidegate:objective_limit:share",
            f"({burn.factor:g} * tidegate:objective_budget:share < {half}) or {half}",
            {"factor": f"{burn.factor:g}"},
        )
        for burn in BURNS
    ]
    return [*missed, budgets, *limits]


def burn_alerts() -> list[Alert]:
    """One per pair of windows; each class and objective that burns is an alert of its own."""
    found = []
    for burn in BURNS:
        limit = f'tidegate:objective_limit:share{{factor="{burn.factor:g}"}}'
        above = [
            f"(tidegate:objective_missed:share{window} > on ({KEYS}) {limit})" for window in (burn.long, burn.short)
        ]
        enough = f"({_sum('objective_missed_total', 'increase', burn.long)} >= {MISSED_MIN})"
        found.append(
            Alert(
                f"TidegateBudgetBurn{burn.long}",
                f" and on ({KEYS}) ".join([*above, enough]),
                burn.severity,
                f"{{{{ $labels.priority }}}} requests of {{{{ $labels.model }}}} break their promise of "
                f"{{{{ $labels.objective }}}}: {{{{ $value | humanizePercentage }}}} over {burn.long}, and still over "
                f"{burn.short}.",
                "Ask `conditions` what is wrong and `decisions --since 1h` what was done about it.",
                "an-error-budget-burns",
            )
        )
    return found


def _condition(name: str) -> str:
    return f"max by (model) ({bare('control_condition_active', condition=name)}) == 1"


def control_alerts() -> list[Alert]:
    """What people must know of the control plane."""
    age = bare("plan_age_seconds")
    frozen = bare("control_holds", kind="frozen")
    return [
        Alert(
            "TidegateControllerAbsent",
            f"(max by (model) ({age}) > 60) or on () absent({bare('control_plan_seq')})",
            "page",
            "No controller steers the fleet{{ with $labels.model }} of {{ . }}{{ end }}. Requests go on without.",
            "Look for the controller's actor in Ray and for its last words in Serve's logs.",
            "the-controller-is-absent",
            "1m",
        ),
        Alert(
            "TidegateSignalLoss",
            _condition("signal_loss"),
            "page",
            "The controller of {{ $labels.model }} does not hear every replica or gateway, and holds what is.",
            "Ask `conditions` whom it does not hear; look at that host and its network.",
            "signals-are-lost",
            "1m",
        ),
        Alert(
            "TidegateKnobFrozen",
            f"max by (model) ({frozen}) > 0",
            "ticket",
            "{{ $value }} knobs or levers of {{ $labels.model }} are frozen: they turned back and forth, or did harm.",
            "Ask `shadow status` which, and `decisions --lever guard` why.",
            "a-knob-is-frozen",
            "1m",
        ),
        Alert(
            "TidegateStuckScaleUp",
            _condition("stuck_scale_up"),
            "page",
            "Replicas of {{ $labels.model }} were asked for and do not come up.",
            "`ray status` says whether there is room; the replica's log says whether it fails to start.",
            "a-scale-up-is-stuck",
            "2m",
        ),
    ]


def fleet_alerts() -> list[Alert]:
    """What people must know of replicas, queues and tenants."""
    used, budget = (bare(f"tenant_budget{part}_usd") for part in ("_used", ""))
    failed, tried = (
        f"sum by (model) (rate({bare('disaggregation_total', reason=f'~{codes}')}[5m]))"
        for codes in ("prefill_failed|prefill_timeout|pull_failed|pull_timeout|recomputed", HANDOVERS)
    )
    return [
        Alert(
            "TidegateReplicaEjected",
            f"max by (model) ({bare('ejected_replicas')}) > 0",
            "ticket",
            "A gateway leaves {{ $value }} replicas of {{ $labels.model }} alone.",
            "Ask `conditions` which replica is slow or failing; look at its device and log.",
            "a-replica-is-ejected",
            "2m",
        ),
        Alert(
            "TidegateHandoverFailing",
            f"{failed} / {tried} > 0.2 and {failed} > 0.02",
            "ticket",
            "{{ $value | humanizePercentage }} of the prompts that {{ $labels.model }} computes apart come to nothing.",
            "Ask `request ID` of one; look at prefill replicas' logs, and at the network between replicas.",
            "handing-over-fails",
            "5m",
        ),
        Alert(
            "TidegateQueueGrowing",
            _condition("queue_growing"),
            "page",
            "The queue of {{ $labels.model }} grows without bound.",
            "See whether replicas are on their way (`decisions --lever replicas`); else raise replicas_max.",
            "the-queue-grows",
            "1m",
        ),
        Alert(
            "TidegateTenantBudgetUsed",
            f"max by (model, tenant) ({used}) / max by (model, tenant) ({budget}) > 0.9",
            "ticket",
            "{{ $labels.tenant }} has used {{ $value | humanizePercentage }} of its budget at {{ $labels.model }}.",
            "Ask the tenant, or raise tenants.NAME.budget_usd_max; at 100 % its requests get 429.",
            "a-tenants-budget-is-nearly-used",
            "1m",
        ),
    ]


def all_alerts() -> list[Alert]:
    """Every alert."""
    return [*burn_alerts(), *control_alerts(), *fleet_alerts()]


def groups() -> list[dict[str, Any]]:
    """All rules, as Prometheus groups them."""
    return [
        {"name": "tidegate-budgets", "interval": "30s", "rules": recordings()},
        {"name": "tidegate-burn", "interval": "30s", "rules": [alert.rule() for alert in burn_alerts()]},
        {
            "name": "tidegate-control",
            "interval": "15s",
            "rules": [alert.rule() for alert in (*control_alerts(), *fleet_alerts())],
        },
    ]


def text() -> str:
    """The rule file. Its values are JSON's, which YAML reads: no library, and nothing that YAML would guess at."""
    lines = ["# Written by `./tidegate dashboards export` from dashboards/alerts.py.", "groups:"]
    for group in groups():
        lines += [f"  - name: {group['name']}", f"    interval: {group['interval']}", "    rules:"]
        for rule in group["rules"]:
            lines += _rule(rule)
    return "\n".join(lines) + "\n"


def _rule(rule: Mapping[str, Any]) -> Sequence[str]:
    lines = []
    for number, (key, value) in enumerate(rule.items()):
        lead = "      - " if number == 0 else "        "
        if isinstance(value, Mapping):
            lines += [f"{lead}{key}:"] + [f"          {name}: {_plain(text_)}" for name, text_ in value.items()]
        else:
            lines.append(f"{lead}{key}: {_plain(value)}")
    return lines


def _plain(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
