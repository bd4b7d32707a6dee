"""One tenant offers twenty times its share: TTFT of another, which stays within its own.

Two emulated engines, two tenants with keys and equal weights. B sends prompts of 2,000 tokens at a steady pace that
takes about a fifth of the fleet; first alone, then while A sends twenty times what its half of the fleet could serve,
without pause and whatever it is told. The engines are slow, so that two cores can send twenty times what they serve.
B's times alone and beside A are compared; none of B's requests may be refused. Bar: B's TTFT p95 beside A at most 1.3
times its idle value.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from typing import Any

from tests.bench import fleet as f
from tests.bench import harness as h
from tests.bench.wire import COMPLETIONS, Reply, Wire, codes, completion

REPLICAS, SLOTS = 2, 16
STEP = {"a_ms": 15, "b_ms": 0.2, "c_ms": 0, "d_ms": 0.4}
EMULATED: dict[str, Any] = {
    "step": STEP, "running_seqs_max": SLOTS, "kv_blocks": 8_192, "context_tokens_max": 8_192, "step_tokens_max": 512,
}  # fmt: skip
A_PROMPT, A_OUTPUT, B_PROMPT, B_OUTPUT, B_PER_S = 50, 50, 2_000, 16, 0.5
A_MS = A_OUTPUT * (STEP["a_ms"] + STEP["b_ms"] * SLOTS) / SLOTS + A_PROMPT * STEP["d_ms"]
"""What one of A's requests costs a replica."""
A_SHARE_PER_S = REPLICAS * 1_000 / A_MS / 2
TIMES, TTFT_TIMES_MAX, TTFT_MS = 20.0, 1.3, 1_000.0


async def steady(wire: Wire, rng: random.Random, rate: float, seconds: float, size: tuple[int, int]) -> list[Reply]:
    """Evenly paced arrivals with a little jitter; all answers."""
    begin, tasks = time.perf_counter(), []
    for n in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, begin + (n + rng.uniform(0, 0.2)) / rate - time.perf_counter()))
        output = rng.randint(size[1] // 5, size[1] * 9 // 5)  # equal ones would end together, and free slots in bursts
        tasks.append(asyncio.create_task(wire.post(COMPLETIONS, completion(f.prompt(rng, size[0]), output))))
    return [await task for task in tasks]


async def measure(keys: dict[str, str], seconds: float, times: float) -> tuple[list[Reply], list[Reply], list[Reply]]:
    """B alone, B beside A, and A."""
    wires = {tenant: Wire(key=key) for tenant, key in keys.items()}
    rng = random.Random("fairness")
    await steady(wires["b"], rng, B_PER_S, 6, (B_PROMPT, B_OUTPUT))  # the router learns the engines' speed
    alone = await steady(wires["b"], rng, B_PER_S, seconds, (B_PROMPT, B_OUTPUT))
    flood = asyncio.create_task(
        steady(wires["a"], random.Random("a"), times * A_SHARE_PER_S, seconds + 8, (A_PROMPT, A_OUTPUT))
    )
    await asyncio.sleep(5)
    beside = await steady(wires["b"], rng, B_PER_S, seconds, (B_PROMPT, B_OUTPUT))
    greedy = await flood
    for wire in wires.values():
        wire.close()
    return alone, beside, greedy


def main(options: argparse.Namespace) -> int:
    """Measure, print the table, return the exit status."""
    from deployments.keys import INFERENCE, new_key, values_of

    made = {tenant: new_key(tenant, [INFERENCE], time.time()) for tenant in ("a", "b")}
    f.start(
        REPLICAS,
        EMULATED,
        auth={"keys": [values_of(record) for _, record in made.values()]},
        tenants={"a": {"weight": 1.0}, "b": {"weight": 1.0}},
        objectives={"ttft_ms": TTFT_MS},
    )
    keys = {tenant: key for tenant, (key, _) in made.items()}
    alone, beside, greedy = asyncio.run(measure(keys, options.seconds, options.times))
    rows, p95 = [], []
    for name, replies in (("B alone", alone), ("B beside A", beside), ("A", greedy)):
        ttft = [r.ttft_ms for r in replies if r.ok and r.ttft_ms is not None]
        p95.append(h.quantile(ttft, 0.95))
        answered = sum(r.ok for r in replies)
        rows.append([name, len(replies), answered, h.quantile(ttft, 0.5), p95[-1], max(ttft, default=float("nan"))])
    h.table(
        f"A offers {options.times:g} times its share ({options.times * A_SHARE_PER_S:.0f}/s) for {options.seconds:g} s",
        ["tenant", "requests", "answered", "TTFT p50 ms", "p95 ms", "largest ms"],
        rows,
    )
    print("endings of A:", codes(greedy))
    print("endings of B beside A:", codes(beside))
    worse = p95[1] / p95[0]
    missing = sum(not r.ok for r in alone + beside)
    passed = [
        h.verdict(
            worse <= TTFT_TIMES_MAX, f"B's TTFT p95 is {worse:.2f} times its idle value (bar {TTFT_TIMES_MAX:g})"
        ),
        h.verdict(missing == 0, f"{missing} of B's requests were not answered (bar 0)"),
    ]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=80, help="of each phase")
    parser.add_argument("--times", type=float, default=TIMES, help="A's share that it offers")
    given = parser.parse_args()
    with h.ray_serve():
        status = main(given)
    sys.exit(status)
