"""An engine that gives its device's memory back while its replica stands by, and takes it again for the next request.

    awake    requests pass
    asleep   by the plan in force (``Plan.asleep``) and with no request inside; a request, or a plan without the mark,
             wakes it, and requests wait for that

Waking needs no plan: whoever sends something is served, so a dead controller keeps nobody asleep. What fails to fall
asleep stays awake; what fails to wake fails the request that asked, and is tried again by the next one.

It must not decide who sleeps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from deployments.clock import now_ns

logger = logging.getLogger("tidegate.replica")


class Sleeper:
    """One per replica whose engine can sleep.

    Args:
        sleep: lets the engine fall asleep.
        wake: wakes it; returns once it computes.
        inside: requests inside the replica now.
    """

    def __init__(
        self, sleep: Callable[[], Awaitable[None]], wake: Callable[[], Awaitable[None]], inside: Callable[[], int]
    ) -> None:
        self._sleep, self._wake, self._inside = sleep, wake, inside
        self._turn = asyncio.Lock()
        self._wanted = False
        self.asleep = False
        """The engine sleeps, or is about to."""
        self._task: asyncio.Task[None] | None = None

    def want(self, asleep: bool) -> None:
        """What the plan in force says; called again and again."""
        self._wanted = asleep
        if asleep is not self.asleep and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._follow(), name="tidegate-sleeper")

    async def ready(self) -> None:
        """Return once the engine is awake. Raises what waking it raises."""
        if not self.asleep:
            return
        async with self._turn:
            if self.asleep:
                begin_ns = now_ns()
                await self._wake()
                self.asleep = False
                logger.info("The engine woke in %.2f s.", (now_ns() - begin_ns) / 1e9)

    async def _follow(self) -> None:
        try:
            if not self._wanted:
                await self.ready()
                return
            async with self._turn:
                if self._inside() or self.asleep:
                    return
                self.asleep = True  # who comes from now on waits for the lock, then for the engine
                try:
                    await self._sleep()
                except Exception:
                    self.asleep = False
                    raise
        except Exception:
            logger.exception("The engine could not follow the plan's wish to %s.", "sleep" if self._wanted else "wake")
