"""The ASGI application before any route: without a key nothing is read, and nothing told but 401."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

import pytest

from deployments.auth import Authenticator
from deployments.clients import ClientRule
from deployments.core import GatewayCore
from deployments.endpoints import MODEL_PREFIX, OPEN, OWN, RELAYED, TASK_OUTCOME_SUFFIX, TASK_PREFIX, allowed_methods
from deployments.http_front import HttpFront
from deployments.keys import SCOPES, new_key, values_of
from deployments.meter import Meter
from deployments.own_answers import OwnAnswers
from deployments.recent_requests import RecentRequests
from deployments.request_log import RequestLog
from deployments.served import Served
from deployments.settings import Settings

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "brew")
REGISTERED = (*RELAYED, *OWN, f"{MODEL_PREFIX}x", f"{TASK_PREFIX}x", f"{TASK_PREFIX}x{TASK_OUTCOME_SUFFIX}")
UNREGISTERED = (
    "/", "", "//", "/docs", "/v1", "/v1/", "/v2/models", "/inference/v1/generate", "/invocations", "/admin", "/control",
    "/control/", "/control/unknown", "/metrics/", "/metrics//", "/health/", "//v1/models", "/V1/models",
    "/v1/../metrics", "/v1/models/", "/v1/tasks/", "/v1/tasks/x/y", "/-/routes", "*", "x", "/\x00", "/\ud800",
)  # fmt: skip
MADE = {scope: new_key("acme", [scope], 0) for scope in SCOPES}


@pytest.fixture
async def front() -> HttpFront:
    """The real one; of its core only what a request without a key may touch."""
    settings = Settings.load({"auth": {"keys": [values_of(record) for _, record in MADE.values()]}})
    core = GatewayCore.__new__(GatewayCore)
    core.settings, core.meter, core._loop = settings, Meter("gateway", "model"), asyncio.get_running_loop()
    core.log, core.recent = RequestLog(), RecentRequests("gateway")
    own = OwnAnswers.__new__(OwnAnswers)
    return HttpFront(Served([core]), ClientRule("any", ""), Authenticator(settings.auth), own)


async def ask(
    front: HttpFront, method: str, path: str, *headers: tuple[bytes, bytes]
) -> tuple[int, dict[bytes, bytes], Any]:
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("the body was asked for")

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": [(b"content-length", b"9"), *headers]}
    await front(scope, receive, send)
    return sent[0]["status"], dict(sent[0]["headers"]), json.loads(sent[1]["body"])["error"]


def bearer(key: str) -> tuple[bytes, bytes]:
    return b"authorization", f"Bearer {key}".encode()


async def test_whatever_is_asked_without_a_key_is_401_and_no_body_is_read(front: HttpFront) -> None:
    for path in (*REGISTERED, *UNREGISTERED):
        for method in METHODS:
            if path in OPEN and method in {"GET", "HEAD"}:
                continue  # the page, which holds nothing: test_dashboard_page.py
            for headers in ((), (bearer("tg-nobody-x"),), ((b"x-api-key", b"x"),)):
                status, head, error = await ask(front, method, path, *headers)
                assert (status, error["code"]) == (401, "invalid_api_key"), (method, path)
                assert head[b"www-authenticate"].startswith(b"Bearer")
                assert head[b"connection"] == b"close"
                assert path not in error["message"] or len(path) < 2


async def test_without_the_scope_a_registered_path_is_403_and_no_body_is_read(front: HttpFront) -> None:
    for path in set(REGISTERED) - OPEN - {"/health", "/openapi.json"}:
        method = allowed_methods(path)[0]
        status, _, error = await ask(front, method, path, bearer(MADE["control:write"][0]))
        assert (status, error["code"]) == (403, "insufficient_scope"), path


async def test_with_a_key_what_is_not_there_is_told(front: HttpFront) -> None:
    key = bearer(MADE["inference"][0])
    assert [(await ask(front, "GET", path, key))[0] for path in ("/", "/docs", "/v1/tasks/x/y")] == [404] * 3
    assert (await ask(front, "PUT", "/v1/completions", key))[0] == 405


async def test_a_client_that_is_not_answered_does_not_learn_whether_its_key_is_right(front: HttpFront) -> None:
    front._rule = ClientRule("loopback", "0.0.0.0")
    for headers in ((), (bearer(MADE["inference"][0]),)):
        assert (await ask(front, "GET", "/v1/models", *headers))[2]["code"] == "client_not_allowed"
