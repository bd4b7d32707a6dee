"""The one place that knows facts of Ray Serve which are not public API (Ray 2.60).

Everything here leans on a private name of Serve; each has a test against the installed version, so that a new Ray shows
at once what moved. Facts used:

* deployment-scoped actors are named ``SERVE_DEPLOYMENT_ACTOR::<app>::<deployment>::<code version>::<actor>`` and live
  in Serve's namespace; ``serve.get_deployment_actor`` finds only those of the calling replica's own deployment;
* a handle whose router runs on the caller's loop (``_run_router_in_separate_loop=False``) calls ``choose_replicas`` on
  that loop, so policies need no locks;
* ``choose_replica(_reserve=False)`` runs the request router and returns its choice without an RPC to the replica. What
  the unreserved form loses: Serve does not count the request as ongoing on the replica (so the replica itself must wait
  for its open streams when it drains), nor in its handle-side metrics (so scaling needs a policy of its own);
* Serve's HTTP server puts a middleware around the application that appends a second ``x-request-id`` with whatever the
  client sent.
"""

# ruff: noqa: SLF001  (private names of Serve are what this module is for)
from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.serve._private.common import ReplicaID
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_DEPLOYMENT_ACTOR_PREFIX, SERVE_NAMESPACE
from ray.serve._private.logging_utils import get_serve_logs_dir
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve._private.request_router.request_router import RequestRouter
from ray.serve._private.router import CurrentLoopRouter
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

__all__ = [
    "SERVE_NAMESPACE",
    "FixedHeadersMessage",
    "NoReplicaError",
    "current_replicas",
    "drop_replica",
    "find_controller_actor",
    "init_handle_same_loop",
    "pick_replica",
    "request_router",
    "serve_http_host",
    "serve_logs_folder",
]


class NoReplicaError(Exception):
    """No replica can take the request now; the request router raises it to answer at once instead of backing off."""


def actor_name_parts(app: str, deployment: str, actor_name: str) -> tuple[str, str]:
    """Return start and end of a deployment-scoped actor's Ray name; Serve puts a code version between them."""
    return f"{SERVE_DEPLOYMENT_ACTOR_PREFIX}{app}::{deployment}::", f"::{actor_name}"


def find_controller_actor(app: str, deployment: str, actor_name: str) -> ActorHandle[Any] | None:
    """Return a handle to the deployment-scoped actor ``actor_name`` of any deployment; ``None`` when there is none.

    Blocks for a round trip to Ray's control store: call it off the event loop (``asyncio.to_thread``). While a rolling
    update is under way two versions live side by side and either may be returned. Never keep the handle after a call on
    it failed: Serve replaces the actor under the same name.
    """
    prefix, suffix = actor_name_parts(app, deployment, actor_name)
    try:
        named = ray.util.list_named_actors(all_namespaces=True)
    except RayError:
        return None
    names = sorted(
        str(actor["name"])
        for actor in cast(list[Mapping[str, str]], named)
        if actor["namespace"] == SERVE_NAMESPACE and actor["name"].startswith(prefix) and actor["name"].endswith(suffix)
    )
    for name in reversed(names):
        try:
            return ray.get_actor(name, namespace=SERVE_NAMESPACE)
        except ValueError:
            continue
    return None


def serve_logs_folder() -> str | None:
    """Where the controller's ledger goes by default: beside Serve's own logs; ``None`` outside of a Ray session."""
    if not ray.is_initialized():
        return None
    return str(Path(get_serve_logs_dir()) / "tidegate_ledger")


def init_handle_same_loop(handle: DeploymentHandle[Any]) -> None:
    """Start the handle's router on the running event loop. Must be the first use of the handle, inside a coroutine."""
    handle._init(_run_router_in_separate_loop=False)


def request_router(handle: DeploymentHandle[Any]) -> RequestRouter | None:
    """Return the handle's request router, or ``None`` before Serve has sent the deployment's configuration.

    Raises:
        TypeError: the handle was not initialised with :func:`init_handle_same_loop`.
    """
    router = getattr(handle, "_router", None)
    if not isinstance(router, CurrentLoopRouter):
        raise TypeError("the handle's router does not run on this event loop: call init_handle_same_loop first")
    return router._asyncio_router.request_router


def current_replicas(handle: DeploymentHandle[Any]) -> Mapping[ReplicaID, RunningReplica]:
    """Return the deployment's running replicas as this handle knows them; empty before the first update."""
    router = request_router(handle)
    return router.curr_replicas if router is not None else {}


def drop_replica(handle: DeploymentHandle[Any], replica_id: str) -> None:
    """Forget a replica whose port refuses connections, until Serve names it again.

    Serve does not name a replica again whose actor is dead, so a dead replica attracts no more requests while Serve's
    health check still has to find out.
    """
    router = request_router(handle)
    if router is None:
        return
    for known in list(router.curr_replicas):
        if known.unique_id == replica_id:
            router.on_replica_actor_died(known)


async def pick_replica(handle: DeploymentHandle[Any], *args: object) -> str:
    """Run the deployment's request router over ``args`` and return the chosen replica's unique id.

    No slot is reserved and no RPC is made. The answer is immediate: it never waits for a replica to appear.

    Raises:
        NoReplicaError: there is no replica, or the request router chose none.
    """
    if not current_replicas(handle):
        raise NoReplicaError
    try:
        async with handle.choose_replica(*args, _reserve=False) as selection:
            return str(selection.replica_id)
    except DeploymentUnavailableError:
        raise NoReplicaError from None


async def serve_http_host() -> str:
    """Return the address Serve's HTTP front (HAProxy or the Python proxy) binds, as configured; ``""`` means all."""
    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    options = await controller.get_http_config.remote()
    return str(options.host or "")


class FixedHeadersMessage(dict[str, Any]):
    """An ASGI ``http.response.start`` whose headers later layers cannot replace.

    Serve's middleware sets ``headers`` to a copy with the client's own request id appended; that assignment is ignored
    here. Pickles as a plain ``dict``, so it may cross to Serve's Python proxy.
    """

    def __setitem__(self, key: str, value: Any) -> None:
        if key != "headers":
            super().__setitem__(key, value)

    def __reduce__(self) -> tuple[Callable[..., dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (dict(self),)
