"""One cluster for the failures that operators have reported: HAProxy, one gateway, four small emulated engines.

The names of these tests say which recipe they play (README). They claim what must be true at the end; how fast it is
done is measured under ``tests/bench``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from ray import serve

from deployments.app import build
from tests import loopback
from tests.serve.gateway.conftest import (
    ENV,
    MODEL,
    System,
    direct,
    free_port,
    start_cluster,
    stop_cluster,
    until,
)

APP = "cases"
REPLICAS = 4
QUEUE_MAX, INDEX_MAX, RETRY_BURST = 32, 2_000, 6
ARGS: dict[str, Any] = {
    "model": {
        "name": MODEL,
        "engine": "emulated",
        "emulated": {
            "step": {"a_ms": 5, "b_ms": 0, "c_ms": 0, "d_ms": 0.02},
            "running_seqs_max": 4,
            "step_tokens_max": 512,
            "kv_blocks": 1_024,
            "context_tokens_max": 8_192,
        },
        "stuck_after_s": 3,
        "drain_s_max": 30,
        "report_interval_ms": 200,
    },
    "auth": "none",
    "gateway": {"body_bytes_max": 100_000, "report_interval_ms": 200, "idle_timeout_ms": 8_000},
    "objectives": {"ttft_ms": 1_000, "itl_ms": 100},
    "admission": {"no_replica_wait_ms": 20_000, "queue_requests_max": QUEUE_MAX, "output_tokens_estimate": 32},
    "faults": {"eject_ms": 300, "eject_ms_max": 600, "retry_pause_ms": 10, "retry_burst": RETRY_BURST},
    "routing": {"index_blocks_max": INDEX_MAX, "sample_age_ms_max": 1_000},
    "control": {"tick_ms": 200, "report_age_ms_max": 1_000},
    "scaling": {"replicas_min": REPLICAS, "replicas_max": REPLICAS},
}
NO_FAULTS: dict[str, Any] = {
    "kind": "none", "after_tokens": 0, "share": 1.0, "silence_s": 30.0, "marker": None, "die_marker": None,
    "signals": "ok", "health": "ok", "slow_factor": 1.0, "ignore_aborts": False, "ignore_drain": False,
}  # fmt: skip
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def metric(system: System, name: str, labels: str = "") -> float:
    """Sum of one metric's samples whose labels contain ``labels``."""
    page = loopback.get(f"{system.url}/metrics", timeout=20).text
    found = re.findall(rf"^{name}(\{{[^}}]*\}})? ([0-9.eE+-]+)$", page, re.MULTILINE)
    return sum(float(value) for label, value in found if labels in label)


def by_replica(system: System, name: str) -> dict[str, int]:
    """A counter of each engine."""
    return {c["replica_id"]: int(c[name]) for c in system.counters()}


def fault_at(system: System, replica_id: str, **changes: Any) -> None:
    """Change the faults of one engine."""
    system.engine.broadcast("set_faults", changes, replica_id).results(timeout_s=20)


def at_once(calls: int, ask: Callable[[int], Any]) -> list[Any]:
    """``ask(n)`` for each n, all at the same time; the results in order."""
    with ThreadPoolExecutor(calls) as pool:
        return list(pool.map(ask, range(calls)))


def completion(prompt: str, tokens: int = 5, **more: Any) -> dict[str, Any]:
    """A completion of exactly so many tokens."""
    return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0} | more


def all_serve(system: System) -> bool:
    """Every engine is there and gets requests."""
    before = by_replica(system, "requests")
    answers = at_once(
        REPLICAS * 4, lambda n: loopback.post(system.url + COMPLETIONS, json=completion(f"{n} ok", 20), timeout=60)
    )
    now = by_replica(system, "requests")
    served = [name for name, count in now.items() if count > before.get(name, 0)]
    return len(served) == REPLICAS and all(answer.status_code == 200 for answer in answers)


@pytest.fixture(scope="package")
def system() -> Iterator[System]:
    port = free_port()
    try:
        start_cluster(port, ENV)
        handle = serve.run(build(ARGS), name=APP, route_prefix="/")
        running = System(f"http://127.0.0.1:{port}", handle, serve.get_deployment_handle("Engine", APP))
        until(lambda: len(running.counters()) == REPLICAS and direct(running.url), "four engines behind the gateway")
        yield running
    finally:
        stop_cluster(ENV)


@pytest.fixture
def client(system: System) -> Iterator[httpx.Client]:
    with loopback.Client(base_url=system.url, timeout=60) as http:
        yield http


@pytest.fixture(autouse=True)
def calm(system: System) -> Iterator[None]:
    """Each test begins with engines that all get requests, and leaves nothing open."""
    until(lambda: system.try_faults(**NO_FAULTS), "engines that answer", 60)
    until(lambda: len(system.counters()) == REPLICAS and all_serve(system), "all engines serve", 60)
    yield
    until(lambda: system.try_faults(**NO_FAULTS), "engines that answer", 60)
    until(system.idle, "everything given back", 60)
