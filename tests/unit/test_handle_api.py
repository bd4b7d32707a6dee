"""Handle API: bodies become JSON, server-sent events become dicts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest

from deployments.errors import GatewayError
from deployments.handle_api import CHUNKS_MAX, CollectSink, QueueSink, encode_body, parse_events

STREAM = (
    b'data: {"id":"1","choices":[{"delta":{"content":"a"}}]}\n\n'
    b": a comment\n\n"
    b'event: message_start\r\ndata: {"type":"message_start"}\r\n\r\n'
    b'data: {"choices":[],"usage":{"error":null}}\n\n'
    b"data: [DONE]\n\n"
)


async def events(data: bytes, size: int) -> list[dict[str, Any]]:
    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(data), size):
            yield data[at : at + size]

    return [event async for event in parse_events(chunks())]


@pytest.mark.parametrize("size", [1, 2, 3, 10, 1_000])
async def test_events_are_read_however_the_bytes_are_cut(size: int) -> None:
    found = await events(STREAM, size)
    assert [e.get("id") or e.get("type") or "usage" for e in found] == ["1", "message_start", "usage"]


async def test_a_rest_without_its_end_is_no_event() -> None:
    assert await events(b'data: {"id":"1"}', 4) == []


async def test_an_engines_error_in_a_stream_is_raised() -> None:
    with pytest.raises(GatewayError) as caught:
        await events(b'data: {"id":"1"}\n\ndata: {"error":{"message":"it broke","code":500}}\n\n', 50)
    assert caught.value.message == "it broke"


@pytest.mark.parametrize("data", [b"data: {broken\n\n", b"data: 5\n\n"])
async def test_an_event_that_is_no_object_is_an_error(data: bytes) -> None:
    with pytest.raises(GatewayError):
        await events(data, 10)


@pytest.mark.parametrize(
    "body",
    [None, [], "text", {"a": math.nan}, {"a": math.inf}, {"a": {1, 2}}, {"a": b"bytes"}, {"a": "\ud800"}, {(1, 2): 3}],
)
def test_what_json_cannot_hold_is_a_400(body: Any) -> None:
    with pytest.raises(GatewayError) as caught:
        encode_body(body, 1_000)
    assert caught.value.status == 400


def test_a_body_over_the_limit_is_a_413() -> None:
    assert encode_body({"a": "x" * 90}, 99) == b'{"a": "' + b"x" * 90 + b'"}'
    with pytest.raises(GatewayError) as caught:
        encode_body({"a": "x" * 91}, 99)
    assert caught.value.status == 413


def test_a_body_that_holds_itself_is_a_400() -> None:
    body: dict[str, Any] = {}
    body["self"] = body
    with pytest.raises(GatewayError):
        encode_body(body, 1_000)


async def test_collected_answer_is_a_dict_or_its_error() -> None:
    sink = CollectSink()
    await sink.start(200, [])
    for part in (b'{"a"', b": 1}"):
        await sink.body(part)
    await sink.end()
    assert sink.value() == {"a": 1}
    for text in (b"", b"[1]", b"{"):
        bad = CollectSink()
        await bad.body(text)
        with pytest.raises(GatewayError):
            bad.value()
    await sink.error(GatewayError(429, "rate_limit_error", "overloaded", "busy"), [])
    with pytest.raises(GatewayError):
        sink.value()


async def test_a_reader_that_was_given_up_finds_an_error_after_what_is_left() -> None:
    sink = QueueSink()
    for n in range(CHUNKS_MAX):
        await sink.body(b"%d" % n)
    sink.close()
    items = [sink.queue.get_nowait() for _ in range(CHUNKS_MAX)]
    assert isinstance(items[-1], GatewayError)
    assert items[:-1] == [b"%d" % n for n in range(1, CHUNKS_MAX)]


async def test_a_complete_stream_is_not_given_up() -> None:
    sink = QueueSink()
    await sink.body(b"x")
    await sink.end()
    sink.close()
    assert sink.queue.qsize() == 2


async def test_the_replica_is_held_back_while_the_reader_is_behind() -> None:
    sink = QueueSink()
    for _ in range(CHUNKS_MAX):
        await sink.body(b"x")
    writer = asyncio.create_task(sink.body(b"one more"))
    await asyncio.sleep(0)
    assert not writer.done()
    sink.queue.get_nowait()
    await writer
