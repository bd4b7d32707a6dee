"""Objectives through Serve's ``user_config``: taken while it runs, refused without harm; the ledger is on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve
from ray.serve.context import _get_global_client as get_global_client
from ray.serve.schema import ServeDeploySchema

from deployments.simulation.recordings import find_writers
from tests import loopback
from tests.serve.gateway.conftest import free_port, start_cluster, stop_cluster, until

pytestmark = [pytest.mark.serve, pytest.mark.timeout(600)]

APP = "objectives"
ENV = {"RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}
BROKEN = {"objectives": {"ttft_ms": 700, "e2e_ms": 100}}


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ledger")


def deploy(ledger: Path, user_config: Mapping[str, Any]) -> None:
    """As ``serve deploy`` does; the same again but for ``user_config`` restarts nothing."""
    args = {
        "model": {"name": "m", "engine": "emulated", "num_cpus": 0.1, "report_interval_ms": 200},
        "auth": "none",
        "gateway": {"report_interval_ms": 200},
        "control": {"tick_ms": 200},
        "scaling": {"replicas_min": 1, "replicas_max": 1},
        "ledger": {"folder": str(ledger)},
    }
    app = {
        "name": APP,
        "route_prefix": "/",
        "import_path": "deployments.app:build",
        "args": args,
        "deployments": [{"name": "Gateway", "user_config": dict(user_config)}],
    }
    get_global_client().deploy_apps(ServeDeploySchema.model_validate({"applications": [app]}))


@pytest.fixture(scope="module")
def url(ledger: Path) -> Iterator[str]:
    port = free_port()
    try:
        start_cluster(port, ENV)
        deploy(ledger, {"objectives": {"ttft_ms": 1_500}})
        found = f"http://127.0.0.1:{port}"
        until(lambda: serve.status().applications[APP].status == "RUNNING", "the application", 300)
        until(lambda: ready(found), "an engine behind the gateway")
        yield found
    finally:
        stop_cluster(ENV)


def ready(url: str) -> bool:
    try:
        return loopback.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def state(url: str) -> dict[str, Any]:
    answer = loopback.get(f"{url}/control/state", timeout=20)
    found: dict[str, Any] = answer.json() if answer.status_code == 200 else {}
    return found


def promised_ms(url: str) -> float:
    """TTFT the controller steers by."""
    return float(state(url).get("objectives", {}).get("ttft_ms", 0))


def health() -> str:
    return str(serve.status().applications[APP].deployments["Gateway"].status.value)


def test_objectives_change_while_it_runs_and_broken_ones_do_no_harm(url: str, ledger: Path) -> None:
    until(lambda: promised_ms(url) == 1_500, "the objectives it was started with")
    before = state(url)
    deploy(ledger, {"objectives": {"ttft_ms": 700}})
    until(lambda: promised_ms(url) == 700, "the objectives that came later")

    deploy(ledger, BROKEN)
    refused = until(lambda: state(url).get("objectives_refused"), "the refusal")
    assert "e2e_ms: 100: is below" in refused
    until(lambda: health() == "HEALTHY", "a gateway that Serve is content with")
    after = state(url)
    assert after["objectives"]["ttft_ms"] == 700
    assert (after["epoch"], after["pid"]) == (before["epoch"], before["pid"])
    assert ready(url)
    page = loopback.get(f"{url}/metrics", timeout=20).text
    assert 'tidegate_objectives_reloads_total{result="refused"} 1.0' in page
    assert 'tidegate_objectives_reloads_total{result="ok"} 2.0' in page  # the same gateway took both

    deploy(ledger, {})
    until(lambda: promised_ms(url) == 2_000, "what args say")
    assert state(url)["objectives_refused"] is None


def test_the_controller_writes_its_ledger_into_the_folder(url: str, ledger: Path) -> None:
    asked = {"knob": "step_tokens_max", "value": 256, "expires_in_s": 60}
    held = loopback.post(f"{url}/control/overrides", json=asked, timeout=20).json()
    assert held["value"] == 256
    until(lambda: any("OverrideSet" in path.read_text() for path in ledger.glob("ledger-*.jsonl")), "the decision")
    (writer,) = find_writers([ledger], lambda _: None)
    assert writer.header.source == "ledger"
    assert writer.header.name == state(url)["epoch"]
