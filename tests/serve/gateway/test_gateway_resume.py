"""Streams whose replica is lost in the middle: what clients get is what they would have got."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from tests.serve.gateway.conftest import MODEL, System, until

pytestmark = [pytest.mark.serve, pytest.mark.timeout(180)]

RIVERS = ("Rhine", "Danube", "Oder", "Elbe", "Weser", "Main", "Neckar", "Inn")
OPTIONS: dict[str, Any] = {"stream": True, "max_tokens": 24, "stream_options": {"include_usage": True}}


def chat(river: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": f"Tell me of the {river}."}]
    return "/v1/chat/completions", {"model": MODEL, "messages": messages} | OPTIONS | fields


def text(river: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"model": MODEL, "prompt": f"The {river} is."} | OPTIONS | fields


KINDS: dict[str, Callable[[str], tuple[str, dict[str, Any]]]] = {
    "chat": chat,
    "text": text,
    "chat with stop strings": lambda river: chat(river, temperature=0, stop=["dolor sit amet", " ut la"]),
    "text with running usage": lambda river: text(
        river, stream_options={"include_usage": True, "continuous_usage_stats": True}
    ),
    "chat with ids": lambda river: chat(river, return_token_ids=True),
}


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    """Events of a stream without what is another request's: id, time, what was cached."""
    answer = client.post(path, json=body)
    assert answer.status_code == 200
    found: list[Any] = []
    for event in answer.text.split("\n\n")[:-1]:
        value = json.loads(event[6:]) if event != "data: [DONE]" else event
        if isinstance(value, dict):
            assert value.pop("id").endswith(answer.headers["x-request-id"])
            value.pop("created", None)
            (value.get("usage") or {}).pop("prompt_tokens_details", None)
        found.append(value)
    assert answer.text.count('"created":') == len(found) - 1
    assert len({json.loads(e[6:])["created"] for e in answer.text.split("\n\n")[:-2]}) == 1
    return found


def resumes(client: httpx.Client) -> float:
    """Continuations so far."""
    page = client.get("/metrics").text
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith("tidegate_resumes"))


def break_one(system: System, **faults: Any) -> None:
    """Faults at the first engine alone."""
    first = system.counters()[0]["replica_id"]
    system.engine.broadcast("set_faults", faults, first).results(timeout_s=20)


@pytest.mark.parametrize("fault", ["cut", "error"])
@pytest.mark.parametrize("name", list(KINDS))
def test_a_stream_that_loses_its_engine_goes_on_as_if_it_had_not(
    system: System, client: httpx.Client, name: str, fault: str
) -> None:
    asked = [KINDS[name](f"{river} {fault}") for river in RIVERS]
    whole = [events(client, *one) for one in asked]
    break_one(system, kind=fault, after_tokens=7)
    assert [events(client, *one) for one in asked] == whole


def test_streams_were_indeed_resumed_and_it_is_counted(system: System, client: httpx.Client) -> None:
    path, body = chat("Havel")
    before, whole = resumes(client), events(client, path, body)
    break_one(system, kind="cut", after_tokens=7)

    def another() -> bool:  # the engine may be ejected for what other tests did to it
        assert events(client, path, body) == whole
        return resumes(client) > before

    until(another, "a stream that began at the engine that cuts")


def test_what_cannot_be_exact_ends_with_an_error_and_never_as_if_complete(system: System, client: httpx.Client) -> None:
    system.faults(kind="cut", after_tokens=7)
    for fields in ({"n": 2}, {"logprobs": True}, {"response_format": {"type": "json_object"}}, {"seed": 7}):
        path, body = chat("Spree", **fields)
        answer = client.post(path, json=body)
        last = json.loads(answer.text.split("\n\n")[-2][6:])
        assert last["error"]["code"] == "stream_broken", fields
        assert "[DONE]" not in answer.text


def test_the_openai_client_sees_one_seamless_stream(system: System) -> None:
    with openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0) as api:

        def told(river: str) -> str:
            messages: Any = [{"role": "user", "content": river}]
            stream = api.chat.completions.create(model=MODEL, messages=messages, max_tokens=40, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)

        whole = [told(river) for river in RIVERS]
        break_one(system, kind="cut", after_tokens=11)
        assert [told(river) for river in RIVERS] == whole
