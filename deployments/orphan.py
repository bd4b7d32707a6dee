"""Ends the engine core when its replica is gone.

vLLM's workers end with their engine core, but the engine core does not end with the process that started it: a replica
that is killed would leave gigabytes of weights behind, and the next one would find the device full. A thread looks at
the parent's process id once a second; when it has changed, the replica is dead.
"""

from __future__ import annotations

import os
import signal
import threading
import time

PERIOD_S = 1.0
TERMINATE_S = 10.0
"""Time for an orderly end before the process ends itself."""


def end_with(parent_pid: int) -> threading.Thread:
    """Watch from a thread that this process is still a child of ``parent_pid``; end it when it is not."""
    thread = threading.Thread(target=_watch, args=(parent_pid,), name="tidegate-orphan", daemon=True)
    thread.start()
    return thread


def _watch(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(PERIOD_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(TERMINATE_S)
    os._exit(1)
