"""Every decision of a live run is explained, and its figures are those of the metrics at that time.

A fleet of emulated engines serves a mixed load that changes every 20 seconds (short chats, long prompts, one prefix for
all, a burst, a slow replica, a lull). Several times a second ``/control/state`` and the controller's metrics are read;
each sample carries the tick it shows. At the end each decision is compared with the sample of its own tick (on a
machine too busy to take one: it must lie between those of the ticks around it): active conditions, the values it set in
the plan, and every figure of its ``inputs`` that state or metrics show as well (:data:`STATE`, :data:`REPLICA`,
:data:`METRICS`). Figures of a window that a sample cannot show are bounded instead (:data:`BOUNDS`). And ``explain``
must tell each decision: change, reason, every figure.

    python -m tests.bench.explained [--seconds 600] [--port 8000]

Exit code 1 on any mismatch, on a decision without a sample of its tick, or where nothing was decided.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import aiohttp
from ray.exceptions import RayError
from typer.testing import CliRunner

from tests.bench import harness as h
from tests.bench.fleet import Fleet, metric, start, stop

Entry: TypeAlias = Mapping[str, Any]
Row: TypeAlias = tuple[str, str, str]
"""Decision, what does not match, the two values."""

SAMPLE_S = 0.25
"""Time between two samples: each tick of a second is in several."""
PHASE_S = 20.0
REPLICAS = 3
MODEL = "smollm2-135m-instruct"
EMULATED = {
    "step": {"a_ms": 20, "b_ms": 0.3, "c_ms": 0.05, "d_ms": 0.05},
    "running_seqs_max": 12,
    "kv_blocks": 2_048,
    "context_tokens_max": 8_192,
}
SECTIONS: dict[str, Any] = {
    "scaling": {"replicas_min": REPLICAS, "replicas_max": REPLICAS + 2, "down_window_s": 30.0},
    "objectives": {"ttft_ms": 800, "itl_ms": 60},
    "prices": {"replica_usd_per_hour": 2.0},
}
DIGITS = 1e-3
"""Relative difference that rounding may make."""

STATE: Mapping[str, Callable[[Entry], Any]] = {
    "replicas_unknown": lambda s: s["unknown_replicas"],
    "served_prefill_tps": lambda s: s["work"]["prefill_tps"],
    "served_decode_tps": lambda s: s["work"]["decode_tps"],
    "busy_share": lambda s: s["work"]["busy_share"],
    "queue": lambda s: s["work"]["waiting"] + s["traffic"]["queued"],
    "queued": lambda s: s["traffic"]["queued"],
    "inflight": lambda s: s["traffic"]["inflight"],
    "itl_objective_ms": lambda s: s["objectives"]["itl_ms"],
}
"""Inputs that ``/control/state`` shows of the fleet, as they are."""

REPLICA: Mapping[str, Callable[[Entry], Any]] = {
    "kv_tokens_max": lambda r: r["kv_tokens_max"],
    "step_a_ms": lambda r: r["step_model"]["a_ms"],
    "step_b_ms": lambda r: r["step_model"]["b_ms"],
    "step_c_ms": lambda r: r["step_model"]["c_ms"],
    "step_d_ms": lambda r: r["step_model"]["d_ms"],
    "step_samples": lambda r: r["step_model"]["samples"],
}
"""Inputs that it shows of the replica that is the target."""

METRICS: Mapping[str, Callable[[str, str], float]] = {
    "replicas_running": lambda page, _: metric(page, "tidegate_replicas", 'state="running"'),
    "step_a_ms": lambda page, r: _coefficient(page, r, "base"),
    "step_b_ms": lambda page, r: _coefficient(page, r, "sequence"),
    "step_c_ms": lambda page, r: _coefficient(page, r, "kv_kilotoken"),
    "step_d_ms": lambda page, r: _coefficient(page, r, "prefill_token"),
}
"""Inputs that the controller's metrics show."""

BOUNDS: Mapping[str, Callable[[Entry], tuple[float, float]]] = {
    "running": lambda r: (r["running"], r["running_seqs_hard"]),
    "kv_tokens": lambda r: (0, r["kv_tokens_max"]),
}
"""Highest of a window of reports, of which the sample shows the last: least and most that it can be."""


@dataclass
class Samples:
    """What was read while the load ran, by epoch and tick."""

    states: dict[tuple[str, int], Entry] = field(default_factory=dict)
    pages: dict[tuple[str, int], str] = field(default_factory=dict)
    entries: dict[tuple[str, int], Entry] = field(default_factory=dict)
    """The ledger, by epoch and number: as the run ended, or as long as the ring held them."""

    def at(self, epoch: str, tick: int) -> tuple[Entry, str] | None:
        """State and page of one tick."""
        state, page = self.states.get((epoch, tick)), self.pages.get((epoch, tick))
        return None if state is None or page is None else (state, page)


@dataclass
class Outcome:
    """What the comparison found."""

    compared: Counter[str] = field(default_factory=Counter)
    """Figures compared, by lever."""
    wrong: list[Row] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    """Decisions of whose tick, or of a tick beside it, there is no sample."""
    between: int = 0
    """Decisions compared with the ticks around theirs."""
    untold: list[str] = field(default_factory=list)
    """Decisions that ``explain`` does not tell in full."""


# --- sampling ---------------------------------------------------------------------------------------------------------


async def sample(session: aiohttp.ClientSession, url: str, samples: Samples) -> None:
    """One look at state, metrics and ledger; a controller that is away is looked at the next time."""
    from deployments.controller_actor import ACTOR_NAME, OWNER_DEPLOYMENT
    from deployments.serve_internals import find_controller_actor
    from tests.bench.fleet import APP

    state = await h.control_state(session, url)
    if state.get("plan"):
        samples.states.setdefault((state["epoch"], state["tick"]), state)
        actor = await asyncio.to_thread(find_controller_actor, APP, OWNER_DEPLOYMENT, ACTOR_NAME)
        if actor is None:
            return
        page = str(await actor.metrics.remote())
        samples.pages.setdefault((state["epoch"], int(metric(page, "tidegate_control_plan_seq"))), page)
    async with session.get(f"{url}/control/decisions?limit=1000") as answer:
        if answer.status == 200:
            samples.entries |= {(entry["epoch"], entry["seq"]): entry for entry in await answer.json()}


async def watch(url: str, samples: Samples, over: asyncio.Event) -> None:
    """Sample until ``over``."""
    async with h.client_session() as session:
        while not over.is_set():
            due = time.monotonic() + SAMPLE_S
            with suppress(aiohttp.ClientError, TimeoutError, RayError):
                await sample(session, url, samples)
            await asyncio.sleep(max(0.0, due - time.monotonic()))


# --- load -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Phase:
    """One kind of load."""

    name: str
    clients: int
    prompt_words: int
    tokens: int
    shared: bool = False
    """All prompts begin alike."""
    slow_factor: float = 1.0
    """Of the first replica."""


PHASES = (
    Phase("short chats", 12, 30, 40),
    Phase("long prompts", 6, 1_500, 30),
    Phase("burst", 60, 30, 60),
    Phase("one prefix", 16, 600, 30, shared=True),
    Phase("slow replica", 15, 30, 40, slow_factor=5.0),
    Phase("lull", 1, 30, 20),
)


async def clients(url: str, phase: Phase, statuses: Counter[int]) -> None:
    """The phase's clients, one request after the other each, for :data:`PHASE_S`."""
    end = time.monotonic() + PHASE_S

    async def one(session: aiohttp.ClientSession, number: int) -> None:
        turn = 0
        while time.monotonic() < end:
            own = "" if phase.shared else f"client {number} turn {turn} "
            text = own + "river " * phase.prompt_words + f"client {number} turn {turn}"
            result = await h.stream_chat(session, [{"role": "user", "content": text}], phase.tokens, url=url)
            statuses[result.status] += 1
            turn += 1

    async with h.client_session() as session:
        await asyncio.gather(*(one(session, number) for number in range(phase.clients)))


async def run(url: str, fleet: Fleet, seconds: float) -> tuple[Samples, Counter[int]]:
    """The mixed load with the samples beside it."""
    samples, statuses, over = Samples(), Counter[int](), asyncio.Event()
    watching = asyncio.create_task(watch(url, samples, over))
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        phase = PHASES[number % len(PHASES)]
        ill = min(str(c["replica_id"]) for c in await asyncio.to_thread(fleet.counters))
        await asyncio.to_thread(fleet.faults, ill, slow_factor=phase.slow_factor)
        await clients(url, phase, statuses)
        await asyncio.to_thread(fleet.faults, slow_factor=1.0)
        number += 1
    await asyncio.sleep(2 * SAMPLE_S + 1)
    over.set()
    await watching
    return samples, statuses


# --- comparison -------------------------------------------------------------------------------------------------------


def _coefficient(page: str, replica: str, term: str) -> float:
    labels = f'replica="{replica}",term="{term}"'
    return 1_000 * metric(page, "tidegate_replica_step_coefficient_seconds", labels)


def same(one: Any, other: Any) -> bool:
    """Equal, up to rounding."""
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=DIGITS, abs_tol=DIGITS)
    return bool(one == other)


def figures(entry: Entry, state: Entry, page: str) -> Iterator[tuple[str, Any, Any]]:
    """Name, value in the decision, value of the sample, for each figure that a sample shows."""
    replica = next((r for r in state["replicas"] if r["replica_id"] == entry["target"]), None)
    for name, value in entry["inputs"].items():
        if value is None:
            continue
        if name in STATE:
            yield name, value, STATE[name](state)
        if replica is not None and name in REPLICA:
            yield name, value, REPLICA[name](replica)
        if replica is not None and name in BOUNDS:
            low, high = BOUNDS[name](replica)
            yield f"{name} in {low}..{high}", low <= value <= high, True
        if name in METRICS and not (replica is None and name.startswith("step_")):
            yield f"{name} (metric)", value, METRICS[name](page, str(entry["target"]))
    active = sorted(c["name"] for c in state["conditions"] if c["active"])
    yield "conditions", sorted(entry["conditions"]), active
    if entry["acted"] and entry["lever"] != "guard":
        for knob, value in entry["after"].items():
            yield f"plan's {knob}", value, in_plan(state["plan"], knob, str(entry["target"]))


def in_plan(plan: Entry, knob: str, target: str) -> Any:
    """What the plan of that tick says of a knob."""
    knobs = (plan["knobs"] or {}).get(target)
    if knobs is not None and knob in knobs:
        return knobs[knob]
    return plan[knob] if knob in plan else plan["admission"].get(knob)


def compare(samples: Samples) -> Outcome:
    """Each decision beside the sample of its tick; where there is none, between those of the ticks around it."""
    outcome = Outcome()
    for (epoch, seq), entry in sorted(samples.entries.items()):
        name = f"#{seq} {entry['lever']} [{entry['reason']['code']}]"
        own = samples.at(epoch, entry["tick"])
        around = [samples.at(epoch, entry["tick"] + step) for step in (-1, 1)]
        beside = [own] if own else [one for one in around if one]
        if not own and len(beside) < len(around):
            outcome.unseen.append(name)
            continue
        outcome.between += not own
        for (what, decided, seen), *others in zip(*(list(figures(entry, *one)) for one in beside), strict=True):
            outcome.compared[entry["lever"]] += 1
            values = [seen, *(other[2] for other in others)]
            if not fits(decided, values):
                told = f"{decided} / {' .. '.join(map(str, values))}; {entry['before']} -> {entry['after']}"
                outcome.wrong.append((name, what, told))
    return outcome


def fits(decided: Any, seen: list[Any]) -> bool:
    """The value of a sample, or one between those of two."""
    if any(same(decided, value) for value in seen):
        return True
    numbers = [value for value in (decided, *seen) if isinstance(value, int | float)]
    return len(seen) == 2 and len(numbers) == 3 and min(seen) <= decided <= max(seen)


def explain_all(samples: Samples, url: str, outcome: Outcome) -> None:
    """``explain`` of each decision of the last controller's life tells change, reason and every figure."""
    from deployments.cli import cli
    from deployments.explain import number

    runner = CliRunner()
    epoch = list(samples.states)[-1][0]
    for (life, seq), entry in sorted(samples.entries.items()):
        if life != epoch:
            continue
        done = runner.invoke(cli, ["explain", str(seq), "--url", url])
        wanted = [f"#{seq}", entry["reason"]["code"], "What changed", "Predicted", "What happened", *entry["after"]]
        wanted += [f"{name} = {number(value)}" for name, value in entry["inputs"].items()]
        missing = [text for text in wanted if text not in done.output]
        if done.exit_code or missing:
            outcome.untold.append(f"#{seq}: exit {done.exit_code}, missing {missing[:3]}")


# --- report -----------------------------------------------------------------------------------------------------------


def report(samples: Samples, outcome: Outcome, statuses: Counter[int]) -> bool:
    """Print the tables; whether all bars hold."""
    by_lever = Counter(str(entry["lever"]) for entry in samples.entries.values())
    rows = [[lever, count, outcome.compared[lever]] for lever, count in sorted(by_lever.items())]
    h.table("Decisions and figures compared with the sample of their tick", ["lever", "decisions", "figures"], rows)
    judged = Counter(str(entry["verdict"]) for entry in samples.entries.values())
    print(f"verdicts: {dict(judged)}; ticks sampled: {len(samples.states)}; answers: {dict(statuses)}")
    for row in outcome.wrong[:20]:
        print("  differs:", *row)
    for text in (*outcome.unseen[:10], *outcome.untold[:10]):
        print("  ", text)
    total = len(samples.entries)
    seen = total - len(outcome.unseen)
    return all(
        [
            h.verdict(total > 0, f"{total} decisions were made"),
            h.verdict(
                not outcome.unseen, f"{seen} of {total} have a sample, {outcome.between} of the ticks around theirs"
            ),
            h.verdict(not outcome.wrong, f"{len(outcome.wrong)} figures of {sum(outcome.compared.values())} differ"),
            h.verdict(not outcome.untold, f"{len(outcome.untold)} decisions are not told in full by explain"),
        ]
    )


def main() -> int:
    """Run and report; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--port", type=int, default=8_000)
    options = parser.parse_args()
    url = f"http://127.0.0.1:{options.port}"
    with h.ray_serve(haproxy=False, port=options.port):
        fleet = start(REPLICAS, EMULATED, **SECTIONS)
        samples, statuses = asyncio.run(run(url, fleet, options.seconds))
        outcome = compare(samples)
        explain_all(samples, url, outcome)
        stop()
    return 0 if report(samples, outcome, statuses) else 1


if __name__ == "__main__":
    sys.exit(main())
