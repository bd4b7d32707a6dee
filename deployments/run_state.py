"""What one ``up`` started, written down so that another shell can end exactly that.

Every process of a run inherits the environment variable ``TIDEGATE_RUN`` with the run's random id, and is a member of
the session that ``ray start`` leads: that, not a name or a port, says whose a process is. (Ray's workers rename
themselves, which overwrites the environment that others can see; hence the session.) The processes named in the file
carry their start times as well, since a pid alone may by now be someone else's.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

RUN_VARIABLE = "TIDEGATE_RUN"
"""Environment variable that marks all processes of a run."""
STATE_FILE = "state.json"
SHARED_MEMORY = "/dev/shm"  # noqa: S108 (looked at, and cleaned of what the run mapped)
TEMP_ROOT = "/tmp"  # noqa: S108 (mkdtemp makes a private folder in it)
"""Above the run's temporary folder."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A process and when it started: together they name one process for ever."""

    pid: int
    started_s: float

    @classmethod
    def of(cls, pid: int) -> Identity | None:
        """Return the identity of a running process; ``None`` when there is none."""
        try:
            return cls(pid, psutil.Process(pid).create_time())
        except psutil.Error:
            return None

    def process(self) -> psutil.Process | None:
        """Return the process while it lives and is still the same one."""
        try:
            process = psutil.Process(self.pid)
            alive = process.status() != psutil.STATUS_ZOMBIE
            return process if alive and abs(process.create_time() - self.started_s) < 0.5 else None
        except psutil.Error:
            return None


@dataclass(frozen=True, slots=True)
class RunState:
    """One run: its mark, who looks after it, where its files are."""

    run_id: str
    supervisor: Identity | None
    """The foreground ``up``; ``None`` for a detached run."""
    ray: Identity | None
    """``ray start --block``; ``None`` until it is started."""
    temp_dir: str
    dashboard_port: int
    started_at_s: float

    @property
    def supervised(self) -> bool:
        """Whether the foreground ``up`` of this run still lives."""
        return self.supervisor is not None and self.supervisor.process() is not None


def new_run(dashboard_port: int, supervisor: Identity | None) -> RunState:
    """Return the state of a run that starts now, with a temporary folder of its own.

    The folder is short on purpose: Ray puts sockets below it, and a socket's path has at most 107 bytes.
    """
    run_id = secrets.token_hex(8)
    temp_dir = tempfile.mkdtemp(prefix="tidegate-", dir=TEMP_ROOT)
    return RunState(run_id, supervisor, None, temp_dir, dashboard_port, time.time())


def save(folder: Path, state: RunState) -> None:
    """Write ``state`` into ``folder`` in one step."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"{STATE_FILE}.new"
    draft.write_text(json.dumps(asdict(state), indent=1) + "\n", encoding="utf-8")
    draft.replace(folder / STATE_FILE)


def load(folder: Path) -> RunState | None:
    """Return the state in ``folder``; ``None`` when there is none or it cannot be read."""
    try:
        raw = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        for key in ("supervisor", "ray"):
            raw[key] = Identity(**raw[key]) if raw[key] else None
        return RunState(**raw)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def forget(folder: Path, state: RunState) -> None:
    """Remove the state file and the run's temporary folder."""
    if Path(state.temp_dir).name.startswith("tidegate-"):
        shutil.rmtree(state.temp_dir, ignore_errors=True)
    with contextlib.suppress(OSError):
        (folder / STATE_FILE).unlink()


def members(state: RunState) -> list[psutil.Process]:
    """Return the live processes of the run, this one and the foreground ``up`` excluded.

    A session's number may be someone else's once all its members are gone, so it counts only while its leader is the
    one written down or one of its members carries the mark.
    """
    everyone = [process for process in psutil.process_iter() if process.pid != os.getpid() and _is_alive(process)]
    carrying = {process.pid for process in everyone if _carries(process, state.run_id)}
    ours = set(carrying)
    if state.ray is not None:
        session = {process.pid for process in everyone if _session_of(process) == state.ray.pid}
        if session & carrying or state.ray.process() is not None:
            ours |= session
    return [process for process in everyone if process.pid in ours]


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _carries(process: psutil.Process, run_id: str) -> bool:
    try:
        return bool(process.environ().get(RUN_VARIABLE) == run_id)
    except (psutil.Error, OSError):
        return False


def _session_of(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except OSError:
        return None


def end_all(state: RunState, grace_s: float) -> list[psutil.Process]:
    """End every process of the run: ask, wait up to ``grace_s``, then force.

    ``ray start`` is asked first and ends its own; what is left is asked, then forced. Returns what is still alive after
    that (nothing, if all is well).
    """
    leader = state.ray.process() if state.ray is not None else None
    known = members(state)
    shared = _shared_memory_of(known)
    if leader is not None:
        _signal([leader], signal.SIGTERM)
        _wait_gone(known, grace_s / 2)
    known = _union(known, members(state))
    _signal(known, signal.SIGTERM)
    if not _wait_gone(known, grace_s / 2):
        _signal(known, signal.SIGKILL)
        _wait_gone(known, 5.0)
    left = [process for process in _union(known, members(state)) if _is_running(process)]
    if not left:
        _remove_shared_memory(shared)
    return left


def _shared_memory_of(processes: Iterable[psutil.Process]) -> set[Path]:
    """Return the files of shared memory that ``processes`` have mapped: forced to end, they leave them behind."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
                name = line.partition(SHARED_MEMORY + "/")[2]
                if name and not name.endswith(" (deleted)"):
                    found.add(Path(SHARED_MEMORY, name))
    return found


def _remove_shared_memory(files: set[Path]) -> None:
    """Remove those of ``files`` that nobody else has mapped."""
    for file in files - _shared_memory_of(psutil.process_iter()):
        with contextlib.suppress(OSError):
            file.unlink()


def _union(first: list[psutil.Process], second: list[psutil.Process]) -> list[psutil.Process]:
    return list({(process.pid, process.create_time()): process for process in (*first, *second)}.values())


def _is_running(process: psutil.Process) -> bool:
    # psutil compares the start time too: a reused pid is not running
    return bool(process.is_running()) and _is_alive(process)


def _signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            process.send_signal(number)


def _wait_gone(processes: Iterable[psutil.Process], seconds: float) -> bool:
    left, deadline = list(processes), time.monotonic() + seconds
    while left := [process for process in left if _is_running(process)]:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
