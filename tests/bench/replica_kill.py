"""A replica killed with SIGKILL under load: failed requests, streams that went on as one, texts as undisturbed.

Emulated (default): four replicas at 80 % of capacity, half of the requests streams, chat and completions. The same
prompts are first answered with nothing going wrong, one by one in time; then again while one replica is killed, twice.
Every answer of the second run is compared with the first: text, usage, finish reason, one id for the whole stream, one
end. A stream that did not go on must end with one error event and without the end mark. The three replicas left carry
less than what arrives until the fourth is back: clients that are refused with 429 come again when they are told to, as
their libraries do, up to four times; how many were is printed.

``--engine vllm``: two real replicas on the CPU, temperature 0, one stream at a time; the replica that writes it is
killed in the middle. Then the same prompts four at a time with nothing killed: how often the composition of batches
alone changes a text.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.bench import fleet as f
from tests.bench import harness as h
from tests.bench.wire import CHAT, COMPLETIONS, MODEL, Reply, Wire, completion

REPLICAS, SLOTS, TOKENS, LOAD = 4, 8, 80, 0.8
STEP = {"a_ms": 30, "b_ms": 1, "c_ms": 0, "d_ms": 0.05}
EMULATED: dict[str, Any] = {"step": STEP, "running_seqs_max": SLOTS, "kv_blocks": 2_048, "step_tokens_max": 512}
CAPACITY = REPLICAS * SLOTS / (TOKENS * (STEP["a_ms"] + STEP["b_ms"] * SLOTS) / 1e3)
SEAMLESS_MIN, TRIES = 0.99, 5
VLLM_TOKENS = 48


def bodies(count: int, tokens: int, seed: str) -> list[tuple[str, dict[str, Any]]]:
    """Path and body of each request: chat and completions, every other one a stream."""
    rng, made = random.Random(seed), []
    for n in range(count):
        text = f"{n} " + f.prompt(rng, rng.randint(40, 200))
        body = completion(text, tokens, stream=n % 2 == 0)
        if n % 4 < 2:
            body |= {"messages": [{"role": "user", "content": text}]}
            body.pop("prompt")
        made.append((CHAT if n % 4 < 2 else COMPLETIONS, body))
    return made


@dataclass(frozen=True)
class Seen:
    """What a client makes of one answer."""

    kind: str
    """``whole``: complete; ``error``: ended with the clear error; ``failed``: anything else."""
    text: str
    finish: str
    usage: tuple[int, int]
    ids: int
    """Different ids in one stream."""


def seen(reply: Reply) -> Seen:
    """Read one answer as a careful client does."""
    try:
        parts = reply.events() if reply.stream else [json.loads(reply.body)]
    except ValueError:
        parts = []
    text, finish, usage, ids, error, ends = "", "", (0, 0), set(), False, reply.body.count(b"data: [DONE]")
    for part in parts:
        error = error or "error" in part
        ids |= {part["id"]} if "id" in part else set()
        if part.get("usage"):
            usage = (part["usage"]["prompt_tokens"], part["usage"]["completion_tokens"])
        for choice in part.get("choices") or []:
            said = choice.get("delta") or choice.get("message") or choice
            text += said.get("content") or said.get("text") or ""
            finish += choice.get("finish_reason") or ""
    whole = reply.status == 200 and reply.whole and not error and bool(finish) and ends == reply.stream
    clear = reply.stream and reply.status == 200 and reply.whole and error and not ends and not finish
    return Seen("whole" if whole else "error" if clear else "failed", text, finish, usage, len(ids))


async def patient(wire: Wire, path: str, body: dict[str, Any], refused: list[Reply]) -> Reply:
    """One request; again after a refusal, when the server said."""
    for _ in range(TRIES):
        reply = await wire.post(path, body)
        if reply.status != 429:
            break
        refused.append(reply)
        await asyncio.sleep(reply.retry_after_s or 1.0)
    return reply


async def play(
    wire: Wire, load: list[tuple[str, dict[str, Any]]], rate: float, refused: list[Reply] | None = None
) -> list[Reply]:
    """Send all at random times; their answers in order. ``refused`` takes the refusals on the way."""
    rejected = refused if refused is not None else []
    rng, begin, at, tasks = random.Random("arrivals"), time.perf_counter(), 0.0, []
    for path, body in load:
        at += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
        tasks.append(asyncio.create_task(patient(wire, path, body, rejected)))
    return [await task for task in tasks]


@dataclass
class Counts:
    """Of one run, streams and whole answers apart."""

    streams: int
    seamless: int
    clear: int
    whole: int
    failed: int
    different: int
    """Complete, but not what the undisturbed run said."""

    def row(self, name: str) -> list[Any]:
        """For the table."""
        share = self.seamless / max(1, self.streams)
        return [name, self.streams, self.seamless, f"{share:.2%}", self.clear, self.whole, self.failed, self.different]


def compare(calm: list[Reply], stormy: list[Reply]) -> Counts:
    """Each answer beside its undisturbed twin."""
    counts = Counts(0, 0, 0, 0, 0, 0)
    for before, after in zip(calm, stormy, strict=True):
        wanted, got = seen(before), seen(after)
        if wanted.kind != "whole":
            raise RuntimeError(f"the undisturbed run failed: {before.status} {before.raw[-300:]!r}")
        is_stream = before.stream
        same = got == wanted
        counts.different += got.kind == "whole" and not same
        if got.kind == "whole" and not same:
            print(f"different: {wanted} | {got}")
        counts.streams += is_stream
        counts.seamless += is_stream and same
        counts.clear += is_stream and got.kind == "error"
        counts.whole += not is_stream
        if got.kind == "failed" or (not is_stream and got.kind != "whole"):
            counts.failed += 1
            print(f"failed: {after.status} {after.error_code()} {after.raw[-200:]!r}")
    return counts


HEADER = ["run", "streams", "as one, equal", "share", "clear error", "not streamed", "failed", "different"]


def told(rows: list[list[Any]], streams: int, seamless: int, failed: int, different: int) -> int:
    """Print table and bars; the exit status."""
    h.table("SIGKILL of a replica under load, beside the same prompts undisturbed", HEADER, rows)
    share = seamless / max(1, streams)
    passed = [
        h.verdict(failed == 0, f"{failed} requests failed other than by the clear error of a stream (bar 0)"),
        h.verdict(share >= SEAMLESS_MIN, f"{share:.2%} of streams complete as one, equal (bar {SEAMLESS_MIN:.0%})"),
        h.verdict(different == 0, f"{different} complete answers differ from the undisturbed run (bar 0)"),
    ]
    return 0 if all(passed) else 1


# --- emulated ---------------------------------------------------------------------------------------------------------


async def emulated_run(fleet: f.Fleet, seconds: float, kills: int) -> list[list[Any]]:
    """Undisturbed, then with ``kills`` kills; rows of the table."""
    wire, rate, rows = Wire(), LOAD * CAPACITY, []
    load = bodies(int(rate * seconds), TOKENS, "replica_kill")
    calm = await play(wire, load, rate)
    rows.append(compare(calm, calm).row("undisturbed"))
    for number in range(kills):
        refused: list[Reply] = []
        task = asyncio.create_task(play(wire, load, rate, refused))
        await asyncio.sleep(seconds / 2)
        victim = max(await asyncio.to_thread(fleet.counters), key=lambda c: c["running"])
        await asyncio.to_thread(fleet.kill, victim["replica_id"])
        print(f"killed a replica with {victim['running']} running, {victim['waiting']} waiting", flush=True)
        rows.append(compare(calm, await task).row(f"kill {number + 1}"))
        print(f"{len(refused)} refusals with 429 on the way", flush=True)
        await asyncio.to_thread(fleet.until, lambda: len(fleet.counters()) == REPLICAS, 90, "all replicas again")
        await asyncio.sleep(3)
    wire.close()
    return rows


def emulated(options: argparse.Namespace) -> int:
    """The emulated fleet."""
    fleet = f.start(REPLICAS, EMULATED)
    rows = asyncio.run(emulated_run(fleet, options.seconds, options.kills))
    hit = rows[1:]
    return told(rows, *(sum(int(row[column]) for row in hit) for column in (1, 2, 6, 7)))


# --- real vLLM --------------------------------------------------------------------------------------------------------


def vllm_body(n: int) -> dict[str, Any]:
    """A chat at temperature 0."""
    subjects = ("a river", "a lighthouse", "winter", "a small town", "the sea", "an old clock", "a market", "the moon")
    said = f"Tell story number {n} about {subjects[n % len(subjects)]}."
    return {
        "model": MODEL, "messages": [{"role": "user", "content": said}], "max_tokens": VLLM_TOKENS, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip


def process_of(replica_id: str) -> int:
    """The process of an engine replica that runs."""
    from ray._private.state import actors

    name = replica_id.rsplit("#", maxsplit=1)[-1]
    (pid,) = [a["Pid"] for a in actors().values() if a["State"] == "ALIVE" and str(a["Name"]).endswith(name)]
    return int(pid)


async def all_ready(session: aiohttp.ClientSession, replicas: int) -> bool:
    """Whether so many replicas report as ready."""
    known = (await h.control_state(session)).get("replicas", [])
    return sum(1 for r in known if r["state"] == "ready" and r["fresh"]) == replicas


async def killed_stream(wire: Wire, n: int, calm: Reply) -> Reply:
    """Stream ``n`` again, alone; the replica that writes it is killed half way between its first and last byte."""
    first_ms = calm.ttft_ms or 0.0
    reply = Reply()
    task = asyncio.create_task(wire.post(CHAT, vllm_body(n), reply=reply))

    async def begun() -> bool:
        return reply.ttft_ms is not None

    await h.wait_for(begun, 60, 0.01)
    await asyncio.sleep((calm.e2e_ms - first_ms) / 2e3)
    os.kill(await asyncio.to_thread(process_of, reply.headers["x-tidegate-replica"]), signal.SIGKILL)
    return await task


async def vllm_run(streams: int, kills: int) -> tuple[list[list[Any]], Counts]:
    """Alone and undisturbed, alone and killed, then in batches."""
    wire, stormy, batched = Wire(), [], []
    async with h.client_session() as session:
        await h.wait_for(lambda: all_ready(session, 2), 300)
        calm = [await wire.post(CHAT, vllm_body(n)) for n in range(streams)]
        again = [await wire.post(CHAT, vllm_body(n)) for n in range(streams)]
        rows = [compare(calm, again).row("undisturbed, alone, twice")]
        for n in range(0, streams, 4):
            batched += await asyncio.gather(*(wire.post(CHAT, vllm_body(m)) for m in range(n, min(n + 4, streams))))
        rows.append(compare(calm, batched).row("undisturbed, four at once"))
        for n in range(kills):
            stormy.append(await killed_stream(wire, n, calm[n]))
            print(f"stream {n}: its replica was killed; {seen(stormy[-1]).kind}", flush=True)
            await asyncio.sleep(8)  # the dead one's last report is old
            await h.wait_for(lambda: all_ready(session, 2), 300)
    killed = compare(calm[:kills], stormy)
    rows.append(killed.row("its replica killed, alone"))
    wire.close()
    return rows, killed


def vllm(options: argparse.Namespace) -> int:
    """Two real replicas."""
    h.deploy(h.default_args(scaling={"replicas_min": 2, "replicas_max": 2}))
    time.sleep(5)
    rows, killed = asyncio.run(vllm_run(options.streams, options.kills))
    return told(rows, killed.streams, killed.seamless, killed.failed, killed.different)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("emulated", "vllm"), default="emulated")
    parser.add_argument("--seconds", type=float, default=40, help="of load in each run (emulated)")
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--streams", type=int, default=16, help="prompts (vllm)")
    given = parser.parse_args()
    with h.ray_serve():
        status = emulated(given) if given.engine == "emulated" else vllm(given)
    sys.exit(status)
