"""Engines that fail: what clients see, what is tried again, and what goes on elsewhere."""

from __future__ import annotations

import json
import os
import signal
import threading
from typing import Any

import httpx
import openai
import pytest

from tests import loopback
from tests.serve.gateway.conftest import MODEL, System, until

pytestmark = [pytest.mark.serve, pytest.mark.timeout(180)]

USER: Any = [{"role": "user", "content": "Name a river."}]
CHAT = {"model": MODEL, "messages": USER, "max_tokens": 30, "ignore_eos": True}
STREAMS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": MODEL, "prompt": "river", "max_tokens": 30, "ignore_eos": True},
    "/v1/responses": {"model": MODEL, "input": "river", "max_output_tokens": 30},
    "/v1/messages": {"model": MODEL, "messages": USER, "max_tokens": 30},
}


def events(text: str) -> list[str]:
    return [line[6:] for line in text.splitlines() if line.startswith("data: ")]


def test_an_engines_error_before_the_first_token_is_an_error_status(system: System, client: httpx.Client) -> None:
    system.faults(kind="error")
    for stream in (False, True):
        answer = client.post("/v1/chat/completions", json=CHAT | {"stream": stream})
        assert answer.status_code == 502
        assert answer.json()["error"]["type"] == "server_error"
        assert "Traceback" not in answer.text


@pytest.mark.parametrize("path", sorted(STREAMS))
def test_a_stream_cut_by_the_engine_ends_with_an_error_event(system: System, client: httpx.Client, path: str) -> None:
    system.faults(kind="cut", after_tokens=5)
    answer = client.post(path, json=STREAMS[path] | {"stream": True})
    assert answer.status_code == 200
    assert "[DONE]" not in answer.text
    assert "message_stop" not in answer.text
    last = json.loads(events(answer.text)[-1])
    assert last["error"]["code"] == "stream_broken"
    assert last["error"]["message"]


def test_the_openai_client_raises_on_a_cut_stream(system: System) -> None:
    system.faults(kind="cut", after_tokens=5)
    with openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0) as api:
        stream = api.chat.completions.create(model=MODEL, messages=USER, max_tokens=30, stream=True)
        with pytest.raises(openai.APIError):
            list(stream)


def test_an_engines_own_stream_error_passes_as_it_is(system: System, client: httpx.Client) -> None:
    system.faults(kind="error", after_tokens=5)
    answer = client.post("/v1/chat/completions", json=CHAT | {"stream": True})
    assert any("error" in json.loads(e) for e in events(answer.text) if e != "[DONE]")
    page = client.get("/metrics").text
    assert 'outcome="failed",reason="quarantined"' in page, "it was resumed, and met the same error"


def test_a_whole_answer_that_breaks_off_is_cut_for_the_client_too(system: System, client: httpx.Client) -> None:
    """Part of the body is out: nobody may take it for complete."""
    system.faults(kind="cut")
    with pytest.raises(httpx.RemoteProtocolError):
        client.post("/v1/chat/completions", json=CHAT)


def test_an_engine_that_falls_silent_is_given_up_after_the_idle_time(system: System, client: httpx.Client) -> None:
    system.faults(kind="freeze", after_tokens=3)
    answer = client.post("/v1/chat/completions", json=CHAT | {"stream": True})
    last = json.loads(events(answer.text)[-1])
    assert last["error"]["code"] == "stream_broken"
    assert "2 replicas" in last["error"]["message"], "both were tried"


def test_an_unavailable_engines_answer_passes_in_our_shape(system: System, client: httpx.Client) -> None:
    system.faults(kind="unavailable")
    answer = client.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "server_error"


def test_a_replica_killed_before_the_first_byte_costs_no_request(system: System) -> None:
    """Both engines hold requests without a first byte; one dies; its requests go to the other one."""
    system.faults(slow_factor=200.0)
    found: list[Any] = []

    def ask(n: int) -> None:
        body = {"model": MODEL, "prompt": f"{n} " + "word " * 200, "max_tokens": 2}
        found.append(loopback.post(f"{system.url}/v1/completions", json=body, timeout=90))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    busy = until(lambda: [c for c in system.counters() if c["running"] or c["waiting"]], "work at an engine", 20)
    os.kill(busy[0]["pid"], signal.SIGKILL)
    until(lambda: system.try_faults(slow_factor=1.0), "the other engine runs at full speed", 30)
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in found] == [200] * 6
    until(system.whole, "two engines again", 60)
