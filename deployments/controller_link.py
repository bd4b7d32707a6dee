"""The gateway's line to the controller actor: reports out, plans and leases in. Requests never wait for it.

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
from deployments.task_link import TaskLink
from deployments.tenant_link import URGENT_S, TenantLink

logger = logging.getLogger("ray.serve")

ACTOR_NAME = "controller"
CALL_TIMEOUT_S = 2.0
JITTER_SHARE = 0.1


class ControllerLink:
    """Calls on the controller, each bounded in time."""

    def __init__(self, core: GatewayCore, is_first: bool = True) -> None:
        """``is_first``: of the gateway's first model, which tells of tenants and tasks for all."""
        self._core = core
        self._is_first = is_first
        self._model = core.settings.model.name
        self._reachable = True
        self._lookup: asyncio.Future[Any] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        book = core.policies.flow_context.admission.tenants
        self._tenants = TenantLink(core.meter.gateway_id, book, core.cache_salt)
        self._shares = TaskLink(core.meter.gateway_id, core.policies.flow_context.tasks)

    def start(self) -> None:
        """Start reporting on the running loop."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._report_forever())]
        if self._is_first:
            self._tasks.append(loop.create_task(self._tenants_forever()))

    async def close(self) -> None:
        """Stop reporting, and return what is left of leases."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if tasks and self._is_first:
            await self.tenants_once(leaving=True)

    async def ask(self, method: str, *args: Any) -> Any:
        """Call ``method`` of the controller for a client; it is about this model.

        Raises:
            GatewayError: 503, the controller is away.
        """
        try:
            return await self._ask(method, *args)
        except Exception as error:  # noqa: BLE001  (dead, hanging, replaced: to a client they are the same)
            why = "it does not answer in time" if isinstance(error, TimeoutError) else "it is being replaced"
            message = f"The controller cannot be asked now: {why}. Requests are served without it."
            raise GatewayError(503, "server_error", "controller_unavailable", message, None, 5.0) from None

    async def _ask(self, method: str, *args: Any) -> Any:
        return await self._call(method, *args, model=self._model)

    async def _call(self, method: str, *args: Any, **named: Any) -> Any:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            actor = await self._actor()
            return await getattr(actor, method).remote(*args, **named)

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
            if self._is_first:
                await self.exchange_tasks()

    async def _tenants_forever(self) -> None:
        interval_ns = round(self._core.settings.gateway.report_interval_ms * 1e6)
        while True:
            await self.tenants_once()
            due_ns = now_ns() + interval_ns
            await asyncio.sleep(URGENT_S)
            while now_ns() < due_ns and not self._tenants.urgent:  # noqa: ASYNC110 (policies know of no events)
                await asyncio.sleep(URGENT_S)

    async def tenants_once(self, leaving: bool = False) -> None:
        """Tell the controller of tenants; take the leases that come back. Never raises."""
        try:
            report = self._tenants.report(now_ns(), leaving)
            self._tenants.take(await self._call("report_tenants", report), now_ns())
        except Exception as error:  # noqa: BLE001  (whatever it is, gateways spend the leases they hold)
            logger.debug("Tenants were not reported: %s.", type(error).__name__)

    async def exchange_tasks(self) -> None:
        """Tell the other gateways what this one counted of tasks, and learn what they did. Never raises."""
        tasks, at_ns = self._core.policies.flow_context.tasks, now_ns()
        tasks.expire(at_ns)
        self._core.meter.tasks_ended(tasks.take_ended())
        try:
            await self._shares.exchange(self._call)
        except Exception as error:  # noqa: BLE001  (whatever it is, each gateway goes on with what it knows)
            logger.debug("Tasks were not exchanged: %s.", type(error).__name__)

    async def report_once(self) -> None:
        """Send one report; take the plan that comes back. Never raises."""
        core, follower, at_ns = self._core, self._core.policies.plan_follower, now_ns()
        plan, ejected = follower.current(at_ns), core.policies.flow_context.health.ejected()
        plan_seq = plan.seq if plan is not None else None
        try:
            tasks_open = core.policies.flow_context.tasks.open_tasks if self._is_first else 0
            report = core.meter.report(
                len(core.drivers), core.queued, plan_seq, ejected, follower.overrides(at_ns), tasks_open
            )
            answer = await self._call("report_gateway", report)
            if answer is not None:
                follower.receive(answer, now_ns())
                await core.objectives.tell(self._ask, answer.epoch, core.meter.gateway_id)
            if not self._reachable:
                logger.info("The controller answers again.")
            self._reachable = True
        except Exception as error:  # noqa: BLE001  (whatever it is, requests go on and the plan grows older)
            if self._reachable:
                logger.warning("The controller does not answer (%s); requests go on.", type(error).__name__)
            self._reachable = False
