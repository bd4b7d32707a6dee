"""Replicas that follow a load: GPU-hours beside the fewest that could have done, and beside Ray Serve's policy and HPA.

A week of recorded rates is played :data:`COMPRESS` times as fast, everything with it: a day takes an hour, a start of
eight minutes 20 s, a simulated token stands for :data:`TOKEN` tokens. Every contender has the same engines, gateways,
router and arrivals; baselines run as users run them. Each is tuned first, on the first day and a seed of its own: the
least cautious setting of each ladder that keeps :data:`KEPT` of the requests in time, of these the one with the fewest
GPU-hours. Delays of theirs are tried as they are by default and compressed. Tidegate runs as it comes.

The *clairvoyant* schedule knows the rates of the whole week: per :data:`SLOT_S` the fewest replicas that carry them
(:data:`CARRIED`), begun a start-up time before they are needed, played in the same simulator by a scaler that reads it;
the factor on the rates is tuned likewise.

Then changes of direction: step, ramp, flash crowd, a day, agent storm, each with the transitions it is made of.

Then fleets that may sleep (``tests/sim/idle.py``): loads with faults and with counts that nobody gives back; how long
after the load and the last fault nothing runs, and whether the next request is served.

    python -m tests.bench.elastic [--part weeks|transitions|zero|all] [--loads azure] [--days 7] [--seeds 5]
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from random import Random

from autoscaling.recommend import ReplicaScaler
from autoscaling.simulator.baselines.hpa import HpaScaler, HpaSettings
from autoscaling.simulator.baselines.ray_serve import RayServeScaler, RayServeSettings
from autoscaling.simulator.baselines.tables import as_users_run_it
from autoscaling.simulator.records import RunResult
from autoscaling.simulator.report import summarise
from autoscaling.simulator.spec import (
    EngineProfile,
    Pool,
    ScalerFactory,
    Scenario,
    SimRequest,
    Source,
    SourceFactory,
    StepLaw,
)
from autoscaling.simulator.workload.azure import parse_azure_week
from autoscaling.simulator.workload.generators import from_curve
from autoscaling.simulator.workload.lengths import LogNormal
from autoscaling.simulator.workload.mixture import mixture
from autoscaling.simulator.workload.rates import RateCurve
from autoscaling.simulator.workload.servegen import parse_servegen_rates
from autoscaling.simulator.workload.sessions import Call, Session, sessions
from autoscaling.simulator.workload.trace import Options
from autoscaling.simulator.world import run
from deployments.simulation.files import read_lines
from policies.config import AdmissionConfig, ObjectivesConfig, PolicyConfig, ScalingConfig
from policies.control.scaler import ScaleAdvice
from policies.control.signals import Signals
from policies.types import Reason
from tests.bench.harness import table, verdict
from tests.data import data_path
from tests.sim.idle import WINDOW_S, ZERO_AFTER_S, idle

COMPRESS = 24.0
TOKEN = 8
DAY_S = 86_400.0 / COMPRESS
SLOT_S = 600.0 / COMPRESS
KEPT = 0.99
COST_MAX, SAVED_MIN = 1.15, 0.2
TUNE_SEED = 10
REPLICAS_MAX = 12
RATE_MEAN = 2.0
"""Requests per second of the compressed week."""

PROFILE = EngineProfile(
    name="elastic",
    gpu="none",
    gpus=1,
    model="m",
    law=StepLaw(320.0, 12.0, 1.2, 3.6, jitter_share=0.02),
    kv_tokens=30_000,
    context_tokens_max=8_192,
    cold_start_ms=20_000.0,
    usd_per_gpu_hour=1.0,
    source="made up: tokens of 8, a step of 40 ms a token and a start of eight minutes, compressed",
    running_seqs_max=24,
)
OBJECTIVES = ObjectivesConfig(ttft_ms=8_000.0, itl_ms=1_000.0, quantile=KEPT)
CHAT, CODE = LogNormal(144, 26, 0.8, 0.6, tokens_max=1_000), LogNormal(256, 4, 0.8, 0.8, tokens_max=1_000)
"""Azure's two services: means of the 2023 traces, in tokens of :data:`TOKEN`."""
MIDDLE = LogNormal(200, 20, 0.8, 0.6, tokens_max=1_000)


# --- loads ------------------------------------------------------------------------------------------------------------


def _trace(name: str) -> list[str]:
    path = data_path(f"traces/{name}")
    if path is None:
        raise SystemExit(f"{name} is not there (set TIDEGATE_DATA)")
    return list(read_lines(path))


@cache
def azure() -> tuple[tuple[RateCurve, LogNormal], ...]:
    """Both services of Azure's week of 2024."""
    return tuple(
        (parse_azure_week(_trace(f"azure2024_{name}_week_rpm_digitised.csv"), name), lengths)
        for name, lengths in (("conv", CHAT), ("code", CODE))
    )


@cache
def servegen() -> tuple[tuple[RateCurve, LogNormal], ...]:
    """The first seven days of ServeGen's m-large."""
    curve = parse_servegen_rates(_trace("servegen_language_m-large_rate_600s.csv.gz"), "m-large")
    week = tuple(p for p in curve.points if p[0] <= 7 * 86_400.0)
    return ((RateCurve(week, "m-large"), MIDDLE),)


LOADS: dict[str, Callable[[], tuple[tuple[RateCurve, LogNormal], ...]]] = {"azure": azure, "servegen": servegen}


def _scale(load: str) -> float:
    """Factor that makes the mean rate of the week :data:`RATE_MEAN`."""
    return RATE_MEAN / sum(curve.total / curve.length_s for curve, _ in LOADS[load]())


def source(load: str, days: float) -> SourceFactory:
    """The first ``days`` of a week, compressed."""
    options = Options(scale=_scale(load), duration_s=days * DAY_S, compress=COMPRESS)
    return mixture(*(from_curve(curve, lengths, options) for curve, lengths in LOADS[load]()))


def slots(load: str, days: float) -> list[float]:
    """Mean rate of each slot, requests per second."""
    curves = [curve.with_options(Options(scale=_scale(load), compress=COMPRESS)) for curve, _ in LOADS[load]()]
    steps = [SLOT_S * (i + 0.5) for i in range(math.ceil(days * DAY_S / SLOT_S))]
    return [sum(curve.rate_rps(t) for curve in curves) for t in steps]


# --- one run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """One run."""

    kept: float
    gpu_hours: float
    """To the last arrival, of the uncompressed week."""
    turns: int
    refused: int
    requests: int


def play(
    make: SourceFactory, scaler: ScalerFactory | None, replicas: int, seed: int, own: bool, end_s: float
) -> Outcome:
    """``own``: Tidegate's levers act; baselines run as users run them."""
    config = PolicyConfig(
        objectives=OBJECTIVES,
        admission=AdmissionConfig(inflight_requests_max=100_000, inflight_tokens_max=10_000_000_000),
        scaling=ScalingConfig(
            enabled=scaler is not None, replicas_min=1, replicas_max=REPLICAS_MAX, seasons_s=(DAY_S, 7 * DAY_S)
        ),
    )
    config = config if own else as_users_run_it(config)
    pool = Pool(PROFILE, replicas, scaler=scaler)
    result = run(Scenario(name="elastic", source=make, pools=(pool,), seed=seed, config=config, gateways=1))
    s = summarise(result, OBJECTIVES)
    return Outcome(
        s.attainment, replica_hours(result, end_s) * COMPRESS, s.pools[0].direction_changes, s.ended("refused"),
        s.requests,
    )  # fmt: skip


def replica_hours(result: RunResult, end_s: float) -> float:
    """Replicas that start, serve or drain, integrated to ``end_s``, from samples of a second."""
    samples = [s for s in result.pools[0].timeline if s.at_ns < end_s * 1e9]
    times = [s.at_ns / 1e9 for s in samples[1:]] + [end_s]
    before_s, hours = 0.0, 0.0
    for sample, until_s in zip(samples, times, strict=True):
        hours += (sample.starting + sample.ready + sample.draining) * (until_s - before_s) / 3_600
        before_s = until_s
    return hours


# --- the weeks --------------------------------------------------------------------------------------------------------

CARRIED = (0.25, 0.65, 1.3, 2.1, 2.65, 3.25, 3.8, 4.4, 4.95, 5.5, 6.05)
"""Requests per second of which 1, 2, ... replicas keep :data:`KEPT`: measured with fixed fleets of 2, 4 and 8 on the
Azure mix, 15 minutes each, linear between and beyond. Only its shape matters: a factor on the rates is searched."""

FACTORS = (1.1, 1.0, 0.95, 0.9, 0.85, 0.8)
RAY_DELAYS_S = ((30.0, 600.0), (30.0, 600.0 / COMPRESS))
"""Before going up and down: the defaults, and with the latter compressed as the week is."""
RAY_TARGETS = (12.0, 9.0, 7.0, 5.5, 4.0, 3.0)
HPA_DOWN_S = (300.0, 300.0 / COMPRESS)
HPA_TARGETS = (0.9, 0.8, 0.7, 0.6, 0.5)
"""Least cautious first: the first that holds is taken."""

ARMS = ("tidegate", "clairvoyant", "ray serve", "hpa")


class Clairvoyant:
    """Reads the number of replicas from a schedule, a start-up time ahead. Not to be overruled by the joint plan."""

    def __init__(self, targets: Sequence[int]) -> None:
        self._targets = targets

    def recommend(self, signals: Signals, now_ns: int) -> ScaleAdvice:
        """The most of what is needed from now until a replica asked for now would be ready."""
        now_s, ready_s = now_ns / 1e9, now_ns / 1e9 + PROFILE.cold_start_ms / 1e3
        places = range(int(now_s // SLOT_S), int(ready_s // SLOT_S) + 1)
        most = max(self._targets[min(place, len(self._targets) - 1)] for place in places)
        return ScaleAdvice(most, Reason("Schedule", "known beforehand"))


def schedule(load: str, days: float, factor: float = 1.0) -> tuple[int, ...]:
    """Fewest replicas of each slot for ``factor`` times its rate."""
    return tuple(1 + sum(most < rate * factor for most in CARRIED) for rate in slots(load, days))


def _clairvoyant(targets: tuple[int, ...], _config: PolicyConfig) -> Clairvoyant:
    return Clairvoyant(targets)


def _ray(settings: RayServeSettings, config: PolicyConfig) -> RayServeScaler:
    return RayServeScaler(config, settings)


def _hpa(settings: HpaSettings, config: PolicyConfig) -> HpaScaler:
    return HpaScaler(config, settings)


@dataclass(frozen=True)
class Setting:
    """A contender with one setting."""

    words: str
    own: bool
    """Tidegate's other levers act."""
    make: Callable[[str, float], ScalerFactory]
    """For a load and a number of days."""


def _fixed_for_all(scaler: ScalerFactory, _load: str, _days: float) -> ScalerFactory:
    return scaler


def _scheduled(factor: float, load: str, days: float) -> ScalerFactory:
    return partial(_clairvoyant, schedule(load, days, factor))


def settings(name: str) -> list[list[Setting]]:
    """Ladders to be tried, each from the least cautious setting to the most."""
    if name == "tidegate":
        return [[Setting("as it comes", True, partial(_fixed_for_all, ReplicaScaler))]]
    if name == "clairvoyant":
        return [[Setting(f"{f:g} of the rates", True, partial(_scheduled, f)) for f in reversed(FACTORS)]]
    if name == "ray serve":
        made = [
            [RayServeSettings(t, upscale_delay_s=up, downscale_delay_s=down) for t in RAY_TARGETS]
            for up, down in RAY_DELAYS_S
        ]
        return [
            [
                Setting(
                    f"{s.target_ongoing_requests:g} ongoing, {s.downscale_delay_s:g} s",
                    False,
                    partial(_fixed_for_all, partial(_ray, s)),
                )
                for s in ladder
            ]
            for ladder in made
        ]
    return [
        [
            Setting(
                f"{share:.0%} busy, {down:g} s",
                False,
                partial(_fixed_for_all, partial(_hpa, HpaSettings(target_share=share, down_stabilisation_s=down))),
            )
            for share in HPA_TARGETS
        ]
        for down in HPA_DOWN_S
    ]


def attempt(load: str, setting: Setting, days: float, seed: int) -> Outcome:
    """One contender on one load."""
    start = schedule(load, days)[0]
    return play(source(load, days), setting.make(load, days), start, seed, setting.own, days * DAY_S)


def tuned(load: str, name: str, days: float) -> Setting:
    """The setting that holds for the fewest GPU-hours on the first ``days``; the most cautious where none holds."""
    ladders = settings(name)
    if len(ladders) == len(ladders[0]) == 1:
        return ladders[0][0]
    best, hours = ladders[0][-1], math.inf
    for ladder in ladders:
        for setting in ladder:
            outcome = attempt(load, setting, days, TUNE_SEED)
            if outcome.kept >= KEPT:
                if outcome.gpu_hours < hours:
                    best, hours = setting, outcome.gpu_hours
                break
    return best


def week(load: str, name: str, days: float, tune_days: float, seed: int) -> tuple[str, Outcome]:
    """One contender, tuned, on one load: its setting in words, and the run."""
    setting = tuned(load, name, min(days, tune_days))
    return setting.words, attempt(load, setting, days, seed)


def weeks(loads: Sequence[str], days: float, tune_days: float, seed: int, workers: int) -> bool:
    """Print a table of each load; whether the bars hold."""
    jobs = [(load, name) for load in loads for name in ARMS]
    constant = [[value] * len(jobs) for value in (days, tune_days, seed)]
    with ProcessPoolExecutor(workers) as pool:
        found = dict(zip(jobs, pool.map(week, *zip(*jobs, strict=True), *constant), strict=True))
    good = [_judge(load, days, {name: found[load, name] for name in ARMS}) for load in loads]
    return all(good)


def _judge(load: str, days: float, found: dict[str, tuple[str, Outcome]]) -> bool:
    own, least = found["tidegate"][1], found["clairvoyant"][1]
    rows = [
        [name, words, f"{o.kept:.2%}", f"{o.gpu_hours:.0f}", f"{o.gpu_hours / least.gpu_hours:.2f}", o.turns, o.refused]
        for name, (words, o) in found.items()
    ]
    head = ["", "setting", "kept", "GPU-hours", "of clairvoyant", "turns", "refused"]
    table(f"{load}: {own.requests} requests, {days:g} days", head, rows)
    cost = own.gpu_hours / least.gpu_hours
    good = [
        verdict(own.kept >= KEPT, f"{load}: objectives held for {own.kept:.2%} (bar {KEPT:.0%})"),
        verdict(cost <= COST_MAX, f"{load}: {cost:.2f} times the clairvoyant's GPU-hours (bar {COST_MAX})"),
    ]
    for name in ARMS[2:]:
        saved = 1 - own.gpu_hours / found[name][1].gpu_hours
        good.append(
            verdict(saved >= SAVED_MIN, f"{load}: {saved:.0%} fewer GPU-hours than {name} (bar {SAVED_MIN:.0%})")
        )
    return all(good)


# --- transitions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A load that changes."""

    name: str
    transitions: int
    source: SourceFactory


def _one(curve: RateCurve) -> SourceFactory:
    return from_curve(curve, MIDDLE)


class Named:
    """Sessions whose clients tell the gateway which task a request is of."""

    def __init__(self, sessions_: Source) -> None:
        self.name, self._sessions = sessions_.name, sessions_

    def arrivals(self) -> Iterator[SimRequest]:
        """See the protocol."""
        return (replace(r, task_header=True) for r in self._sessions.arrivals())

    def follow_ups(self, request: SimRequest, succeeded: bool, now_ns: int) -> Sequence[SimRequest]:
        """See the protocol."""
        return [replace(r, task_header=True) for r in self._sessions.follow_ups(request, succeeded, now_ns)]


def _storm() -> SourceFactory:
    """Forty tasks of twelve calls within half a minute, beside a steady load."""

    def make(number: int, rng: Random) -> Session:
        calls = (Call(rng.expovariate(0.5), *MIDDLE.draw(rng), blocks=(), last=i == 11) for i in range(12))
        return Session(calls, f"agent-{number}")

    curve = RateCurve.steps([(400.0, 0.0), (30.0, 40 / 30), (470.0, 0.0)])
    agents = sessions("agents", curve, make, Options())
    return mixture(_one(RateCurve.steps([(900.0, 1.0)])), lambda rng: Named(agents(rng)))


def changes() -> tuple[Change, ...]:
    """Requests per second, from what two or three replicas carry to three times as much."""
    wave = [(60.0 * i, 2.0 - 1.2 * math.cos(2 * math.pi * i / 30)) for i in range(31)]
    return (
        Change("step", 1, _one(RateCurve.steps([(300.0, 0.8), (500.0, 2.4)]))),
        Change("ramp", 1, _one(RateCurve(((0.0, 0.8), (200.0, 0.8), (600.0, 2.8), (800.0, 2.8))))),
        Change("flash crowd", 2, _one(RateCurve.flash_crowd(0.8, 3.2, 300.0, 10.0, 150.0, 30.0, 900.0))),
        Change("day", 2, _one(RateCurve(tuple(wave)))),
        Change("agent storm", 2, _storm()),
    )


def turns_of(name: str, seed: int) -> int:
    """Changes of direction in one run of Tidegate."""
    change = next(c for c in changes() if c.name == name)
    return play(change.source, ReplicaScaler, 3, seed, True, 1.0).turns


def transitions(seeds: int, workers: int) -> bool:
    """Print a table; whether no seed turns more often than once per transition."""
    jobs = [(c.name, seed) for c in changes() for seed in range(seeds)]
    with ProcessPoolExecutor(workers) as pool:
        found = dict(zip(jobs, pool.map(turns_of, *zip(*jobs, strict=True)), strict=True))
    rows, good = [], True
    for change in changes():
        turns = [found[change.name, seed] for seed in range(seeds)]
        rows.append([change.name, change.transitions, " ".join(map(str, turns))])
        good &= max(turns) <= change.transitions
    table("Changes of direction", ["load", "transitions", "turns, by seed"], rows)
    return verdict(good, "no more than one change of direction per transition, any seed")


# --- zero -------------------------------------------------------------------------------------------------------------


def asleep_after(seed: int) -> tuple[str, float | None, bool]:
    """Kind of counts that nobody gives back, seconds until nothing runs, and whether the next request was served and
    the fleet asleep again at the end.
    """
    run_ = idle(seed)
    after_s = None if run_.asleep_s is None else run_.asleep_s - run_.busy_until_s
    return run_.phantoms, after_s, run_.late == "succeeded" and run_.asleep_at_end


def zero(seeds: int, workers: int) -> bool:
    """Print a table; whether every seed sleeps in time and serves the next request."""
    with ProcessPoolExecutor(workers) as pool:
        found = list(pool.map(asleep_after, range(seeds)))
    limit_s, rows, in_time, good = ZERO_AFTER_S + WINDOW_S, [], 0, True
    for kind in sorted({kind for kind, _, _ in found}):
        times = [after_s for each, after_s, _ in found if each == kind]
        known = [t for t in times if t is not None]
        served = sum(fine for each, _, fine in found if each == kind)
        within = sum(t <= limit_s for t in known)
        in_time += within
        good &= within == served == len(times)
        longest = f"{max(known):.1f} s" if known else "never"
        rows.append([kind, len(times), within, longest, served])
    head = [
        "counts not given back",
        "seeds",
        f"asleep within {limit_s:g} s",
        "longest",
        "next request served, asleep again",
    ]
    table("Scale to zero", head, rows)
    return verdict(
        good, f"asleep within {ZERO_AFTER_S:g} s plus one window of {WINDOW_S:g} s in {in_time} of {seeds} seeds"
    )


# --- all --------------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--part", choices=("weeks", "transitions", "zero", "all"), default="all")
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--seed", type=int, default=0, help="of the weeks")
    parser.add_argument("--seeds", type=int, default=5, help="of the transitions: 0, 1, ...")
    parser.add_argument("--idle-seeds", type=int, default=100, help="of the fleets that may sleep: 0, 1, ...")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tune-days", type=float, default=1.0)
    args = parser.parse_args()
    good = transitions(args.seeds, args.workers) if args.part in ("transitions", "all") else True
    if args.part in ("zero", "all"):
        good &= zero(args.idle_seeds, args.workers)
    if args.part in ("weeks", "all"):
        good &= weeks(args.loads.split(","), args.days, args.tune_days, args.seed, args.workers)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
