"""The same 60 s of traffic on a live fleet and in the simulator: latencies within 15 %, decisions within one tick.

The live side is everything real but the engine: clients, HAProxy, gateway, Serve, controller, replicas that come and
go; engines are emulated, so that their law is known. It records; the recorded arrivals are simulated with the recorded
settings and the emulated engine's own law. Two figures are measured: how long a replica takes to start, and what a
request costs outside steps (from requests that come one by one before the load). Both sides' times are the gateway's.
Beginnings that prompts share end where a text block of the gateway ends, so that the recording
knows exactly what was shared.

``--engine vllm`` does the same with one real vLLM replica on the CPU: its law is fitted to its own steps in a warm-up
run, with other prompts, and the errors of the run after it are printed without a bar. Beside them those with the law of
the run's own steps: what lies between the two is the machine, which was slower or faster than in the warm-up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from autoscaling.simulator.fit import StepSample, batch_knots, fit_steps
from autoscaling.simulator.records import Records, RunResult
from autoscaling.simulator.replay import Replayed, Writer, replay_decisions
from autoscaling.simulator.replay_traffic import profile_of, recorded_run, start_times_ms
from autoscaling.simulator.report import Summary, summarise
from autoscaling.simulator.spec import EngineProfile, NetworkSpec, StepLaw
from autoscaling.simulator.world import run
from deployments.recording import code_digest
from deployments.settings import EmulatedSettings
from deployments.simulation.recordings import find_writers, read_writer
from deployments.simulation.replay_commands import Move, RecordedFleet, load_recording, moves_of
from tests.bench import harness as h

APP = "sim-live"
STEPS = "steps.json"
"""Beside a recording of a real engine: its steps in the warm-up and in the run."""
VLLM_CPU_BLOCK_TOKENS = 128
"""vLLM's own choice on CPUs."""
BAR_SHARE = 0.15
LONE = 12
"""Requests that come one by one before the load."""
SEEDS = 5
"""Simulations of each recording: phases of reports and ticks are not recorded, medians over them are compared."""
AFTER_S = 25.0
"""The fleet is watched for this long after the load."""


@dataclass(frozen=True)
class Load:
    """Seconds and requests per second of each phase, and what the requests are."""

    phases: tuple[tuple[float, float], ...]
    tokens: int
    beginning_bytes: int
    endings_words: tuple[int, int]

    def arrivals(self, seed: str) -> list[tuple[float, str]]:
        """Times in s and prompts: 12 beginnings that are shared, endings that are not."""
        rng, begin, made = random.Random(seed), 0.0, []
        size = self.beginning_bytes
        beginnings = [" ".join(rng.choices(WORDS, k=size // 3))[:size] for _ in range(12)]
        for seconds, rate in self.phases:
            at = begin
            while (at := at + rng.expovariate(rate)) < begin + seconds:
                ending = " ".join(rng.choices(WORDS, k=rng.randrange(*self.endings_words)))
                made.append((at, rng.choice(beginnings) + ending))
            begin += seconds
        return made


WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "life", "child", "world", "school", "state", "family",
    "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system", "question", "work",
    "number", "night", "point", "home", "water", "room", "mother", "area", "money", "story", "fact", "month", "lot",
    "right", "study", "book", "eye", "job", "word", "business", "issue", "side", "kind", "head", "house", "service",
)  # fmt: skip
"""One token each for most tokenizers."""
ROLE_BYTES = len("\x1euser\x1f")
"""What the gateway puts before a user's message when it cuts a prompt into blocks."""
EMULATED = {
    "step": {"a_ms": 12, "b_ms": 0.6, "c_ms": 0.3, "d_ms": 0.08},
    "kv_blocks": 4_096,
    "running_seqs_max": 8,
    "step_tokens_max": 512,
    "context_tokens_max": 4_096,
    "start_ms": 4_000,
}
EMULATED_SECTIONS: dict[str, dict[str, Any]] = {
    "scaling": {"replicas_min": 1, "replicas_max": 2, "down_window_s": 15},
    "objectives": {"ttft_ms": 1_000, "itl_ms": 100},
}
EMULATED_LOAD = Load(((15.0, 1.5), (20.0, 12.0), (25.0, 1.5)), 60, 5 * 256 - ROLE_BYTES, (30, 150))
"""Needs one replica, then more than two, then one again: clear of the shares at which the number would change, and with
a queue that lasts, so that half of the requests are not at the edge of it."""
VLLM_LOAD = Load(((20.0, 0.25), (20.0, 0.5), (20.0, 0.25)), 32, 256 - ROLE_BYTES, (5, 40))
"""What one core carries: about 100 prompt tokens, half of them shared, and 32 output tokens a request."""


# --- live -------------------------------------------------------------------------------------------------------------


async def play(session: aiohttp.ClientSession, load: Sequence[tuple[float, str]], tokens: int) -> list[h.StreamResult]:
    """Send each prompt at its time, whatever became of the others."""
    start = time.perf_counter()

    async def one(at: float, prompt: str) -> h.StreamResult:
        await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
        return await h.stream_chat(session, [{"role": "user", "content": prompt}], tokens)

    return await asyncio.gather(*(one(at, prompt) for at, prompt in load))


async def lone(session: aiohttp.ClientSession) -> None:
    """Requests that meet an idle engine and share nothing."""
    for n in range(LONE):
        await h.stream_chat(session, [{"role": "user", "content": f"{n} lone " + " ".join(WORDS[n:])}], 3)
        await asyncio.sleep(0.3)


async def emulated_load(seed: int) -> list[h.StreamResult]:
    """One run's traffic."""
    async with h.client_session() as session:
        await lone(session)
        await asyncio.sleep(13)  # what went before is in no window any more
        results = await play(session, EMULATED_LOAD.arrivals(f"{seed}/sim_live"), EMULATED_LOAD.tokens)
        await asyncio.sleep(AFTER_S)
        return results


async def replicas_report() -> bool:
    """Whether the controller has heard of a replica."""
    async with h.client_session() as session:
        return bool((await h.control_state(session)).get("replicas"))


def live_emulated(folder: Path, seed: int) -> None:
    """One application, one load, one recording."""
    from ray import serve

    args = h.emulated_args(model={"emulated": EMULATED}, **EMULATED_SECTIONS)
    h.deploy({**args, "recording": {"folder": str(folder)}}, name=APP)
    try:
        asyncio.run(h.wait_for(replicas_report, 120))
        told(asyncio.run(emulated_load(seed)), f"run {seed + 1}")
    finally:
        serve.delete(APP)


def live_vllm(folder: Path, seed: int) -> None:
    """Warm-up and run on one real replica; the engine's steps are left beside the recording."""
    from ray import serve

    from deployments.engine import build_engine_deployment
    from deployments.gateway import build_gateway_deployment
    from deployments.settings import Settings
    from tests.engine.probe import ProbedEngine

    args = h.default_args(scaling={"replicas_min": 1, "replicas_max": 1})
    settings = Settings.load({**args, "recording": {"folder": str(folder)}})
    app = build_gateway_deployment(settings, build_engine_deployment(settings, ProbedEngine))
    serve.run(app, name=APP, route_prefix="/", blocking=False)
    engine = serve.get_deployment_handle("Engine", APP)
    steps: dict[int, StepSample] = {}

    async def watch() -> None:
        after = 0
        while True:
            for step in await engine.steps.remote(after):
                after = max(after, step.seq)
                if step.running and step.seq > 8:  # the first ones pay for lazy set-up
                    ms = step.duration_us / 1e3
                    steps[step.seq] = StepSample(step.running, step.kv_tokens, step.prefill_tokens, ms)
            await asyncio.sleep(0.5)

    async def traffic() -> None:
        async with h.client_session() as session:
            watcher = asyncio.create_task(watch())
            await lone(session)
            await play(session, VLLM_LOAD.arrivals(f"{seed}/warm-up"), VLLM_LOAD.tokens)
            await asyncio.sleep(2)
            await asyncio.sleep(13)
            ended_s, warm_up = time.time(), len(steps)
            told(await play(session, VLLM_LOAD.arrivals(f"{seed}/run"), VLLM_LOAD.tokens), f"run {seed + 1}")
            await asyncio.sleep(2)
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
            both = [asdict(step) for step in steps.values()]
            note = {"ended_s": ended_s, "warm_up": both[:warm_up], "run": both[warm_up:]}
            (folder / STEPS).write_text(json.dumps(note))

    try:
        asyncio.run(h.wait_for(replicas_report, 300))
        asyncio.run(traffic())
    finally:
        serve.delete(APP)


def told(results: Sequence[h.StreamResult], what: str) -> None:
    """Say how many requests there were and how many failed."""
    failed = [r for r in results if r.failed]
    print(f"{what}: {len(results)} requests, {len(failed)} failed {[r.error[:120] for r in failed[:2]]}", flush=True)


# --- simulated --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """One run on both sides. ``idle``: the lone requests before the load."""

    live: Summary
    simulated: list[Summary]
    idle_live: Summary
    idle_simulated: list[Summary]
    live_moves: list[Move]
    simulated_moves: list[list[Move]]
    ticks: int
    ticks_differing: int


def warn(text: str) -> None:
    """Show a warning of a recording."""
    print("warning:", text, flush=True)


def emulated_profile(fleet: RecordedFleet) -> EngineProfile:
    """The emulated engine as it is set up; its start and what a request costs outside steps are measured."""
    settings = EmulatedSettings(**EMULATED)  # type: ignore[arg-type]
    step, starts = settings.step, start_times_ms(fleet.history)
    law = StepLaw(step.a_ms, step.b_ms, step.c_ms, step.d_ms)
    return EngineProfile(
        name="emulated",
        gpu="none",
        gpus=1,
        model="emulated",
        law=law,
        kv_tokens=settings.kv_blocks * settings.block_tokens,
        context_tokens_max=settings.context_tokens_max,
        cold_start_ms=h.median(starts) if starts else settings.start_ms,
        usd_per_gpu_hour=1.0,
        source="its own settings",
        block_tokens=settings.block_tokens,
        running_seqs_max=settings.running_seqs_max,
        step_tokens_max=settings.step_tokens_max,
        reserve_full_prompt=False,
        request_overhead_ms=outside_steps_ms(fleet, law),
    )


def outside_steps_ms(fleet: RecordedFleet, law: StepLaw) -> float:
    """Median time to first byte of the lone requests beyond their one step and the gateway's own share."""
    network = NetworkSpec()
    around_ms = network.gateway_ms + 2 * network.hop_ms
    lines = [a.line for a in fleet.traffic.arrivals[1:LONE]]
    spent = [
        line.ttft_ms - around_ms - law.step_ms(1, 0, line.prompt_tokens or 0)
        for line in lines
        if line.ttft_ms is not None
    ]
    return max(0.0, h.median(spent))


def replayed(lives: Sequence[Writer]) -> tuple[int, int]:
    """Ticks of all lives that this very code decided, and those whose replay differs."""
    own = [w for w in lives if w.header.code == code_digest()]
    items = [i for w in own for i in replay_decisions(read_writer(w, warn)) if isinstance(i, Replayed)]
    return len(items), sum(not i.equal for i in items)


def part(result: RunResult, first: int, last: int) -> RunResult:
    """The rows of requests ``first`` to ``last``."""
    kept = Records()
    for row in result.records:
        if first <= row.index < last:
            kept.add(row)
    return replace(result, records=kept)


def compare(fleet: RecordedFleet, lives: Sequence[Writer], profile: EngineProfile, first: int) -> Pair:
    """Simulate what was recorded and judge the requests from number ``first`` on."""
    recorded = recorded_run(fleet.traffic, fleet.history, profile)
    scenario = fleet.scenario("simulated", profile)
    simulated = [run(scenario.with_seed(seed)) for seed in range(SEEDS)]
    objectives, end = fleet.header.config.objectives, len(fleet.traffic.arrivals)
    ticks, differing = replayed(lives)
    return Pair(
        summarise(part(recorded, first, end), objectives),
        [summarise(part(side, first, end), objectives) for side in simulated],
        summarise(part(recorded, 0, LONE), objectives),
        [summarise(part(side, 0, LONE), objectives) for side in simulated],
        _moves(recorded, fleet),
        [_moves(side, fleet) for side in simulated],
        ticks,
        differing,
    )


def _moves(result: RunResult, fleet: RecordedFleet) -> list[Move]:
    return moves_of(result, fleet.header.config, fleet.history, fleet.traffic)


def opened(folder: Path, seed: int) -> tuple[RecordedFleet, list[Writer]]:
    """The recording in ``folder`` and its controllers' lives."""
    writers = find_writers([folder], warn)
    return load_recording(writers, seed, warn), [w for w in writers if w.header.source == "controller"]


def vllm_profile(fleet: RecordedFleet, steps: Sequence[StepSample], what: str) -> EngineProfile:
    """The law of ``steps``; what a request costs outside steps from the lone requests of the warm-up."""
    found = fit_steps(steps, batch_knots(steps))
    spent = outside_steps_ms(fleet, found.law)
    error = found.held_out.mean_share
    print(f"{what}: {len(steps)} steps, mean error held out {error:.1%}; {spent:.0f} ms outside steps", flush=True)
    return replace(
        profile_of(fleet.history, fleet.header.model),
        law=found.law,
        request_overhead_ms=spent,
        block_tokens=VLLM_CPU_BLOCK_TOKENS,
    )


# --- the verdict ------------------------------------------------------------------------------------------------------

FIGURES: dict[str, Callable[[Summary], float]] = {
    "TTFT p50 (ms)": lambda s: s.ttft.p50_ms,
    "TTFT p95 (ms)": lambda s: s.ttft.p95_ms,
    "TPOT p50 (ms)": lambda s: s.tpot.p50_ms,
    "TPOT p95 (ms)": lambda s: s.tpot.p95_ms,
    "E2E p50 (ms)": lambda s: s.e2e.p50_ms,
    "E2E p95 (ms)": lambda s: s.e2e.p95_ms,
    "cache hits, whole recording (share)": lambda s: s.hit_share,
    "replica-seconds, whole recording": lambda s: s.gpu_hours * 3_600,
}


def report(title: str, pairs: Sequence[Pair]) -> dict[str, float]:
    """Print medians over the runs; return the error of each figure."""
    rows: list[list[Any]] = []
    errors: dict[str, float] = {}
    figures: dict[str, list[tuple[float, float]]] = {
        name: [(f(p.live), h.median([f(s) for s in p.simulated])) for p in pairs] for name, f in FIGURES.items()
    }
    figures["TTFT p50 of lone requests (ms)"] = [
        (p.idle_live.ttft.p50_ms, h.median([s.ttft.p50_ms for s in p.idle_simulated])) for p in pairs
    ]
    for name, values in figures.items():
        live, simulated = h.median([a for a, _ in values]), h.median([b for _, b in values])
        errors[name] = simulated / live - 1 if live else float("nan")
        each = ", ".join(f"{b / a - 1:+.1%}" for a, b in values if a)
        rows.append([name, live, simulated, f"{errors[name]:+.1%}", each])
    h.table(f"{title}, median of {len(pairs)} runs", ["figure", "live", "simulated", "error", "of each run"], rows)
    return errors


def decisions_agree(pairs: Sequence[Pair], tick_s: float) -> bool:
    """Print the decisions of each run; whether they are the same and the median of each time within one tick."""
    good = True
    for number, pair in enumerate(pairs, 1):
        live, simulated = pair.live_moves, pair.simulated_moves
        steps = [(m.before, m.after) for m in live]
        alike = [moves for moves in simulated if [(m.before, m.after) for m in moves] == steps]
        print(f"run {number}, live: " + (", ".join(map(str, live)) or "no decision on replicas"))
        print(f"run {number}, simulated: {len(alike)} of {SEEDS} seeds decide the same", end="")
        if 2 * len(alike) <= SEEDS:
            good = False
            print("; the first: " + ", ".join(map(str, simulated[0])))
            continue
        times = [sorted(moves[i].at_s for moves in alike) for i in range(len(steps))]
        apart = [h.median(t) - m.at_s for t, m in zip(times, live, strict=True)]
        print(", at " + ", ".join(f"{h.median(t):.0f} ({t[0]:.0f}..{t[-1]:.0f}) s" for t in times), end="")
        print(f"; apart {', '.join(f'{a:+.1f}' for a in apart)} s")
        good &= all(abs(a) <= tick_s for a in apart)
    return good


def judge_emulated(root: Path, runs: int) -> bool:
    """Print and judge the recordings of the emulated fleet."""
    pairs = []
    for n in range(runs):
        fleet, lives = opened(root / f"emulated-{n}", n)
        profile = emulated_profile(fleet)
        pairs.append(compare(fleet, lives, profile, LONE))
        starts = ", ".join(f"{t / 1e3:.1f}" for t in start_times_ms(fleet.history))
        print(
            f"run {n + 1}: replicas start in {starts} s; {profile.request_overhead_ms:.1f} ms outside steps", flush=True
        )
    errors = report("Emulated fleet, live and simulated", pairs)
    ok = decisions_agree(pairs, 1.0)
    ok = h.verdict(ok, "decisions on replicas are the same, each within one tick of the median simulation")
    differing = sum(p.ticks_differing for p in pairs)
    ticks = sum(p.ticks for p in pairs)
    ok &= h.verdict(
        ticks > 0 and not differing, f"{ticks} ticks of this very code replayed, {differing} differ (bar 0)"
    )
    for name in ("TTFT p50 (ms)", "TTFT p95 (ms)"):
        ok &= h.verdict(abs(errors[name]) <= BAR_SHARE, f"{name}: error {errors[name]:+.1%} (bar {BAR_SHARE:.0%})")
    return ok


def main(options: argparse.Namespace) -> int:
    """Run, compare, judge."""
    logging.getLogger().setLevel(logging.ERROR)
    # At 15, Ray's own default, a fleet hardly runs beside anything else on the machine.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (Ray's own name)
    root, runs = Path(options.keep or tempfile.mkdtemp(prefix="sim-live-")), range(options.runs)
    if options.engine == "emulated":
        if not options.again:
            with h.ray_serve():
                for n in runs:
                    live_emulated(root / f"emulated-{n}", n)
        return 0 if judge_emulated(root, options.runs) else 1
    if not options.again:
        with h.ray_serve():
            for n in runs:
                live_vllm(root / f"vllm-{n}", n)
    for law, title in (("warm_up", "law of the warm-up's steps"), ("run", "law of the run's own steps")):
        pairs = []
        for n in runs:
            folder = root / f"vllm-{n}"
            fleet, lives = opened(folder, n)
            note = json.loads((folder / STEPS).read_text())
            steps = [StepSample(**step) for step in note[law]]
            first = sum(a.unix_ns < note["ended_s"] * 1e9 for a in fleet.traffic.arrivals)
            pairs.append(compare(fleet, lives, vllm_profile(fleet, steps, title), first))
        report(f"One real vLLM replica on the CPU, live and simulated with the {title}", pairs)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("emulated", "vllm"), default="emulated")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--keep", help="folder for the recordings")
    parser.add_argument("--again", action="store_true", help="simulate the recordings in --keep, run nothing live")
    sys.exit(main(parser.parse_args()))
