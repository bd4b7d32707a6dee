"""Controller killed with SIGKILL under load: no request may fail, a new one steers within 15 s.

"Steers" means: the new controller's plan is in force at the gateway and at every replica (``plan_seq`` of its epoch).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time

from tests.bench import harness as h
from tests.bench.load import Load

STEERING_S_MAX = 15.0


async def main(clients: int, tokens: int, kills: int) -> int:
    """Kill the controller ``kills`` times under load, print the table, return the exit status."""
    rows, load = [], Load(clients, tokens)
    async with h.client_session() as session:
        load.start(session)
        await asyncio.sleep(8)
        for number in range(kills):
            before = await h.control_state(session)
            os.kill(int(before["pid"]), signal.SIGKILL)
            killed = time.perf_counter()

            async def steering(old: str = str(before["epoch"])) -> bool:
                state = await h.control_state(session)
                reporters = [*state.get("replicas", []), *state.get("gateways", [])]
                in_force = [r.get("plan_seq") for r in reporters]
                return (
                    bool(reporters) and state.get("epoch") not in (None, old) and all(s is not None for s in in_force)
                )

            await h.wait_for(steering, 60)
            rows.append([number + 1, time.perf_counter() - killed])
            await asyncio.sleep(5)
        await load.stop()
    failed = load.failed()
    h.table("Controller killed under load", ["kill", "s until a new one steers"], rows)
    h.table("Requests", ["clients", "requests", "failed or cut"], [[clients, len(load.results), len(failed)]])
    for bad in failed[:5]:
        print("failed:", bad.status, bad.error)
    worst = max(float(r[1]) for r in rows)
    ok = h.verdict(not failed, f"{len(failed)} of {len(load.results)} requests failed (bar 0)")
    return (
        0 if h.verdict(worst <= STEERING_S_MAX, f"steering after {worst:.1f} s (bar {STEERING_S_MAX:g})") and ok else 1
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("vllm", "emulated"), default="vllm")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--kills", type=int, default=2)
    options = parser.parse_args()
    with h.ray_serve():
        make = h.default_args if options.engine == "vllm" else h.emulated_args
        h.deploy(make(scaling={"replicas_min": 2, "replicas_max": 2}))
        status = asyncio.run(main(options.clients, options.tokens, options.kills))
    sys.exit(status)
