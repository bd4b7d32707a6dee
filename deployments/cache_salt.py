r"""A tenant's own part of the KV cache: the salt its prompts are hashed with, made from a secret no client has.

    salt = base64url(HMAC-SHA256(secret, tenant \0 the client's own salt))

Engines find a cached prefix only under the salt it was computed with, so nobody can tell from speed what another tenant
sent. The gateway's field stands last in the body and wins over the client's, which goes into the hash: clients that
separate their own users stay separated. Without the secret nobody can make another tenant's salt, not even a tenant
that is not isolated and whose own salt is passed on.

All gateways need the same secret to find each other's prefixes. It is the first line of ``gateway.cache_salt_file``,
else 256 random bits that the controller keeps: it takes the first that a gateway offers and tells the others, and each
gateway starts with bits of its own until it is told. Then prefixes of its first second are cold, and never shared.
"""

from __future__ import annotations

import hmac
import secrets
from base64 import urlsafe_b64encode
from pathlib import Path

from policies.config import TenantConfig

SECRET_BYTES_MIN = 16
"""Shortest secret a file may hold."""
SECRET_BYTES_MAX = 1_024
SALTS_MAX = 1_024
"""Salts kept, one per tenant."""


class SaltFileError(ValueError):
    """The file with the secret cannot be used."""


class CacheSalt:
    """The secret of one gateway."""

    def __init__(self, file: str | None = None) -> None:
        self.configured = file is not None
        """The secret comes from a file, and nobody needs to be told or asked."""
        self._secret = _read(file) if file is not None else secrets.token_hex(32).encode()
        self._salts: dict[str, str] = {}
        """Of tenants whose clients named no salt of their own."""

    @property
    def offered(self) -> str | None:
        """What the controller is told; ``None``: the secret is everybody's already."""
        return None if self.configured else self._secret.decode()

    def take(self, secret: str | None) -> None:
        """Use the secret the controller keeps."""
        if secret and not self.configured:
            self._secret = secret.encode()
            self._salts.clear()

    def of(self, config: TenantConfig, tenant: str, client_salt: object) -> str | None:
        """The salt of a request of ``tenant``; ``None``: the body stays as it is.

        Args:
            config: what the tenant may do.
            tenant: its name.
            client_salt: ``cache_salt`` of the body, as it came.
        """
        if not config.isolate_cache:
            return None
        own = client_salt if isinstance(client_salt, str) else ""
        if own:
            return self._salt(tenant, own)
        salt = self._salts.get(tenant)
        if salt is None:
            if len(self._salts) >= SALTS_MAX:
                self._salts.clear()
            salt = self._salts[tenant] = self._salt(tenant, "")
        return salt

    def _salt(self, tenant: str, own: str) -> str:
        text = f"{tenant}\0{own}".encode("utf-8", "surrogatepass")
        return urlsafe_b64encode(hmac.digest(self._secret, text, "sha256")).rstrip(b"=").decode()


def _read(file: str) -> bytes:
    try:
        with Path(file).open("rb") as stream:
            secret = stream.readline(SECRET_BYTES_MAX + 1).strip()
    except OSError as error:
        raise SaltFileError(f"gateway.cache_salt_file: {file}: {error.strerror}") from None
    if not SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
        raise SaltFileError(
            f"gateway.cache_salt_file: {file}: its first line must have {SECRET_BYTES_MIN}..{SECRET_BYTES_MAX} bytes"
        )
    return secret
