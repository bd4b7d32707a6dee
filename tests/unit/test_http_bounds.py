"""deployments/http_bounds.py over real sockets: what a client may send before the application looks at it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import uvicorn
import uvicorn.protocols.http.auto
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from deployments import http_bounds
from deployments.http_bounds import (
    CONNECTION_KEY,
    HEAD_BYTES_MAX,
    HEADERS_MAX,
    PIPELINED_MAX,
    BoundedHttp,
    bound_default_protocol,
)
from tests.unit.replica_bench import until

HEAD = b"POST /%s HTTP/1.1\r\nhost: here\r\n"
CHUNKED = HEAD % b"read" + b"transfer-encoding: chunked\r\n\r\n"


class QuietServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Bench:
    """A server whose application reads the body (``/read``), answers at once (``/early``) or streams (``/stream``)."""

    def __init__(self) -> None:
        self.scopes: list[Any] = []
        self.release = asyncio.Event()
        self.sock = socket.socket()
        self.sock.bind(("127.0.0.1", 0))
        quiet: Any = {"ws": "none", "lifespan": "off", "log_config": None, "log_level": 60, "timeout_keep_alive": 60}
        config = uvicorn.Config(self.app, interface="asgi3", http=BoundedHttp, **quiet)
        self.server = QuietServer(config)
        self.task = asyncio.create_task(self.server.serve(sockets=[self.sock]))

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        if scope["path"] == "/read":
            while (message := await receive())["type"] == "http.request" and message["more_body"]:
                pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/stream":
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            await self.release.wait()
        await send({"type": "http.response.body", "body": b"last"})

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self.sock.getsockname())


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    b = Bench()
    await until(lambda: b.server.started)
    yield b
    b.release.set()
    b.server.should_exit = True
    await asyncio.wait_for(b.task, 10)


async def answer(bench: Bench, *parts: bytes, end: bool = False) -> bytes:
    """All that comes back on a connection that sends ``parts``, until the server closes it."""
    reader, writer = await bench.connect()
    with contextlib.suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()
        if end:
            writer.write_eof()
    return await read_all(reader)


async def read_all(reader: asyncio.StreamReader) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionError):
        while more := await asyncio.wait_for(reader.read(65_536), 20):
            found += more
    return found


async def endless(bench: Bench, begin: bytes, part: bytes) -> tuple[bytes, int]:
    """Send ``begin`` and then ``part`` again and again: the answer, and the bytes sent until the connection ended."""
    reader, writer = await bench.connect()
    writer.write(begin)
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < 64_000_000 and not reader.at_eof():
            writer.write(part)
            await writer.drain()
            sent += len(part)
            await asyncio.sleep(0)
    return await read_all(reader), sent


async def test_requests_one_after_the_other_share_a_connection(bench: Bench) -> None:
    one = HEAD % b"read" + b"content-length: 3\r\n\r\nabc"
    last = HEAD % b"read" + b"connection: close\r\ncontent-length: 0\r\n\r\n"
    assert (await answer(bench, one, one, last)).count(b"200 OK") == 3


@pytest.mark.parametrize(
    ("begin", "part"),
    [
        (b"", b"a" * 65_536), (b"GET /", b"a" * 65_536), (HEAD % b"read" + b"x: ", b"a" * 65_536),
        (HEAD % b"read", b"x: y\r\n" * 10_000), (CHUNKED + b"1;ext=", b"a" * 65_536),
        (CHUNKED + b"0\r\n", b"x: y\r\n" * 10_000), (CHUNKED + b"0\r\nx: ", b"a" * 65_536),
    ],
    ids=["method", "path", "header", "headers", "chunk extension", "trailers", "trailer"],
)  # fmt: skip
async def test_nothing_is_read_without_end(bench: Bench, begin: bytes, part: bytes) -> None:
    _, sent = await endless(bench, begin, part)
    assert sent < 16_000_000


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * HEAD_BYTES_MAX + b" HTTP/1.1\r\n\r\n",
        HEAD % b"early" + b"x: " + b"a" * HEAD_BYTES_MAX + b"\r\n\r\n",
        HEAD % b"early" + b"x: y\r\n" * HEADERS_MAX + b"\r\n",
    ],
    ids=["path", "header", "headers"],
)
async def test_a_head_that_is_too_large_is_a_431_and_never_reaches_the_application(bench: Bench, head: bytes) -> None:
    assert b" 431 " in await answer(bench, head)
    assert bench.scopes == []


async def test_a_head_within_the_limits_passes(bench: Bench) -> None:
    few = HEAD % b"early" + b"connection: close\r\n" + b"x: y\r\n" * (HEADERS_MAX - 2) + b"\r\n"
    long = HEAD % b"early" + b"connection: close\r\nx: " + b"a" * (HEAD_BYTES_MAX - 200) + b"\r\n\r\n"
    for head in (few, long):
        assert b"200 OK" in await answer(bench, head)


@pytest.mark.parametrize("part", [b"GET / HTTP/1.1\r\nhost: h", b"G"])
async def test_a_head_that_does_not_come_to_its_end_is_a_408(
    bench: Bench, part: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_bounds, "HEAD_S_MAX", 0.1)
    assert b" 408 " in await answer(bench, part)


@pytest.mark.parametrize("part", [b"", b"\r\n"])
async def test_a_connection_without_a_request_is_closed_without_a_word(
    bench: Bench, part: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_bounds, "HEAD_S_MAX", 0.1)
    assert await answer(bench, part) == b""


async def test_a_late_head_ends_a_connection_that_had_requests(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_bounds, "HEAD_S_MAX", 0.1)
    reader, writer = await bench.connect()
    writer.write(HEAD % b"read" + b"content-length: 0\r\n\r\n")
    assert b"200 OK" in await reader.readuntil(b"0\r\n\r\n")
    writer.write(b"\r\n")
    assert await read_all(reader) == b""


async def test_a_long_answer_is_not_a_late_head(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_bounds, "HEAD_S_MAX", 0.1)
    reader, writer = await bench.connect()
    writer.write(HEAD % b"stream" + b"connection: close\r\ncontent-length: 0\r\n\r\n")
    await asyncio.sleep(0.3)
    bench.release.set()
    assert b"last" in await read_all(reader)


async def test_trailers_are_no_headers(bench: Bench) -> None:
    request = (
        HEAD % b"read" + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nhost: there\r\n\r\n"
    )
    assert b"200 OK" in await answer(bench, request)
    assert [value for name, value in bench.scopes[0]["headers"] if name == b"host"] == [b"here"]


async def test_pipelined_requests_are_bounded(bench: Bench) -> None:
    reader, writer = await bench.connect()
    writer.write(HEAD % b"stream" + b"content-length: 0\r\n\r\n")
    await until(lambda: len(bench.scopes) == 1)
    writer.write((HEAD % b"early" + b"content-length: 0\r\n\r\n") * (PIPELINED_MAX + 1))
    await writer.drain()
    found = await read_all(reader)
    assert found.count(b"HTTP/1.1") == 1
    assert len(bench.scopes) <= PIPELINED_MAX + 1


async def test_as_many_pipelined_requests_as_allowed_are_answered_in_order(bench: Bench) -> None:
    requests = (HEAD % b"early" + b"content-length: 0\r\n\r\n") * PIPELINED_MAX
    last = HEAD % b"early" + b"connection: close\r\ncontent-length: 0\r\n\r\n"
    assert (await answer(bench, requests, last)).count(b"200 OK") == PIPELINED_MAX + 1


async def test_the_rest_of_a_body_that_was_answered_early_has_its_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_bounds, "HEAD_S_MAX", 0.2)
    reader, writer = await bench.connect()
    writer.write(HEAD % b"early" + b"content-length: 1000000\r\n\r\n")
    assert b"200 OK" in await reader.readuntil(b"0\r\n\r\n")
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < 500 and not reader.at_eof():
            writer.write(b"a")
            await writer.drain()
            sent += 1
            await asyncio.sleep(0.01)
    assert sent < 500
    assert await read_all(reader) == b""


async def test_a_body_that_comes_in_time_leaves_the_connection_open(bench: Bench) -> None:
    late = HEAD % b"early" + b"content-length: 3\r\n\r\n"
    last = HEAD % b"read" + b"connection: close\r\ncontent-length: 0\r\n\r\n"
    assert (await answer(bench, late, b"abc", last)).count(b"200 OK") == 2


async def test_bytes_that_are_no_http_do_not_end_up_in_an_answer(bench: Bench) -> None:
    reader, writer = await bench.connect()
    writer.write(HEAD % b"stream" + b"content-length: 0\r\n\r\n")
    await until(lambda: len(bench.scopes) == 1)
    writer.write(b"\x00garbage\r\n\r\n")
    found = await read_all(reader)
    assert found.count(b"HTTP/1.1") == 1
    assert b"400" not in found


def test_it_becomes_the_default_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn.protocols.http.auto, "AutoHTTPProtocol", HttpToolsProtocol)
    bound_default_protocol()
    config = uvicorn.Config(lambda: None, http="auto")
    config.load()
    assert config.http_protocol_class is BoundedHttp


async def test_whoever_answers_is_told_once_when_the_client_leaves(bench: Bench) -> None:
    calls: list[str] = []
    _, writer = await bench.connect()
    writer.write(HEAD % b"stream" + b"\r\n")
    await until(lambda: bool(bench.scopes))
    connection = bench.scopes[0][CONNECTION_KEY]
    connection.when_lost = lambda: calls.append("left")
    assert not connection.lost
    writer.close()
    await until(lambda: connection.lost)
    assert calls == ["left"]
    assert connection.when_lost is None


async def test_a_closed_connection_is_gone_without_a_collection(bench: Bench) -> None:
    gc.collect()
    gc.disable()
    try:
        _, writer = await bench.connect()
        writer.write(HEAD % b"early" + b"content-length: 0\r\n\r\n")
        await until(lambda: bool(bench.scopes))
        connection = weakref.ref(bench.scopes.pop()[CONNECTION_KEY])
        writer.close()
        await until(lambda: connection() is None)
    finally:
        gc.enable()
