"""Azure's public traces: requests of 2023 as CSV, and request rates of a week of 2024 read off the published plots.

2023 (Azure/AzurePublicDataset, CC-BY-4.0): ``TIMESTAMP,ContextTokens,GeneratedTokens``, timestamps with up to seven
decimals of a second. 2024: ``t_min,req_per_min_low,_high,_mid,_mid_scaled`` per 7.2 minutes; ``_mid_scaled`` matches
the published totals, so that is the rate. The first sample stands at the end of its 7.2 minutes.
"""

from __future__ import annotations

from collections.abc import Iterable

from autoscaling.simulator.workload.rates import RateCurve
from autoscaling.simulator.workload.timestamps import timestamp_ns
from autoscaling.simulator.workload.trace import Table, TraceError, count_of, csv_rows, number_of

COLUMNS_2023 = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
COLUMNS_2024 = ("t_min", "req_per_min_low", "req_per_min_high", "req_per_min_mid", "req_per_min_mid_scaled")


def parse_azure(lines: Iterable[str], name: str) -> Table:
    """Requests of a 2023 trace, the first at 0; no prefixes are known. Raises :class:`TraceError`."""
    table = Table(name)
    first_ns: int | None = None
    for line, row in csv_rows(lines, name, COLUMNS_2023):
        at_ns = timestamp_ns(row["TIMESTAMP"])
        if at_ns is None:
            given = row["TIMESTAMP"][:40]
            raise TraceError(f"TIMESTAMP {given!r} is no time; expected 2023-11-16 18:17:03.9799600", name, line)
        first_ns = at_ns if first_ns is None else first_ns
        prompt_tokens = count_of(row, "ContextTokens", name, line, at_least=1)
        output_tokens = count_of(row, "GeneratedTokens", name, line, at_least=1)
        table.add(at_ns - first_ns, prompt_tokens, output_tokens, (), line)
    return table.finished()


def parse_azure_week(lines: Iterable[str], name: str) -> RateCurve:
    """Rate of a 2024 week: constant within each sample's time. Raises :class:`TraceError`."""
    steps: list[tuple[float, float]] = []
    last_s = 0.0
    for line, row in csv_rows(lines, name, COLUMNS_2024):
        end_s = number_of(row, "t_min", name, line) * 60.0
        per_minute = number_of(row, "req_per_min_mid_scaled", name, line, to=1e8)
        if end_s <= last_s:
            raise TraceError(f"t_min {row['t_min']} does not grow", name, line)
        steps.append((end_s - last_s, per_minute / 60.0))
        last_s = end_s
    if not steps:
        raise TraceError("no rates in it", name)
    return RateCurve.steps(steps, name)
