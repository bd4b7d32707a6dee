"""Ten times capacity for a minute, by clients that retry: goodput, accepted TTFT, memory, recovery.

Four emulated replicas behind the real system. Steady loads around capacity give the best steady goodput: answers whose
first byte came within the TTFT objective, per second. Then ten times capacity arrives, whatever becomes of it. Each
client tries four times within ten seconds; every other one honours ``Retry-After`` and gives up when that is too long
for it, the rest come back after 0.1 s, 0.2 s, 0.4 s. Then half of capacity arrives, to see when everything is well
again. TTFT counts from the attempt that was accepted.

Recovery is the time from the end of the overload to the arrival of the last fresh request that failed, was refused at
its first try, or got its first byte late. The second fleet has one replica whose steps take ten times as long all the
time, also in its steady loads; its goodput is compared with those.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from tests.bench import fleet as f
from tests.bench import harness as h
from tests.bench.wire import COMPLETIONS, Reply, Wire, codes, completion

REPLICAS, SLOTS, TOKENS, TTFT_MS = 4, 4, 32, 2_000.0
STEP = {"a_ms": 30, "b_ms": 1, "c_ms": 0, "d_ms": 0.05}
EMULATED: dict[str, Any] = {"step": STEP, "running_seqs_max": SLOTS, "kv_blocks": 2_048, "step_tokens_max": 512}
PROMPT_TOKENS = (40, 200)
CAPACITY = REPLICAS * SLOTS / (TOKENS * (STEP["a_ms"] + STEP["b_ms"] * SLOTS) / 1e3)
"""Requests per second that the law of the engines allows, prompts left out."""
STEADY = (0.7, 0.85, 1.0, 1.15)
TIMES, TRIES, PATIENCE_S = 10.0, 4, 10.0
GOODPUT_SHARE_MIN, RECOVERY_S_MAX, RSS_GROWTH_MAX = 0.9, 10.0, 0.1
SETTLE_S = 3.0
"""Left out at the beginning of each phase."""


@dataclass
class Call:
    """One user's request: all of its tries."""

    at_s: float
    replies: list[Reply] = field(default_factory=list)

    @property
    def last(self) -> Reply:
        """How it ended."""
        return self.replies[-1]

    @property
    def good(self) -> bool:
        """Answered, and its first byte in time."""
        return self.last.ok and (self.last.ttft_ms or 0) <= TTFT_MS

    @property
    def ended_s(self) -> float:
        """When the last byte came."""
        return self.last.sent_s + self.last.e2e_ms / 1e3


async def call(wire: Wire, rng: random.Random, patient: bool, tries: int) -> Call:
    """Try up to ``tries`` times."""
    made = Call(time.perf_counter())
    body = completion(f.prompt(rng, rng.randint(*PROMPT_TOKENS)), TOKENS)
    for attempt in range(tries):
        reply = await wire.post(COMPLETIONS, body)
        made.replies.append(reply)
        if reply.ok or attempt + 1 == tries:
            break
        asked_s = reply.retry_after_s if patient else None
        pause_s = asked_s if asked_s is not None else 0.1 * 2**attempt * rng.uniform(0.5, 1.5)
        if time.perf_counter() + pause_s > made.at_s + PATIENCE_S:
            break
        await asyncio.sleep(pause_s)
    return made


async def phase(wire: Wire, rate: float, seconds: float, seed: str, tries: int = TRIES) -> list[asyncio.Task[Call]]:
    """Let requests arrive at random at ``rate`` per second; their tasks, which may still run."""
    rng, begin, at, made = random.Random(seed), time.perf_counter(), 0.0, []
    while (at := at + rng.expovariate(rate)) < seconds:
        await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
        made.append(asyncio.create_task(call(wire, random.Random(rng.random()), rng.random() < 0.5, tries)))
    return made


def goodput(calls: list[Call], begin_s: float, end_s: float) -> float:
    """Good answers that ended in this time, per second."""
    return sum(c.good for c in calls if begin_s <= c.ended_s <= end_s) / (end_s - begin_s)


@dataclass
class Outcome:
    """What one fleet did."""

    steady: dict[float, float]
    overload: float
    offered: float
    attempts: float
    ttft_ms: list[float]
    rss: tuple[float, float, float]
    """Before, largest in the first and in the second half of the overload, MiB."""
    recovery_s: float
    ends: str
    split: str
    """Where the gateway itself saw the time of first bytes go."""

    @property
    def share(self) -> float:
        """Goodput under overload over the best steady one."""
        return self.overload / max(self.steady.values())


async def one_fleet(options: argparse.Namespace) -> Outcome:
    """Steady loads, overload, recovery."""
    wire, memory, steady = Wire(), f.Memory(f.gateway_process()), {}
    for share in STEADY:
        begin = time.perf_counter()
        tasks = await phase(wire, share * CAPACITY, options.steady, f"steady {share}")
        calls = [await task for task in tasks]
        steady[share] = goodput(calls, begin + SETTLE_S, begin + options.steady)
        print(
            f"steady at {share:g} of capacity: {steady[share]:.1f}/s good; {codes([c.last for c in calls])}", flush=True
        )
    memory.start()
    await asyncio.sleep(2)
    begin = time.perf_counter()
    before, page = memory.samples[-1][1], await asyncio.to_thread(f.metrics)
    tasks = await phase(wire, TIMES * CAPACITY, options.seconds, "overload")
    end = time.perf_counter()
    later = await asyncio.to_thread(f.metrics)
    fresh = await phase(wire, 0.5 * CAPACITY, options.recovery, "after")
    after = [await task for task in fresh]
    calls = [await task for task in tasks]
    bad = [c.at_s - end for c in after if not c.good or len(c.replies) > 1]
    await memory.stop()
    middle = (begin + end) / 2
    replies = [r for c in calls for r in c.replies]
    wire.close()
    return Outcome(
        steady,
        goodput(calls, begin + SETTLE_S, end),
        len(calls) / (end - begin),
        len([r for r in replies if r.sent_s <= end]) / (end - begin),
        [r.ttft_ms for r in replies if r.ok and r.ttft_ms is not None],
        (before, max(memory.between(begin, middle)), max(memory.between(middle, end))),
        max([0.0, *bad]),
        codes(replies),
        ", ".join(
            f"{name} {f.quantile_ms(page, later, f'tidegate_{name}_seconds', 0.95):.0f} ms"
            for name in ("ttft", "queue", "route", "engine_ttft")
        ),
    )


def told(name: str, found: Outcome) -> bool:
    """Print one fleet's bars."""
    ttft = h.quantile(found.ttft_ms, 0.95)
    print(f"\n{name}: endings of all attempts: {found.ends}")
    print(f"{name}: p95 at the gateway, by bucket: {found.split}")
    growth = found.rss[2] / found.rss[1] - 1
    return all(
        [
            h.verdict(
                found.share >= GOODPUT_SHARE_MIN,
                f"{name}: goodput {found.share:.2f} of the best steady one (bar {GOODPUT_SHARE_MIN:g})",
            ),
            h.verdict(ttft <= TTFT_MS, f"{name}: accepted TTFT p95 {ttft:.0f} ms (objective {TTFT_MS:.0f} ms)"),
            h.verdict(
                growth <= RSS_GROWTH_MAX,
                f"{name}: gateway memory {growth:+.1%} in the second half (bar {RSS_GROWTH_MAX:.0%})",
            ),
            h.verdict(
                found.recovery_s <= RECOVERY_S_MAX,
                f"{name}: recovered {found.recovery_s:.1f} s after the overload (bar {RECOVERY_S_MAX:g} s)",
            ),
        ]
    )


def main(options: argparse.Namespace) -> int:
    """Run the fleets, print the table, return the exit status."""
    found: dict[str, Outcome] = {}
    for name, slow in (("four alike", False), ("one of four ten times slower", True)):
        if options.fleet not in ("both", "slow" if slow else "alike"):
            continue
        fleet = f.start(REPLICAS, EMULATED, objectives={"ttft_ms": TTFT_MS})
        if slow:
            fleet.faults(fleet.counters()[0]["replica_id"], slow_factor=10.0)
        found[name] = asyncio.run(one_fleet(options))
        f.stop()
    rows = [
        [name, max(o.steady.values()), o.offered, o.attempts, o.overload, o.share, h.quantile(o.ttft_ms, 0.5),
         h.quantile(o.ttft_ms, 0.95), *o.rss, o.recovery_s]
        for name, o in found.items()
    ]  # fmt: skip
    h.table(
        f"{TIMES:g} times capacity ({CAPACITY:.1f}/s), {options.seconds:g} s; {TRIES} tries in {PATIENCE_S:g} s",
        ["fleet", "best steady goodput/s", "offered/s", "attempts/s", "goodput/s", "share", "accepted TTFT p50 ms",
         "p95 ms", "RSS before MiB", "first half", "second half", "recovery s"],
        rows,
    )  # fmt: skip
    passed = [told(name, o) for name, o in found.items()]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="of the overload")
    parser.add_argument("--steady", type=float, default=18, help="seconds of each steady load")
    parser.add_argument("--recovery", type=float, default=25, help="seconds of light load after it")
    parser.add_argument("--fleet", choices=("both", "alike", "slow"), default="both")
    given = parser.parse_args()
    with h.ray_serve():
        status = main(given)
    sys.exit(status)
