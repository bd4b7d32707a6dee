"""Two real engines that hand caches over: the same text as from one, and no request lost with its prefill replica."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import httpx
import psutil
import pytest

from deployments.handoff import leg_body, params_of
from tests import loopback
from tests.engine.conftest import MODEL_NAME

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
SHORT = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
SLOW = {"prefill_timeout_ms": 170_000.0, "pull_timeout_ms": 170_000.0}
"""Nothing ends because the machine is busy."""


Door: TypeAlias = tuple[str, dict[str, str]]
"""URL and headers of a replica's own port."""


def body(case: str, items: int = 40, **fields: Any) -> dict[str, Any]:
    """A long prompt of its own: ``case`` comes first, so that no cache has its beginning."""
    listed = "; ".join(f"item {i} is {('red', 'green', 'blue')[i % 3]}" for i in range(items))
    content = f"{case}. {listed}. What colour is item 7, and why? Answer in one long sentence."
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL_NAME, "messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True} | fields


def text_of(response: httpx.Response) -> str:
    """The whole answer, streamed or not. A stream must be complete."""
    assert response.status_code == 200, response.text
    if "event-stream" not in response.headers["content-type"]:
        return str(response.json()["choices"][0]["message"]["content"])
    assert response.text.endswith("data: [DONE]\n\n"), response.text[-500:]
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    assert not any("error" in event for event in events), response.text[-500:]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])


@pytest.fixture(scope="module")
def fleet(model_folder: str) -> Iterator[Any]:
    from ray import serve

    from deployments.app import build
    from tests.serve.gateway.conftest import ENV, System, direct, free_port, start_cluster, stop_cluster, until

    port = free_port()
    args = {
        "model": {
            "name": MODEL_NAME,
            "source": model_folder,
            "stuck_after_s": 180.0,
            "engine_args": {"dtype": "float32", "max_model_len": 2_048, "max_num_seqs": 16},
        },
        "auth": "none",
        "objectives": {"ttft_ms": 60_000.0, "itl_ms": 10_000.0},
        "admission": {"no_replica_wait_ms": 120_000.0},
        "scaling": {"replicas_min": 2, "replicas_max": 2},
        "disaggregation": {"enabled": True, "uncached_tokens_min": 128, "adaptive": False} | SLOW,
    }
    try:
        start_cluster(port, ENV)
        handle = serve.run(build(args), name="disaggregation-test", route_prefix="/")
        engine = serve.get_deployment_handle("Engine", "disaggregation-test")
        system = System(f"http://127.0.0.1:{port}", handle, engine)
        until(lambda: direct(system.url) and len(system.doors()) == 2, "two engines behind the gateway", 240)
        yield system
    finally:
        stop_cluster(ENV)


def ask(fleet: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
    """Text of one request through the gateway, and what the gateway wrote down of it."""
    answer = loopback.post(f"{fleet.url}{CHAT}", json=fields, timeout=240)
    text = text_of(answer)
    found = loopback.get(f"{fleet.url}/control/requests/{answer.headers.get_list('x-request-id')[0]}", timeout=30)
    return text, found.json()


def post(door: Door, content: bytes) -> httpx.Response:
    """One request to one replica, past the gateway."""
    url, headers = door
    return loopback.post(f"{url}{CHAT}", content=content, headers=headers | JSON, timeout=240)


def whole(door: Door, **fields: Any) -> str:
    """The text of one engine that computes everything itself."""
    return text_of(post(door, json.dumps(fields | {"stream": False}).encode()))


def counted(url: str, name: str, headers: dict[str, str] | None = None) -> float:
    """Sum of a counter at ``url``."""
    page = loopback.get(f"{url}/metrics", headers=headers, timeout=30).text
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))


def by_role(fleet: Any) -> tuple[Door, Door]:
    """The replica that prefills and the one that decodes: a short prompt goes to the latter."""
    doors = fleet.doors()
    before = [counted(url, "vllm:prompt_tokens_total", headers) for url, headers in doors]
    ask(fleet, **SHORT)
    after = [counted(url, "vllm:prompt_tokens_total", headers) for url, headers in doors]
    (decode,) = (i for i in range(2) if after[i] > before[i])
    return doors[1 - decode], doors[decode]


def kill(door: Door) -> None:
    """The replica and its engine, at once."""
    port = int(door[0].rsplit(":", 1)[1])
    pid = next(c.pid for c in psutil.net_connections() if c.status == psutil.CONN_LISTEN and c.laddr.port == port)
    assert pid is not None
    process = psutil.Process(pid)
    for victim in (*process.children(recursive=True), process):
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()


def test_prompt_and_answer_at_two_replicas_give_the_text_of_one(fleet: Any) -> None:
    for case, fields in (("stream", {"stream": True}), ("whole", {})):
        asked = body(case, **fields)
        text, record = ask(fleet, **asked)
        assert record["disaggregation"] == "split", record
        prefill, decode = record["replicas"]
        assert record["prefill_replica"] == prefill != decode
        assert record["ends"] == ["prefill", "ok"]
        assert [whole(door, **asked) for door in fleet.doors()] == [text, text]
    assert ask(fleet, **SHORT)[1]["disaggregation"] == "short_prompt"


def test_a_prefill_replica_killed_in_the_middle_costs_no_request(fleet: Any) -> None:
    from tests.serve.gateway.conftest import until

    asked, held = body("killed", items=180, stream=True), body("held")
    prefill, decode = by_role(fleet)
    blocks = params_of(post(prefill, leg_body(held, None)).content)
    assert blocks is not None
    sent = counted(fleet.url, "tidegate_routed_total")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, fleet, **asked)
        until(lambda: counted(fleet.url, "tidegate_routed_total") > sent, "the prompt is sent to be computed")
        kill(prefill)
        text, record = running.result(timeout=300)
    assert (record["outcome"], record["disaggregation"]) == ("succeeded", "prefill_failed"), record
    assert text == whole(decode, **asked)
    late = whole(decode, **held, kv_transfer_params=blocks)
    assert late == whole(decode, **held), "an engine that cannot pull computes the prompt itself"
