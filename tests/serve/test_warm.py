"""A warm replica on real Ray Serve: nobody sends it anything, its engine sleeps, and it serves when it is wanted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from ray import serve
from ray.exceptions import RayError

from deployments.app import build
from tests import loopback
from tests.serve.gateway.conftest import MODEL, cluster_of_its_own, plan_of, until

pytestmark = [pytest.mark.serve, pytest.mark.timeout(300)]

APP = "stands-by"
ENV = {"RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}
ARGS: dict[str, Any] = {
    "model": {
        "name": MODEL,
        "engine": "emulated",
        "emulated": {"step": {"a_ms": 5, "b_ms": 0, "c_ms": 0, "d_ms": 0.02}, "start_ms": 200, "wake_ms": 200},
        "report_interval_ms": 200,
    },
    "auth": "none",
    "gateway": {"report_interval_ms": 200},
    "control": {"tick_ms": 200},
    "scaling": {"replicas_max": 2, "warm_min": 1, "warm_max": 1, "asleep_price_share": 0.5},
}
ASKED = 6


@pytest.fixture
def url() -> Iterator[str]:
    with cluster_of_its_own(ENV, lambda: serve.run(build(ARGS), name=APP, route_prefix="/")) as address:
        yield address


def warm(url: str) -> list[str]:
    """Replicas that the plan calls warm."""
    return list(plan_of(url).get("warm") or ())


def asleep() -> list[str]:
    """Replicas whose engines sleep."""
    try:
        found = serve.get_deployment_handle("Engine", APP).broadcast("counters").results(timeout_s=20)
    except RayError:
        return []
    return [counters["replica_id"] for counters in found if counters["asleep"]]


def served_by(url: str) -> list[str]:
    """Who answered a handful of requests, each of which was answered."""
    found = []
    for number in range(ASKED):
        body = {"model": MODEL, "prompt": f"Name river {number}.", "max_tokens": 2}
        answer = loopback.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        found.append(answer.headers["x-tidegate-replica"])
    return found


def test_a_warm_replica_gets_nothing_sleeps_and_serves_when_it_is_wanted(url: str) -> None:
    (name,) = until(lambda: warm(url), "a replica that stands by", 120)
    until(lambda: name not in served_by(url), "gateways that know of it")
    until(lambda: asleep() == [name], "an engine that sleeps")
    assert name not in served_by(url)
    assert asleep() == [name]
    body = {"knob": "replicas_target", "value": 2, "expires_in_s": 600}
    assert loopback.post(f"{url}/control/overrides", json=body, timeout=20).status_code == 200
    until(lambda: name in served_by(url), "an answer of the one that stood by", 120)
    assert warm(url) == []
