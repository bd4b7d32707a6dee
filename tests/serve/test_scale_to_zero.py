"""A model that may sleep, on real Ray Serve: it sleeps, only a request wakes it, and its drain cuts nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from ray import serve

from deployments.app import build
from tests import loopback
from tests.serve.gateway.conftest import MODEL, cluster_of_its_own, plan_of, until

pytestmark = [pytest.mark.serve, pytest.mark.timeout(300)]

APP = "sleeps"
ENV = {"RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}
ARGS: dict[str, Any] = {
    "model": {
        "name": MODEL,
        "engine": "emulated",
        "emulated": {"step": {"a_ms": 20, "b_ms": 0, "c_ms": 0, "d_ms": 0.02}, "start_ms": 500},
        "drain_s_max": 10,
        "report_interval_ms": 200,
    },
    "auth": "none",
    "gateway": {"report_interval_ms": 200},
    "control": {"tick_ms": 200},
    "scaling": {"replicas_min": 0, "replicas_max": 1, "zero_after_s": 1.0},
}
TOKENS = 150
BODY = {"model": MODEL, "prompt": "Name a river.", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}


@pytest.fixture
def url() -> Iterator[str]:
    with cluster_of_its_own(ENV, lambda: serve.run(build(ARGS), name=APP, route_prefix="/")) as address:
        yield address


def replicas() -> dict[str, int]:
    """Of the engine, by state; empty: none at all."""
    found = serve.status().applications[APP].deployments["Engine"].replica_states
    return {str(state): count for state, count in found.items() if count}


def cold(url: str) -> dict[str, Any]:
    """What the plan says of a model that sleeps or starts; empty: it says nothing, or nobody answers."""
    return plan_of(url).get("cold") or {}


def test_it_sleeps_wakes_for_a_request_alone_and_cuts_nothing(url: str) -> None:
    until(lambda: not replicas(), "no replica, because nobody asks", 120)
    asleep = until(lambda: cold(url), "a plan that says so")
    assert asleep["phase"] == "asleep"
    assert asleep["measured"]
    for _ in range(3):
        for path in ("/health", "/v1/models", "/metrics", "/control/state"):
            assert loopback.get(f"{url}{path}", timeout=20).status_code == 200
    assert loopback.post(f"{url}/v1/completions", json=BODY | {"model": "another"}, timeout=20).status_code == 404
    assert replicas() == {}, "a question to the gateway is no request"
    answer = loopback.post(f"{url}/v1/completions", json=BODY, timeout=120)
    assert answer.status_code == 200
    assert "[DONE]" in answer.text
    assert answer.text.count("data: ") > TOKENS, "longer than it may be idle, and whole"
    until(lambda: not replicas(), "no replica again", 120)
