"""A node of a cluster killed at once at half load: failed requests, streams that went on, time until all is whole.

Three nodes on this machine (``ray.cluster_utils.Cluster``), one emulated engine each, gateway and HAProxy on the
head's, whose loss is another matter. While requests arrive at half of what three replicas carry, the raylet of a node
and every process below it get SIGKILL in one moment: nothing drains, nothing says goodbye. The fleet has no room for a
third replica until a node comes; when one does it must be whole again. Clients that are refused with 429 come again
when they are told to.

Bars: no request that is not a stream fails, no stream ends but whole or with the clear error, the fleet is whole again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

from tests.bench import fleet as f
from tests.bench import harness as h
from tests.bench.replica_kill import EMULATED, SLOTS, STEP, TOKENS, bodies, play, seen
from tests.bench.wire import Reply, Wire

NODES, LOAD = 3, 0.5
CAPACITY = NODES * SLOTS / (TOKENS * (STEP["a_ms"] + STEP["b_ms"] * SLOTS) / 1e3)
ENGINE_CPUS = 2.0
"""One engine fills a worker node; the head's has one CPU more, for the gateway."""
WHOLE_S_MAX = 120.0
NODE: dict[str, Any] = {"object_store_memory": 100_000_000}


def kill(node: Any) -> int:
    """SIGKILL every process of a node, the raylet first; how many there were."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    processes = [raylet, *raylet.children(recursive=True)]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return len(processes)


async def run(fleet: f.Fleet, cluster: Any, seconds: float) -> tuple[list[Reply], list[Reply], float, float]:
    """Load with a node killed after a third of it and another added after two; answers, refusals, times in s.

    Times: until the other replicas alone are counted on, and from the new node until the fleet is whole.
    """
    wire, refused = Wire(), list[Reply]()
    load = bodies(int(LOAD * CAPACITY * seconds), TOKENS, "node_kill")
    task = asyncio.create_task(play(wire, load, LOAD * CAPACITY, refused))
    await asyncio.sleep(seconds / 3)
    victim = next(iter(cluster.worker_nodes))
    running = [c["running"] for c in await asyncio.to_thread(fleet.counters)]
    print(f"killed a node: {kill(victim)} processes; requests running on each replica: {running}", flush=True)
    gone_s = await timed(lambda: len(fleet.counters()) == NODES - 1)
    await asyncio.sleep(max(0.0, seconds / 3 - gone_s))
    await asyncio.to_thread(cluster.add_node, num_cpus=int(ENGINE_CPUS), **NODE)
    whole_s = await timed(lambda: len(fleet.counters()) == NODES)
    replies = await task
    wire.close()
    return replies, refused, gone_s, whole_s


async def timed(reached: Callable[[], bool]) -> float:
    """Seconds until ``reached``; infinite after :data:`WHOLE_S_MAX`."""
    begin = time.perf_counter()
    while not await asyncio.to_thread(reached):
        if time.perf_counter() - begin > WHOLE_S_MAX:
            return float("inf")
        await asyncio.sleep(0.25)
    return time.perf_counter() - begin


def main(seconds: float) -> int:
    """The whole benchmark; the exit status."""
    from ray.cluster_utils import Cluster

    from deployments import emulated_engine

    emulated_engine.NUM_CPUS_MAX = ENGINE_CPUS  # the deployment is built in this process
    clusters: list[Any] = []

    def start() -> str:
        options = {"num_cpus": int(ENGINE_CPUS) + 1, "include_dashboard": False, **NODE}
        # Hooks at exit would want the main thread; everything is ended below.
        clusters.append(Cluster(initialize_head=True, head_node_args=options, shutdown_at_exit=False))
        return str(clusters[0].address)

    try:
        with h.ray_serve(start=start):
            threading.Thread(target=add_workers, args=(clusters[0],)).start()
            fleet = f.start(NODES, EMULATED, num_cpus=ENGINE_CPUS)
            replies, refused, gone_s, whole_s = asyncio.run(run(fleet, clusters[0], seconds))
    finally:
        for cluster in clusters:
            cluster.shutdown()
    return told(replies, len(refused), gone_s, whole_s)


def add_workers(cluster: Any) -> None:
    """The other nodes, once the gateway is on the head's: there is room for it on each."""
    from ray import serve

    def placed() -> bool:
        app = serve.status().applications.get(f.APP)
        gateway = None if app is None else app.deployments.get("Gateway")
        return gateway is not None and "RUNNING" in gateway.replica_states

    deadline = time.monotonic() + WHOLE_S_MAX
    while not placed() and time.monotonic() < deadline:
        time.sleep(0.25)
    for _ in range(NODES - 1):
        cluster.add_node(num_cpus=int(ENGINE_CPUS), **NODE)


def told(replies: list[Reply], refused: int, gone_s: float, whole_s: float) -> int:
    """Print table and bars; the exit status."""
    rows, failed = [], {}
    for name, stream in (("streams", True), ("not streamed", False)):
        kinds = [seen(reply).kind for reply in replies if reply.stream == stream]
        failed[name] = kinds.count("failed")
        rows.append([name, len(kinds), kinds.count("whole"), kinds.count("error"), failed[name]])
    title = f"A node of {NODES} killed at {LOAD:.0%} load, {refused} refusals with 429 on the way"
    h.table(title, ["requests", "sent", "whole", "clear error", "failed"], rows)
    passed = [
        h.verdict(
            failed["not streamed"] == 0, f"{failed['not streamed']} requests that are not streams failed (bar 0)"
        ),
        h.verdict(
            failed["streams"] == 0, f"{failed['streams']} streams ended neither whole nor with the clear error (bar 0)"
        ),
        h.verdict(
            whole_s <= WHOLE_S_MAX,
            f"fleet whole {whole_s:.1f} s after a node came; its loss counted after {gone_s:.1f} s",
        ),
    ]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=45, help="of load")
    sys.exit(main(parser.parse_args().seconds))
