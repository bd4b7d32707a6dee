"""Streams of real vLLM that are cut and continued through the journal give what an undisturbed stream gives.

The engine computes in float32. In bfloat16 a token with nearly the best logit may win when tokens before it are
computed at once and not one by one.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

import httpx
import pytest

from deployments.endpoints import RELAYED
from deployments.resume import Journal, ResumeMismatchError, ResumePlan, plan_of, splice
from tests.engine.conftest import MODEL_NAME

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CONTEXT_TOKENS_MAX = 2_048
CUTS = 3
USAGE = {"stream_options": {"include_usage": True}}
RUNNING = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def chat(content: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": content}]
    body = {"model": MODEL_NAME, "messages": messages, "max_tokens": 24, "temperature": 0, "stream": True}
    return CHAT, body | USAGE | fields


def text(prompt: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 24, "temperature": 0, "stream": True}
    return COMPLETIONS, body | USAGE | fields


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": chat("What is the capital of France?"),
    "chat to its end": chat("Say yes.", max_tokens=None),
    "chat, running usage": chat("Name three rivers.", **RUNNING),
    "chat, characters split over tokens": chat("Repeat: 😀 🎉 日本語 Ελλάδα", max_tokens=40),
    "chat, split characters forced": chat("Go.", max_tokens=30, logit_bias={"1": -100}, ignore_eos=True, top_k=1),
    "chat, stop string": chat("Count from one to ten in words.", max_tokens=60, stop=["five", "zzzzzzzz"]),
    "chat, stop string kept": chat("Count to ten.", stop=["4", "five"], include_stop_str_in_output=True),
    "chat, stop string that does not come": chat("Name a tree.", stop=["no such text anywhere"]),
    "chat, at least": chat("Say yes.", min_tokens=12, max_tokens=20, ignore_eos=False),
    "chat, repetition penalty": chat("Write about the sea.", repetition_penalty=1.3),
    "chat, ids for the client": chat("Name a river.", return_token_ids=True, **RUNNING),
    "text": text("The quick brown fox"),
    "text, default length": text("Once upon a time", max_tokens=None),
    "text, running usage": text("One two three", **RUNNING),
    "text, stop string": text("1, 2, 3, 4,", stop=[" 9,"], max_tokens=40),
}


class Replica:
    """The engine, asked by a gateway that may lose it."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def events(self, path: str, body: bytes, request_id: str) -> list[bytes]:
        """Events of one stream."""
        headers = {"content-type": "application/json", "x-request-id": request_id}
        async with self._client.stream("POST", path, content=body, headers=headers) as response:
            data = await response.aread()
        assert response.status_code == 200, data
        return [event + b"\n\n" for event in data.split(b"\n\n")[:-1]]


def planned(path: str, fields: dict[str, Any]) -> ResumePlan:
    plan = plan_of(fields, RELAYED[path])
    assert isinstance(plan, ResumePlan), plan
    return plan


def comparable(events: list[bytes]) -> list[Any]:
    """Events without their time and without how much of the prompt was cached."""
    out: list[Any] = []
    for event in b"".join(events).split(b"\n\n")[:-1]:
        value = json.loads(event[6:]) if event != b"data: [DONE]" else event
        if isinstance(value, dict):
            value.pop("created")
            if value.get("usage"):
                value["usage"].pop("prompt_tokens_details", None)
        out.append(value)
    return out


@pytest.mark.parametrize("name", list(CASES))
async def test_a_stream_continued_after_any_token_is_the_undisturbed_one(client: httpx.AsyncClient, name: str) -> None:
    path, fields = CASES[name]
    replica, request_id = Replica(client), uuid.uuid4().hex
    body = json.dumps(fields).encode()
    whole = comparable(await replica.events(path, body, request_id))
    asked = splice(body, {"return_token_ids": True})
    begun = await replica.events(path, asked, request_id)
    journal = Journal(planned(path, fields))
    assert comparable([journal.take(event) for event in begun]) == whole
    for cut in sorted({*range(1, len(begun), max(1, len(begun) // CUTS)), len(begun) - 1}):
        journal = Journal(planned(path, fields))
        out = [journal.take(event) for event in begun[:cut]]
        if journal.finished:
            out.append(journal.closing())
            assert out[-1].endswith(b"data: [DONE]\n\n")
            continue
        again = journal.continuation(fields, CONTEXT_TOKENS_MAX)
        assert again is not None, journal.reason
        out += [journal.take_resumed(event) for event in await replica.events(*again, request_id)]
        assert comparable(out) == whole, f"cut after {cut} events"


async def test_a_stream_cut_again_and_again_is_the_undisturbed_one(client: httpx.AsyncClient) -> None:
    path, fields = CASES["chat, characters split over tokens"]
    replica, request_id = Replica(client), uuid.uuid4().hex
    body = json.dumps(fields).encode()
    whole = comparable(await replica.events(path, body, request_id))
    journal = Journal(planned(path, fields))
    take, asked, out = journal.take, (path, splice(body, {"return_token_ids": True})), b""
    for cut in (5, 4, 1, 7, None):
        out += b"".join([take(event) for event in (await replica.events(*asked, request_id))[:cut]])
        if cut is not None:
            again = journal.continuation(fields, CONTEXT_TOKENS_MAX)
            assert again is not None
            asked, take = again, journal.take_resumed
    assert comparable([out]) == whole


async def test_a_sampled_stream_goes_on_without_a_seam(client: httpx.AsyncClient) -> None:
    path, fields = chat("Write about the sea.", temperature=1.0)
    replica, request_id = Replica(client), uuid.uuid4().hex
    begun = await replica.events(path, splice(json.dumps(fields).encode(), {"return_token_ids": True}), request_id)
    journal = Journal(planned(path, fields))
    out = [journal.take(event) for event in begun[:9]]
    again = journal.continuation(fields, CONTEXT_TOKENS_MAX)
    assert again is not None
    out += [journal.take_resumed(event) for event in await replica.events(*again, request_id)]
    events = comparable(out)
    assert events[-1] == b"data: [DONE]"
    assert events[-2]["usage"]["completion_tokens"] == 24 or events[-3]["choices"][0]["finish_reason"] == "stop"
    assert {event["id"] for event in events[:-1]} == {f"chatcmpl-{request_id}"}
    roles = [e["choices"][0]["delta"].get("role") for e in events[:-2] if e["choices"]]
    assert roles[0] == "assistant"
    assert set(roles[1:]) == {None}


async def test_a_replica_with_another_answer_is_noticed(client: httpx.AsyncClient) -> None:
    path, fields = chat("Name a tree.", stop=["no such text anywhere"])
    replica, request_id = Replica(client), uuid.uuid4().hex
    begun = await replica.events(path, splice(json.dumps(fields).encode(), {"return_token_ids": True}), request_id)
    journal = Journal(planned(path, fields))
    for event in begun[:20]:
        journal.take(event)
    again = journal.continuation(fields, CONTEXT_TOKENS_MAX)
    assert again is not None
    other = splice(again[1], {"prompt": [1, 2, 3]})
    data = b"".join(await replica.events(again[0], other, request_id))
    with pytest.raises(ResumeMismatchError):
        journal.take_resumed(data)


async def test_the_last_of_two_fields_of_one_name_counts(client: httpx.AsyncClient) -> None:
    body = splice(b'{"model": "%b", "prompt": "a", "max_tokens": 9, "ignore_eos": true}' % MODEL_NAME.encode(),
                  {"max_tokens": 2})  # fmt: skip
    response = await client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert response.json()["usage"]["completion_tokens"] == 2
