"""What a change of the number of replicas costs those who use the model: three parts, each with its bars.

``--part warm``    two real engines: a warm replica to its first answer, beside zero to the first token
``--part shrink``  4 -> 1 -> 4 under streaming load, ten times over, by hand (overrides); emulated engines, with
                   ``--engine vllm`` two real ones, three times
``--part crowd``   engines that take 60 s to start; four times the load for two minutes and a half. TTFT of those that
                   are admitted counts from admission on: what they waited for it is what refusals spare others. Who is
                   refused comes again once, when it was told to.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.bench import fleet as f
from tests.bench import harness as h
from tests.bench.load import Load
from tests.bench.wire import COMPLETIONS, Reply, Wire, codes, completion

PARTS = ("warm", "shrink", "crowd")
STREAM_TOKENS, CLIENTS, CYCLES, CYCLES_VLLM = 150, 8, 10, 3
PATIENT = {"ttft_ms": 60_000, "itl_ms": 5_000}
"""Nobody is refused for want of speed: what counts is who is cut."""
QUICK: dict[str, Any] = {"step": {"a_ms": 20, "b_ms": 0.2, "c_ms": 0, "d_ms": 0.02}, "start_ms": 300}

STEP = {"a_ms": 30, "b_ms": 1, "c_ms": 0, "d_ms": 0.05}
SLOTS, TOKENS, TTFT_MS, START_S = 4, 32, 2_000.0, 60.0
SLOW_START: dict[str, Any] = {
    "step": STEP, "running_seqs_max": SLOTS, "kv_blocks": 2_048, "step_tokens_max": 512, "start_ms": START_S * 1e3,
}  # fmt: skip
CAPACITY = SLOTS / (TOKENS * (STEP["a_ms"] + STEP["b_ms"] * SLOTS) / 1e3)
"""Requests per second of one replica, prompts left out."""
BASE_SHARE, TIMES, REPLICAS_MAX = 0.7, 4.0, 5
BASE_S, CROWD_S = 20.0, 150.0
TRUE_SHARE_MIN, WARM_S_MAX, WAKES = 0.95, 2.0, 4
HELLO = [{"role": "user", "content": "Name a river."}]


async def control(session: aiohttp.ClientSession, url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Ask the controller, or tell it something; ``None`` while it is away."""
    verb = "GET" if body is None else "POST"
    async with session.request(verb, f"{url}/control/{path}", json=body, timeout=aiohttp.ClientTimeout(10)) as answer:
        return await answer.json() if answer.status == 200 else None


async def set_by_hand(session: aiohttp.ClientSession, url: str, knob: str, value: int) -> None:
    """Override ``knob`` from now on; the last one for a knob counts."""

    async def held() -> bool:
        body = {"knob": knob, "value": value, "expires_in_s": 3_600, "why": "tests/bench/transitions.py"}
        return await control(session, url, "overrides", body) is not None

    await h.wait_for(held, 30)


async def ready(session: aiohttp.ClientSession, url: str) -> int:
    """Replicas that say they take requests."""
    state = await h.control_state(session, url)
    return sum(r["state"] == "ready" and r["fresh"] for r in state.get("replicas", []))


# --- 4 -> 1 -> 4 under load -------------------------------------------------------------------------------------------


async def shrink(url: str, most: int, cycles: int, clients: int, tokens: int) -> bool:
    """Down to one replica and back, ``cycles`` times, while ``clients`` stream all the time."""
    rows: list[list[object]] = []
    load = Load(clients, tokens, url)
    async with h.client_session() as session:

        async def count_is(n: int) -> bool:
            return await ready(session, url) == n

        await h.wait_for(lambda: count_is(most), 240)
        load.start(session)
        begin = time.perf_counter()
        for cycle in range(cycles):
            took = []
            for n in (1, most):
                await set_by_hand(session, url, "replicas_target", n)
                took.append(await h.wait_for(lambda n=n: count_is(n), 240))
                await asyncio.sleep(1)
            rows.append([cycle + 1, *took, len(load.results), len(load.failed())])
            codes_of = Counter((r.status, r.error[:80]) for r in load.failed())
            at_s = time.perf_counter() - begin
            print(f"{at_s:>5.0f} s  cycle {cycle + 1}: {sum(codes_of.values())} failed {dict(codes_of)}", flush=True)
        await load.stop()
    for bad in load.failed()[:5]:
        print("failed:", bad.status, bad.error, bad.complete, bad.usage)
    h.table(
        f"{most} -> 1 -> {most} replicas, {clients} clients that stream {tokens} tokens each all the time",
        ["cycle", "down s", "up s", "answers so far", "failed or cut so far"],
        rows,
    )
    served = len({r.replica for r in load.results})
    failed = len(load.failed())
    return h.verdict(
        not failed and served > cycles,
        f"{failed} of {len(load.results)} streams failed or cut, {cycles} times down and up, {served} replicas (bar 0)",
    )


# --- warm to serving ----------------------------------------------------------------------------------------------


async def warm(url: str) -> bool:
    """Wake a warm replica by hand, again and again; then let the model sleep and ask for it."""
    took: list[float] = []
    async with h.client_session() as session:

        async def marked() -> str | None:
            plan = (await h.control_state(session, url)).get("plan") or {}
            return next(iter(plan.get("warm") or ()), None)

        async def nobody() -> bool:
            state = await h.control_state(session, url)
            return not (state.get("fleet") or {"replicas_running": 1})["replicas_running"]

        await set_by_hand(session, url, "replicas_target", 1)
        await set_by_hand(session, url, "warm_replicas", 1)
        for _ in range(WAKES):
            await h.wait_for(marked, 240)
            name = await marked()
            await asyncio.sleep(2)  # gateways send it nothing by now
            asked = [await ask(session, url, n) for n in range(4)]
            if any(r.failed or r.replica == name for r in asked):
                return h.verdict(False, f"a warm replica served, or a request failed: {asked}")
            begin = time.perf_counter()
            await set_by_hand(session, url, "replicas_target", 2)
            answers = [asyncio.create_task(ask(session, url, n)) for n in range(2)]
            while not any(r.replica == name and not r.failed for r in await asyncio.gather(*answers)):
                answers = [asyncio.create_task(ask(session, url, n)) for n in range(2)]
            took.append(time.perf_counter() - begin)
            print(f"warm to its first answer: {took[-1]:.2f} s", flush=True)
            await set_by_hand(session, url, "replicas_target", 1)
        await set_by_hand(session, url, "warm_replicas", 0)
        await set_by_hand(session, url, "replicas_target", 0)
        await h.wait_for(nobody, 240)
        await asyncio.sleep(3)
        async with session.delete(f"{url}/control/overrides"):
            pass
        cold = await h.stream_chat(session, HELLO, 8, url=url)
    zero_s = (cold.ttft_ms or float("nan")) / 1e3
    h.table(
        "From standing by to serving, and from nothing",
        ["", "s"],
        [["warm to the end of its first answer, median", h.median(took)], ["the longest", max(took)],
         ["zero replicas to the first token", zero_s]],
    )  # fmt: skip
    return all(
        [
            h.verdict(max(took) <= WARM_S_MAX, f"warm to serving in {max(took):.2f} s at most (bar {WARM_S_MAX:g} s)"),
            h.verdict(not cold.failed, f"the request that woke the model was served after {zero_s:.1f} s"),
        ]
    )


async def ask(session: aiohttp.ClientSession, url: str, number: int) -> h.StreamResult:
    """One token."""
    return await h.stream_chat(session, [{"role": "user", "content": f"{time.perf_counter()} {number}"}], 1, url=url)


# --- a flash crowd and engines that start slowly ----------------------------------------------------------------------


@dataclass
class Visitor:
    """One user: its first try, and its second where the first was refused."""

    at_s: float
    tries: list[Reply] = field(default_factory=list)
    told_s: float | None = None
    """``Retry-After`` of the first."""


async def visit(wire: Wire, rng: random.Random, begin_s: float) -> Visitor:
    """Ask once; when refused with a time to come again, once more then."""
    made = Visitor(time.perf_counter() - begin_s)
    body = completion(f.prompt(rng, rng.randint(40, 200)), TOKENS)
    made.tries.append(await wire.post(COMPLETIONS, body))
    made.told_s = made.tries[0].retry_after_s
    if made.tries[0].status in (429, 503) and made.told_s is not None:
        await asyncio.sleep(made.told_s)
        made.tries.append(await wire.post(COMPLETIONS, body))
    return made


async def crowd(url: str, base_s: float, crowd_s: float) -> bool:
    """The usual load, four times as much, and what became of each."""
    wire, rng, begin = Wire(url), random.Random("crowd"), time.perf_counter()
    tasks: list[asyncio.Task[Visitor]] = []
    marks: list[str] = []

    async def follow(session: aiohttp.ClientSession) -> None:
        last = None
        while True:
            state = await h.control_state(session, url)
            now = ((state.get("plan") or {}).get("replicas_target"), await ready(session, url))
            if state and now != last:
                last = now
                marks.append(f"{time.perf_counter() - begin:.0f} s: {now[1]} serve of {now[0]}")
                print(marks[-1], flush=True)
            await asyncio.sleep(1)

    async with h.client_session() as session:
        watch = asyncio.create_task(follow(session))
        for seconds, times in ((base_s, 1.0), (crowd_s, TIMES)):
            start, at = time.perf_counter(), 0.0
            while (at := at + rng.expovariate(BASE_SHARE * CAPACITY * times)) < seconds:
                await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
                tasks.append(asyncio.create_task(visit(wire, random.Random(rng.random()), begin)))
        visitors = await asyncio.gather(*tasks)
        watch.cancel()
    wire.close()
    return judged(visitors, marks)


def judged(visitors: list[Visitor], marks: list[str]) -> bool:
    """Print what became of them, and the bars."""
    rows = []
    for first in range(0, int(max(v.at_s for v in visitors)) + 1, 15):
        some = [v for v in visitors if first <= v.at_s < first + 15]
        came = [v for v in some if len(v.tries) == 2]
        told = [v.told_s for v in came if v.told_s is not None]
        rows.append([
            first, len(some), sum(v.tries[0].ok for v in some), len(came), h.median(told),
            max(told, default=float("nan")), sum(v.tries[1].ok for v in came),
        ])  # fmt: skip
    h.table(
        f"{TIMES:g} times {BASE_SHARE:g} of one replica ({CAPACITY:.1f} requests/s each), starts take {START_S:g} s",
        ["from s", "came", "served", "refused and told when", "told s p50", "told s max", "served then"],
        rows,
    )
    print("; ".join(marks))
    tries = [r for v in visitors for r in v.tries]
    print("endings of first tries:", codes([v.tries[0] for v in visitors]))
    again = [v for v in visitors if len(v.tries) == 2]
    print("endings of second tries:", codes([v.tries[1] for v in again]))
    silent = sum(not v.tries[0].ok and v.told_s is None for v in visitors)
    ttft = h.quantile([r.ttft_ms for r in tries if r.ok and r.ttft_ms is not None], 0.95)
    true = sum(v.tries[1].ok for v in again) / len(again) if again else 1.0
    return all(
        [
            h.verdict(ttft <= TTFT_MS, f"accepted TTFT p95 {ttft:.0f} ms (objective {TTFT_MS:.0f} ms)"),
            h.verdict(
                true >= TRUE_SHARE_MIN,
                f"{true:.1%} of {len(again)} that came again when told were served (bar {TRUE_SHARE_MIN:.0%})",
            ),
            h.verdict(silent == 0, f"{silent} failed without being told when to come again"),
        ]
    )


# --- the command ------------------------------------------------------------------------------------------------------


def run_part(part: str, options: argparse.Namespace, url: str) -> bool:
    """Deploy what one part needs, and run it; whether its bars held."""
    if part == "crowd":
        scaling = {"replicas_min": 1, "replicas_max": REPLICAS_MAX}
        f.start(1, SLOW_START, objectives={"ttft_ms": TTFT_MS}, scaling=scaling)
        return asyncio.run(crowd(url, options.base, options.crowd))
    real = options.engine != "emulated" if part == "warm" else options.engine == "vllm"
    most, cycles = (2, CYCLES_VLLM) if real or part == "warm" else (4, CYCLES)
    scaling = {"replicas_min": int(part == "shrink"), "replicas_max": most}
    sections: dict[str, Any] = {"scaling": scaling}
    if part == "shrink":
        sections["objectives"] = PATIENT
    h.deploy(h.default_args(**sections) if real else h.emulated_args(model={"emulated": QUICK}, **sections))
    if part == "warm":
        return asyncio.run(warm(url))
    asyncio.run(start_with(url, most))
    clients, tokens = (3, 60) if real else (CLIENTS, STREAM_TOKENS)
    return asyncio.run(shrink(url, most, options.cycles or cycles, clients, tokens))


def main(options: argparse.Namespace) -> bool:
    """The parts that were asked for, one after the other."""
    found = []
    for part in PARTS if options.part == "all" else (options.part,):
        found.append(run_part(part, options, f"http://127.0.0.1:{options.port}"))
        f.stop()
    return all(found)


async def start_with(url: str, replicas: int) -> None:
    """Bring the fleet up by hand."""
    async with h.client_session() as session:
        await set_by_hand(session, url, "replicas_target", replicas)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all")
    parser.add_argument("--engine", choices=("emulated", "vllm"), help="default: vllm for the part warm, else emulated")
    parser.add_argument("--cycles", type=int, default=0, help="of the part shrink")
    parser.add_argument("--base", type=float, default=BASE_S, help="seconds of the usual load")
    parser.add_argument("--crowd", type=float, default=CROWD_S, help="seconds of the crowd")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    with h.ray_serve(port=given.port):
        held = main(given)
    sys.exit(0 if held else 1)
