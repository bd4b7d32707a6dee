"""Summaries as text: one run in a dozen lines, several runs side by side, on a terminal and in a pipe alike.

Nothing is cut off: away from a terminal a table is as wide as it needs to be. Numbers carry their unit, unknown ones
are a dash, and nothing is told by colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from autoscaling.simulator.comparison import METRIC_BY_KEY, Compared, Metric, Spread
from autoscaling.simulator.report import Latency, PoolSummary, Summary

PIPE_COLUMNS = 240
"""Width away from a terminal: wide enough for eight arms."""

COMPARED = (
    "attainment_share", "goodput_ps", "ttft_p50_ms", "ttft_p95_ms", "ttft_p99_ms", "itl_p95_ms", "tpot_p50_ms",
    "tpot_p95_ms", "e2e_p50_ms", "e2e_p95_ms", "hit_share", "refused", "failed", "cancelled", "lost", "retries",
    "preemptions", "replicas_mean", "replicas_max", "starts", "direction_changes", "gpu_hours", "usd",
    "successes_per_usd", "tasks_per_usd",
)  # fmt: skip
"""Figures of a comparison on a terminal; JSON has all."""

ZERO_HIDDEN = frozenset({"refused", "failed", "cancelled", "lost", "retries", "preemptions", "direction_changes"})
"""Rows that are left out where every arm has 0."""


def console_for(console: Console | None = None) -> Console:
    """Return a console that does not wrap tables away from a terminal."""
    console = console or Console(highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = PIPE_COLUMNS
    return console


def natural_width(console: Console, table: Table) -> int:
    """Return the columns that ``table`` needs to be whole."""
    return console.measure(table, options=console.options.update(width=10_000)).maximum


def print_table(console: Console, table: Table) -> None:
    """Print ``table`` whole: where the terminal is too narrow its lines run on in the next, no figure is cut off."""
    before = console.width
    console.width = max(before, natural_width(console, table))
    console.print(table)
    console.width = before


# --- numbers ----------------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Return a number with about three digits that matter, thousands separated; a dash where it is not known."""
    if not math.isfinite(value):
        return "-"
    size = abs(value)
    if value == int(value) and size < 1e15:
        return f"{int(value):,}"
    if 0 < size < 0.1:
        return f"{value:.{2 - math.floor(math.log10(size))}f}"
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:,.{digits}f}"


def share(value: float) -> str:
    """Return a share as a percentage."""
    return "-" if not math.isfinite(value) else f"{value * 100:.1f} %"


def shown(metric: Metric, value: float) -> str:
    """Return a figure without its unit; shares as percentages."""
    return share(value) if metric.unit == "share" else number(value)


def row_label(metric: Metric) -> str:
    """Return the name of a figure with its unit."""
    return metric.label if metric.unit in ("", "share") else f"{metric.label} ({metric.unit})"


def spread_text(metric: Metric, value: Spread, runs: int) -> str:
    """Return the median, with its range where there are several runs that differ."""
    text = shown(metric, value.median)
    if runs < 2 or value.low == value.high or not math.isfinite(value.median):
        return text
    return f"{text} ({shown(metric, value.low)}..{shown(metric, value.high)})"


def ratio_text(value: Spread, runs: int) -> str:
    """Return a ratio to the first arm; empty where there is none."""
    if not math.isfinite(value.median):
        return ""
    if runs > 1 and value.high - value.low >= 0.005:
        return f"x{value.median:.2f} ({value.low:.2f}..{value.high:.2f})"
    return f"x{value.median:.2f}"


# --- one run ----------------------------------------------------------------------------------------------------------


def print_summary(console: Console, summary: Summary, note: str = "") -> None:
    """Print one run."""
    head = f"{summary.name}: {summary.requests:,} requests in {number(summary.span_s)} s, seed {summary.seed}"
    console.print(f"[bold]{escape(head)}[/]{escape(note)}", soft_wrap=True)
    for label, text in _lines(summary):
        console.print(f"  {label:<20}{escape(text)}", soft_wrap=True)
    print_table(console, _latencies(summary))
    print_table(console, _pools(summary))


def _lines(summary: Summary) -> Iterable[tuple[str, str]]:
    limits = f"TTFT <= {number(summary.ttft_ms_max)} ms, mean gap <= {number(summary.itl_ms_max)} ms"
    alone = f"TTFT alone {_figure(summary, 'ttft_kept_share')}, gap alone {_figure(summary, 'tpot_kept_share')}"
    yield "objectives kept", f"{share(summary.attainment)}  (whole answer, {limits}; {alone})"
    good, all_answers = number(summary.goodput_ps), number(summary.throughput_ps)
    yield "goodput", f"{good} successes/s of {all_answers} answers/s, {number(summary.output_tps)} output tokens/s"
    if summary.tasks != summary.requests - summary.left:
        yield "tasks", f"{summary.tasks_succeeded:,} of {summary.tasks:,} succeeded ({share(summary.task_attainment)})"
    yield "prefix cache hits", f"{share(summary.hit_share)} of the prompt tokens"
    ended = [
        f"{outcome} {sum(reasons.values()):,} ({', '.join(f'{r} {n:,}' for r, n in reasons.items())})"
        for outcome, reasons in summary.endings.items()
    ]
    yield "not completed", "; ".join(ended) or "none"
    if summary.retries or summary.client_retries:
        yield "repeated", f"by gateways {summary.retries:,}, by clients {summary.client_retries:,}"
    worth = f"{number(summary.successes_per_usd)} successes and {number(summary.tasks_per_usd)} successful tasks"
    yield "cost", f"{number(summary.gpu_hours)} GPU-hours, ${number(summary.usd)}; per dollar {worth}"


def _figure(summary: Summary, key: str) -> str:
    metric = METRIC_BY_KEY[key]
    return shown(metric, metric.value(summary))


def _latencies(summary: Summary) -> Table:
    table = _table("", "p50", "p90", "p95", "p99", "mean", "of")
    rows: list[tuple[str, Latency]] = [
        ("TTFT (ms)", summary.ttft),
        ("ITL (ms), every gap", summary.itl),
        ("TPOT (ms), mean gap", summary.tpot),
        ("E2E (ms)", summary.e2e),
    ]
    for label, x in rows:
        table.add_row(label, *(number(v) for v in (x.p50_ms, x.p90_ms, x.p95_ms, x.p99_ms, x.mean_ms, x.count)))
    return table


def _pools(summary: Summary) -> Table:
    table = _table("fleet", *(escape(p.profile) for p in summary.pools))
    rows: list[tuple[str, Callable[[PoolSummary], str]]] = [
        ("role", lambda p: p.role),
        ("replicas, mean", lambda p: f"{p.replicas_mean:.2f}"),
        ("replicas, most", lambda p: str(p.replicas_max)),
        ("starts", lambda p: str(p.starts)),
        ("turns", lambda p: str(p.direction_changes)),
        ("busy", lambda p: share(p.busy_share)),
        ("preemptions", lambda p: number(p.preemptions)),
        ("GPU-hours", lambda p: number(p.gpu_hours)),
        ("cost ($)", lambda p: number(p.usd)),
    ]
    for label, text in rows:
        table.add_row(label, *map(text, summary.pools))
    return table


# --- several ----------------------------------------------------------------------------------------------------------


def print_comparison(console: Console, arms: Sequence[Compared]) -> None:
    """Print arms side by side: the median of each figure and its ratio to the first arm."""
    seeds = max(len(arm.runs) for arm in arms)
    over = f", median (lowest..highest) of {seeds} seeds" if seeds > 1 else ""
    console.print(f"[bold]comparison[/]{over}; x: ratio to {escape(arms[0].name)}", soft_wrap=True)
    begin = 0
    while begin < len(arms):
        end = len(arms)
        table = _compared(arms, begin, end)
        while end > begin + 1 and natural_width(console, table) > console.width:
            end -= 1
            table = _compared(arms, begin, end)
        print_table(console, table)
        begin = end


def _compared(arms: Sequence[Compared], begin: int, end: int) -> Table:
    """Return the columns of some of ``arms``; the rows are the same for all."""
    table = _table("", *(escape(arm.name) for arm in arms[begin:end]))
    for key in COMPARED:
        metric = METRIC_BY_KEY[key]
        if key in ZERO_HIDDEN and all(arm.figures[key].high == 0 for arm in arms):
            continue
        cells = []
        for i, arm in enumerate(arms[begin:end], begin):
            times = ratio_text(arm.ratios[key], len(arm.runs)) if i else ""
            text = spread_text(metric, arm.figures[key], len(arm.runs))
            cells.append(f"{text}  {times}" if times else text)
        table.add_row(row_label(metric), *cells)
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table
