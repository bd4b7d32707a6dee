"""The ``Gateway`` deployment: Serve's side of the front door. It wires; every step of a request is elsewhere.

    http_front (ASGI)  \
                         driver (RequestFlow on asyncio) -> relay (bytes from the replica's own port)
    handle_api (Python) /        |
                               core (policies, membership, counts)  <->  controller_link (reports, plans)

One core and one line to the controller for each model that is served (``served.py``).

HTTP and handle calls, Serve's router and the policies run on one event loop: Serve is told to run this deployment's
code on the replica's own loop (:data:`ENV`), where direct ingress hands ``send`` straight to the HTTP server. Without
HAProxy, or without these variables, all works the same on the loop Serve gives us, with more copies on the way.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import Any, TypeAlias

from ray import serve
from ray.serve import Application
from ray.serve.config import DeploymentActorConfig
from ray.serve.handle import DeploymentHandle

from deployments import shield
from deployments.auth import Authenticator
from deployments.clients import ClientRule
from deployments.controller_link import ControllerLink
from deployments.core import GatewayCore
from deployments.handle_api import HandleApi
from deployments.http_front import HttpFront
from deployments.own_answers import OwnAnswers
from deployments.serve_internals import serve_http_host
from deployments.served import Served
from deployments.settings import Settings
from deployments.settings_models import drain_s_max, each_of

logger = logging.getLogger("ray.serve")

NAME = "Gateway"
ENV = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": shield.IMPORT_PATH,
    "MALLOC_ARENA_MAX": "1",
    "FORWARDED_ALLOW_IPS": "none",
}
"""Set for gateway replicas only. One heap for all threads: nearly all work is that of one, and each heap has holes of
its own (``deployments/heap.py``). The last: nobody's ``X-Forwarded-For`` may stand for the peer, not even where the
machine's environment trusts all (uvicorn would believe it, and with it that a client is on this host)."""
ONGOING_REQUESTS_MAX = 100_000
"""Serve's own limit, out of the way: admission refuses long before, with a 429 that says when to come back."""
NUM_CPUS = 0.1
"""Set aside for scheduling; a gateway uses far less than a core."""

Reply: TypeAlias = dict[str, Any] | AsyncGenerator[dict[str, Any], None]


class Gateway:
    """See the module. Constructed by Serve on the loop that will run every request."""

    async def __init__(  # type: ignore[misc]  # Serve awaits constructors
        self, settings: dict[str, Any], *engines: DeploymentHandle[Any]
    ) -> None:
        """``settings`` are ``Settings.to_args()``; ``engines``: handles to each model's engines, as they are listed."""
        loaded = Settings.load(settings)
        gateway_id = serve.get_replica_context().replica_id.unique_id
        cores: list[GatewayCore] = []
        for each, engine in zip(each_of(loaded), engines, strict=True):
            cores.append(GatewayCore(each, engine, gateway_id, cores[0] if cores else None))
        self._served = Served(cores, [ControllerLink(core, core is cores[0]) for core in cores])
        self._api = HandleApi(self._served)
        self._rule = ClientRule(loaded.gateway.clients, await serve_http_host())
        if self._rule.closed_reason is not None:
            logger.error("Every HTTP request will be refused: %s.", self._rule.closed_reason)
        self._auth = Authenticator(loaded.auth)
        self._own = OwnAnswers(self._served)
        self._auth.start(cores[0].meter.telemetry)
        for link in self._served.links.values():
            link.start()

    def __serve_build_asgi_app__(self) -> HttpFront:
        """The application Serve runs for HTTP."""
        return HttpFront(self._served, self._rule, self._auth, self._own)

    def reconfigure(self, user_config: Any) -> None:
        """Take the deployment's ``user_config``; Serve calls this at the start and on every change. Never raises."""
        for core in self._served.cores.values():
            core.objectives.take(user_config)

    async def __del__(self) -> None:
        """Stop background work; Serve awaits this when the replica has drained."""
        await self._auth.close()
        for link in self._served.links.values():
            await link.close()
        for core in reversed([*self._served.cores.values()]):
            await core.close()

    # --- methods on the deployment handle; ``caller``: tenant and headers of ``HandleApi.call`` ----------------------

    async def chat(self, body: dict[str, Any], **caller: Any) -> Reply:
        """``POST /v1/chat/completions``."""
        return await self._api.call("/v1/chat/completions", body, **caller)

    async def completions(self, body: dict[str, Any], **caller: Any) -> Reply:
        """``POST /v1/completions``."""
        return await self._api.call("/v1/completions", body, **caller)

    async def responses(self, body: dict[str, Any], **caller: Any) -> Reply:
        """``POST /v1/responses``."""
        return await self._api.call("/v1/responses", body, **caller)

    async def messages(self, body: dict[str, Any], **caller: Any) -> Reply:
        """``POST /v1/messages``."""
        return await self._api.call("/v1/messages", body, **caller)

    async def embeddings(self, body: dict[str, Any], **caller: Any) -> Reply:
        """``POST /v1/embeddings``."""
        return await self._api.call("/v1/embeddings", body, **caller)

    async def tokenize(self, body: dict[str, Any], **caller: Any) -> Reply:
        """``POST /tokenize``."""
        return await self._api.call("/tokenize", body, **caller)

    async def detokenize(self, body: dict[str, Any], **caller: Any) -> Reply:
        """``POST /detokenize``."""
        return await self._api.call("/detokenize", body, **caller)

    async def models(self) -> dict[str, Any]:
        """``GET /v1/models``."""
        return self._own.models()


def build_gateway_deployment(
    settings: Settings, *engines: Application, controller: DeploymentActorConfig | None = None
) -> Application:
    """The bound gateway, with the controller as its deployment-scoped actor; ``engines`` as the models are listed."""
    if controller is None:
        from deployments.controller_actor import controller_actor_config

        controller = controller_actor_config(settings)
    deployment = serve.deployment(
        serve.ingress()(Gateway),
        name=NAME,
        num_replicas=settings.gateway.replicas,
        max_ongoing_requests=ONGOING_REQUESTS_MAX,
        graceful_shutdown_timeout_s=drain_s_max(settings),
        ray_actor_options={"num_cpus": NUM_CPUS, "runtime_env": {"env_vars": ENV}},
        deployment_actors=[controller],
        logging_config={"enable_access_log": False},
    )
    return deployment.bind(settings.to_args(), *engines)
