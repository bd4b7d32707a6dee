"""What the controller keeps after a week: ``python -m tests.bench.control_week``.

A small fleet (``tests/churn.py``) whose replicas, gateways, tenants, loads and overrides come and go reports once a
minute, and the controller ticks as often; decisions, trials, roll-backs, freezes and foreign writers are part of it.
Some of what it keeps is bounded by rings that take long to fill: forecasts know a season of a week and a little more,
and a thousand ended overrides are remembered. So the rings are filled first, by :data:`LEAD_IN_DAYS` of the same life
and by overrides that are set and taken back; then seven simulated days are measured. Everything that hangs off the
controller's state is counted at the end of each day: the mean of several ticks, since a fleet breathes. The bar: from
the beginning of the week to its end neither the bytes nor the objects of any type grow beyond noise.
"""

from __future__ import annotations

import sys
import time
from collections import Counter

from autoscaling.recommend import ReplicaScaler
from deployments.collector import collect_rarely
from policies.build import build_control
from policies.config import PolicyConfig, ScalingConfig
from policies.control.overrides import ENDED_MAX
from policies.steering import Knob, Override
from tests.bench import harness as h
from tests.churn import SECOND_NS, Churn, census

TICK_S = 60
DAYS = 7
LEAD_IN_DAYS = 14
"""By the end of these the longest season (a week and eight of its slots) is full, and numbers its slots above 256:
smaller whole numbers are shared by the interpreter and not seen as objects of their own."""

SAMPLES = 24
"""Ticks at the end of a day whose mean is taken, an hour apart in all."""

GROWTH_SHARE_MAX, GROWTH_MIN = 0.1, 60
"""More than this share, and more than so many objects of a type, is growth."""


def end_overrides(churn: Churn, number: int) -> None:
    """Set so many overrides and take them back."""
    overrides = churn.state.overrides
    for n in range(number):
        overrides.put(Override(f"early{n}", Knob.LOAD_BOUND, "*", 2, remaining_ms=60_000.0), 0)
        overrides.drop(f"early{n}", 0)


def day_of(churn: Churn, day: int) -> tuple[Counter[str], float]:
    """One day; objects by type, and bytes, as the mean of samples of its last hour."""
    ticks, every = 86_400 // TICK_S, 3_600 // TICK_S // SAMPLES
    counts: Counter[str] = Counter()
    size = 0.0
    for number in range(ticks):
        churn.tick((day * ticks + number + 1) * TICK_S * SECOND_NS, TICK_S)
        left = ticks - 1 - number
        if left < SAMPLES * every and left % every == 0:
            found, taken = census(churn.state)
            counts += found
            size += taken / SAMPLES
    return Counter({kind: round(n / SAMPLES) for kind, n in counts.items()}), size


def main() -> int:
    """Print the table; 1 where something grew."""
    collect_rarely()
    config = PolicyConfig(scaling=ScalingConfig(replicas_min=1, replicas_max=16))
    churn = Churn(build_control(config, ReplicaScaler(config), "epoch"), seed=1)
    end_overrides(churn, ENDED_MAX)
    days, rows = [], []
    for day in range(LEAD_IN_DAYS + DAYS):
        counts, size = day_of(churn, day)
        row = [
            day + 1 - LEAD_IN_DAYS, f"{size / 1024:.0f}", sum(counts.values()), counts["dict"], counts["str"],
            counts["tuple"], churn.state.ledger.last_seq, len(churn.state.ledger), f"{time.process_time():.0f}",
        ]  # fmt: skip
        print("day", *row, file=sys.stderr, flush=True)
        if day >= LEAD_IN_DAYS - 1:
            days.append((counts, size))
            rows.append(row)
    heads = ["day", "KiB", "objects", "dicts", "strings", "tuples", "decisions", "kept", "CPU s"]
    h.table(f"{DAYS} days in ticks of {TICK_S} s after {LEAD_IN_DAYS} more, {churn.made} names", heads, rows)
    (first, first_size), (last, last_size) = days[0], days[-1]
    grown = [
        [kind, first[kind], n] for kind, n in sorted(last.items())
        if n - first[kind] > max(GROWTH_MIN, GROWTH_SHARE_MAX * first[kind])
    ]  # fmt: skip
    h.table("types that grew", ["type", "day 0", f"day {DAYS}"], grown or [["none", "", ""]])
    share = last_size / first_size - 1
    ok = not grown and share <= GROWTH_SHARE_MAX
    return 0 if h.verdict(ok, f"bytes {share:+.1%} from day 0 to day {DAYS}, {len(grown)} types grew") else 1


if __name__ == "__main__":
    sys.exit(main())
