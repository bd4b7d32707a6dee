"""Utilisation ratio: what a replica's device does of what it could do, and which of its limits holds it.

For the busy time of a window, with the roofline of device and model::

    compute_share = tokens computed * FLOPs per token / (peak FLOP/s * busy seconds)
    memory_share  = (steps * weight bytes + steps * KV tokens held * KV bytes per token) / (peak bytes/s * busy seconds)

The larger one binds: *compute* or *memory*. Below :data:`OVERHEAD_SHARE` neither does, and what costs time is the rest
of a step (launches, host, communication): *overhead*. Source: roofline model, Williams, Waterman and Patterson (CACM
52(4), 2009); FLOPs per token are 2 x active parameters, without attention, so compute is a little low on long prompts.

Where device or model is unknown, the step model says which: the share of a step's time that grows with the tokens it
computes, ``(b*running + d*prefill) / step``, is compute; the rest, reading weights and KV cache (``a + c*kv``), memory.

NVML is the check. Its figures are shares of all time in which the device did something, not how much: what moved can
never exceed them. Where the estimate does, by more than :data:`TOLERANCE`, the roofline is wrong for this replica and
the step model's word is taken.

What this must not do: decide, or fill in a device that is not in the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from policies.measures import GpuReading, Roofline
from policies.types import StepCoefficients

OVERHEAD_SHARE = 0.2
"""Neither limit binds while both shares are below this."""
TOLERANCE = 0.15
"""By so much an estimate may exceed NVML's figure: the two are taken over different windows."""
SAMPLES_MIN = 32
"""Steps a step model must have seen before it says what binds."""


class Bound(StrEnum):
    """What limits a replica's steps."""

    COMPUTE = "compute"
    MEMORY = "memory"
    OVERHEAD = "overhead"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Device:
    """What one device can do at best."""

    bytes_per_s: float
    """Memory bandwidth."""
    flops_16_per_s: float
    """Dense matrix throughput at bf16 or fp16."""
    flops_8_per_s: float | None
    """At fp8; ``None``: the device has none."""


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """What one model costs."""

    parameters: float
    active_parameters: float
    """Used for one token: all of a dense model, the chosen experts of a mixture."""
    weight_bits: int
    """Of one parameter: 16, or 8 after quantisation."""
    kv_bytes_per_token: float


@dataclass(frozen=True, slots=True)
class Load:
    """What a replica did in a window."""

    tokens: float
    """Prompt tokens computed and tokens decoded."""
    prefill_tokens: float
    steps: int
    running: float
    """Sequences in a step, on average."""
    kv_tokens: float
    """Held, on average."""
    busy_s: float
    busy_share: float


@dataclass(frozen=True, slots=True)
class Utilisation:
    """The utilisation ratio of one replica over its busy time. Shares are in [0, 1] unless the roofline is wrong."""

    compute_share: float | None
    """``None``: device or model are not known."""
    memory_share: float | None
    bound: Bound
    token_share: float | None = None
    """Share of the time of a step that grows with the tokens it computes, by the step model."""
    nvml_agrees: bool | None = None
    """Whether NVML's figures allow the estimate; ``None``: there are none, or no estimate."""

    @property
    def ratio(self) -> float | None:
        """Share of the limit that binds; ``None`` where it is not known."""
        if self.compute_share is None or self.memory_share is None:
            return None
        return max(self.compute_share, self.memory_share)


_H100 = Device(3.35e12, 989e12, 1_978e12)
_H200 = Device(4.8e12, 989e12, 1_978e12)
_A100_80 = Device(2.039e12, 312e12, None)
_L40S = Device(0.864e12, 362.05e12, 733e12)
_L4 = Device(0.3e12, 121e12, 242e12)

DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "NVIDIA H100 80GB HBM3": _H100,
        "NVIDIA H200": _H200,
        "NVIDIA A100-SXM4-80GB": _A100_80,
        "NVIDIA L40S": _L40S,
        "NVIDIA L4": _L4,
        "H100": _H100,
        "H200": _H200,
        "A100": _A100_80,
        "L40S": _L40S,
        "L4": _L4,
    }
)
"""By NVML's product name, and by the short name of the simulator's profiles. Source: aiconfigurator-core 0.12.0
(Apache-2.0), ``systems/{a100_sxm,h100_sxm,h200_sxm,l40s,l4}.yaml``. Other forms of these chips (PCIe, NVL) differ
and are not here."""


def roofline_of(device_name: str, devices: int, model: ModelFigures | None) -> Roofline | None:
    """Roofline of a replica on ``devices`` like devices; ``None`` where one of the two is not known."""
    device = DEVICES.get(device_name)
    if device is None or model is None or devices < 1:
        return None
    narrow = model.weight_bits <= 8 and device.flops_8_per_s is not None
    flops = device.flops_8_per_s if narrow and device.flops_8_per_s is not None else device.flops_16_per_s
    return Roofline(
        flops_per_s=flops * devices,
        bytes_per_s=device.bytes_per_s * devices,
        flops_per_token=2 * model.active_parameters,
        weight_bytes=model.parameters * model.weight_bits / 8,
        kv_bytes_per_token=model.kv_bytes_per_token,
    )


def utilisation(
    load: Load, roofline: Roofline | None, step: StepCoefficients | None, gpu: GpuReading | None = None
) -> Utilisation | None:
    """The ratio over a window; ``None`` where the replica did nothing in it, or nothing is known of it."""
    if load.steps <= 0 or not load.busy_s > 0:
        return None
    by_step = _token_share(load, step)
    of_step = Bound.UNKNOWN if by_step is None else Bound.COMPUTE if by_step >= 0.5 else Bound.MEMORY
    if roofline is None:
        return None if by_step is None else Utilisation(None, None, of_step, by_step)
    compute = load.tokens * roofline.flops_per_token / (roofline.flops_per_s * load.busy_s)
    bytes_read = load.steps * (roofline.weight_bytes + load.kv_tokens * roofline.kv_bytes_per_token)
    memory = bytes_read / (roofline.bytes_per_s * load.busy_s)
    agrees = _agrees(compute * load.busy_share, memory * load.busy_share, gpu)
    if agrees is False:
        bound = of_step
    elif max(compute, memory) < OVERHEAD_SHARE:
        bound = Bound.OVERHEAD
    else:
        bound = Bound.COMPUTE if compute >= memory else Bound.MEMORY
    return Utilisation(compute, memory, bound, by_step, agrees)


def _token_share(load: Load, step: StepCoefficients | None) -> float | None:
    if step is None or step.samples < SAMPLES_MIN:
        return None
    tokens_ms = step.b_ms * load.running + step.d_ms * load.prefill_tokens / load.steps
    total_ms = tokens_ms + step.a_ms + step.c_ms * load.kv_tokens / 1000
    return tokens_ms / total_ms if total_ms > 0 else None


def _agrees(compute: float, memory: float, gpu: GpuReading | None) -> bool | None:
    """Whether shares of all time are possible by what NVML saw."""
    if gpu is None or (gpu.sm_share is None and gpu.memory_share is None):
        return None
    sm_fits = gpu.sm_share is None or compute <= gpu.sm_share + TOLERANCE
    memory_fits = gpu.memory_share is None or memory <= gpu.memory_share + TOLERANCE
    return sm_fits and memory_fits
