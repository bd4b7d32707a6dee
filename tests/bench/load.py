"""A closed-loop load of streaming clients with think time, shared by the live benchmarks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

from tests.bench import harness as h


@dataclass
class Load:
    """Clients that send one request after another until told to stop; keeps every result."""

    clients: int
    tokens: int
    url: str = h.URL
    results: list[h.StreamResult] = field(default_factory=list)
    _stop: bool = False
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self, session: aiohttp.ClientSession) -> None:
        """Start all clients."""
        self._tasks = [asyncio.create_task(self._client(session, i)) for i in range(self.clients)]

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        turn = 0
        while not self._stop:
            message = {"role": "user", "content": f"Client {number}, turn {turn}: tell me a story."}
            self.results.append(await h.stream_chat(session, [message], self.tokens, url=self.url))
            turn += 1
            if self.results[-1].failed:
                await asyncio.sleep(0.2)

    async def stop(self) -> None:
        """Let every open request finish, then return."""
        self._stop = True
        await asyncio.gather(*self._tasks)

    def failed(self) -> list[h.StreamResult]:
        """Requests that a client would not call a success: errors, cut streams, wrong length."""
        return [r for r in self.results if r.failed or r.usage.get("completion_tokens") not in (None, self.tokens)]

    def count(self, check: Callable[[h.StreamResult], bool]) -> int:
        """Number of results for which ``check`` holds."""
        return sum(1 for r in self.results if check(r))
