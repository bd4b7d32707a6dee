"""``python -m tests.bench.dynamo_r1``: NVIDIA Dynamo's SLA planner beside static fleets, as published and as simulated.

Published: ai-dynamo, ``components/src/dynamo/planner/tests/manual/README.md``, "E2E Perf Test Results". Its setting,
read there and in ``perf_test_configs/disagg_8b_{planner,2p2d,3p1d}.yaml``: Llama-3.1-8B FP8, vLLM on H200, one GPU an
engine, no prefix caching; 5 to 45 requests/s in a sinusoid of 600 s for 1,800 s, 3,000 prompt and 300 output tokens;
goodput counts requests with TTFT <= 200 ms and mean gap <= 10 ms (AIPerf); the planner starts with one prefill and one
decode engine, decides every 60 s, corrections off, its frontend routes by load; static fleets route round robin. How
long an engine takes to start is not said: it is swept here.

Engines are the profile fitted to Dynamo's own measurements of that engine. Tidegate's loops run the same load beside
them. Every figure in the notes is computed here.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from autoscaling.recommend import ReplicaScaler
from autoscaling.simulator.baselines.dynamo import DynamoSettings, dynamo_scaler
from autoscaling.simulator.baselines.dynamo_engine import surface_of_profile
from autoscaling.simulator.baselines.tables import ROUTERS, as_users_run_it
from autoscaling.simulator.report import Summary, median, summarise
from autoscaling.simulator.spec import EngineProfile, Pool, ScalerFactory, Scenario
from autoscaling.simulator.workload.generators import from_curve
from autoscaling.simulator.workload.lengths import Fixed
from autoscaling.simulator.workload.rates import RateCurve
from autoscaling.simulator.workload.trace import Options
from autoscaling.simulator.world import run
from deployments.simulation.profile_files import load_profile
from deployments.simulation.tables import console_for, number
from policies.config import AdmissionConfig, ObjectivesConfig, PolicyConfig, ScalingConfig

ISL, OSL = 3_000, 300
CURVE = RateCurve.sinusoid(5.0, 45.0, 600.0)
DURATION_S = 1_800.0
OBJECTIVES = ObjectivesConfig(ttft_ms=200, itl_ms=10, quantile=0.95)
INTERVAL_S = 60.0
BUDGET = 8
"""Dynamo's default ``max_gpu_budget``."""

STARTS_S = (5.0, 15.0, 30.0)
"""Start times of an engine that are tried beside the profile's."""

PUBLISHED = {"2P2D": (0.52, 0.29), "3P1D": (7.25, 6.00)}
"""The planner's improvement of goodput and of goodput per GPU over static fleets."""

GPUS_STATIC = 4


@cache
def profile() -> EngineProfile:
    """Dynamo's engine, without prefix caching as in its test."""
    return replace(load_profile("h200-llama-3.1-8b-fp8"), prefix_cache=False)


@dataclass(frozen=True, slots=True)
class Arm:
    """One deployment."""

    name: str
    pools: tuple[tuple[str, int, ScalerFactory | None], ...]
    """Role, replicas at the start, scaler."""
    router: str
    live: bool = False
    """Tidegate's loops act, its admission refuses; else vLLM keeps its start-up settings and nobody is refused."""
    start_s: float | None = None
    """Start time of an engine; ``None``: the profile's."""

    def scenario(self, seed: int, duration_s: float) -> Scenario:
        """The test on this deployment."""
        source = from_curve(CURVE, Fixed(ISL, OSL), Options(duration_s=duration_s))
        start_ms = profile().cold_start_ms if self.start_s is None else self.start_s * 1e3
        engine = replace(profile(), cold_start_ms=start_ms)
        pools = tuple(Pool(engine, n, role, scaler=scaler) for role, n, scaler in self.pools)
        scaling = ScalingConfig(replicas_min=1, replicas_max=BUDGET // len(pools))
        settings = PolicyConfig(objectives=OBJECTIVES, scaling=scaling)
        if not self.live:
            open_door = AdmissionConfig(
                inflight_requests_max=1_000_000, inflight_tokens_max=10_000_000_000, engine_wait_share=None
            )
            settings = replace(as_users_run_it(settings), admission=open_door)
        return Scenario(self.name, source, pools, seed, settings, gateways=1, router=ROUTERS[self.router])


def planner(start_s: float | None) -> Arm:
    """Dynamo's planner, one for each pool."""
    pools = tuple(
        (role, 1, dynamo_scaler(profile(), DynamoSettings(role=role, interval_s=INTERVAL_S, correct=False)))
        for role in ("prefill", "decode")
    )
    seconds = profile().cold_start_ms / 1e3 if start_s is None else start_s
    return Arm(f"planner, starts take {seconds:g} s", pools, "least_tokens", start_s=start_s)


def arms() -> tuple[Arm, ...]:
    """Dynamo's deployments, an aggregated one, and Tidegate's."""
    divided = (("prefill", 1, ReplicaScaler), ("decode", 1, ReplicaScaler))
    return (
        Arm("2P2D", (("prefill", 2, None), ("decode", 2, None)), "round_robin"),
        Arm("3P1D", (("prefill", 3, None), ("decode", 1, None)), "round_robin"),
        Arm("4 aggregated", (("both", 4, None),), "round_robin"),
        *(planner(start_s) for start_s in (*STARTS_S, None)),
        Arm("tidegate 2P2D", (("prefill", 2, None), ("decode", 2, None)), "tidegate", live=True),
        Arm("tidegate 4 aggregated", (("both", 4, None),), "tidegate", live=True),
        Arm("tidegate 1..8 aggregated", (("both", 1, ReplicaScaler),), "tidegate", live=True),
        Arm("tidegate 1..4P 1..4D", divided, "tidegate", live=True),
        Arm(f"the same, starts take {STARTS_S[0]:g} s", divided, "tidegate", live=True, start_s=STARTS_S[0]),
    )


# --- figures ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figures:
    """Medians over the seeds."""

    goodput_ps: float
    per_gpu_ps: float
    gpus: float

    def over(self, other: Figures) -> tuple[float, float]:
        """Improvement of goodput and of goodput per GPU over ``other``."""
        return self.goodput_ps / other.goodput_ps - 1, self.per_gpu_ps / other.per_gpu_ps - 1


def figures(runs: Sequence[Summary]) -> Figures:
    """Of one arm."""
    gpus = median(math.fsum(p.replicas_mean for p in s.pools) for s in runs)
    return Figures(median(s.goodput_ps for s in runs), median(s.goodput_per_gpu for s in runs), gpus)


def print_arms(console: Console, found: dict[str, list[Summary]]) -> None:
    """Every arm with its ratio to 2P2D."""
    table = _table(
        "", "goodput/s", "range", "vs 2P2D", "GPUs", "goodput/s/GPU", "vs 2P2D", "kept", "TTFT p50", "TPOT p50"
    )
    base = figures(found["2P2D"])
    for name, runs in found.items():
        own = figures(runs)
        goodput, per_gpu = own.over(base)
        low, high = min(s.goodput_ps for s in runs), max(s.goodput_ps for s in runs)
        table.add_row(
            name, f"{own.goodput_ps:.2f}", f"{low:.2f}..{high:.2f}", f"{goodput:+.0%}", f"{own.gpus:.2f}",
            f"{own.per_gpu_ps:.2f}", f"{per_gpu:+.0%}", f"{median(s.attainment for s in runs):.1%}",
            number(median(s.ttft.p50_ms for s in runs)), number(median(s.tpot.p50_ms for s in runs)),
        )  # fmt: skip
    console.print(table)


def print_published(console: Console, found: dict[str, list[Summary]]) -> None:
    """The planner's improvements beside the published ones."""
    table = _table("planner over", "goodput, published", "here", "per GPU, published", "here")
    for name, (goodput, per_gpu) in PUBLISHED.items():
        for arm in (planner(start_s) for start_s in (*STARTS_S, None)):
            own = figures(found[arm.name]).over(figures(found[name]))
            table.add_row(
                f"{name} ({arm.name})", f"{goodput:+.0%}", f"{own[0]:+.0%}", f"{per_gpu:+.0%}", f"{own[1]:+.0%}"
            )
    console.print(table)


def _table(*names: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for i, name in enumerate(names):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    return table


# --- notes ------------------------------------------------------------------------------------------------------------


def share_above(rate_rps: float) -> float:
    """Share of the requests that arrive while the load is above ``rate_rps``."""
    times = [CURVE.length_s * (i + 0.5) / 6_000 for i in range(6_000)]
    rates = [CURVE.rate_rps(t) for t in times]
    return sum(r for r in rates if r > rate_rps) / sum(rates)


def matching_start_s(found: dict[str, list[Summary]], which: int) -> float | None:
    """Start time at which the improvement over 2P2D is the published one, linear between those run."""
    base, wanted = figures(found["2P2D"]), PUBLISHED["2P2D"][which]
    points = []
    for start_s in (*STARTS_S, profile().cold_start_ms / 1e3):
        name = f"planner, starts take {start_s:g} s"
        points.append((start_s, figures(found[name]).over(base)[which]))
    for (t0, y0), (t1, y1) in pairwise(points):
        if min(y0, y1) <= wanted <= max(y0, y1) and y0 != y1:
            return t0 + (t1 - t0) * (wanted - y0) / (y1 - y0)
    return None


class Notes:
    """Why the figures are what they are, in sentences."""

    def __init__(self, found: dict[str, list[Summary]]) -> None:
        self.lines: list[str] = []
        self._found = found
        self._of = {name: figures(runs) for name, runs in found.items()}
        surface = surface_of_profile(profile())
        self._prefill_rps = surface.prefill_tps(ISL) / ISL
        self._decode_rps = surface.decode_tps(OBJECTIVES.itl_ms, ISL + OSL / 2) / OSL
        self._both_rps = surface.both_rps(ISL, OSL, OBJECTIVES.ttft_ms, OBJECTIVES.itl_ms)
        self._static()
        self._planner()
        self._tidegate()

    def _say(self, *parts: str) -> None:
        self.lines.append(" ".join(parts))

    def _kept(self, name: str) -> str:
        return f"{median(s.attainment for s in self._found[name]):.1%}"

    def _static(self) -> None:
        prefill, decode, both = self._prefill_rps, self._decode_rps, self._both_rps
        self._say(
            f"engine: within the objectives one GPU prefills {prefill:.1f} and decodes {decode:.1f} requests/s",
            f"(published: about 15 each); one that does both carries {both:.1f}",
        )
        two = 2 * min(prefill, decode)
        self._say(
            f"2P2D carries {two:.0f} requests/s and {share_above(two):.0%} of the requests come while the load is",
            f"above; {self._kept('2P2D')} are kept, as the queue of a peak makes those behind it late too",
        )
        here = self._of["2P2D"].goodput_ps / self._of["3P1D"].goodput_ps
        published = (1 + PUBLISHED["3P1D"][0]) / (1 + PUBLISHED["2P2D"][0])
        self._say(
            f"3P1D carries {decode:.0f} requests/s of {CURVE.total / CURVE.length_s:.0f} on average: its queue",
            f"grows to the end and {self._kept('3P1D')} are kept; 2P2D is {here:.0f} times as good, published",
            f"{published:.1f} times: a ratio to next to nothing, and here no client ever gives up",
        )

    def _planner(self) -> None:
        two, slow = self._of["2P2D"], self._of[planner(None).name]
        quick = self._of[planner(STARTS_S[0]).name]
        start_s = profile().cold_start_ms / 1e3
        growth = max(b[1] - a[1] for a, b in pairwise(CURVE.points)) / CURVE.points[1][0] * INTERVAL_S
        self._say(
            f"the start of an engine decides: goodput is {quick.over(two)[0]:+.0%} over 2P2D with {STARTS_S[0]:g}",
            f"s and {slow.over(two)[0]:+.0%} with the profile's {start_s:g} s; the planner decides once in",
            f"{INTERVAL_S:g} s on a load that grows by up to {growth:.0f} requests/s meanwhile",
        )
        for which, word in enumerate(("goodput", "goodput per GPU")):
            match_s = matching_start_s(self._found, which)
            said = f"with starts of {match_s:.0f} s" if match_s is not None else "with none of the start times"
            self._say(f"the published {PUBLISHED['2P2D'][which]:+.0%} in {word} over 2P2D is met {said}")
        goodput, per_gpu = PUBLISHED["2P2D"]
        implied = GPUS_STATIC * (1 + goodput) / (1 + per_gpu)
        self._say(
            f"the published gains imply {implied:.2f} GPUs on average, the planner here holds {slow.gpus:.2f}:",
            f"for a given goodput the gain per GPU comes out {'higher' if slow.gpus < implied else 'lower'} here",
        )

    def _tidegate(self) -> None:
        two, slow = self._of["2P2D"], self._of[planner(None).name]
        names = [name for name in self._of if name.startswith(("tidegate", "the same"))]
        best = max(names, key=lambda name: self._of[name].goodput_ps)
        own = self._of[best]
        self._say(
            f"Tidegate's best goodput is that of '{best}': {own.over(two)[0]:+.0%} over 2P2D with {own.gpus:.1f} GPUs",
            f"({own.over(two)[1]:+.0%} per GPU), {own.over(slow)[0]:+.0%} over the planner at the profile's start",
        )
        peak = max(rate for _, rate in CURVE.points)
        self._say(
            f"an aggregated engine carries {self._both_rps:.1f} requests/s within gaps of {OBJECTIVES.itl_ms:g}",
            f"ms: the peak needs {math.ceil(peak / self._both_rps)} of them and {BUDGET} may run; divided fleets",
            "suit this load",
        )
        for name, fixed in (("tidegate 2P2D", "2P2D"), ("tidegate 4 aggregated", "4 aggregated")):
            ours, theirs = self._found[name], self._found[fixed]
            self._say(
                f"{name} keeps {self._kept(name)}, {fixed} with round robin {self._kept(fixed)}: TPOT p50",
                f"{_tpot(ours)} beside {_tpot(theirs)} ms, TTFT p50 {_ttft(ours)} beside {_ttft(theirs)} ms",
            )


def _tpot(runs: Sequence[Summary]) -> str:
    return number(median(s.tpot.p50_ms for s in runs))


def _ttft(runs: Sequence[Summary]) -> str:
    return number(median(s.ttft.p50_ms for s in runs))


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--duration", type=float, default=DURATION_S, help="seconds; 1,800 as published")
    given = parser.parse_args()
    console = console_for(Console(highlight=False))
    found: dict[str, list[Summary]] = {}
    for arm in arms():
        for seed in range(1, given.seeds + 1):
            result = run(arm.scenario(seed, given.duration))
            found.setdefault(arm.name, []).append(summarise(result, OBJECTIVES, arm.name))
        console.print(f"  .. {arm.name}: goodput {figures(found[arm.name]).goodput_ps:.2f}/s", markup=False)
    console.print(f"\nmedians of {given.seeds} seeds, {given.duration:g} s; TTFT and TPOT in ms\n")
    print_arms(console, found)
    console.print()
    print_published(console, found)
    console.print()
    for line in Notes(found).lines:
        console.print(f"- {line}", soft_wrap=True, markup=False)


if __name__ == "__main__":
    main()
