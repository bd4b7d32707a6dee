"""The joint plan against each lever alone and against all of them as independent loops, in the simulator.

Four load changes, each of which another lever answers best: a burst shorter than a cold start, prompts that grow eight
times as long, a prefix that everybody begins to share, a device that becomes slow. Contenders differ in which
levers move and nothing else: same fleet at the start, same gateways, same router, same queue at the gateways::

    joint       control.joint: all levers weighed against each other
    sum         the same levers, each as a loop of its own (control.joint: false)
    NAME only   that lever; every other knob stays at its configured value, the number of replicas included

Successes per dollar are those of ``autoscaling/simulator/report.py``: whole answers with TTFT and TPOT within the
objectives, over what every replica that starts, serves or drains costs until the last answer.

    python -m tests.bench.joint [--seeds 5] [--changes a,b] [--contenders a,b] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from autoscaling.recommend import ReplicaScaler
from autoscaling.simulator.report import summarise
from autoscaling.simulator.spec import Fault, Pool, Scenario, SourceFactory
from autoscaling.simulator.workload.generators import from_curve, shared_prefix
from autoscaling.simulator.workload.lengths import LogNormal
from autoscaling.simulator.workload.mixture import mixture
from autoscaling.simulator.workload.rates import RateCurve
from autoscaling.simulator.world import run
from deployments.simulation.profile_files import load_profile
from policies.config import (
    AdmissionConfig,
    AffinityConfig,
    BatchingConfig,
    ControlConfig,
    ObjectivesConfig,
    PolicyConfig,
    PricesConfig,
    ScalingConfig,
)
from policies.config_guard import SpeculationConfig

PROFILE = "h200-llama-3.1-70b-fp8"
OBJECTIVES = ObjectivesConfig(ttft_ms=3_000.0, itl_ms=60.0)
REPLICAS = 4
REPLICAS_MAX = 10
CHANGE_S = 300.0
"""When the load changes."""
END_S = 600.0
SHORT = LogNormal(1_200, 300, 0.8, 0.6, tokens_max=8_000)
LONG = LogNormal(6_400, 300, 0.4, 0.6, tokens_max=24_000)
JOINT = "joint"


@dataclass(frozen=True)
class Change:
    """One load change: what comes, and what breaks."""

    name: str
    source: SourceFactory
    faults: tuple[Fault, ...] = ()


def _curve(*steps: tuple[float, float]) -> RateCurve:
    return RateCurve.steps(steps)


def changes() -> tuple[Change, ...]:
    """The four; rates are relative to about 3 requests a second that one replica carries with short prompts."""
    rate = 6.0
    calm, rest = (CHANGE_S, rate), END_S - CHANGE_S
    return (
        Change("burst", from_curve(_curve(calm, (60.0, 3 * rate), (rest - 60.0, rate)), SHORT)),
        Change(
            "long prompts",
            mixture(
                from_curve(_curve(calm, (rest, 0.6 * rate)), SHORT),
                from_curve(_curve((CHANGE_S, 0.0), (rest, 0.7)), LONG),
            ),
        ),
        Change(
            "shared prefix",
            mixture(
                from_curve(_curve(calm, (rest, 0.25 * rate)), SHORT),
                shared_prefix(
                    _curve((CHANGE_S, 0.0), (rest, 0.6 * rate)),
                    groups=8, prompts=400, prefix_tokens=2_560, question_tokens=256, output_tokens=300,
                ),
            ),
        ),
        Change(
            "slow device",
            from_curve(_curve((END_S, rate)), SHORT),
            (Fault("slow", round(CHANGE_S * 1e9), round(rest * 1e9), replica=1, factor=4.0),),
        ),
    )  # fmt: skip


def _config(**on: bool) -> PolicyConfig:
    def has(lever: str) -> bool:
        return on.get(lever, False)

    return PolicyConfig(
        objectives=OBJECTIVES,
        admission=AdmissionConfig(
            inflight_requests_max=100_000, inflight_tokens_max=10_000_000_000, adaptive=has("admission")
        ),
        batching=BatchingConfig(enabled=has("batch")),
        affinity=AffinityConfig(enabled=has("affinity")),
        speculation=SpeculationConfig(enabled=has("speculation")),
        scaling=ScalingConfig(enabled=has("replicas"), replicas_min=1, replicas_max=REPLICAS_MAX),
        control=ControlConfig(joint=has("joint")),
        prices=PricesConfig(replica_usd_per_hour=load_profile(PROFILE).usd_per_hour),
    )


LEVERS = ("affinity", "batch", "speculation", "admission", "replicas")
ALL = dict.fromkeys(LEVERS, True)
CONTENDERS: dict[str, Callable[[], PolicyConfig]] = {
    JOINT: lambda: _config(joint=True, **ALL),
    "sum": lambda: _config(**ALL),
    **{f"{lever} only": partial(_config, **{lever: True}) for lever in LEVERS},
}


@dataclass(frozen=True)
class Outcome:
    """One run."""

    change: str
    contender: str
    seed: int
    per_usd: float
    attainment: float
    usd: float
    replicas: float
    ttft_p95_ms: float
    tpot_p95_ms: float
    refused: int
    digest: str


def play(change_name: str, contender: str, seed: int) -> Outcome:
    """One run of one contender."""
    change = next(c for c in changes() if c.name == change_name)
    config = CONTENDERS[contender]()
    pool = Pool(load_profile(PROFILE), REPLICAS, scaler=ReplicaScaler if config.scaling.enabled else None)
    scenario = Scenario(
        name=f"{change_name}/{contender}", source=change.source, pools=(pool,), seed=seed, config=config, gateways=2,
        faults=change.faults,
    )  # fmt: skip
    s = summarise(run(scenario), OBJECTIVES)
    return Outcome(
        change_name, contender, seed, s.successes_per_usd, s.attainment, s.usd, s.pools[0].replicas_mean,
        s.ttft.p95_ms, s.tpot.p95_ms, s.ended("refused"), s.digest,
    )  # fmt: skip


def table(change: str, outcomes: Sequence[Outcome]) -> float:
    """Print one change's table; joint over the best other contender."""
    means: dict[str, float] = {}
    print(f"\n{change}: {REPLICAS} replicas at the start, change at {CHANGE_S:g} s of {END_S:g} s")
    head = ("per $", 8), ("+-", 6), ("ratio", 7), ("kept", 7), ("replicas", 9), ("$", 7), ("TTFT p95", 10)
    print(" " * 18 + "".join(f"{name:>{width}}" for name, width in (*head, ("TPOT p95", 10), ("refused", 9))))
    names = list(dict.fromkeys(o.contender for o in outcomes))
    for name in names:
        means[name] = statistics.fmean(o.per_usd for o in outcomes if o.contender == name)
    others = max((v for n, v in means.items() if n != JOINT), default=means[names[0]])
    for name in sorted(names, key=lambda n: -means[n]):
        runs = [o for o in outcomes if o.contender == name]

        def mean(what: Callable[[Outcome], float], runs: Sequence[Outcome] = runs) -> float:
            return statistics.fmean(what(o) for o in runs)

        print(
            f"{name:18}{means[name]:8.0f}{statistics.pstdev([o.per_usd for o in runs]):6.0f}{means[name] / others:7.3f}"
            f"{mean(lambda o: o.attainment):7.1%}{mean(lambda o: o.replicas):9.2f}{mean(lambda o: o.usd):7.2f}"
            f"{mean(lambda o: o.ttft_p95_ms):10.0f}{mean(lambda o: o.tpot_p95_ms):10.1f}"
            f"{mean(lambda o: o.refused):9.0f}",
            flush=True,
        )
    return means.get(JOINT, 0.0) / others


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--changes", default=",".join(c.name for c in changes()))
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names = args.contenders.split(",")
    written: list[dict[str, Any]] = []
    below = []
    for change in args.changes.split(","):
        jobs = [(change, name, seed) for name in names for seed in range(args.seeds)]
        with ProcessPoolExecutor(args.workers) as pool:
            outcomes = list(pool.map(play, *zip(*jobs, strict=True)))
        ratio = table(change, outcomes)
        written += [asdict(o) for o in outcomes]
        print(f"  joint over the best other: {ratio:.3f}")
        if ratio <= 1.0:
            below.append(f"{change} ({ratio:.3f})")
    if args.json:
        args.json.write_text(json.dumps(written, indent=1), encoding="utf-8")
    print("\njoint does not win: " + ("; ".join(below) or "nowhere"))
    return 1 if below else 0


if __name__ == "__main__":
    sys.exit(main())
