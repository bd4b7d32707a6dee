"""A replica host with a small ASGI engine, its end of the shared mapping, a controller's end, and an HTTP client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

from deployments.clock import now_ns
from deployments.gate import ASGIApp, Receive, Scope, Send
from deployments.knobs import EngineShared
from deployments.replica_host import ReplicaHost, ReplicaIdentity
from deployments.settings import ModelSettings
from policies.config import PolicyConfig
from policies.types import Plan, ReplicaReport

REPLICA = "r1"


class Engine:
    """A small ASGI application: answers at once, or holds a stream open until it is let go."""

    def __init__(self) -> None:
        self.seen: list[Scope] = []
        self.started = asyncio.Event()
        self.release = asyncio.Event()
        self.cancelled = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.seen.append(scope)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        if scope["path"] == "/stream":
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
        if scope["path"] in ("/stream", "/silent"):
            self.started.set()
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if scope["path"] == "/raise":
            raise RuntimeError("the engine's application failed")
        await send({"type": "http.response.body", "body": b"last"})


class Reports:
    """The controller's end: collects reports and answers with a plan, or misbehaves as told."""

    def __init__(self) -> None:
        self.got: list[ReplicaReport] = []
        self.answer: Callable[[], Awaitable[Plan | None]] | None = None
        self.arrived = asyncio.Event()

    async def __call__(self, report: ReplicaReport) -> Plan | None:
        self.got.append(report)
        self.arrived.set()
        return await self.answer() if self.answer else None


class Bench:
    """One host with its engine, its end of the shared mapping and a client."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.engine = Engine()
        self.reports = Reports()
        self.shared = EngineShared.create(path)
        self.core = EngineShared.open(path)
        self.model = ModelSettings(
            name="m", report_interval_ms=settings.pop("report_interval_ms", 60_000.0), **settings
        )
        self.host = ReplicaHost(
            self.model, PolicyConfig(), self.shared, ReplicaIdentity(REPLICA, "app", "Engine"), now_ns(), self.reports
        )
        self.client = aiohttp.ClientSession()

    async def start(self, app: ASGIApp | None = None) -> Bench:
        await self.host.start(app or self.engine)
        return self

    def get(self, path: str, token: str | None = None) -> aiohttp.client._RequestContextManager:
        meta = self.host.metadata()
        return self.client.get(
            f"http://{meta['endpoint']}{path}", headers={"x-tidegate-gate": meta["gate"] if token is None else token}
        )

    async def close(self) -> None:
        self.engine.release.set()
        await self.client.close()
        await self.host.stop()
        self.core.close()
        self.shared.close()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that other tasks bring about; the test's own time-out ends it when they do not."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
