"""Bytes from a replica: against a real socket server that sends exactly what each test scripts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from deployments.clock import now_ns
from deployments.relay import (
    TAIL_BYTES_MAX,
    TAIL_CHUNKS_MAX,
    Exchange,
    Tail,
    first_event_error,
    has_stream_error,
    usage_of,
)
from deployments.upstream import (
    HEADERS_MAX,
    IDLE_CONNECTIONS_MAX,
    KEEPALIVE_S,
    READ_BUFFER_BYTES,
    ConnectionPool,
    ReplicaUnreachableError,
    UpstreamBrokenError,
    request_message,
)
from policies.events import UpstreamFailure, Usage

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 5\r\n\r\nhello"


class Server:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.connections = 0
        self.requests: list[bytes] = []
        self.asked = asyncio.Event()
        self.lost = asyncio.Event()
        self.endpoint = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                self.asked.set()
                await self.script(reader, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.lost.set()
        finally:
            writer.close()


@asynccontextmanager
async def server(script: Script) -> AsyncIterator[Server]:
    mine = Server(script)
    listener = await asyncio.start_server(mine.handle, "127.0.0.1", 0)
    mine.endpoint = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield mine
    finally:
        listener.close()


def sends(*pieces: bytes, close: bool = False) -> Script:
    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        if close:
            writer.close()
            raise ConnectionError

    return script


def pool() -> ConnectionPool:
    return ConnectionPool(connect_timeout_ms=2_000)


async def fetch(connections: ConnectionPool, endpoint: str) -> tuple[int, bytes]:
    exchange = Exchange(connections, endpoint)
    try:
        await exchange.open("/p", [("x-a", "b")], b"body")
        return exchange.status, await exchange.read_all(1_000_000)
    finally:
        exchange.close()


# --- requests ---------------------------------------------------------------------------------------------------------


async def test_request_goes_out_as_written() -> None:
    async with server(sends(OK)) as s:
        assert await fetch(pool(), s.endpoint) == (200, b"hello")
        assert s.requests == [request_message("/p", s.endpoint, [("x-a", "b")], b"body")]
        assert s.requests[0].startswith(b"POST /p HTTP/1.1\r\nhost: 127.0.0.1:")
        assert s.requests[0].endswith(b"\r\nx-a: b\r\n\r\nbody")


async def test_body_arrives_byte_for_byte_however_it_is_cut() -> None:
    body = bytes(range(256)) * 40
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    chunked += b"".join(b"%x\r\n%s\r\n" % (len(body[i : i + 77]), body[i : i + 77]) for i in range(0, len(body), 77))
    chunked += b"0\r\n\r\n"
    for size in (1, 7, 1_000, len(chunked)):
        pieces = [chunked[i : i + size] for i in range(0, len(chunked), size)]
        if size == 1:
            pieces = [*pieces[:300], chunked[300:]]

        async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter, parts: list[bytes] = pieces) -> None:
            for part in parts:
                writer.write(part)
                await asyncio.sleep(0)

        async with server(script) as s:
            assert await fetch(pool(), s.endpoint) == (200, body)


async def test_a_body_without_length_ends_with_the_connection() -> None:
    async with server(sends(b"HTTP/1.1 200 OK\r\n\r\nhello", b" there", close=True)) as s:
        assert await fetch(pool(), s.endpoint) == (200, b"hello there")


async def test_interim_responses_are_passed_over() -> None:
    async with server(sends(b"HTTP/1.1 102 Processing\r\nx: y\r\n\r\n", OK)) as s:
        assert await fetch(pool(), s.endpoint) == (200, b"hello")


async def test_only_the_bodys_headers_go_to_the_client() -> None:
    head = b"HTTP/1.1 200 OK\r\nServer: engine\r\nContent-Type: a/b; c=d\r\nSet-Cookie: x\r\nContent-Length: 0\r\n\r\n"
    async with server(sends(head)) as s:
        exchange = Exchange(pool(), s.endpoint)
        await exchange.open("/", [], b"")
        assert exchange.relayed_headers() == [(b"content-type", b"a/b; c=d"), (b"content-length", b"0")]
        assert exchange.content_type == "a/b"
        exchange.close()


async def test_read_all_stops_at_its_limit() -> None:
    async with server(sends(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n" + b"x" * 100_000)) as s:
        exchange = Exchange(pool(), s.endpoint)
        await exchange.open("/", [], b"")
        assert await exchange.read_all(10) == b"x" * 10
        exchange.close()


# --- what breaks ------------------------------------------------------------------------------------------------------


async def test_a_closed_port_is_unreachable_and_refused() -> None:
    async with server(sends(OK)) as s:
        endpoint = s.endpoint
    with pytest.raises(ReplicaUnreachableError) as caught:
        await fetch(pool(), endpoint)
    assert caught.value.refused


@pytest.mark.parametrize("endpoint", ["nonsense", "127.0.0.1:x", ""])
async def test_a_nonsensical_address_is_unreachable(endpoint: str) -> None:
    with pytest.raises(ReplicaUnreachableError):
        await fetch(pool(), endpoint)


@pytest.mark.parametrize(
    ("pieces", "kind"),
    [
        ((), UpstreamFailure.RESET),
        ((b"HTTP/1.1 200 OK\r\ncontent-le",), UpstreamFailure.RESET),
        ((b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nhello",), UpstreamFailure.RESET),
        ((b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",), UpstreamFailure.RESET),
        ((b"not http at all\r\n\r\n",), UpstreamFailure.PROTOCOL),
        ((b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",), UpstreamFailure.PROTOCOL),
        ((b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * (HEADERS_MAX + 1) + b"\r\n",), UpstreamFailure.PROTOCOL),
        ((b"HTTP/1.1 200 OK\r\na: " + b"b" * 70_000 + b"\r\n\r\n",), UpstreamFailure.PROTOCOL),
    ],
)
async def test_a_response_that_breaks_off_says_how(pieces: tuple[bytes, ...], kind: UpstreamFailure) -> None:
    async with server(sends(*pieces, close=True)) as s:
        with pytest.raises(UpstreamBrokenError) as caught:
            await fetch(pool(), s.endpoint)
        assert caught.value.kind is kind


async def test_bytes_before_the_break_are_handed_on_first() -> None:
    async with server(sends(b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nhello", close=True)) as s:
        exchange = Exchange(pool(), s.endpoint)
        await exchange.open("/", [], b"")
        assert await exchange.connection.read() == b"hello"
        with pytest.raises(UpstreamBrokenError):
            await exchange.connection.read()
        exchange.close()


async def never_ends(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nhello")
    await asyncio.Event().wait()


async def test_closing_an_open_exchange_hangs_up_at_once() -> None:
    gone = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nhello")
        try:
            assert await reader.read(1) == b""
        finally:
            gone.set()

    async with server(script) as s:
        connections = pool()
        exchange = Exchange(connections, s.endpoint)
        await exchange.open("/", [], b"")
        exchange.close()
        exchange.close()
        await asyncio.wait_for(gone.wait(), 5)
        assert connections.idle == 0


async def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    async with server(never_ends) as s:
        connections = pool()
        task = asyncio.create_task(fetch(connections, s.endpoint))
        await s.asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert connections.idle == 0


async def test_reading_ahead_of_a_slow_client_is_bounded() -> None:
    total = 64 * 1024 * 1024
    sent = 0

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total)
        while sent < total:
            writer.write(b"x" * 65_536)
            await writer.drain()
            sent += 65_536

    async with server(script) as s:
        exchange = Exchange(pool(), s.endpoint)
        await exchange.open("/", [], b"")
        last = -1
        while sent != last:  # until the replica is held up
            last = sent
            await asyncio.sleep(0.3)
        assert sent < total
        largest, received = 0, 0
        while chunk := await exchange.connection.read():
            largest, received = max(largest, len(chunk)), received + len(chunk)
        assert received == total
        assert largest < READ_BUFFER_BYTES * 4
        exchange.close()


# --- connections ------------------------------------------------------------------------------------------------------


async def test_a_complete_exchange_leaves_its_connection_for_the_next() -> None:
    async with server(sends(OK)) as s:
        connections = pool()
        for _ in range(3):
            assert await fetch(connections, s.endpoint) == (200, b"hello")
        assert s.connections == 1
        assert connections.idle == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 5\r\n\r\nhello",
        b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello",
    ],
)
async def test_a_replica_that_closes_is_believed(answer: bytes) -> None:
    async with server(sends(answer)) as s:
        connections = pool()
        await fetch(connections, s.endpoint)
        assert connections.idle == 0


async def test_a_connection_that_was_closed_while_idle_is_not_used() -> None:
    async with server(sends(OK, close=True)) as s:
        connections = pool()
        assert await fetch(connections, s.endpoint) == (200, b"hello")
        await asyncio.sleep(0.1)
        assert await fetch(connections, s.endpoint) == (200, b"hello")
        assert s.connections == 2


async def test_bytes_nobody_asked_for_close_the_connection() -> None:
    async with server(sends(OK, OK)) as s:
        connections = pool()
        await fetch(connections, s.endpoint)
        await asyncio.sleep(0.1)
        assert await fetch(connections, s.endpoint) == (200, b"hello")
        assert s.connections == 2


async def test_idle_connections_are_pruned_by_age_and_by_membership() -> None:
    async with server(sends(OK)) as s:
        connections = pool()
        await fetch(connections, s.endpoint)
        connections.prune([s.endpoint], now_ns())
        assert connections.idle == 1
        connections.prune([s.endpoint], now_ns() + int(KEEPALIVE_S * 1e9) + 1)
        assert connections.idle == 0
        await fetch(connections, s.endpoint)
        connections.prune(["127.0.0.1:1"], now_ns())
        assert connections.idle == 0


@pytest.mark.slow
async def test_idle_connections_per_replica_are_bounded() -> None:
    count = IDLE_CONNECTIONS_MAX + 20
    async with server(sends(OK)) as s:
        connections = pool()
        await asyncio.gather(*(fetch(connections, s.endpoint) for _ in range(count)))
        assert 0 < connections.idle <= IDLE_CONNECTIONS_MAX
        connections.close()
        assert connections.idle == 0


# --- the little that is read ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b'data: {"error": {"message": "x"}}\n\n', True),
        (b'data: {"id":"1"}\n\ndata: {"error":{"message":"x"}}\n\ndata: [DONE]\n\n', True),
        (b'event: error\ndata: {"type":"error","error":{}}\n\n', True),
        (b'data: {"type":"error","message":"x"}\n\n', True),
        (b'data: {"choices":[{"delta":{"content":"say \\"error\\": {"}}]}\n\n', False),
        (b'data: {"type":"response.completed","response":{"error":null}}\n\n', False),
        (b"data: [DONE]\n\n", False),
        (b"", False),
    ],
)
def test_an_engines_error_in_a_stream_is_told_from_text(data: bytes, error: bool) -> None:
    assert has_stream_error(data) is error


@pytest.mark.parametrize(
    ("data", "usage"),
    [
        (b'{"choices":[],"usage":{"prompt_tokens":7,"total_tokens":9,"completion_tokens":2,"prompt_tokens_details":null}}',
         Usage(7, 2, None)),
        (b'data: {"usage":null}\n\ndata: {"usage": {"completion_tokens":2}}\n\ndata: [DONE]\n\n', Usage(None, 2, None)),
        (b'{"usage": {"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":4}}}', Usage(7, None, 4)),
        (b'{"usage":{"input_tokens":3,"output_tokens":4,"input_tokens_details":{"cached_tokens":0}}}', Usage(3, 4, 0)),
        (b'{"usage":{"input_tokens":3,"output_tokens":4,"cache_read_input_tokens":1}}', Usage(3, 4, 1)),
        (b'{"usage":{"prompt_tokens":1,"completion_tokens":1}} {"usage":{"prompt_tokens":2,"completion_tokens":2}}',
         Usage(2, 2, None)),
        (b'{"text":"\\"usage\\": {\\"prompt_tokens\\": 9}"}', Usage()),
        (b'{"usage":{"prompt_tokens":"7","completion_tokens":true}}', Usage()),
        (b'{"usage":{"prompt_tokens":-1}}', Usage()),
        (b'{"usage":{"prompt_tokens":', Usage()),
        (b'{"usage":{' + b'"a":{' * 5_000, Usage()),
        (b"", Usage()),
    ],
)  # fmt: skip
def test_usage_is_read_from_the_end_of_a_response(data: bytes, usage: Usage) -> None:
    assert usage_of(data) == usage


def test_the_tail_is_bounded() -> None:
    tail = Tail()
    for i in range(1_000):
        tail.chunks.append(bytes([i % 256]) * (TAIL_BYTES_MAX * 2))
    assert len(tail.bytes()) == TAIL_CHUNKS_MAX * TAIL_BYTES_MAX
    assert tail.bytes()[-1] == 999 % 256


@pytest.mark.parametrize(
    ("chunk", "status"),
    [
        (b'data: {"error": {"message": "x", "code": 400}}\n\ndata: [DONE]\n\n', 400),
        (b'data: {"error": {"message": "x", "code": "odd"}}\n\n', 500),
        (b'data: {"error": {"message": "x", "code": 200}}\n\n', 500),
        (b'event: error\r\ndata: {"type":"error","error":{"type":"a","message":"x"}}\r\n\r\n', 500),
        (b'data: {"choices": []}\n\ndata: {"error": {"message": "x"}}\n\n', None),
        (b'data: {"choices": [{"delta": {"content": "\\"error\\""}}]}\n\n', None),
        (b'data: {"response": {"error": null}, "type": "response.created"}\n\n', None),
        (b'data: {"error": nul', None),
        (b'data: ["error"]\n\n', None),
        (b"", None),
    ],
)
def test_a_stream_that_begins_with_an_error_is_told(chunk: bytes, status: int | None) -> None:
    found = first_event_error(chunk)
    assert (found[0] if found else None) == status
