"""Every replica answers 503 for 20 s while three layers of clients try three times each: what reaches the engines.

A user's request is tried three times by an application, each of its tries three times by a library, each of those
three times by a proxy: up to 27 requests at the gateway. None of them honours ``Retry-After`` or looks at the error;
each pauses 50 to 150 ms, doubled each time. Four emulated replicas at 80 % of capacity before, during and after.
Attempts are counted by the engines themselves. The bar: at most 1.2 attempts per request of a user, over all requests
that were begun during the fault; the same per request at the gateway is printed beside it.

Recovery is the time from the end of the fault to the arrival of the last request that failed at its first try.
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

REPLICAS, SLOTS, TOKENS, LOAD = 4, 4, 20, 0.8
LAYERS, TRIES, PAUSE_S = 3, 3, 0.1
STEP = {"a_ms": 30, "b_ms": 1, "c_ms": 0, "d_ms": 0.05}
EMULATED: dict[str, Any] = {"step": STEP, "running_seqs_max": SLOTS, "kv_blocks": 2_048, "step_tokens_max": 512}
CAPACITY = REPLICAS * SLOTS / (TOKENS * (STEP["a_ms"] + STEP["b_ms"] * SLOTS) / 1e3)
ATTEMPTS_MAX, RECOVERY_S_MAX = 1.2, 15.0


@dataclass
class Call:
    """One user's request and everything that became of it."""

    at_s: float
    replies: list[Reply] = field(default_factory=list)


async def layered(wire: Wire, rng: random.Random, call: Call, body: dict[str, Any], layers: int) -> Reply:
    """One layer of clients around the next; the innermost asks the gateway."""
    for attempt in range(TRIES):
        if layers > 1:
            reply = await layered(wire, rng, call, body, layers - 1)
        else:
            reply = await wire.post(COMPLETIONS, body)
            call.replies.append(reply)
        if reply.ok or attempt + 1 == TRIES:
            break
        await asyncio.sleep(PAUSE_S * 2**attempt * rng.uniform(0.5, 1.5))
    return reply


async def load(wire: Wire, seconds: float, seed: str) -> list[asyncio.Task[Call]]:
    """Users' requests at random times; their tasks, which may still run."""
    rng, begin, at, made = random.Random(seed), time.perf_counter(), 0.0, []

    async def one() -> Call:
        call = Call(time.perf_counter())
        body = completion(f.prompt(rng, rng.randint(40, 120)), TOKENS, stream=rng.random() < 0.5)
        await layered(wire, rng, call, body, LAYERS)
        return call

    while (at := at + rng.expovariate(LOAD * CAPACITY)) < seconds:
        await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
        made.append(asyncio.create_task(one()))
    return made


async def storm(fleet: f.Fleet, seconds: float) -> int:
    """Calm, storm, calm; the exit status."""
    wire, rows = Wire(), []

    async def seen() -> int:
        return await asyncio.to_thread(fleet.total, "requests")

    async def phase(name: str, length: float, **faults: Any) -> tuple[list[asyncio.Task[Call]], int, float]:
        await asyncio.to_thread(fleet.faults, **faults)
        before, begin = await seen(), time.perf_counter()
        tasks = await load(wire, length, name)
        return tasks, await seen() - before, begin

    calm, calm_seen, _ = await phase("before", 10, kind="none")
    calm_calls = [await task for task in calm]
    storm_tasks, storm_seen, begin = await phase("storm", seconds, kind="unavailable")
    end = time.perf_counter()
    after, after_seen, _ = await phase("after", 20, kind="none")
    storm_calls = [await task for task in storm_tasks]
    after_calls = [await task for task in after]
    wire.close()
    rows = [
        row("before", calm_calls, calm_seen, 0, time.perf_counter()),
        row("all replicas 503", storm_calls, storm_seen, begin, end),
        row("after", after_calls, after_seen, 0, time.perf_counter()),
    ]
    h.table(
        f"{seconds:g} s of 503 from every replica, {LAYERS} layers of clients that try {TRIES} times",
        ["phase", "users' requests", "requests at the gateway", "attempts at engines", "per user's request",
         "per gateway request", "answered in the end"],
        rows,
    )  # fmt: skip
    print("endings in the storm:", codes([r for c in storm_calls for r in c.replies if r.sent_s <= end]))
    for second in range(0, 20, 5):
        first = [c.replies[0] for c in after_calls if second <= c.at_s - end < second + 5]
        print(f"first tries {second} to {second + 5} s after the fault:", codes(first))
    bad = [c.at_s - end for c in after_calls if not c.replies[0].ok]
    recovery_s = max([0.0, *bad])
    per_user = float(rows[1][4])
    passed = [
        h.verdict(per_user <= ATTEMPTS_MAX, f"{per_user:.2f} attempts per user's request (bar {ATTEMPTS_MAX:g})"),
        h.verdict(
            recovery_s <= RECOVERY_S_MAX,
            f"recovered {recovery_s:.1f} s after the fault (own bar {RECOVERY_S_MAX:g} s, two ejection times and more)",
        ),
    ]
    return 0 if all(passed) else 1


def row(name: str, calls: list[Call], attempts: int, begin_s: float, end_s: float) -> list[Any]:
    """One phase for the table."""
    at_gateway = sum(1 for c in calls for r in c.replies if begin_s <= r.sent_s <= end_s)
    answered = sum(c.replies[-1].ok for c in calls) / max(1, len(calls))
    return [name, len(calls), at_gateway, attempts, attempts / max(1, len(calls)), attempts / max(1, at_gateway),
            f"{answered:.1%}"]  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="of the fault")
    given = parser.parse_args()
    with h.ray_serve():
        status = asyncio.run(storm(f.start(REPLICAS, EMULATED), given.seconds))
    sys.exit(status)
