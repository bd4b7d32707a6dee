"""Pictures of simulated runs as PNG files: load and replicas, TTFT over time, distributions, figures side by side.

Colours are Okabe and Ito's, which colour-blind people tell apart; every arm has a line style of its own as well. Axes
carry units, objectives are lines with their value. matplotlib draws into files only, no screen is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoscaling.simulator.comparison import METRIC_BY_KEY, Compared
from autoscaling.simulator.records import RunResult
from autoscaling.simulator.report import percentile
from policies.config import ObjectivesConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from autoscaling.planner import Trial

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
STYLES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (7, 3)))
"""Of the arms, in order; begins anew after eight."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

BINS_MAX = 120
"""Points of a line over time; fewer where they would be closer than a second."""

DISTRIBUTION_POINTS = 400

BARS = (
    "attainment_share", "goodput_ps", "ttft_p95_ms", "tpot_p95_ms", "hit_share", "gpu_hours", "successes_per_usd",
    "tasks_per_usd",
)  # fmt: skip
"""Figures of the comparison, as ratios to the first arm."""

BAR_MAX = 4.0
"""Longer bars are cut there and labelled with their value."""


class PlotError(RuntimeError):
    """Pictures cannot be drawn; the words say what to do."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One run to draw."""

    name: str
    result: RunResult


def save_run_plots(folder: Path, arms: Sequence[Arm], objectives: ObjectivesConfig) -> list[Path]:
    """Draw load and replicas, TTFT over time and the distributions of ``arms`` (of one load) into ``folder``.

    Raises:
        PlotError: matplotlib is absent.
        OSError: the folder cannot be written.
    """
    drawn: list[tuple[str, Figure]] = [
        ("load_and_replicas", load_and_replicas(arms)),
        ("ttft_over_time", ttft_over_time(arms, objectives)),
        ("distributions", distributions(arms, objectives)),
    ]
    return [save_figure(folder, name, figure) for name, figure in drawn]


def save_comparison_plot(folder: Path, compared: Sequence[Compared]) -> Path:
    """Draw the figures of a comparison into ``folder``. Raises as :func:`save_run_plots`."""
    return save_figure(folder, "comparison", comparison(compared))


def save_figure(folder: Path, name: str, figure: Figure) -> Path:
    """Write ``figure`` as ``name``.png into ``folder`` and return its path. Raises ``OSError``."""
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return path


def new_figure(rows: int, height: float, *, share_x: bool = False) -> tuple[Figure, list[Axes]]:
    """Return a figure of ``rows`` panels in the project's style; one panel a row. Raises :class:`PlotError`."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotError("pictures need matplotlib, which is not installed; run: make install") from None
    style: dict[Any, Any] = {
        "font.size": 13, "axes.titlesize": 14, "axes.labelsize": 13, "legend.fontsize": 12, "axes.grid": True,
        "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 110,
    }  # fmt: skip
    with rc_context(style):
        figure = Figure(figsize=(11, height), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(rows, 1, sharex=share_x, squeeze=False)
    return figure, [panel for row in panels for panel in row]


def look(i: int) -> dict[str, Any]:
    """Return colour and line style of arm ``i``."""
    return {"color": COLOURS[i % len(COLOURS)], "linestyle": STYLES[i % len(STYLES)], "linewidth": 2.0}


def legend(panel: Axes) -> None:
    """Add the legend at the right of ``panel``, where it hides nothing."""
    panel.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=12)


# --- time -------------------------------------------------------------------------------------------------------------


def time_unit(end_s: float) -> tuple[float, str]:
    """Return the divisor and the name of the unit in which ``end_s`` is read best."""
    if end_s <= 600:
        return 1.0, "s"
    return (60.0, "min") if end_s <= 4 * 3_600 else (3_600.0, "h")


def _end_s(arms: Sequence[Arm]) -> float:
    return max((arm.result.end_ns / 1e9 for arm in arms), default=0.0) or 1.0


def _binned(times_s: Sequence[float], values: Sequence[float], end_s: float) -> list[list[float]]:
    count = bins_of(end_s)
    bins: list[list[float]] = [[] for _ in range(count)]
    for at_s, value in zip(times_s, values, strict=True):
        bins[min(count - 1, int(at_s / end_s * count))].append(value)
    return bins


def bins_of(end_s: float) -> int:
    """Return how many bins a run of ``end_s`` is drawn in."""
    return max(10, min(BINS_MAX, int(end_s)))


def load_and_replicas(arms: Sequence[Arm]) -> Figure:
    """Return arrivals and successful answers per second above, replicas ready and wished for below."""
    figure, (above, below) = new_figure(2, 7.5, share_x=True)
    end_s = _end_s(arms)
    unit_s, unit = time_unit(end_s)
    width_s = end_s / bins_of(end_s)
    middles = [(i + 0.5) * width_s / unit_s for i in range(bins_of(end_s))]
    for i, arm in enumerate(arms):
        records = arm.result.records
        arrivals_s = [at / 1e9 for at in records.arrival_ns]
        if i == 0:
            counts = [len(b) / width_s for b in _binned(arrivals_s, arrivals_s, end_s)]
            above.fill_between(middles, counts, color="0.8", label="arrivals", step="mid")
        done = [
            a + e / 1e3
            for a, e, o in zip(arrivals_s, records.e2e_ms, records.outcome, strict=True)
            if records.outcomes.names[o] == "succeeded"
        ]
        answers = [len(b) / width_s for b in _binned(done, done, end_s)]
        above.plot(middles, answers, label=f"answered, {arm.name}", **look(i))
        _replica_lines(below, arm, i, unit_s)
    above.set_ylabel("requests/s")
    above.set_title("Load")
    below.set_ylabel("replicas")
    below.set_title("Replicas (thin: wished for, thick: ready)")
    below.set_xlabel(f"time ({unit})")
    below.set_xlim(0, end_s / unit_s)
    _whole_ticks(below.yaxis)
    for panel in (above, below):
        panel.set_ylim(bottom=0)
        legend(panel)
    return figure


def _replica_lines(panel: Axes, arm: Arm, i: int, unit_s: float) -> None:
    for j, pool in enumerate(arm.result.pools):
        if not pool.timeline:
            continue
        x = [sample.at_ns / 1e9 / unit_s for sample in pool.timeline]
        style = look(i if len(arm.result.pools) == 1 else i * len(arm.result.pools) + j)
        label = arm.name if pool.role == "both" else f"{arm.name}, {pool.role}"
        panel.step(x, [s.ready for s in pool.timeline], where="post", label=label, **style)
        panel.step(x, [s.target for s in pool.timeline], where="post", **(style | {"linewidth": 0.8, "alpha": 0.8}))


def ttft_over_time(arms: Sequence[Arm], objectives: ObjectivesConfig) -> Figure:
    """Return median and quantile of the TTFT by time of arrival, with the objective."""
    figure, panels = new_figure(2, 7.5, share_x=True)
    end_s = _end_s(arms)
    unit_s, unit = time_unit(end_s)
    width_s = end_s / bins_of(end_s)
    for panel, q in zip(panels, (0.5, objectives.quantile), strict=True):
        for i, arm in enumerate(arms):
            records = arm.result.records
            known = [
                (at / 1e9, ttft)
                for at, ttft in zip(records.arrival_ns, records.ttft_ms, strict=True)
                if not math.isnan(ttft)
            ]
            bins = _binned([at for at, _ in known], [ttft for _, ttft in known], end_s)
            points = [((k + 0.5) * width_s / unit_s, percentile(sorted(b), q) / 1e3) for k, b in enumerate(bins) if b]
            panel.plot([x for x, _ in points], [y for _, y in points], label=arm.name, **look(i))
        _objective_line(panel, objectives.ttft_ms / 1e3, "s", across=True)
        panel.set_yscale("log")
        panel.set_ylabel("TTFT (s, log)")
        panel.set_title("Median" if q == 0.5 else f"{q * 100:g}th percentile")
        _plain_ticks(panel.yaxis)
        legend(panel)
    panels[-1].set_xlabel(f"time of arrival ({unit})")
    panels[-1].set_xlim(0, end_s / unit_s)
    return figure


def _objective_line(panel: Axes, value: float, unit: str, *, across: bool) -> None:
    style: dict[str, Any] = {"color": "0.35", "linewidth": 1.4, "linestyle": (0, (2, 2))}
    label = f"objective {value:g} {unit}"
    if across:
        panel.axhline(value, label=label, **style)
    else:
        panel.axvline(value, label=label, **style)


def _whole_ticks(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


def _plain_ticks(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 3.0), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


# --- distributions and figures ----------------------------------------------------------------------------------------


def distributions(arms: Sequence[Arm], objectives: ObjectivesConfig) -> Figure:
    """Return the share of all requests that had their first token, and their whole answer, within a time."""
    figure, (first, whole) = new_figure(2, 8.0)
    columns: list[tuple[Axes, str, Callable[[RunResult], list[float]]]] = [
        (first, "TTFT", lambda run: [t for t in run.records.ttft_ms if not math.isnan(t)]),
        (whole, "E2E", _completed_e2e),
    ]
    for panel, label, values_of in columns:
        for i, arm in enumerate(arms):
            values = sorted(values_of(arm.result))
            total = max(1, len(arm.result.records))
            ranks = sorted({round(k * (len(values) - 1) / DISTRIBUTION_POINTS) for k in range(DISTRIBUTION_POINTS + 1)})
            points = [(max(values[r], 0.1) / 1e3, (r + 1) / total) for r in ranks] if values else []
            panel.plot([x for x, _ in points], [y * 100 for _, y in points], label=arm.name, **look(i))
        panel.set_xscale("log")
        _plain_ticks(panel.xaxis)
        panel.set_xlabel(f"{label} (s, log)")
        panel.set_ylabel("requests (%)")
        panel.set_ylim(0, 101)
    first.set_title("Requests with their first token within ...")
    whole.set_title("Requests with their whole answer within ...")
    _objective_line(first, objectives.ttft_ms / 1e3, "s", across=False)
    legend(first)
    legend(whole)
    return figure


def _completed_e2e(run: RunResult) -> list[float]:
    records = run.records
    return [e for e, o in zip(records.e2e_ms, records.outcome, strict=True) if records.outcomes.names[o] == "succeeded"]


def tried(trials: Sequence[Trial], attainment: float, best: Trial | None) -> Figure:
    """Return the tried fleets by price and share of requests kept; filled where all objectives held."""
    figure, (panel,) = new_figure(1, 6.0)
    sorts = list(dict.fromkeys(_sort_name(t) for t in trials))
    for i, sort in enumerate(sorts):
        own = [t for t in trials if _sort_name(t) == sort]
        for holds in (True, False):
            points = [(t.usd_per_hour, t.worst.attainment * 100) for t in own if t.holds is holds]
            panel.scatter(
                [x for x, _ in points], [y for _, y in points], s=80, marker=MARKERS[i % len(MARKERS)],
                facecolors=COLOURS[i % len(COLOURS)] if holds else "none", edgecolors=COLOURS[i % len(COLOURS)],
                linewidths=1.8, label=sort if holds else None,
            )  # fmt: skip
    if best is not None:
        at = (best.usd_per_hour, best.worst.attainment * 100)
        panel.annotate("best", at, (0, -24), textcoords="offset points", ha="center", fontsize=12)
    panel.axhline(attainment * 100, color="0.35", linewidth=1.4, linestyle=(0, (2, 2)), label=f"goal {attainment:.1%}")
    panel.set_xlabel("price of the fleet ($/h)")
    panel.set_ylabel("requests within the objectives (%)")
    panel.set_title("Fleets tried (filled: every objective held)")
    panel.set_xlim(left=0)
    legend(panel)
    return figure


def _sort_name(trial: Trial) -> str:
    divided = ", divided" if trial.candidate.divided else ""
    return f"{trial.candidate.profile.name}{divided}, {trial.candidate.mode}"


def comparison(compared: Sequence[Compared]) -> Figure:
    """Return bars of each figure's ratio to the first arm, with the range over seeds."""
    keys = [key for key in BARS if any(math.isfinite(arm.ratios[key].median) for arm in compared[1:])]
    figure, (panel,) = new_figure(1, 2.0 + 0.26 * max(1, len(keys)) * (len(compared) + 0.5))
    height = 0.85 / len(compared)
    for i, arm in enumerate(compared):
        for k, key in enumerate(keys):
            if math.isfinite(arm.ratios[key].median):
                _bar(panel, k + i * height, height * 0.9, arm, key, i, arm.name if k == 0 else None)
    panel.axvline(1.0, color="0.35", linewidth=1.2)
    labels = [f"{METRIC_BY_KEY[key].label} ({_better(key)})" for key in keys]
    panel.set_yticks([k + 0.425 - height / 2 for k in range(len(keys))], labels)
    panel.set_ylim(len(keys) - 0.1, -0.6 * height - 0.1)
    panel.set_xlim(left=0)
    over = "median of seeds, lines: range" if len(compared[0].runs) > 1 else "one seed"
    panel.set_xlabel(f"ratio to {compared[0].name} ({over})")
    panel.grid(visible=False, axis="y")
    legend(panel)
    return figure


def _bar(panel: Axes, y: float, height: float, arm: Compared, key: str, i: int, label: str | None) -> None:
    ratio = arm.ratios[key]
    length, high = min(ratio.median, BAR_MAX), min(ratio.high, BAR_MAX)
    panel.barh(y, length, height, color=COLOURS[i % len(COLOURS)], label=label)
    if len(arm.runs) > 1:
        panel.errorbar(
            [length], [y], xerr=[[max(0.0, length - ratio.low)], [max(0.0, high - length)]], color="0.2", capsize=2,
            linewidth=1,
        )  # fmt: skip
    white = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    panel.text(max(length, high) + 0.04, y, f"{ratio.median:.2f}", va="center", fontsize=11, bbox=white)


def _better(key: str) -> str:
    return {"higher": "more is better", "lower": "less is better", "": ""}[METRIC_BY_KEY[key].better]
