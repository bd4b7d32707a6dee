"""Turns step records and gauges of one replica into its report for one window.

    itl          one count per decoded sequence of each step, in the bucket of the step's duration: the gap streams saw
    busy_share   sum of step durations / window, at most 1
    step_model   learns from every step but the first :data:`WARM_UP_STEPS`, which pay for lazy set-up, and those that
                 verify drafts: what that costs is no part of the law, and a depth that moves is no change of the engine
    depth_use    steps that only decoded, by speculative depth and class of batch sizes

Token counts come from the step records, request and cache counts from the engine's totals. Records overwritten before
they were read are counted in :attr:`ReportBuilder.steps_lost`; the window's counts are then too low, never wrong.

It must not fill in what it does not know: no GPU reading is ``None``, not the busy share.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import add

from deployments.knobs import EngineGauges, EngineShared, StepRecord
from policies.measures import DepthUse, GpuReading, Roofline
from policies.speculation import batch_class
from policies.step_model import StepModel
from policies.types import (
    LATENCY_BOUNDS_MS,
    Histogram,
    Knobs,
    ReplicaId,
    ReplicaReport,
    ReplicaState,
    StepCoefficients,
)

WARM_UP_STEPS = 8


def itl_histogram(steps: Sequence[StepRecord]) -> Histogram:
    """Token gaps of all streams in ``steps``, in ms."""
    counts, total = [0] * (len(LATENCY_BOUNDS_MS) + 1), 0.0
    for step in steps:
        if step.decode_seqs:
            ms = step.duration_us / 1e3
            counts[bisect_left(LATENCY_BOUNDS_MS, ms)] += step.decode_seqs
            total += ms * step.decode_seqs
    return Histogram(tuple(counts), total)


def output_tokens(step: StepRecord) -> int:
    """Tokens the step generated."""
    return step.decode_seqs if step.output_tokens is None else step.output_tokens


def depth_use(steps: Sequence[StepRecord]) -> tuple[DepthUse, ...]:
    """Steps that only decoded, summed by depth and class of batch sizes."""
    sums: dict[tuple[int, int], list[int]] = {}
    for step in steps:
        if step.decode_seqs and not step.prefill_tokens:
            of_depth = sums.setdefault((step.depth, batch_class(step.decode_seqs)), [0] * 5)
            values = (1, step.decode_seqs, output_tokens(step), step.duration_us, step.draft_tokens)
            of_depth[:] = map(add, of_depth, values)
    return tuple(
        DepthUse(depth, batch_max, count, seqs, tokens, busy_us / 1e3, drafted)
        for (depth, batch_max), (count, seqs, tokens, busy_us, drafted) in sorted(sums.items())
    )


class ReportBuilder:
    """Keeps what must be remembered from one window to the next."""

    def __init__(
        self,
        replica_id: ReplicaId,
        model: str,
        prior: StepCoefficients,
        now_ns: int,
        roofline: Roofline | None = None,
    ) -> None:
        """The first window starts at ``now_ns``."""
        self._roofline = roofline
        self._replica_id = replica_id
        self._model = model
        self._step_model = StepModel(prior)
        self._window_start_ns = now_ns
        self._last = EngineGauges()
        self._read_seq = 0
        self._seq = 0
        self.steps_lost = 0
        """Step records overwritten before they were read, since the start."""

    def coefficients(self) -> StepCoefficients:
        """Step model as learned so far."""
        return self._step_model.coefficients()

    def build(
        self,
        shared: EngineShared,
        now_ns: int,
        *,
        state: ReplicaState,
        http_inflight: int,
        gpu: GpuReading | None,
        cold_start_ms: float | None,
        plan_seq: int | None,
    ) -> ReplicaReport:
        """Close the window at ``now_ns`` and open the next."""
        steps = self._read(shared)
        gauges, last = shared.read_gauges(), self._last
        window_ms = (now_ns - self._window_start_ns) / 1e6
        self._window_start_ns, self._last = now_ns, gauges
        self._seq += 1
        busy_ms = sum(step.duration_us for step in steps) / 1e3
        return ReplicaReport(
            replica_id=self._replica_id,
            model=self._model,
            seq=self._seq,
            window_ms=window_ms,
            state=state,
            running=gauges.running,
            waiting=gauges.waiting,
            http_inflight=http_inflight,
            kv_tokens_used=gauges.kv_tokens_used,
            kv_tokens_max=gauges.kv_tokens_max,
            prefill_tokens=sum(step.prefill_tokens for step in steps),
            decode_tokens=sum(output_tokens(step) for step in steps),
            prefix_query_tokens=gauges.prefix_query_tokens_total - last.prefix_query_tokens_total,
            prefix_hit_tokens=gauges.prefix_hit_tokens_total - last.prefix_hit_tokens_total,
            preemptions=gauges.preemptions_total - last.preemptions_total,
            steps=len(steps),
            busy_share=min(1.0, busy_ms / window_ms) if window_ms > 0 else None,
            gpu_utilisation_share=gpu.sm_share if gpu is not None else None,
            itl=itl_histogram(steps),
            step_model=self.coefficients(),
            knobs=Knobs(gauges.running_seqs_now, gauges.step_tokens_now, gauges.speculative_depth_now),
            running_seqs_hard=gauges.running_seqs_hard,
            step_tokens_hard=gauges.step_tokens_hard,
            finished=gauges.finished_total - last.finished_total,
            aborted=gauges.aborted_total - last.aborted_total,
            cold_start_ms=cold_start_ms,
            plan_seq=plan_seq,
            draft_tokens=sum(step.draft_tokens for step in steps),
            accepted_tokens=sum(step.accepted_tokens for step in steps),
            depth_use=depth_use(steps) if gauges.speculative_depth_now is not None else (),
            speculative_depth_hard=gauges.speculative_depth_hard or None,
            gpu=gpu,
            roofline=self._roofline,
        )

    def _read(self, shared: EngineShared) -> list[StepRecord]:
        """New steps, after the model has learned from them."""
        steps, self._read_seq, lost = shared.read_steps(self._read_seq)
        self.steps_lost += lost
        for step in steps:
            if step.seq > WARM_UP_STEPS and not step.draft_tokens:
                self._step_model.observe(step.running, step.kv_tokens, step.prefill_tokens, step.duration_us / 1e3)
        return steps
