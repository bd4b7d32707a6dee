"""Scripted faults of the emulated engine: which are on now, and which requests they hit.

The script is a :class:`FaultSettings`; :meth:`FaultBoard.change` replaces parts of it while the engine runs, with the
same strict checks as at start-up. Everybody who obeys faults asks the board at the moment it matters, so a change takes
effect at once, also for requests in flight.

It must not do anything by itself: the core, the HTTP application and the deployment each play their part of a fault.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from deployments.settings import FaultSettings

DIE_EXIT_CODE = 13
"""Exit status of an engine killed by its ``die_marker``."""


class FaultBoard:
    """The faults in force. ``seed`` draws the requests that ``share`` hits."""

    def __init__(self, faults: FaultSettings | None = None, seed: int = 0) -> None:
        self.now = faults or FaultSettings()
        self._rng = random.Random(seed)
        self._listeners: list[Callable[[], None]] = []

    def listen(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after each change. Listeners stay for the board's life."""
        self._listeners.append(listener)

    def change(self, changes: Mapping[str, Any]) -> FaultSettings:
        """Replace the named faults; the others stay.

        Raises:
            pydantic.ValidationError: a name is unknown or a value out of range; nothing changed.
        """
        self.now = FaultSettings.model_validate({**self.now.model_dump(), **changes})
        for listener in self._listeners:
            listener()
        return self.now

    def hits(self, prompt: str) -> bool:
        """Whether the request with this prompt is hit by ``kind``; decided once per request, when it arrives."""
        faults = self.now
        if faults.kind == "none" or (faults.marker is not None and faults.marker not in prompt):
            return False
        return self._rng.random() < faults.share

    def kills(self, prompt: str) -> bool:
        """Whether computing this prompt kills the engine."""
        marker = self.now.die_marker
        return marker is not None and marker in prompt
