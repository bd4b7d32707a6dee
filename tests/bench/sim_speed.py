"""Speed of the simulator on one core: ``python -m tests.bench.sim_speed [--quick] [trace] [million]``.

* ``trace``: the whole Mooncake conversation trace, 12,031 requests over 64 replicas; under 20 s is wanted.
* ``million``: a million requests of about 900 + 155 tokens with shared prefixes over 1,000 replicas and 8 gateways,
  with samples and reports of all of them each second and a controller that ticks; under 15 minutes and 2 GiB is wanted.
  ``--quick`` makes 10,000 and 50,000 of them and says what a million would take at the pace of those between: what it
  takes to start the fleet, and to wait for the longest answers at the end, is in both and not counted twice.

Each part is a process of its own. Prints wall time, CPU time, events and requests per second, and the largest resident
set.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

from autoscaling.simulator.records import RunResult
from autoscaling.simulator.spec import Pool, Scenario, SimRequest, Source
from autoscaling.simulator.workload.lengths import LogNormal
from autoscaling.simulator.world import run
from deployments.simulation.files import open_trace
from deployments.simulation.profile_files import load_profile
from policies.config import AdmissionConfig, PolicyConfig
from tests.data import data_path

TRACE = "traces/mooncake_conversation.jsonl.gz"
PROFILE = "h100-llama-3.1-8b-bf16"
MILLION, QUICK, FEW = 1_000_000, 50_000, 10_000
REPLICAS, GATEWAYS, PER_REPLICA_PS = 1_000, 8, 8.0
BLOCK_TOKENS = 128
GROUPS = 500
"""Shared prefixes of four blocks; the n-th is asked for 1/n as often as the first."""


class SharedPrefixes:
    """Poisson arrivals, log-normal lengths, and a prefix that many share."""

    name = "shared prefixes"

    def __init__(self, rng: Random, requests: int) -> None:
        self._rng, self._requests = rng, requests
        self._prefixes = [tuple(rng.getrandbits(64) for _ in range(4)) for _ in range(GROUPS)]
        self._lengths = LogNormal(900, 155)

    def arrivals(self) -> Iterator[SimRequest]:
        """Made while they are read."""
        rng, now_s = self._rng, 0.0
        for index in range(self._requests):
            now_s += rng.expovariate(REPLICAS * PER_REPLICA_PS)
            prompt_tokens, output_tokens = self._lengths.draw(rng)
            prefix = self._prefixes[int(GROUPS ** rng.random()) - 1]
            own = [rng.getrandbits(64) for _ in range(prompt_tokens // BLOCK_TOKENS - len(prefix))]
            blocks = (*prefix, *own)[: prompt_tokens // BLOCK_TOKENS]
            yield SimRequest(index, round(now_s * 1e9), prompt_tokens, output_tokens, blocks, BLOCK_TOKENS)

    def follow_ups(self, request: SimRequest, succeeded: bool, now_ns: int) -> Sequence[SimRequest]:
        """None."""
        return ()


def million(requests: int) -> Scenario:
    """The large scenario with so many requests."""

    def source(rng: Random) -> Source:
        return SharedPrefixes(rng, requests)

    config = PolicyConfig(admission=AdmissionConfig(inflight_requests_max=20_000, inflight_tokens_max=100_000_000))
    return Scenario(
        "million", source, (Pool(load_profile(PROFILE), REPLICAS),), seed=1, config=config, gateways=GATEWAYS
    )


def trace() -> Scenario | None:
    """The trace on 64 replicas; ``None`` where it is absent."""
    path = data_path(TRACE)
    if path is None:
        return None
    return Scenario("trace", open_trace(path), (Pool(load_profile(PROFILE), 64),), seed=1)


def _report(result: RunResult, wall_s: float) -> None:
    requests, events = len(result.records), result.counters["events"]
    rss_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    counts = ", ".join(f"{result.counters[k]:,} {k}" for k in ("succeeded", "refused", "failed", "lost"))
    print(f"{result.scenario}: {requests:,} requests ({counts}) in {result.end_ns / 1e9:,.0f} simulated s")
    print(
        f"  {wall_s:,.1f} s wall, {time.process_time():,.1f} s CPU with start, {requests / wall_s:,.0f} requests/s, "
        f"{events / wall_s:,.0f} events/s ({events:,}), {rss_mib:,.0f} MiB"
    )


def _timed(scenario: Scenario) -> float:
    begin = time.perf_counter()
    result = run(scenario)
    wall_s = time.perf_counter() - begin
    _report(result, wall_s)
    return wall_s


def _measure(part: str, quick: bool) -> None:
    if part == "million" and quick:
        few_s, many_s = (_timed(replace(million(n), name=f"million ({n:,})")) for n in (FEW, QUICK))
        whole_s = many_s + (many_s - few_s) / (QUICK - FEW) * (MILLION - QUICK)
        print(f"  extrapolated: {MILLION:,} requests in {whole_s / 60:,.1f} minutes")
        return
    scenario = million(MILLION) if part == "million" else trace()
    if scenario is None:
        print(f"trace: {TRACE} is absent (set TIDEGATE_DATA)")
    else:
        _timed(scenario)


def main() -> int:
    """Run the parts that are asked for, both by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["trace", "million"], default=["trace", "million"])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK:,} requests, extrapolated")
    asked = parser.parse_args()
    for part in asked.parts:
        process = multiprocessing.get_context("spawn").Process(target=_measure, args=(part, asked.quick))
        process.start()
        process.join()
        if process.exitcode:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
