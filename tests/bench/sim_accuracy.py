"""How far the simulated engine is from measured ones: request logs, step times, published serving points.

Nothing is fitted here unless ``--refit`` is given: the shipped profiles of the three logged set-ups were fitted to the
first half of each log's requests from a start that knows nothing of the second half (roofline, or the statistics of
the log's first half), so that the second half of the requests is held out; the step laws are fitted to every other step
and judged on the rest. Needs the calibration files (``TIDEGATE_DATA``); exits 1 when a bar is missed and 2 where there
is no data.

    python -m tests.bench.sim_accuracy            tables and bars, a few seconds
    python -m tests.bench.sim_accuracy --refit    fits the three laws again from their start and prints them
"""

from __future__ import annotations

import csv
import gzip
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoscaling.simulator.fit import StepSample, batch_knots, fit_steps
from autoscaling.simulator.fit_log import (
    LoggedRequest,
    Statistics,
    fit_log,
    law_from_series,
    log_metrics,
    parse_request_log,
    parse_statistics,
    replay_log,
)
from autoscaling.simulator.spec import EngineProfile, StepLaw
from deployments.simulation.profile_files import load_profile
from tests.data import data_dir, data_path
from tests.sim.closed_loop import closed_loop

BARS = {"tpot_mean_ms": 0.05, "tpot_p50_ms": 0.05, "e2e_p50_ms": 0.10, "ttft_p50_ms": 0.20}
"""Largest relative error on all requests of a log."""
STEP_BAR = 0.03
"""Largest mean relative error of step times."""
POINT_TOLERANCES = {"tpot": 0.10, "ttft": 0.35}
"""Largest mean relative error on the published serving points of one profile (no bar of the project)."""


@dataclass(frozen=True)
class Setup:
    """One logged run of vLLM 0.19: 300 ShareGPT requests at 10 a second."""

    log: str
    profile: str
    start: StepLaw
    """Where a fit starts: bytes over 0.8 of the bandwidth, FLOPs over half the peak; nothing of the log."""
    knots: tuple[int, ...] = ()
    """Batch sizes of a table that the per-second statistics give a start for; empty: the roofline is the start."""


SETUPS = (
    # 1,008 GB/s and 165 TFLOP/s; 16.06 GB of weights, 131,072 B of KV and 16.06 GFLOP a token.
    Setup("rtx4090_llama-31-8b", "rtx4090-llama-3.1-8b-bf16", StepLaw(19.9, 0.02, 0.1625, 0.195, 6.4)),
    # 1,792 GB/s and 504 TFLOP/s.
    Setup("rtxpro6000_llama-31-8b", "rtxpro6000-llama-3.1-8b-bf16", StepLaw(11.2, 0.02, 0.0914, 0.0637, 2.1)),
    # The same twice in lockstep; how many experts a batch touches decides what a step reads, hence the table.
    Setup(
        "rtxpro6000_qwen3-30b-a3b-instruct-2507",
        "rtxpro6000-qwen3-30b-a3b-bf16-dp2",
        StepLaw(12.0, 0.1, 0.0343, 0.0133, 1.6),
        (16, 64, 128, 256),
    ),
)

POINTS = (
    ("h100-llama-3.1-70b-fp8-tp2", "meta-llama/Llama-3.1-70B", "h100_sxm", 2),
    ("h100-llama-3.1-70b-fp8-tp4", "meta-llama/Llama-3.1-70B", "h100_sxm", 4),
    ("h200-llama-3.1-70b-fp8", "meta-llama/Llama-3.1-70B", "h200_sxm", 1),
    ("h200-llama-3.1-70b-fp8-tp2", "meta-llama/Llama-3.1-70B", "h200_sxm", 2),
)
"""Shipped profiles with measured serving points: profile, model, system and TP of the table."""


def read_log(name: str) -> list[LoggedRequest]:
    """Requests of one set-up."""
    path = data_path(f"calib/vllm019_{name}_requests.csv")
    assert path is not None, "main() looked for the folder"
    with path.open(encoding="utf-8") as lines:
        return parse_request_log(lines, path.name)


def read_series(name: str) -> list[Statistics]:
    """Per-second statistics of one set-up."""
    path = data_path(f"calib/vllm019_{name}_timeseries.csv")
    assert path is not None, "main() looked for the folder"
    with path.open(encoding="utf-8") as lines:
        return parse_statistics(lines, path.name)


def read_steps() -> dict[str, list[StepSample]]:
    """Measured steps of vLLM on H100, by run."""
    path = data_path("calib/blis_vllm_h100_step_cycle.csv")
    assert path is not None, "main() looked for the folder"
    runs: dict[str, list[StepSample]] = defaultdict(list)
    with path.open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            kv_tokens = float(row["kv_usage_gpu_ratio"]) * int(row["kv_blocks_total_gpu"]) * 16
            running = int(row["batch_num_prefill_reqs"]) + int(row["batch_num_decode_reqs"])
            step = StepSample(running, round(kv_tokens), int(row["batch_prefill_tokens"]), float(row["step_ms"]))
            runs[row["experiment_id"].split("-", 2)[2]].append(step)
    return runs


def main(arguments: Sequence[str]) -> int:
    """Print every table. Returns the exit code."""
    if data_path("calib/blis_vllm_h100_step_cycle.csv") is None:
        print(f"no calibration data in {data_dir()} (set TIDEGATE_DATA)")
        return 2
    missed: list[str] = []
    for setup in SETUPS:
        missed += compare_log(setup)
        if "--refit" in arguments:
            refit(setup)
    missed += compare_steps()
    missed += compare_points()
    print("\nevery bar is met" if not missed else "\nmissed: " + "; ".join(missed))
    return 1 if missed else 0


def compare_log(setup: Setup) -> list[str]:
    """One set-up: measured beside simulated. Returns the bars missed."""
    profile, log = load_profile(setup.profile), read_log(setup.log)
    run = replay_log(profile, log)
    half = len(log) // 2
    print(f"\n{setup.profile}: {len(log)} requests of vllm019_{setup.log}, law fitted to the first {half}")
    print(f"{'':14}{'measured':>12}{'simulated':>12}{'error':>9}{'held out':>10}{'bar':>7}")
    measured, simulated = log_metrics(log), log_metrics(run.requests)
    real, made = log_metrics(log[half:]), log_metrics(run.requests[half:])
    missed = []
    for key, value in measured.items():
        error, held_out, bar = simulated[key] / value - 1, made[key] / real[key] - 1, BARS.get(key)
        limit = f"{bar:.0%}" if bar else ""
        print(f"{key:14}{value:12,.1f}{simulated[key]:12,.1f}{error:+9.1%}{held_out:+10.1%}{limit:>7}")
        if bar and not abs(error) <= bar:
            missed.append(f"{setup.profile} {key} {error:+.1%}")
    series = read_series(setup.log)
    running, kv_share = max(s.running for s in series), max(s.kv_share for s in series)
    kv = f"{kv_share:.1%}" if kv_share else "unknown"
    print(f"{'running, peak':14}{running:12}{run.running_max:12}{run.running_max / running - 1:+9.1%}")
    print(f"{'KV used, peak':14}{kv:>12}{run.kv_share_max:12.1%}     ({run.preemptions} preemptions simulated)")
    return missed


def refit(setup: Setup) -> EngineProfile:
    """Fit the law again, from its start to the first half of the log, and print it."""
    log = read_log(setup.log)
    profile = replace(load_profile(setup.profile), law=setup.start)
    if setup.knots:
        series = read_series(setup.log)
        profile = replace(profile, law=law_from_series(series[: len(series) // 2], log, profile, setup.knots))
    start, found = replay_log(profile, log), fit_log(profile, log, len(log) // 2)
    before, real = log_metrics(start.requests), log_metrics(log)
    errors = ", ".join(f"{key} {before[key] / real[key] - 1:+.1%}" for key in BARS)
    print(f"refit: {found.simulations} simulations, rms {found.error_rms:.3f}, {found.profile.law}")
    print(f"       from the start, which was off by {errors}")
    return found.profile


def compare_steps() -> list[str]:
    """Step times: laws fitted to every other step, judged on the rest. Returns the bars missed."""
    print("\nstep times of vLLM on H100: mean relative error of the law")
    print(f"{'run':36}{'steps':>6}{'all':>8}{'held out':>10}{'p95':>7}{'bias':>8}{'bar':>6}   law")
    missed = []
    for name, steps in read_steps().items():
        fit = fit_steps(steps, batch_knots(steps))
        line, table = fit.law, ", ".join(f"{n}: {ms:.1f}" for n, ms in fit.law.batch)
        words = f"batch {{{table}}} c {line.c_ms:.4f} d {line.d_ms:.4f}"
        print(
            f"{name:36}{fit.seen.steps:6}{fit.seen.mean_share:8.2%}{fit.held_out.mean_share:10.2%}"
            f"{fit.seen.p95_share:7.1%}{fit.seen.bias_share:+8.2%}{STEP_BAR:6.0%}   {words}"
        )
        if max(fit.seen.mean_share, fit.held_out.mean_share) > STEP_BAR:
            missed.append(f"step times of {name} {fit.held_out.mean_share:.2%}")
    return missed


def read_points(model: str, system: str, tp: int) -> list[tuple[int, int, int, float, float]]:
    """Measured vLLM points: prompt, output, concurrency, TTFT ms, TPOT ms, by concurrency."""
    path = data_path("calib/aic_silicon_sample_agg.csv.gz")
    assert path is not None, "main() looked for the folder"
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return sorted(
            (int(float(row["isl"])), int(float(row["osl"])), int(float(row["batch_size"])),
             float(row["silicon_ttft_ms"]), float(row["silicon_tpot_ms"]))
            for row in csv.DictReader(lines)
            if row["backend"] == "vllm" and row["model_path"] == model and row["system"] == system
            and float(row["tp_size"]) == tp
        )  # fmt: skip


def compare_points() -> list[str]:
    """Published serving points in a closed loop. Returns the tolerances missed."""
    print("\nmeasured serving points (closed loop, 10 requests per stream), mean over the points with ISL/OSL up to 8k")
    print(f"{'profile':36}{'points':>7}{'TPOT error':>12}{'worst':>8}{'TTFT error':>12}{'worst':>8}")
    missed = []
    for name, model, system, tp in POINTS:
        profile = load_profile(name)
        tpot, ttft = [], []
        for prompt, output, streams, ttft_ms, tpot_ms in read_points(model, system, tp):
            made = closed_loop(profile, prompt, output, streams)
            tpot.append(made.tpot_ms / tpot_ms - 1)
            ttft.append(made.ttft_ms / ttft_ms - 1)
        worst_tpot, worst_ttft = max(tpot, key=abs), max(ttft, key=abs)
        mean_tpot, mean_ttft = (sum(map(abs, errors)) / len(errors) for errors in (tpot, ttft))
        print(f"{name:36}{len(tpot):7}{mean_tpot:12.1%}{worst_tpot:+8.1%}{mean_ttft:12.1%}{worst_ttft:+8.1%}")
        if mean_tpot > POINT_TOLERANCES["tpot"] or mean_ttft > POINT_TOLERANCES["ttft"]:
            missed.append(f"serving points of {name}: TPOT {mean_tpot:.1%}, TTFT {mean_ttft:.1%}")
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
