"""The emulated engine as a plain HTTP server, without Ray and without a gate: for tests, benchmarks and trying things.

    python -m deployments.emulated_engine --port 8100 --settings '{"step": {"a_ms": 5}}'

``POST /emulation/faults`` with a JSON object of :class:`FaultSettings` fields changes the faults in force. Listens on
loopback only unless ``--host`` says otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Sequence

import uvicorn
from pydantic import ValidationError

from deployments.emulation.core import EngineCore
from deployments.emulation.faults import FaultBoard
from deployments.emulation.http import EngineApp
from deployments.gate import ASGIApp, Receive, Scope, Send
from deployments.knobs import EngineShared
from deployments.settings import EmulatedSettings, ModelSettings

FAULTS_PATH = "/emulation/faults"


class FaultDoor:
    """ASGI application that changes faults, and passes everything else on."""

    def __init__(self, app: ASGIApp, faults: FaultBoard) -> None:
        self._app = app
        self._faults = faults

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["path"] != FAULTS_PATH:
            await self._app(scope, receive, send)
            return
        status, answer = 200, ""
        try:
            answer = self._faults.change(json.loads(await _body(receive))).model_dump_json()
        except (ValidationError, ValueError, TypeError) as error:
            status, answer = 400, json.dumps({"error": str(error)})
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer.encode()})


async def _body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(body)


@contextlib.asynccontextmanager
async def running_engine(
    settings: EmulatedSettings, model: str, shared: EngineShared | None = None
) -> AsyncIterator[tuple[EngineCore, EngineApp]]:
    """An engine that steps, and its application, until the block ends."""
    core = EngineCore(settings, FaultBoard(settings.faults, settings.seed), shared)
    loop = asyncio.create_task(core.run(), name="emulated-engine")
    try:
        yield core, EngineApp(core, model)
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)


async def _serve(settings: EmulatedSettings, model: str, host: str, port: int) -> None:
    await asyncio.sleep(settings.start_ms / 1e3)
    async with running_engine(settings, model) as (core, app):
        config = uvicorn.Config(
            FaultDoor(app, core.faults), host=host, port=port, access_log=False, log_level="warning", lifespan="off",
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        await uvicorn.Server(config).serve()


def main(argv: Sequence[str] | None = None) -> int:
    """Run until interrupted. Exit status 2: wrong settings."""
    parser = argparse.ArgumentParser(description="Emulated engine with vLLM's HTTP endpoints.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default=ModelSettings().name, help="served model name")
    parser.add_argument("--settings", default="{}", help="JSON of the section model.emulated")
    given = parser.parse_args(argv)
    try:
        settings = EmulatedSettings.model_validate_json(given.settings)
        asyncio.run(_serve(settings, given.model, given.host, given.port))
    except (ValidationError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0
