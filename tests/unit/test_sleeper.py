"""An engine that sleeps while its replica stands by: when it does, who wakes it, and what becomes of failures."""

from __future__ import annotations

import asyncio

import pytest

from deployments.sleeper import Sleeper


class Engine:
    """Sleeps and wakes when it is let."""

    def __init__(self) -> None:
        self.inside = 0
        self.calls: list[str] = []
        self.may = asyncio.Event()
        self.may.set()
        self.broken = False
        self.sleeper = Sleeper(self.sleep, self.wake, lambda: self.inside)

    async def sleep(self) -> None:
        await self._do("sleep")

    async def wake(self) -> None:
        await self._do("wake")

    async def _do(self, what: str) -> None:
        self.calls.append(what)
        await self.may.wait()
        if self.broken:
            raise RuntimeError("it is broken")

    async def plan(self, asleep: bool) -> None:
        self.sleeper.want(asleep)
        await asyncio.sleep(0.01)


async def test_it_sleeps_once_nobody_is_inside_and_wakes_when_the_mark_is_gone() -> None:
    engine = Engine()
    engine.inside = 1
    await engine.plan(asleep=True)
    assert engine.calls == []
    engine.inside = 0
    for _ in range(3):
        await engine.plan(asleep=True)
    assert (engine.calls, engine.sleeper.asleep) == (["sleep"], True)
    await engine.plan(asleep=False)
    await engine.plan(asleep=False)
    assert (engine.calls, engine.sleeper.asleep) == (["sleep", "wake"], False)


async def test_requests_wake_it_once_and_wait_for_that() -> None:
    engine = Engine()
    await engine.plan(asleep=True)
    engine.may.clear()
    waiting = [asyncio.create_task(engine.sleeper.ready()) for _ in range(3)]
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in waiting)
    engine.may.set()
    await asyncio.wait_for(asyncio.gather(*waiting), 5)
    assert engine.calls == ["sleep", "wake"]


async def test_a_request_that_comes_while_it_falls_asleep_wakes_it_again() -> None:
    engine = Engine()
    engine.may.clear()
    await engine.plan(asleep=True)
    request = asyncio.create_task(engine.sleeper.ready())
    await asyncio.sleep(0.01)
    engine.may.set()
    await asyncio.wait_for(request, 5)
    assert (engine.calls, engine.sleeper.asleep) == (["sleep", "wake"], False)


async def test_what_cannot_fall_asleep_stays_awake() -> None:
    engine = Engine()
    engine.broken = True
    await engine.plan(asleep=True)
    await asyncio.wait_for(engine.sleeper.ready(), 5)
    assert (engine.calls, engine.sleeper.asleep) == (["sleep"], False)


async def test_what_cannot_wake_fails_the_request_and_is_tried_again() -> None:
    engine = Engine()
    await engine.plan(asleep=True)
    engine.broken = True
    with pytest.raises(RuntimeError, match="broken"):
        await engine.sleeper.ready()
    engine.broken = False
    await asyncio.wait_for(engine.sleeper.ready(), 5)
    assert engine.calls == ["sleep", "wake", "wake"]
