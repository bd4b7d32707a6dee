"""The phases of a replica's start as it tells them."""

from __future__ import annotations

import threading

import pytest

from deployments import start_report
from deployments.clock import now_ns
from deployments.start_report import StartTeller
from policies.measures import StartPhase, StartReport


class Heard:
    """Takes reports, and says when one that fits came."""

    def __init__(self) -> None:
        self.reports: list[StartReport] = []
        self._came = threading.Condition()

    def __call__(self, report: StartReport) -> None:
        with self._came:
            self.reports.append(report)
            self._came.notify_all()

    def last(self, phase: StartPhase) -> StartReport:
        """The newest one in which ``phase`` is over."""

        def fits() -> bool:
            return bool(self.reports) and phase in self.reports[-1].phases_ms

        with self._came:
            assert self._came.wait_for(fits, 10), f"no report with {phase}"
            return self.reports[-1]


def a_teller(heard: Heard) -> StartTeller:
    return StartTeller("r", "m", now_ns() - 2_000_000_000, heard)


async def test_phases_follow_each_other_and_add_up_to_the_age_of_the_process() -> None:
    heard = Heard()
    async with a_teller(heard) as start:
        start.opens(compile_ms=1e9)
    report = heard.last(StartPhase.OPEN)
    phases = report.phases_ms
    assert report.phase is StartPhase.FIRST_TOKEN
    assert phases[StartPhase.PROCESS] >= 2_000
    assert phases[StartPhase.LOAD] == 0, "all of it was compiling"
    assert sum(phases.values()) == pytest.approx(report.age_ms, abs=0.01)
    start.first_byte()
    last = heard.last(StartPhase.FIRST_TOKEN)
    assert (last.age_ms, last.failed) == (report.age_ms, "")


async def test_it_is_told_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_report, "PERIOD_S", 0.01)
    heard = Heard()
    async with a_teller(heard):
        report = heard.last(StartPhase.PROCESS)
        assert (report.phase, report.failed) == (StartPhase.LOAD, "")


async def test_a_start_that_fails_says_why_before_its_process_ends() -> None:
    heard = Heard()
    with pytest.raises(ValueError, match="no such model"):
        async with a_teller(heard):
            raise ValueError("no such model")
    assert heard.reports[-1].failed == "ValueError: no such model"


async def test_a_controller_that_cannot_be_told_is_nobody_s_failure() -> None:
    def deliver(report: StartReport) -> None:
        raise ConnectionError

    with pytest.raises(ValueError, match="x"):
        async with StartTeller("r", "m", now_ns(), deliver):
            raise ValueError("x")
