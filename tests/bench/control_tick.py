"""Cost of the controller: ``python -m tests.bench.control_tick``.

Each second every replica and every gateway reports once, at its own time within the second, and the controller ticks
once, as live. Replicas decode and compute prompts, figures vary by a tenth from report to report, and engines follow
the plan; the first 40 seconds fill the windows and are not counted. Prints p50, p99 and the longest tick, what
receiving one second's reports takes, and both as a share of a core: CPU time of the one thread, the garbage collector
set as in the controller's process.
"""

from __future__ import annotations

import statistics
import sys
import time
from random import Random

from autoscaling.recommend import ReplicaScaler
from deployments.collector import collect_rarely
from policies.build import build_control
from policies.config import PolicyConfig, ScalingConfig
from policies.control.loop import tick
from policies.types import (
    LATENCY_BOUNDS_MS,
    FleetView,
    GatewayReport,
    Histogram,
    Knobs,
    Plan,
    ReplicaReport,
    ReplicaState,
    StepCoefficients,
)

FLEETS = ((10, 2), (100, 4), (1_000, 20))
"""Replicas and gateways."""

WARM_UP_S, SECONDS = 40, 240
TICK_MS_MAX, CORE_SHARE_MAX = 50.0, 0.3
"""Bars, for the largest fleet."""

SECOND_NS = 1_000_000_000


def _histogram(rng: Random, middle: int, count: int) -> Histogram:
    counts = [0] * (len(LATENCY_BOUNDS_MS) + 1)
    for bucket in range(middle - 2, middle + 3):
        counts[bucket] = rng.randrange(count)
    return Histogram(tuple(counts), sum(counts) * LATENCY_BOUNDS_MS[middle])


def replica_report(rng: Random, number: int, seq: int, plan: Plan | None = None) -> ReplicaReport:
    """One replica at half load that follows ``plan``."""
    running = rng.randint(27, 33)
    replica_id = f"replica-{number:05d}"
    wish = plan.knobs.get(replica_id, Knobs()) if plan is not None else Knobs()
    return ReplicaReport(
        replica_id=replica_id,
        model="m",
        seq=seq,
        window_ms=1_000.0 + rng.uniform(-50, 50),
        state=ReplicaState.READY,
        running=running,
        waiting=0,
        http_inflight=running,
        kv_tokens_used=running * 1_000,
        kv_tokens_max=400_000,
        prefill_tokens=rng.randint(4_000, 5_000),
        decode_tokens=rng.randint(2_300, 2_700),
        prefix_query_tokens=9_000,
        prefix_hit_tokens=rng.randint(4_000, 5_000),
        preemptions=0,
        steps=80,
        busy_share=rng.uniform(0.5, 0.6),
        gpu_utilisation_share=0.6,
        itl=_histogram(rng, 4, 900),
        step_model=StepCoefficients(6.0, rng.uniform(0.05, 0.07), 0.03, 0.015, seq * 80, 0.02),
        knobs=Knobs(wish.running_seqs_max or 256, wish.step_tokens_max or 2_048, None),
        plan_seq=plan.seq if plan is not None else None,
        running_seqs_hard=256,
        step_tokens_hard=2_048,
        finished=12,
        aborted=0,
        cold_start_ms=30_000.0,
    )


def gateway_report(rng: Random, number: int, gateways: int, replicas: int, seq: int) -> GatewayReport:
    """One gateway that sent to every replica of which it has a share."""
    mine = [f"replica-{i:05d}" for i in range(number % 4, replicas, max(1, gateways // 5))]
    routed = {r: rng.randint(1, 4) for r in mine}
    prompt = {r: n * 900 for r, n in routed.items()}
    return GatewayReport(
        gateway_id=f"gateway-{number:03d}",
        model="m",
        seq=seq,
        window_ms=1_000.0,
        ttft=_histogram(rng, 8, 100),
        itl=_histogram(rng, 4, 9_000),
        e2e=_histogram(rng, 20, 100),
        arrivals=sum(routed.values()),
        succeeded=sum(routed.values()),
        failed={"client_gone": 1},
        prompt_tokens=sum(prompt.values()),
        output_tokens=155 * sum(routed.values()),
        inflight=30 * replicas // gateways,
        queued=0,
        routed=routed,
        predicted_prompt_tokens=prompt,
        predicted_hit_tokens={r: n // 2 for r, n in prompt.items()},
        ttft_error_ms=_histogram(rng, 6, 100),
    )


def measure(replicas: int, gateways: int, seconds: int = SECONDS) -> tuple[list[float], list[float]]:
    """Milliseconds of CPU of each tick, and of receiving each second's reports."""
    config = PolicyConfig(scaling=ScalingConfig(replicas_min=1, replicas_max=2 * replicas))
    state, rng = build_control(config, ReplicaScaler(config), "epoch"), Random(replicas)
    ticks, receipts = [], []
    phases_ns = [rng.randrange(SECOND_NS) for _ in range(replicas + gateways)]
    plan: Plan | None = None
    for second in range(1, WARM_UP_S + seconds + 1):
        reports: list[ReplicaReport | GatewayReport] = [replica_report(rng, i, second, plan) for i in range(replicas)]
        reports += [gateway_report(rng, i, gateways, replicas, second) for i in range(gateways)]
        times_ns = [second * SECOND_NS + ns + rng.randrange(SECOND_NS // 20) for ns in phases_ns]
        order = sorted(range(len(reports)), key=times_ns.__getitem__)
        begin = time.thread_time_ns()
        for number in order:
            report = reports[number]
            if isinstance(report, ReplicaReport):
                state.receive_replica(report, times_ns[number])
            else:
                state.receive_gateway(report, times_ns[number])
        now_ns = (second + 1) * SECOND_NS + SECOND_NS // 20
        state.receive_fleet(FleetView(replicas, replicas, 1, 2 * replicas), now_ns)
        received = time.thread_time_ns()
        plan = tick(state, now_ns).plan
        ticks.append((time.thread_time_ns() - received) / 1e6)
        receipts.append((received - begin) / 1e6)
    return ticks[WARM_UP_S:], receipts[WARM_UP_S:]


def main() -> int:
    """Print the table; 1 when the largest fleet misses a bar."""
    collect_rarely()
    missed = False
    print("ms of CPU                 tick p50     p99 longest   reports p50     p99   share of a core")
    for replicas, gateways in FLEETS:
        ticks, receipts = measure(replicas, gateways)
        p99 = [statistics.quantiles(x, n=100)[98] for x in (ticks, receipts)]
        share = (sum(ticks) + sum(receipts)) / len(ticks) / 1_000
        print(
            f"{replicas:5d} replicas {gateways:3d} gateways "
            f"{statistics.median(ticks):8.2f}{p99[0]:8.2f}{max(ticks):8.2f}"
            f"{statistics.median(receipts):14.2f}{p99[1]:8.2f}{share:18.1%}"
        )
        missed = p99[0] > TICK_MS_MAX or share > CORE_SHARE_MAX
    print(f"bars for the largest: tick p99 {TICK_MS_MAX:g} ms, {CORE_SHARE_MAX:.0%} of a core")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
