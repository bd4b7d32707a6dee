"""What is sent of a body: the gateway's own fields at its end, and a cap that asks for no more than the client did."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.gateway_bench import a_core, an_inbound

RESPONSES, MESSAGES, COMPLETIONS = "/v1/responses", "/v1/messages", "/v1/completions"
CHAT = "/v1/chat/completions"


async def sealed(path: str, cap: int | None, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(an_inbound(a_core(), path=path, **fields).seal(cap))
    return body


@pytest.mark.parametrize(
    ("path", "fields", "name", "limit"),
    [
        (CHAT, {}, "max_tokens", 100),
        (CHAT, {"max_completion_tokens": 900, "max_tokens": 5}, "max_completion_tokens", 100),
        (CHAT, {"max_tokens": 900, "max_output_tokens": 900}, "max_tokens", 100),
        (COMPLETIONS, {"max_tokens": 900, "max_completion_tokens": 900}, "max_tokens", 100),
        (RESPONSES, {"max_tokens": 900}, "max_output_tokens", 100),
        (MESSAGES, {"max_tokens": 900}, "max_tokens", 100),
        (CHAT, {"max_tokens": 60, "n": 4}, "max_tokens", 25),
        (CHAT, {"n": 4}, "max_tokens", 25),
        (CHAT, {"max_tokens": 60, "n": 400}, "max_tokens", 1),
        (COMPLETIONS, {"max_tokens": 60, "prompt": ["a", "b"], "n": 2}, "max_tokens", 25),
        (CHAT, {"max_tokens": 900, "min_tokens": 300}, "max_tokens", 300),
    ],
)
async def test_cap_is_of_the_whole_request_by_the_name_its_endpoint_reads(
    path: str, fields: dict[str, Any], name: str, limit: int
) -> None:
    body = await sealed(path, 100, **fields)
    assert body[name] == limit
    assert {k: v for k, v in body.items() if k in fields and k != name} == {k: fields[k] for k in fields if k != name}


async def test_without_a_cap_the_limits_stay_as_they_came() -> None:
    body = await sealed(CHAT, None, max_tokens=60, n=4)
    assert (body["max_tokens"], body["n"]) == (60, 4)


async def test_the_servers_salt_wins_over_the_clients() -> None:
    core = a_core()
    inbound = an_inbound(core, cache_salt="mine")
    text = inbound.seal(None)
    assert text.startswith(inbound.body[:-1])
    assert json.loads(text)["cache_salt"] == inbound.cache_salt != "mine"
