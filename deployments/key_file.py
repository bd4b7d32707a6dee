"""The file of API keys: one record a line, JSON; read whole, replaced whole.

It is replaced in one rename under a lock, so a reader sees the old or the new file, and two commands at once lose
nothing. A file that everybody on the host may write is refused: whoever writes it lets in whom he likes. A key that
is rotated or revoked stays in the file, with its state, until somebody takes the line out.

What is told about a file never holds a key, a salt or a hash.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from deployments.keys import KeyRecord, new_key, record_of, time_of, values_of

KEYS_MAX = 10_000
"""Keys of one file."""
KEYS_FILE_BYTES_MAX = 8_000_000


class KeyFileError(ValueError):
    """The key file cannot be used, or not for what was asked."""


def parse_keys(text: str) -> tuple[KeyRecord, ...]:
    """The records of a key file's text, without empty lines and lines that begin with #. Raises ``KeyFileError``."""
    found: dict[str, KeyRecord] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            record = record_of(json.loads(line))
        except json.JSONDecodeError:
            raise KeyFileError(f"line {number}: is not JSON") from None
        except (ValueError, RecursionError) as error:
            raise KeyFileError(f"line {number}: {error}") from None
        if record.id in found:
            raise KeyFileError(f"line {number}: the id is given twice")
        if len(found) >= KEYS_MAX:
            raise KeyFileError(f"line {number}: there are more than {KEYS_MAX} keys")
        found[record.id] = record
    return tuple(found.values())


def read_keys(path: Path) -> tuple[KeyRecord, ...]:
    """The records of the file at ``path``. Raises ``KeyFileError``."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise KeyFileError("is not a file")
            if status.st_mode & stat.S_IWOTH:
                raise KeyFileError("everybody on this host may write it: chmod o-w")
            content = file.read(KEYS_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise KeyFileError(f"cannot be read: {error.strerror}") from None
    if len(content) > KEYS_FILE_BYTES_MAX:
        raise KeyFileError(f"is larger than {KEYS_FILE_BYTES_MAX} bytes")
    try:
        return parse_keys(content.decode("utf-8"))
    except UnicodeDecodeError:
        raise KeyFileError("is not UTF-8") from None


def write_keys(path: Path, records: Iterable[KeyRecord]) -> None:
    """Replace the file at ``path`` in one step, readable by its owner and, as before, by whom it was readable."""
    lines = "".join(f"{json.dumps(values_of(record), separators=(', ', ': '))}\n" for record in records)
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o600
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(lines)
            os.fchmod(file.fileno(), mode)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise KeyFileError(f"cannot be written: {error.strerror}") from None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the right to change the file at ``path``; its folder is made when it is absent. Raises ``KeyFileError``."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise KeyFileError(f"cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# --- changes ----------------------------------------------------------------------------------------------------------


def add_key(path: Path, record: KeyRecord) -> None:
    """Append ``record``. Raises ``KeyFileError``."""
    _change(path, lambda records: (*records, record))


def revoke_key(path: Path, key_id: str, now_s: float) -> KeyRecord:
    """Take back the key at once and return its record; one that was revoked already stays as it is."""

    def revoke(records: tuple[KeyRecord, ...]) -> tuple[KeyRecord, ...]:
        old = _find(records, key_id)
        return records if old.revoked is not None else _with(records, replace(old, revoked=time_of(now_s)))

    return _find(_change(path, revoke), key_id)


def rotate_key(
    path: Path, key_id: str, now_s: float, grace_s: float, lifetime_s: float | None = None
) -> tuple[str, KeyRecord, KeyRecord]:
    """Make a key for the same tenant and scopes, and let the old one end.

    Args:
        path: the key file.
        key_id: id of the old key, which must be valid.
        now_s: seconds since 1970.
        grace_s: the old key stays valid for so long, in seconds; 0: not at all.
        lifetime_s: of the new key, in seconds; ``None``: that of the old one.

    Returns:
        The new key, its record, the old key's record.
    """
    made: list[tuple[str, KeyRecord]] = []

    def rotate(records: tuple[KeyRecord, ...]) -> tuple[KeyRecord, ...]:
        old = _find(records, key_id)
        if old.state(now_s) != "valid":
            raise KeyFileError(f"key {key_id} is {old.state(now_s)}; make a new one with keys create")
        ends_s = min(old.expires_s, now_s + grace_s)
        old = replace(old, revoked=time_of(now_s)) if grace_s <= 0 else replace(old, expires=time_of(ends_s))
        made.append(new_key(old.tenant, old.scopes, now_s, _end_s(_find(records, key_id), now_s, lifetime_s)))
        return (*_with(records, old), made[0][1])

    records = _change(path, rotate)
    return *made[0], _find(records, key_id)


def _end_s(old: KeyRecord, now_s: float, lifetime_s: float | None) -> float | None:
    if lifetime_s is not None:
        return now_s + lifetime_s
    return None if old.expires is None else now_s + old.expires_s - old.created_s


def _change(path: Path, change: Callable[[tuple[KeyRecord, ...]], tuple[KeyRecord, ...]]) -> tuple[KeyRecord, ...]:
    with locked(path):
        records = read_keys(path) if path.exists() else ()
        changed = change(records)
        if len(changed) > KEYS_MAX:
            raise KeyFileError(f"would have more than {KEYS_MAX} keys; take out lines of expired and revoked ones")
        if changed != records:
            write_keys(path, changed)
        return changed


def _find(records: Iterable[KeyRecord], key_id: str) -> KeyRecord:
    for record in records:
        if record.id == key_id:
            return record
    raise KeyFileError(f"there is no key {key_id}; to see all: keys list")


def _with(records: Iterable[KeyRecord], changed: KeyRecord) -> tuple[KeyRecord, ...]:
    return tuple(changed if record.id == changed.id else record for record in records)
