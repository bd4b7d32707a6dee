"""Two legs of one request, over real sockets: what is sent, and what becomes of a request whose first leg fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from deployments.clock import now_ns
from deployments.core import GatewayCore
from deployments.endpoints import RELAYED
from deployments.handoff import PARAMS, Handoff, leg_body, params_of, suits
from policies.split import SplitCode
from tests.unit.gateway_bench import CHAT, Client, a_call, a_core, an_inbound, nothing_held, sample, tell
from tests.unit.test_relay import Server, server

BLOCKS = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_engine_id": "e"}
NOTHING = {"do_remote_decode": False, "do_remote_prefill": False}
PROMPT = [{"role": "user", "content": "long " * 100}]
SPLIT = {"enabled": True, "uncached_tokens_min": 32, "prefill_timeout_ms": 300.0, "pull_timeout_ms": 300.0}


def head(kind: str, length: int, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n".encode()


def answered(value: dict[str, Any], status: str = "200 OK") -> bytes:
    body = json.dumps(value).encode()
    return head("application/json", len(body), status) + body


STREAM = (
    b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":100,"completion_tokens":1,"prompt_tokens_details":'
    b'{"cached_tokens":%d}}}\n\ndata: [DONE]\n\n'
)


@dataclass
class Engine:
    """A replica that answers by what it is asked."""

    name: str
    server: Server
    leg: bytes | None = answered({PARAMS: BLOCKS})
    """To a prompt that is to be kept; ``None``: nothing, ever."""
    pulls: bytes | None = b""
    """To a request with blocks to pull; empty: an answer, ``None``: nothing, ever."""
    cached: int = 100
    pause_s: float = 0.0

    async def script(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        params = self.bodies[-1].get(PARAMS) or {}
        reply: bytes | None = b""
        if params.get("do_remote_decode"):
            reply = self.leg
        elif params.get("do_remote_prefill"):
            reply = self.pulls
        await asyncio.sleep(self.pause_s)
        if reply is None:
            await reader.read()
            raise ConnectionError
        stream = STREAM % self.cached
        writer.write(reply or head("text/event-stream", len(stream)) + stream)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(request.split(b"\r\n\r\n", 1)[1]) for request in self.server.requests]


@dataclass
class Pair:
    core: GatewayCore
    prefill: Engine
    decode: Engine

    async def ask(self, **fields: Any) -> tuple[Client, dict[str, Any]]:
        asked: dict[str, Any] = {"messages": PROMPT, "stream": True, **fields}
        driver, client = a_call(self.core, **asked)
        await asyncio.wait_for(driver.run(), 5)
        record = self.core.recent.show("r")
        assert nothing_held(self.core)
        return client, record


@asynccontextmanager
async def a_pair(objectives: dict[str, float] | None = None, **split: Any) -> AsyncIterator[Pair]:
    async with server(None) as one, server(None) as two:  # type: ignore[arg-type]  # set below
        gateway = {"connect_timeout_ms": 500.0}
        core = a_core(disaggregation=SPLIT | split, gateway=gateway, objectives=objectives or {})
        core.resumable = False
        engines = {"a": Engine("a", one), "b": Engine("b", two)}
        for engine in engines.values():
            engine.server.script = engine.script
        tell(core, {name: e.server.endpoint for name, e in engines.items()}, a=sample(), b=sample())
        (first,) = core.membership.prefill()
        yield Pair(core, engines.pop(first), next(iter(engines.values())))


def counted(core: GatewayCore, code: SplitCode) -> bool:
    return f'tidegate_disaggregation_total{{reason="{code}"}} 1.0' in core.meter.telemetry.render().decode()


async def test_prompt_goes_to_one_replica_and_the_answer_comes_from_the_other() -> None:
    async with a_pair() as pair:
        client, record = await pair.ask(
            max_tokens=50, min_tokens=5, temperature=0, logprobs=True, logprob_token_ids=[1]
        )
        assert client.complete
        (leg,), (answer,) = pair.prefill.bodies, pair.decode.bodies
        assert (leg["max_tokens"], leg["stream"], leg["messages"]) == (1, False, PROMPT)
        assert not {"min_tokens", "logprobs", "logprob_token_ids"} & leg.keys()
        assert leg[PARAMS] == {"do_remote_decode": True, "do_remote_prefill": False}
        assert (answer["max_tokens"], answer["stream"], answer[PARAMS]) == (50, True, BLOCKS)
        assert record["disaggregation"] == "split"
        assert (record["prefill_replica"], record["replicas"]) == (
            pair.prefill.name,
            [pair.prefill.name, pair.decode.name],
        )
        assert record["ends"] == ["prefill", "ok"]
        assert counted(pair.core, SplitCode.SPLIT)


async def test_a_short_prompt_is_not_split_and_goes_where_answers_are_written() -> None:
    async with a_pair() as pair:
        for _ in range(3):
            _, record = await pair.ask(messages=[{"role": "user", "content": "hi"}])
            assert (record["disaggregation"], record["replicas"]) == ("short_prompt", [pair.decode.name])


@pytest.mark.parametrize("fields", [{PARAMS: {"do_remote_decode": True}}, {"vllm_xargs": {PARAMS: "text"}}])
async def test_a_client_cannot_name_blocks_itself(fields: dict[str, Any]) -> None:
    async with a_pair() as pair:
        await pair.ask(messages=[{"role": "user", "content": "hi"}], **fields)
        sent = pair.decode.bodies[-1][PARAMS]
        assert sent == NOTHING, "an empty value gives way to vllm_xargs"


@pytest.mark.parametrize(
    ("leg", "code"),
    [
        (None, SplitCode.PREFILL_TIMEOUT),
        (answered({"error": {}}, "500 Internal Server Error"), SplitCode.PREFILL_FAILED),
        (answered({"error": {}}, "503 Service Unavailable"), SplitCode.PREFILL_FAILED),
        (answered({"choices": []}), SplitCode.PREFILL_FAILED),
        (head("application/json", 10) + b"not json !", SplitCode.PREFILL_FAILED),
    ],
)
async def test_whatever_the_prefill_replica_does_the_request_is_answered(leg: bytes | None, code: SplitCode) -> None:
    async with a_pair() as pair:
        pair.prefill.leg = leg
        client, record = await pair.ask()
        assert client.complete
        assert (record["disaggregation"], record["outcome"]) == (code.value, "succeeded")
        assert record["prefill_replica"] is None
        assert [body[PARAMS] for body in pair.decode.bodies] == [NOTHING]
        assert counted(pair.core, code)


async def test_a_prompt_that_took_long_is_not_refused_for_it() -> None:
    async with a_pair(objectives={"ttft_ms": 200.0}, prefill_timeout_ms=5_000.0) as pair:
        pair.prefill.pause_s = 0.4
        client, record = await pair.ask()
        assert client.complete
        assert record["disaggregation"] == "split"


async def test_a_prompt_that_would_be_late_is_not_begun() -> None:
    async with a_pair(objectives={"ttft_ms": 200.0}) as pair:
        inbound = an_inbound(pair.core, messages=PROMPT, stream=True)
        pair.core.policies.flow_context.admission.arrive(inbound.request, now_ns())
        await asyncio.sleep(0.3)
        choice = await Handoff(pair.core, inbound).route(frozenset())
        assert (choice.order[0], inbound.record.split_code) == (pair.decode.name, "prefill_busy")
        assert pair.prefill.bodies == []


async def test_a_prefill_replica_that_is_gone_costs_nothing() -> None:
    async with a_pair() as pair:
        targets = pair.core.membership.targets
        dead = {pair.prefill.name: "127.0.0.1:9", pair.decode.name: pair.decode.server.endpoint}
        tell(pair.core, dead, **{name: sample(2) for name in targets})
        pair.core.drop_replica = lambda replica_id: None  # type: ignore[method-assign]
        client, record = await pair.ask()
        assert client.complete
        assert record["disaggregation"] == "prefill_failed"


@pytest.mark.parametrize(
    ("pulls", "code"),
    [
        (None, SplitCode.PULL_TIMEOUT),
        (answered({"error": {"message": "no"}}, "500 Internal Server Error"), SplitCode.PULL_FAILED),
    ],
)
async def test_a_decode_replica_that_cannot_pull_is_asked_to_compute(pulls: bytes | None, code: SplitCode) -> None:
    async with a_pair() as pair:
        pair.decode.pulls = pulls
        client, record = await pair.ask()
        assert client.complete
        assert (record["disaggregation"], record["outcome"]) == (code.value, "succeeded")
        assert [body[PARAMS] for body in pair.decode.bodies] == [BLOCKS, NOTHING]
        assert record["ends"] == ["prefill", code.value, "ok"]


async def test_an_answer_in_one_piece_waits_for_as_long_as_its_prefill_replica_is_there() -> None:
    async with a_pair() as pair:
        pair.decode.pulls = None
        driver, client = a_call(pair.core, messages=PROMPT, stream=False)
        call = asyncio.create_task(driver.run())
        await asyncio.sleep(1.0)
        assert not call.done()
        tell(pair.core, {pair.decode.name: pair.decode.server.endpoint}, **{pair.decode.name: sample(2)})
        await asyncio.wait_for(call, 5)
        assert client.complete
        assert pair.core.recent.show("r")["disaggregation"] == "pull_timeout"


async def test_an_engine_that_computed_after_all_is_told() -> None:
    async with a_pair() as pair:
        pair.decode.cached = 0
        _, record = await pair.ask()
        assert record["disaggregation"] == "recomputed"


@pytest.mark.parametrize(("there", "cached"), [(None, 0), (0, 0), (30, 30), (100, 100)])
async def test_a_tenant_is_charged_for_what_the_prefill_replica_computed(there: int | None, cached: int) -> None:
    async with a_pair() as pair:
        usage = {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": there}}
        pair.prefill.leg = answered({PARAMS: BLOCKS, "usage": usage if there is not None else {}})
        _, record = await pair.ask()
        assert (record["prompt_tokens"], record["cached_tokens"]) == (100, cached)
        assert record["disaggregation"] == "split"


@pytest.mark.parametrize("where", ["prefill", "decode"])
async def test_a_client_that_leaves_leaves_nothing_behind(where: str) -> None:
    async with a_pair(prefill_timeout_ms=60_000.0, pull_timeout_ms=20_000.0) as pair:
        pair.prefill.leg = None if where == "prefill" else pair.prefill.leg
        pair.decode.pulls = None
        engine = pair.prefill if where == "prefill" else pair.decode
        driver, _ = a_call(pair.core, messages=PROMPT, stream=True)
        call = asyncio.create_task(driver.run())
        await asyncio.wait_for(engine.server.asked.wait(), 2)
        await asyncio.sleep(0.05)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await asyncio.wait_for(engine.server.lost.wait(), 2)
        assert nothing_held(pair.core)


@pytest.mark.parametrize(
    ("path", "fields", "suited"),
    [
        (CHAT, {}, True),
        (CHAT, {"n": 1, "tool_choice": "auto"}, True),
        (CHAT, {"n": 2}, False),
        (CHAT, {"tool_choice": "required"}, False),
        ("/v1/completions", {"prompt": "text"}, True),
        ("/v1/completions", {"prompt": [1, 2]}, True),
        ("/v1/completions", {"prompt": ["one", "two"]}, False),
        ("/v1/completions", {"prompt": "text", "echo": True}, False),
        (CHAT, {"prompt_logprobs": 0}, False),
        (CHAT, {"truncate_prompt_tokens": -1}, False),
        ("/v1/responses", {}, False),
        ("/v1/messages", {}, False),
    ],
)
def test_what_can_be_handed_over(path: str, fields: dict[str, Any], suited: bool) -> None:
    assert suits(fields, RELAYED[path]) is suited


def test_the_first_leg_keeps_to_the_tenants_own_cache() -> None:
    assert json.loads(leg_body({"prompt": "x", "max_tokens": 9, "stream": True}, "salt"))["cache_salt"] == "salt"


def test_blocks_are_believed_only_where_there_are_some() -> None:
    assert params_of(json.dumps({PARAMS: BLOCKS}).encode()) == BLOCKS
    for answer in (b"[]", b"{}", b'{"kv_transfer_params":null}', b'{"kv_transfer_params":{}}', b"x"):
        assert params_of(answer) is None
