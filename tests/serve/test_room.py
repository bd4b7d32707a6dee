"""Replicas that a full cluster has no room for, as Ray and Serve themselves tell it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest
import ray
from ray import serve

from deployments.scaling import PlanFollowingPolicy, RoomWatch, actors_to_start, placement_groups

pytestmark = [pytest.mark.serve, pytest.mark.timeout(180)]

APP = "room-test"
PREFIX = f"SERVE_REPLICA::{APP}#Engine#"
MISSING = {"replicas_running": 1, "replicas_target": 2}


class Engine:
    """Stands where the engine stands."""

    def __call__(self) -> str:
        return "here"


@pytest.fixture(scope="module")
def full_cluster() -> Iterator[None]:
    """One core, one replica on it, one that waits."""
    before = dict(os.environ)
    ray.init(num_cpus=1, include_dashboard=False, namespace="serve", log_to_driver=False)
    engine = serve.deployment(
        name="Engine", num_replicas=2, placement_group_bundles=[{"CPU": 1}], ray_actor_options={"num_cpus": 1}
    )(Engine)
    try:
        serve.start(proxy_location="Disabled")
        serve.api._run(engine.bind(), _blocking=False, name=APP, route_prefix=None)
        yield
    finally:
        serve.shutdown()
        ray.shutdown()
        os.environ.clear()
        os.environ.update(before)


def _until(question: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 90
    while not question():
        assert time.monotonic() < end, what
        time.sleep(0.2)


def test_a_replica_without_room_is_counted_once_it_has_waited(full_cluster: None) -> None:
    _until(lambda: sum(name.startswith(PREFIX) for name in placement_groups()) == 2, "two placement groups")
    _until(lambda: "CREATED" in placement_groups().values(), "one of them is placed")
    groups = {name: state for name, state in placement_groups().items() if name.startswith(PREFIX)}
    assert sorted(groups.values()) == ["CREATED", "PENDING"]
    (waits,) = [name for name, state in groups.items() if state == "PENDING"]
    _until(lambda: waits in actors_to_start(), "its actor waits as well")
    watch = RoomWatch()
    assert watch.count(groups, actors_to_start(), 0) == 0
    assert watch.count(groups, actors_to_start(), 6_000_000_000) == 1


def test_the_policy_tells_it_and_asks_only_while_replicas_are_missing(full_cluster: None) -> None:
    policy = PlanFollowingPolicy("prefix", "suffix", "serve")
    policy._unschedulable(MISSING, APP, "Engine")
    policy._room._since_ns = dict.fromkeys(policy._room._since_ns, 0)  # it has waited for long
    assert policy._unschedulable(MISSING, APP, "Engine") == 1
    assert policy._unschedulable(MISSING, APP, "Other") == 0
    policy._unschedulable(MISSING, APP, "Engine")
    policy._room._since_ns = dict.fromkeys(policy._room._since_ns, 0)
    assert policy._unschedulable(MISSING | {"replicas_running": 2}, APP, "Engine") == 0
