"""Private facts of the installed Ray Serve that the project leans on."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
import ray
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import MutableHeaders

from deployments.serve_internals import (
    FixedHeadersMessage,
    NoReplicaError,
    current_replicas,
    drop_replica,
    find_controller_actor,
    init_handle_same_loop,
    pick_replica,
    request_router,
    serve_http_host,
)
from tests.serve.gateway.conftest import APP, System

pytestmark = [pytest.mark.serve, pytest.mark.timeout(120)]


def test_the_controller_actor_is_found_from_anywhere(system: System) -> None:
    actor = find_controller_actor(APP, "Gateway", "controller")
    assert actor is not None
    assert ray.get(actor.state.remote(), timeout=20)["mode"] == "shadow"


@pytest.mark.parametrize(
    "names", [("other", "Gateway", "controller"), (APP, "Engine", "controller"), (APP, "Gateway", "x")]
)
def test_what_does_not_exist_is_not_found(system: System, names: tuple[str, str, str]) -> None:
    assert find_controller_actor(*names) is None


async def test_the_front_says_where_it_listens(system: System) -> None:
    assert await serve_http_host() == "127.0.0.1"


async def test_a_handle_on_this_loop_knows_replicas_and_picks_one(system: System) -> None:
    handle: DeploymentHandle[Any] = DeploymentHandle("Engine", APP)  # not from Serve's cache: it ends with this loop
    init_handle_same_loop(handle)
    async with asyncio.timeout(20):
        while len(current_replicas(handle)) < 2:  # noqa: ASYNC110 - Serve tells nobody
            await asyncio.sleep(0.05)
    assert hasattr(request_router(handle), "on_change")
    known = {replica_id.unique_id for replica_id in current_replicas(handle)}
    picked = await pick_replica(handle, "argument")
    assert picked in known
    for replica_id in known:
        drop_replica(handle, replica_id)
    drop_replica(handle, "unknown")
    assert not current_replicas(handle)
    with pytest.raises(NoReplicaError):
        await pick_replica(handle, "argument")


async def test_a_handle_with_a_loop_of_its_own_is_refused(system: System) -> None:
    with pytest.raises(TypeError):
        request_router(system.engine)


def test_serves_middleware_cannot_append_to_our_headers() -> None:
    message = FixedHeadersMessage(type="http.response.start", status=200, headers=[(b"x-request-id", b"ours")])
    MutableHeaders(scope=message).append("X-Request-ID", "theirs")
    assert message["headers"] == [(b"x-request-id", b"ours")]
    message["status"] = 201
    assert message["status"] == 201


def test_the_message_crosses_processes_as_a_plain_dict() -> None:
    copy = pickle.loads(pickle.dumps(FixedHeadersMessage(type="t", headers=[])))
    assert type(copy) is dict
    assert copy == {"type": "t", "headers": []}
