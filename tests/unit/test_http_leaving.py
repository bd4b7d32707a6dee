"""A client that leaves while its answer is under way: told by its connection, or by a message where there is none."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.driver import Interrupt
from deployments.endpoints import Dialect
from deployments.http_bounds import CONNECTION_KEY
from deployments.http_front import HttpSink, _run


class Driver:
    """Answers until it is interrupted."""

    def __init__(self) -> None:
        self.running = asyncio.Event()
        self.over = asyncio.Event()
        self.why: list[Interrupt] = []

    async def run(self) -> None:
        self.running.set()
        await self.over.wait()

    def interrupt(self, why: Interrupt) -> None:
        self.why.append(why)
        self.over.set()


async def _ignored(_message: Any) -> None:
    pass


async def served(connection: Any, receive: Any, completed: bool = False) -> tuple[Driver, asyncio.Task[None]]:
    driver, sink = Driver(), HttpSink(_ignored, Dialect.OPENAI)
    sink.completed = completed
    scope = {} if connection is None else {CONNECTION_KEY: connection}
    task = asyncio.create_task(_run(driver, scope, receive, sink))  # type: ignore[arg-type]
    await driver.running.wait()
    return driver, task


def a_connection(lost: bool = False, loop: Any = None) -> Any:
    return SimpleNamespace(lost=lost, when_lost=None, loop=loop or asyncio.get_running_loop())


async def test_the_connection_tells_and_no_message_is_waited_for() -> None:
    async def receive() -> Any:
        raise AssertionError("a message was asked for")

    connection = a_connection()
    driver, task = await served(connection, receive)
    connection.when_lost()
    await task
    assert driver.why == [Interrupt.CLIENT_GONE]
    assert connection.when_lost is None


async def test_who_leaves_after_the_last_byte_interrupts_nothing() -> None:
    connection = a_connection()
    driver, task = await served(connection, None, completed=True)
    connection.when_lost()
    assert driver.why == []
    driver.over.set()
    await task


@pytest.mark.parametrize("how", ["no connection", "lost already", "another loop"])
async def test_else_a_message_tells(how: str) -> None:
    other = asyncio.new_event_loop() if how == "another loop" else None
    connection = None if how == "no connection" else a_connection(how == "lost already", other)
    left = asyncio.Event()

    async def receive() -> Any:
        await left.wait()
        return {"type": "http.disconnect"}

    driver, task = await served(connection, receive)
    assert driver.why == []
    left.set()
    await task
    assert driver.why == [Interrupt.CLIENT_GONE]
    if other is not None:
        other.close()
