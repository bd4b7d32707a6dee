"""Clients that leave: the engine's work ends with them, wherever their request was, and nothing leaks."""

from __future__ import annotations

import json
import random
import socket
import threading
import time

import pytest

from tests import loopback
from tests.serve.gateway.conftest import MODEL, System, until

pytestmark = [pytest.mark.serve, pytest.mark.timeout(180)]

LONG = {"model": MODEL, "messages": [{"role": "user", "content": "Go on."}], "max_tokens": 3_000, "ignore_eos": True}


def connect(system: System) -> socket.socket:
    host, port = system.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), 10)


def message(body: object, path: str = "/v1/chat/completions") -> bytes:
    raw = json.dumps(body).encode()
    return b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s" % (path.encode(), len(raw), raw)


def engine_is_done(system: System) -> bool:
    return system.total("running") + system.total("waiting") == 0


def test_a_stream_dropped_after_its_third_chunk_stops_the_engine(system: System) -> None:
    aborted = system.total("aborted_total")
    with loopback.Client(base_url=system.url, timeout=30) as client:
        with client.stream("POST", "/v1/chat/completions", json=LONG | {"stream": True}) as answer:
            chunks = answer.iter_raw()
            for _ in range(3):
                assert next(chunks)
            assert system.total("running") == 1
        until(lambda: engine_is_done(system), "the engine's abort", 10)
    assert system.total("aborted_total") == aborted + 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "extra"),
    [("/v1/chat/completions", {}), ("/v1/completions", {"prompt": "Go on."}), ("/v1/responses", {"input": "Go on."}),
     ("/v1/messages", {})],
)  # fmt: skip
def test_a_client_that_leaves_before_the_answer_stops_the_engine(
    system: System, path: str, extra: dict[str, object], stream: bool
) -> None:
    body = LONG | {"stream": stream, "max_output_tokens": 3_000} | extra
    if path != "/v1/responses":
        body.pop("max_output_tokens")
    else:
        body.pop("max_tokens"), body.pop("messages")
    aborted = system.total("aborted_total")
    with connect(system) as sock:
        sock.sendall(message(body, path))
        until(lambda: system.total("running") == 1, "a running request", 10)
    until(lambda: engine_is_done(system), "the engine's abort", 10)
    assert system.total("aborted_total") == aborted + 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_whose_body_came_after_its_head_is_missed_as_well(system: System, stream: bool) -> None:
    """Most HTTP clients send the two one after the other."""
    aborted = system.total("aborted_total")
    raw = message(LONG | {"stream": stream})
    end = raw.index(b"\r\n\r\n") + 4
    with connect(system) as sock:
        sock.sendall(raw[:end])
        time.sleep(0.05)
        sock.sendall(raw[end:])
        until(lambda: system.total("running") == 1, "a running request", 10)
    until(lambda: engine_is_done(system), "the engine's abort", 10)
    assert system.total("aborted_total") == aborted + 1


def test_half_a_body_holds_nothing(system: System) -> None:
    socks = [connect(system) for _ in range(10)]
    for sock in socks:
        sock.sendall(message(LONG)[:-20])
    page = loopback.get(f"{system.url}/metrics").text
    assert "tidegate_inflight_requests 0.0" in page
    for sock in socks:
        sock.close()
    answer = loopback.post(f"{system.url}/v1/chat/completions", json=LONG | {"max_tokens": 3}, timeout=30)
    assert answer.status_code == 200


@pytest.mark.parametrize("seed", [1, 2])
def test_clients_dropped_at_random_moments_leave_no_slot_taken(system: System, seed: int) -> None:
    rng = random.Random(seed)
    plan = [(rng.uniform(0, 0.05), rng.random() < 0.5, rng.random()) for _ in range(100)]

    def drop(delay_s: float, stream: bool, share: float) -> None:
        raw = message(LONG | {"stream": stream})
        with connect(system) as sock:
            sock.sendall(raw if share < 0.8 else raw[: int(len(raw) * share)])
            time.sleep(delay_s)

    threads = [threading.Thread(target=drop, args=item) for item in plan]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(system.idle, "all slots free", 60)
    with loopback.Client(base_url=system.url, timeout=30) as client:
        for _ in range(20):
            assert client.post("/v1/chat/completions", json=LONG | {"max_tokens": 1}).status_code == 200


def test_a_client_that_stops_reading_is_held_back_and_then_dropped(system: System) -> None:
    body = LONG | {"stream": True, "max_tokens": 3_000, "logprobs": True, "top_logprobs": 20}
    system.faults(slow_factor=0.01)
    with connect(system) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        sock.sendall(message(body))
        assert sock.recv(100)
        until(lambda: engine_is_done(system), "the work ends though its client reads nothing", 60)
