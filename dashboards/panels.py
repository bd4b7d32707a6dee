"""Panels and boards in the words this project uses, made with Grafana's own builders.

A panel says what it shows and what to make of it. A board gets the variables its expressions name, each with *All*, a
link to every other board, and, where asked for, the controller's decisions as annotations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from string import ascii_uppercase
from types import MappingProxyType
from typing import Any, TypeAlias

from grafana_foundation_sdk.builders import common as build_common
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as model

from dashboards.promql import select

TAG = "tidegate"
"""Tag of every board, by which they link to each other."""
SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
DECISIONS = "Decisions"
Part: TypeAlias = timeseries.Panel | stat.Panel | build.Row

VALUES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "model": ("tidegate_inflight_requests", "model"),
        "instance": ('tidegate_inflight_requests{model=~"$model"}', "instance"),
        "class": ('tidegate_class_demand_per_second{model=~"$model"}', "priority"),
        "tenant": ('tidegate_tenant_requests_total{model=~"$model"}', "tenant"),
        "replica": ('tidegate_replica_running_seqs{model=~"$model"}', "replica"),
    }
)
"""Variable -> series whose label has its values, and that label; in the order in which boards show them."""


def query(expr: str, legend: str = "") -> prometheus.Dataquery:
    """One expression over the time that is shown; ``legend`` may name labels, ``{{reason}}``."""
    return prometheus.Dataquery().expr(expr).legend_format(legend or "__auto").range()


def graph(
    title: str,
    meaning: str,
    unit: str,
    *queries: prometheus.Dataquery,
    stacked: bool = False,
    most: float | None = None,
) -> timeseries.Panel:
    """Lines over time. ``unit``: Grafana's id of one. ``most``: end of the axis."""
    panel = timeseries.Panel().title(title).description(meaning).unit(unit).datasource(SOURCE).span(12).height(8)
    panel = panel.min(0).line_width(1).fill_opacity(25 if stacked else 5).show_points(common.VisibilityMode.NEVER)
    legend = build_common.VizLegendOptions().display_mode(common.LegendDisplayMode.TABLE).show_legend(True)
    panel = panel.legend(legend.placement(common.LegendPlacement.BOTTOM).calcs(["mean", "max"]))
    panel = panel.tooltip(build_common.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    if stacked:
        panel = panel.stacking(build_common.StackingConfig().mode(common.StackingMode.NORMAL))
    if most is not None:
        panel = panel.max(most)
    for letter, one in zip(ascii_uppercase, queries, strict=False):
        panel = panel.with_target(one.ref_id(letter))
    return panel


def number(title: str, meaning: str, unit: str, expr: str, good: tuple[float, float] | None = None) -> stat.Panel:
    """The present value, large. ``good``: from where it is yellow, and green; red below. None: no colour."""
    panel = stat.Panel().title(title).description(meaning).unit(unit).datasource(SOURCE).span(4).height(5)
    panel = panel.reduce_options(build_common.ReduceDataOptions().calcs(["lastNotNull"]))
    panel = panel.graph_mode(common.BigValueGraphMode.AREA).no_value("unknown")
    steps = [model.Threshold(value=None, color="text")]
    if good is not None:
        steps = [
            model.Threshold(value=None, color="red"),
            model.Threshold(value=good[0], color="yellow"),
            model.Threshold(value=good[1], color="green"),
        ]
    panel = panel.thresholds(build.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps))
    return panel.with_target(query(expr).ref_id("A"))


def row(title: str) -> build.Row:
    """A heading over the panels that follow."""
    return build.Row(title)


def board(uid: str, title: str, meaning: str, *parts: Part, decisions: bool = False) -> dict[str, Any]:
    """A whole board as Grafana's JSON, from rows and panels in the order in which they are read."""
    made = build.Dashboard(f"Tidegate / {title}").uid(uid).description(meaning).tags([TAG]).timezone("browser")
    made = made.time("now-1h", "now").refresh("30s").tooltip(model.DashboardCursorSync.CROSSHAIR).readonly()
    links = build.DashboardLink("Boards").type(model.DashboardLinkType.DASHBOARDS).tags([TAG])
    made = made.link(links.as_dropdown(True).include_vars(True).keep_time(True))
    for part in parts:
        made = made.with_row(part) if isinstance(part, build.Row) else made.with_panel(part)
    if decisions:
        made = made.annotation(_decisions())
    panels = _plain(made)
    used = set(re.findall(r"\$(\w+)", json.dumps(panels)))
    made = made.with_variable(build.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    for name in VALUES:
        if name in used or name == "model":
            made = made.with_variable(_variable(name))
    document = _plain(made)
    for position, panel in enumerate(document["panels"], 1):
        panel["id"] = position
    for annotation in document["annotations"].get("list", ()):
        # Grafana's builder has no place for these two.
        annotation |= {"titleFormat": "{{lever}}: {{reason}}", "step": "15s"}
    return document


def _decisions() -> build.AnnotationQuery:
    new = select("control_decisions_total", acted="true")
    expr = f"sum by (lever, reason) ({new} unless {new} offset 30s or increase({new}[30s]) > 0)"
    made = build.AnnotationQuery().name(DECISIONS).datasource(SOURCE).enable(True).icon_color("orange")
    return made.expr(expr)


def _variable(name: str) -> build.QueryVariable:
    series, label = VALUES[name]
    found = build.QueryVariable(name).label(name).datasource(SOURCE).query(f"label_values({series}, {label})")
    found = found.refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(model.VariableSort.ALPHABETICAL_ASC)
    everything = model.VariableOption(selected=True, text="All", value="$__all")
    return found.multi(True).include_all(True).all_value(".*").current(everything)


def _plain(made: build.Dashboard) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(JSONEncoder(sort_keys=True).encode(made.build()))
    return document
