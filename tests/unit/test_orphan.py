"""deployments/orphan.py: a child ends soon after its parent, however the parent died, and not before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHILD = "import os, time; o.end_with(os.getppid()); print(os.getpid(), flush=True); {}"
PARENT = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', sys.argv[1]]); time.sleep(60)"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    ["time.sleep(60)", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"],
    ids=["obeys SIGTERM", "ignores SIGTERM"],
)
def test_a_child_ends_after_its_parent_was_killed(body: str) -> None:
    child_code = "import deployments.orphan as o; o.TERMINATE_S = 1.0; " + CHILD.format(body)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, child_code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        time.sleep(1.5)
        assert alive(child)
        parent.kill()
        parent.wait()
        until = time.monotonic() + 20
        while alive(child) and time.monotonic() < until:
            time.sleep(0.05)
        assert not alive(child)
    finally:
        parent.stdout.close()
        if alive(child):
            os.kill(child, signal.SIGKILL)
