"""Tasks against the live gateway, as agents use them: openai's client, headers, budgets, outcomes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import httpx
import openai
import pytest
from ray import serve

from deployments.app import build
from deployments.control_api import BODY_BYTES_MAX
from tests import loopback
from tests.serve.gateway.conftest import ARGS, MODEL, System, direct, gateways_of, until

pytestmark = [pytest.mark.serve, pytest.mark.timeout(180)]

USER: Any = [{"role": "user", "content": "Name a river."}]
CHAT = {"model": MODEL, "messages": USER, "max_tokens": 5}


def new_task() -> str:
    return f"task-{uuid4()}"


def headers_of(task: str, **limits: object) -> dict[str, str]:
    named = {f"x-tidegate-task-{name.replace('_', '-')}": str(value) for name, value in limits.items()}
    return {"x-tidegate-task": task, **named}


def ask(client: httpx.Client, task: str, **limits: object) -> httpx.Response:
    return client.post("/v1/chat/completions", json=CHAT, headers=headers_of(task, **limits))


def shown(client: httpx.Client, task: str) -> Any:
    answer = client.get(f"/v1/tasks/{task}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def settled(client: httpx.Client, task: str) -> Any:
    """The task once no call is open: a client may have its answer a moment before the gateway wrote it off."""
    until(lambda: shown(client, task)["calls"]["open"] == 0, "no call is open", 60)
    return shown(client, task)


def metric(client: httpx.Client, series: str) -> float:
    found = re.search(rf"^{re.escape(series)} (\S+)$", client.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_calls_of_one_task_add_up_until_the_last_one_says_how_it_ended(system: System, client: httpx.Client) -> None:
    task, tokens = new_task(), 0
    ended = metric(client, 'tidegate_tasks_total{ending="success"}')
    with openai.OpenAI(base_url=f"{system.url}/v1", api_key="unused") as sdk:
        for i in range(3):
            last = {"x-tidegate-task-outcome": "success"} if i == 2 else {}
            answer = sdk.chat.completions.create(
                model=MODEL, messages=USER, max_tokens=5, extra_headers=headers_of(task, calls_max=9) | last
            )
            assert answer.usage is not None
            tokens += answer.usage.total_tokens
    seen = settled(client, task)
    assert seen["calls"] == {"total": 3, "open": 0, "succeeded": 3, "failed": 0}
    assert (seen["status"], seen["tokens"], seen["limits"]["calls_max"]) == ("success", tokens, 9)
    assert seen["busy_ms"] <= seen["e2e_ms"] <= seen["age_ms"]
    assert metric(client, 'tidegate_tasks_total{ending="success"}') == ended + 1


def test_a_runaway_task_is_stopped_and_openais_client_does_not_try_again(system: System, client: httpx.Client) -> None:
    series = 'tidegate_requests_total{endpoint="/v1/chat/completions",outcome="refused",reason="task_calls"}'
    before = metric(client, series)
    headers = headers_of(new_task(), calls_max=2)
    with openai.OpenAI(base_url=f"{system.url}/v1", api_key="unused", max_retries=3) as sdk:
        for _ in range(2):
            sdk.chat.completions.create(model=MODEL, messages=USER, max_tokens=5, extra_headers=headers)
        with pytest.raises(openai.RateLimitError) as refused:
            sdk.chat.completions.create(model=MODEL, messages=USER, max_tokens=5, extra_headers=headers)
    assert (refused.value.code, refused.value.type) == ("task_calls", "insufficient_quota")
    assert "retry-after" not in refused.value.response.headers
    assert metric(client, series) == before + 1


def test_calls_side_by_side_do_not_overrun_a_token_budget(client: httpx.Client) -> None:
    task = new_task()
    body = {"model": MODEL, "prompt": list(range(100, 150)), "max_tokens": 50, "temperature": 0}
    headers = headers_of(task, tokens_max=600)
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: client.post("/v1/completions", json=body, headers=headers), range(20)))
    refused = [answer.json()["error"]["code"] for answer in answers if answer.status_code != 200]
    assert set(refused) == {"task_tokens"}
    seen = settled(client, task)
    assert seen["tokens"] <= 600
    assert seen["calls"] == {"total": 20 - len(refused), "open": 0, "succeeded": 20 - len(refused), "failed": 0}
    assert seen["stopped"]


def test_a_task_named_in_the_body_is_ended_by_whoever_knows(client: httpx.Client) -> None:
    task = new_task()
    answer = client.post("/v1/chat/completions", json=CHAT | {"metadata": {"task_id": task}})
    assert answer.status_code == 200
    path = f"/v1/tasks/{task}/outcome"
    for _ in range(2):
        told = client.post(path, json={"outcome": "failure"})
        assert (told.status_code, told.json()["status"]) == (200, "failure")
    changed = client.post(path, json={"outcome": "success"})
    assert (changed.status_code, changed.json()["error"]["code"]) == (409, "task_ended")
    late = ask(client, task)
    assert (late.status_code, late.json()["error"]["code"]) == (409, "task_ended")
    assert late.headers["x-should-retry"] == "false"


def test_a_deadline_is_that_of_the_whole_task(client: httpx.Client) -> None:
    task = new_task()
    assert ask(client, task, deadline_s=30).status_code == 200
    assert ask(client, task, deadline_s=0.001).json()["error"]["code"] == "task_deadline"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_leaves_no_open_call(client: httpx.Client, stream: bool) -> None:
    task = new_task()
    body = CHAT | {"max_tokens": 2_000, "ignore_eos": True, "stream": stream}

    def is_open() -> bool:
        answer = client.get(f"/v1/tasks/{task}")
        return answer.status_code == 200 and answer.json()["calls"]["open"] == 1

    async def leave() -> None:
        async with loopback.AsyncClient(base_url=client.base_url, timeout=60) as http:
            call = asyncio.create_task(http.post("/v1/chat/completions", json=body, headers=headers_of(task)))
            await asyncio.to_thread(until, is_open, "an open call", 15)
            call.cancel()

    asyncio.run(leave())
    assert settled(client, task)["calls"] == {"total": 1, "open": 0, "succeeded": 0, "failed": 1}


def test_a_tasks_prefix_is_warm_where_it_ran(client: httpx.Client) -> None:
    task, messages = new_task(), [{"role": "user", "content": f"{uuid4()} " + "Tell me of rivers. " * 100}]
    cached: list[int] = []
    for _ in range(4):
        body = {"model": MODEL, "messages": messages, "max_tokens": 5}
        answer = client.post("/v1/chat/completions", json=body, headers=headers_of(task)).json()
        cached.append((answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "More. " * 40}]
    assert cached[0] == 0
    assert all(later > earlier for earlier, later in itertools.pairwise(cached)), cached


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/v1/tasks/never-seen", 404, "task_not_found"),
        ("/v1/tasks/" + "x" * 129, 400, "invalid_task"),
        ("/v1/tasks/a%20b", 400, "invalid_task"),
        ("/v1/tasks/a/b", 404, "unknown_url"),
        ("/v1/tasks", 404, "unknown_url"),
    ],
)
def test_what_is_no_task_is_told_so(client: httpx.Client, path: str, status: int, code: str) -> None:
    answer = client.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize(
    "headers",
    [
        {"x-tidegate-task": "a b"},
        {"x-tidegate-task": "t", "x-tidegate-task-calls-max": "-1"},
        {"x-tidegate-task-outcome": "success"},
        {"x-tidegate-class": "urgent"},
        {"x-tidegate-deadline-ms": "soon"},
    ],
)
def test_a_header_that_is_wrong_is_a_400_that_names_it(client: httpx.Client, headers: dict[str, str]) -> None:
    answer = client.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in headers


def test_an_outcome_needs_post_and_a_small_body(client: httpx.Client) -> None:
    path = f"/v1/tasks/{new_task()}/outcome"
    assert client.get(path).headers["allow"] == "POST, OPTIONS"
    assert client.post(path, content=b"x" * (BODY_BYTES_MAX + 1)).status_code == 413
    assert client.post(path, content=b"{").status_code == 400


# --- two gateways -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_gateways(system: System) -> Iterator[list[str]]:
    """URLs of the two gateways of a second application over one engine."""
    name, url = "two-gateways", f"{system.url}/two"
    args = ARGS | {"gateway": ARGS["gateway"] | {"replicas": 2}, "scaling": {"replicas_min": 1, "replicas_max": 1}}
    serve.run(build(args), name=name, route_prefix="/two")
    try:
        until(lambda: direct(url), "an engine behind two gateways")
        urls = gateways_of(name)
        assert len(set(urls)) == 2, urls
        until(lambda: [loopback.get(f"{one}/health").status_code for one in urls] == [200, 200], "both know the engine")
        yield urls
    finally:
        serve.delete(name)


def test_two_gateways_keep_one_budget_and_one_outcome(two_gateways: list[str]) -> None:
    task = new_task()

    def everywhere(what: Callable[[httpx.Response], bool]) -> bool:
        return all(what(loopback.get(f"{url}/v1/tasks/{task}", timeout=30)) for url in two_gateways)

    def answers(calls_each: int) -> list[httpx.Response]:
        found = []
        for url in two_gateways:
            with loopback.Client(base_url=url, timeout=30) as client:
                found += [ask(client, task, calls_max=7) for _ in range(calls_each)]
        return found

    assert {answer.status_code for answer in answers(3)} == {200}
    until(lambda: everywhere(lambda a: a.json()["calls"]["total"] == 6), "both gateways know of all calls", 60)
    with loopback.Client(base_url=two_gateways[0], timeout=30) as seventh:
        assert ask(seventh, task, calls_max=7).status_code == 200
    until(lambda: everywhere(lambda a: a.json()["calls"]["total"] == 7), "both gateways know of the last one", 60)
    assert {answer.json()["error"]["code"] for answer in answers(1)} == {"task_calls"}
    told = loopback.post(f"{two_gateways[1]}/v1/tasks/{task}/outcome", json={"outcome": "success"}, timeout=30)
    assert told.status_code == 200
    until(lambda: everywhere(lambda a: a.json()["status"] == "success"), "both gateways know the outcome", 60)
    assert {answer.json()["error"]["code"] for answer in answers(3)} == {"task_ended"}
