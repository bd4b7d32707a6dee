"""One HTTP exchange with a replica, as bytes: request out, response back, unparsed.

The gateway's per-chunk cost is here and in ``driver.py``: chunks are passed on as they came off the socket. Of their
content only two cheap things are looked at: whether the word ``"error"`` as a JSON key is in a chunk (a rare slow path
reads on from there), and the last few chunks, from which token usage and the end mark are read once, at the end.

A connection is used again only while it is younger than the replica's own keep-alive time, so that a request never runs
into a connection the replica is just closing: after the bytes are out, a reset cannot be told from a broken engine.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Any

import aiohttp
import msgspec

from policies.events import UpstreamFailure, Usage

KEEPALIVE_S = 60.0
"""Idle connections to replicas live this long; replicas keep theirs for 120 s."""
READ_BUFFER_BYTES = 65_536
"""Read ahead of a slow client per response; reading stops at twice this."""
TAIL_CHUNKS_MAX = 4
TAIL_BYTES_MAX = 65_536
"""Of each kept chunk, only its end is looked at."""
ERROR_KEY = b'"error"'


class ReplicaUnreachableError(Exception):
    """No connection to the replica: the request was not sent. ``refused`` is true when its port said no."""

    def __init__(self, refused: bool) -> None:
        super().__init__("the replica's port refused the connection" if refused else "the replica could not be reached")
        self.refused = refused


class UpstreamBrokenError(Exception):
    """The exchange broke off after the request was sent."""

    def __init__(self, kind: UpstreamFailure) -> None:
        super().__init__(kind.value)
        self.kind = kind


def new_session(connect_timeout_ms: float) -> aiohttp.ClientSession:
    """The one client session of a gateway: connections are bounded by what admission lets in, not here."""
    connector = aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=KEEPALIVE_S, use_dns_cache=True)
    return aiohttp.ClientSession(
        connector=connector,
        auto_decompress=False,
        trust_env=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        read_bufsize=READ_BUFFER_BYTES,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_ms / 1_000, sock_read=None),
        skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
    )


class Upstream:
    """One request to one replica. Cancelling any of its coroutines, or :meth:`abort`, closes the connection."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._response: aiohttp.ClientResponse | None = None

    async def open(self, url: str, headers: dict[str, str], body: bytes) -> aiohttp.ClientResponse:
        """Send the request and return the response's head.

        Raises:
            ReplicaUnreachableError: nothing was sent.
            UpstreamBrokenError: it broke off before the head was complete.
        """
        try:
            self._response = await self._session.post(url, data=body, headers=headers, allow_redirects=False)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            cause = getattr(error, "os_error", None)
            raise ReplicaUnreachableError(isinstance(cause, ConnectionRefusedError)) from None
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise UpstreamBrokenError(_failure(error)) from None
        return self._response

    async def chunk(self) -> bytes:
        """The bytes that have come in since the last call; ``b""`` once, at the end.

        Raises:
            UpstreamBrokenError: the body is incomplete.
        """
        response = self._response
        assert response is not None
        try:
            return await response.content.readany()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise UpstreamBrokenError(_failure(error)) from None

    async def read_all(self, bytes_max: int) -> bytes:
        """The whole body, at most ``bytes_max`` of it; a longer one is cut and its connection closed."""
        parts: list[bytes] = []
        size = 0
        while chunk := await self.chunk():
            parts.append(chunk)
            size += len(chunk)
            if size > bytes_max:
                self.abort()
                break
        return b"".join(parts)[:bytes_max]

    def abort(self) -> None:
        """Close the connection at once; the engine aborts the work. Safe at any time, more than once."""
        response = self._response
        if response is not None:
            response.close()


def _failure(error: Exception) -> UpstreamFailure:
    if isinstance(error, TimeoutError):
        return UpstreamFailure.TIMEOUT
    if isinstance(error, aiohttp.ClientResponseError):
        return UpstreamFailure.PROTOCOL
    return UpstreamFailure.RESET


def relayed_headers(response: aiohttp.ClientResponse) -> list[tuple[bytes, bytes]]:
    """Headers of the replica's response that belong to the client: those of its body."""
    kept = []
    for name in ("content-type", "content-length", "content-encoding", "cache-control"):
        value = response.headers.get(name)
        if value is not None:
            kept.append((name.encode(), value.encode("latin-1", "replace")))
    return kept


# --- the little that is read ------------------------------------------------------------------------------------------


class Tail:
    """The last chunks of a response: enough to find usage, an error and the end mark."""

    __slots__ = ("chunks",)

    def __init__(self) -> None:
        self.chunks: deque[bytes] = deque(maxlen=TAIL_CHUNKS_MAX)

    def bytes(self) -> bytes:
        """The end of the response as far as it is kept."""
        return b"".join(chunk[-TAIL_BYTES_MAX:] for chunk in self.chunks)


_STREAM_ERROR = re.compile(rb'(?:^|\n)data: ?\{"(?:error|type)": ?(?:\{|"error")|(?:^|\n)event: ?error')
_USAGE = re.compile(rb'"usage": ?\{')


def has_stream_error(data: bytes) -> bool:
    """Whether server-sent events in ``data`` carry an engine's error object (text inside strings is escaped)."""
    return _STREAM_ERROR.search(data) is not None


def usage_of(data: bytes) -> Usage:
    """Token counts of the last usage object in ``data``, in OpenAI's or Anthropic's names."""
    found = list(_USAGE.finditer(data))
    for match in reversed(found):
        counts = _object_at(data, match.end() - 1)
        if counts is not None:
            return _usage(counts)
    return Usage()


def _object_at(data: bytes, start: int) -> dict[str, Any] | None:
    """The JSON object that begins at ``start``; usage objects hold no strings with braces."""
    depth = 0
    for at in range(start, min(len(data), start + 4_096)):
        byte = data[at]
        depth += (byte == 0x7B) - (byte == 0x7D)
        if depth == 0:
            try:
                value = msgspec.json.decode(data[start : at + 1])
            except msgspec.DecodeError:
                return None
            return value if isinstance(value, dict) else None
    return None


def _usage(counts: dict[str, Any]) -> Usage:
    details = counts.get("prompt_tokens_details") or counts.get("input_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else counts.get("cache_read_input_tokens")
    return Usage(
        prompt_tokens=_count(counts.get("prompt_tokens", counts.get("input_tokens"))),
        output_tokens=_count(counts.get("completion_tokens", counts.get("output_tokens"))),
        cached_tokens=_count(cached),
    )


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
