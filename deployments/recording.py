"""Writes a recording: what ``autoscaling/simulator/recorded.py`` describes, from a live gateway or controller.

The event loop only appends a value to a list (:meth:`Recorder.put`); a thread encodes and writes every
:data:`FLUSH_S`, so a process that dies loses at most that much. What does not fit into the queue, or onto the disk, is
dropped, counted, and marked in the file where it is missing: requests and ticks never wait for a recording.

Bounds: ``queue_max`` values in memory; a file is closed at ``file_bytes_max``; of each kind of writer at most
``files_max`` files are kept in the folder, the oldest goes first. A file that is being written is locked (``flock``)
and never removed by another writer of the same host.

It must not decide, and it must not keep a prompt's text.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import tempfile
import threading
import time
from collections import deque
from dataclasses import replace
from functools import cache
from io import FileIO
from pathlib import Path

from autoscaling.simulator.codec import Blocks
from autoscaling.simulator.recorded import (
    FORMAT,
    VERSION,
    DroppedLine,
    EndLine,
    Header,
    Line,
    RequestLine,
    to_text,
)
from deployments.clock import now_ns
from deployments.settings import RecordingSettings, Settings, SettingsError
from policies.events import Finish, Usage
from policies.types import ReplicaId, Request

logger = logging.getLogger("ray.serve")

FLUSH_S = 0.5
"""Period of the writing thread."""
QUEUE_MAX = 20_000
"""Lines that wait to be written."""
RETRY_S = 10.0
"""After the disk refused, it is asked again after this time; lines wait in the queue meanwhile."""
CLOSE_S_MAX = 5.0
"""Longest wait for the last lines when a process ends."""
ROOT = Path(__file__).resolve().parent.parent


class Recorder:
    """One writer. ``put`` is called from one event loop; the rest happens in a thread of its own.

    Args:
        settings: bounds and folder.
        header: what every file begins with.
        queue_max: lines that may wait.
    """

    def __init__(self, settings: RecordingSettings, header: Header, queue_max: int = QUEUE_MAX) -> None:
        assert settings.folder is not None
        self.header = header
        self._settings = settings
        self._folder = Path(settings.folder)
        self._queue_max = queue_max
        self._lock = threading.Lock()
        self._queue: list[Line] = []
        self._left_out = 0
        """Lines that found no room since the last one that did."""
        self._written = self._dropped = 0
        self._told = (0, 0)
        self._file: FileIO | None = None
        self._file_bytes = 0
        self._files = 0
        self._lost = 0
        """Lines that the disk did not take and no file says so yet."""
        self._disk_failed_ns: int | None = None
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._write_forever, name="tidegate-recording", daemon=True)
        self._thread.start()

    def put(self, line: Line) -> None:
        """Record ``line``. Never waits, never raises; without room the line is dropped and counted."""
        with self._lock:  # held elsewhere only to swap a list
            if len(self._queue) >= self._queue_max:
                self._left_out += 1
                self._dropped += 1
                return
            if self._left_out:
                self._queue.append(DroppedLine(self._left_out))
                self._left_out = 0
            self._queue.append(line)

    def take_counts(self) -> tuple[int, int]:
        """Lines written and lines dropped since the last call."""
        with self._lock:
            now, told = (self._written, self._dropped), self._told
            self._told = now
        return now[0] - told[0], now[1] - told[1]

    def close(self) -> None:
        """Write what waits and an end mark; returns after at most :data:`CLOSE_S_MAX`. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        self._thread.join(CLOSE_S_MAX)

    # --- the thread -------------------------------------------------------------------------------------------------

    def _write_forever(self) -> None:
        while not self._closed:
            self._wake.wait(FLUSH_S)
            self._write_waiting(last=False)
        self._write_waiting(last=True)

    def _write_waiting(self, *, last: bool) -> None:
        failed_ns = self._disk_failed_ns
        if failed_ns is not None and now_ns() - failed_ns < RETRY_S * 1e9 and not last:
            return
        with self._lock:
            lines, self._queue = self._queue, []
            if self._left_out and last:
                lines.append(DroppedLine(self._left_out))
                self._left_out = 0
        if last:
            lines.append(EndLine())
        try:
            if self._lost:
                lines.insert(0, DroppedLine(self._lost))
                self._lost = 0
            self._write(lines)
            self._disk_failed_ns = None
        except OSError as error:
            if failed_ns is None:
                logger.error("The recording in %s cannot be written: %s. Requests go on.", self._folder, error)
            self._disk_failed_ns = now_ns()
            self._close_file()  # what was written may end in the middle of a line
        if last:
            self._close_file()

    def _write(self, lines: list[Line]) -> None:
        """Write ``lines``, over as many files as they need; those the disk does not take are counted."""
        left, batch = deque(lines), deque[Line]()
        try:
            while True:
                file, texts, size = self._open(), [], self._file_bytes
                while left and size < self._settings.file_bytes_max:
                    batch.append(left.popleft())
                    texts.append(self._encode(batch[-1]))
                    size += len(texts[-1])
                data = b"".join(texts)
                done = file.write(data)
                for _ in range(data[:done].count(b"\n")):
                    batch.popleft()
                    self._count(written=1)
                if done < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._file_bytes = size
                if size >= self._settings.file_bytes_max:
                    self._close_file()
                if not left:
                    return
        except OSError:
            missing = (*batch, *left)
            self._count(dropped=sum(not isinstance(line, DroppedLine | EndLine) for line in missing))
            self._lost += sum(line.lines if isinstance(line, DroppedLine) else 1 for line in missing)
            raise

    def _encode(self, line: Line) -> bytes:
        try:
            return to_text(line).encode("ascii") + b"\n"
        except ValueError as error:
            logger.error("A %s cannot be recorded: %s.", type(line).__name__, error)
            self._count(written=-1, dropped=1)
            return to_text(DroppedLine(1)).encode("ascii") + b"\n"

    def _count(self, written: int = 0, dropped: int = 0) -> None:
        with self._lock:
            self._written += written
            self._dropped += dropped

    def _open(self) -> FileIO:
        if self._file is None:
            make_folder(self._folder)
            path = self._folder / file_name(self.header, self._files)
            header = to_text(replace(self.header, file=self._files)).encode("ascii") + b"\n"
            file = FileIO(path, "x")
            fcntl.flock(file, fcntl.LOCK_SH)
            if file.write(header) < len(header):
                file.close()
                path.unlink()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._file, self._file_bytes = file, len(header)
            self._files += 1
            remove_oldest(self._folder, self.header.source, self._settings.files_max)
        return self._file

    def _close_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def file_name(header: Header, number: int) -> str:
    """``gateway-20261130T101500.123456Z-1a2b3c4d-0000.jsonl``: sorted by name, files are sorted by time."""
    seconds, rest_ns = divmod(header.started_unix_ns, 1_000_000_000)
    at = time.strftime("%Y%m%dT%H%M%S", time.gmtime(seconds))
    safe = "".join(c if c.isalnum() else "-" for c in header.name)[-8:]
    return f"{header.source}-{at}.{rest_ns // 1_000:06d}Z-{safe}-{number:04d}.jsonl"


def remove_oldest(folder: Path, source: str, files_max: int) -> None:
    """Remove the oldest files of ``source`` beyond ``files_max``; those that somebody writes stay."""
    for path in sorted(folder.glob(f"{source}-*.jsonl"), key=_age)[:-files_max]:
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _age(path: Path) -> tuple[int, str]:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns, path.name
    return 0, path.name


def make_folder(folder: Path) -> None:
    """Make ``folder`` where it is missing; what it will hold is nobody else's to read."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def check_folder(settings: Settings) -> None:
    """Refuse a folder that cannot be written, before anything starts.

    Raises:
        SettingsError: ``recording.folder: path: why``, likewise for the ledger's.
    """
    for section, folder in (("recording", settings.recording.folder), ("ledger", settings.ledger.folder)):
        if folder is None:
            continue
        try:
            make_folder(Path(folder))
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"x")
        except OSError as error:
            why = error.strerror or str(error)
            raise SettingsError([f"{section}.folder: {folder!r}: cannot be written: {why}"]) from None


def open_recorder(settings: Settings, source: str, name: str) -> Recorder | None:
    """The recorder of one process; ``None`` where recording is off."""
    if settings.recording.folder is None:
        return None
    return Recorder(settings.recording, new_header(settings, source, name))


def open_ledger(settings: Settings, epoch: str, default_folder: str | None = None) -> Recorder | None:
    """The file of one controller's decisions; ``None`` where it is off or there is no folder for it."""
    folder = settings.ledger.folder or default_folder
    if folder is None or not settings.ledger.enabled:
        return None
    chosen = settings.ledger.model_copy(update={"folder": folder})
    return Recorder(chosen, new_header(settings, "ledger", epoch))


def request_line(
    started_ns: int,
    request: Request,
    prompt_bytes: int,
    finish: Finish,
    usage: Usage,
    output_tokens: int,
    first_byte_ns: int,
    e2e_ns: int,
    replica_id: ReplicaId | None,
    attempts: int,
) -> RequestLine:
    """What a recording keeps of one request that ended. ``first_byte_ns`` is 0 where there was none."""
    return RequestLine(
        arrival_ns=request.arrival_ns - started_ns,
        endpoint=request.endpoint,
        stream=request.stream,
        tenant=request.tenant,
        task="",
        prompt_tokens=usage.prompt_tokens,
        prompt_tokens_estimate=request.prompt_tokens,
        prompt_bytes=prompt_bytes,
        output_tokens=output_tokens,
        output_tokens_max=request.output_tokens_max,
        cached_tokens=usage.cached_tokens,
        blocks=Blocks(request.blocks),
        block_tokens=request.block_tokens,
        ttft_ms=(first_byte_ns - request.arrival_ns) / 1e6 if first_byte_ns else None,
        e2e_ms=e2e_ns / 1e6,
        outcome=finish.outcome.value,
        reason=finish.reason.code,
        replica=replica_id or "",
        attempts=attempts,
    )


def new_header(settings: Settings, source: str, name: str) -> Header:
    """Who begins to write now, with which settings."""
    return Header(
        format=FORMAT,
        version=VERSION,
        source=source,
        name=name,
        file=0,
        started_ns=now_ns(),
        started_unix_ns=time.time_ns(),
        code=code_digest(),
        model=settings.model.name,
        gateways=settings.gateway.replicas,
        replicas=max(1, settings.scaling.replicas_min),
        report_period_ms=settings.model.report_interval_ms,
        drain_ms_max=settings.model.drain_s_max * 1e3,
        config=settings.policy_config(),
    )


@cache
def code_digest(root: Path = ROOT) -> str:
    """Digest of the sources that decide: equal digests promise equal decisions of equal inputs."""
    digest = hashlib.sha256()
    deciding = [*(root / "policies").rglob("*.py"), *(root / "autoscaling").glob("*.py")]
    for path in sorted(deciding):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
