"""200,000 requests, a tenth of them aborted, a twentieth met by a fault: counters back at zero, memory flat.

Two emulated engines that answer fast, clients in a closed loop, chat and completions, streamed and not, prompts of 2 to
8 kB that nobody sent before. Aborting clients leave after 0 to 60 ms, wherever their request is then. Faults change
every two seconds: errors, cut sockets, broken events, 503s, each hitting a twentieth of the requests.

Then everything must be as it was: no request in flight at gateway and engines, nothing queued, no more file descriptors
than there were at most in the first quarter. Memory is the slope of the gateway's resident memory over the second half
of the requests. Bar: 1 KiB per 1,000 requests.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil

from tests.bench import fleet as f
from tests.bench import harness as h
from tests.bench.wire import CHAT, COMPLETIONS, Reply, Wire, completion

CLIENTS, TOKENS = 32, 8
ABORT_SHARE, FAULT_SHARE, ABORT_S_MAX, FAULT_EVERY_S = 0.1, 0.05, 0.06, 2.0
EMULATED: dict[str, Any] = {
    "step": {"a_ms": 2, "b_ms": 0, "c_ms": 0, "d_ms": 0.001}, "running_seqs_max": 64, "kv_blocks": 4_096,
    "context_tokens_max": 4_096, "step_tokens_max": 16_384,
}  # fmt: skip
KINDS = ("error", "cut", "bad_json", "unavailable")
KIB_PER_1000_MAX = 1.0
GAUGE = re.compile(
    r"^(tidegate_[a-z_]*(?:inflight|queued|waiting|concurrent)[a-z_]*(?:\{[^}]*\})?) ([0-9.e+-]+)$", re.MULTILINE
)
"""What must be zero when nobody asks for anything."""


@dataclass
class Progress:
    """What has been sent and how it ended."""

    endings: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[int, float, float]] = field(default_factory=list)
    """Requests done, gateway and controller memory in KiB."""
    fds: list[tuple[int, int]] = field(default_factory=list)
    """Requests done, file descriptors of the gateway."""

    @property
    def done(self) -> int:
        """Requests that ended."""
        return self.endings.total()


def requests(count: int) -> Iterator[tuple[str, dict[str, Any], float | None]]:
    """Path, body and after how long the client leaves."""
    rng = random.Random("soak")
    text = " ".join(rng.choices(f.WORDS, k=4_000))
    for n in range(count):
        size = rng.randint(2_000, 8_000)
        at = rng.randrange(len(text) - size)
        prompt = f"{n} {rng.getrandbits(64):x} {text[at : at + size]}"
        body = completion(prompt, TOKENS, stream=rng.random() < 0.5)
        if chat := rng.random() < 0.5:
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        leaves = rng.uniform(0, ABORT_S_MAX) if rng.random() < ABORT_SHARE else None
        yield CHAT if chat else COMPLETIONS, body, leaves


def ending(reply: Reply) -> str:
    """A word for the table."""
    if reply.ok:
        return "succeeded"
    if reply.left:
        return "left"
    return f"{reply.status or 'no answer'} {reply.error_code()}"


async def faults(fleet: f.Fleet) -> None:
    """Another fault every two seconds, for ever."""
    for kind in itertools.cycle(KINDS):
        await asyncio.to_thread(fleet.faults, kind=kind, share=FAULT_SHARE)
        await asyncio.sleep(FAULT_EVERY_S)


async def watch(progress: Progress, gateway: psutil.Process, controller: psutil.Process | None) -> None:
    """Memory, each second."""
    told_s = time.perf_counter()
    while True:
        other = controller.memory_info().rss / 1024 if controller is not None else float("nan")
        progress.memory.append((progress.done, gateway.memory_info().rss / 1024, other))
        progress.fds.append((progress.done, gateway.num_fds()))
        if time.perf_counter() - told_s > 30:
            told_s = time.perf_counter()
            print(f"{progress.done} requests, gateway {progress.memory[-1][1] / 1024:.1f} MiB", flush=True)
        await asyncio.sleep(1)


async def soak(fleet: f.Fleet, count: int, gateway: psutil.Process) -> Progress:
    """All requests; back when the last one ended."""
    progress, wire, todo = Progress(), Wire(), requests(count)
    async with h.client_session() as session:
        pid = (await h.control_state(session)).get("pid")
    controller = psutil.Process(int(pid)) if pid else None

    async def client() -> None:
        for path, body, leaves in todo:
            progress.endings[ending(await wire.post(path, body, leave_after_s=leaves))] += 1

    helpers = [asyncio.create_task(faults(fleet)), asyncio.create_task(watch(progress, gateway, controller))]
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    for helper in helpers:
        helper.cancel()
    await asyncio.gather(*helpers, return_exceptions=True)
    wire.close()
    return progress


def slope(points: list[tuple[int, float]]) -> float:
    """KiB per 1,000 requests: least squares."""
    xs, ys = [x / 1_000 for x, _ in points], [y for _, y in points]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    over = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / over if over else 0.0


def left_over(fleet: f.Fleet) -> list[str]:
    """What is not back at zero."""
    found = [f"{name} {value}" for name, value in GAUGE.findall(f.metrics()) if float(value) != 0]
    engines = {name: fleet.total(name) for name in ("running", "waiting", "kv_tokens_used")}
    return found + [f"engines: {name} {value}" for name, value in engines.items() if value and name != "kv_tokens_used"]


def main(options: argparse.Namespace) -> int:
    """Soak, print the tables, return the exit status."""
    fleet = f.start(2, EMULATED)
    gateway = f.gateway_process()
    before = f.metrics()
    begin = time.perf_counter()
    progress = asyncio.run(soak(fleet, options.requests, gateway))
    seconds = time.perf_counter() - begin
    fleet.faults(kind="none", share=1.0)
    try:
        fleet.until(lambda: not left_over(fleet), 30, "everything given back")
    except TimeoutError:
        print("left over:", left_over(fleet))
    rest, page, fds = left_over(fleet), f.metrics(), gateway.num_fds()
    fds_max = max(fds for done, fds in progress.fds if done <= options.requests / 4)
    half = [(done, own, other) for done, own, other in progress.memory if done >= options.requests / 2]
    own, other = slope([(d, o) for d, o, _ in half]), slope([(d, c) for d, _, c in half])
    h.table(
        f"{options.requests} requests in {seconds:.0f} s, {ABORT_SHARE:.0%} aborted, {FAULT_SHARE:.0%} faults",
        ["ending at the client", "requests"],
        progress.endings.most_common(12),
    )
    ends = ("succeeded", "failed", "cancelled", "refused")
    labels = [(end, f'outcome="{end}"') for end in ends]
    h.table(
        "What the gateway counted",
        ["outcome", "requests"],
        [[e, round(f.metric(page, "tidegate_requests_total", s) - f.metric(before, "tidegate_requests_total", s))]
         for e, s in labels],
    )  # fmt: skip
    h.table(
        "Memory, MiB",
        ["process", "at first", "half way", "at the end", "KiB per 1,000 requests in the second half"],
        [
            ["gateway", progress.memory[0][1] / 1024, half[0][1] / 1024, half[-1][1] / 1024, f"{own:.2f}"],
            ["controller", progress.memory[0][2] / 1024, half[0][2] / 1024, half[-1][2] / 1024, f"{other:.2f}"],
        ],
    )
    passed = [
        h.verdict(not rest, f"{len(rest)} counters not back at zero (bar 0) {rest or ''}"),
        h.verdict(
            fds <= fds_max,
            f"{fds} file descriptors of the gateway at the end (bar: {fds_max}, most in the first quarter)",
        ),
        h.verdict(
            own <= KIB_PER_1000_MAX,
            f"gateway memory {own:+.2f} KiB per 1,000 requests in the second half (bar {KIB_PER_1000_MAX:g})",
        ),
    ]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200_000)
    given = parser.parse_args()
    with h.ray_serve():
        status = main(given)
    sys.exit(status)
