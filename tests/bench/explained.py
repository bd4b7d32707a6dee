"""Every decision of a live run is explained, and its figures are those of state and metrics at its tick.

A fleet of emulated engines serves a mixed load that changes every 20 seconds (short chats, long prompts, one prefix for
all, a burst, a slow replica, a lull). Several times a second the ledger is read, and of every tick that decided
something ``/control/state?tick=``, which is kept for some seconds: so each decision stands beside the state of its own
tick, however busy the machine is. The controller's metrics show the last tick alone; they are read as often, and count
for the decisions of the ticks that they were read at. At the end each decision is compared: active conditions, the
values it set in the plan, and every figure of its ``inputs`` that state or metrics show as well (:data:`STATE`,
:data:`REPLICA`, :data:`METRICS`). Figures of a window of which the state shows the last report are bounded instead
(:data:`BOUNDS`). And ``explain`` must tell each decision: change, reason, every figure.

    python -m tests.bench.explained [--seconds 600] [--port 8000]

Exit code 1 on any mismatch, on a decision without the state of its tick, or where nothing was decided or no metric
could be compared.
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
"""Time between two samples: most ticks of a second are in several, and none is missed whose state is kept."""
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
"""Highest of a window of reports, of which the state shows the last: least and most that it can be."""


@dataclass
class Samples:
    """What was read while the load ran, by epoch and tick."""

    states: dict[tuple[str, int], Entry] = field(default_factory=dict)
    """Of ticks that decided something."""
    lost: set[tuple[str, int]] = field(default_factory=set)
    """Such ticks whose state was no longer kept."""
    pages: dict[tuple[str, int], str] = field(default_factory=dict)
    entries: dict[tuple[str, int], Entry] = field(default_factory=dict)
    """The ledger, by epoch and number: as the run ended, or as long as the ring held them."""

    def missing(self) -> set[tuple[str, int]]:
        """Ticks that decided something and whose state can still be read."""
        decided = {(entry["epoch"], entry["tick"]) for entry in self.entries.values()}
        return decided - self.states.keys() - self.lost


@dataclass
class Outcome:
    """What the comparison found."""

    compared: Counter[str] = field(default_factory=Counter)
    """Figures compared, by lever."""
    metrics: int = 0
    """Those of them that were compared with the metrics."""
    wrong: list[Row] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    """Decisions of whose tick there is no state."""
    untold: list[str] = field(default_factory=list)
    """Decisions that ``explain`` does not tell in full."""


# --- sampling ---------------------------------------------------------------------------------------------------------


async def sample(session: aiohttp.ClientSession, url: str, samples: Samples) -> None:
    """One look at metrics, ledger and the states behind it; a controller that is away is looked at the next time."""
    from deployments.controller_actor import ACTOR_NAME, OWNER_DEPLOYMENT
    from deployments.serve_internals import find_controller_actor
    from tests.bench.fleet import APP

    actor = await asyncio.to_thread(find_controller_actor, APP, OWNER_DEPLOYMENT, ACTOR_NAME)
    if actor is not None:
        epoch, page = str(await actor.ping.remote()), str(await actor.metrics.remote())
        samples.pages.setdefault((epoch, int(metric(page, "tidegate_control_plan_seq"))), page)
    async with session.get(f"{url}/control/decisions?limit=1000") as answer:
        if answer.status == 200:
            samples.entries |= {(entry["epoch"], entry["seq"]): entry for entry in await answer.json()}
    for epoch, tick in sorted(samples.missing()):
        async with session.get(f"{url}/control/state?tick={tick}") as answer:
            state = await answer.json() if answer.status == 200 else {}
        if state.get("epoch") == epoch:
            samples.states[epoch, tick] = state
        elif answer.status in (200, 404):
            samples.lost.add((epoch, tick))


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


def figures(entry: Entry, state: Entry) -> Iterator[tuple[str, Any, Any]]:
    """Name, value in the decision, value of the state, for each figure that the state shows."""
    replica = _target(entry, state)
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
    active = sorted(c["name"] for c in state["conditions"] if c["active"])
    yield "conditions", sorted(entry["conditions"]), active
    if entry["acted"] and entry["lever"] != "guard":
        for knob, value in entry["after"].items():
            yield f"plan's {knob}", value, in_plan(state["plan"], knob, str(entry["target"]))


def measured(entry: Entry, state: Entry, page: str) -> Iterator[tuple[str, Any, Any]]:
    """The same for the figures that the metrics show."""
    for name, value in entry["inputs"].items():
        of_replica = name.startswith("step_")
        if value is not None and name in METRICS and (not of_replica or _target(entry, state) is not None):
            yield f"{name} (metric)", value, METRICS[name](page, str(entry["target"]))


def _target(entry: Entry, state: Entry) -> Entry | None:
    """The replica that the decision is about, if it is about one."""
    return next((r for r in state["replicas"] if r["replica_id"] == entry["target"]), None)


def in_plan(plan: Entry, knob: str, target: str) -> Any:
    """What the plan of that tick says of a knob; who is retired is a list there."""
    if knob == "retired":
        return int(target in plan["retired"])
    knobs = (plan["knobs"] or {}).get(target)
    if knobs is not None and knob in knobs:
        return knobs[knob]
    return plan[knob] if knob in plan else plan["admission"].get(knob)


def compare(samples: Samples) -> Outcome:
    """Each decision beside the state of its tick, and beside the metrics where they were read at that tick."""
    outcome = Outcome()
    for (epoch, seq), entry in sorted(samples.entries.items()):
        name = f"#{seq} {entry['lever']} [{entry['reason']['code']}]"
        state = samples.states.get((epoch, entry["tick"]))
        if state is None:
            outcome.unseen.append(name)
            continue
        page = samples.pages.get((epoch, entry["tick"]))
        in_metrics = [] if page is None else list(measured(entry, state, page))
        outcome.metrics += len(in_metrics)
        for what, decided, seen in (*figures(entry, state), *in_metrics):
            outcome.compared[entry["lever"]] += 1
            if not same(decided, seen):
                told = f"{decided} / {seen}; {entry['before']} -> {entry['after']}"
                outcome.wrong.append((name, what, told))
    return outcome


def explain_all(samples: Samples, url: str, outcome: Outcome) -> None:
    """``explain`` of each decision of the last controller's life tells change, reason and every figure."""
    from deployments.cli import cli
    from deployments.explain import number

    runner = CliRunner()
    epoch = list(samples.entries)[-1][0]
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
    h.table(
        "Decisions and figures compared with state and metrics of their tick", ["lever", "decisions", "figures"], rows
    )
    judged = Counter(str(entry["verdict"]) for entry in samples.entries.values())
    both = len(samples.states.keys() & samples.pages.keys())
    print(f"verdicts: {dict(judged)}; answers: {dict(statuses)}")
    print(f"ticks that decided: {len(samples.states)}, of {both} of them the metrics were read")
    for row in outcome.wrong[:20]:
        print("  differs:", *row)
    for text in (*outcome.unseen[:10], *outcome.untold[:10]):
        print("  ", text)
    total = len(samples.entries)
    seen = total - len(outcome.unseen)
    return all(
        [
            h.verdict(total > 0, f"{total} decisions were made"),
            h.verdict(not outcome.unseen, f"{seen} of {total} stand beside the state of their own tick"),
            h.verdict(not outcome.wrong, f"{len(outcome.wrong)} figures of {sum(outcome.compared.values())} differ"),
            h.verdict(outcome.metrics > 0, f"{outcome.metrics} of them were compared with metrics of that tick"),
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
