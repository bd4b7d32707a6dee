"""Preemptions brake running sequences: a preempted sequence is computed twice, and those it made room for gain little.

The cap falls to ``preemption_brake`` times what ran (or may run) in each window that saw a preemption, and rises by a
tenth of itself after each :data:`BRAKE_QUIET_TICKS` ticks without one. It must not go below ``running_seqs_min``.
"""

from __future__ import annotations

import math

from policies.config import BatchingConfig

BRAKE_QUIET_TICKS = 10
"""Ticks without a preemption before the brake is released by a tenth."""


class Brake:
    """Cap on running sequences after preemptions."""

    def __init__(self, config: BatchingConfig) -> None:
        self._config = config
        self.seqs: int | None = None
        """``None``: released."""
        self._quiet = 0

    def pull(self, current: int, running: int, running_seqs_hard: int) -> None:
        """A window saw preemptions with ``running`` sequences under a cap of ``current``."""
        self._quiet = 0
        base = min(current, max(running, 1))
        lowered = min(math.floor(base * self._config.preemption_brake), base - 1)
        self.seqs = max(min(self._config.running_seqs_min, running_seqs_hard), lowered)

    def ease(self) -> None:
        """One more tick without preemptions."""
        self._quiet += 1
        if self.seqs is not None and self._quiet >= BRAKE_QUIET_TICKS:
            self.seqs += max(1, self.seqs // 10)
            self._quiet = 0

    def release(self) -> None:
        """It holds back nothing any more."""
        self.seqs = None
