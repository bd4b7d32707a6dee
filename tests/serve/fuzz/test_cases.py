"""Recipes 3, 5 and 11: ids of clients, a flood and a huge prompt, requests that break engines by what they ask."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import httpx
import pytest

from tests import loopback
from tests.serve.fuzz.conftest import CHAT, Target
from tests.serve.fuzz.wire import End, request, send, statuses
from tests.serve.gateway.conftest import MODEL, until

pytestmark = [pytest.mark.serve, pytest.mark.timeout(180)]

COMPLETIONS = "/v1/completions"
FLOOD = 1_280
GRAMMAR = {"grammar": "root ::= ((("}
POISON: list[dict[str, Any]] = [
    {"structured_outputs": {"json_object": False}},
    {"structured_outputs": {"json": ""}},
    {"structured_outputs": GRAMMAR},
    {"response_format": {"type": "json_schema"}},
    {"logit_bias": {"99999999": 1.0}},
    {"logit_bias": {"word": 1.0}},
    {"prompt": ["river", ""]},
    {"prompt": [[1, 2], []]},
    {"prompt": []},
    {"allowed_token_ids": [10**9]},
    {"prompt_logprobs": -7},
    {"stop": ["a"] * 9},
]


def words(n: int) -> dict[str, Any]:
    return {"model": MODEL, "prompt": f"{n} " + "word " * n, "max_tokens": 5}


def bodies_at_once(url: str, bodies: list[dict[str, Any]], headers: dict[str, str]) -> list[httpx.Response]:
    """All sent at the same time."""

    async def ask() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with loopback.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
            return await asyncio.gather(*(http.post(COMPLETIONS, json=body, headers=headers) for body in bodies))

    return asyncio.run(ask())


# --- 3: ids -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["header", "body", "both"])
def test_case_3_answers_to_one_id_never_cross(target: Target, where: str) -> None:
    """Each prompt has a length of its own, so an answer tells whose it is."""
    headers = {"x-request-id": "same"} if where != "body" else {}
    more = {"request_id": "same"} if where != "header" else {}
    alone = [loopback.post(target.system.url + COMPLETIONS, json=words(n)).json() for n in range(1, 17)]
    answers = [a.json() for a in bodies_at_once(target.system.url, [words(n) | more for n in range(1, 17)], headers)]
    for one, other in zip(alone, answers, strict=True):
        assert one["usage"]["prompt_tokens"] == other["usage"]["prompt_tokens"]
        assert one["choices"] == other["choices"]
    assert len({answer["id"] for answer in answers}) == 16


def test_case_3_an_id_sent_again_right_after_an_abort_gets_its_own_answer(target: Target) -> None:
    data = json.dumps(CHAT | {"stream": True, "max_tokens": 400, "ignore_eos": True}).encode()
    head = ("content-type: application/json", "x-request-id: same", f"content-length: {len(data)}")
    for _ in range(10):
        send(target.doors["front"], request("POST /v1/chat/completions", *head, body=data), end=End.RESET)
        time.sleep(0.01)
        answer = loopback.post(target.system.url + COMPLETIONS, json=words(3), headers={"x-request-id": "same"})
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("value", ["x" * 1_000_000, "a\nb\r\nx-injected: 1", "\x00", "\u2028", ""])
def test_case_3_odd_ids_in_a_body_go_nowhere(target: Target, value: str) -> None:
    body = CHAT | {"request_id": value, "stream": True, "stream_options": {"include_usage": True}}
    answer = loopback.post(f"{target.system.url}/v1/chat/completions", json=body, timeout=30)
    assert answer.status_code == 200
    assert "x-injected" not in answer.headers
    assert len(answer.content) < 10_000
    assert "injected" not in answer.text


@pytest.mark.parametrize("name", ["x-request-id", "x-tidegate-task"])
def test_case_3_an_id_of_a_megabyte_in_a_header_is_refused(target: Target, name: str) -> None:
    for door in ("front", "gateway"):
        answer = send(target.doors[door], request("GET /v1/models", f"{name}: {'x' * 1_000_000}"), quiet_s=2)
        assert set(statuses(answer)) <= {400, 431}


# --- 5: false death ---------------------------------------------------------------------------------------------------


def test_case_5_a_flood_is_answered_or_shed_while_health_is_good(target: Target) -> None:
    over, probes = threading.Event(), []

    def probe() -> None:
        with loopback.Client(base_url=target.system.url, timeout=30) as http:
            while not over.is_set():
                probes.append(http.get("/health").status_code)
                time.sleep(0.05)

    prober = threading.Thread(target=probe)
    prober.start()
    try:
        answers = bodies_at_once(target.system.url, [words(n % 50 + 1) for n in range(FLOOD)], {})
    finally:
        over.set()
        prober.join()
    found = [answer.status_code for answer in answers]
    assert set(found) <= {200, 429}
    assert found.count(200) >= FLOOD // 10
    assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 429)
    assert probes
    assert set(probes) == {200}


def test_case_5_a_huge_prompt_is_refused_before_anybody_reads_it(target: Target) -> None:
    before = target.system.total("requests")
    body = words(1) | {"prompt": "word " * 5_400_000}
    try:
        answer = loopback.post(target.system.url + COMPLETIONS, json=body, timeout=60)
    except httpx.TransportError:
        pass  # refused while the body was still on its way
    else:
        assert answer.status_code == 413
    assert target.system.total("requests") == before


def test_case_5_a_large_prompt_is_the_clients_fault_and_costs_no_engine(target: Target) -> None:
    answer = loopback.post(target.system.url + COMPLETIONS, json=words(1) | {"prompt": "word " * 1_000_000}, timeout=60)
    assert answer.status_code in {400, 413}
    assert loopback.get(f"{target.system.url}/health", timeout=20).status_code == 200


# --- 11: poison -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", POISON, ids=lambda bad: json.dumps(bad)[:50])
@pytest.mark.parametrize("stream", [False, True])
def test_case_11_what_an_engine_cannot_do_is_a_400_and_the_next_ones_succeed(
    target: Target, bad: dict[str, Any], stream: bool
) -> None:
    with loopback.Client(base_url=target.system.url, timeout=30) as http:
        good = words(2) | {"structured_outputs": {"grammar": 'root ::= "a"'}}
        http.post(COMPLETIONS, json=good)  # the backend's choice must not be latched by it
        answer = http.post(COMPLETIONS, json=words(2) | {"stream": stream} | bad)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert [http.post(COMPLETIONS, json=words(n)).status_code for n in range(10)] == [200] * 10


def test_case_11_tokens_that_end_inside_a_character_are_served(target: Target) -> None:
    tokens = loopback.post(f"{target.system.url}/tokenize", json={"prompt": "river \u20ac"}).json()["tokens"]
    for cut in range(1, len(tokens) + 1):
        answer = loopback.post(target.system.url + COMPLETIONS, json=words(1) | {"prompt": tokens[:cut]})
        assert answer.status_code == 200
    until(target.system.idle, "everything given back", 60)
