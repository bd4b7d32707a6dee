"""Clients in a closed loop against one simulated engine, as serving benchmarks measure: an answer, then the next."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random

from autoscaling.simulator.engine import Job, SimEngine
from autoscaling.simulator.spec import EngineProfile, SimRequest

LENGTH_SHARE_MIN = 0.8
"""Lengths are drawn from this share of the nominal one up to it, as InferenceX does (random-range-ratio 0.8)."""


@dataclass(frozen=True)
class Point:
    """Means over all requests of a closed loop."""

    ttft_ms: float
    tpot_ms: float
    output_tps: float


def closed_loop(profile: EngineProfile, prompt: int, output: int, streams: int, per_stream: int = 10) -> Point:
    """``streams`` clients, all of which start at once, and ``per_stream`` requests for each."""
    engine, rng = SimEngine(profile, Random("0/jitter"), learn=False), Random("0/lengths")
    left = streams * per_stream
    jobs: list[Job] = []
    due: list[tuple[int, int]] = []
    for i in range(streams):
        heappush(due, (0, i))
    overhead_ns = round(profile.request_overhead_ms * 1e6)
    after_ns = round(profile.first_token_overhead_ms * 1e6)
    while due or engine.wake_ns() is not None:
        wake_ns = engine.wake_ns()
        if due and (wake_ns is None or due[0][0] <= wake_ns):
            now_ns, index = heappop(due)
            sent, wanted = (max(2, round(n * rng.uniform(LENGTH_SHARE_MIN, 1.0))) for n in (prompt, output))
            job = Job(SimRequest(index, now_ns, sent, wanted, block_tokens=profile.block_tokens), wanted)
            left -= 1
            jobs.append(job)
            engine.submit(job, now_ns)
            continue
        assert wake_ns is not None
        for event in engine.advance(wake_ns):
            if event.kind == "finished" and left > len(due):
                heappush(due, (event.at_ns + after_ns + overhead_ns, len(jobs) + len(due)))
    ttft, tpot = 0.0, 0.0
    for job in jobs:
        assert job.first_token_ns is not None
        assert job.finished_ns is not None
        ttft += (job.first_token_ns - job.request.arrival_ns + overhead_ns + after_ns) / 1e6
        tpot += (job.finished_ns - job.first_token_ns) / 1e6 / (job.output_tokens - 1)
    end_ns = max(job.finished_ns or 0 for job in jobs)
    return Point(ttft / len(jobs), tpot / len(jobs), sum(job.output_tokens for job in jobs) / end_ns * 1e9)
