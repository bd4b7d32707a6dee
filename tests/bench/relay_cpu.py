"""CPU per streamed chunk of the process in front of the engine: Tidegate's gateway beside a streaming handle.

Both relay events to 16 clients in one run: the gateway as raw bytes over HTTP from the emulated engine, the comparison
deployment through ``handle.options(stream=True)`` as Ray Serve applications do it. CPU is the user plus system time of
the relaying process over the whole phase (its idle work included), divided by the events that clients received. The
Rust ``vllm-router`` is measured too where it is installed. Bars: at most 20 us, and 10 times less than the handle.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time

import aiohttp
import psutil

from tests.bench import harness as h

STREAMS, TOKENS, SECONDS, ROUNDS = 16, 400, 8.0, 3
US_MAX, TIMES_MIN = 20.0, 10.0
FLAT_OUT = {"a_ms": 1.0, "b_ms": 0.0, "c_ms": 0.0, "d_ms": 0.0}


async def one_stream(session: aiohttp.ClientSession, url: str) -> int:
    """Read one stream as raw bytes; return the number of events."""
    body = {
        "model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "go"}], "max_tokens": TOKENS,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    events = 0
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {(await response.text())[:300]}")
        async for chunk in response.content.iter_any():
            events += chunk.count(b"\n\n")
    return events


async def phase(session: aiohttp.ClientSession, url: str, process: psutil.Process) -> tuple[float, float]:
    """Keep 16 streams busy for ``SECONDS``; return CPU in us per event and events per second."""
    deadline, total = time.perf_counter() + SECONDS, 0

    async def client() -> None:
        nonlocal total
        while time.perf_counter() < deadline:
            total += await one_stream(session, url)

    start, before = time.perf_counter(), process.cpu_times()
    await asyncio.gather(*(client() for _ in range(STREAMS)))
    after, seconds = process.cpu_times(), time.perf_counter() - start
    cpu_s = after.user + after.system - before.user - before.system
    return cpu_s / total * 1e6, total / seconds


def replica_process(deployment: str) -> psutil.Process:
    """Find the one process of a Serve replica by the title Ray gives it."""
    found = [p for p in psutil.process_iter(["cmdline"]) if f":{deployment}" in "".join(p.info["cmdline"] or [])]
    if len(found) != 1:
        raise RuntimeError(f"{len(found)} processes of {deployment}, expected 1")
    return found[0]


def start_vllm_router(backend_url: str) -> subprocess.Popen[bytes]:
    """Start the Rust router in front of ``backend_url`` on port 8100."""
    command = ["vllm-router", "--worker-urls", backend_url, "--host", "127.0.0.1", "--port", "8100"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def start_bare_emulated() -> subprocess.Popen[bytes]:
    """Start an emulated engine without a gate on port 8101, for the Rust router."""
    command = [
        sys.executable,
        "-m",
        "deployments.emulated_engine",
        "--port",
        "8101",
        "--model",
        "smollm2-135m-instruct",
    ]
    return subprocess.Popen([*command, "--settings", json.dumps({"step": FLAT_OUT})], cwd=h.ROOT)


async def main() -> int:
    """Run all phases, print the table, return the exit status."""
    subjects = {
        "Tidegate gateway (raw bytes)": (h.URL, replica_process("Gateway")),
        "streaming deployment handle": (f"{h.URL}/handle", replica_process("HandleIngress")),
    }
    engine, router = None, None
    if shutil.which("vllm-router"):
        engine = start_bare_emulated()
        router = start_vllm_router("http://127.0.0.1:8101")
        await asyncio.sleep(6)
    if router is not None:
        subjects["vllm-router (Rust)"] = ("http://127.0.0.1:8100", psutil.Process(router.pid))
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in subjects}
    try:
        async with h.client_session() as session:
            for url, _ in subjects.values():
                await one_stream(session, url)
            for _ in range(ROUNDS):
                for name, (url, process) in subjects.items():
                    seen[name].append(await phase(session, url, process))
    finally:
        for child in (router, engine):
            if child is not None:
                child.terminate()
    us = {name: h.median([cpu for cpu, _ in values]) for name, values in seen.items()}
    rows = [[name, us[name], h.median([rate for _, rate in values])] for name, values in seen.items()]
    h.table(f"{STREAMS} streams, medians of {ROUNDS} rounds", ["relay", "CPU us per chunk", "chunks/s"], rows)
    ours, handle = us["Tidegate gateway (raw bytes)"], us["streaming deployment handle"]
    ok = h.verdict(ours <= US_MAX, f"{ours:.1f} us per chunk (bar {US_MAX:g})")
    less = h.verdict(handle / ours >= TIMES_MIN, f"{handle / ours:.1f} times less (bar {TIMES_MIN:g})")
    return 0 if less and ok else 1


if __name__ == "__main__":
    with h.ray_serve():
        one = {"replicas_min": 1, "replicas_max": 1}
        h.deploy(h.emulated_args(model={"emulated": {"step": FLAT_OUT}}, scaling=one))
        from tests.bench.handle_relay import deploy_handle_relay  # Serve is imported once its environment is set

        deploy_handle_relay(TOKENS)
        status = asyncio.run(main())
    sys.exit(status)
