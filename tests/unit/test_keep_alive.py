"""Streams that are held: comments, and errors behind them."""

from __future__ import annotations

import asyncio

import pytest

from deployments import keep_alive
from deployments.errors import GatewayError
from deployments.keep_alive import COMMENT, HeldSink, during, status_sent
from tests.unit.gateway_bench import Client

ERROR = GatewayError(503, "server_error", "model_cannot_start", "It cannot.")


class Patient(Client):
    """Says when two comments have come."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = asyncio.Event()

    async def body(self, chunk: bytes) -> None:
        await super().body(chunk)
        if self.text == COMMENT * 2:
            self.twice.set()


async def _turn(after: asyncio.Event | None = None) -> str:
    if after is not None:
        await asyncio.wait_for(after.wait(), 20)
    return "turn"


async def test_comments_are_sent_while_the_wait_lasts_and_the_head_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_alive, "KEEP_ALIVE_S", 0.01)
    client = Patient()
    sink = HeldSink(client, "r")
    assert await during(sink, _turn(client.twice)) == "turn"
    assert (client.status, status_sent(sink, 503)) == (200, 200)
    client.status = None
    await sink.start(200, [])
    assert client.status is None, "the head was sent already"
    await sink.body(b"data: x\n\n")
    assert client.text.endswith(COMMENT + b"data: x\n\n")


async def test_a_short_wait_leaves_the_response_as_it_would_be() -> None:
    client = Client()
    sink = HeldSink(client, "r")
    assert await during(sink, _turn()) == "turn"
    assert (client.status, client.text, status_sent(sink, 429)) == (None, b"", 429)
    await sink.error(ERROR, [])
    assert client.status == 503


async def test_an_error_behind_a_comment_ends_the_stream_as_an_event() -> None:
    client = Client()
    sink = HeldSink(client, "r")
    await sink.comment()
    await sink.error(ERROR, [])
    assert (client.status, client.problem) == (200, ERROR)


async def test_a_wait_that_is_given_up_is_cancelled() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    task = asyncio.create_task(during(HeldSink(Client(), "r"), wait()))
    await begun.wait()
    task.cancel()
    await ended.wait()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_other_sinks_only_wait() -> None:
    client = Client()
    assert await during(client, _turn()) == "turn"
    assert status_sent(client, 429) == 429
