"""API keys as they are stored: who a key is, what it may do, and a salted hash in the place of the key.

    tg-<id>-<secret>        id: 12 hexadecimal digits, not secret; secret: 256 random bits in hexadecimal
    hash = HMAC-SHA256(salt, secret)

A fast hash is right here. Slow ones (scrypt, argon2) protect what people can guess; nobody guesses 256 random bits,
and a slow hash on every request would be a way to stop the gateway. The salt makes equal hashes in two files say
nothing. The id finds the record without a search, so that exactly one hash is computed whatever the number of keys.
"""

from __future__ import annotations

import dataclasses
import hmac
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import Strict

from policies.config_base import ConfigError

INFERENCE = "inference"
METRICS = "metrics"
CONTROL_READ = "control:read"
CONTROL_WRITE = "control:write"
SCOPES = (INFERENCE, METRICS, CONTROL_READ, CONTROL_WRITE)
"""What a key may be for: the API; ``/metrics`` and ``/control/metrics``; what else is below ``/control``, by GET; by
other methods."""

KEY_BYTES_MAX = 256
"""A longer key is not looked at."""
ID_BYTES = 6
SECRET_BYTES = 32
SALT_BYTES = 16

PREFIX = "tg"
_ID = re.compile(r"[A-Za-z0-9_]{1,64}")
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SALT = re.compile(r"([0-9a-f]{2}){8,64}")
_HASH = re.compile(r"[0-9a-f]{64}")
_LOOKS_LIKE_A_KEY = re.compile(rf"{PREFIX}-[A-Za-z0-9_]+-[A-Za-z0-9_-]+")


def seconds_of(time: str) -> float:
    """Seconds since 1970 of an ISO 8601 time with a zone. Raises ``ValueError``."""
    parsed = datetime.fromisoformat(time)
    if parsed.tzinfo is None:
        raise ValueError("has no time zone")
    return parsed.timestamp()


def time_of(seconds: float) -> str:
    """ISO 8601, UTC, whole seconds."""
    return datetime.fromtimestamp(int(seconds), UTC).isoformat().replace("+00:00", "Z")


def hide_keys(text: str) -> str:
    """``text`` with everything that looks like a key cut down to its beginning."""
    return _LOOKS_LIKE_A_KEY.sub(f"{PREFIX}-...", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """One key without its secret. Times are ISO 8601 with a zone."""

    id: str
    tenant: str
    scopes: Annotated[tuple[str, ...], Strict(False)]
    """Some of :data:`SCOPES`."""
    salt: str
    """Hexadecimal."""
    hash: str
    """HMAC-SHA256 of the secret under the salt, hexadecimal."""
    created: str
    expires: str | None = None
    """``None``: never."""
    revoked: str | None = None
    """Not ``None``: no longer valid, and since when."""

    def __post_init__(self) -> None:
        _need(_matches(_ID, self.id), "id", "must be 1 to 64 letters, digits or _")
        _need(_matches(_TENANT, self.tenant), "tenant", "must be 1 to 64 letters, digits, . _ or -")
        known = [scope for scope in self.scopes if scope in SCOPES]
        _need(0 < len(known) == len(self.scopes), "scopes", f"must be a list of some of: {', '.join(SCOPES)}")
        _need(_matches(_SALT, self.salt), "salt", "must be 16 to 128 hexadecimal digits, an even number")
        _need(_matches(_HASH, self.hash), "hash", "must be 64 hexadecimal digits")
        for name in ("created", "expires", "revoked"):
            value = getattr(self, name)
            _need(
                _is_time(value) or (value is None and name != "created"),
                name,
                "must be a time such as 2026-11-30T12:00:00Z",
            )

    @property
    def created_s(self) -> float:
        """Seconds since 1970."""
        return seconds_of(self.created)

    @property
    def expires_s(self) -> float:
        """Seconds since 1970; infinity when it never expires."""
        return float("inf") if self.expires is None else seconds_of(self.expires)

    def state(self, now_s: float) -> str:
        """``valid``, ``expired`` or ``revoked`` at ``now_s`` seconds since 1970."""
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires_s <= now_s else "valid"


def _need(ok: bool, field: str, message: str) -> None:
    if not ok:
        raise ConfigError(field, message)


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_time(value: object) -> bool:
    try:
        return isinstance(value, str) and seconds_of(value) >= 0
    except ValueError:
        return False


# --- keys -------------------------------------------------------------------------------------------------------------


def secret_hash(salt: bytes, secret: bytes) -> bytes:
    """The stored form of ``secret``: 32 bytes."""
    return hmac.digest(salt, secret, "sha256")


def split_key(key: bytes) -> tuple[str, bytes] | None:
    """Id and secret of a key as a client sent it; ``None`` when it has not the form of one."""
    parts = key.split(b"-", 2)
    if len(key) > KEY_BYTES_MAX or len(parts) != 3 or parts[0] != PREFIX.encode() or not parts[2]:
        return None
    return parts[1].decode("latin-1"), parts[2]


def new_key(tenant: str, scopes: Sequence[str], now_s: float, expires_s: float | None = None) -> tuple[str, KeyRecord]:
    """A fresh key and its record. The key is not kept anywhere: whoever loses it makes another.

    Args:
        tenant: whom requests with the key are counted for.
        scopes: some of :data:`SCOPES`.
        now_s: time of creation, seconds since 1970.
        expires_s: seconds since 1970; ``None``: never.

    Raises:
        ConfigError: tenant or scopes are not valid.
    """
    key_id, secret, salt = secrets.token_hex(ID_BYTES), secrets.token_hex(SECRET_BYTES), secrets.token_bytes(SALT_BYTES)
    record = KeyRecord(
        id=key_id,
        tenant=tenant,
        scopes=tuple(dict.fromkeys(scopes)),
        salt=salt.hex(),
        hash=secret_hash(salt, secret.encode()).hex(),
        created=time_of(now_s),
        expires=None if expires_s is None else time_of(expires_s),
    )
    return f"{PREFIX}-{key_id}-{secret}", record


def record_of(values: object) -> KeyRecord:
    """A record from parsed JSON. Raises ``ValueError`` with words that hold none of the values."""
    if not isinstance(values, dict):
        raise ValueError("must be an object with id, tenant, scopes, salt, hash and created")
    fields = {field.name: field for field in dataclasses.fields(KeyRecord)}
    if len(values.keys() - fields.keys()) > 0:
        raise ValueError(f"has a field that is none of: {', '.join(fields)}")
    missing = [name for name, f in fields.items() if f.default is dataclasses.MISSING and name not in values]
    if missing:
        raise ValueError(f"{missing[0]}: is missing")
    scopes = values["scopes"]
    arguments: dict[str, Any] = {**values, "scopes": tuple(scopes) if isinstance(scopes, list) else ()}
    return KeyRecord(**arguments)


def values_of(record: KeyRecord) -> dict[str, Any]:
    """The JSON object of ``record``, without fields that are ``None``."""
    values = {name: value for name, value in dataclasses.asdict(record).items() if value is not None}
    return {**values, "scopes": list(record.scopes)}
