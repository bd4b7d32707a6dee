"""Goodput of a real engine whose cap and token budget follow the load, beside vLLM's default settings, on five loads.

Two real engines, one steered (``batching.enabled: true``), one at vLLM's own defaults (``max_num_seqs`` and
``max_num_batched_tokens`` are left out); nothing else differs, and only one is loaded at a time. A request is good when
it is answered, its first token comes within the TTFT objective, and the objective's quantile of its own token gaps
(nearest rank) is within the ITL objective. Objectives come from this machine's speed, measured on the default engine::

    ITL    OBJECTIVE_STEPS times a step that decodes eight streams and computes CHUNK tokens of a prompt
    TTFT   OBJECTIVE_PROMPTS times the TTFT of a prompt of LONG words on the idle engine

and so do the arrival rates, so that each load takes about the same share of any machine. Arrivals are Poisson, drawn
once per load and played to both engines. Bars: :data:`MIXED_MIN` times the goodput under mixed load, and on no load
below :data:`EACH_MIN` of it.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.bench import harness as h

QUANTILE = 0.95
OBJECTIVE_STEPS, OBJECTIVE_PROMPTS, CHUNK = 1.2, 4.0, 100
STREAMS, LONG, LOAD_PROMPTS = 8, 900, 14
MIXED_MIN, EACH_MIN = 1.3, 0.97
COLOURS = ("red", "green", "blue", "cold", "warm", "old", "new", "soft")


@dataclass(frozen=True)
class Speed:
    """What this machine does on the default engine."""

    gap_ms: float
    """Token gap of :data:`STREAMS` streams."""
    long_ms: float
    """TTFT of a prompt of :data:`LONG` words on the idle engine."""

    @property
    def ttft_ms(self) -> float:
        """TTFT objective."""
        return OBJECTIVE_PROMPTS * self.long_ms

    @property
    def itl_ms(self) -> float:
        """ITL objective."""
        return OBJECTIVE_STEPS * (self.gap_ms + CHUNK * self.long_ms / LONG)

    @property
    def load_s(self) -> float:
        """Length of one load: as many long prompts would be computed in it one after the other."""
        return LOAD_PROMPTS * self.long_ms / 1e3

    def decoding_ps(self, share: float, tokens: int) -> float:
        """Answers of ``tokens`` per second that take ``share`` of what :data:`STREAMS` streams decode."""
        return share * STREAMS * 1e3 / (self.gap_ms * tokens)

    def prompts_ps(self, share: float, words: float) -> float:
        """Prompts of ``words`` per second that take ``share`` of the engine's time."""
        return share * 1e3 / (self.long_ms * words / LONG)


@dataclass(frozen=True)
class Call:
    """One request of a load."""

    at_s: float
    prompt: str
    tokens: int


@dataclass
class Score:
    """What came of one load on one engine."""

    sent: int = 0
    good: int = 0
    by_mean: int = 0
    """Good where the mean gap counts instead of the quantile."""
    failed: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    gap_ms: list[float] = field(default_factory=list)
    """Of each request, its gap at the quantile."""

    def add(self, result: h.StreamResult, speed: Speed) -> None:
        """Count one request."""
        self.sent += 1
        if result.failed or result.ttft_ms is None:
            self.failed += 1
            return
        gap = nearest_rank(result.gaps_ms, QUANTILE)
        mean = sum(result.gaps_ms) / len(result.gaps_ms) if result.gaps_ms else 0.0
        self.ttft_ms.append(result.ttft_ms)
        self.gap_ms.append(gap)
        in_time = result.ttft_ms <= speed.ttft_ms
        self.good += in_time and gap <= speed.itl_ms
        self.by_mean += in_time and mean <= speed.itl_ms

    def row(self) -> list[Any]:
        """Cells of the table."""
        at = [round(h.quantile(values, 0.9)) for values in (self.ttft_ms, self.gap_ms)] if self.ttft_ms else ["-", "-"]
        return [self.sent, self.good, self.by_mean, *at]


def nearest_rank(values: Sequence[float], q: float) -> float:
    """Quantile by nearest rank; 0 when empty."""
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)] if values else 0.0


def words(n: int, rng: random.Random) -> str:
    """About ``n`` tokens that no other prompt shares."""
    return " ".join(rng.choice(COLOURS) for _ in range(n))


# --- loads ------------------------------------------------------------------------------------------------------------


def arrivals(rate_ps: float, seconds: float, rng: random.Random) -> list[float]:
    """Poisson arrivals within ``seconds``."""
    times, at = [], rng.expovariate(rate_ps)
    while at < seconds:
        times.append(at)
        at += rng.expovariate(rate_ps)
    return times


def chat(speed: Speed, seconds: float, rng: random.Random) -> list[Call]:
    """Short questions, short answers."""
    rate = speed.decoding_ps(0.4, 24)
    return [Call(at, words(rng.randint(10, 40), rng), rng.randint(16, 32)) for at in arrivals(rate, seconds, rng)]


def long_prompts(speed: Speed, seconds: float, rng: random.Random) -> list[Call]:
    """Documents to be judged in a few words."""
    rate = speed.prompts_ps(0.5, 750)
    return [Call(at, words(rng.randint(600, LONG), rng), 8) for at in arrivals(rate, seconds, rng)]


def mixed(speed: Speed, seconds: float, rng: random.Random) -> list[Call]:
    """Short questions beside prompts with passages in them."""
    short = arrivals(speed.decoding_ps(0.2, 20), seconds, rng)
    passages = arrivals(speed.prompts_ps(0.45, 550), seconds, rng)
    calls = [Call(at, words(rng.randint(10, 30), rng), 20) for at in short]
    return calls + [Call(at, words(rng.randint(300, 800), rng), 20) for at in passages]


def decode_heavy(speed: Speed, seconds: float, rng: random.Random) -> list[Call]:
    """Short questions, long answers."""
    rate = speed.decoding_ps(0.5, 80)
    return [Call(at, words(rng.randint(10, 30), rng), 80) for at in arrivals(rate, seconds, rng)]


def bursts(speed: Speed, seconds: float, rng: random.Random) -> list[Call]:
    """Six questions at once about one document, then the next document."""
    calls, at = [], 0.5
    while at < seconds:
        document = words(400, rng)
        calls += [Call(at + 0.02 * i, f"{document} {words(12, rng)}", 12) for i in range(6)]
        at += 2.2 * speed.long_ms * 400 / LONG / 1e3 + 12 * speed.gap_ms / 1e3
    return calls


LOADS: dict[str, Callable[[Speed, float, random.Random], list[Call]]] = {
    "chat": chat,
    "long prompts": long_prompts,
    "mixed short and long": mixed,
    "decode heavy": decode_heavy,
    "shared prefix bursts": bursts,
}
MIXED = "mixed short and long"


async def play(session: aiohttp.ClientSession, url: str, calls: Sequence[Call], speed: Speed) -> Score:
    """One load on one engine, to the end of its last request."""

    async def one(call: Call) -> h.StreamResult:
        await asyncio.sleep(call.at_s)
        message = {"role": "user", "content": call.prompt}
        return await h.stream_chat(session, [message], call.tokens, url=url, timeout_s=120)

    score = Score()
    for result in await asyncio.gather(*(one(call) for call in calls)):
        score.add(result, speed)
    return score


# --- speed ------------------------------------------------------------------------------------------------------------


async def measure(url: str) -> Speed:
    """Speed of the engine behind ``url``, medians of three."""
    rng = random.Random(1)

    async def chats(session: aiohttp.ClientSession, n: int, size: int, tokens: int) -> list[h.StreamResult]:
        prompts = [[{"role": "user", "content": words(size, rng)}] for _ in range(n)]
        return list(await asyncio.gather(*(h.stream_chat(session, p, tokens, url=url) for p in prompts)))

    gaps, firsts = [], []
    async with h.client_session() as session:
        await chats(session, STREAMS, 20, 8)
        for _ in range(3):
            results = await chats(session, STREAMS, 20, 24)
            gaps.append(h.median([gap for r in results for gap in r.gaps_ms]))
            [alone] = await chats(session, 1, LONG, 2)
            if alone.ttft_ms is None:
                raise RuntimeError(f"the engine does not answer: {alone.error}")
            firsts.append(alone.ttft_ms)
    return Speed(h.median(gaps), h.median(firsts))


async def settings(session: aiohttp.ClientSession, url: str) -> str:
    """Cap and budget in force, as the controller sees them."""
    state = await h.control_state(session, url)
    knobs = [r["knobs"] for r in state.get("replicas", [])]
    return ", ".join(f"{k.get('running_seqs_max')}/{k.get('step_tokens_max')}" for k in knobs) or "-"


async def compare(speed: Speed, seconds: float, rounds: int, names: Sequence[str]) -> int:
    """Play all loads to both engines alternately, print the table, return the exit status."""
    urls = {"defaults": h.URL, "tuned": f"{h.URL}/tuned"}
    rows, ratios = [], {}
    async with h.client_session() as session:
        for url in urls.values():
            await play(session, url, mixed(speed, 12.0, random.Random(7)), speed)
        await asyncio.sleep(4)
        for name in names:
            scores = {arm: Score() for arm in urls}
            for i in range(rounds + (name == MIXED)):
                calls = LOADS[name](speed, seconds, random.Random(100 + i))
                for arm, url in urls.items():
                    one = await play(session, url, calls, speed)
                    total = scores[arm]
                    for field_ in ("sent", "good", "by_mean", "failed"):
                        setattr(total, field_, getattr(total, field_) + getattr(one, field_))
                    total.ttft_ms += one.ttft_ms
                    total.gap_ms += one.gap_ms
            ratios[name] = scores["tuned"].good / max(1, scores["defaults"].good)
            in_force = await settings(session, urls["tuned"])
            for arm, score in scores.items():
                ratio = f"{ratios[name]:.2f}" if arm == "tuned" else ""
                rows.append([name, arm, in_force if arm == "tuned" else "", *score.row(), ratio])
            print(f"  .. {name}: {ratios[name]:.2f}", flush=True)
    h.table(
        f"Requests with TTFT within {speed.ttft_ms:,.0f} and gaps (p{QUANTILE * 100:.0f}) within {speed.itl_ms:.0f} ms",
        ["load", "engine", "seqs/tokens", "sent", "good", "by mean gap", "TTFT p90", "gap p90", "ratio"],
        rows,
    )
    good = h.verdict(min(ratios.values()) >= EACH_MIN, f"least ratio {min(ratios.values()):.2f} (bar {EACH_MIN})")
    if MIXED in ratios:
        good &= h.verdict(ratios[MIXED] >= MIXED_MIN, f"{MIXED}: {ratios[MIXED]:.2f} (bar {MIXED_MIN})")
    return 0 if good else 1


def engine_args(**sections: Any) -> dict[str, Any]:
    """One replica, nobody refused or held in the gateway; vLLM's own batch settings, in float32 for all processors."""
    open_door = {"engine_wait_share": None, "inflight_requests_max": 1_000}
    one = {"replicas_min": 1, "replicas_max": 1}
    args = h.default_args(scaling=one, admission=open_door, **sections)
    args["model"]["engine_args"] |= {"dtype": "float32"}
    return args


def main() -> int:
    """Start both engines, one after the other, and compare them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, help="arrivals of one load; else as the machine is fast")
    parser.add_argument("--rounds", type=int, default=1, help="times each load is played (mixed once more)")
    parser.add_argument("--loads", default=",".join(LOADS), help="comma-separated")
    given = parser.parse_args()
    with h.ray_serve():
        h.deploy(engine_args(batching={"enabled": False}), name="defaults")
        speed = asyncio.run(measure(h.URL))
        print(
            f"gap of {STREAMS} streams {speed.gap_ms:.0f} ms, TTFT of {LONG} words {speed.long_ms:.0f} ms: objectives "
            f"ITL {speed.itl_ms:.0f} ms, TTFT {speed.ttft_ms:,.0f} ms",
            flush=True,
        )
        objectives = {"ttft_ms": speed.ttft_ms, "itl_ms": speed.itl_ms, "quantile": QUANTILE}
        h.deploy(engine_args(control={"mode": "act"}, objectives=objectives), name="tuned", route_prefix="/tuned")
        return asyncio.run(compare(speed, given.seconds or speed.load_s, given.rounds, given.loads.split(",")))


if __name__ == "__main__":
    sys.exit(main())
