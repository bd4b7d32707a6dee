"""The same gateway behind Serve's Python proxy, without HAProxy and without a loop of its own."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from ray import serve

from deployments import gateway
from deployments.app import build
from tests import loopback
from tests.serve.gateway.conftest import ARGS, MODEL, System, free_port, start_cluster, stop_cluster, until
from tests.serve.gateway.test_gateway_clients_leave import LONG, message

pytestmark = [pytest.mark.serve, pytest.mark.timeout(180)]

APP = "proxy-test"
ENV = {"RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gateway, "ENV", {})
        try:
            start_cluster(port, ENV)
            handle = serve.run(build(ARGS), name=APP, route_prefix="/below")
            running = System(f"http://127.0.0.1:{port}/below", handle, serve.get_deployment_handle("Engine", APP))
            until(lambda: loopback.get(f"{running.url}/health").status_code == 200, "a ready replica")
            yield running
        finally:
            stop_cluster(ENV)


def test_answers_streams_and_errors(system: System) -> None:
    with loopback.Client(base_url=system.url, timeout=30) as client:
        answer = client.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 200
        assert answer.json()["id"] == f"chatcmpl-{answer.headers.get_list('x-request-id')[0]}"
        stream = client.post("/v1/chat/completions", json=CHAT | {"stream": True})
        assert stream.text.endswith("data: [DONE]\n\n")
        assert (
            client.post("/v1/chat/completions", json=CHAT | {"model": "x"}).json()["error"]["code"] == "model_not_found"
        )
        assert client.post("/v1/chat/completions", content=b"x" * 100_001).status_code == 413
        assert client.get("/v1/models", headers={"host": "evil.example"}).status_code == 403
        assert client.get("/nothing").json()["error"]["code"] == "unknown_url"
        assert client.get("/control/state").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_the_engine(system: System, stream: bool) -> None:
    host, port = system.url.removeprefix("http://").removesuffix("/below").split(":")
    with socket.create_connection((host, int(port)), 10) as sock:
        sock.sendall(message(LONG | {"stream": stream}, "/below/v1/chat/completions"))
        until(lambda: system.total("running") == 1, "a running request", 20)
    until(lambda: system.total("running") == 0, "the engine's abort", 10)


def test_the_handle_works_too(system: System) -> None:
    assert system.handle.chat.remote(CHAT).result(timeout_s=30)["object"] == "chat.completion"
    assert list(system.handle.options(stream=True).chat.remote(CHAT | {"stream": True}))
