"""A tiny pure fleet that feeds ``tick``: fluid engines that obey the step law, one gateway, Serve's numbers.

Each engine runs up to its running-sequence knob, decodes at the step model's pace and computes prompts within its token
budget; what does not fit waits. Good enough to close the loop, exact in nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from autoscaling.recommend import ReplicaScaler
from policies.config import PolicyConfig
from policies.control.loop import ControlState, TickResult, tick
from policies.step_model import predict_step_ms
from policies.types import (
    LATENCY_BOUNDS_MS,
    FleetView,
    GatewayReport,
    Histogram,
    Knobs,
    ReplicaReport,
    ReplicaState,
    StepCoefficients,
)

CPU_STEP = StepCoefficients(a_ms=25.0, b_ms=2.0, c_ms=0.5, d_ms=1.9, samples=1_000, error_share=0.02)
"""About one core with SmolLM2-135M: 60 ms at batch 16, 1.9 ms per prompt token."""

SECOND_NS = 1_000_000_000


def histogram(*values_ms: float) -> Histogram:
    counts = [0] * (len(LATENCY_BOUNDS_MS) + 1)
    for value in values_ms:
        counts[next((i for i, b in enumerate(LATENCY_BOUNDS_MS) if value <= b), len(LATENCY_BOUNDS_MS))] += 1
    return Histogram(tuple(counts), sum(values_ms))


def replica_report(replica_id: str = "r1", seq: int = 1, **changes: Any) -> ReplicaReport:
    values: dict[str, Any] = {
        "replica_id": replica_id,
        "model": "m",
        "seq": seq,
        "window_ms": 1_000.0,
        "state": ReplicaState.READY,
        "running": 0,
        "waiting": 0,
        "http_inflight": 0,
        "kv_tokens_used": 0,
        "kv_tokens_max": 40_000,
        "prefill_tokens": 0,
        "decode_tokens": 0,
        "prefix_query_tokens": 0,
        "prefix_hit_tokens": 0,
        "preemptions": 0,
        "steps": 0,
        "busy_share": 0.0,
        "gpu_utilisation_share": None,
        "itl": Histogram(),
        "step_model": CPU_STEP,
        "knobs": Knobs(16, 2_048, None),
        "running_seqs_hard": 16,
        "step_tokens_hard": 2_048,
        "finished": 0,
        "aborted": 0,
        "cold_start_ms": None,
    }
    return ReplicaReport(**(values | changes))


def gateway_report(gateway_id: str = "g1", seq: int = 1, **changes: Any) -> GatewayReport:
    values: dict[str, Any] = {
        "gateway_id": gateway_id,
        "model": "m",
        "seq": seq,
        "window_ms": 1_000.0,
        "ttft": Histogram(),
        "itl": Histogram(),
        "e2e": Histogram(),
        "arrivals": 0,
        "succeeded": 0,
        "failed": {},
        "prompt_tokens": 0,
        "output_tokens": 0,
        "inflight": 0,
        "queued": 0,
        "routed": {},
        "predicted_prompt_tokens": {},
        "predicted_hit_tokens": {},
        "ttft_error_ms": Histogram(),
    }
    return GatewayReport(**(values | changes))


@dataclass
class Engine:
    """One fluid engine."""

    replica_id: str
    ready_ns: int
    waiting: float = 0.0
    running: float = 0.0
    knobs: Knobs = field(default_factory=lambda: Knobs(16, 2_048, None))
    seq: int = 0

    def advance(self, arriving: float, prompt_tokens: int, output_tokens: int) -> ReplicaReport:
        """One second of work."""
        self.seq += 1
        self.waiting += arriving
        seqs_max = min(16, self.knobs.running_seqs_max or 16)
        left_ms, prefill_tokens, decoded, steps, finished = 1_000.0, 0.0, 0.0, 0, 0.0
        step_ms = 0.0
        while left_ms > 1e-6 and (self.waiting > 1e-9 or self.running > 1e-9):
            chunk = min((self.knobs.step_tokens_max or 2_048) - self.running, self.waiting * prompt_tokens)
            chunk = max(0.0, chunk if self.running < seqs_max else 0.0)
            step_ms = predict_step_ms(CPU_STEP, self.running, self.running * 300, chunk)
            share = min(1.0, left_ms / step_ms)
            left_ms -= step_ms * share
            started = min(chunk * share / prompt_tokens, self.waiting)
            done = min(self.running, self.running * share / output_tokens)
            decoded += self.running * share
            prefill_tokens += chunk * share
            self.waiting -= started
            self.running += started - done
            if self.running < 0.05 and self.waiting < 1e-9:  # a fluid never quite runs dry
                self.running = 0.0
            finished += done
            steps += 1
        busy = 1 - left_ms / 1_000
        return replica_report(
            self.replica_id,
            self.seq,
            running=round(self.running),
            waiting=round(self.waiting),
            kv_tokens_used=round(self.running * 300),
            prefill_tokens=round(prefill_tokens),
            decode_tokens=round(decoded),
            steps=steps,
            busy_share=busy,
            itl=histogram(*[step_ms] * round(decoded)),
            knobs=self.knobs,
            finished=round(finished),
            prefix_query_tokens=round(prefill_tokens),
        )


class TinyFleet:
    """Engines behind one gateway, steered by the real control loop."""

    def __init__(
        self, config: PolicyConfig, *, start_s: float = 5.0, prompt_tokens: int = 100, output_tokens: int = 60
    ) -> None:
        self.config = config
        self.state = ControlState(config, ReplicaScaler(config), "epoch")
        self.now_ns = 1_000 * SECOND_NS
        self.start_s = start_s
        self.prompt_tokens, self.output_tokens = prompt_tokens, output_tokens
        self.engines = [Engine("r1", self.now_ns)]
        self.target = 1
        self.seq = 0
        self.mute: set[str] = set()
        """Replica ids and ``gateway`` and ``fleet``: these say nothing."""
        self.results: list[TickResult] = []
        self.targets: list[int] = []

    def second(self, rate_ps: float) -> TickResult:
        """One second of load, reports, one tick, and what Serve makes of it."""
        self.now_ns += SECOND_NS
        self.seq += 1
        ready = [e for e in self.engines if e.ready_ns <= self.now_ns]
        reports = [e.advance(rate_ps / len(ready), self.prompt_tokens, self.output_tokens) for e in ready]
        for report in reports:
            if report.replica_id not in self.mute:
                self.state.receive_replica(report, self.now_ns)
        if "gateway" not in self.mute:
            self.state.receive_gateway(self._gateway_report(rate_ps, reports), self.now_ns)
        if "fleet" not in self.mute:
            self.state.receive_fleet(
                FleetView(len(ready), self.target, 1, self.config.scaling.replicas_max), self.now_ns
            )
        result = tick(self.state, self.now_ns)
        self._follow(result)
        self.results.append(result)
        self.targets.append(self.target)
        return result

    def run(self, seconds: int, rate_ps: float | Callable[[], float]) -> None:
        for _ in range(seconds):
            self.second(rate_ps() if callable(rate_ps) else rate_ps)

    def _gateway_report(self, rate_ps: float, reports: list[ReplicaReport]) -> GatewayReport:
        waiting = sum(r.waiting for r in reports)
        ttft_ms = 200.0 + 1_000.0 * waiting / max(1.0, rate_ps)
        return gateway_report(
            seq=self.seq,
            arrivals=round(rate_ps),
            routed={"r1": round(rate_ps)},
            predicted_prompt_tokens={"r1": round(rate_ps) * self.prompt_tokens},
            output_tokens=sum(r.finished for r in reports) * self.output_tokens,
            succeeded=sum(r.finished for r in reports),
            inflight=sum(r.running + r.waiting for r in reports),
            ttft=histogram(*[ttft_ms] * round(rate_ps)),
        )

    def _follow(self, result: TickResult) -> None:
        if result.plan.replicas_target is not None:
            self.target = result.plan.replicas_target
        while len(self.engines) < self.target:
            name = f"r{1 + max(int(e.replica_id[1:]) for e in self.engines)}"
            self.engines.append(Engine(name, self.now_ns + int(self.start_s * SECOND_NS)))
        while len(self.engines) > self.target:
            gone = self.engines.pop()
            self.engines[0].waiting += gone.waiting
        for engine in self.engines:
            wish = result.plan.knobs.get(engine.replica_id)
            if wish is not None:
                engine.knobs = Knobs(wish.running_seqs_max or 16, wish.step_tokens_max or 2_048, None)


def decisions(fleet: TinyFleet, lever: str) -> list[Any]:
    return [d for r in fleet.results for d in r.decisions if d.lever == lever]


def noisy(rate_ps: float, share: float, seed: int) -> Callable[[], float]:
    rng = random.Random(seed)
    return lambda: rate_ps * rng.uniform(1 - share, 1 + share)
