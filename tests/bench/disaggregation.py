"""Token gaps of running streams while long prompts come in: prompts computed at a replica of their own, beside whole.

Two real engines, one a core, behind one gateway. :data:`STREAMS` streams are kept running, and every
:data:`LONG_EVERY_S` a prompt of about :data:`LONG_TOKENS` tokens comes that no cache has. Rounds alternate between

    split   one replica prefills, the other decodes (``disaggregation``)
    whole   both do both: the knob ``prefill_replicas`` set to 0 by hand

on the same engines, with everything else as it comes, the token budget of the batch tuner included. Then the same
prompts, one at a time, both ways: the texts are compared.

Bars: p99 token gap of the streams, split, at most half of whole's (medians of the rounds); equal texts; nothing failed.

    python -m tests.bench.disaggregation [--rounds 3] [--round-s 35]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass, field

import aiohttp

from tests.bench import harness as h

STREAMS, TOKENS = 6, 80
LONG_EVERY_S, LONG_TOKENS, LONG_OUTPUT = 5.0, 1_300, 4
RATIO_MAX = 0.5
TEXTS = 4
SETTLE_S = 3.0
MODES = {"split": 1, "whole": 0}
"""By the number of replicas that prefill."""


@dataclass
class Round:
    """What the clients of one round saw."""

    gaps_ms: list[float] = field(default_factory=list)
    long_ttft_ms: list[float] = field(default_factory=list)
    failed: int = 0
    done: int = 0
    split: int = 0
    """Long prompts that were computed elsewhere."""


def long_prompt(name: str, tokens: int = LONG_TOKENS) -> list[dict[str, str]]:
    """A prompt with a beginning of its own."""
    colours = ("red", "green", "blue", "cold", "warm", "old")
    words = " ".join(colours[(i * 7 + i * i) % 6] for i in range(tokens - 30))
    return [{"role": "user", "content": f"{name}: {words}. Which words were these?"}]


async def set_mode(session: aiohttp.ClientSession, mode: str) -> str:
    """Set the number of prefill replicas by hand and wait until plans carry it; the override's id."""
    body = {"knob": "prefill_replicas", "value": MODES[mode], "expires_in_s": 3_600, "why": "benchmark"}
    async with session.post(f"{h.URL}/control/overrides", json=body) as response:
        if response.status not in (200, 201):
            raise RuntimeError(await response.text())

    async def in_force() -> bool:
        state = await h.control_state(session)
        return bool(state) and state["plan"]["prefill_replicas"] == MODES[mode]

    await h.wait_for(in_force, 30)
    await asyncio.sleep(SETTLE_S)  # gateways follow with their next report
    return mode


async def splits(session: aiohttp.ClientSession) -> float:
    """Requests split so far."""
    async with session.get(f"{h.URL}/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(x.split()[-1]) for x in lines if x.startswith('tidegate_disaggregation_total{reason="split"'))


async def one_round(session: aiohttp.ClientSession, name: str, round_s: float) -> Round:
    """Keep the streams running and send long prompts for ``round_s``."""
    seen, end = Round(), time.perf_counter() + round_s

    async def stream(number: int) -> None:
        count = 0
        while time.perf_counter() < end:
            count += 1
            message = [{"role": "user", "content": f"{name} {number} {count}: tell a story."}]
            result = await h.stream_chat(session, message, TOKENS)
            seen.gaps_ms += result.gaps_ms
            seen.failed += result.failed
            seen.done += 1

    async def long(number: int) -> None:
        await asyncio.sleep(2.0 + number * LONG_EVERY_S)
        result = await h.stream_chat(session, long_prompt(f"{name} {number}"), LONG_OUTPUT)
        seen.long_ttft_ms += [result.ttft_ms] if result.ttft_ms is not None else []
        seen.failed += result.failed
        seen.done += 1

    before = await splits(session)
    count = int((round_s - 2.0) // LONG_EVERY_S)
    await asyncio.gather(*(stream(i) for i in range(STREAMS)), *(long(i) for i in range(count)))
    seen.split = round(await splits(session) - before)
    return seen


async def texts(session: aiohttp.ClientSession) -> tuple[int, int]:
    """Prompts whose text was the same both ways, and how many were compared."""
    found: dict[str, list[str]] = {}
    for mode in MODES:
        await set_mode(session, mode)
        prompts = [long_prompt(f"text {i}", 700) for i in range(TEXTS)]
        found[mode] = [(await h.stream_chat(session, prompt, 24)).text for prompt in prompts]
    return sum(a == b != "" for a, b in zip(found["split"], found["whole"], strict=True)), TEXTS


async def main(rounds: int, round_s: float) -> int:
    """Run all rounds, print the table, return the exit status."""
    seen: dict[str, list[Round]] = {mode: [] for mode in MODES}
    async with h.client_session() as session:
        await h.wait_for(lambda: both_there(session), 240)
        await set_mode(session, "split")
        await one_round(session, "warm", 8.0)
        for i in range(rounds):
            for mode in MODES if i % 2 == 0 else reversed(MODES):
                await set_mode(session, mode)
                seen[mode].append(await one_round(session, f"{mode} {i}", round_s))
        same, compared = await texts(session)
    p99 = {mode: [h.quantile(r.gaps_ms, 0.99) for r in found] for mode, found in seen.items()}
    rows = [
        [
            mode, *[round(value) for value in p99[mode]], h.median(p99[mode]),
            h.median([h.quantile(r.gaps_ms, 0.5) for r in found]), max(max(r.gaps_ms) for r in found),
            h.median([ms for r in found for ms in r.long_ttft_ms]), sum(r.split for r in found),
            f"{sum(r.failed for r in found)} of {sum(r.done for r in found)}",
        ]
        for mode, found in seen.items()
    ]  # fmt: skip
    h.table(
        f"Token gaps (ms) of {STREAMS} streams beside prompts of {LONG_TOKENS} tokens, two real engines on two cores",
        ["mode", *[f"p99 round {i + 1}" for i in range(rounds)], "p99 median", "p50", "longest", "TTFT of long prompts",
         "split", "failed"],
        rows,
    )  # fmt: skip
    ratio = h.median(p99["split"]) / h.median(p99["whole"])
    ok = h.verdict(ratio <= RATIO_MAX, f"p99 gap split/whole {ratio:.3f} (bar {RATIO_MAX})")
    ok &= h.verdict(same == compared, f"texts equal both ways: {same} of {compared}")
    failed = sum(r.failed for found in seen.values() for r in found)
    ok &= h.verdict(failed == 0, f"failed requests: {failed}")
    return 0 if ok else 1


async def both_there(session: aiohttp.ClientSession) -> bool:
    """Whether both replicas report."""
    return len((await h.control_state(session)).get("replicas", [])) == 2


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--round-s", type=float, default=35.0)
    options = parser.parse_args()
    with h.ray_serve():
        h.deploy(
            h.default_args(
                scaling={"replicas_min": 2, "replicas_max": 2},
                objectives={"ttft_ms": 10_000.0},
                disaggregation={"enabled": True},
                control={"mode": "act"},
            )
        )
        status = asyncio.run(main(options.rounds, options.round_s))
    sys.exit(status)
