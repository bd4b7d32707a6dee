"""The sample a replica gives the routers: its keys, once for whoever writes and for whoever reads one.

It travels through Serve's routing statistics as a flat mapping of plain values. Written by live and by simulated
replicas, read by :mod:`policies.routing.fleet`.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

from policies.types import ReplicaState, StepCoefficients

COUNT_KEYS = (
    "running", "waiting", "prefill_backlog_tokens", "kv_tokens_used", "kv_tokens_max", "running_seqs_max",
    "step_tokens_max",
)  # fmt: skip
"""Counts, in the order of :class:`Gauges`."""

STEP_KEYS = ("step_a_ms", "step_b_ms", "step_c_ms", "step_d_ms")
"""Coefficients of the step model."""


Sample: TypeAlias = dict[str, int | float | str]


class Gauges(Protocol):
    """What is asked of an engine's state; see the fields of ``deployments.knobs.EngineGauges``."""

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        ...

    @property
    def waiting(self) -> int:
        """Sequences that wait."""
        ...

    @property
    def prefill_backlog_tokens(self) -> int:
        """Prompt tokens still to be computed."""
        ...

    @property
    def kv_tokens_used(self) -> int:
        """KV cache in use."""
        ...

    @property
    def kv_tokens_max(self) -> int:
        """KV cache there is."""
        ...

    @property
    def running_seqs_now(self) -> int:
        """Most sequences in a batch, in force."""
        ...

    @property
    def step_tokens_now(self) -> int:
        """Token budget of a step, in force."""
        ...


def sample(seq: int, state: ReplicaState, gauges: Gauges, step: StepCoefficients) -> Sample:
    """One sample. ``seq`` grows with each, so that a receiver can tell new from repeated."""
    counts = (
        gauges.running,
        gauges.waiting,
        gauges.prefill_backlog_tokens,
        gauges.kv_tokens_used,
        gauges.kv_tokens_max,
        gauges.running_seqs_now,
        gauges.step_tokens_now,
    )
    return {
        "seq": seq,
        "state": state.value,
        **dict(zip(COUNT_KEYS, counts, strict=True)),
        **dict(zip(STEP_KEYS, (step.a_ms, step.b_ms, step.c_ms, step.d_ms), strict=True)),
        "step_samples": step.samples,
    }
