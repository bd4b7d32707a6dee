"""How often Python looks for cycles of garbage in the controller's process.

A controller of a large fleet makes some ten thousand objects a tick and drops as many, all of them freed by their
counts of references; what it keeps are windows of reports. With Python's defaults nearly each tick looks through all of
them for cycles, which takes longer than the tick's own work. Cycles are rare here (exceptions, event loop), so looking
for them now and then is enough.

What this must not do: switch the collector off.
"""

from __future__ import annotations

import gc

THRESHOLDS = (100_000, 20, 50)
"""Objects made and not dropped before the youngest are looked through; how many times that before the next older."""


def collect_rarely() -> None:
    """Leave what was imported so far out of all collections, and make those of the rest rare."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
