"""One simulated engine under open arrivals, with a batch tuner that sees its reports, or with settings that stand.

Gaps are known step by step, so that each request's own quantile can be judged as ``tests/bench/batch_goodput.py`` does.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

from autoscaling.simulator.engine import Job, SimEngine
from autoscaling.simulator.spec import EngineProfile, SimRequest
from autoscaling.simulator.workload.lengths import LogNormal
from policies.batching import BatchMove, BatchTuner, OfferedLoad
from policies.config import BatchingConfig, ObjectivesConfig
from policies.queueing import QUANTILE_WORTH
from policies.types import Knobs, ReplicaReport, ReplicaState, Sampled

SECOND_NS = 1_000_000_000
WINDOW_S = 10
REPORT_JITTER = 0.1


class Timed(SimEngine):
    """Remembers when each of its steps ended."""

    __slots__ = ("ends_ns",)

    def __init__(self, profile: EngineProfile, rng: Random) -> None:
        super().__init__(profile, rng)
        self.ends_ns: list[int] = []

    def _settle(self, ended: int, now_ns: int) -> None:
        run = self._run
        if run.steps == 1:
            self.ends_ns.append(now_ns)
        else:
            at_ns, step_ns = run.start_ns, run.first_ns
            for _ in range(ended):
                at_ns += step_ns
                step_ns += run.growth_ns
                self.ends_ns.append(at_ns)
        super()._settle(ended, now_ns)


@dataclass
class Kept:
    """Shares of all requests, with their first token in time, that kept their pace by the mean or by the quantile."""

    by_mean: float
    by_quantile: float
    moves: list[tuple[float, BatchMove]] = field(default_factory=list)
    """With the second of each."""

    @property
    def worth(self) -> float:
        """As ``policies/queueing.py`` weighs them."""
        return (1 - QUANTILE_WORTH) * self.by_mean + QUANTILE_WORTH * self.by_quantile

    def turns(self, knob: str) -> list[float]:
        """Seconds at which ``knob`` changed its direction."""
        found, last = [], 0
        for at_s, move in self.moves:
            before, after = getattr(move.before, knob), getattr(move.after, knob)
            if before is None or after is None or before == after:
                continue
            direction = 1 if after > before else -1
            if last == -direction:
                found.append(at_s)
            last = direction
        return found


def poisson(rate_ps: float, seconds: float, lengths: LogNormal, seed: int) -> list[SimRequest]:
    """Arrivals of one load."""
    rng, at_s = Random(f"{seed}/calls"), 0.0
    calls: list[SimRequest] = []
    while True:
        at_s += rng.expovariate(rate_ps)
        if at_s >= seconds:
            return calls
        prompt, output = lengths.draw(rng)
        calls.append(SimRequest(len(calls), round(at_s * SECOND_NS), prompt, output, block_tokens=16))


class EngineRun:
    """One run: arrivals, reports each second, the tuner's ticks, and its wish in force from the next report on."""

    def __init__(self, profile: EngineProfile, objectives: ObjectivesConfig, seed: int) -> None:
        self._profile, self._objectives = profile, objectives
        self._engine = Timed(profile, Random(f"{seed}/jitter"))
        self._rng = Random(f"{seed}/reports")
        self._window: deque[Sampled[ReplicaReport]] = deque()
        self._reported_ns = 0
        self._reports = 0
        self._jobs: list[Job] = []

    def play(self, calls: list[SimRequest], tuner: BatchTuner | None = None, knobs: Knobs | None = None) -> Kept:
        """Until the last arrival; what is open then is followed to its end."""
        engine, moves = self._engine, []
        plan = knobs or Knobs()
        engine.set_knobs(plan, 0)
        tick_ns, report_ns = SECOND_NS, self._next_report(0)
        for call in [*calls, None]:
            until_ns = call.arrival_ns if call is not None else calls[-1].arrival_ns + 1
            while min(tick_ns, report_ns) < until_ns:
                if report_ns <= tick_ns:
                    engine.set_knobs(plan, report_ns)
                    self._report(report_ns)
                    report_ns = self._next_report(report_ns)
                    continue
                if tuner is not None:
                    move = tuner.step(self._seen(tick_ns), tick_ns, OfferedLoad(refusing=False))
                    moves += [(tick_ns / SECOND_NS, move)] if move.changed else []
                    plan = tuner.wish
                tick_ns += SECOND_NS
            if call is not None:
                job = Job(call, call.output_tokens)
                self._jobs.append(job)
                engine.submit(job, call.arrival_ns)
        while (wake_ns := engine.wake_ns()) is not None:
            engine.advance(wake_ns)
        by_mean, by_quantile = map(sum, zip(*map(self._judge, self._jobs), strict=True))
        return Kept(by_mean / len(calls), by_quantile / len(calls), moves)

    def _next_report(self, now_ns: int) -> int:
        return now_ns + round(self._rng.uniform(1 - REPORT_JITTER, 1 + REPORT_JITTER) * SECOND_NS)

    def _seen(self, now_ns: int) -> list[Sampled[ReplicaReport]]:
        while self._window and self._window[0].received_ns < now_ns - WINDOW_S * SECOND_NS:
            self._window.popleft()
        return list(self._window)

    def _report(self, now_ns: int) -> None:
        engine, profile = self._engine, self._profile
        engine.advance(now_ns)
        gauges, window = engine.gauges(now_ns), engine.take_window(now_ns)
        self._reports += 1
        report = ReplicaReport(
            replica_id="r", model="m", seq=self._reports, window_ms=(now_ns - self._reported_ns) / 1e6,
            state=ReplicaState.READY, running=gauges.running, waiting=gauges.waiting,
            http_inflight=gauges.running + gauges.waiting, kv_tokens_used=gauges.kv_tokens_used,
            kv_tokens_max=gauges.kv_tokens_max, prefill_tokens=window.prefill_tokens,
            decode_tokens=window.decode_tokens, prefix_query_tokens=window.prefix_query_tokens,
            prefix_hit_tokens=window.prefix_hit_tokens, preemptions=window.preemptions, steps=window.steps,
            busy_share=None, gpu_utilisation_share=None, itl=window.itl, step_model=window.step_model,
            knobs=Knobs(gauges.running_seqs_now, gauges.step_tokens_now), running_seqs_hard=profile.running_seqs_max,
            step_tokens_hard=profile.step_tokens_max, finished=window.finished, aborted=window.aborted,
            cold_start_ms=None,
        )  # fmt: skip
        self._reported_ns = now_ns
        self._window.append(Sampled(report, now_ns))

    def _judge(self, job: Job) -> tuple[bool, bool]:
        """Whether a request kept both objectives by its mean gap, and by its gaps at the quantile."""
        first_ns, end_ns, objectives = job.first_token_ns, job.finished_ns, self._objectives
        assert first_ns is not None
        assert end_ns is not None
        if (first_ns - job.request.arrival_ns) / 1e6 > objectives.ttft_ms:
            return False, False
        ends_ns = self._engine.ends_ns
        inside = ends_ns[bisect_left(ends_ns, first_ns) : bisect_right(ends_ns, end_ns)]
        gaps_ns = sorted(b - a for a, b in pairwise(inside))
        if not gaps_ns:
            return True, True
        at_quantile_ns = gaps_ns[math.ceil(objectives.quantile * len(gaps_ns)) - 1]
        mean_ns = (end_ns - first_ns) / (job.output_tokens - 1)
        return mean_ns / 1e6 <= objectives.itl_ms, at_quantile_ns / 1e6 <= objectives.itl_ms


def tuned(profile: EngineProfile, calls: list[SimRequest], objectives: ObjectivesConfig, seed: int) -> Kept:
    """With a tuner from the start."""
    return EngineRun(profile, objectives, seed).play(calls, BatchTuner(BatchingConfig(), objectives))


def fixed(
    profile: EngineProfile, calls: list[SimRequest], objectives: ObjectivesConfig, seed: int, knobs: Knobs
) -> Kept:
    """With ``knobs`` all the time."""
    return EngineRun(profile, objectives, seed).play(calls, knobs=knobs)
