"""One Ray head with Serve and HAProxy on this machine: its environment, its start, its REST interface.

Talks to Serve over the documented REST interface of Ray's dashboard, so the supervising process need not load Ray.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.haproxy import stand_before
from deployments.preflight import OBJECT_STORE_BYTES, Port
from deployments.run_state import RUN_VARIABLE, RunState
from deployments.settings import Settings, child_environment, ray_token, ray_token_file
from deployments.settings_models import drain_s_max

HAPROXY_CONNECTIONS_MAX = 4_096
HAPROXY_RETRIES_MAX = 1
"""Another gateway is tried once, and only where no connection came about: nothing was sent yet. Every other retry is
the gateway's, out of its budget."""
MARGIN_S = 60
"""HAProxy waits this much longer than the gateway, so that the gateway's own error is what a client sees: for an answer
longer than a request may take, for a client longer than one may be idle. While a client waits for an answer, its own
time-out does not run."""
SERVE_ENVIRONMENT = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_DEPLOYMENT_ACTOR_HEALTH_CHECK_PERIOD_S": "2",  # a dead controller is noticed within this time
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # a busy machine may need longer than the 5 s of the default
    "RAY_worker_niceness": "0",  # Ray's default is 15: any other program on the machine would starve the engines
}
"""What Tidegate wants of any cluster it runs on, wherever its ports and files are."""
_ANSWER_BYTES_MAX = 20_000_000


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports of one Ray head with HAProxy. HTTP comes from serve_config.yaml."""

    http: int = 8_000
    dashboard: int = 8_265
    gcs: int = 6_379
    haproxy_stats: int = 8_404
    haproxy_metrics: int = 9_101
    fallback_http: int = 8_500
    fallback_grpc: int = 9_500

    def listed(self) -> tuple[Port, ...]:
        """Return each port with its purpose and how to choose another."""
        return (
            Port(self.http, "Tidegate's HTTP", "set http_options.port in serve_config.yaml"),
            Port(self.dashboard, "Ray's dashboard", _option("--dashboard-port", self.dashboard)),
            Port(self.gcs, "Ray's control store", _option("--gcs-port", self.gcs)),
            Port(self.haproxy_stats, "HAProxy's statistics", _option("--haproxy-stats-port", self.haproxy_stats)),
            Port(self.haproxy_metrics, "HAProxy's metrics", _option("--haproxy-metrics-port", self.haproxy_metrics)),
            Port(self.fallback_http, "Serve's fallback proxy", _option("--fallback-port", self.fallback_http)),
            Port(self.fallback_grpc, "Serve's fallback proxy", _option("--fallback-grpc-port", self.fallback_grpc)),
        )


def _option(name: str, number: int) -> str:
    return f"choose another: make serve ARGS='{name} {number + 1}'"


def cluster_environment(settings: Settings, ports: Ports, temp_dir: str, run_id: str) -> dict[str, str]:
    """Return what the Ray head and everything below it must have in its environment.

    HAProxy's time-outs and retries are set here and not left to Ray's defaults: its retries would come on top of the
    gateway's budget, and its hard stop (120 s by default) would cut streams that outlive a reload. Its files lie
    directly in ``temp_dir``: Ray adds a folder named after the node (56 characters), HAProxy's socket paths end at 97.
    """
    gateway, drain_s = settings.gateway, int(drain_s_max(settings))
    silence_s = int(gateway.total_timeout_ms / 1000) + MARGIN_S
    client_s = int(max(gateway.client_idle_timeout_ms, gateway.body_timeout_ms) / 1000) + MARGIN_S
    haproxy = {
        "MAXCONN": HAPROXY_CONNECTIONS_MAX,
        "NBTHREAD": max(1, min(4, len(os.sched_getaffinity(0)))),
        "RETRY_ON": "conn-failure",
        "RETRIES": HAPROXY_RETRIES_MAX,
        "INGRESS_RETRY_ON": "conn-failure",
        "INGRESS_RETRIES": HAPROXY_RETRIES_MAX,
        "TIMEOUT_CONNECT_S": 5,
        "TIMEOUT_SERVER_S": silence_s,
        "INGRESS_TIMEOUT_SERVER_S": silence_s,
        "TIMEOUT_CLIENT_S": client_s,
        "HARD_STOP_AFTER_S": drain_s + MARGIN_S,
        "STATS_PORT": ports.haproxy_stats,
        "METRICS_PORT": ports.haproxy_metrics,
        "CONFIG_FILE_LOC": f"{temp_dir}/haproxy.cfg",
        "SOCKET_PATH": f"{temp_dir}/admin.sock",
        "METRICS_SOCKET_PATH": f"{temp_dir}/metrics.sock",
        "SERVER_STATE_BASE": temp_dir,
        "SERVER_STATE_FILE": f"{temp_dir}/server-state",
    }
    return {
        RUN_VARIABLE: run_id,
        **SERVE_ENVIRONMENT,
        "TMPDIR": temp_dir,  # sockets and scratch files of engines go with the run
        "RAY_AUTH_MODE": "token",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # there is no other node to drain to
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports.fallback_http),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(ports.fallback_grpc),
        **{f"RAY_SERVE_HAPROXY_{name}": str(value) for name, value in haproxy.items()},
    }


def start_ray(root: Path, log: Path, state: RunState, settings: Settings, ports: Ports) -> subprocess.Popen[bytes]:
    """Start a Ray head that lives as long as the returned process, in a session of its own.

    ``root`` is its working directory: Ray puts it on the import path of every worker, so ``deployments.app`` is found.
    """
    ray_token_file()
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
        *(
            "--port",
            str(ports.gcs),
            "--include-dashboard",
            "true",
            "--dashboard-host",
            "127.0.0.1",
            "--dashboard-port",
            str(ports.dashboard),
        ),
        *("--dashboard-agent-listen-port", "0", "--ray-client-server-port", str(_free_port())),
        *("--object-store-memory", str(OBJECT_STORE_BYTES), "--temp-dir", state.temp_dir, "--log-color", "false"),
    ]
    environment = child_environment(cluster_environment(settings, ports, state.temp_dir, state.run_id))
    stand_before(environment, Path(state.temp_dir), (ports.haproxy_stats, ports.haproxy_metrics))
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class NotReadyError(RuntimeError):
    """The REST interface did not answer; it may be starting."""


class RefusedError(RuntimeError):
    """The REST interface answered with an error; the message says which."""


class ServeApi:
    """Serve's REST interface on the dashboard's port."""

    def __init__(self, dashboard_port: int) -> None:
        self._url = f"http://127.0.0.1:{dashboard_port}/api/serve/applications/"

    def deploy(self, config: Mapping[str, Any]) -> None:
        """Hand over the configuration; Serve builds and starts it in the background."""
        self._call("PUT", config, timeout_s=60.0)

    def details(self) -> dict[str, Any]:
        """Return the state of all applications, deployments and replicas."""
        answer = self._call("GET", None, timeout_s=10.0)
        return answer if isinstance(answer, dict) else {}

    def shut_down(self, timeout_s: float) -> None:
        """Remove all applications and end Serve, best effort."""
        with contextlib.suppress(NotReadyError, RefusedError):
            self._call("DELETE", None, timeout_s=timeout_s)

    def _call(self, method: str, body: Mapping[str, Any] | None, timeout_s: float) -> object:
        data = None if body is None else json.dumps(body, default=str).encode()
        headers = {"content-type": "application/json", "authorization": f"Bearer {ray_token()}"}
        request = urllib.request.Request(self._url, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                text = answer.read(_ANSWER_BYTES_MAX)
        except urllib.error.HTTPError as error:
            words = error.read(_ANSWER_BYTES_MAX).decode(errors="replace").strip()
            raise (NotReadyError if error.code >= 500 else RefusedError)(f"HTTP {error.code}: {words}") from None
        except OSError as error:
            raise NotReadyError(str(error)) from None
        try:
            return json.loads(text) if text else None
        except ValueError:
            return None
