"""Who asks: an API key becomes a principal (tenant, scopes), or the request ends with 401.

    Authorization: Bearer tg-<id>-<secret>   or   x-api-key: tg-<id>-<secret>      (both only when they are the same)
    record = table[id]      HMAC-SHA256(record.salt, secret) == record.hash, in constant time      valid now

Denied by default: without ``auth`` in the configuration a key is needed on every path, unknown ones included, and
before anything else about a request is looked at. An unknown id costs the same hash and comparison as a known one.
Nothing said here holds any part of a key: not errors, not logs, not labels. Why a key is no longer valid (expired,
revoked) is told to its holder only.

``auth: none`` makes every client the tenant ``default`` with all scopes; who is a client then is for ``clients.py``.

The key file is looked at once a second by a task of its own and read in a thread. A file that cannot be used changes
nothing: the last good keys stay, one line is logged, ``tidegate_auth_key_reloads_total{result="failed"}`` grows.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from deployments.errors import GatewayError
from deployments.key_file import KeyFileError, read_keys
from deployments.keys import SCOPES, KeyRecord, secret_hash, split_key
from deployments.settings import AuthSettings, SettingsError
from deployments.telemetry import Telemetry
from policies.config import DEFAULT_TENANT

logger = logging.getLogger("ray.serve")

CHALLENGE = (b"www-authenticate", b'Bearer realm="tidegate"')
"""Header of every 401."""
RELOAD_S = 1.0
"""Period of the look at the key file."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Who a request is from."""

    tenant: str
    scopes: frozenset[str]
    key_id: str
    """Not secret; empty when there are no keys."""


ANYBODY = Principal(DEFAULT_TENANT, frozenset(SCOPES), "")
"""Every client under ``auth: none``."""


@dataclass(frozen=True, slots=True)
class _Entry:
    principal: Principal
    salt: bytes
    hash: bytes
    expires_s: float
    revoked: bool


_NOBODY = _Entry(Principal("", frozenset(), ""), bytes(16), bytes(32), 0.0, True)
"""What an unknown id is compared with: no secret has this hash."""


class Authenticator:
    """See the module. Keys of the configuration win over keys of the file with the same id."""

    def __init__(self, settings: AuthSettings, clock_s: Callable[[], float] = time.time) -> None:
        self._required = settings.required
        self._fixed = tuple(settings.keys)
        self._file = None if settings.keys_file is None else Path(settings.keys_file)
        self._clock_s = clock_s
        self._table: dict[str, _Entry] = {}
        self._seen: tuple[int, int, int] | None = None
        self._told: str | None = None
        self._task: asyncio.Task[None] | None = None
        self._take(())

    # --- one request --------------------------------------------------------------------------------------------------

    def authenticate(self, headers: Mapping[bytes, bytes]) -> Principal:
        """Who sent ``headers`` (names in lower case). Raises ``GatewayError`` 401."""
        if not self._required:
            return ANYBODY
        parts = split_key(given_key(headers))
        key_id, secret = ("", b"") if parts is None else parts
        entry = self._table.get(key_id, _NOBODY)
        right = hmac.compare_digest(secret_hash(entry.salt, secret), entry.hash)
        if not right or entry is _NOBODY:
            raise _unauthorised("The API key is not valid.")
        if entry.revoked:
            raise _unauthorised("The API key was revoked.")
        if entry.expires_s <= self._clock_s():
            raise _unauthorised("The API key has expired.")
        return entry.principal

    # --- the keys -----------------------------------------------------------------------------------------------------

    @property
    def keys_valid(self) -> int:
        """Keys that are accepted now."""
        at_s = self._clock_s()
        return sum(not entry.revoked and entry.expires_s > at_s for entry in self._table.values())

    def start(self, telemetry: Telemetry) -> None:
        """Read the key file now, so that the first request finds the keys, and follow it on the running event loop."""
        if not self._required:
            logger.warning("auth is 'none': every client of this host is answered, as tenant %r.", DEFAULT_TENANT)
            return
        self._count(self.reload(), telemetry)
        self._task = asyncio.get_running_loop().create_task(self._follow(telemetry))

    async def close(self) -> None:
        """Stop following."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def reload(self) -> bool | None:
        """Read the key file if it changed since the last look: whether it was good, ``None`` when nothing changed."""
        if self._file is None:
            return None
        seen, records, problem = _look(self._file, self._seen)
        return self._took(seen, records, problem)

    async def _follow(self, telemetry: Telemetry) -> None:
        while True:
            await asyncio.sleep(RELOAD_S)
            try:
                result = None
                if self._file is not None:
                    result = self._took(*await asyncio.to_thread(_look, self._file, self._seen))
                self._count(result, telemetry)
            except Exception:
                logger.exception("The watch over the key file failed; it goes on.")

    def _count(self, result: bool | None, telemetry: Telemetry) -> None:
        if result is not None:
            telemetry["tidegate_auth_key_reloads_total"].inc(result="ok" if result else "failed")
        telemetry["tidegate_auth_keys"].set(self.keys_valid)

    def _took(
        self, seen: tuple[int, int, int] | None, records: tuple[KeyRecord, ...] | None, problem: str | None
    ) -> bool | None:
        self._seen = seen
        if problem is not None:
            if problem == self._told:
                return None
            self._told = problem
            logger.error("auth.keys_file %s: %s; the last good keys stay (%d).", self._file, problem, len(self._table))
            return False
        if records is None:
            return None
        self._told = None
        self._take(records)
        logger.info("auth.keys_file %s: %d keys read.", self._file, len(records))
        return True

    def _take(self, records: Iterable[KeyRecord]) -> None:
        self._table = {record.id: _entry(record) for record in (*records, *self._fixed)}


def check_keys(settings: AuthSettings) -> str | None:
    """Raise ``SettingsError`` when the key file of this host cannot be used; return a warning where one is due."""
    if not settings.required:
        return "auth is 'none': every program on this machine may use the API, and nobody else"
    found: tuple[KeyRecord, ...] = ()
    if settings.keys_file is not None:
        try:
            found = read_keys(Path(settings.keys_file))
        except KeyFileError as error:
            hint = "" if Path(settings.keys_file).exists() else "; to make it: tidegate keys create"
            raise SettingsError([f"auth.keys_file: {settings.keys_file!r}: {error}{hint}"]) from None
    if not found and not settings.keys:
        return (
            "there are no API keys, so every request will be refused: set auth.keys_file, or auth: none for trying out"
        )
    return None


def _look(
    path: Path, seen: tuple[int, int, int] | None
) -> tuple[tuple[int, int, int] | None, tuple[KeyRecord, ...] | None, str | None]:
    """What the file is now, its records when it is not what was ``seen``, and what is wrong with it."""
    try:
        status = path.stat()
        found = (status.st_ctime_ns, status.st_size, status.st_ino)
        if found == seen:
            return seen, None, None
        return found, read_keys(path), None
    except OSError as error:
        return None, None, f"cannot be read: {error.strerror}"
    except KeyFileError as error:
        return None, None, str(error)


def _entry(record: KeyRecord) -> _Entry:
    principal = Principal(record.tenant, frozenset(record.scopes), record.id)
    revoked = record.revoked is not None
    return _Entry(principal, bytes.fromhex(record.salt), bytes.fromhex(record.hash), record.expires_s, revoked)


def given_key(headers: Mapping[bytes, bytes]) -> bytes:
    """The key in ``headers``. The scheme's name is read as RFC 7235 has it: in any case, any spaces after it.

    Raises:
        GatewayError: 401; there is none, or there are two that differ.
    """
    bearer, own = b"", headers.get(b"x-api-key", b"").strip()
    scheme, _, rest = headers.get(b"authorization", b"").strip().partition(b" ")
    if scheme.lower() == b"bearer":
        bearer = rest.strip(b" ")
    if bearer and own and not hmac.compare_digest(bearer, own):
        raise _unauthorised("Authorization and x-api-key hold two different keys; send one.")
    key = bearer or own
    if not key:
        raise _unauthorised("An API key is needed: send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'.")
    return key


def require(principal: Principal, scope: str | None) -> None:
    """Raise ``GatewayError`` 403 when ``principal`` has not ``scope``; ``None`` needs a valid key only."""
    if scope is not None and scope not in principal.scopes:
        message = f"This API key has not the scope {scope} that this path needs."
        raise GatewayError(403, "permission_error", "insufficient_scope", message)


def _unauthorised(message: str) -> GatewayError:
    return GatewayError(401, "authentication_error", "invalid_api_key", message)
