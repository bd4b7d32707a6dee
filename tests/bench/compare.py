"""Tidegate against what people run today, in the simulator, on recorded traffic: successes per dollar.

Three parts, each a table of its own:

* ``routers``: every router over the same fixed fleet, so at equal GPU-hours, at several loads per trace;
* ``fleets``: the smallest fixed fleet with which each router keeps :data:`SLO_SHARE` of the requests within the
  objectives, so at equal SLO;
* ``scalers``: pairs of router and scaler as users run them, each with the setting, of a small grid, that keeps
  :data:`SLO_SHARE` for the fewest dollars.

A success is a whole answer with TTFT and TPOT within :data:`OBJECTIVES`. Dollars are counted to the last arrival: what
the fleet costs while traffic comes is the same for all, and a late answer afterwards buys nothing. Baselines run
without Tidegate's batch tuner and affinity loop, on vLLM's start-up batch settings; Tidegate runs with both. Prompts
longer than the model's context are left out for all.

Seeds move every arrival by up to :data:`JITTER_S`, and with it ties, engines' jitter, reports and tie breaks.

    python -m tests.bench.compare [--part PART] [--seeds 5] [--gateways 1] [--traces a,b] [--routers a,b]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random

from autoscaling.simulator.baselines.dynamo import DynamoSettings, dynamo_scaler
from autoscaling.simulator.baselines.hpa import HpaScaler, HpaSettings
from autoscaling.simulator.baselines.kpa import KpaScaler, KpaSettings
from autoscaling.simulator.baselines.ray_serve import RayServeScaler, RayServeSettings
from autoscaling.simulator.baselines.tables import ROUTERS, SCALERS, as_users_run_it, router_for_run
from autoscaling.simulator.records import RunResult
from autoscaling.simulator.report import summarise
from autoscaling.simulator.spec import Pool, ScalerFactory, Scenario, SimRequest, Source, SourceFactory
from autoscaling.simulator.workload.trace import Options
from autoscaling.simulator.world import run
from deployments.simulation.files import open_trace
from deployments.simulation.profile_files import load_profile
from policies.config import AdmissionConfig, ObjectivesConfig, PolicyConfig, ScalingConfig
from tests.data import data_path

PROFILE = "h100-llama-3.1-8b-bf16"
OBJECTIVES = ObjectivesConfig(ttft_ms=4_000.0, itl_ms=50.0)
SLO_SHARE = 0.9
JITTER_S = 1.0
TIDEGATE = "tidegate"
BARS = {"prefix-heavy": 1.3, "bursty": 0.98}
"""Least ratio to the best baseline; nowhere below the smaller one."""


@dataclass(frozen=True)
class Case:
    """A trace, and how it is played to a fleet of eight."""

    name: str
    kind: str
    file: str
    scales: tuple[float, ...]
    """Factors of the recorded rate: below the knee, at it, beyond it."""
    start_s: float
    limit: int
    elastic: tuple[float, int] = (1.0, 1_000)
    """Scale and limit of part ``scalers``: slow enough for scalers to act."""


CASES = (
    Case("conversation", "prefix-heavy", "mooncake_conversation.jsonl.gz", (2.0, 3.0, 3.5), 0.0, 1_500, (2.0, 4_000)),
    Case("synthetic", "prefix-heavy", "mooncake_synthetic.jsonl.gz", (1.5, 2.5, 4.0), 400.0, 1_500, (1.5, 2_200)),
    Case("code", "bursty", "azure_llm_2023_code.csv.gz", (8.0, 16.0, 24.0), 0.0, 2_500, (8.0, 8_800)),
)
REPLICAS = 8


@dataclass(frozen=True)
class Outcome:
    """One run."""

    seed: int
    successes: int
    requests: int
    usd: float
    attainment: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    tpot_p95_ms: float
    hit_share: float
    digest: str

    @property
    def per_usd(self) -> float:
        return self.successes / self.usd if self.usd else 0.0


class Jittered:
    """A trace whose arrivals are moved by a seeded while, without prompts that no engine of the profile can hold."""

    def __init__(self, source: Source, rng: Random, tokens_max: int) -> None:
        self.name = source.name
        fit = [r for r in source.arrivals() if r.prompt_tokens + r.output_tokens < tokens_max]
        moved = [(r.arrival_ns + round(rng.random() * JITTER_S * 1e9), r) for r in fit]
        moved.sort(key=lambda pair: pair[0])
        self.requests = [replace(r, index=i, arrival_ns=at) for i, (at, r) in enumerate(moved)]

    def arrivals(self) -> Iterator[SimRequest]:
        return iter(self.requests)

    def follow_ups(self, request: SimRequest, succeeded: bool, now_ns: int) -> Sequence[SimRequest]:
        return ()


@dataclass
class Bench:
    """What all runs share."""

    seeds: int
    gateways: int
    routers: Sequence[str]

    def __post_init__(self) -> None:
        self.profile = load_profile(PROFILE)
        self._sources: dict[tuple[str, float, int], SourceFactory] = {}

    def source(self, case: Case, scale: float, limit: int) -> SourceFactory:
        key = (case.name, scale, limit)
        if key not in self._sources:
            path = data_path(f"traces/{case.file}")
            assert path is not None
            options = Options(scale=scale, start_s=case.start_s, limit=limit)
            made = open_trace(path, options=options, spread=case.kind == "prefix-heavy")
            tokens_max = self.profile.context_tokens_max
            self._sources[key] = lambda rng: Jittered(made(rng), rng, tokens_max)
        return self._sources[key]

    def run(
        self,
        case: Case,
        load: tuple[float, int],
        router: str,
        replicas: int,
        seed: int,
        scaler: tuple[ScalerFactory, int] | None = None,
    ) -> Outcome:
        """One run; ``scaler`` comes with the most replicas it may have."""
        most = scaler[1] if scaler else replicas
        config = PolicyConfig(
            objectives=OBJECTIVES,
            admission=AdmissionConfig(inflight_requests_max=100_000, inflight_tokens_max=10_000_000_000),
            scaling=ScalingConfig(enabled=scaler is not None, replicas_min=1, replicas_max=most),
        )
        scenario = Scenario(
            name=f"{case.name}/{router}",
            source=self.source(case, *load),
            pools=(Pool(self.profile, replicas, scaler=scaler[0] if scaler else None),),
            seed=seed,
            config=config if router == TIDEGATE else as_users_run_it(config),
            gateways=self.gateways,
            router=router_for_run(router),
        )
        return self._outcome(run(scenario), seed)

    def _outcome(self, result: RunResult, seed: int) -> Outcome:
        s = summarise(result, OBJECTIVES)
        end_ns = max(result.records.arrival_ns)
        return Outcome(
            seed=seed,
            successes=s.successes,
            requests=s.requests,
            usd=_replica_hours(result, end_ns) * self.profile.usd_per_hour,
            attainment=s.attainment,
            ttft_p50_ms=s.ttft.p50_ms,
            ttft_p95_ms=s.ttft.p95_ms,
            tpot_p95_ms=s.tpot.p95_ms,
            hit_share=s.hit_share,
            digest=s.digest,
        )


def _replica_hours(result: RunResult, end_ns: int) -> float:
    """Replicas that start, serve or drain, integrated to ``end_ns``, from samples of a second."""
    hours = 0.0
    for pool in result.pools:
        samples = [s for s in pool.timeline if s.at_ns < end_ns]
        times = [s.at_ns for s in samples[1:]] + [end_ns]
        previous_ns = 0
        for sample, until_ns in zip(samples, times, strict=True):
            hours += (sample.starting + sample.ready + sample.draining) * (until_ns - previous_ns) / 3.6e12
            previous_ns = until_ns
    return hours


@dataclass(frozen=True)
class Arm:
    """All runs of one contender in one place."""

    place: str
    kind: str
    name: str
    setting: str
    outcomes: tuple[Outcome, ...]

    def mean(self, what: Callable[[Outcome], float]) -> float:
        return statistics.fmean(what(o) for o in self.outcomes)

    def spread(self, what: Callable[[Outcome], float]) -> float:
        return statistics.pstdev([what(o) for o in self.outcomes])


def routers(bench: Bench, cases: Sequence[Case]) -> Iterator[list[Arm]]:
    """Every router over eight replicas, place by place."""
    for case in cases:
        for scale in case.scales:
            place = f"{case.name}, {scale:g} times as fast, {REPLICAS} replicas"
            arms = []
            for name in bench.routers:
                runs = [bench.run(case, (scale, case.limit), name, REPLICAS, seed) for seed in range(bench.seeds)]
                arms.append(Arm(place, case.kind, name, f"{REPLICAS} replicas", tuple(runs)))
            yield arms


def fleets(bench: Bench, cases: Sequence[Case]) -> Iterator[list[Arm]]:
    """The smallest fleet for each router, by halving; at the middle load."""
    for case in cases:
        scale = case.scales[1]
        place = f"{case.name}, {scale:g} times as fast, {SLO_SHARE:.0%} within the objectives"
        yield [_smallest(bench, case, scale, name, place) for name in bench.routers]


def _smallest(bench: Bench, case: Case, scale: float, name: str, place: str) -> Arm:
    tried: dict[int, Arm] = {}

    def holds(n: int) -> bool:
        runs = [bench.run(case, (scale, case.limit), name, n, seed) for seed in range(bench.seeds)]
        tried[n] = Arm(place, case.kind, name, f"{n} replicas", tuple(runs))
        return tried[n].mean(lambda o: o.attainment) >= SLO_SHARE

    low, high = REPLICAS // 2, REPLICAS * 3
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    if high not in tried:
        holds(high)
    return tried[high]


def _pairs() -> list[tuple[str, list[tuple[str, ScalerFactory]]]]:
    """Router and the settings of its scaler that are tried."""
    tidegate = SCALERS["tidegate"]
    assert tidegate is not None

    def ray(target: float) -> tuple[str, ScalerFactory]:
        settings = RayServeSettings(target_ongoing_requests=target)
        return f"ray_serve, {target:g} ongoing", lambda config: RayServeScaler(config, settings)

    def hpa(share: float) -> tuple[str, ScalerFactory]:
        settings = HpaSettings(target_share=share, metric="kv")
        return f"hpa, KV use {share:.0%}", lambda config: HpaScaler(config, settings)

    def kpa(concurrency: float) -> tuple[str, ScalerFactory]:
        settings = KpaSettings(concurrency=concurrency)
        return f"kpa, concurrency {concurrency:g}", lambda config: KpaScaler(config, settings)

    def dynamo(interval_s: float) -> tuple[str, ScalerFactory]:
        settings = DynamoSettings(interval_s=interval_s)
        return f"dynamo, {interval_s:g} s", dynamo_scaler(load_profile(PROFILE), settings)

    return [
        (TIDEGATE, [("tidegate", tidegate)]),
        ("power_of_two", [ray(t) for t in (2, 4, 8, 16)]),
        ("ray_prefix_affinity", [ray(t) for t in (2, 4, 8, 16)]),
        ("least_tokens", [hpa(s) for s in (0.2, 0.4, 0.8)]),
        ("cache_aware", [kpa(c) for c in (5, 10, 20)]),
        ("cache_aware", [dynamo(i) for i in (60, 180)]),
    ]


def scalers(bench: Bench, cases: Sequence[Case]) -> Iterator[list[Arm]]:
    """Pairs with scalers, each with its cheapest setting that holds the SLO; the best kept where none does."""
    for case in cases:
        scale, limit = case.elastic
        place = f"{case.name}, {scale:g} times as fast, 1 to {2 * REPLICAS} replicas"
        arms = []
        for router, settings in _pairs():
            tried = []
            for label, factory in settings:
                runs = tuple(
                    bench.run(case, (scale, limit), router, REPLICAS // 2, seed, (factory, 2 * REPLICAS))
                    for seed in range(bench.seeds)
                )
                tried.append(Arm(place, case.kind, router, label, runs))
            holding = [a for a in tried if a.mean(lambda o: o.attainment) >= SLO_SHARE]
            if holding:
                arms.append(min(holding, key=lambda a: a.mean(lambda o: o.usd)))
            else:
                arms.append(max(tried, key=lambda a: a.mean(lambda o: o.attainment)))
        yield arms


PARTS = {"routers": routers, "fleets": fleets, "scalers": scalers}


def print_place(arms: Sequence[Arm]) -> float | None:
    """One table; the ratio of Tidegate to the best baseline, of those that keep the SLO where one was asked for.

    ``None``: no baseline keeps it.
    """
    equal_slo = "objectives" in arms[0].place or " to " in arms[0].place
    others = [a for a in arms if a.name != TIDEGATE]
    held = [a for a in others if not equal_slo or a.mean(lambda o: o.attainment) >= SLO_SHARE]
    best = max((a.mean(lambda o: o.per_usd) for a in held), default=0.0)
    print(f"\n{arms[0].place}")
    head = ("per $", 7), ("+-", 5), ("ratio", 6), ("kept", 6), ("+-", 5), ("TTFT p50", 8), ("p95", 7), ("TPOT p95", 8)
    print(" " * 36, *(f"{name:>{width}}" for name, width in (*head, ("hits", 5))))
    for arm in sorted(arms, key=lambda a: -a.mean(lambda o: o.per_usd)):
        value = arm.mean(lambda o: o.per_usd)
        label = arm.name if "routers" in arm.setting or not equal_slo else f"{arm.name} ({arm.setting})"
        print(
            f"{label:36} {value:7.0f} {arm.spread(lambda o: o.per_usd):5.0f} {value / best if best else 0:6.2f} "
            f"{arm.mean(lambda o: o.attainment):6.1%} {arm.spread(lambda o: o.attainment):5.1%} "
            f"{arm.mean(lambda o: o.ttft_p50_ms):8.0f} {arm.mean(lambda o: o.ttft_p95_ms):7.0f} "
            f"{arm.mean(lambda o: o.tpot_p95_ms):8.1f} {arm.mean(lambda o: o.hit_share):5.1%}",
            flush=True,
        )
    ours = next(a for a in arms if a.name == TIDEGATE).mean(lambda o: o.per_usd)
    return ours / best if best else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--part", choices=[*PARTS, "all"], default="routers")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--traces", default=",".join(c.name for c in CASES))
    parser.add_argument("--routers", default=",".join(ROUTERS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cases = [c for c in CASES if c.name in args.traces.split(",")]
    missing = [c.file for c in cases if data_path(f"traces/{c.file}") is None]
    if missing or not cases:
        print(f"traces missing: {', '.join(missing) or args.traces} (set TIDEGATE_DATA)", file=sys.stderr)
        return 2
    wanted = args.routers.split(",")
    if TIDEGATE not in wanted or any(name not in ROUTERS for name in wanted):
        print(f"--routers needs {TIDEGATE} and names of: {', '.join(ROUTERS)}", file=sys.stderr)
        return 2
    bench = Bench(args.seeds, args.gateways, wanted)
    written, below = [], []
    for part in PARTS if args.part == "all" else [args.part]:
        for arms in PARTS[part](bench, cases):
            ratio = print_place(arms)
            written += [asdict(a) for a in arms]
            if ratio is None:
                print(f"  no baseline keeps {SLO_SHARE:.0%} within the objectives: nothing to compare at equal SLO")
                continue
            if ratio < min(BARS.values()):
                below.append(f"{arms[0].place}: {ratio:.2f}")
            print(f"  Tidegate over the best baseline: {ratio:.2f} (bar {BARS[arms[0].kind]:g}, nowhere below 0.98)")
    if args.json:
        args.json.write_text(json.dumps(written, indent=1), encoding="utf-8")
    print("\nbelow 0.98: " + ("; ".join(below) or "nowhere"))
    return 1 if below else 0


if __name__ == "__main__":
    sys.exit(main())
