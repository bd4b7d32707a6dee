"""CPU of the gateway process per request: whole answers and short streams, flat out and paced.

Two emulated engines that answer at once, 16 clients in this process. CPU is the user plus system time of the gateway's
process over the whole phase, its idle work included, divided by the answers that came. Flat out, each client asks again
as soon as it has its answer; paced, 100 requests arrive each second, so that the gateway's own rounds weigh more.
Bar: at most 1.5 ms per request that is not streamed, flat out.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from typing import Any

import psutil

from tests.bench import fleet as f
from tests.bench import harness as h
from tests.bench.wire import CHAT, MODEL, Reply, Wire

CLIENTS, TOKENS, PACED_PER_S, MS_MAX = 16, 16, 100.0, 1.5
EMULATED: dict[str, Any] = {
    "step": {"a_ms": 1, "b_ms": 0, "c_ms": 0, "d_ms": 0.001}, "running_seqs_max": 64, "kv_blocks": 4_096,
}  # fmt: skip
PROMPT_TOKENS = 200


def chat(rng: random.Random, stream: bool) -> dict[str, Any]:
    """A chat nobody sent before."""
    message = {"role": "user", "content": f.prompt(rng, PROMPT_TOKENS)}
    return {"model": MODEL, "messages": [message], "max_tokens": TOKENS, "ignore_eos": True, "stream": stream}


async def flat_out(wire: Wire, rng: random.Random, stream: bool, seconds: float) -> int:
    """Closed loop; how many answers came."""
    deadline = time.perf_counter() + seconds

    async def client() -> int:
        count = 0
        while time.perf_counter() < deadline:
            counted(await wire.post(CHAT, chat(rng, stream)))
            count += 1
        return count

    return sum(await asyncio.gather(*(client() for _ in range(CLIENTS))))


async def paced(wire: Wire, rng: random.Random, stream: bool, seconds: float) -> int:
    """Open loop at :data:`PACED_PER_S`; how many answers came."""
    begin, tasks = time.perf_counter(), []
    for n in range(int(seconds * PACED_PER_S)):
        await asyncio.sleep(max(0.0, begin + n / PACED_PER_S - time.perf_counter()))
        tasks.append(asyncio.create_task(wire.post(CHAT, chat(rng, stream))))
    for task in tasks:
        counted(await task)
    return len(tasks)


def counted(reply: Reply) -> None:
    """A benchmark of answers must get answers."""
    if not reply.ok:
        raise RuntimeError(f"{reply.status} {reply.error_code()}: {reply.raw[-300:]!r}")


async def measure(gateway: psutil.Process, seconds: float, rounds: int) -> dict[tuple[str, str], list[list[float]]]:
    """CPU in ms per request and requests per second of each kind of load, round by round."""
    wire, rng = Wire(), random.Random("request_cpu")
    found: dict[tuple[str, str], list[list[float]]] = {}
    await flat_out(wire, rng, False, 2)
    for _ in range(rounds):
        for kind, stream in (("whole answer", False), (f"stream of {TOKENS} tokens", True)):
            for how, load in (("flat out", flat_out), ("paced", paced)):
                begin, before = time.perf_counter(), gateway.cpu_times()
                count = await load(wire, rng, stream, seconds)
                after, took_s = gateway.cpu_times(), time.perf_counter() - begin
                cpu_s = after.user + after.system - before.user - before.system
                found.setdefault((kind, how), []).append([cpu_s / count * 1e3, count / took_s])
    wire.close()
    return found


def main(options: argparse.Namespace) -> int:
    """Measure, print the table, return the exit status."""
    f.start(2, EMULATED)
    found = asyncio.run(measure(f.gateway_process(), options.seconds, options.rounds))
    rows: list[list[Any]] = [
        [kind, how, h.median([r[0] for r in rounds]), max(r[0] for r in rounds), h.median([r[1] for r in rounds])]
        for (kind, how), rounds in found.items()
    ]
    h.table(
        f"{CLIENTS} clients, prompts of {PROMPT_TOKENS} tokens, medians of {options.rounds} rounds",
        ["request", "load", "gateway CPU ms per request", "highest round", "requests/s"],
        rows,
    )
    ms = float(rows[0][2])
    return 0 if h.verdict(ms <= MS_MAX, f"{ms:.2f} ms CPU per request that is not streamed (bar {MS_MAX:g})") else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8, help="of each phase; there are four in a round")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with h.ray_serve():
        status = main(given)
    sys.exit(status)
