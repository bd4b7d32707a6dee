"""A node that leaves (`deployments.hosting.leave`) takes no stream and no request with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

from deployments.app import build
from deployments.haproxy import BINARY, stand_before
from deployments.hosting.leave import RayNode, nodes_here, replicas_of
from tests import loopback
from tests.serve.gateway import conftest as gateway
from tests.serve.gateway.conftest import MODEL, PORTS, ROOT, free_port, until

pytestmark = [pytest.mark.serve, pytest.mark.timeout(300)]

APP = "leave-test"
ARGS: dict[str, Any] = gateway.ARGS | {
    "control": {"mode": "shadow"},
    "scaling": {"replicas_min": 3, "replicas_max": 3},
}
NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 100_000_000, "include_dashboard": False}


@dataclass
class Load:
    """Streams and short requests without a pause; what became of each."""

    url: str
    over: threading.Event = field(default_factory=threading.Event)
    ended: list[str] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Self:
        for body in [{"max_tokens": 300, "stream": True}] * 4 + [{"max_tokens": 20}] * 2:
            whole = {"model": MODEL, "prompt": "on and on", "ignore_eos": True, "temperature": 0} | body
            self.threads.append(threading.Thread(target=self._ask, args=(whole,)))
            self.threads[-1].start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join()

    def _ask(self, body: dict[str, Any]) -> None:
        while not self.over.is_set():
            try:
                answer = loopback.post(f"{self.url}/v1/completions", json=body, timeout=60)
                whole = not body.get("stream") or answer.text.count("data: ") > 300
                good = answer.status_code == 200 and whole and '"error"' not in answer.text
                self.ended.append("good" if good else f"{answer.status_code}: {answer.text[-200:]}")
            except httpx.HTTPError as error:
                self.ended.append(repr(error))


@pytest.fixture
def system() -> Iterator[tuple[str, Cluster]]:
    port, script = free_port(), Path(tempfile.mkdtemp(prefix="tidegate-haproxy-"))
    env = {name: str(free_port()) for name in PORTS} | {"RAY_worker_niceness": "0"} | gateway.ENV
    stand_before(env, script, tuple(int(env[name]) for name in PORTS[:2]))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        cluster = None
        try:
            cluster = Cluster(initialize_head=True, head_node_args=NODE)
            for _ in range(2):
                cluster.add_node(**{k: v for k, v in NODE.items() if k != "include_dashboard"})
            variables = {"PYTHONPATH": str(ROOT), **env}
            ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": variables})
            serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
            serve.run(build(ARGS), name=APP, route_prefix="/")
            url = f"http://127.0.0.1:{port}"
            until(lambda: gateway.direct(url), "answers through HAProxy")
            yield url, cluster
        finally:
            if ray.is_initialized():
                serve.shutdown()
                ray.shutdown()
            if cluster is not None:
                cluster.shutdown()
            shutil.rmtree(script)
            os.environ.pop(BINARY, None)


def here(cluster: Cluster) -> dict[str, list[str]]:
    """Replicas by node."""
    nodes = {node.node_id for node in cluster.list_all_nodes()}
    return {node.node_id: replicas_of(node) for node in nodes_here() if node.node_id in nodes}


def test_a_node_that_leaves_cuts_no_stream_and_refuses_nobody(system: tuple[str, Cluster]) -> None:
    url, cluster = system
    found = here(cluster)
    del found[cluster.head_node.node_id]
    leaving = max(found, key=lambda node: len(found[node]))
    assert found[leaving], "Serve spreads replicas over nodes"
    with Load(url) as load:
        until(lambda: len(load.ended) > 10, "load")
        command = [sys.executable, "-m", "deployments.hosting.leave", "--within-s", "120", "--node-id", leaving]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        assert (done.returncode, done.stdout.strip()) == (0, "no replica is left on this node"), done.stderr
        assert here(cluster).get(leaving, []) == [], "a drained node without work ends by itself"
        assert sum(map(len, here(cluster).values())) == 4, "three engines and a gateway, elsewhere"
        (node,) = (node for node in cluster.worker_nodes if node.node_id == leaving)
        cluster.remove_node(node)
        before = len(load.ended)
        until(lambda: len(load.ended) > before + 10, "load goes on")
    assert set(load.ended) == {"good"}


def test_without_a_ray_node_there_is_nothing_to_move_and_an_unknown_one_is_no_error() -> None:
    command = [sys.executable, "-m", "deployments.hosting.leave", "--node-id", "0" * 56]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout.strip()) == (0, "no Ray node runs here: nothing to move")


def test_a_raylet_that_ended_holds_no_replicas() -> None:
    assert replicas_of(RayNode(2**22 + 1, "gone", "")) == []
