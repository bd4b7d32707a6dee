"""Longest token gap while a 900-token prompt joins 16 decoding streams: token budget adapted live, beside untuned.

Two real engines in one run, one steered (``batching.enabled: true``), one left at its start-up budget. A first round on
the untuned engine tells how fast this machine decodes 16 streams; the ITL objective is 2.5 times that gap. Rounds then
alternate between both, only one is loaded at a time. Bar: the longest gap of the tuned engine is at most a fifth.
"""

from __future__ import annotations

import asyncio
import sys

import aiohttp

from tests.bench import harness as h

ROUNDS = 3
STREAMS, TOKENS = 16, 72
OBJECTIVE_GAPS = 2.5
RATIO_MAX = 0.2


def words(n: int, seed: int) -> str:
    """Return ``n`` words (about one token each) that no earlier prompt shares."""
    colours = ("red", "green", "blue", "cold", "warm", "old")
    return " ".join(colours[(i * 7 + seed * 3 + i * i) % 6] for i in range(n))


async def one_round(session: aiohttp.ClientSession, url: str, seed: int) -> tuple[float, float]:
    """Return longest and median gap in ms of the decoding streams; the long prompt joins once all of them decode."""
    prompts = [[{"role": "user", "content": f"Story {seed}-{i}: {words(8, i)}"}] for i in range(STREAMS)]
    events = [asyncio.Event() for _ in prompts]
    chats = [h.stream_chat(session, p, TOKENS, url=url, started=e) for p, e in zip(prompts, events, strict=True)]
    streams = [asyncio.create_task(chat) for chat in chats]
    await asyncio.gather(*(event.wait() for event in events))
    await asyncio.sleep(1.0)
    long_prompt = [{"role": "user", "content": f"{seed} {words(900, seed)}"}]
    joined = await h.stream_chat(session, long_prompt, 4, url=url)
    results = await asyncio.gather(*streams)
    failed = [r for r in [*results, joined] if r.failed]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0].error}")
    gaps_ms = [gap for r in results for gap in r.gaps_ms]
    return max(gaps_ms), h.median(gaps_ms)


async def budget_in_force(session: aiohttp.ClientSession, url: str) -> object:
    """Return the token budget that the engine runs with, from the controller's state."""
    state = await h.control_state(session, url)
    return [r["knobs"]["step_tokens_max"] for r in state.get("replicas", [])]


async def decode_gap_ms(url: str) -> float:
    """Return the median token gap of 16 streams on this machine."""
    async with h.client_session() as session:
        return (await one_round(session, url, seed=100))[1]


async def main() -> int:
    """Run all rounds, print the table, return the exit status."""
    tuned, untuned = f"{h.URL}/tuned", h.URL
    gaps: dict[str, list[float]] = {tuned: [], untuned: []}
    async with h.client_session() as session:
        await one_round(session, tuned, seed=150)
        await asyncio.sleep(5)
        for i in range(ROUNDS):
            for url in (tuned, untuned):
                gaps[url].append((await one_round(session, url, seed=200 + i))[0])
        budgets = [await budget_in_force(session, url) for url in (tuned, untuned)]
    medians = [h.median(gaps[url]) for url in (tuned, untuned)]
    rows = [
        ["token budget adapted live", budgets[0], *[round(g) for g in gaps[tuned]], medians[0]],
        ["untuned (start-up budget)", budgets[1], *[round(g) for g in gaps[untuned]], medians[1]],
    ]
    h.table(
        "Longest gap (ms) of 16 decoding streams while a 900-token prompt joins, real vLLM",
        ["engine", "step_tokens_max", *[f"round {i + 1}" for i in range(ROUNDS)], "median"],
        rows,
    )
    ratio = medians[0] / medians[1]
    return 0 if h.verdict(ratio <= RATIO_MAX, f"tuned/untuned {ratio:.3f} (bar {RATIO_MAX})") else 1


if __name__ == "__main__":
    with h.ray_serve():
        one = {"replicas_min": 1, "replicas_max": 1}
        h.deploy(h.default_args(scaling=one, batching={"enabled": False}), name="untuned")
        objective_ms = OBJECTIVE_GAPS * asyncio.run(decode_gap_ms(h.URL))
        print(f"ITL objective of the tuned engine: {objective_ms:.0f} ms", flush=True)
        tuned_args = h.default_args(scaling=one, control={"mode": "act"}, objectives={"itl_ms": objective_ms})
        h.deploy(tuned_args, name="tuned", route_prefix="/tuned")
        status = asyncio.run(main())
    sys.exit(status)
