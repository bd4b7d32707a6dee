"""NVML as a module, answering from ``recorded_nvml.json``; constants, structures and errors are pynvml's own."""

# ruff: noqa: N802 - the names are NVML's

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from types import ModuleType
from typing import Any

import pynvml

RECORDED = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))["devices"]
H100, HOT_H100, H200, MIG = RECORDED

_PLAIN = (
    "nvmlDeviceGetName", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetTemperature",
    "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetTotalEccErrors",
)  # fmt: skip


class RecordedNvml(ModuleType):
    """Put it in ``sys.modules["pynvml"]``. Its devices' answers may be changed; ``events`` are (event type, data)."""

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.answers: dict[str, dict[str, Any]] = json.loads(json.dumps(RECORDED))
        self.events: deque[tuple[int, int]] = deque()
        self.wait_error = pynvml.NVML_ERROR_TIMEOUT
        self.started = self.sets = 0
        self.registered: list[tuple[str, int]] = []
        for name in _PLAIN:
            setattr(self, name, lambda handle, *_args, name=name: self._answer(handle, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)

    def _answer(self, handle: str, name: str) -> Any:
        answer = self.answers[handle].get(name)
        if isinstance(answer, dict) and "error" in answer:
            raise pynvml.NVMLError(answer["error"])
        return answer

    def nvmlInit(self) -> None:
        self.started += 1

    def nvmlShutdown(self) -> None:
        self.started -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return list(self.answers)[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.answers:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        answer = self._answer(handle, "nvmlDeviceGetUtilizationRates")
        return pynvml.c_nvmlUtilization_t(answer["gpu"], answer["memory"])

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        answer = self._answer(handle, "nvmlDeviceGetMemoryInfo")
        return pynvml.c_nvmlMemory_t(answer["total"], answer["free"], answer["used"])

    def nvmlEventSetCreate(self) -> str:
        self.sets += 1
        return "events"

    def nvmlEventSetFree(self, _events: str) -> None:
        self.sets -= 1

    def nvmlDeviceRegisterEvents(self, handle: str, types: int, _events: str) -> None:
        self._answer(handle, "nvmlDeviceRegisterEvents")
        self.registered.append((handle, types))

    def nvmlEventSetWait_v2(self, _events: str, timeout_ms: int) -> Any:
        assert timeout_ms == 0, "a sensor never waits for an event"
        if not self.events:
            raise pynvml.NVMLError(self.wait_error)
        kind, data = self.events.popleft()
        return pynvml.c_nvmlEventData_t(None, kind, data)
