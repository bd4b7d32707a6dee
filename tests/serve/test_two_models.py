"""Two models in one application on real Ray Serve, and the second cannot start: the first is served all along."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from ray import serve

from deployments.app import build
from tests import loopback
from tests.serve.gateway.conftest import cluster_of_its_own, until

pytestmark = [pytest.mark.serve, pytest.mark.timeout(300)]

APP = "two"
ENV = {"RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}
ENGINE: dict[str, Any] = {
    "engine": "emulated",
    "emulated": {"step": {"a_ms": 5, "b_ms": 0, "c_ms": 0, "d_ms": 0.02}},
    "drain_s_max": 10,
    "report_interval_ms": 200,
}
BROKEN = ENGINE | {"emulated": {**ENGINE["emulated"], "faults": {"start_failures": 1_000}}}
ARGS: dict[str, Any] = {
    "model": {"name": "good", **ENGINE},
    "models": {"org/broken": {"model": BROKEN, "scaling": {"replicas_min": 1, "replicas_max": 1}}},
    "auth": "none",
    "gateway": {"report_interval_ms": 200},
    "control": {"tick_ms": 200},
    "admission": {"no_replica_wait_ms": 1_000},
    "scaling": {"replicas_min": 1, "replicas_max": 1},
}
BROKEN_NAME = "org/broken"
GIVEN_UP = {"Gateway": "HEALTHY", "Engine": "HEALTHY", "Engine-org-broken": "DEPLOY_FAILED"}


@pytest.fixture
def url() -> Iterator[str]:
    def deploy() -> None:
        target = serve.RunTarget(build(ARGS), name=APP, route_prefix="/")
        serve.run_many([target], wait_for_applications_running=False)

    with cluster_of_its_own(ENV, deploy) as address:
        yield address


def ask(url: str, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "Name a river.", "max_tokens": 8, "ignore_eos": True}
    return loopback.post(f"{url}/v1/completions", json=body, timeout=60)


def answers(url: str) -> bool:
    try:
        return ask(url, "good").status_code == 200
    except httpx.HTTPError:
        return False


def states() -> dict[str, str]:
    """What Serve says of each deployment."""
    found = serve.status().applications[APP].deployments
    return {name: str(status.status.value) for name, status in found.items()}


def stuck(url: str, model: str) -> dict[str, Any] | None:
    """The condition that replicas of ``model`` do not come up, if it is active."""
    answer = loopback.get(f"{url}/control/conditions", params={"model": model}, timeout=20)
    rows = answer.json()["data"] if answer.status_code == 200 else []
    return next((row for row in rows if row["name"] == "stuck_scale_up" and row["active"]), None)


class Client(threading.Thread):
    """Asks for the first model, again and again, until it is stopped."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url, self._over = url, threading.Event()
        self.answers: list[int | str] = []

    def run(self) -> None:
        while not self._over.is_set():
            try:
                self.answers.append(ask(self._url, "good").status_code)
            except httpx.HTTPError as error:
                self.answers.append(repr(error))
            self._over.wait(0.05)

    def stop(self) -> None:
        self._over.set()
        self.join()


def test_one_that_cannot_start_leaves_the_other_alone(url: str) -> None:
    until(lambda: answers(url), "the first model", 120)
    client = Client(url)
    client.start()
    found = until(lambda: stuck(url, BROKEN_NAME), "a condition that says so", 120)
    assert "ScriptedStartError" in found["text"]
    until(lambda: states() == GIVEN_UP, "states")
    refused = ask(url, BROKEN_NAME)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert stuck(url, "good") is None
    cards = loopback.get(f"{url}/v1/models", timeout=20).json()["data"]
    assert [card["id"] for card in cards] == ["good", BROKEN_NAME]
    assert ask(url, "neither").status_code == 404
    assert loopback.get(f"{url}/health", timeout=20).status_code == 200
    page = loopback.get(f"{url}/control/metrics", timeout=20).text
    assert 'tidegate_control_condition_active{condition="stuck_scale_up",model="org/broken"} 1.0' in page
    assert 'tidegate_control_condition_active{condition="stuck_scale_up",model="good"} 0.0' in page
    client.stop()
    assert set(client.answers) == {200}
