"""CPU per streamed chunk of the process in front of the engine: Tidegate's gateway beside a streaming handle.

Each relays the same events to 16 clients in one run: the gateway as raw bytes over HTTP, the comparison deployment
through ``handle.options(stream=True)`` as Ray Serve applications do it, and the Rust ``vllm-router`` where it is
installed. CPU is the user plus system time of the relaying process over the whole phase (its idle work included),
divided by the events that clients received. Flat out, an engine emits as fast as it is read; paced, each stream has an
event every 10 ms, so that every event wakes the relay. Bars, flat out: at most 20 us, 10 times less than the handle.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field

import aiohttp
import psutil

from tests.bench import harness as h

STREAMS, TOKENS, SECONDS, ROUNDS = 16, 400, 6.0, 3
GAPS_MS = (0, 10)
US_MAX, TIMES_MIN = 20.0, 10.0
OURS, HANDLE, RUST = "Tidegate gateway (raw bytes)", "streaming deployment handle", "vllm-router (Rust)"


@dataclass
class Relay:
    """One subject: where it listens, which process works for it, what was measured."""

    url: str
    process: psutil.Process
    us: dict[int, list[float]] = field(default_factory=lambda: {gap: [] for gap in GAPS_MS})
    rate: dict[int, list[float]] = field(default_factory=lambda: {gap: [] for gap in GAPS_MS})


async def one_stream(session: aiohttp.ClientSession, url: str, gap_ms: int) -> int:
    """Read one stream as raw bytes; return the number of events."""
    body = {
        "model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "go"}], "stream": True,
        "max_tokens": TOKENS, "gap_ms": gap_ms,
    }  # fmt: skip
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        data = await response.read()
    events = data.count(b"\n\n") - 1
    if response.status != 200 or events != TOKENS:
        raise RuntimeError(f"{url}: {response.status}, {events} of {TOKENS} events: {data[:200]!r}")
    return events


async def phase(session: aiohttp.ClientSession, relay: Relay, gap_ms: int) -> None:
    """Keep 16 streams busy for ``SECONDS`` and note CPU in us per event and events per second."""
    deadline = time.perf_counter() + SECONDS

    async def client() -> int:
        events = 0
        while time.perf_counter() < deadline:
            events += await one_stream(session, relay.url, gap_ms)
        return events

    start, before = time.perf_counter(), relay.process.cpu_times()
    total = sum(await asyncio.gather(*(client() for _ in range(STREAMS))))
    after, seconds = relay.process.cpu_times(), time.perf_counter() - start
    cpu_s = after.user + after.system - before.user - before.system
    relay.us[gap_ms].append(cpu_s / total * 1e6)
    relay.rate[gap_ms].append(total / seconds)


def replica_process(deployment: str) -> psutil.Process:
    """Find the one process of a Serve replica by the title Ray gives it."""
    found = [p for p in psutil.process_iter(["cmdline"]) if f":{deployment}" in "".join(p.info["cmdline"] or [])]
    if len(found) != 1:
        raise RuntimeError(f"{len(found)} processes of {deployment}, expected 1")
    return found[0]


def start_rust_router() -> list[subprocess.Popen[bytes]]:
    """Start the Rust router on port 8100 and an engine behind it on 8101; nothing where it is not installed."""
    if shutil.which("vllm-router") is None:
        return []
    engine = subprocess.Popen([sys.executable, "-m", "tests.bench.flat_out", "8101"], cwd=h.ROOT)
    command = ["vllm-router", "--worker-urls", "http://127.0.0.1:8101", "--host", "127.0.0.1", "--port", "8100"]
    return [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL), engine]


async def measure(relays: dict[str, Relay]) -> None:
    """Run all phases, side by side, round by round."""
    async with h.client_session() as session:
        for relay in relays.values():
            await one_stream(session, relay.url, 0)
        for _ in range(ROUNDS):
            for gap_ms in GAPS_MS:
                for relay in relays.values():
                    await phase(session, relay, gap_ms)


def main() -> int:
    """Measure, print the table, return the exit status."""
    relays = {
        OURS: Relay(h.URL, replica_process("Gateway")),
        HANDLE: Relay(f"{h.URL}/handle", replica_process("HandleIngress")),
    }
    children = start_rust_router()
    try:
        if children:
            time.sleep(6)
            relays[RUST] = Relay("http://127.0.0.1:8100", psutil.Process(children[0].pid))
        asyncio.run(measure(relays))
    finally:
        for child in children:
            child.terminate()
            child.wait(10)
    rows = [[name, h.median(r.us[0]), h.median(r.rate[0]), h.median(r.us[10])] for name, r in relays.items()]
    h.table(
        f"{STREAMS} streams, medians of {ROUNDS} rounds",
        ["relay", "CPU us per chunk, flat out", "chunks/s, flat out", "CPU us per chunk, one each 10 ms"],
        rows,
    )
    ours, handle = h.median(relays[OURS].us[0]), h.median(relays[HANDLE].us[0])
    ok = h.verdict(ours <= US_MAX, f"{ours:.1f} us per chunk (bar {US_MAX:g})")
    less = h.verdict(handle / ours >= TIMES_MIN, f"{handle / ours:.1f} times less (bar {TIMES_MIN:g})")
    return 0 if less and ok else 1


if __name__ == "__main__":
    with h.ray_serve():
        from tests.bench.relays import deploy_relays  # Serve is imported once its environment is set

        deploy_relays()
        status = main()
    sys.exit(status)
