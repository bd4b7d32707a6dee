"""Conditions in the simulator: every trouble with ten seeds, and a whole day in which nothing is wrong.

For each trouble of ``tests/sim/troubles.py``: the time from its beginning to each condition that it must cause, over
the seeds, against the time that ``policies/control/catalogue.py`` states; conditions that were active before it began;
and whether the first lever to move for it was a right one (where no lever helps: none may move for a symptom). Then
``tests/sim/diurnal.py``: 24 simulated hours of a diurnal load on a fleet that follows it, in which no condition may
become active, except that a fleet may be called too large when it is then made smaller.

The bars: every condition within its time in every run, none before, a right lever first in every run, no false alarm.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from statistics import median

from policies.control.catalogue import SPECS
from tests.bench import harness as h
from tests.sim import diurnal
from tests.sim.troubles import CALM_S, TROUBLES, right_lever, times, watch


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of one trouble."""

    name: str
    seed: int
    times: dict[str, float | None]
    before: tuple[str, ...]
    first: str
    right: bool


def outcome(name: str, seed: int) -> Outcome:
    """Run one trouble once."""
    trouble = next(t for t in TROUBLES if t.name == name)
    seen, _ = watch(trouble, seed)
    first = seen.first_lever(trouble.first, CALM_S)
    return Outcome(
        name,
        seed,
        times(trouble, seen),
        tuple(sorted(seen.active_between(trouble.quiet_s, CALM_S))),
        f"{first[1].lever.value} at {first[0]:.0f} s" if first is not None else "nobody",
        right_lever(trouble, seen),
    )


def troubles(names: Sequence[str], seeds: int, jobs: int) -> bool:
    """Every trouble with every seed; whether all bars hold."""
    with ProcessPoolExecutor(jobs) as pool:
        runs = [pool.submit(outcome, name, seed) for seed in range(1, seeds + 1) for name in names]
        for done in as_completed(runs):
            print("ran", done.result(), file=sys.stderr, flush=True)
        found = [run.result() for run in runs]
    rows, ok = [], True
    for name in names:
        of_name = [o for o in found if o.name == name]
        for condition in of_name[0].times:
            values = [o.times[condition] for o in of_name]
            seen = sorted(v for v in values if v is not None)
            in_time = sum(v <= SPECS[condition].detect_s for v in seen)
            ok &= in_time == len(values)
            rows.append([
                name, condition, f"{median(seen):.0f}" if seen else "-", f"{seen[-1]:.0f}" if seen else "-",
                SPECS[condition].detect_s, f"{in_time} of {len(values)}",
            ])  # fmt: skip
    h.table("time to each condition, s", ["trouble", "condition", "median", "slowest", "stated", "in time"], rows)
    levers = []
    for name in names:
        of_name = [o for o in found if o.name == name]
        right, early = sum(o.right for o in of_name), sum(bool(o.before) for o in of_name)
        ok &= right == len(of_name) and not early
        wanted = next(t for t in TROUBLES if t.name == name).first
        levers.append([
            name, ", ".join(lever.value for lever in wanted) or "none", f"{right} of {len(of_name)}",
            "; ".join(sorted({o.first for o in of_name if not o.right})) or "-", early,
        ])  # fmt: skip
    h.table(
        "who moved first, and alarms before the trouble",
        ["trouble", "right levers", "right first", "wrong", "runs with an alarm before"],
        levers,
    )
    return h.verdict(ok, f"{len(found)} runs: every condition in its time, none before, a right lever first")


def day(hours: float, seed: int) -> bool:
    """A day without trouble; whether there was no false alarm."""
    alarms, requests = diurnal.day(seed, hours * 3_600, 86_400)
    rows = [[a.name, f"{a.begin_s / 3600:.2f}", f"{a.end_s - a.begin_s:.0f}", a.false, a.text] for a in alarms.found]
    title = (
        f"{hours:g} h of diurnal load: {requests} requests, replicas {sorted(alarms.replicas)}, {alarms.ticks} ticks"
    )
    h.table(title, ["condition", "at (h)", "for (s)", "false", "text"], rows or [["none", "", "", "", ""]])
    false = len(alarms.false())
    return h.verdict(false == 0, f"{false} false alarms in {hours:g} h; {len(alarms.found)} true ones")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--hours", type=float, default=24.0, help="of the day without trouble; 0: none")
    parser.add_argument("--only", nargs="*", default=[t.name for t in TROUBLES], help="troubles; none: only the day")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    passed = [troubles(given.only, given.seeds, given.jobs)] if given.only else []
    if given.hours > 0:
        passed.append(day(given.hours, seed=1))
    sys.exit(0 if all(passed) else 1)
