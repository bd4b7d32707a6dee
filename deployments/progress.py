"""Words for people while something starts: one line per step, with its time, on a terminal and in a log file alike."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

HEARTBEAT_S = 15.0
"""Away from a terminal, a step that says nothing new repeats its last words this often."""


class Step:
    """A running step; ``note`` says what it is waiting for."""

    def __init__(self, progress: Progress, title: str) -> None:
        self._progress = progress
        self._title = title
        self._note = ""
        self._started_s = time.monotonic()
        self._said_s = self._started_s

    @property
    def seconds(self) -> float:
        """Time since the step began."""
        return time.monotonic() - self._started_s

    def note(self, text: str) -> None:
        """Say what is happening; may be called as often as one likes."""
        now_s = time.monotonic()
        changed, silent_s = text != self._note, now_s - self._said_s
        self._note = text
        if self._progress.interactive or changed or silent_s >= HEARTBEAT_S:
            self._said_s = now_s
            self._progress.show(self.line())

    def line(self) -> str:
        """Return the step as it stands."""
        note = f": {self._note}" if self._note else ""
        return f"{self._title}{note} ({self.seconds:.0f} s)"


class Progress:
    """Prints steps. On a terminal the running step is one line that moves; elsewhere each news is a line."""

    def __init__(self, console: Console | None = None, errors: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True, emoji=False)
        self._errors = errors or Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
        self.interactive = self.console.is_terminal
        self._status = self.console.status("") if self.interactive else None

    @contextmanager
    def step(self, title: str) -> Iterator[Step]:
        """Run a step: prints it when it begins and, with its duration, when it has ended well."""
        step = Step(self, title)
        if self._status is not None:
            self._status.update(escape(title))
            self._status.start()
        else:
            self.say(f"  .. {title}")
        try:
            yield step
        finally:
            if self._status is not None:
                self._status.stop()
        self.console.print(f"  [green]ok[/] {escape(title)} ({step.seconds:.1f} s)")

    def show(self, line: str) -> None:
        """Show the running step's state."""
        if self._status is not None:
            self._status.update(escape(line))
        else:
            self.say(f"  .. {line}")

    def say(self, text: str) -> None:
        """Print plain text."""
        self.console.print(escape(text))
        sys.stdout.flush()

    def warn(self, text: str) -> None:
        """Print a warning."""
        self._errors.print(f"[yellow]warning:[/] {escape(text)}")

    def note(self, text: str) -> None:
        """Print something worth knowing."""
        self._errors.print(f"[cyan]note:[/] {escape(text)}")

    def fail(self, text: str) -> None:
        """Print an error, one line per problem."""
        for line in text.splitlines():
            self._errors.print(f"[bold red]error:[/] {escape(line)}")
