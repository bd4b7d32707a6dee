"""Runs scenarios with progress on the terminal; Ctrl-C ends the run at hand and keeps what is there.

The first Ctrl-C asks the run to stop: its open requests count as lost and it is reported as cut short. The second one
ends the program at once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console

from autoscaling.simulator.records import RunResult
from autoscaling.simulator.spec import Scenario
from autoscaling.simulator.world import run
from deployments.progress import Progress, Step

LINE_S = 10.0
"""Away from a terminal a running simulation says where it is this often."""


class Stop:
    """Whether the user asked to stop."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        """Return whether to stop now."""
        return self.asked

    def ask(self, _signal: int, _frame: FrameType | None) -> None:
        """Handle a signal: the first is a wish, the second an order.

        Raises:
            KeyboardInterrupt: it is the second.
        """
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def stop_on_ctrl_c() -> Iterator[Stop]:
    """Turn Ctrl-C and SIGTERM into a wish to stop while the block runs."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def progress_on_stderr() -> Progress:
    """Return a progress display that leaves standard output to the tables."""
    console = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    return Progress(console, console)


def run_shown(scenario: Scenario, title: str, progress: Progress, stop: Stop) -> RunResult:
    """Run ``scenario`` and show how far it is. Raises as ``world.run``."""
    with progress.step(title) as step:
        said_s = [step.seconds]

        def tell(ended: int, now_ns: int) -> None:
            if progress.interactive or step.seconds - said_s[0] >= LINE_S:
                said_s[0] = step.seconds
                note(step, ended, now_ns)

        return run(scenario, progress=tell, stop=stop)


def note(step: Step, ended: int, now_ns: int) -> None:
    """Say how far a simulation is."""
    step.note(f"{ended:,} requests ended, simulated time {now_ns / 1e9:,.0f} s")
