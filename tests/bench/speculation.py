"""Speculative decoding whose depth moves by itself, beside the same engine held at depth 0 by hand. Real vLLM, batch 1.

One engine with n-gram drafts, steered by the product's control loop (``tests/engine/steered.py``). Rounds compare an
override of depth 0 with no override on two texts; parts of a round follow each other at once, and their order turns,
because the pace of a machine wanders by more than the bar within a minute:

* repetitive: the prompt is one sentence over and over, decoded at temperature 0; nearly every draft comes true;
* undraftable: stories at temperature 1.2. One token is enough for a match (``prompt_lookup_min: 1``), so drafts are
  made in nearly every step and hardly any comes true: the worst case.

After an override is taken back, the depth has time to move before the round is measured (it is what is measured in
production: texts do not change every few seconds). What each depth brought and cost in the parts that moved is printed
from the engine's own counts. Bars: repetitive text at least :data:`GAIN_MIN` times the tokens per
second of depth 0, undraftable at least :data:`KEPT_MIN`, and the depth goes up and down by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from dataclasses import dataclass, field
from operator import add

import httpx

from tests.bench import harness as h
from tests.engine.steered import Steered, steered

GAIN_MIN, KEPT_MIN = 2.5, 0.97
HARD = 16
MOVE_S_MAX, SETTLE_S = 90.0, 4.0
SENTENCE = "The tide rises, the tide falls, the gate opens, the gate closes. "
STORY = "<|im_start|>user\nWrite a story about {} and {}. Never repeat a word.<|im_end|>\n<|im_start|>assistant\n"
THINGS = ("a sailor", "a whale", "the moon", "a clock", "two brothers", "an old map", "a thief", "the north wind")


@dataclass
class Text:
    """One kind of text, and what was measured on it."""

    name: str
    temperature: float
    tokens: int
    depth: int
    """Where the depth should come to."""
    turns: str
    """Parts of a round in their order: h(eld) and m(oved); the next round takes them backwards."""
    rounds_share: float = 1.0
    """Of the rounds asked for: where the bar is far away, fewer say enough."""
    held: list[float] = field(default_factory=list)
    moved: list[float] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    uses: dict[int, list[float]] = field(default_factory=dict)
    """By depth, in the parts that moved: steps, tokens, drafted, ms."""

    def prompt(self, n: int) -> str:
        """The ``n``-th prompt; no two are alike."""
        if self.name == "repetitive":
            return f"{n}. " + (SENTENCE * 8).rstrip()
        first, second = THINGS[n % len(THINGS)], THINGS[(n // len(THINGS) + n + 1) % len(THINGS)]
        return STORY.format(first, second) + f"{n}:"


class Run:
    """Streams of one engine, one at a time."""

    def __init__(self, engine: Steered, client: httpx.AsyncClient) -> None:
        self._engine = engine
        self._client = client
        self._n = 0

    async def stream(self, text: Text, tokens: int | None = None) -> float:
        """Decode speed of one stream in tokens per second."""
        self._n += 1
        prompt = text.prompt(self._n)
        seen = await self._engine.stream(self._client, prompt, tokens or text.tokens, text.temperature)
        return seen.decode_tps

    async def round(self, text: Text, number: int) -> None:
        """One round: the mean speed of held and moved parts, and the depth after each that moved."""
        spent: dict[str, list[float]] = {"h": [], "m": []}
        for part in text.turns[:: -1 if number % 2 else 1]:
            if part == "h":
                await self._engine.call("pin", 0)
                await self._until_held()
                spent[part].append(1 / await self.stream(text))
                continue
            await self._engine.call("pin", None)
            await self.move(text, SETTLE_S)
            after_seq = await self._last_seq()
            spent[part].append(1 / await self.stream(text))
            text.depths.append(await self._engine.call("depth"))
            await self._count(text, after_seq)
        text.held.append(len(spent["h"]) / sum(spent["h"]))
        text.moved.append(len(spent["m"]) / sum(spent["m"]))

    async def _last_seq(self) -> int:
        reports = await self._engine.call("reports", 0)
        return reports[-1].seq if reports else 0

    async def _count(self, text: Text, after_seq: int) -> None:
        for report in await self._engine.call("reports", after_seq):
            for use in report.depth_use:
                of_depth = text.uses.setdefault(use.depth, [0.0] * 4)
                of_depth[:] = map(add, of_depth, (use.steps, use.tokens, use.drafted, use.busy_ms))

    async def move(self, text: Text, seconds_min: float = 0.0) -> tuple[float, list[int]]:
        """Decode ``text`` until the depth has followed it; the seconds that took, and the depths on the way.

        ``seconds_min``: an override that was just taken back is in force for a tick, and what is known of the text is
        of before it.
        """
        begun, way = time.perf_counter(), [await self._engine.call("depth")]
        load = asyncio.create_task(self._load(text))
        try:
            while time.perf_counter() - begun < MOVE_S_MAX:
                depth = await self._engine.call("depth")
                if depth != way[-1]:
                    way.append(depth)
                if depth == text.depth and time.perf_counter() - begun >= seconds_min:
                    break
                await asyncio.sleep(0.25)
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
        return time.perf_counter() - begun, way

    async def _load(self, text: Text) -> None:
        while True:
            await self.stream(text, 1_000)

    async def _until_held(self) -> None:
        while await self._engine.call("depth") != 0:  # noqa: ASYNC110 - another process brings it about
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.5)


async def measure(engine: Steered, rounds: int) -> tuple[list[Text], list[tuple[str, float, list[int]]]]:
    """All rounds, then both moves."""
    texts = [Text("repetitive", 0.0, 160, HARD, "hm", 0.5), Text("undraftable", 1.2, 48, 0, "hmmh")]
    async with engine.client() as client:
        run = Run(engine, client)
        await run.stream(texts[0], 32)
        moves: list[tuple[str, float, list[int]]] = []
        for text in texts:
            for number in range(math.ceil(rounds * text.rounds_share)):
                await run.round(text, number)
            print(f"{text.name}: depth 0 {_shown(text.held)}, moving {_shown(text.moved)} tok/s", flush=True)
        moves += [(text.name, *await run.move(text)) for text in (texts[0], texts[1], texts[0])]
    for line in await engine.call("decisions"):
        print("  ", line)
    return texts, moves


def _shown(values: list[float]) -> str:
    return "[" + ", ".join(f"{v:.1f}" for v in values) + "]"


def report(texts: list[Text], moves: list[tuple[str, float, list[int]]]) -> bool:
    """Print tables and bars; true when none was missed."""
    rows = [
        [t.name, len(t.held), h.median(t.held), h.median(t.moved), _ratio(t), " ".join(map(str, t.depths))]
        for t in texts
    ]
    h.table(
        f"Decode speed at batch 1, real vLLM, drafts up to {HARD}: tok/s, medians of rounds",
        ["text", "rounds", "held at depth 0", "depth moves", "ratio", "depths that were moved to"],
        rows,
    )
    h.table(
        "Decode steps of the parts that moved",
        ["text", "depth", "steps", "share of time", "tokens a step", "drafted a step", "ms a step"],
        [row for t in texts for row in _used(t)],
    )
    h.table(
        "The depth follows the text by itself",
        ["text becomes", "seconds", "depths"],
        [[name, seconds, " ".join(map(str, way))] for name, seconds, way in moves],
    )
    gain, kept = _ratio(texts[0]), _ratio(texts[1])
    ok = [
        h.verdict(gain >= GAIN_MIN, f"repetitive text: {gain:.2f} x depth 0 (bar {GAIN_MIN})"),
        h.verdict(kept >= KEPT_MIN, f"undraftable text: {kept:.3f} of depth 0 (bar {KEPT_MIN})"),
        h.verdict(
            [way[-1] for _, _, way in moves] == [HARD, 0, HARD],
            f"depth goes up, down and up again by itself ({', '.join(f'{m[1]:.0f} s' for m in moves)})",
        ),
    ]
    return all(ok)


def _used(text: Text) -> list[list[object]]:
    total_ms = sum(ms for *_, ms in text.uses.values())
    return [
        [text.name, depth, int(steps), f"{ms / total_ms:.1%}", tokens / steps, drafted / steps, ms / steps]
        for depth, (steps, tokens, drafted, ms) in sorted(text.uses.items())
    ]


def _ratio(text: Text) -> float:
    """Median of the rounds' ratios: both halves of a round saw the same machine."""
    return h.median([moved / held for held, moved in zip(text.held, text.moved, strict=True)])


def engine_args(hard: int = HARD) -> dict[str, object]:
    """Settings of the one engine."""
    drafts = {
        "method": "ngram", "num_speculative_tokens": hard, "prompt_lookup_min": 1, "prompt_lookup_max": 4,
    }  # fmt: skip
    return h.default_args(
        model={"engine_args": {"speculative_config": drafts}},
        scaling={"replicas_min": 1, "replicas_max": 1},
        batching={"enabled": False},
        control={"mode": "act"},
    )


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    rounds = parser.parse_args().rounds
    with steered(engine_args()) as engine:
        texts, moves = asyncio.run(measure(engine, rounds))
    return 0 if report(texts, moves) else 1


if __name__ == "__main__":
    sys.exit(main())
