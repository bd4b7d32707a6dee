"""Requests for a model that sleeps, through the driver: held, served, refused; and what the gateway says meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from deployments import keep_alive
from deployments.clock import now_ns
from deployments.controller_link import ControllerLink
from deployments.core import GatewayCore
from deployments.driver import Interrupt, RequestDriver
from deployments.errors import GatewayError
from deployments.keep_alive import COMMENT, HeldSink
from deployments.own_answers import OwnAnswers
from policies.steering import ColdModel, ColdPhase
from policies.types import Mode, Plan
from tests.unit.gateway_bench import Client, a_call, a_core, an_inbound, nothing_held, sample, tell
from tests.unit.test_relay import sends, server

STREAM = b"data: {}\n\ndata: [DONE]\n\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n%b" % (len(STREAM), STREAM)
FAILED = ColdModel(ColdPhase.FAILED, 5.0, measured=True, retry_after_s=30.0, why="no such model")


def sleeping(**scaling: Any) -> GatewayCore:
    return a_core(scaling={"replicas_min": 0, **scaling})


class Watched(Client):
    """Says when a comment came."""

    def __init__(self) -> None:
        super().__init__()
        self.commented = asyncio.Event()

    async def body(self, chunk: bytes) -> None:
        await super().body(chunk)
        self.commented.set()


def held_stream(core: GatewayCore) -> tuple[RequestDriver, Watched]:
    client = Watched()
    return RequestDriver(core, an_inbound(core, stream=True), HeldSink(client, "r")), client


def say(core: GatewayCore, cold: ColdModel) -> None:
    core.policies.plan_follower.receive(Plan("e", 1, 10_000.0, Mode.ACT, cold=cold), now_ns())


async def test_a_request_is_held_with_comments_until_a_replica_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_alive, "KEEP_ALIVE_S", 0.01)
    async with server(sends(OK)) as replica:
        core = sleeping()
        driver, client = held_stream(core)
        run = asyncio.create_task(driver.run())
        await asyncio.wait_for(client.commented.wait(), 5)
        assert core.queued == 1
        tell(core, {"a": replica.endpoint}, a=sample())
        core.pump()
        await asyncio.wait_for(run, 5)
        assert (client.status, client.complete, client.problem) == (200, True, None)
        assert client.text.replace(COMMENT, b"") == STREAM
        assert nothing_held(core)


@pytest.mark.parametrize("opened", [False, True])
async def test_a_start_that_fails_ends_those_that_are_held(opened: bool) -> None:
    core = sleeping()
    driver, client = held_stream(core)
    run = asyncio.create_task(driver.run())
    await asyncio.sleep(0)
    if opened:
        await cast(HeldSink, driver._sink).comment()
    say(core, FAILED)
    core.pump()
    await asyncio.wait_for(run, 5)
    assert client.problem is not None
    assert (client.status, client.problem.status) == (200 if opened else 503, 503)
    assert client.problem.code == "model_cannot_start"
    assert nothing_held(core)


async def test_a_client_that_leaves_while_it_is_held_gives_all_back() -> None:
    core = sleeping()
    driver, _ = held_stream(core)
    run = asyncio.create_task(driver.run())
    await asyncio.sleep(0)
    driver.interrupt(Interrupt.CLIENT_GONE)
    await asyncio.wait_for(run, 5)
    await asyncio.sleep(0)
    assert nothing_held(core)


async def test_a_start_that_takes_too_long_for_it_is_refused_at_once() -> None:
    driver, client = a_call(sleeping(start_s_prior=60.0, hold_s_max=30.0))
    await asyncio.wait_for(driver.run(), 5)
    assert client.problem is not None
    assert (client.status, client.problem.code) == (503, "model_starting")
    assert client.problem.retry_after_s is not None
    assert 63 <= client.problem.retry_after_s <= 63 * 1.5


async def test_a_model_that_sleeps_is_healthy_and_one_that_cannot_start_is_not() -> None:
    core = sleeping()
    own = OwnAnswers(core, cast(ControllerLink, None), 0)
    assert own.health().status == 200
    say(core, FAILED)
    with pytest.raises(GatewayError) as raised:
        own.health()
    assert (raised.value.status, raised.value.code) == (503, "model_cannot_start")
    with pytest.raises(GatewayError):
        OwnAnswers(a_core(), cast(ControllerLink, None), 0).health()


async def test_a_request_whose_replica_went_gets_comments_while_it_waits_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keep_alive, "KEEP_ALIVE_S", 0.01)
    async with server(sends(OK)) as replica:
        core = sleeping()
        tell(core, {"gone": "127.0.0.1:1"}, gone=sample())
        driver, client = held_stream(core)
        core.membership.targets = {}
        run = asyncio.create_task(driver.run())
        await asyncio.wait_for(client.commented.wait(), 5)
        assert driver.flow.attempts == 1
        tell(core, {"a": replica.endpoint}, a=sample())
        core._changed.set()
        await asyncio.wait_for(run, 5)
        assert (client.status, client.complete, client.problem) == (200, True, None)
        assert client.text.replace(COMMENT, b"") == STREAM
        assert nothing_held(core)
