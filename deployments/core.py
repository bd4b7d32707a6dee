"""What all requests of one gateway share: policies, membership, connections, counts, and the watch over them.

Everything here lives on one event loop, the one Serve runs the gateway's code on: policies have no locks, and
:meth:`GatewayCore.check_loop` fails loudly when something calls from another.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.clock import now_ns
from deployments.driver import Interrupt, RequestDriver
from deployments.endpoints import Endpoint
from deployments.membership import EMPTY_CHOICE, Membership, RouteCall
from deployments.meter import Meter
from deployments.prompt import BlockSizes, ParsedBody, TokenRatio, parse_body
from deployments.recording import open_recorder
from deployments.serve_internals import (
    NoReplicaError,
    current_replicas,
    drop_replica,
    init_handle_same_loop,
    pick_replica,
    request_router,
)
from deployments.settings import Settings
from deployments.upstream import ConnectionPool
from policies.build import build_policies
from policies.events import Event, Routed, WaitedOut
from policies.types import ReplicaId, Request, RouteChoice

logger = logging.getLogger("ray.serve")

SWEEP_S = 0.25
"""Period of the watch over open requests and of the look for Serve's router."""
DEFAULT_TENANT = ""
"""There are no API keys yet: all clients are one tenant."""


class GatewayCore:
    """See the module. Built inside the event loop that will run every request."""

    def __init__(self, settings: Settings, engine: DeploymentHandle[Any], gateway_id: str) -> None:
        self.settings = settings
        self.policies = build_policies(settings.policy_config(), settings.gateway.seed ^ _seed_of(gateway_id))
        self.meter = Meter(gateway_id, settings.model.name)
        self.membership = Membership(self.policies, self.meter.telemetry.remove_replica)
        self.ratio = TokenRatio()
        self.drivers: set[RequestDriver] = set()
        """Open requests; admission bounds how many."""
        self.pool = ConnectionPool(settings.gateway.connect_timeout_ms)
        self.recorder = open_recorder(settings, "gateway", gateway_id)
        """``None``: nothing is recorded."""
        self._loop = asyncio.get_running_loop()
        self._handle = engine
        self._attached = False
        self._changed = asyncio.Event()
        init_handle_same_loop(engine)
        self._sweeper = self._loop.create_task(self._sweep_forever())

    async def close(self) -> None:
        """Stop watching and close idle connections."""
        self._sweeper.cancel()
        await asyncio.gather(self._sweeper, return_exceptions=True)
        self.pool.close()
        if self.recorder is not None:
            await asyncio.to_thread(self.recorder.close)

    def check_loop(self) -> None:
        """Raise when the caller runs on another loop than the policies live on."""
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("the gateway's policies are bound to one event loop and were called from another")

    # --- one request --------------------------------------------------------------------------------------------------

    def parse(self, body: bytes, endpoint: Endpoint, arrival_ns: int, request_id: str) -> tuple[Request, ParsedBody]:
        """The request value of ``body`` under the server's own ``request_id``. Raises ``GatewayError``."""
        routing = self.settings.routing
        sizes = BlockSizes(routing.block_bytes, routing.request_blocks_max, self.ratio.bytes_per_token)
        parsed = parse_body(body, endpoint, self.settings.model.name, DEFAULT_TENANT, sizes)
        request = Request(
            request_id=request_id,
            model=parsed.model,
            endpoint=endpoint.path,
            tenant=DEFAULT_TENANT,
            prompt_tokens=parsed.prompt_tokens,
            output_tokens_max=parsed.output_tokens_max,
            blocks=parsed.blocks,
            block_tokens=sizes.block_tokens,
            stream=parsed.stream,
            arrival_ns=arrival_ns,
        )
        return request, parsed

    def enter(self, driver: RequestDriver) -> None:
        """A request begins."""
        self.drivers.add(driver)
        self.meter.arrived()

    def leave(self, driver: RequestDriver) -> None:
        """A request is over."""
        self.drivers.discard(driver)

    async def route(self, request: Request, exclude: frozenset[ReplicaId]) -> RouteChoice:
        """Run Serve's router, which is ours, over the pure policies."""
        self._attach()
        call = RouteCall(self.membership, request, exclude)
        try:
            await pick_replica(self._handle, call)
        except NoReplicaError:
            pass
        else:
            if call.choice is None:
                raise RuntimeError("the engine deployment does not use TidegateRouter as its request router")
        return call.choice or EMPTY_CHOICE

    async def wait_for_replica(self, request: Request, ms: float, exclude: frozenset[ReplicaId]) -> Event:
        """Wait until somebody may take the request, at most ``ms``."""
        try:
            async with asyncio.timeout(ms / 1_000):
                while True:
                    await self._changed.wait()
                    self._changed.clear()
                    choice = await self.route(request, exclude)
                    if choice.tiers:
                        return Routed(choice)
        except TimeoutError:
            return WaitedOut()

    def drop_replica(self, replica_id: ReplicaId) -> None:
        """Its port says no: take it out until Serve names it again."""
        drop_replica(self._handle, replica_id)

    # --- the state of the whole ---------------------------------------------------------------------------------------

    @property
    def replicas_ready(self) -> int:
        """Replicas Serve says are running and that publish an address."""
        self._attach()
        return len(self.membership.targets)

    @property
    def queued(self) -> int:
        """Requests that wait for a replica."""
        return sum(driver.waiting_for_replica for driver in self.drivers)

    def _attach(self) -> None:
        """Follow Serve's router once it exists."""
        if self._attached:
            return
        router = request_router(self._handle)
        if router is not None and hasattr(router, "on_change"):
            self._attached = True
            router.on_change = self._membership_changed
            self._membership_changed()

    def _membership_changed(self) -> None:
        self.membership.take(list(current_replicas(self._handle).values()))
        self._changed.set()

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                self._attach()
                self.sweep(now_ns())
            except Exception:
                logger.exception("The watch over open requests failed; it goes on.")

    def sweep(self, at_ns: int) -> None:
        """Interrupt requests whose replica, or whose client, has been silent for too long at ``at_ns``."""
        gateway = self.settings.gateway
        self.pool.prune((target.endpoint for target in self.membership.targets.values()), at_ns)
        if self.queued:
            self._changed.set()  # a replica may have become available without a change of membership
        for driver in tuple(self.drivers):
            limit_ms = gateway.idle_timeout_ms if driver.first_byte_seen else gateway.first_byte_timeout_ms
            if driver.upstream_since_ns and at_ns - driver.upstream_since_ns > limit_ms * 1e6:
                driver.interrupt(Interrupt.SILENCE)
            elif driver.client_since_ns and at_ns - driver.client_since_ns > gateway.idle_timeout_ms * 1e6:
                driver.interrupt(Interrupt.CLIENT_GONE)


def _seed_of(gateway_id: str) -> int:
    """A different seed for each gateway: only ties are broken with it."""
    return int.from_bytes(gateway_id.encode()[-8:], "little")
