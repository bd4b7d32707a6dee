"""From a replica's response to the client: one exchange, and the little of it that is read.

Chunks are passed on as they came off the socket. Of their content only two cheap things are looked at: whether the
word ``"error"`` as a JSON key is in a chunk (a rare slow path reads on from there), and the last few chunks, from which
token usage and the end mark are read once, at the end.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Any

import msgspec

from deployments.clock import now_ns
from deployments.upstream import Connection, ConnectionPool, request_message
from policies.events import Usage

TAIL_CHUNKS_MAX = 4
TAIL_BYTES_MAX = 65_536
"""Of each kept chunk, only its end is looked at."""
USAGE_BYTES_MAX = 4_096
OPENING = ord("{")
ERROR_KEY = b'"error"'
EVENT_STREAM = "text/event-stream"
RELAYED_HEADERS = (b"content-type", b"content-length", b"content-encoding", b"cache-control")
"""Headers of a replica's response that belong to the client: those of its body."""


class Exchange:
    """One request to one replica. :meth:`close` gives the connection back or closes it; safe at any time."""

    def __init__(self, pool: ConnectionPool, endpoint: str) -> None:
        self._pool = pool
        self._endpoint = endpoint
        self._connection: Connection | None = None
        self.status = 0

    async def open(self, path: str, headers: list[tuple[str, str]], body: bytes) -> None:
        """Send the request; return when the response's head is here.

        Raises:
            ReplicaUnreachableError: nothing was sent.
            UpstreamBrokenError: it broke off before the head was complete.
        """
        self._connection = connection = await self._pool.acquire(self._endpoint, now_ns())
        await connection.request(request_message(path, self._endpoint, headers, body))
        self.status = connection.status

    @property
    def connection(self) -> Connection:
        """The connection, once opened; its ``read`` gives the body."""
        assert self._connection is not None
        return self._connection

    def header(self, name: bytes) -> bytes | None:
        """A header of the response, by lower-case name."""
        return self.connection.header(name)

    @property
    def content_type(self) -> str:
        """Media type of the body, lower case, without parameters."""
        value = self.header(b"content-type") or b""
        return value.split(b";", 1)[0].strip().lower().decode("latin-1")

    def relayed_headers(self) -> list[tuple[bytes, bytes]]:
        """Headers for the client."""
        return [(name, value) for name, value in self.connection.headers if name in RELAYED_HEADERS]

    async def read_all(self, bytes_max: int) -> bytes:
        """The whole body, at most ``bytes_max`` of it. Raises ``UpstreamBrokenError``."""
        parts: list[bytes] = []
        size = 0
        while chunk := await self.connection.read():
            parts.append(chunk)
            size += len(chunk)
            if size > bytes_max:
                break
        return b"".join(parts)[:bytes_max]

    def close(self) -> None:
        """Close the connection at once, unless the response is complete: then it is kept for another exchange."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._pool.release(self._endpoint, connection, now_ns())


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
_BRACE = re.compile(rb"[{}]")


def has_stream_error(data: bytes) -> bool:
    """Whether server-sent events in ``data`` carry an engine's error object (text inside strings is escaped)."""
    return _STREAM_ERROR.search(data) is not None


def first_event_error(chunk: bytes) -> tuple[int, bytes] | None:
    """Status and JSON of the engine's error when the first event of a stream is one; the client has seen nothing yet.

    The status is the one the error names, else 500.
    """
    if ERROR_KEY not in chunk:
        return None
    first = chunk.split(b"\n\n", 1)[0]
    data = b"".join(line[5:].strip() for line in first.splitlines() if line.startswith(b"data:"))
    try:
        value = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return None
    error = value.get("error") if isinstance(value, dict) else None
    if not isinstance(error, dict) or "choices" in value or "response" in value:
        return None
    code = error.get("code")
    return (code if isinstance(code, int) and 400 <= code <= 599 else 500), data


def usage_of(data: bytes) -> Usage:
    """Token counts of the last usage object in ``data``, in OpenAI's or Anthropic's names."""
    for match in reversed(list(_USAGE.finditer(data))):
        counts = _object_at(data, match.end() - 1)
        if counts is not None:
            return _usage(counts)
    return Usage()


def _object_at(data: bytes, start: int) -> dict[str, Any] | None:
    """The JSON object that begins at ``start``; usage objects hold no strings with braces."""
    depth = 0
    for brace in _BRACE.finditer(data, start, start + USAGE_BYTES_MAX):
        depth += 1 if data[brace.start()] == OPENING else -1
        if depth == 0:
            try:
                value = msgspec.json.decode(data[start : brace.end()])
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
