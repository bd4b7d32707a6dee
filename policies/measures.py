"""Readings that travel in reports: devices, rooflines, speculation, and counts by class and tenant.

Values only, with units last in names; ``None`` is unknown, 0 is zero. What this must not do: decide, or read anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class StartPhase(StrEnum):
    """What a replica's start is made of, in order."""

    SCHEDULE = "schedule"
    """From the wish for it to its process: finding room, and starting a node where there is none."""
    PROCESS = "process"
    """From its process to its engine's construction: the interpreter, and what is imported first."""
    LOAD = "load"
    """The engine's own start but for compiling: its imports, the weights, the KV cache, its warm-up steps."""
    COMPILE = "compile"
    """Of the engine's own start: what it says it spent on compiling; absent where it runs eagerly."""
    OPEN = "open"
    """From the engine's readiness to the port that takes requests."""
    FIRST_TOKEN = "first_token"  # noqa: S105 - a phase, no secret
    """From the open port to the first byte of an answer; waits for the first request."""


@dataclass(frozen=True, slots=True)
class StartReport:
    """What a replica says of its start: each second while it starts, then once at its end and at its first token."""

    replica_id: str
    model: str
    phase: StartPhase
    """Under way; :attr:`StartPhase.FIRST_TOKEN` once the port is open."""
    age_ms: float
    """Since its process began; stands still once its port is open."""
    phases_ms: Mapping[StartPhase, float] = field(default_factory=dict)
    """Phases that are over."""
    failed: str = ""
    """Why the start failed, in a few words; empty: it did not."""


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One reading over all devices of a replica; shares are means, temperature is the hottest, counts are sums.

    Source of the fields: NVML API reference. ``None`` wherever a device does not say.
    """

    sm_share: float | None = None
    """Share of the last sample period in which a kernel ran (``nvmlUtilization_t.gpu``)."""
    memory_share: float | None = None
    """Share of it in which device memory was read or written (``nvmlUtilization_t.memory``)."""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    throttle: tuple[str, ...] = ()
    """Reasons why clocks are held down that cost speed, in NVML's words, sorted."""
    ecc_errors: int | None = None
    """Uncorrected memory errors since the last reset."""
    xid_errors: int | None = None
    """Critical XID events since the sensor started."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """What a replica's device could do at best, and what the model costs on it."""

    flops_per_s: float
    """Dense matrix throughput at the model's precision."""
    bytes_per_s: float
    """Memory bandwidth."""
    flops_per_token: float
    """About 2 x active parameters."""
    weight_bytes: float
    """Read in every step."""
    kv_bytes_per_token: float


@dataclass(frozen=True, slots=True)
class DepthUse:
    """Steps of one window that only decoded, at one speculative depth and in one class of batch sizes."""

    depth: int
    batch_max: int
    """Upper bound of the class: the least power of two that holds the batch."""
    steps: int
    seqs: int
    """Sequences decoded, summed over steps."""
    tokens: int
    """Tokens they got."""
    busy_ms: float
    drafted: int = 0
    """Draft tokens these steps verified."""


@dataclass(frozen=True, slots=True)
class ClassCounts:
    """One class of requests at one gateway in one window."""

    arrivals: int = 0
    succeeded: int = 0
    met: int = 0
    """Succeeded within TTFT, token gap and end-to-end objectives of their class."""
    refused: int = 0
    """For want of capacity; what a limit of its own tenant or task refused does not count."""
    failed: int = 0
    """Ended without success for a fault of ours: neither refused nor cancelled."""
    abandoned: int = 0
    """Cancelled by clients that had waited for their first byte past the objective."""
    late_ttft: int = 0
    """Succeeded, but with the first token after its objective."""
    late_itl: int = 0
    """Succeeded, but with a mean token gap above its objective."""
    late_e2e: int = 0
    """Succeeded, but whole after its objective or deadline."""

    @property
    def demand(self) -> int:
        """Requests that ended and count: all but those withdrawn by their clients or refused by their own limits."""
        return self.succeeded + self.refused + self.failed + self.abandoned


@dataclass(frozen=True, slots=True)
class TenantCounts:
    """One tenant at one gateway in one window; the smallest are summed under ``other``."""

    arrivals: int = 0
    succeeded: int = 0
    met: int = 0
    refused: int = 0
    tokens: int = 0
    """Prompt plus output."""
