"""Every endpoint through HAProxy, gateway and engine: the engine's bytes, and OpenAI's errors for bad requests."""

from __future__ import annotations

import json
import re
import socket
import threading
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests import loopback
from tests.serve.gateway.conftest import APP, ARGS, MODEL, System

pytestmark = [pytest.mark.serve, pytest.mark.timeout(180)]

USER: Any = [{"role": "user", "content": "Name a river."}]
CHAT = {"model": MODEL, "messages": USER, "max_tokens": 5}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": MODEL, "prompt": "The river", "max_tokens": 5},
    "/v1/responses": {"model": MODEL, "input": "Name a river.", "max_output_tokens": 5},
    "/v1/messages": {"model": MODEL, "messages": USER, "max_tokens": 5},
}
OTHERS: dict[str, dict[str, Any]] = {
    "/v1/messages/count_tokens": {"model": MODEL, "messages": USER},
    "/tokenize": {"model": MODEL, "prompt": "The river"},
    "/detokenize": {"model": MODEL, "tokens": [5, 6, 7]},
}
OWN_ID = re.compile(r"tg-[0-9a-f]{32}")


def shape(answer: httpx.Response, status: int) -> Any:
    """The error object of an answer that must be one."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert OWN_ID.fullmatch(answer.headers["x-request-id"])
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    for leak in ("Traceback", "'loc'", "object at 0x", "{'"):
        assert leak not in error["message"]
    return error


# --- the engine's answers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", sorted(BODIES))
def test_generating_endpoints_answer_with_the_engines_own_bytes(
    system: System, client: httpx.Client, path: str, stream: bool
) -> None:
    body = BODIES[path] | {"stream": stream}
    ours = client.post(path, json=body)
    assert ours.status_code == 200
    request_id = ours.headers["x-request-id"]
    assert OWN_ID.fullmatch(request_id)
    url, gate = system.doors()[0]
    theirs = loopback.post(url + path, json=body, headers=gate | {"x-request-id": request_id})
    assert ours.headers["content-type"] == theirs.headers["content-type"]
    assert without_time(ours.content) == without_time(theirs.content)


def without_time(data: bytes) -> bytes:
    """Without what differs between two equal answers: when they were made, ids drawn at random, cache hits."""
    data = re.sub(rb'"(created|created_at|completed_at|cached_tokens|cache_read_input_tokens)": ?[0-9.]+', b"", data)
    return re.sub(rb'"((?:item_)?id)": ?"(?:msg_|resp_|rs_)?[0-9a-f]{16}"', b"", data)


@pytest.mark.parametrize("path", sorted(OTHERS))
def test_other_endpoints_answer(client: httpx.Client, path: str) -> None:
    answer = client.post(path, json=OTHERS[path])
    assert answer.status_code == 200
    assert answer.json()


def test_tokenizing_needs_no_model(client: httpx.Client) -> None:
    tokens = client.post("/tokenize", json={"prompt": "The river"}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == "The river"


def test_an_endpoint_the_engine_lacks_is_a_404_in_our_shape(client: httpx.Client) -> None:
    error = shape(client.post("/v1/embeddings", json={"model": MODEL, "input": "hi"}), 404)
    assert error["code"] == "unsupported_endpoint"


def test_models_are_listed_in_the_engines_shape(system: System, client: httpx.Client) -> None:
    ours = client.get("/v1/models").json()
    url, gate = system.doors()[0]
    theirs = loopback.get(url + "/v1/models", headers=gate).json()
    assert ours["data"][0].keys() == theirs["data"][0].keys()
    assert ours["data"][0]["id"] == MODEL
    assert client.get(f"/v1/models/{MODEL}").json()["id"] == MODEL
    assert shape(client.get("/v1/models/other"), 404)["code"] == "model_not_found"


def test_clients_that_others_wrote(system: System) -> None:
    with openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0) as api:
        answer = api.chat.completions.create(model=MODEL, messages=USER, max_tokens=5)
        assert answer.choices[0].message.content
        stream = api.chat.completions.create(model=MODEL, messages=USER, max_tokens=5, stream=True)
        chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        with pytest.raises(openai.NotFoundError) as caught:
            api.chat.completions.create(model="gpt-9", messages=USER)
        assert caught.value.code == "model_not_found"
    with anthropic.Anthropic(base_url=system.url, api_key="none", max_retries=0) as claude:
        message = claude.messages.create(model=MODEL, messages=USER, max_tokens=5)
        assert message.usage.output_tokens == 5
        with claude.messages.stream(model=MODEL, messages=USER, max_tokens=5) as events:
            assert "".join(events.text_stream)
        with pytest.raises(anthropic.NotFoundError):
            claude.messages.create(model="gpt-9", messages=USER, max_tokens=5)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("/v1/chat/completions", {"messages": []}), ("/v1/chat/completions", {"messages": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "nobody", "content": 5}]}),
        ("/v1/chat/completions", {"temperature": -1}), ("/v1/chat/completions", {"temperature": "hot"}),
        ("/v1/chat/completions", {"max_tokens": 0}), ("/v1/chat/completions", {"max_tokens": 10**15}),
        ("/v1/chat/completions", {"top_p": 7}), ("/v1/chat/completions", {"n": 0}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 9_000}]}),
        ("/v1/chat/completions", {"stream": "true"}), ("/v1/chat/completions", {"model": 5}),
        ("/v1/completions", {"prompt": []}), ("/v1/completions", {"prompt": {"a": 1}}),
        ("/v1/responses", {"input": 5}), ("/v1/responses", {"max_output_tokens": "x"}),
    ],
)  # fmt: skip
def test_bad_values_are_400s_with_a_true_message(client: httpx.Client, path: str, change: dict[str, Any]) -> None:
    error = shape(client.post(path, json=BODIES[path] | change), 400)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b'{"model": NaN}', b"\xff", b"[" * 50_000, b'{"a": 1e999}'])
def test_malformed_bodies_are_400s(client: httpx.Client, raw: bytes) -> None:
    shape(client.post("/v1/chat/completions", content=raw), 400)


def test_nan_in_a_parameter_is_a_400(client: httpx.Client) -> None:
    raw = json.dumps(CHAT)[:-1] + ', "temperature": NaN}'
    shape(client.post("/v1/chat/completions", content=raw), 400)


def test_errors_of_messages_are_anthropics_too(client: httpx.Client) -> None:
    answer = client.post("/v1/messages", json={"model": MODEL, "messages": [], "max_tokens": 5})
    shape(answer, 400)
    assert answer.json()["type"] == "error"


def test_a_body_over_the_limit_is_refused_before_it_is_read(system: System) -> None:
    host, port = system.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 10) as sock:
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100001\r\n\r\n{")
        answer = b""
        while b"request_too_large" not in answer and (more := sock.recv(65_536)):
            answer += more
    assert b" 413 " in answer.split(b"\r\n")[0]
    assert b"request_too_large" in answer


def test_a_chunked_body_is_counted(client: httpx.Client) -> None:
    def pieces() -> Any:
        for _ in range(3):
            yield b"x" * 50_000

    shape(client.post("/v1/chat/completions", content=pieces()), 413)


def test_the_limit_itself_passes(client: httpx.Client) -> None:
    limit = ARGS["gateway"]["body_bytes_max"]
    raw = json.dumps(CHAT).encode()
    assert client.post("/v1/chat/completions", content=raw + b" " * (limit - len(raw))).status_code == 200
    shape(client.post("/v1/chat/completions", content=raw + b" " * (limit - len(raw) + 1)), 413)


def test_compressed_bodies_are_refused(client: httpx.Client) -> None:
    shape(client.post("/v1/chat/completions", content=b"x", headers={"content-encoding": "gzip"}), 415)


# --- routes -----------------------------------------------------------------------------------------------------------


def test_unknown_paths_and_methods(client: httpx.Client) -> None:
    assert shape(client.post("/v1/nothing", json={}), 404)["code"] == "unknown_url"
    assert shape(client.get("/"), 404)["code"] == "unknown_url"
    answer = client.get("/v1/chat/completions")
    assert shape(answer, 405)["code"] == "method_not_allowed"
    assert answer.headers["allow"] == "POST, OPTIONS"
    assert client.post("/health").headers["allow"] == "GET, HEAD, OPTIONS"
    assert client.delete("/v1/models").status_code == 405


def test_head_and_options(client: httpx.Client) -> None:
    answer = client.head("/v1/models")
    assert (answer.status_code, answer.content) == (200, b"")
    assert int(answer.headers["content-length"]) > 0
    answer = client.options("/v1/chat/completions")
    assert (answer.status_code, answer.headers["allow"]) == (204, "POST, OPTIONS")


def test_health_metrics_and_control(client: httpx.Client) -> None:
    assert client.get("/health").status_code == 200
    client.post("/v1/chat/completions", content=b"{")
    client.post("/v1/chat/completions", json=CHAT)
    page = client.get("/metrics").text
    assert 'tidegate_requests_total{endpoint="/v1/chat/completions",outcome="succeeded",reason="ok"}' in page
    assert 'tidegate_requests_total{endpoint="/v1/chat/completions",outcome="refused",reason="invalid_json"}' in page
    assert MODEL not in page
    state = client.get("/control/state").json()
    assert state["mode"] == "shadow"
    assert isinstance(client.get("/control/decisions?limit=5").json(), list)
    shape(client.get("/control/decisions?limit=0"), 400)
    shape(client.get("/control/decisions?since_seq=x"), 400)


# --- who is answered, and by which name -------------------------------------------------------------------------------


def test_a_host_header_of_elsewhere_is_refused(client: httpx.Client) -> None:
    for path in ("/v1/models", "/health", "/metrics", "/control/state"):
        shape(client.get(path, headers={"host": "evil.example"}), 403)
    shape(client.post("/v1/chat/completions", json=CHAT, headers={"host": "evil.example"}), 403)


def test_a_forwarded_address_does_not_stand_for_the_peer(client: httpx.Client) -> None:
    assert client.get("/v1/models", headers={"x-forwarded-for": "8.8.8.8"}).status_code == 200


def test_request_ids_are_the_servers_own(client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", json=CHAT | {"request_id": "mine"}, headers={"x-request-id": "mine"})
    ids = answer.headers.get_list("x-request-id")
    assert len(ids) == 1
    assert OWN_ID.fullmatch(ids[0])
    assert answer.json()["id"] == f"chatcmpl-{ids[0]}"
    assert answer.headers["x-tidegate-replica"]


def test_two_requests_with_one_id_do_not_cross(client: httpx.Client) -> None:
    found: dict[int, httpx.Response] = {}

    def ask(n: int) -> None:
        found[n] = client.post(
            "/v1/completions",
            json={"model": MODEL, "prompt": "x " * (n * 50 + 1), "max_tokens": 20},
            headers={"x-request-id": "same"},
        )

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sizes = [found[n].json()["usage"]["prompt_tokens"] for n in range(8)]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 8
    assert len({found[n].json()["id"] for n in range(8)}) == 8


@pytest.mark.parametrize("value", ["x" * 8_000, "a b\tc", "\xe9\xff"])
def test_odd_ids_of_clients_are_not_echoed(client: httpx.Client, value: str) -> None:
    headers = {b"x-request-id": value.encode("latin-1")}
    answer = client.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert answer.status_code == 200
    assert value not in str(answer.headers)
    assert value not in answer.text


def test_headers_that_serve_acts_on_change_nothing(client: httpx.Client) -> None:
    headers = {"x-request-timeout-seconds": "0.001", "x-request-disconnect-disabled": "?1"}
    answer = client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 40}, headers=headers)
    assert answer.status_code == 200


def test_the_application_has_its_name(system: System) -> None:
    assert system.handle.app_name == APP
