"""Reads NVIDIA devices through NVML, for one replica's own GPUs. ``None`` wherever there is nothing to read.

    reading              NVML call                               unit there   over a replica's devices
    sm_share             nvmlDeviceGetUtilizationRates.gpu       percent      mean
    memory_share         nvmlDeviceGetUtilizationRates.memory    percent      mean
    memory used, total   nvmlDeviceGetMemoryInfo                 bytes        sum
    power, limit         nvmlDeviceGetPowerUsage,                milliwatts   sum
                         nvmlDeviceGetEnforcedPowerLimit
    temperature          nvmlDeviceGetTemperature                Celsius      hottest
    throttle             nvmlDeviceGetCurrentClocksEventReasons  bits         any, as words
    ecc_errors           nvmlDeviceGetTotalEccErrors             count        sum; uncorrected, since the driver's start
    xid_errors           nvmlEventSetWait                        events       sum since this sensor's start

Shares are of the driver's last sample period (1 s down to 1/6 s, by product) in which at least one kernel ran, or
memory was read or written. Source: NVML API reference. They say how often a device was busy, not how full it was. A
figure that one device does not give is unknown for the replica: half of its devices say nothing about the other half.
MIG slices have no utilisation.

It never raises into its caller and must not be filled from anything else: where there is no device, the engine's busy
share is reported beside it under its own name. A device that hangs may block a read, so callers read in a thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from policies.measures import GpuReading

logger = logging.getLogger(__name__)

RETRY_READS = 60
"""Reads that answer ``None`` after a failed start of NVML before it is tried again."""

DEVICES_MAX = 64
"""Devices of one replica that are read."""

EVENTS_MAX = 256
"""Events taken in one read; more come with the next."""

THROTTLE_WORDS = (
    ("SwPowerCap", "sw_power_cap"),
    ("HwSlowdown", "hw_slowdown"),
    ("SyncBoost", "sync_boost"),
    ("SwThermalSlowdown", "sw_thermal_slowdown"),
    ("HwThermalSlowdown", "hw_thermal_slowdown"),
    ("HwPowerBrakeSlowdown", "hw_power_brake_slowdown"),
)
"""Reasons that cost speed: the ends of NVML's constants, and nvidia-smi's words for them. Left out: idle, and clocks
that an administrator chose."""

APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
"""XID events that a program causes by its own mistakes or its end. Source: NVIDIA's list of XID errors."""


@dataclass(frozen=True, slots=True)
class RawDevice:
    """What NVML says of one device, in NVML's units; ``None`` where it does not say."""

    gpu_percent: int | None = None
    memory_percent: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_mw: int | None = None
    power_limit_mw: int | None = None
    temperature_c: int | None = None
    throttle_bits: int | None = None
    ecc_errors: int | None = None


class GpuSensor:
    """Sensor of ``devices``: NVML indices ("0") or UUIDs ("GPU-..."), as Ray names the GPUs of an actor.

    Nothing is loaded before the first read. No devices, no driver, no library: every read is ``None``.
    """

    def __init__(self, devices: Sequence[str | int]) -> None:
        self._names = [str(device) for device in devices][:DEVICES_MAX]
        self._nvml: ModuleType | None = None
        self._handles: list[Any] = []
        self._events: Any = None
        self._xid_errors = 0
        self._skip_reads = 0

    def __call__(self) -> GpuReading | None:
        """Read all devices once; takes well under a millisecond each while they are well."""
        nvml = self._started() if self._names else None
        if nvml is None:
            return None
        raw = [read_device(nvml, handle) for handle in self._handles]
        words = {int(getattr(nvml, f"nvmlClocksEventReason{name}")): word for name, word in THROTTLE_WORDS}
        return summarise(raw, words, self._count_xid_errors(nvml))

    def device_name(self) -> str | None:
        """NVML's product name where all devices are alike, such as ``NVIDIA H100 80GB HBM3``; else ``None``."""
        nvml = self._started() if self._names else None
        if nvml is None:
            return None
        names = {_read(nvml, nvml.nvmlDeviceGetName, handle) for handle in self._handles}
        name = names.pop() if len(names) == 1 else None
        return name.decode() if isinstance(name, bytes) else name

    @property
    def devices(self) -> int:
        """Devices that are read."""
        return len(self._names)

    def shutdown(self) -> None:
        """Let go of NVML; a later read starts it again."""
        nvml, self._nvml, self._handles, self._skip_reads = self._nvml, None, [], 0
        events, self._events = self._events, None
        if nvml is None:
            return
        for end in ([lambda: nvml.nvmlEventSetFree(events)] if events is not None else []) + [nvml.nvmlShutdown]:
            try:
                end()
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
            logger.info("GPU readings are unknown: NVML does not start (%s)", error)
            return None
        try:
            self._handles = [_handle(pynvml, name) for name in self._names]
        except (pynvml.NVMLError, ValueError) as error:
            logger.warning("GPU readings are unknown: NVML does not know device %s (%s)", self._names, error)
            pynvml.nvmlShutdown()
            return None
        self._nvml, self._events = pynvml, _subscribe(pynvml, self._handles)
        return self._nvml

    def _count_xid_errors(self, nvml: ModuleType) -> int | None:
        """Events that came since the last read are added; ``None`` where devices do not tell."""
        if self._events is None:
            return None
        for _ in range(EVENTS_MAX):
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_TIMEOUT:  # a lost device ends every later wait as well
                    logger.warning("XID events are unknown from now on: %s", error)
                    self._events = None
                    return None
                break
            xid = int(event.eventData)
            if event.eventType == nvml.nvmlEventTypeXidCriticalError and xid not in APPLICATION_XIDS:
                self._xid_errors += 1
                logger.error("A GPU of this replica reports XID %d.", xid)
        return self._xid_errors


def _subscribe(nvml: ModuleType, handles: Sequence[Any]) -> Any:
    """A set of the devices' XID events; ``None`` where one of them has none."""
    try:
        events = nvml.nvmlEventSetCreate()
        for handle in handles:
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
    except nvml.NVMLError as error:
        logger.info("XID events are unknown: %s", error)
        return None
    return events


def _read(nvml: ModuleType, function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except nvml.NVMLError as error:
        logger.debug("NVML read failed: %s", error)
        return None


def _handle(nvml: ModuleType, name: str) -> Any:
    return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(name)


def read_device(nvml: ModuleType, handle: Any) -> RawDevice:
    """Everything one device says."""
    rates = _read(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    memory = _read(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    uncorrected, since_reset = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    return RawDevice(
        gpu_percent=None if rates is None else int(rates.gpu),
        memory_percent=None if rates is None else int(rates.memory),
        memory_used_bytes=None if memory is None else int(memory.used),
        memory_total_bytes=None if memory is None else int(memory.total),
        power_mw=_read(nvml, nvml.nvmlDeviceGetPowerUsage, handle),
        power_limit_mw=_read(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, handle),
        temperature_c=_read(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        throttle_bits=_throttle_bits(nvml, handle),
        ecc_errors=_read(nvml, nvml.nvmlDeviceGetTotalEccErrors, handle, uncorrected, since_reset),
    )


def _throttle_bits(nvml: ModuleType, handle: Any) -> int | None:
    """Asked for under the call's name of today, else under its old one: drivers know one of them, or both."""
    bits: int | None = _read(nvml, nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    return _read(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) if bits is None else bits


def summarise(devices: Sequence[RawDevice], words: dict[int, str], xid_errors: int | None) -> GpuReading:
    """One reading over all devices of a replica; ``words`` names the bits of throttle reasons."""
    bits = 0
    for device in devices:
        bits |= device.throttle_bits or 0
    power_mw, limit_mw = _sum([d.power_mw for d in devices]), _sum([d.power_limit_mw for d in devices])
    temperatures = [d.temperature_c for d in devices if d.temperature_c is not None]
    return GpuReading(
        sm_share=_share([d.gpu_percent for d in devices]),
        memory_share=_share([d.memory_percent for d in devices]),
        memory_used_bytes=_sum([d.memory_used_bytes for d in devices]),
        memory_total_bytes=_sum([d.memory_total_bytes for d in devices]),
        power_w=None if power_mw is None else power_mw / 1e3,
        power_limit_w=None if limit_mw is None else limit_mw / 1e3,
        temperature_c=float(max(temperatures)) if temperatures else None,
        throttle=tuple(sorted(word for bit, word in words.items() if bits & bit)),
        ecc_errors=_sum([d.ecc_errors for d in devices]),
        xid_errors=xid_errors,
    )


def _share(percents: Sequence[int | None]) -> float | None:
    known = [p for p in percents if p is not None and 0 <= p <= 100]
    return sum(known) / (100 * len(known)) if known and len(known) == len(percents) else None


def _sum(values: Sequence[int | None]) -> int | None:
    known = [v for v in values if v is not None]
    return sum(known) if known and len(known) == len(values) else None
