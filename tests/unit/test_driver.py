"""One request's driver on asyncio, over the real policies and real sockets: what the flow alone cannot show."""

from __future__ import annotations

import asyncio

import pytest

from deployments.clock import now_ns
from deployments.core import GatewayCore
from deployments.driver import Interrupt
from policies.config import ObjectivesConfig
from policies.measures import ClassCounts
from tests.resume_streams import asked_for_ids
from tests.unit.gateway_bench import CHAT, a_call, a_core, nothing_held, sample, tell
from tests.unit.test_relay import Script, Server, sends, server

ANSWER = b'{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":1}}'
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER)


def never() -> Script:
    """Takes the request and says nothing."""

    async def script(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()
        raise ConnectionError

    return script


async def busy_with_one(core: GatewayCore, replica: Server) -> asyncio.Task[None]:
    """Replica ``a`` has a request of this gateway and so much else that nobody is let through to it."""
    tell(core, {"a": replica.endpoint}, a=sample())
    first = asyncio.create_task(a_call(core, "first")[0].run())
    await asyncio.wait_for(replica.asked.wait(), 2)
    tell(core, {"a": replica.endpoint}, a=sample(2, backlog=10_000))
    return first


async def left(call: asyncio.Task[None]) -> None:
    """Its client goes."""
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


# --- waiting for a turn -----------------------------------------------------------------------------------------------


async def test_turn_that_comes_while_the_request_is_put_in_the_queue_is_not_lost() -> None:
    async with server(never()) as busy, server(sends(OK)) as free:
        core = a_core()
        first = await busy_with_one(core, busy)
        second = asyncio.create_task(a_call(core, "second")[0].run())
        await asyncio.sleep(0)
        assert core.queued == 1
        members = {"a": busy.endpoint, "b": free.endpoint, "c": free.endpoint}
        tell(core, members, a=sample(3, backlog=10_000), b=sample(), c=sample())
        driver, client = a_call(core, "third")  # both may go on now, and nobody has said so yet
        await asyncio.wait_for(driver.run(), 2)
        assert client.status == 200
        await asyncio.wait_for(second, 2)
        await left(first)
        assert nothing_held(core)


async def test_request_that_may_not_wait_at_all_is_told_so_at_once() -> None:
    async with server(never()) as busy:
        core = a_core(classes={"standard": {"ttft_ms": 400}})  # less than what may be waited at an engine
        first = await busy_with_one(core, busy)
        driver, client = a_call(core, "second")
        await asyncio.wait_for(driver.run(), 2)
        assert client.problem is not None
        assert (client.status, client.problem.code) == (429, "queue_timeout")
        await left(first)
        assert nothing_held(core)


@pytest.mark.parametrize(("why", "status"), [(Interrupt.CLIENT_GONE, None), (Interrupt.TIME_UP, 504)])
@pytest.mark.parametrize("granted", [False, True])
async def test_request_stopped_in_the_queue_gives_all_back_even_in_its_turn(
    why: Interrupt, status: int | None, granted: bool
) -> None:
    async with server(never()) as busy, server(sends(OK)) as free:
        core = a_core()
        first = await busy_with_one(core, busy)
        driver, client = a_call(core, "second")
        run = asyncio.create_task(driver.run())
        await asyncio.sleep(0)
        if granted:
            tell(core, {"a": busy.endpoint, "b": free.endpoint}, a=sample(3, backlog=10_000), b=sample())
            core.pump()
        driver.interrupt(why)
        await asyncio.wait_for(run, 2)
        assert (client.status, driver.flow.attempts, free.connections) == (status, 0, 0)
        await left(first)
        assert nothing_held(core)
        if granted:  # its place is free again
            third, client = a_call(core, "third")
            await asyncio.wait_for(third.run(), 2)
            assert client.status == 200


# --- streams that break off -------------------------------------------------------------------------------------------

FIELDS = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "temperature": 0}


def streams(data: bytes) -> Script:
    """Answers with the beginning of a stream, and breaks off."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return sends(head + b"%x\r\n%b\r\n" % (len(data), data), close=True)


async def test_stream_of_unknown_length_is_not_continued_and_no_replica_is_blamed_for_that() -> None:
    """Without a limit in the request or in the settings nobody knows how much is left to ask for."""
    whole = asked_for_ids(CHAT, FIELDS)
    async with server(streams(whole[: len(whole) // 2])) as dies, server(never()) as works:
        core = a_core()
        tell(core, {"a": dies.endpoint, "b": works.endpoint}, a=sample(), b=sample(a_ms=20))
        driver, client = a_call(core, stream=True, temperature=0)
        await asyncio.wait_for(driver.run(), 2)
        assert client.problem is not None
        assert (client.problem.code, driver.flow.attempts) == ("stream_broken", 1)
        assert core.policies.flow_context.health.states()["b"].failures == 0
        assert nothing_held(core)


def events(data: bytes) -> bytes:
    """A whole stream."""
    return b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)


WHOLE = events(asked_for_ids(CHAT, FIELDS))
DEAD = events(b'data: {"error": {"message": "engine died", "code": 500}}\n\ndata: [DONE]\n\n')


async def test_stream_that_begins_with_the_engines_death_is_asked_for_elsewhere() -> None:
    async with server(sends(DEAD)) as dead, server(sends(WHOLE)) as works:
        core = a_core()
        tell(core, {"a": dead.endpoint, "b": works.endpoint}, a=sample(), b=sample(a_ms=20))
        left = core.policies.flow_context.budget.attempts_left
        driver, client = a_call(core, stream=True, temperature=0)
        await asyncio.wait_for(driver.run(), 2)
        assert (client.complete, client.problem, driver.flow.attempts) == (True, None, 2)
        assert core.policies.flow_context.health.states()["a"].failures == 1
        assert core.policies.flow_context.budget.attempts_left < left
        assert nothing_held(core)


async def test_stream_that_begins_with_an_error_everywhere_ends_with_that_errors_status() -> None:
    mistake = events(b'data: {"error": {"message": "no", "code": 400}}\n\ndata: [DONE]\n\n')
    for answer, attempts, status in ((DEAD, 2, 502), (mistake, 1, 400)):
        async with server(sends(answer)) as dead:
            core = a_core()
            tell(core, {"a": dead.endpoint, "b": dead.endpoint}, a=sample(), b=sample())
            driver, client = a_call(core, stream=True)
            await asyncio.wait_for(driver.run(), 2)
            assert client.problem is not None
            assert client.problem.message == ("engine died" if status == 502 else "no")
            assert (client.status, driver.flow.attempts) == (status, attempts)
            assert nothing_held(core)


async def test_engines_error_is_told_whole_where_a_second_attempt_could_have_been() -> None:
    body = b'{"error": {"message": "no such thing", "code": 400}}'
    refuses = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    async with server(sends(refuses % (len(body), body))) as both:
        core = a_core(faults=HEDGING, tenants=TENANTS)
        tell(core, {"a": both.endpoint, "b": both.endpoint}, a=sample(), b=sample())
        driver, client = a_call(core, headers=INTERACTIVE)
        await asyncio.wait_for(driver.run(), 2)
        assert client.problem is not None
        assert (client.status, client.problem.message) == (400, "no such thing")
        assert nothing_held(core)


async def test_dead_engine_does_not_win_against_one_that_works() -> None:
    async def dies(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.1)
        writer.write(DEAD)

    async def works(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.2)
        writer.write(WHOLE)

    async with server(dies) as first, server(works) as second:
        core = a_core(faults=HEDGING, tenants=TENANTS)
        tell(core, {"a": first.endpoint, "b": second.endpoint}, a=sample(), b=sample(a_ms=20))
        driver, client = a_call(core, stream=True, headers=INTERACTIVE)
        await asyncio.wait_for(driver.run(), 2)
        assert (client.complete, client.problem, driver.flow.hedged) == (True, None, True)
        assert nothing_held(core)


async def test_stream_of_nothing_at_all_is_asked_for_elsewhere() -> None:
    async with server(sends(events(b""))) as broken, server(sends(WHOLE)) as works:
        core = a_core()
        tell(core, {"a": broken.endpoint, "b": works.endpoint}, a=sample(), b=sample(a_ms=20))
        driver, client = a_call(core, stream=True, temperature=0)
        await asyncio.wait_for(driver.run(), 2)
        assert (client.complete, client.problem, driver.flow.attempts) == (True, None, 2)
        assert client.text.endswith(b"data: [DONE]\n\n")
        assert nothing_held(core)


# --- two attempts side by side ----------------------------------------------------------------------------------------

HEDGING = {"hedge_after_factor": 1.0, "hedge_after_ms_min": 20}
INTERACTIVE = {b"x-tidegate-class": b"interactive"}
TENANTS = {"default": {"class_max": "interactive"}}


async def test_second_attempt_goes_on_when_the_replica_of_the_first_is_stuck() -> None:
    release = asyncio.Event()

    async def when_told(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.write(OK)

    async with server(never()) as stuck, server(when_told) as works:
        core = a_core(faults=HEDGING, tenants=TENANTS)
        members = {"a": stuck.endpoint, "b": works.endpoint}
        tell(core, members, a=sample(), b=sample(a_ms=20))
        driver, client = a_call(core, headers=INTERACTIVE)
        run = asyncio.create_task(driver.run())
        await asyncio.wait_for(works.asked.wait(), 2)
        tell(core, members, a=sample(2, state="stuck"), b=sample(2, a_ms=20))
        core.sweep(now_ns() + 2_000_000_000)
        await asyncio.sleep(0)
        release.set()
        await asyncio.wait_for(run, 2)
        assert (client.status, client.problem) == (200, None)
        assert core.policies.flow_context.health.states()["b"].failures == 0
        assert nothing_held(core)


async def test_second_attempt_at_a_replica_that_is_gone_breaks_nothing() -> None:
    async def breaks(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.1)
        writer.close()
        raise ConnectionError

    async with server(breaks) as first, server(sends(OK)) as third:
        core = a_core(faults=HEDGING, tenants=TENANTS)
        members = {"a": first.endpoint, "b": third.endpoint, "c": third.endpoint}
        tell(core, members, a=sample(), b=sample(a_ms=20), c=sample(a_ms=30))
        driver, client = a_call(core, headers=INTERACTIVE)
        run = asyncio.create_task(driver.run())
        await asyncio.wait_for(first.asked.wait(), 2)
        del core.membership.targets["b"]
        await asyncio.wait_for(run, 2)
        assert driver.flow.hedged
        assert (client.status, client.problem) == (200, None)
        assert not core.policies.flow_context.quarantine
        assert nothing_held(core)


async def test_error_that_breaks_off_beside_a_second_attempt_is_told_as_what_it_is() -> None:
    head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: 900\r\n\r\n{"

    async def breaks(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.1)
        writer.write(head)
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        raise ConnectionError

    async with server(breaks) as first, server(never()) as second:
        core = a_core(faults=HEDGING, tenants=TENANTS)
        tell(core, {"a": first.endpoint, "b": second.endpoint}, a=sample(), b=sample(a_ms=20))
        driver, client = a_call(core, headers=INTERACTIVE)
        await asyncio.wait_for(driver.run(), 2)
        assert driver.flow.hedged
        assert client.problem is not None
        assert (client.status, client.problem.code) == (502, "upstream_unavailable")
        assert nothing_held(core)


# --- what stops it from outside ---------------------------------------------------------------------------------------


async def test_client_that_leaves_in_the_moment_its_replica_is_given_up_is_gone() -> None:
    async with server(never()) as busy:
        core = a_core()
        tell(core, {"a": busy.endpoint, "b": busy.endpoint}, a=sample(), b=sample())
        driver, _ = a_call(core)
        run = asyncio.create_task(driver.run())
        await asyncio.wait_for(busy.asked.wait(), 2)
        driver.interrupt(Interrupt.REPLICA_LOST)
        driver.interrupt(Interrupt.CLIENT_GONE)
        await asyncio.wait_for(run, 2)
        assert (driver.flow.attempts, driver.flow.done) == (1, True)
        assert nothing_held(core)


# --- what is reported -------------------------------------------------------------------------------------------------


async def test_what_became_of_requests_is_in_their_gateways_report() -> None:
    async with server(sends(DEAD)) as dead, server(sends(WHOLE)) as works, server(never()) as silent:
        core = a_core(tenants=TENANTS, classes={"batch": {"ttft_ms": 0.001}})
        tell(core, {"a": dead.endpoint, "b": works.endpoint}, a=sample(), b=sample(a_ms=20))
        for headers in (INTERACTIVE, {b"x-tidegate-class": b"batch"}):
            driver, client = a_call(core, stream=True, temperature=0, headers=headers)
            await asyncio.wait_for(driver.run(), 2)
            assert client.complete
        tell(core, {"c": silent.endpoint}, c=sample(2))
        waits = asyncio.create_task(a_call(core, "third")[0].run())
        await asyncio.wait_for(silent.asked.wait(), 2)
        await left(waits)
        report = core.meter.report(0, 0, None, core.policies.flow_context.health.ejected())
    assert report.by_class == {
        "interactive": ClassCounts(1, 1, 1),
        "batch": ClassCounts(1, 1, 0, late_ttft=1),
        "standard": ClassCounts(1),  # its client left before it was late
    }
    assert (report.met, report.arrivals, report.succeeded) == (1, 3, 2)
    assert 1 <= report.retries <= 2  # whoever met the dead engine was sent again
    (tenant,) = report.by_tenant.values()
    assert (tenant.arrivals, tenant.met) == (3, 1)
    assert tenant.tokens > 0


async def test_second_attempt_is_reported_when_it_begins() -> None:
    async with server(never()) as first, server(sends(OK)) as second:
        core = a_core(faults=HEDGING, tenants=TENANTS)
        tell(core, {"a": first.endpoint, "b": second.endpoint}, a=sample(), b=sample(a_ms=20))
        driver, _ = a_call(core, headers=INTERACTIVE)
        await asyncio.wait_for(driver.run(), 2)
        assert driver.flow.hedged
        assert core.meter.report(0, 0, None).retries == 1


async def test_promises_are_those_in_force_since_the_last_report() -> None:
    async with server(sends(WHOLE)) as works:
        core = a_core()
        tell(core, {"a": works.endpoint}, a=sample())
        for ttft_ms, met in ((60_000.0, 1), (0.001, 0)):
            core.policies.reconfigure(ObjectivesConfig(ttft_ms=ttft_ms), core.policies.config.classes)
            driver, _ = a_call(core, stream=True, temperature=0)
            await asyncio.wait_for(driver.run(), 2)
            report = core.meter.report(0, 0, None)
            assert (report.succeeded, report.met) == (1, met)
