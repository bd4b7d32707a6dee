"""The client's side over HTTP: one head, one end."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from deployments.endpoints import Dialect
from deployments.errors import GatewayError
from deployments.http_front import HttpSink

ERROR = GatewayError(504, "server_error", "timeout", "too long")


async def test_answer_that_has_begun_gets_no_second_head() -> None:
    """The time of a request may be up while its client takes the head of an answer; then the connection is cut."""
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    sink = HttpSink(send, Dialect.OPENAI)
    await sink.start(200, [])
    await sink.error(ERROR, [])
    assert [message["type"] for message in sent] == ["http.response.start"]
    assert not sink.completed
