"""What goes into a modelled engine and what comes out: jobs, events, gauges, counts of one window.

Plain values and one mutable record, :class:`Job`; its public fields are read by the world, the others belong to the
engine. No rule of the engine is here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from autoscaling.simulator.gaps import GapCounts
from autoscaling.simulator.spec import SimRequest
from policies.measures import DepthUse
from policies.types import Histogram, StepCoefficients


class Phase(IntEnum):
    """Where a job is."""

    WAITING = 0
    PREFILL = 1
    DECODE = 2
    OVER = 3


class Job:
    """One request inside an engine.

    ``prefill_only``: it ends with its first token (role ``prefill``). ``kv_ready``: the KV cache of its prompt came
    with it, so that blocks are taken and only the last prompt token is computed (role ``decode``); once preempted it
    computes everything, like any other.
    """

    __slots__ = (
        "aborted", "cached_tokens", "computed", "counter_shift", "finished_ns", "first_token_ns",
        "kv_ready", "left_over", "next_unit", "order", "output_done", "output_tokens", "phase", "preemptions",
        "prefill_only", "ready_step", "request", "unit_blocks", "units",
    )  # fmt: skip

    def __init__(
        self, request: SimRequest, output_tokens: int, *, prefill_only: bool = False, kv_ready: bool = False
    ) -> None:
        """``output_tokens`` is what the engine will write, at least 1."""
        self.request = request
        self.output_tokens = 1 if prefill_only else max(1, output_tokens)
        self.prefill_only = prefill_only
        self.kv_ready = kv_ready
        self.cached_tokens = 0
        """Prompt tokens that the prefix cache spared at the first admission."""
        self.preemptions = 0
        self.output_done = 0
        """Tokens written; exact at every event, abort and preemption, see ``SimEngine.output_done`` in between."""
        self.first_token_ns: int | None = None
        self.finished_ns: int | None = None
        self.aborted = False
        # --- the engine's own
        self.phase = Phase.WAITING
        self.order = -1
        """Number of its admission; grows from one to the next."""
        self.ready_step = 0
        """First step that may admit it."""
        self.computed = 0
        """Tokens in the KV cache; while it decodes: that, less the engine's step counter."""
        self.counter_shift = 0
        """While it decodes: step counter less tokens written."""
        self.units: list[int] = []
        """Findable prefix blocks it holds."""
        self.unit_blocks = 1
        self.next_unit = 0
        """First prompt block not offered to the prefix cache yet."""
        self.left_over: object | None = None
        """Name of the blocks it left behind when it was preempted."""


@dataclass(slots=True)
class EngineEvent:
    """A job has its first token, or its last."""

    at_ns: int
    kind: Literal["first_token", "finished"]
    job: Job


@dataclass(slots=True)
class EngineGauges:
    """State of an engine, as a live one shows it (``deployments.knobs.EngineGauges``)."""

    running: int
    waiting: int
    kv_tokens_used: int
    """In whole blocks."""
    kv_tokens_max: int
    prefill_backlog_tokens: int
    """Prompt tokens of waiting and running jobs that are still to be computed."""
    running_seqs_now: int
    step_tokens_now: int


@dataclass(slots=True)
class EngineWindow:
    """What an engine did since it was last asked."""

    prefill_tokens: int
    decode_tokens: int
    """Tokens written, first ones included."""
    prefix_query_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    steps: int
    busy_ms: float
    itl: Histogram
    """One count per decoding job and step, in the bucket of the step's duration: what a live replica reports."""
    gaps: GapCounts
    """The same in fine buckets, for the run's report."""
    finished: int
    aborted: int
    step_model: StepCoefficients
    depth_use: tuple[DepthUse, ...] = ()
    draft_tokens: int = 0
    accepted_tokens: int = 0
