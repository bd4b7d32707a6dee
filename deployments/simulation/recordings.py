"""Opens recordings: which files there are, who wrote them, their lines one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TextIO

from autoscaling.simulator.recorded import Header, Numbered, RecordingError, read_lines
from autoscaling.simulator.replay import Writer, writers_of

LINE_CHARS_MAX = 64 * 1024 * 1024
"""Longest line of a recording."""


def find_writers(paths: Iterable[Path], warn: Callable[[str], None]) -> list[Writer]:
    """Writers of the files in and among ``paths``, gateways and controllers, by the time they started.

    Raises:
        RecordingError: a path does not exist, a file is no recording, or there is nothing in them at all.
    """
    heads = []
    for path in _files(paths):
        first = next(iter(read_file(path, warn)), None)
        if first is not None and isinstance(first.line, Header):
            heads.append((str(path), first.line))
    if not heads:
        raise RecordingError(", ".join(map(str, paths)), None, "holds no recording (files *.jsonl with a header)")
    return writers_of(heads)


def read_writer(writer: Writer, warn: Callable[[str], None]) -> Iterator[Numbered]:
    """All lines of one writer in order. Raises ``RecordingError`` where one is wrong."""
    for file in writer.files:
        yield from read_file(Path(file), warn)


def read_file(path: Path, warn: Callable[[str], None]) -> Iterator[Numbered]:
    """The lines of one file, the header first. Raises ``RecordingError``."""
    if path.exists() and not path.is_file():
        raise RecordingError(str(path), None, "is no file; pipes and devices cannot be replayed")
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            yield from read_lines(_short_lines(file, path), str(path), warn)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "is not text"
        raise RecordingError(str(path), None, f"cannot be read: {why}") from None


def _short_lines(file: TextIO, path: Path) -> Iterator[str]:
    number = 0
    while text := file.readline(LINE_CHARS_MAX):
        number += 1
        if len(text) == LINE_CHARS_MAX:
            raise RecordingError(str(path), number, f"longer than {LINE_CHARS_MAX:,} characters")
        yield text


def _files(paths: Iterable[Path]) -> list[Path]:
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            found |= dict.fromkeys(sorted(path.glob("*.jsonl")))
        elif path.exists():
            found[path] = None
        else:
            raise RecordingError(str(path), None, "there is no such file or folder")
    return list(found)
