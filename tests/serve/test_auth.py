"""Keys on a running system, as `make serve` starts it: every route, every open port, and no key left lying about."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from deployments import run_state
from deployments.cluster import Ports
from deployments.endpoints import (
    MODEL_PREFIX,
    OPEN,
    OWN,
    RELAYED,
    TASK_OUTCOME_SUFFIX,
    TASK_PREFIX,
    Dialect,
    allowed_methods,
)
from deployments.keys import SCOPES
from deployments.launch import ROOT, RUN_FOLDER
from deployments.settings import ray_token
from tests.serve.gateway.conftest import free_port
from tests.serve.test_make_serve import begin, command, down, wait_for

pytestmark = [pytest.mark.serve, pytest.mark.timeout(300)]

MODEL = "smollm2-135m-instruct"
PORTS = Ports(*(free_port() for _ in fields(Ports)))
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
REGISTERED = (
    *RELAYED,
    *OWN,
    f"{MODEL_PREFIX}{MODEL}",
    f"{TASK_PREFIX}one",
    f"{TASK_PREFIX}one{TASK_OUTCOME_SUFFIX}",
)
UNREGISTERED = (
    "/", "//", "/docs", "/redoc", "/v1", "/v1/", "/v2/models", "/inference/v1/generate", "/invocations", "/ping",
    "/version", "/load", "/server_info", "/admin", "/control", "/control/", "/control/unknown",
    "/v1/tasks/", "/v1/tasks/a/b", "/v1/models/", "//v1/models", "/V1/models", "/v1/../metrics", "/%6detrics",
    "/metrics/", "/metrics//", "/health/",
    "/-/", "/-/unknown", "/-/healthz/", "/stats", "/tokenize?key=x", "/chat/completions", "/v1/audio/speech",
)  # fmt: skip
SERVES_OWN = {"/-/healthz": b"success", "/-/routes": b'{"/":"tidegate"}'}
"""What Serve answers by itself wherever it listens, without a key: that it lives, and the name of the application."""
BODY = {"model": MODEL, "prompt": "Hello", "max_tokens": 3}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
PROBED = ("/", "/metrics", "/stats", "/health", "/v1/models", "/control/state", "/nodes", "/api/serve/applications/")


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        return str(json.loads(self.body)["error"]["code"])


@dataclass(frozen=True)
class Running:
    """A system that needs keys."""

    config: Path
    log: Path
    keys: dict[str, str]
    """A key by its only scope; ``all`` has every scope."""

    def key(self, *words: str) -> dict[str, Any]:
        """Answer of a ``keys`` command."""
        done = subprocess.run(
            command("keys", *words, "--config", str(self.config), "--json"),
            cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        values: dict[str, Any] = json.loads(done.stdout)
        return values

    def members(self) -> list[psutil.Process]:
        state = run_state.load(RUN_FOLDER)
        assert state is not None
        return run_state.members(state)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("auth")
    content = yaml.safe_load((ROOT / "serve_config.yaml").read_text(encoding="utf-8"))
    content["http_options"]["port"] = PORTS.http
    args = content["applications"][0]["args"]
    for name in ("engine_args", "cpu"):
        args["model"].pop(name)
    args["model"] |= {"engine": "emulated", "num_cpus": 0.1}
    args["auth"] = {"keys_file": str(folder / "keys.jsonl")}
    config = folder / "serve_config.yaml"
    config.write_text(yaml.safe_dump(content), encoding="utf-8")
    system = Running(config, folder / "up.log", {})
    for name, scopes in {**{scope: (scope,) for scope in SCOPES}, "all": SCOPES}.items():
        words = [word for scope in scopes for word in ("--scope", scope)]
        system.keys[name] = system.key("create", "--tenant", "acme", *words)["key"]
    options = {
        "--dashboard-port": PORTS.dashboard, "--gcs-port": PORTS.gcs, "--haproxy-stats-port": PORTS.haproxy_stats,
        "--haproxy-metrics-port": PORTS.haproxy_metrics, "--fallback-port": PORTS.fallback_http,
        "--fallback-grpc-port": PORTS.fallback_grpc,
    }  # fmt: skip
    process = begin(config, system.log, *(str(word) for option in options.items() for word in option))
    try:
        wait_for(process, system.log, "To end it")
        yield system
    finally:
        down()
        process.wait(60)
        state = run_state.load(RUN_FOLDER)
        if state is not None:
            run_state.end_all(state, 5)
            run_state.forget(RUN_FOLDER, state)


def ask(
    method: str,
    path: str,
    headers: dict[str, str] | None = None,
    body: Any = None,
    port: int = PORTS.http,
    timeout_s: float = 20,
) -> Answer:
    """One request with its path as it is, on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    raw = None if body is None else json.dumps(body).encode()
    try:
        connection.request(method, path, raw, {"content-type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read(1_000_000))
    finally:
        connection.close()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def wrong(key: str) -> str:
    """The same key with its last digit changed."""
    return key[:-1] + ("0" if key[-1] != "0" else "1")


def until(status: int, headers: dict[str, str]) -> None:
    """A bound for a test that fails; the file is looked at once a second."""
    end = time.monotonic() + 20
    while (found := ask("GET", "/v1/models", headers).status) != status:
        assert time.monotonic() < end, found
        time.sleep(0.1)


# --- routes -----------------------------------------------------------------------------------------------------------


def test_no_route_answers_without_a_key(running: Running) -> None:
    """Case 24. Known or not, with any method: 401 before anything else is said. The page alone is told; it is empty."""
    found = {}
    for path in (*REGISTERED, *UNREGISTERED):
        for method in METHODS:
            answer = ask(method, path, body=BODY if method in {"POST", "PUT", "PATCH"} else None)
            if path in OPEN and method in {"GET", "HEAD"}:
                assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
                assert not any(told.encode() in answer.body for told in (MODEL, *running.keys.values()))
                continue
            if answer.status != 401 or not answer.headers.get("www-authenticate", "").startswith("Bearer"):
                found[method, path] = (answer.status, answer.body[:80])
            elif method != "HEAD":
                assert answer.code == "invalid_api_key", (method, path)
    assert found == {}


def test_no_route_answers_a_wrong_key(running: Running) -> None:
    right = running.keys["all"]
    key_id, secret = right.split("-")[1:]
    others = [
        wrong(right),
        right[:-1],
        right + "0",
        f"tg-{key_id}-",
        f"tg-000000000000-{secret}",
        secret,
        "none",
        "unused",
    ]
    for path in {*REGISTERED, *UNREGISTERED} - OPEN:
        method = (*allowed_methods(path), "GET")[0]
        for key in others:
            for headers in (bearer(key), {"x-api-key": key}):
                answer = ask(method, path, headers, BODY if method == "POST" else None)
                assert answer.status == 401, (method, path, key)
                assert key not in answer.body.decode() + str(answer.headers) or len(key) < 8


def test_every_registered_route_answers_the_right_key_by_both_headers(running: Running) -> None:
    bodies = {
        "/v1/chat/completions": CHAT, "/v1/completions": BODY, "/v1/messages": CHAT, "/v1/messages/count_tokens": CHAT,
        "/v1/responses": {"model": MODEL, "input": "Hello"}, "/v1/embeddings": {"model": MODEL, "input": "Hello"},
        "/tokenize": {"prompt": "Hello"}, "/detokenize": {"tokens": [1]},
    }  # fmt: skip
    assert bodies.keys() == RELAYED.keys()
    for path in REGISTERED:
        method = allowed_methods(path)[0]
        for headers in (bearer(running.keys["all"]), {"x-api-key": running.keys["all"]}):
            status = ask(method, path, headers, bodies.get(path, {}) if method == "POST" else None).status
            assert status not in {401, 403}, path
            assert status < 500, path
            assert status == 200 or path in RELAYED or path.startswith(TASK_PREFIX), (path, status)
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/tokenize"):
        assert ask("POST", path, bearer(running.keys["all"]), bodies[path]).status == 200


def test_unknown_routes_are_404_for_a_right_key_only(running: Running) -> None:
    for path in ("/", "/docs", "/admin", "/inference/v1/generate", "/v2/models"):
        answer = ask("GET", path, bearer(running.keys["all"]))
        assert (answer.status, answer.code) == (404, "unknown_url")


@pytest.mark.parametrize("form", ["Bearer {}", "bearer {}", "BEARER {}", "bEARER {}", "Bearer    {}", "Bearer {}  "])
def test_bearer_in_every_spelling_of_the_standard(running: Running, form: str) -> None:
    assert ask("GET", "/v1/models", {"authorization": form.format(running.keys["all"])}).status == 200


@pytest.mark.parametrize(
    "form", ["{}", "Bearer{}", "Bearer:{}", "Token {}", "Basic {}", "Bearer {} x", "Bearer,{}", "'{}'"]
)
def test_other_spellings_are_refused(running: Running, form: str) -> None:
    assert ask("GET", "/v1/models", {"authorization": form.format(running.keys["all"])}).status == 401


def test_a_key_in_a_query_a_cookie_or_a_body_is_no_key(running: Running) -> None:
    key = running.keys["all"]
    for name in ("key", "api_key", "api-key", "access_token", "token"):
        assert ask("GET", f"/v1/models?{name}={key}").status == 401
        assert ask("GET", "/v1/models", {"cookie": f"{name}={key}"}).status == 401
        assert ask("POST", "/v1/completions", body={**BODY, name: key}).status == 401


def test_each_scope_opens_its_own_routes_and_no_others(running: Running) -> None:
    needs = {
        "inference": ("/v1/models", f"{MODEL_PREFIX}{MODEL}"), "metrics": ("/metrics", "/control/metrics"),
        "control:read": ("/control/state", "/control/decisions", "/control/tenants"), "control:write": (),
    }  # fmt: skip
    for scope in SCOPES:
        headers = bearer(running.keys[scope])
        assert ask("GET", "/health", headers).status == 200
        for other, paths in needs.items():
            for path in paths:
                answer = ask("GET", path, headers)
                assert answer.status == (200 if other == scope else 403), (scope, path)
                assert other == scope or answer.code == "insufficient_scope"
        for path in RELAYED:
            if scope != "inference":
                assert ask("POST", path, headers, BODY).status == 403, (scope, path)


def test_errors_have_the_shape_of_the_routes_clients(running: Running) -> None:
    for path, endpoint in RELAYED.items():
        error = json.loads(ask("POST", path, body=BODY).body)
        assert error["error"]["type"] == "authentication_error"
        assert (error.get("type") == "error") == (endpoint.dialect is Dialect.ANTHROPIC)


def test_a_body_without_a_key_is_not_read(running: Running) -> None:
    """Eight megabytes are announced and never sent: the answer comes at once, and the connection ends."""
    connection = http.client.HTTPConnection("127.0.0.1", PORTS.http, timeout=20)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("content-length", "8000000")
    connection.endheaders()
    assert connection.getresponse().status == 401
    connection.close()


# --- keys change ------------------------------------------------------------------------------------------------------


def replicas(running: Running) -> set[int]:
    return {process.pid for process in running.members() if "ServeReplica" in " ".join(process.cmdline())}


def test_a_key_works_from_its_creation_to_its_revocation_without_a_restart(running: Running) -> None:
    before = replicas(running)
    made = running.key("create", "--tenant", "beta")
    until(200, bearer(made["key"]))
    rotated = running.key("rotate", made["id"], "--grace-hours", "1")
    until(200, bearer(rotated["key"]))
    assert ask("GET", "/v1/models", bearer(made["key"])).status == 200
    for key_id in (made["id"], rotated["id"]):
        running.key("revoke", key_id)
    for key in (made["key"], rotated["key"]):
        until(401, bearer(key))
    assert "revoked" in ask("GET", "/v1/models", bearer(made["key"])).body.decode()
    assert ask("GET", "/v1/models", bearer(running.keys["all"])).status == 200
    assert replicas(running) == before


def test_a_file_that_breaks_locks_nobody_out(running: Running) -> None:
    path = Path(yaml.safe_load(running.config.read_text())["applications"][0]["args"]["auth"]["keys_file"])
    good = path.read_text()
    failures = 'tidegate_auth_key_reloads_total{result="failed"}'
    try:
        path.write_text("{")
        end = time.monotonic() + 20
        while failures not in ask("GET", "/metrics", bearer(running.keys["metrics"])).body.decode():
            assert time.monotonic() < end
            time.sleep(0.1)
        assert ask("GET", "/v1/models", bearer(running.keys["all"])).status == 200
        assert ask("GET", "/v1/models").status == 401
    finally:
        path.write_text(good)


# --- ports ------------------------------------------------------------------------------------------------------------


def listeners(processes: Iterable[psutil.Process]) -> dict[tuple[str, int], str]:
    """Address and port -> command of whom listens there."""
    found = {}
    for process in processes:
        for connection in process.net_connections(kind="inet"):
            if connection.status == psutil.CONN_LISTEN:
                found[connection.laddr.ip, connection.laddr.port] = " ".join(process.cmdline()).strip()
    return found


def test_what_is_open_to_other_hosts_is_rays_own_and_wants_rays_token(running: Running) -> None:
    open_to_all = {
        port: who
        for (ip, port), who in listeners(running.members()).items()
        if not ip.removeprefix("::ffff:").startswith("127.")
    }
    ours = {PORTS.http, PORTS.haproxy_stats, PORTS.haproxy_metrics, PORTS.fallback_http, PORTS.dashboard}
    assert ours & open_to_all.keys() == set()
    assert [who for who in open_to_all.values() if "haproxy" in who] == []
    answered = {port: grpc_answers(port) for port in open_to_all}
    assert {port: found for port, found in answered.items() if "OK" in found} == {}
    for kind in ("gcs_server", "raylet", "ServeReplica:tidegate:Gateway", "ServeReplica:tidegate:Engine"):
        ports = [port for port, who in open_to_all.items() if kind in who]
        assert ports
        assert any("UNAUTHENTICATED" in answered[port] for port in ports), (kind, answered)


def grpc_answers(port: int) -> set[str]:
    """What a caller without Ray's token is told: by Serve between its deployments, and by Ray."""
    import grpc  # type: ignore[import-untyped]

    found = set()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for method in (
            "ray.serve.ASGIService/HandleRequest", "ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
            "ray.rpc.NodeManagerService/GetNodeStats", "ray.rpc.CoreWorkerService/GetCoreWorkerStats",
        ):  # fmt: skip
            try:
                channel.unary_unary(f"/{method}")(b"", timeout=5)
                found.add("OK")
            except grpc.RpcError as error:
                found.add(error.code().name)
    return found


def test_no_port_answers_http_without_a_key_but_what_serve_and_ray_tell_of_themselves(running: Running) -> None:
    told: dict[int, set[str]] = {PORTS.haproxy_stats: {"/stats"}}
    found: dict[tuple[int, str], str] = {}
    for (_, port), who in listeners(running.members()).items():
        for path in (*PROBED, *SERVES_OWN, *RELAYED):
            try:
                method, body = ("POST", BODY) if path in RELAYED else ("GET", None)
                answer = ask(method, path, body=body, port=port, timeout_s=5)
            except (OSError, http.client.HTTPException):
                break  # no HTTP is spoken here
            if answer.status >= 400 or path in told.get(port, set()):
                continue
            if answer.body.replace(b" ", b"") == SERVES_OWN.get(path):
                continue
            if path == "/metrics" and "tidegate_" not in answer.body.decode():
                continue  # Ray's and HAProxy's own figures, on loopback
            if not is_ray_page(who, answer.body):
                found[port, path] = f"{answer.status} {who} {answer.body[:80]!r}"
    assert found == {}


RAYS_DASHBOARD = re.compile(
    r"ray::DashboardAgent|/ray/(dashboard/(dashboard|agent)|autoscaler/_private/monitor)\.py( |$)"
)
"""Command lines of dashboard and autoscaler, and of the agent, which gives itself a name some time after its start."""


def is_ray_page(who: str, body: bytes) -> bool:
    """The dashboard's page is a page: what it shows comes from paths that want Ray's token.

    Ray's exporters tell whoever asks figures of its processes, on any path: README, "API keys".
    """
    text = body.decode(errors="replace")
    return bool(RAYS_DASHBOARD.search(who)) and (is_rays_metrics(text) or text.lower().startswith("<!doctype html>"))


def is_rays_metrics(text: str) -> bool:
    """Prometheus text with nothing in it but what Ray, its Python runtime and OpenTelemetry (``target_info``) count."""
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")]
    return bool(names) and all(
        name.startswith(("ray_", "autoscaler_", "python_", "process_", "target")) for name in names
    )


@pytest.mark.parametrize(
    ("who", "body", "rays"),
    [
        (
            "python -u /x/ray/dashboard/dashboard.py --host=127.0.0.1",
            b"# HELP ray_a b\n# TYPE ray_a gauge\nray_a 1",
            True,
        ),
        ("/x/python /x/ray/dashboard/agent.py", b"# TYPE ray_a gauge\nray_a 1\n# TYPE process_b gauge", True),
        ("ray::DashboardAgent", b"# TYPE ray_a gauge\nray_a 1\n# TYPE tidegate_b gauge", False),
        ("ray::DashboardAgent", b"# TYPE python_gc_a counter\n# TYPE target_info gauge\n# TYPE ray_a gauge", True),
        ("python -u /x/ray/autoscaler/_private/monitor.py --logs", b"# TYPE autoscaler_a gauge", True),
        ("ray::DashboardAgent", b"", False),
        ("ray::DashboardAgent", b'{"keys": []}', False),
        ("python -u /x/ray/dashboard/dashboard.py", b"<!DOCTYPE html><title>Ray", True),
        ("ray::ServeReplica:tidegate:Gateway", b"# TYPE ray_a gauge\nray_a 1", False),
        ("/x/ray/dashboard/dashboard.python", b"<!doctype html>", False),
    ],
)
def test_what_counts_as_rays_own_page(who: str, body: bytes, rays: bool) -> None:
    assert is_ray_page(who, body) is rays


def test_no_port_takes_a_websocket(running: Running) -> None:
    upgrade = {
        "connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
    }  # fmt: skip
    for port in (PORTS.http, PORTS.fallback_http):
        for headers in ({}, bearer(running.keys["all"])):
            assert ask("GET", "/v1/realtime", {**upgrade, **headers}, port=port).status >= 400


# --- secrets ----------------------------------------------------------------------------------------------------------


def test_no_key_is_left_in_logs_processes_metrics_states_or_errors(running: Running) -> None:
    state = run_state.load(RUN_FOLDER)
    assert state is not None
    right, marker = running.keys["all"], "tg-0123456789ab-" + "c0ffee" * 10 + "beef"
    secrets = [key.split("-")[2] for key in (*running.keys.values(), marker)]
    texts: dict[str, bytes] = {"make serve": running.log.read_bytes()}
    for headers in (bearer(right), bearer(marker), {"x-api-key": marker}, {**bearer(right), "x-api-key": marker}):
        for page in ("/v1/chat/completions", "/v1/completions", "/nowhere", "/metrics"):
            method = "GET" if page == "/metrics" else "POST"
            texts[f"{method} {page} {len(texts)}"] = ask(method, page, headers, CHAT).body
    for page in ("/metrics", "/control/state", "/control/decisions", "/control/tenants", "/openapi.json"):
        texts[page] = ask("GET", page, bearer(right)).body
    for port in (PORTS.haproxy_metrics, PORTS.haproxy_stats):
        texts[f"HAProxy {port}"] = ask("GET", "/metrics", port=port).body + ask("GET", "/stats", port=port).body
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORTS.dashboard}/api/serve/applications/", headers=bearer(ray_token())
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        texts["Serve's status"] = answer.read()
    for process in [*running.members(), *psutil.process_iter()]:
        for name in ("cmdline", "environ"):
            try:
                texts[f"{name} of {process.pid}"] = Path(f"/proc/{process.pid}/{name}").read_bytes()
            except OSError:
                continue
    time.sleep(1.0)  # logs are written behind the requests
    files = [p for folder in (Path(state.temp_dir), RUN_FOLDER) for p in folder.rglob("*") if p.is_file()]
    for path in files:
        with contextlib.suppress(OSError):
            texts[str(path)] = path.read_bytes()
    assert len(files) > 20
    leaks = [where for where, text in texts.items() if any(secret.encode() in text for secret in secrets)]
    assert leaks == []
    labels = texts["/metrics"].decode()
    for key in (*running.keys.values(), marker):
        assert key.split("-")[1] not in labels, "not even ids are labels"
