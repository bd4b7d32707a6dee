"""One cluster for bad input: HAProxy, one gateway, two fast emulated engines, and every port they have open."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest
from ray import serve

from deployments.app import build
from tests import loopback
from tests.serve.fuzz.wire import connect, send
from tests.serve.gateway.conftest import ARGS as GATEWAY_ARGS
from tests.serve.gateway.conftest import ENV as GATEWAY_ENV
from tests.serve.gateway.conftest import MODEL, System, direct, free_port, start_cluster, stop_cluster, until

APP = "fuzz-test"
ARGS: dict[str, Any] = copy.deepcopy(GATEWAY_ARGS)
ARGS["model"]["emulated"] = {
    "step": {"a_ms": 0.2, "b_ms": 0, "c_ms": 0, "d_ms": 0},
    "kv_blocks": 4_096,
    "context_tokens_max": 512,
    "running_seqs_max": 64,
}
ARGS["gateway"]["body_bytes_max"] = 6_000_000
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Name a river."}], "max_tokens": 5}
DOORS = ("front", "stats", "metrics", "fallback", "gateway", "engine")
"""Ports that speak HTTP, by whose they are."""


LOOPBACK = frozenset({"127.0.0.1", "0.0.0.0", "::", "::ffff:127.0.0.1"})
"""Addresses of listeners that are reached at 127.0.0.1; tests send nowhere else."""


@dataclass
class Target:
    """The system and its open ports."""

    system: System
    doors: dict[str, int]
    others: dict[int, str]
    """Ports of the same processes that do not speak HTTP, and whose they are."""
    pids: dict[str, int]
    """Gateway and engines, by title."""

    def fds(self) -> int:
        """Open files of the gateway and the engines."""
        return sum(psutil.Process(pid).num_fds() for pid in self.pids.values())

    def rss_mib(self) -> float:
        """Memory of the gateway and the engines."""
        return float(sum(psutil.Process(pid).memory_info().rss for pid in self.pids.values()) / 2**20)

    def well(self) -> None:
        """Nobody died, a good request is answered, nothing is open."""
        assert serve_pids() == self.pids
        answer = loopback.post(f"{self.system.url}/v1/chat/completions", json=CHAT, timeout=30)
        assert answer.status_code == 200, answer.text
        until(self.system.idle, "everything given back", 60)


def serve_pids() -> dict[str, int]:
    """Processes of this run's replicas, by title and number."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        title = " ".join(process.cmdline())
        if title.startswith("ray::ServeReplica:"):
            found[f"{title.split(':')[-1].split('.')[0].strip()} {process.pid}"] = process.pid
    return found


def open_ports() -> dict[int, str]:
    """Every TCP port a process of this run listens on, with the process's title."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.ip in LOOPBACK:
                    found[connection.laddr.port] = title
        except psutil.Error:
            continue
    return found


def listens(number: int) -> bool:
    """Somebody answers on 127.0.0.1; a listener may have gone meanwhile."""
    try:
        connect(number).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="package")
def target() -> Iterator[Target]:
    numbers = {name: free_port() for name in ("front", "stats", "metrics", "fallback")}
    env = GATEWAY_ENV | {
        "RAY_SERVE_HAPROXY_STATS_PORT": str(numbers["stats"]),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(numbers["metrics"]),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(numbers["fallback"]),
    }
    try:
        start_cluster(numbers["front"], env)
        handle = serve.run(build(ARGS), name=APP, route_prefix="/")
        system = System(f"http://127.0.0.1:{numbers['front']}", handle, serve.get_deployment_handle("Engine", APP))
        until(lambda: len(system.counters()) == 2 and direct(system.url), "two engines behind the gateway")
        yield survey(system, numbers)
    finally:
        stop_cluster(env)


def survey(system: System, numbers: dict[str, int]) -> Target:
    """Find out which ports are open and which of them speak HTTP."""
    pids, doors, others = serve_pids(), dict(numbers), {}
    for number, title in open_ports().items():
        if number in numbers.values():
            continue
        if not listens(number):
            continue
        is_http = send(number, b"GET /-/nothing HTTP/1.1\r\nhost: localhost\r\n\r\n").startswith(b"HTTP/1.1")
        if is_http and "ServeReplica" in title:
            doors["gateway" if "Gateway" in title else "engine"] = number
        else:
            others[number] = title
    assert set(doors) == set(DOORS), (doors, others)
    return Target(system, doors, others, pids)


@pytest.fixture
def system(target: Target) -> System:
    return target.system


@pytest.fixture
def client(target: Target) -> Iterator[httpx.Client]:
    with loopback.Client(base_url=target.system.url, timeout=60) as http:
        yield http


@pytest.fixture(autouse=True)
def unharmed(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test everybody is alive and nothing is open anywhere."""
    yield
    if "target" in request.fixturenames:
        running: Target = request.getfixturevalue("target")
        running.well()
