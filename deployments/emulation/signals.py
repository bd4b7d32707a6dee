"""Signals of an emulated replica, true or as the fault ``signals`` makes them.

    ok      as they are
    stop    nothing: empty samples, no report reaches the controller
    freeze  the last sample and the last report for ever, sequence number and all
    nan     every fractional number is NaN

Only what the replica says is touched; its gauges stay true, so its own health check does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from deployments.emulation.faults import FaultBoard
from policies.types import Plan, ReplicaReport, StepCoefficients

V = TypeVar("V")
Report = Callable[[ReplicaReport], Awaitable[Plan | None]]


class Signals:
    """Stands between a replica and those who listen to it."""

    def __init__(self, faults: FaultBoard) -> None:
        self._faults = faults
        self._samples: dict[str, dict[str, Any]] = {}
        self._report: ReplicaReport | None = None

    def sample(self, name: str, true: dict[str, V]) -> dict[str, V | float]:
        """What is said instead of the sample ``true``; ``name`` tells kinds of samples apart."""
        kind = self._faults.now.signals
        if kind == "stop":
            return {}
        if kind == "freeze" and name in self._samples:
            return self._samples[name]
        self._samples[name] = dict(true)
        if kind == "nan":
            return {k: math.nan if isinstance(v, float) else v for k, v in true.items()}
        return dict(true)

    def through(self, deliver: Report) -> Report:
        """``deliver`` with the faults in front of it."""

        async def said(report: ReplicaReport) -> Plan | None:
            kind = self._faults.now.signals
            if kind == "stop":
                raise ConnectionError("scripted: reports are stopped")
            if kind == "freeze" and self._report is not None:
                report = self._report
            self._report = report
            return await deliver(not_numbers(report) if kind == "nan" else report)

        return said


def not_numbers(report: ReplicaReport) -> ReplicaReport:
    """``report`` with NaN wherever a fraction stands."""
    nan = math.nan
    return dataclasses.replace(
        report,
        busy_share=nan,
        itl=dataclasses.replace(report.itl, sum_ms=nan),
        step_model=StepCoefficients(nan, nan, nan, nan, report.step_model.samples if report.step_model else 0, nan),
    )
