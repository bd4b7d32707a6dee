"""The gateway's line to the controller actor: reports out, plans in. Requests never wait for it.

The actor is looked up anew for each call, because Serve replaces it under the same name. While it is away the plan in
force only grows older, and at its ``ttl_ms`` the policies fall back to the configured affinity.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

from ray import serve

from deployments.clock import now_ns
from deployments.core import GatewayCore
from deployments.errors import GatewayError

logger = logging.getLogger("ray.serve")

ACTOR_NAME = "controller"
CALL_TIMEOUT_S = 2.0
JITTER_SHARE = 0.1


class ControllerLink:
    """Calls on the controller, each bounded in time."""

    def __init__(self, core: GatewayCore) -> None:
        self._core = core
        self._reachable = True
        self._lookup: asyncio.Future[Any] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start reporting on the running loop."""
        self._task = asyncio.get_running_loop().create_task(self._report_forever())

    async def close(self) -> None:
        """Stop reporting."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def ask(self, method: str, *args: Any) -> Any:
        """Call ``method`` of the controller for a client.

        Raises:
            GatewayError: 503, the controller is away.
        """
        try:
            return await self._call(method, *args)
        except Exception as error:  # noqa: BLE001  (dead, hanging, replaced: to a client they are the same)
            why = "it does not answer in time" if isinstance(error, TimeoutError) else "it is being replaced"
            message = f"The controller cannot be asked now: {why}. Requests are served without it."
            raise GatewayError(503, "server_error", "controller_unavailable", message, None, 5.0) from None

    async def _call(self, method: str, *args: Any) -> Any:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            actor = await self._actor()
            return await getattr(actor, method).remote(*args)

    async def _actor(self) -> Any:
        """The lookup blocks, so it runs in a thread; a hanging one is joined, not multiplied."""
        if self._lookup is None or self._lookup.done():
            self._lookup = asyncio.ensure_future(asyncio.to_thread(serve.get_deployment_actor, ACTOR_NAME))
        return await asyncio.shield(self._lookup)

    async def _report_forever(self) -> None:
        core = self._core
        rng = random.Random(core.settings.gateway.seed)
        interval_s = core.settings.gateway.report_interval_ms / 1_000
        while True:
            await asyncio.sleep(interval_s * rng.uniform(1 - JITTER_SHARE, 1 + JITTER_SHARE))
            await self.report_once()

    async def report_once(self) -> None:
        """Send one report; take the plan that comes back. Never raises."""
        core, follower = self._core, self._core.policies.plan_follower
        plan = follower.current(now_ns())
        try:
            report = core.meter.report(len(core.drivers), core.queued, plan.seq if plan is not None else None)
            answer = await self._call("report_gateway", report)
            if answer is not None:
                follower.receive(answer, now_ns())
            if not self._reachable:
                logger.info("The controller answers again.")
            self._reachable = True
        except Exception as error:  # noqa: BLE001  (whatever it is, requests go on and the plan grows older)
            if self._reachable:
                logger.warning("The controller does not answer (%s); requests go on.", type(error).__name__)
            self._reachable = False
