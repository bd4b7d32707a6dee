"""The comparison of the added-TTFT benchmark: Ray Serve LLM's own server with a bare port beside it."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn
from ray.serve.llm import LLMServer


class BarePortServer(LLMServer):
    """Ray Serve LLM's own server, with vLLM's native application on a port of its own beside it."""

    async def __init__(  # type: ignore[misc]  # Serve awaits asynchronous constructors
        self, llm_config: Any, **kwargs: Any
    ) -> None:
        await super().__init__(llm_config, **kwargs)
        app = await self.engine.build_asgi_app()
        sock = socket.create_server(("127.0.0.1", 0))
        self._port = sock.getsockname()[1]
        config = uvicorn.Config(app, loop="uvloop", access_log=False, lifespan="off", log_level="error")
        self._bare = asyncio.create_task(uvicorn.Server(config).serve(sockets=[sock]))

    async def port(self) -> int:
        """Port of the bare application."""
        return int(self._port)
