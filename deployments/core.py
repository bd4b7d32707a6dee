"""What all requests of one gateway for one model share: policies, membership, connections, counts, and their watch.

A gateway that serves several models has one core for each (``served.py``). What belongs to the gateway as a whole is
the first core's, and the others use it: tenants, tasks, bounds, the cache's secret, the last requests, tracing.

Everything here lives on one event loop, the one Serve runs the gateway's code on: policies have no locks, and
:meth:`GatewayCore.check_loop` fails loudly when something calls from another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ray.serve.handle import DeploymentHandle
from xxhash import xxh3_64_intdigest

from deployments.auth import ANYBODY, Principal
from deployments.cache_salt import CacheSalt
from deployments.clock import now_ns
from deployments.driver import Interrupt, RequestDriver
from deployments.endpoints import Endpoint
from deployments.heap import HeapTrimmer
from deployments.inbound import Inbound
from deployments.live_objectives import LiveObjectives
from deployments.membership import EMPTY_CHOICE, Membership, RouteCall
from deployments.meter import Meter
from deployments.prompt import BlockSizes, ParsedBody, TokenRatio, parse_body
from deployments.recent_requests import RecentRequests
from deployments.recording import open_recorder, request_line
from deployments.request_log import RequestLog, RequestRecord
from deployments.request_meta import deadline_of, parse_meta, priority_of
from deployments.resume import engine_reason
from deployments.serve_internals import (
    NoReplicaError,
    current_replicas,
    drop_replica,
    init_handle_same_loop,
    pick_replica,
    request_router,
)
from deployments.settings import Settings
from deployments.tracing import Tracing, open_tracing
from deployments.upstream import ConnectionPool
from policies.build import Policies, build_policies
from policies.config import ObjectivesConfig
from policies.events import Event, Expired, Finish, Granted, Outcome, Routed, Usage, WaitedOut
from policies.flow import RequestFlow
from policies.objectives import objectives_for
from policies.types import Priority, ReplicaId, Request, RouteChoice

logger = logging.getLogger("ray.serve")

SWEEP_S = 0.25
"""Period of the watch over open requests and of the look for Serve's router."""
LOST_AFTER_NS = 1_000_000_000
"""A replica that says it is stuck is left by requests for which it has been silent for this long."""
TEMPLATE_TOKENS_MAX = 128
"""Tokens a chat template may add to a prompt whose every byte is a token: more than these no prompt has, for money."""
NO_HEADERS: Mapping[bytes, bytes] = MappingProxyType({})


class GatewayCore:
    """See the module. Built inside the event loop that will run every request."""

    def __init__(
        self, settings: Settings, engine: DeploymentHandle[Any], gateway_id: str, first: GatewayCore | None = None
    ) -> None:
        """``settings`` as the model sees them; ``first``: the core of the gateway's first model, if this is another."""
        self.settings = settings
        seed = settings.gateway.seed ^ _seed_of(gateway_id)
        self.policies: Policies = build_policies(
            settings.policy_config(), seed, first=None if first is None else first.policies
        )
        self.meter = Meter(gateway_id, settings.model.name, self._objectives_of)
        self.objectives = LiveObjectives(settings, self.policies, self.meter.telemetry)
        self.membership = Membership(self.policies, self.meter.telemetry.remove_replica)
        self.ratio = TokenRatio()
        self.cache_salt: CacheSalt = CacheSalt(settings.gateway.cache_salt_file) if first is None else first.cache_salt
        self.log = RequestLog()
        self.recent: RecentRequests = RecentRequests(gateway_id) if first is None else first.recent
        self.tracing: Tracing | None = open_tracing(settings, gateway_id) if first is None else first.tracing
        """``None``: requests are not traced."""
        self.context_tokens_max = settings.model.known_context_tokens
        """Longest prompt plus output; ``None``: only the engine knows."""
        self.resumable = settings.faults.resume and not engine_reason(settings.model.engine_args)
        self.drivers: set[RequestDriver] = set()
        """Open requests; admission bounds how many."""
        self.pool: ConnectionPool = ConnectionPool(settings.gateway.connect_timeout_ms)
        self.recorder = open_recorder(settings, "gateway", gateway_id)
        """``None``: nothing is recorded."""
        self._first = first
        self._heap = HeapTrimmer() if first is None else None
        self._loop = asyncio.get_running_loop()
        self._handle = engine
        self._attached = False
        self._changed = asyncio.Event()
        self._turns: dict[str, asyncio.Future[Event]] = {}
        """Requests in the gateway's queue."""
        init_handle_same_loop(engine)
        self._sweeper = self._loop.create_task(self._sweep_forever())

    async def close(self) -> None:
        """Stop watching and close idle connections."""
        self._sweeper.cancel()
        await asyncio.gather(self._sweeper, return_exceptions=True)
        self.pool.close()
        self.log.flush()
        if self.tracing is not None and self._first is None:
            await asyncio.to_thread(self.tracing.close)
        if self.recorder is not None:
            await asyncio.to_thread(self.recorder.close)

    def _objectives_of(self, priority: Priority) -> ObjectivesConfig:
        return objectives_for(self.policies.config, self.settings.model.name, priority)

    def check_loop(self) -> None:
        """Raise when the caller runs on another loop than the policies live on."""
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("the gateway's policies are bound to one event loop and were called from another")

    # --- one request --------------------------------------------------------------------------------------------------

    def parse(
        self,
        body: bytes,
        endpoint: Endpoint,
        arrival_ns: int,
        request_id: str,
        principal: Principal = ANYBODY,
        headers: Mapping[bytes, bytes] = NO_HEADERS,
    ) -> Inbound:
        """The request of ``principal`` under the server's own ``request_id``. Raises ``GatewayError``."""
        routing, tenant = self.settings.routing, principal.tenant
        config = self.policies.config.tenant(tenant)
        sizes = BlockSizes(routing.block_bytes, routing.request_blocks_max, self.ratio.bytes_per_token)
        prefixes_of = tenant if config.isolate_cache else ""
        parsed = parse_body(body, endpoint, self.settings.model.name, prefixes_of, sizes)
        salt = self.cache_salt.of(config, tenant, parsed.cache_salt) if endpoint.prompt_weight == 1 else None
        meta = parse_meta(headers, parsed.metadata)
        request = Request(
            request_id=request_id,
            model=parsed.model,
            endpoint=endpoint.path,
            tenant=tenant,
            prompt_tokens=parsed.prompt_tokens,
            output_tokens_max=parsed.output_tokens_max,
            blocks=parsed.blocks,
            block_tokens=sizes.block_tokens,
            stream=parsed.stream,
            arrival_ns=arrival_ns,
            priority=priority_of(meta, config),
            task=meta.task,
            deadline_ns=deadline_of(meta, tenant, self.policies.flow_context.tasks, arrival_ns),
            fingerprint=xxh3_64_intdigest(body, xxh3_64_intdigest(f"{tenant}\0{endpoint.path}".encode())),
            prompt_tokens_most=parsed.prompt_bytes + TEMPLATE_TOKENS_MAX,
            output_tokens_most=self._output_most(parsed),
        )
        record = RequestRecord(
            request_id=request_id,
            endpoint=endpoint.path,
            arrival_ns=arrival_ns,
            model=parsed.model,
            key_id=principal.key_id,
            tenant=tenant,
            priority=request.priority,
            task=meta.task,
            stream=parsed.stream,
        )
        if self.tracing is not None:
            record.trace = self.tracing.begin(headers.get(b"traceparent"))
        plan = parsed.plan if self.resumable else None
        return Inbound(endpoint, request, body, parsed.prompt_bytes, record, plan, salt, meta.limits, meta.outcome)

    def _output_most(self, parsed: ParsedBody) -> int | None:
        """Output an engine may write; ``None``: as the client says, or nobody knows."""
        if parsed.output_tokens_max is not None or self.context_tokens_max is None:
            return parsed.output_tokens_max
        prompt_tokens = parsed.prompt_tokens if parsed.choices == 1 else 0  # those of a batch are counted together
        return max(1, self.context_tokens_max - prompt_tokens) * parsed.choices

    def enter(self, driver: RequestDriver) -> None:
        """A request begins."""
        self.drivers.add(driver)
        self.meter.arrived(driver.request)

    def leave(self, driver: RequestDriver) -> None:
        """A request is over."""
        self.drivers.discard(driver)

    def ended(self, inbound: Inbound, finish: Finish, usage: Usage, output_tokens: int, flow: RequestFlow) -> None:
        """A request ended: count it, write it down, learn from it."""
        request, record = inbound.request, inbound.record
        e2e_ns, first_byte_ns = record.ended_ns - request.arrival_ns, record.first_byte_ns or None
        self.meter.ended(request, finish, usage, output_tokens, ended_ns=record.ended_ns, first_byte_ns=first_byte_ns)
        self.meter.extra_attempts(flow.hedged, flow.resumes)
        if usage.prompt_tokens and inbound.endpoint.prompt_weight == 1:
            self.ratio.observe(inbound.prompt_bytes, usage.prompt_tokens)
        if self.recorder is not None:
            recorded = request_line(
                self.recorder.header.started_ns,
                request,
                inbound.prompt_bytes,
                finish,
                usage,
                output_tokens,
                record.first_byte_ns,
                e2e_ns,
                flow.replica_id,
                flow.attempts,
            )
            self.recorder.put(recorded)
        self.log.put(record)
        self.recent.put(record, None if flow.choice is None else flow.choice.reason)
        if self.tracing is not None:
            self.tracing.end(record)

    def ended_early(self, record: RequestRecord, outcome: Outcome, reason: str, status: int | None) -> None:
        """A request ended before it had a driver: count it, write it down. ``status``: what its client was sent."""
        record.status = status
        record.finish(outcome.value, reason, now_ns())
        self.meter.ended_early(record.endpoint, outcome, reason)
        self.log.put(record)
        self.recent.put(record)

    # --- those that wait for their turn -------------------------------------------------------------------------------

    async def wait_turn(self, request_id: str) -> Event:
        """Wait in the gateway's queue until :meth:`pump` says that the turn has come, or that it is too late."""
        try:
            return await self._turn(request_id)
        finally:
            del self._turns[request_id]

    def pump(self) -> None:
        """Let those go on whose turn it is."""
        pumped = self.policies.pump(now_ns())
        for request_ids, event in ((pumped.granted, Granted()), (pumped.expired, Expired())):
            for request_id in request_ids:
                turn = self._turn(request_id)
                if not turn.done():
                    turn.set_result(event)

    def _turn(self, request_id: str) -> asyncio.Future[Event]:
        """Where it waits, or will in a moment: a turn may come before whoever was put in the queue begins to wait."""
        turn = self._turns.get(request_id)
        if turn is None:
            turn = self._turns[request_id] = self._loop.create_future()
        return turn

    async def route(self, request: Request, exclude: frozenset[ReplicaId]) -> RouteChoice:
        """Ask the pure policies. Until Serve's router exists, which keeps their members current, ask through it."""
        self._attach()
        if self._attached:
            return self.membership.choose(request, exclude)
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
        """Requests that wait for their turn or for a replica."""
        return sum(driver.waiting for driver in self.drivers)

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
        self.pump()

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                self._attach()
                self.sweep(now_ns())
                if self._heap is not None:
                    self._heap.trim(now_ns())
            except Exception:
                logger.exception("The watch over open requests failed; it goes on.")

    def sweep(self, at_ns: int) -> None:
        """Interrupt requests whose replica or client has been silent for too long at ``at_ns``, whose replica is lost,
        or whose time is up.
        """
        gateway, policies = self.settings.gateway, self.policies
        self.log.flush()
        self.pool.prune((target.endpoint for target in self.membership.targets.values()), at_ns)
        if self.queued:
            self._changed.set()  # a replica may have become available without a change of membership
            self.pump()
        lost = policies.fleet.stuck(at_ns)
        for driver in tuple(self.drivers):
            flow = driver.flow
            is_lost = flow.replica_id in lost and (flow.hedge_id is None or flow.hedge_id in lost)
            limit_ms = gateway.idle_timeout_ms if driver.first_byte_seen else gateway.first_byte_timeout_ms
            since_ns = driver.upstream_since_ns
            if since_ns and at_ns - since_ns > limit_ms * 1e6:
                driver.interrupt(Interrupt.SILENCE)
            elif since_ns and is_lost and at_ns - since_ns > LOST_AFTER_NS:
                driver.interrupt(Interrupt.REPLICA_LOST)
            elif driver.client_since_ns and at_ns - driver.client_since_ns > gateway.client_idle_timeout_ms * 1e6:
                driver.interrupt(Interrupt.CLIENT_GONE)
            elif at_ns - driver.request.arrival_ns > gateway.total_timeout_ms * 1e6:
                driver.interrupt(Interrupt.TIME_UP)


def _seed_of(gateway_id: str) -> int:
    """A different seed for each gateway: only ties are broken with it."""
    return int.from_bytes(gateway_id.encode()[-8:], "little")
