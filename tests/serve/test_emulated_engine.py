"""The emulated engine as a Serve deployment: port, gate, signals, faults, starts that fail, leaving."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.emulated_engine import build_emulated_deployment
from deployments.gate import GATE_HEADER
from deployments.settings import Settings
from tests import loopback

pytestmark = [pytest.mark.serve, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
APP = "emulated-test"
ARGS: dict[str, Any] = {
    "model": {
        "engine": "emulated",
        "emulated": {
            "step": {"a_ms": 5, "b_ms": 0, "c_ms": 0, "d_ms": 0},
            "faults": {"start_failures": 1, "die_marker": "poison"},
        },
        "report_interval_ms": 200,
        "drain_s_max": 20,
    },
    "scaling": {"replicas_min": 1, "replicas_max": 1},
}
BODY = {"messages": [{"role": "user", "content": "Name a river."}], "max_tokens": 5}


@pytest.fixture(scope="module")
def engine() -> Iterator[DeploymentHandle[Any]]:
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        namespace="serve",
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    try:
        yield serve.run(build_emulated_deployment(Settings.load(ARGS)), name=APP, route_prefix=None)
    finally:
        serve.shutdown()
        ray.shutdown()


def until(condition: Callable[[], Any], what: str, seconds: float = 60) -> Any:
    """Ask until the answer is true; a bound for tests that fail, not a claim about speed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if answer := condition():
            return answer
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds} s: {what}")


def call(handle: DeploymentHandle[Any], method: str, *args: Any) -> Any:
    return getattr(handle, method).remote(*args).result(timeout_s=30)


def door(handle: DeploymentHandle[Any]) -> httpx.Client:
    """Client that passes the gate of the only replica."""
    metadata = call(handle, "record_replica_metadata")
    headers = {GATE_HEADER: metadata["gate"]}
    return loopback.Client(base_url=f"http://{metadata['endpoint']}", headers=headers, timeout=20)


def test_it_starts_after_the_starts_that_were_told_to_fail(engine: DeploymentHandle[Any]) -> None:
    counters = call(engine, "counters")
    assert counters["running_seqs_hard"] == 16
    assert counters["kv_tokens_max"] == 512 * 16


def test_its_port_answers_behind_the_gate_only(engine: DeploymentHandle[Any]) -> None:
    with door(engine) as client:
        assert client.post("/v1/chat/completions", json=BODY).json()["usage"]["completion_tokens"] == 5
        assert client.get("/health", headers={GATE_HEADER: "wrong"}).status_code == 403


def test_its_samples_carry_what_it_learned(engine: DeploymentHandle[Any]) -> None:
    def learned() -> Any:
        sample = call(engine, "record_routing_stats")
        return sample if sample["step_samples"] > 0 else None

    with door(engine) as client:
        client.post("/v1/chat/completions", json=BODY | {"max_tokens": 200, "ignore_eos": True})
    stats = until(learned, "a routing sample with a learned step model")
    assert stats["state"] == "ready"
    assert stats["running_seqs_max"] == 16


def test_faults_are_switched_through_the_handle_for_the_replica_that_was_meant(engine: DeploymentHandle[Any]) -> None:
    other = call(engine, "set_faults", {"kind": "error"}, "somebody-else")
    assert not other["applied"]
    mine = call(engine, "set_faults", {"kind": "error"}, other["replica_id"])
    assert mine["applied"]
    with door(engine) as client:
        assert client.post("/v1/chat/completions", json=BODY).status_code == 500
        call(engine, "set_faults", {"kind": "none"})
        assert client.post("/v1/chat/completions", json=BODY).status_code == 200


def test_client_that_leaves_aborts_the_work_through_the_port(engine: DeploymentHandle[Any]) -> None:
    before = call(engine, "counters")
    with (
        door(engine) as client,
        client.stream(
            "POST", "/v1/chat/completions", json=BODY | {"stream": True, "max_tokens": 2_000, "ignore_eos": True}
        ) as answer,
    ):
        next(answer.iter_lines())
    counters = until(lambda: (c := call(engine, "counters"))["aborted"] > before["aborted"] and c, "an abort")
    assert counters["running"] == 0
    assert counters["tokens_after_abort"] == 0


def test_failed_health_check_replaces_the_replica(engine: DeploymentHandle[Any]) -> None:
    old = call(engine, "set_faults", {"health": "failed"})["replica_id"]

    def replaced() -> Any:
        try:
            new = call(engine, "counters")["replica_id"]
        except Exception:  # noqa: BLE001 - whatever a dying replica answers
            return None
        return new if new != old else None

    assert until(replaced, "another replica", 90)


def test_die_marker_kills_the_process_and_serve_starts_another(engine: DeploymentHandle[Any]) -> None:
    old = call(engine, "counters")
    with door(engine) as client, pytest.raises(httpx.HTTPError):
        client.post("/v1/completions", json={"prompt": "some poison", "max_tokens": 5})
    until(lambda: not Path(f"/proc/{old['pid']}").exists(), "the end of the process")

    def replaced() -> Any:
        try:
            new = call(engine, "counters")["replica_id"]
        except Exception:  # noqa: BLE001 - whatever a dying replica answers
            return None
        return new if new != old["replica_id"] else None

    assert until(replaced, "another replica", 90)


def test_leaving_replica_ends_its_streams_first(engine: DeploymentHandle[Any]) -> None:
    client = door(engine)
    pid = call(engine, "counters")["pid"]
    body = BODY | {"stream": True, "max_tokens": 600, "ignore_eos": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        asyncio.run(asyncio.to_thread(serve.delete, APP, _blocking=False))
        assert "data: [DONE]" in list(lines)
    until(lambda: not os.path.exists(f"/proc/{pid}"), "the end of the process")  # noqa: PTH110
