"""One cluster for all tests of the gateway: HAProxy, one gateway, two emulated engines."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.context import _get_global_client as get_global_client
from ray.serve.handle import DeploymentHandle

from deployments import gateway
from deployments.app import build
from deployments.gate import GATE_HEADER
from deployments.haproxy import BINARY, stand_before
from tests import loopback
from tests.collector import Collector

ROOT = Path(__file__).resolve().parents[3]
APP = "gateway-test"
MODEL = "emulated-model"
ARGS: dict[str, Any] = {
    "model": {
        "name": MODEL,
        "engine": "emulated",
        "emulated": {
            "step": {"a_ms": 5, "b_ms": 0, "c_ms": 0, "d_ms": 0.02},
            "kv_blocks": 2_048,
            "context_tokens_max": 4_096,
        },
        "drain_s_max": 30,
        "report_interval_ms": 200,
    },
    "auth": "none",
    "gateway": {
        "body_bytes_max": 100_000,
        "report_interval_ms": 200,
        "idle_timeout_ms": 3_000,
        "body_timeout_ms": 3_000,
        "client_idle_timeout_ms": 15_000,
    },
    "admission": {"no_replica_wait_ms": 20_000},
    "faults": {"quarantine_s": 0, "retry_burst": 1_000},  # the same bodies again and again, and many of them fail
    "control": {"tick_ms": 200, "mode": "shadow"},
    "scaling": {"replicas_min": 2, "replicas_max": 2},
}
ENV = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "4",  # HAProxy's reload has to come first, on a busy machine too
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
}


@dataclass
class System:
    """What tests talk to."""

    url: str
    handle: DeploymentHandle[Any]
    """The gateway's."""
    engine: DeploymentHandle[Any]
    collector: Collector | None = None
    """Of traces; only requests that ask for one have one."""

    def counters(self) -> list[dict[str, Any]]:
        """Counters of each engine."""
        found: list[dict[str, Any]] = self.engine.broadcast("counters").results(timeout_s=20)
        return found

    def faults(self, **changes: Any) -> None:
        """Change the faults of all engines."""
        self.engine.broadcast("set_faults", changes).results(timeout_s=20)

    def try_faults(self, **changes: Any) -> bool:
        """Like :meth:`faults`; false while Serve still names an engine that is dead."""
        try:
            self.faults(**changes)
        except RayError:
            return False
        return True

    def whole(self) -> bool:
        """Both engines answer."""
        try:
            return len(self.counters()) == 2
        except RayError:
            return False

    def total(self, name: str) -> int:
        """Sum of a counter over the engines."""
        return sum(int(c[name]) for c in self.counters())

    def idle(self) -> bool:
        """Nothing is open anywhere."""
        page = loopback.get(f"{self.url}/metrics", timeout=20).text
        return "tidegate_inflight_requests 0.0" in page and self.total("running") + self.total("waiting") == 0

    def doors(self) -> list[tuple[str, dict[str, str]]]:
        """URL and headers of each engine's own port."""
        found = self.engine.broadcast("record_replica_metadata").results(timeout_s=20)
        return [(f"http://{m['endpoint']}", {GATE_HEADER: m["gate"]}) for m in found]


def until(condition: Callable[[], Any], what: str, seconds: float = 60) -> Any:
    """Ask until the answer is true; a bound for tests that fail, not a claim about speed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if answer := condition():
            return answer
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s: {what}")


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


PORTS = tuple(
    f"RAY_SERVE_{name}_PORT"
    for name in ("HAPROXY_STATS", "HAPROXY_METRICS", "FALLBACK_PROXY_HTTP", "FALLBACK_PROXY_GRPC")
)
"""Ports of a cluster beside that of its front: each cluster has its own, whoever else runs one here."""


def gateways_of(app: str) -> list[str]:
    """URL of each gateway's own port, where HAProxy sends requests of ``app``."""
    controller = get_global_client()._controller
    groups = ray.get(controller.get_target_groups.remote(app_name=app, from_proxy_manager=True))
    return [
        f"http://127.0.0.1:{target.port}{group.route_prefix.rstrip('/')}"
        for group in groups
        if group.protocol == "HTTP"
        for target in group.targets
    ]


def start_cluster(port: int, env: dict[str, str]) -> None:
    """Ray and Serve in this process's name, ``env`` in all of its processes, HAProxy as `make serve` runs it."""
    env = {name: str(free_port()) for name in PORTS} | {"RAY_worker_niceness": "0"} | env
    stand_before(env, Path(tempfile.mkdtemp(prefix="tidegate-haproxy-")), tuple(int(env[name]) for name in PORTS[:2]))
    os.environ.update(env)
    start_ray(env)
    serve.start(http_options={"host": "127.0.0.1", "port": port})


def start_ray(env: dict[str, str], tries: int = 3) -> None:
    """Start Ray here; again where the machine was too busy for the 30 s that Ray gives its node to appear."""
    try:
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": str(ROOT), **env}},
        )
    except Exception as error:  # Ray raises this very class
        if tries == 1 or "timed out during startup" not in str(error):
            raise
        ray.shutdown()
        start_ray(env, tries - 1)


def stop_cluster(env: dict[str, str]) -> None:
    """End all of it."""
    if ray.is_initialized():  # else Serve would start a cluster to shut it down
        serve.shutdown()
        ray.shutdown()
    if script := os.environ.get(BINARY):
        shutil.rmtree(Path(script).parent)
    for name in (*env, *PORTS, BINARY, "RAY_worker_niceness"):
        os.environ.pop(name, None)


@contextmanager
def cluster_of_its_own(env: dict[str, str], deploy: Callable[[], object]) -> Iterator[str]:
    """A cluster for one test, its gateways without ``gateway.ENV``; ``deploy`` runs in it. The URL of its front."""
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gateway, "ENV", {})
        try:
            start_cluster(port, env)
            deploy()
            yield f"http://127.0.0.1:{port}"
        finally:
            stop_cluster(env)


def plan_of(url: str) -> dict[str, Any]:
    """The controller's plan; empty: it has none, or nobody answers."""
    answer = loopback.get(f"{url}/control/state", timeout=20)
    plan = answer.json().get("plan") if answer.status_code == 200 else None
    return plan or {}


@pytest.fixture(scope="package")
def system() -> Iterator[System]:
    port, collector = free_port(), Collector()
    try:
        start_cluster(port, ENV)
        args = ARGS | {"tracing": {"otlp_endpoint": collector.url, "sample_share": 0.0}}
        handle = serve.run(build(args), name=APP, route_prefix="/")
        engine = serve.get_deployment_handle("Engine", APP)
        running = System(f"http://127.0.0.1:{port}", handle, engine, collector)
        until(lambda: len(running.counters()) == 2 and direct(running.url), "two engines behind the gateway")
        yield running
    finally:
        stop_cluster(ENV)
        collector.close()


def direct(url: str) -> bool:
    """Healthy, and reached through HAProxy: at first its fallback, Serve's Python proxy, may answer."""
    try:
        answer = loopback.get(f"{url}/health", timeout=5)
    except httpx.HTTPError:
        return False
    return answer.status_code == 200 and len(answer.headers.get_list("x-request-id")) == 1


@pytest.fixture
def client(system: System) -> Iterator[httpx.Client]:
    with loopback.Client(base_url=system.url, timeout=60) as http:
        yield http


@pytest.fixture(autouse=True)
def calm(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test nothing is open anywhere, and no fault stays on."""
    yield
    if "system" in request.fixturenames:
        running: System = request.getfixturevalue("system")
        running.faults(kind="none", after_tokens=0, share=1.0, marker=None, die_marker=None, slow_factor=1.0)
        until(running.idle, "everything given back", 60)
