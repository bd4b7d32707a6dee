"""One small fleet for the control plane: one gateway, three emulated engines of one kind, room for a fourth."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import httpx
import pytest
from ray import serve

from deployments import gateway
from deployments.app import build
from tests import loopback
from tests.serve.gateway.conftest import MODEL, System, free_port, start_cluster, stop_cluster, until

APP = "control"
REPLICAS = 3
ENV = {"RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}
ARGS: dict[str, Any] = {
    "model": {
        "name": MODEL,
        "engine": "emulated",
        "emulated": {
            "step": {"a_ms": 50, "b_ms": 0.5, "c_ms": 0, "d_ms": 0.02},
            "running_seqs_max": 4,
            "kv_blocks": 2_048,
            "context_tokens_max": 4_096,
        },
        "drain_s_max": 10,
        "report_interval_ms": 250,
    },
    "auth": "none",
    "gateway": {"report_interval_ms": 250},
    "objectives": {"ttft_ms": 500, "itl_ms": 150},
    "admission": {"engine_wait_share": None, "no_replica_wait_ms": 20_000},
    "faults": {"quarantine_s": 0, "eject_ms": 500, "eject_ms_max": 1_000, "retry_burst": 1_000},
    "control": {"tick_ms": 500, "report_age_ms_max": 2_000},
    "scaling": {"replicas_min": REPLICAS, "replicas_max": REPLICAS + 1, "up_ticks": 2},
}
FAULTLESS = {"kind": "none", "share": 1.0, "signals": "ok", "slow_factor": 1.0}
WITHIN_S = 120.0
"""A bound for tests that fail. What a condition may take is in its catalogue and measured by ``bench/scenarios.py``."""


class Load:
    """Clients that ask one after the other until the block ends; what they were answered, 0 for no answer."""

    def __init__(self, url: str, clients: int, tokens: int = 20, again: bool = False) -> None:
        self.statuses: Counter[int] = Counter()
        self._url, self._tokens, self._again = url, tokens, again
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(clients)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        turn = 0
        with loopback.Client(base_url=self._url, timeout=60) as client:
            while not self._over.is_set():
                text = f"client {number}, turn {turn}: " + "name a river. " * 5
                messages = [{"role": "user", "content": text}]
                body = {"model": MODEL, "messages": messages, "max_tokens": self._tokens, "ignore_eos": True}
                body |= {"stream": True}  # of streams TTFT is known
                try:
                    status = client.post("/v1/chat/completions", json=body).status_code
                except httpx.HTTPError:
                    status = 0
                self.statuses[status] += 1
                turn += status == 200 or not self._again


def get(system: System, path: str) -> Any:
    """JSON of ``/control/...``; ``None`` while no controller answers."""
    try:
        answer = loopback.get(f"{system.url}/control/{path}", timeout=20)
    except httpx.TimeoutException:
        return None
    return answer.json() if answer.status_code == 200 else None


def condition(system: System, name: str) -> Mapping[str, Any]:
    """One named condition as it is now; empty while no controller answers."""
    rows = (get(system, "conditions") or {"data": []})["data"]
    return next((row for row in rows if row["name"] == name), {})


def becomes_active(system: System, name: str, also: Callable[[Mapping[str, Any]], Any] = bool) -> Mapping[str, Any]:
    """The condition once it is active and ``also`` is true of it."""

    def found() -> Mapping[str, Any] | None:
        row = condition(system, name)
        return row if row.get("active") and also(row) else None

    row: Mapping[str, Any] = until(found, f"{name} is active", WITHIN_S)
    return row


def ends(system: System, name: str) -> None:
    """Wait until the condition is over."""
    until(lambda: condition(system, name).get("active") is False, f"{name} is over", WITHIN_S)


def fault_at(system: System, replica_id: str, **changes: Any) -> None:
    """Change the faults of one engine."""
    system.engine.broadcast("set_faults", changes, replica_id).results(timeout_s=20)


def decisions(system: System, after_seq: int = 0) -> list[dict[str, Any]]:
    """The ledger after that number, oldest first."""
    found: list[dict[str, Any]] = get(system, f"decisions?since_seq={after_seq}&limit=1000") or []
    return found


def last_seq(system: System) -> int:
    """Number of the newest decision."""
    return max((entry["seq"] for entry in decisions(system)), default=0)


@pytest.fixture(scope="package")
def system() -> Iterator[System]:
    """Three engines whose step models the controller trusts."""
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gateway, "ENV", {})
        try:
            start_cluster(port, ENV)
            handle = serve.run(build(ARGS), name=APP, route_prefix="/")
            running = System(f"http://127.0.0.1:{port}", handle, serve.get_deployment_handle("Engine", APP))
            until(lambda: len(running.counters()) == REPLICAS, "three engines")
            with Load(running.url, 6):
                until(lambda: learned(running), "learned step models", WITHIN_S)
            yield running
        finally:
            stop_cluster(ENV)


def learned(system: System) -> bool:
    """Whether the controller has heard of every engine and set its batch."""
    found = (get(system, "state") or {"replicas": []})["replicas"]
    return len(found) == REPLICAS and all(replica["knobs"]["running_seqs_max"] for replica in found)


@pytest.fixture(autouse=True)
def calm(system: System) -> Iterator[None]:
    """After each test no fault stays on, nothing is set by hand and nothing is open."""
    yield
    until(lambda: system.try_faults(**FAULTLESS), "engines that answer")
    until(lambda: loopback.delete(f"{system.url}/control/overrides", timeout=20).status_code == 200, "no overrides")
    until(system.idle, "nothing is open")
