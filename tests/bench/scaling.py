"""Load that needs two replicas brings the second up; when it ends the second drains. No request may fail or be cut.

``--engine emulated`` (default ``vllm``) runs it without vLLM. Prints the time line and the counts.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

from tests.bench import harness as h
from tests.bench.load import Load


async def replicas_ready(session: object) -> int:
    """Return how many replicas report to the controller as ready."""
    state = await h.control_state(session)  # type: ignore[arg-type]
    return sum(1 for r in state.get("replicas", []) if r["state"] == "ready" and r["fresh"])


async def main(clients: int, tokens: int) -> int:
    """Drive the load up and down, print the table, return the exit status."""
    events: list[list[object]] = []
    start = time.perf_counter()

    def note(text: str) -> None:
        events.append([f"{time.perf_counter() - start:.0f}", text])
        print(f"{events[-1][0]:>5} s  {text}", flush=True)

    async with h.client_session() as session:
        heavy, light = Load(clients, tokens), Load(1, tokens)

        async def count_is(n: int) -> bool:
            return await replicas_ready(session) == n

        await h.wait_for(lambda: count_is(1), 60)
        light.start(session)
        heavy.start(session)
        note(f"load of {clients} clients starts on 1 replica")
        await h.wait_for(lambda: count_is(2), 240)
        note("second replica ready")
        await asyncio.sleep(20)
        by_replica = {r.replica: heavy.count(lambda x, r=r: x.replica == r.replica) for r in heavy.results}  # type: ignore[misc]
        await heavy.stop()
        note("load ends, one light client stays")
        await h.wait_for(lambda: count_is(1), 240)
        note("back to 1 replica")
        await asyncio.sleep(5)
        await light.stop()
    results, failed = heavy.results + light.results, heavy.failed() + light.failed()
    for bad in failed[:5]:
        print("failed:", bad.status, bad.error)
    h.table("Time line", ["s", "event"], events)
    h.table(
        "Requests",
        ["requests", "failed or cut", "per replica (heavy phase)"],
        [[len(results), len(failed), dict(enumerate(by_replica.values()))]],
    )
    return 0 if h.verdict(not failed, f"{len(failed)} of {len(results)} requests failed or cut (bar 0)") else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("vllm", "emulated"), default="vllm")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    scaling = {"replicas_min": 1, "replicas_max": 2, "down_window_s": 20.0}
    with h.ray_serve():
        make = h.default_args if options.engine == "vllm" else h.emulated_args
        h.deploy(make(scaling=scaling))
        status = asyncio.run(main(options.clients, options.tokens))
    sys.exit(status)
