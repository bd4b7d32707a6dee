"""Reads NVIDIA devices through NVML, for one replica's own GPUs. ``None`` wherever there is nothing to read.

``utilisation_share`` is the mean over the replica's devices of NVML's "gpu" figure: the share of the driver's last
sample period (1 s down to 1/6 s, by product) in which at least one kernel ran. Source: NVML API reference,
``nvmlUtilization_t``. It says how often the device was busy, not how full it was. MIG slices do not have it.

It never raises into its caller and must not be filled from anything else: where there is no device, the engine's busy
share is reported beside it under its own name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

RETRY_READS = 60
"""Reads that answer ``None`` after a failed start of NVML before it is tried again."""

DEVICES_MAX = 64
"""Devices of one replica that are read."""


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One reading, over all devices of a replica."""

    utilisation_share: float | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None


NOTHING = GpuSample(None, None, None)
"""What a machine without an NVIDIA device says."""


class GpuSensor:
    """Sensor of ``devices``: NVML indices ("0") or UUIDs ("GPU-..."), as Ray names the GPUs of an actor.

    Nothing is loaded before the first read. No devices, no driver, no library: every read is :data:`NOTHING`.
    """

    def __init__(self, devices: Sequence[str | int]) -> None:
        self._names = [str(device) for device in devices][:DEVICES_MAX]
        self._nvml: ModuleType | None = None
        self._handles: list[Any] = []
        self._skip_reads = 0

    def sample(self) -> GpuSample:
        """Read all devices once; takes well under a millisecond each."""
        nvml = self._started() if self._names else None
        if nvml is None:
            return NOTHING
        rates = [_read(nvml, nvml.nvmlDeviceGetUtilizationRates, handle) for handle in self._handles]
        memory = [_read(nvml, nvml.nvmlDeviceGetMemoryInfo, handle) for handle in self._handles]
        return summarise(rates, memory)

    def utilisation_share(self) -> float | None:
        """Mean utilisation of the devices in [0, 1]."""
        return self.sample().utilisation_share

    def shutdown(self) -> None:
        """Let go of NVML; a later read starts it again."""
        nvml, self._nvml, self._handles, self._skip_reads = self._nvml, None, [], 0
        if nvml is not None:
            try:
                nvml.nvmlShutdown()
            except nvml.NVMLError as error:
                logger.debug("NVML did not shut down: %s", error)

    def _started(self) -> ModuleType | None:
        if self._nvml is not None:
            return self._nvml
        if self._skip_reads > 0:
            self._skip_reads -= 1
            return None
        self._skip_reads = RETRY_READS
        try:
            import pynvml
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            logger.info("GPU utilisation is unknown: NVML does not start (%s)", error)
            return None
        try:
            self._handles = [_handle(pynvml, name) for name in self._names]
        except (pynvml.NVMLError, ValueError) as error:
            logger.warning("GPU utilisation is unknown: NVML does not know device %s (%s)", self._names, error)
            pynvml.nvmlShutdown()
            return None
        self._nvml = pynvml
        return self._nvml


def _read(nvml: ModuleType, function: Callable[[Any], Any], handle: Any) -> Any:
    try:
        return function(handle)
    except nvml.NVMLError as error:
        logger.debug("NVML read failed: %s", error)
        return None


def _handle(nvml: ModuleType, name: str) -> Any:
    return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(name)


def summarise(rates: Sequence[Any], memory: Sequence[Any]) -> GpuSample:
    """One sample from NVML's ``nvmlUtilization_t`` (percent) and ``nvmlMemory_t`` (bytes) of each device.

    ``None`` for a device makes the whole figure unknown: half of a replica's devices say nothing about the other half.
    """
    share: float | None = None
    if rates and all(rate is not None and 0 <= rate.gpu <= 100 for rate in rates):
        share = sum(rate.gpu for rate in rates) / (100 * len(rates))
    if not memory or any(info is None for info in memory):
        return GpuSample(share, None, None)
    return GpuSample(share, sum(int(info.used) for info in memory), sum(int(info.total) for info in memory))
