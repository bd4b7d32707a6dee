"""The page at ``/dashboard`` as one document: its files joined once, with the headers it is served with.

No build step and nothing from elsewhere: styles and scripts stand in the document, and the Content-Security-Policy
names them by their hashes, so that a browser runs these bytes and no others and talks to this gateway only. The
document is the same for everybody and holds nothing of the system it is served by.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SCRIPTS = ("kit.js", "charts.js", "replicas.js", "fleet.js", "try.js", "main.js")
"""In the order in which they stand in the document."""
POLICY = (
    "default-src 'none'; script-src '{script}'; style-src '{style}'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
FIXED_HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"vary", b"accept-encoding"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class Page:
    """One document. ``style`` and ``script`` take the places of ``/*css*/`` and ``/*js*/`` in ``document``."""

    def __init__(self, document: str, style: str, script: str) -> None:
        self.body = document.replace("/*css*/", style).replace("/*js*/", script).encode()
        self.packed = gzip.compress(self.body, mtime=0)
        self._tag = f'W/"{hashlib.sha256(self.body).hexdigest()[:32]}"'.encode()
        policy = POLICY.format(script=_hash_source(script), style=_hash_source(style))
        self._headers = [(b"etag", self._tag), (b"content-security-policy", policy.encode()), *FIXED_HEADERS]

    def answer(self, headers: Mapping[bytes, bytes]) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Status, headers and body for a client that sent ``headers``: 304 without a body where it has this page."""
        seen = [tag.strip() for tag in headers.get(b"if-none-match", b"").split(b",")]
        if self._tag in seen or b"*" in seen:
            return 304, self._headers, b""
        found, body = [*self._headers, (b"content-type", b"text/html; charset=utf-8")], self.body
        if _takes_gzip(headers.get(b"accept-encoding", b"")):
            found, body = [*found, (b"content-encoding", b"gzip")], self.packed
        return 200, [*found, (b"content-length", str(len(body)).encode())], body


def _hash_source(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _takes_gzip(accepted: bytes) -> bool:
    for part in accepted.lower().split(b","):
        name, *parameters = (field.strip() for field in part.split(b";"))
        if name in {b"gzip", b"*"}:
            return not any(p.replace(b" ", b"").strip(b"0.") == b"q=" for p in parameters)
    return False


@cache
def load_page() -> Page:
    """The page of this folder; read once."""
    document, style = ((FOLDER / name).read_text(encoding="utf-8") for name in ("page.html", "page.css"))
    return Page(document, style, "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS))
