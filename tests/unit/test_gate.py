"""deployments/gate.py in front of a replica's port: who passes, and that open requests are counted exactly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from deployments.gate import Gate, Message, Receive, Scope, Send
from tests.unit.replica_bench import Bench


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    b = Bench(tmp_path / "shared")
    yield b
    await b.close()


async def test_a_request_with_the_token_passes_and_the_token_goes_no_further(bench: Bench) -> None:
    await bench.start()
    async with bench.get("/v1/x") as response:
        assert response.status == 200
        assert await response.text() == "last"
    assert not any(name == b"x-tidegate-gate" for name, _ in bench.engine.seen[0]["headers"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/health", "/metrics", "/", "/docs"])
@pytest.mark.parametrize("token", ["", "wrong", "x" * 10_000])
async def test_every_path_is_behind_the_gate(bench: Bench, path: str, token: str) -> None:
    await bench.start()
    async with bench.get(path, token) as response:
        assert response.status in {403, 431, 400}
        if response.status == 403:
            error = json.loads(await response.text())["error"]
            assert set(error) == {"message", "type", "param", "code"}
    assert bench.engine.seen == []


async def test_no_header_and_two_headers_are_refused(bench: Bench) -> None:
    await bench.start()
    meta = bench.host.metadata()
    for headers in ([], [("x-tidegate-gate", meta["gate"])] * 2):
        async with bench.client.get(f"http://{meta['endpoint']}/", headers=headers) as response:
            assert response.status == 403
    assert bench.engine.seen == []


async def test_tokens_differ_between_replicas_and_the_address_is_loopback(tmp_path: Path) -> None:
    benches = [Bench(tmp_path / str(i)) for i in range(2)]
    for b in benches:
        await b.start()
    first, second = (b.host.metadata() for b in benches)
    assert first["gate"] != second["gate"]
    assert len(first["gate"]) >= 32
    assert first["endpoint"].startswith("127.0.0.1:")
    assert first["model"] == "m"
    for b in benches:
        await b.close()


async def test_websockets_are_refused() -> None:
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("must not be reached")

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    gate = Gate(app, "token")
    await gate({"type": "websocket", "headers": [(b"x-tidegate-gate", b"token")]}, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]
    assert gate.inflight == 0


async def test_inflight_falls_on_every_path(bench: Bench) -> None:
    await bench.start()
    gate = bench.host._gate
    assert gate is not None
    async with bench.get("/stream") as response:
        assert await response.content.readany() == b"first"
        assert gate.inflight == 1
        assert gate.silent_since_ns() is None
        bench.engine.release.set()
        await response.read()
    async with bench.get("/raise") as response:
        assert response.status == 200
        with pytest.raises(aiohttp.ClientError):
            await response.read()
    await asyncio.wait_for(gate.empty.wait(), 5)
    assert gate.inflight == 0


@pytest.mark.slow
async def test_inflight_falls_when_the_application_is_cancelled(bench: Bench) -> None:
    await bench.start()
    gate = bench.host._gate
    assert gate is not None
    async with bench.get("/silent"):
        await bench.engine.started.wait()
        assert gate.inflight == 1
        assert gate.silent_since_ns() is not None
        await bench.host.stop()
    assert bench.engine.cancelled == 1
    assert gate.inflight == 0
    assert gate.silent_since_ns() is None
