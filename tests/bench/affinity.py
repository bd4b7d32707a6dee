"""Later-turn TTFT with prefix affinity, beside random routing, on the same two real replicas in one run.

12 sessions x 4 turns; each session has a long system prompt of its own and its turns extend one conversation. A second
gateway (application ``random``) routes the very same engines at random. Rounds alternate; texts never repeat between
them. Bar: mean TTFT of turns 2-4 at most half of random's.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field

import aiohttp

from tests.bench import harness as h

SESSIONS, TURNS, PARALLEL, ROUNDS = 12, 4, 2, 2
SYSTEM_WORDS = 700
RATIO_MAX = 0.5
PATHS = {"affinity": h.URL, "random": f"{h.URL}/random"}


@dataclass
class Seen:
    """What one strategy's clients saw."""

    later_ttft_ms: list[float] = field(default_factory=list)
    first_ttft_ms: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0


def system_prompt(tag: str) -> str:
    """Return a long prompt that differs from every other from its first words on."""
    nouns = ("river", "gate", "tide", "stone", "harbour", "lamp", "rope", "wind", "sail", "chart")
    body = " ".join(nouns[(i * i + 3 * i + len(tag)) % 10] for i in range(SYSTEM_WORDS))
    return f"Session {tag}. Remember these words: {body}"


async def session_of_turns(client: aiohttp.ClientSession, url: str, tag: str, seen: Seen) -> None:
    """Play one conversation and note its TTFTs."""
    messages = [{"role": "system", "content": system_prompt(tag)}]
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"Turn {turn}: say something about {tag}."})
        result = await h.stream_chat(client, messages, 12, url=url)
        if result.failed or result.ttft_ms is None:
            raise RuntimeError(f"request failed: {result.error}")
        (seen.later_ttft_ms if turn else seen.first_ttft_ms).append(result.ttft_ms)
        if turn:
            seen.prompt_tokens += result.usage.get("prompt_tokens", 0)
            seen.cached_tokens += (result.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        messages.append({"role": "assistant", "content": result.text})


async def one_round(client: aiohttp.ClientSession, name: str, number: int, seen: Seen) -> None:
    """Run all sessions of one round, ``PARALLEL`` at a time."""
    gate = asyncio.Semaphore(PARALLEL)

    async def bounded(i: int) -> None:
        async with gate:
            await session_of_turns(client, PATHS[name], f"{name}-{number}-{i}", seen)

    await asyncio.gather(*(bounded(i) for i in range(SESSIONS)))


async def main() -> int:
    """Run all rounds, print the table, return the exit status."""
    seen = {name: Seen() for name in PATHS}
    async with h.client_session() as client:
        for path in PATHS.values():
            await h.stream_chat(client, [{"role": "user", "content": "warm up"}], 8, url=path)
        for number in range(ROUNDS):
            for name in PATHS:
                await one_round(client, name, number, seen[name])
    means = {name: sum(s.later_ttft_ms) / len(s.later_ttft_ms) for name, s in seen.items()}
    rows = []
    for name, s in seen.items():
        hit_rate = f"{100 * s.cached_tokens / max(1, s.prompt_tokens):.0f} %"
        rows.append([name, h.median(s.first_ttft_ms), means[name], h.quantile(s.later_ttft_ms, 0.95), hit_rate])
    h.table(
        f"{SESSIONS} sessions x {TURNS} turns, {ROUNDS} rounds, two real replicas: TTFT in ms",
        ["routing", "first turn p50", "later turns mean", "later turns p95", "prefix hit rate (later turns)"],
        rows,
    )
    ratio = means["affinity"] / means["random"]
    return 0 if h.verdict(ratio <= RATIO_MAX, f"later-turn TTFT affinity/random {ratio:.3f} (bar {RATIO_MAX})") else 1


def deploy_random_gateway(args: dict[str, object]) -> None:
    """Put a second gateway, which routes at random, in front of the first application's engines."""
    from ray import serve

    from deployments.gateway import build_gateway_deployment
    from deployments.settings import Settings

    engines = serve.get_deployment_handle("Engine", app_name="tidegate")
    settings = Settings.load(args)
    serve.run(build_gateway_deployment(settings, engines), name="random", route_prefix="/random", blocking=False)


if __name__ == "__main__":
    with h.ray_serve():
        two = {"replicas_min": 2, "replicas_max": 2}
        h.deploy(h.default_args(scaling=two))
        deploy_random_gateway(h.default_args(scaling=two, routing={"strategy": "random"}))
        status = asyncio.run(main())
    sys.exit(status)
