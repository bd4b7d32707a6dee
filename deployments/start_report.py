"""The phases of one replica's start, timed where they happen and told to the controller while they last.

    process          load                            open              first_token
    interpreter,     everything the engine does      port, host        until a request's first byte
    first imports    until it is ready; what it
                     spent on compiling is taken out

A thread of its own tells the controller once a second, because an engine's start holds the event loop for long. It ends
with the start: the last word is that the port is open, or why the start failed. Nothing waits for the controller but a
start that fails, for :data:`LAST_WORD_S` at most.

It must not know Ray (``replica_wiring.py`` delivers), and it must not decide anything.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from deployments.clock import now_ns
from policies.measures import StartPhase, StartReport

PERIOD_S = 1.0
LAST_WORD_S = 3.0
WHY_CHARS_MAX = 300

Deliver = Callable[[StartReport], None]
"""Hands one report to the controller; may block for a while, and may raise."""

logger = logging.getLogger("tidegate.replica")


class StartTeller:
    """One per replica: ``async with`` around its start; :meth:`opens` in it once the engine is ready."""

    def __init__(self, replica_id: str, model: str, started_ns: int, deliver: Deliver) -> None:
        """``started_ns`` is when the process began."""
        self._replica_id, self._model, self._deliver = replica_id, model, deliver
        self._started_ns = started_ns
        self._since_ns = now_ns()
        self._phase = StartPhase.LOAD
        self._phases_ms = {StartPhase.PROCESS: (self._since_ns - started_ns) / 1e6}
        self._age_ms: float | None = None
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._tell_on, name="tidegate-start", daemon=True)

    async def __aenter__(self) -> Self:
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if error is None:
            self._enter(StartPhase.FIRST_TOKEN)
            self._age_ms = (self._since_ns - self._started_ns) / 1e6
            self._tell_aside(self.report())
            return
        why = f"{type(error).__name__}: {error}"[:WHY_CHARS_MAX]
        last = asyncio.to_thread(self._tell, self.report(why))
        try:
            await asyncio.wait_for(asyncio.shield(last), LAST_WORD_S)
        except TimeoutError:
            logger.warning("The controller was not told why this start failed.")

    def opens(self, compile_ms: float = 0.0) -> None:
        """The engine is ready; of its time it spent so much on compiling."""
        self._enter(StartPhase.OPEN)
        if compile_ms > 0:
            load_ms = self._phases_ms[StartPhase.LOAD]
            compile_ms = min(compile_ms, load_ms)
            split = {StartPhase.LOAD: load_ms - compile_ms, StartPhase.COMPILE: compile_ms}
            self._phases_ms = {**self._phases_ms, **split}

    def first_byte(self) -> None:
        """The first byte of an answer left."""
        self._phases_ms = {**self._phases_ms, StartPhase.FIRST_TOKEN: (now_ns() - self._since_ns) / 1e6}
        self._tell_aside(self.report())

    def report(self, failed: str = "") -> StartReport:
        """How the start stands."""
        age_ms = self._age_ms if self._age_ms is not None else (now_ns() - self._started_ns) / 1e6
        return StartReport(self._replica_id, self._model, self._phase, age_ms, dict(self._phases_ms), failed)

    def _enter(self, phase: StartPhase) -> None:
        at_ns = now_ns()
        self._phases_ms = {**self._phases_ms, self._phase: (at_ns - self._since_ns) / 1e6}
        self._phase, self._since_ns = phase, at_ns

    def _tell_on(self) -> None:
        while not self._over.wait(PERIOD_S):
            self._tell(self.report())

    def _tell_aside(self, report: StartReport) -> None:
        threading.Thread(target=self._tell, args=(report,), name="tidegate-start-last", daemon=True).start()

    def _tell(self, report: StartReport) -> None:
        """One report at a time, so that they arrive in order."""
        with self._lock:
            try:
                self._deliver(report)
            except Exception as error:  # noqa: BLE001 - whatever the controller died of, the start goes on
                logger.debug("The controller was not told of the start: %r.", error)
