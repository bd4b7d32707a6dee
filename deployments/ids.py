"""Ids of requests: the server's own go everywhere; a client's goes into the log, cleaned and capped, nowhere else."""

from __future__ import annotations

import re
import secrets

CLIENT_ID_CHARS_MAX = 128
_UNPRINTABLE = re.compile(r"[^\x21-\x7e]+")


def new_request_id() -> str:
    """``tg-`` and 128 random bits."""
    return "tg-" + secrets.token_hex(16)


def clean_client_id(value: bytes) -> str:
    """A client's id for the log: printable ASCII without spaces, capped."""
    return _UNPRINTABLE.sub("_", value[: CLIENT_ID_CHARS_MAX * 4].decode("latin-1"))[:CLIENT_ID_CHARS_MAX]
