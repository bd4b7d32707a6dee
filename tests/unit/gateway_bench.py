"""One gateway without Serve: its core and request drivers; replicas are scripted sockets, members told directly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from deployments.cache_salt import CacheSalt
from deployments.clock import now_ns
from deployments.core import NO_HEADERS, GatewayCore
from deployments.driver import RequestDriver
from deployments.endpoints import RELAYED
from deployments.errors import GatewayError
from deployments.inbound import Inbound
from deployments.live_objectives import LiveObjectives
from deployments.membership import Membership, Target
from deployments.meter import Meter
from deployments.prompt import TokenRatio
from deployments.recent_requests import RecentRequests
from deployments.request_log import RequestLog
from deployments.settings import Settings
from deployments.upstream import ConnectionPool
from policies.build import build_policies

CHAT = "/v1/chat/completions"


def a_core(**sections: Any) -> GatewayCore:
    """The real one, but for what only Serve can give: its handle, its router and the sweeper's timer."""
    core = GatewayCore.__new__(GatewayCore)
    core.settings = settings = Settings.load({"auth": "none", **sections})
    core.policies = build_policies(settings.policy_config(), 1)
    core.meter = Meter("gateway", settings.model.name, core._objectives_of)
    core.objectives = LiveObjectives(settings, core.policies, core.meter.telemetry)
    core.membership = Membership(core.policies)
    core.ratio, core.cache_salt = TokenRatio(), CacheSalt()
    core.tracing = core.recorder = core.context_tokens_max = None
    core.resumable, core.log, core.recent = True, RequestLog(), RecentRequests("gateway")
    core.drivers = set()
    core.pool = ConnectionPool(settings.gateway.connect_timeout_ms)
    core._loop, core._attached = asyncio.get_running_loop(), True
    core._changed, core._turns = asyncio.Event(), {}
    return core


def sample(seq: int = 1, backlog: int = 0, state: str = "ready", a_ms: float = 10.0) -> dict[str, object]:
    """What a replica tells of itself."""
    return {
        "seq": seq, "running": 1, "waiting": 0, "prefill_backlog_tokens": backlog, "kv_tokens_used": 0,
        "kv_tokens_max": 100_000, "running_seqs_max": 16, "step_tokens_max": 2_048, "state": state,
        "step_a_ms": a_ms, "step_b_ms": 0.1, "step_c_ms": 0.0, "step_d_ms": 0.1, "step_samples": 100,
    }  # fmt: skip


def tell(core: GatewayCore, endpoints: dict[str, str], **samples: dict[str, object]) -> None:
    """The members are these, each at its endpoint."""
    core.membership.targets = {name: Target(endpoint, "gate") for name, endpoint in endpoints.items()}
    core.policies.update_members({name: samples.get(name) for name in endpoints}, now_ns())


def an_inbound(
    core: GatewayCore,
    request_id: str = "r",
    path: str = CHAT,
    headers: Mapping[bytes, bytes] = NO_HEADERS,
    **fields: Any,
) -> Inbound:
    """A request as the front would parse it."""
    body = {"model": core.settings.model.name, "messages": [{"role": "user", "content": "hi"}], **fields}
    return core.parse(json.dumps(body).encode(), RELAYED[path], now_ns(), request_id, headers=headers)


class Client:
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.problem: GatewayError | None = None
        self.text = b""
        self.complete = False

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status

    async def body(self, chunk: bytes) -> None:
        self.text += chunk

    async def end(self) -> None:
        self.complete = True

    async def error(self, error: GatewayError, headers: list[tuple[bytes, bytes]]) -> None:
        self.status, self.problem = error.status, error

    async def stream_error(self, error: GatewayError, is_stream: bool) -> None:
        self.problem = error


def a_call(core: GatewayCore, request_id: str = "r", **fields: Any) -> tuple[RequestDriver, Client]:
    """A driver that is ready to run, and its client."""
    client = Client()
    return RequestDriver(core, an_inbound(core, request_id, **fields), client), client


def nothing_held(core: GatewayCore) -> bool:
    """Every count is back at zero."""
    ctx = core.policies.flow_context
    admission = ctx.admission
    counts = (admission.requests, admission.tokens, admission.tenants.requests, ctx.book.inflight, len(ctx.unproven))
    return not any(counts) and not core.drivers and not core._turns
