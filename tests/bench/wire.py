"""A lean HTTP client for benchmarks that send hundreds of requests a second on the cores they measure.

One :class:`Wire` keeps its connections alive and reads answers as raw bytes: whole by their framing (length or chunks),
or not. It parses nothing on the way; :class:`Reply` looks into the bytes when it is asked.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tests.bench import harness as h

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MODEL = "smollm2-135m-instruct"
READ_BYTES = 262_144


@dataclass(slots=True)
class Reply:
    """One answer as it came over the wire. ``status`` 0: none came."""

    sent_s: float = 0.0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes = b""
    """The body; still in chunks when it came so."""
    ttft_ms: float | None = None
    """From sending to the first body byte."""
    e2e_ms: float = 0.0
    whole: bool = False
    """The body came to its end."""
    left: bool = False
    """The client closed the connection before the end."""

    @property
    def stream(self) -> bool:
        """Server-sent events."""
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def ok(self) -> bool:
        """What a client would call a success."""
        if self.status != 200 or not self.whole:
            return False
        return not self.stream or (b"[DONE]" in self.raw and b'"error"' not in self.raw)

    @property
    def retry_after_s(self) -> float | None:
        """What the server asks for."""
        try:
            return float(self.headers["retry-after"])
        except (KeyError, ValueError):
            return None

    @property
    def body(self) -> bytes:
        """Without chunk framing."""
        return unchunk(self.raw) if "chunked" in self.headers.get("transfer-encoding", "") else self.raw

    def events(self) -> list[Any]:
        """Parsed events of a stream, the end mark left out."""
        lines = [line[6:].strip() for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        return [json.loads(line) for line in lines if line != b"[DONE]"]

    def error_code(self) -> str:
        """Code of the error object, or what stands for it: ``ok``, ``left``, ``cut``, ``none``."""
        if self.ok:
            return "ok"
        if self.left:
            return "left"
        if self.status == 0:
            return "none"
        try:
            found = self.events()[-1] if self.stream else json.loads(self.body)
            return str((found.get("error") or {}).get("code"))
        except (ValueError, IndexError, AttributeError):
            return "cut"


def unchunk(raw: bytes) -> bytes:
    """The payload of a body in HTTP/1.1 chunks; what is there of it when it was cut."""
    parts, at = [], 0
    while (end := raw.find(b"\r\n", at)) > 0:
        size = int(raw[at:end].split(b";")[0], 16)
        parts.append(raw[end + 2 : end + 2 + size])
        at = end + 4 + size
        if not size:
            break
    return b"".join(parts)


@dataclass(slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class Wire:
    """Connections to one server. ``key``: API key sent with each request."""

    def __init__(self, url: str = h.URL, key: str | None = None) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._auth = f"authorization: Bearer {key}\r\n" if key else ""
        self._idle: list[_Connection] = []

    async def post(
        self,
        path: str,
        body: dict[str, Any],
        *,
        leave_after_s: float | None = None,
        timeout_s: float = 120,
        reply: Reply | None = None,
    ) -> Reply:
        """Send one request and read its answer; never raises for what the server or the network does.

        A ``reply`` that is given is filled while the answer comes in, for callers that watch it.
        """
        reply = reply or Reply()
        reply.sent_s = time.perf_counter()
        limit = min(timeout_s, leave_after_s) if leave_after_s is not None else timeout_s
        connection: _Connection | None = None
        reused = False
        try:
            async with asyncio.timeout(limit):
                for _ in range(2):
                    connection, reused = await self._take()
                    try:
                        await self._exchange(connection, path, body, reply)
                        break
                    except (OSError, asyncio.IncompleteReadError):
                        # A kept connection may have been closed at the other end meanwhile: once more on a new one.
                        connection.writer.close()
                        connection = None
                        if not reused or reply.status:
                            break
        except TimeoutError:
            reply.left = True
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        reply.e2e_ms = (time.perf_counter() - reply.sent_s) * 1e3
        self._give_back(connection, reply)
        return reply

    async def _take(self) -> tuple[_Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if not connection.reader.at_eof() and not connection.writer.is_closing():
                return connection, True
            connection.writer.close()
        return _Connection(*await asyncio.open_connection(self._host, self._port, limit=READ_BYTES)), False

    async def _exchange(self, connection: _Connection, path: str, body: dict[str, Any], reply: Reply) -> None:
        raw = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n{self._auth}"
            f"content-length: {len(raw)}\r\n\r\n"
        )
        connection.writer.write(head.encode() + raw)
        answer = await connection.reader.readuntil(b"\r\n\r\n")
        first, *lines = answer.decode("latin-1").split("\r\n")
        for line in lines:
            name, _, value = line.partition(":")
            reply.headers[name.lower()] = value.strip()
        reply.status = int(first.split(" ", 2)[1])
        await self._read_body(connection.reader, reply)

    async def _read_body(self, reader: asyncio.StreamReader, reply: Reply) -> None:
        length = reply.headers.get("content-length")
        wanted = int(length) if length is not None else None
        parts: list[bytes] = []
        size = 0
        try:
            while wanted is None or size < wanted:
                part = await reader.read(READ_BYTES)
                if not part:
                    return
                if reply.ttft_ms is None:
                    reply.ttft_ms = (time.perf_counter() - reply.sent_s) * 1e3
                parts.append(part)
                size += len(part)
                if wanted is None and b"".join(parts[-2:]).endswith(b"\r\n0\r\n\r\n"):
                    break
            reply.whole = True
        finally:
            reply.raw = b"".join(parts)

    def _give_back(self, connection: _Connection | None, reply: Reply) -> None:
        if connection is None:
            return
        if reply.whole and reply.headers.get("connection", "").lower() != "close":
            self._idle.append(connection)
        else:
            connection.writer.close()

    def close(self) -> None:
        """Close the connections that are kept."""
        while self._idle:
            self._idle.pop().writer.close()


def completion(prompt: str, tokens: int, stream: bool = True, **more: Any) -> dict[str, Any]:
    """Body of a completion of exactly ``tokens`` output tokens."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body | more


def codes(replies: list[Reply]) -> str:
    """How many ended with which code, most frequent first."""
    counted = Counter(f"{r.status} {r.error_code()}" if r.status != 200 or not r.ok else "ok" for r in replies)
    return ", ".join(f"{name}: {n}" for name, n in counted.most_common(6))
