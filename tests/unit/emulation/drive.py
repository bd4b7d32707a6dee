"""An ASGI client small enough to see every message: an engine in this process, requests that can leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from deployments.emulation.core import EngineCore
from deployments.emulation.faults import FaultBoard
from deployments.emulation.http import EngineApp
from deployments.knobs import EngineShared
from deployments.settings import EmulatedSettings, FaultSettings, StepSettings

INSTANT = StepSettings(a_ms=0, b_ms=0, c_ms=0, d_ms=0)
SLOW = StepSettings(a_ms=5, b_ms=0, c_ms=0, d_ms=0)
CHAT = "/v1/chat/completions"


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until ``condition`` holds."""
    while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
        await asyncio.sleep(0)


class Call:
    """One request and what came back."""

    def __init__(self, app: EngineApp, path: str, body: Any, method: str = "POST") -> None:
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._inbox.put_nowait({"type": "http.request", "body": content, "more_body": False})
        self.status: int | None = None
        self.chunks: list[bytes] = []
        self.complete = False
        self._news = asyncio.Event()
        scope = {
            "type": "http", "path": path, "method": method, "headers": [(b"content-type", b"application/json")],
        }  # fmt: skip
        self.task = asyncio.ensure_future(app(scope, self._inbox.get, self._send))

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            if message.get("body"):
                self.chunks.append(message["body"])
            self.complete = not message.get("more_body", False)
        self._news.set()

    def leave(self) -> None:
        """Close the connection."""
        self._inbox.put_nowait({"type": "http.disconnect"})

    async def chunk(self, count: int) -> None:
        """Wait until ``count`` chunks are here or the application has returned."""
        while len(self.chunks) < count and not self.task.done():
            self._news.clear()
            news = asyncio.ensure_future(self._news.wait())
            await asyncio.wait({news, self.task}, return_when=asyncio.FIRST_COMPLETED)
            news.cancel()

    async def end(self) -> Call:
        """Wait until the application has returned."""
        await self.task
        return self

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Data of the stream's events; what is no JSON as text."""
        out: list[Any] = []
        for line in self.body.decode().split("\n"):
            if line.startswith("data: "):
                try:
                    out.append(json.loads(line[6:]))
                except ValueError:
                    out.append(line[6:])
        return out

    @property
    def text(self) -> str:
        """Text of a chat stream."""
        parts = [
            e["choices"][0]["delta"].get("content", "") for e in self.events if isinstance(e, dict) and "choices" in e
        ]
        return "".join(parts)


class Engine:
    """An engine that steps and its application."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.app = EngineApp(core, "m")

    def call(self, path: str, body: Any, method: str = "POST") -> Call:
        return Call(self.app, path, body, method)

    def chat(self, content: str = "Name a river.", **fields: Any) -> Call:
        messages = [{"role": "user", "content": content}]
        return self.call(CHAT, {"messages": messages, "max_tokens": 20, "ignore_eos": True} | fields)

    async def idle(self) -> None:
        """Wait until nothing runs or waits."""
        await until(lambda: not self.core.scheduler.has_work)


@contextlib.asynccontextmanager
async def engine(
    step: StepSettings = INSTANT, shared: EngineShared | None = None, die: Any = None, **settings: Any
) -> AsyncIterator[Engine]:
    faults = settings.pop("faults", None) or FaultSettings()
    built = EmulatedSettings(step=step, faults=faults, **settings)
    core = EngineCore(built, FaultBoard(faults, built.seed), shared, **({"die": die} if die else {}))
    loop = asyncio.create_task(core.run())
    try:
        yield Engine(core)
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
