"""Raw bytes on every open port: nobody dies, nothing stays open, and no answer blames the server."""

from __future__ import annotations

import json
import random
import time

import pytest

from tests import loopback
from tests.serve.fuzz.conftest import CHAT, DOORS, Target
from tests.serve.fuzz.wire import End, connect, request, send, statuses
from tests.serve.gateway.conftest import until

pytestmark = [pytest.mark.serve, pytest.mark.timeout(180)]

POST = "POST /v1/chat/completions"
JSON = "content-type: application/json"
BODY = json.dumps(CHAT).encode()
LENGTH = f"content-length: {len(BODY)}"
CHUNKED = "transfer-encoding: chunked"
WHOLE = request(POST, JSON, LENGTH, body=BODY)
NOT_OURS = frozenset({"stats", "metrics", "fallback"})
"""HAProxy's own pages: a path without one is answered with Serve's error file, which says 500 where HAProxy means 503.
Serve's Python proxy: it answers 500 to a websocket whose headers are no UTF-8. None is our code; all must live on."""

ODD_LINES = {
    "nothing": b"\r\n\r\n",
    "no path": b"GET\r\n\r\n",
    "no version": b"GET /\r\n\r\n",
    "version": b"GET / HTTP/9.9\r\nhost: localhost\r\n\r\n",
    "no host": b"GET /v1/models HTTP/1.1\r\n\r\n",
    "two hosts": request("GET /v1/models", "host: evil.example"),
    "old": b"GET /v1/models HTTP/1.0\r\n\r\n",
    "method": request("BREW /v1/models"),
    "lower case": request("get /v1/models"),
    "connect": b"CONNECT example.com:443 HTTP/1.1\r\nhost: example.com:443\r\n\r\n",
    "star": request("OPTIONS *"),
    "absolute": request("GET http://localhost/v1/models"),
    "absolute elsewhere": request("GET http://evil.example/v1/models"),
    "no path in url": request("GET http://localhost"),
    "dots": request("GET /../../etc/passwd"),
    "percent": request("GET /%00%ff%2e%2e/%zz"),
    "latin": "GET /\xe9\xff HTTP/1.1\r\nhost: localhost\r\n\r\n".encode("latin-1"),
    "newline in path": request("GET /v1/models%0d%0ax-injected:%201"),
    "tls": bytes.fromhex("16030100f1010000ed0303") + b"\x00" * 200,
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" * 10,
    "h2c": request("GET /v1/models", "connection: upgrade, http2-settings", "upgrade: h2c", "http2-settings: AAMAAABk"),
    "websocket": request(
        "GET /v1/models", "connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13",
        "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==", "x-request-id: \xff", "x-session-id: \xff",
    ),
    "websocket without key": request("GET /v1/models", "connection: upgrade", "upgrade: websocket"),
    "proxy protocol": b"PROXY TCP4 8.8.8.8 8.8.8.8 1 1\r\n" + WHOLE,
}  # fmt: skip
ODD_HEADERS = {
    "no name": "GET / HTTP/1.1\r\nhost: localhost\r\n: x\r\n\r\n",
    "space before colon": "GET / HTTP/1.1\r\nhost: localhost\r\nx-a : b\r\n\r\n",
    "folded": "GET / HTTP/1.1\r\nhost: localhost\r\nx-request-id: a\r\n b\r\n\r\n",
    "bare lf": "GET / HTTP/1.1\nhost: localhost\n\n",
    "bare cr": "GET / HTTP/1.1\rhost: localhost\r\r",
    "nul": "GET / HTTP/1.1\r\nhost: localhost\r\nx-a: \0\r\n\r\n",
    "length and chunked": f"{POST} HTTP/1.1\r\nhost: localhost\r\n{LENGTH}\r\n{CHUNKED}\r\n\r\n0\r\n\r\n",
    "two lengths": f"{POST} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3\r\ncontent-length: 5\r\n\r\nabcde",
    "list of lengths": f"{POST} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5, 5\r\n\r\nabcde",
    "signed length": f"{POST} HTTP/1.1\r\nhost: localhost\r\ncontent-length: +5\r\n\r\nabcde",
    "negative length": f"{POST} HTTP/1.1\r\nhost: localhost\r\ncontent-length: -5\r\n\r\nabcde",
    "hex length": f"{POST} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0x5\r\n\r\nabcde",
    "endless length": f"{POST} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {'9' * 40}\r\n\r\nabcde",
    "two codings": f"{POST} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "odd coding": f"{POST} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "hidden coding": f"{POST} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
    "expect": f"{POST} HTTP/1.1\r\nhost: localhost\r\nexpect: a miracle\r\n{LENGTH}\r\n\r\n",
    "odd host": "GET / HTTP/1.1\r\nhost: [::1\r\n\r\n",
}
ODD_CHUNKS = {
    "no number": b"zz\r\nabc\r\n0\r\n\r\n",
    "negative": b"-1\r\nabc\r\n0\r\n\r\n",
    "too large": b"ffffffffffffffffff\r\nabc\r\n",
    "large": b"7fffffffffffffff\r\nabc\r\n",
    "too short": b"ff\r\nabc\r\n0\r\n\r\n",
    "too long": b"1\r\nabcdef\r\n0\r\n\r\n",
    "no end": b"3\r\nabc\r\n",
    "extension": b"3;" + b"x" * 100_000 + b"\r\nabc\r\n0\r\n\r\n",
    "trailer": b"0\r\nhost: evil.example\r\ncontent-length: 5\r\n\r\n",
    "trailers": b"0\r\n" + b"x: y\r\n" * 20_000 + b"\r\n",
    "spaces": b" 3 \r\nabc\r\n0\r\n\r\n",
}


def check(door: str, answer: bytes) -> None:
    """No answer is the server's fault."""
    for status in statuses(answer):
        assert status < 500 or door in NOT_OURS, answer[:500]
    assert b"Traceback" not in answer


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("seed", range(3))
def test_random_bytes_harm_nobody(target: Target, door: str, seed: int) -> None:
    rng = random.Random(seed)
    for size in (1, 17, 1_000, 70_000):
        check(door, send(target.doors[door], rng.randbytes(size), end=rng.choice(list(End)), quiet_s=0.3))
        broken = bytearray(WHOLE)
        for _ in range(1 + size % 5):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        check(door, send(target.doors[door], bytes(broken), quiet_s=0.3))


def test_random_bytes_on_ports_that_speak_something_else_harm_nobody(target: Target) -> None:
    rng = random.Random(1)
    assert target.others, "the cluster's own ports are among them"
    for port in target.others:
        for data in (rng.randbytes(1_000), b"\x00" * 100, WHOLE, ODD_LINES["http2"]):
            send(port, data, end=rng.choice(list(End)), quiet_s=0.1, bytes_max=100_000)


@pytest.mark.parametrize("door", DOORS)
def test_odd_request_lines_are_the_clients_fault(target: Target, door: str) -> None:
    for data in ODD_LINES.values():
        check(door, send(target.doors[door], data, quiet_s=0.5))


@pytest.mark.parametrize("door", DOORS)
def test_odd_headers_are_the_clients_fault(target: Target, door: str) -> None:
    for text in ODD_HEADERS.values():
        check(door, send(target.doors[door], text.encode("latin-1"), quiet_s=0.5))


@pytest.mark.parametrize("door", ["front", "fallback", "gateway", "engine"])
def test_bad_chunking_is_the_clients_fault(target: Target, door: str) -> None:
    for body in ODD_CHUNKS.values():
        check(door, send(target.doors[door], request(POST, JSON, CHUNKED, body=body), quiet_s=0.5))


def test_a_request_hidden_behind_another_ones_body_is_never_run(target: Target) -> None:
    """Length against chunked: were the two ends to disagree, the hidden request would be answered too."""
    hidden = request("GET /v1/models")
    for headers in (
        ("content-length: 5", CHUNKED), (f"content-length: {5 + len(hidden)}", CHUNKED),
        ("transfer-encoding: identity", f"content-length: {5 + len(hidden)}"),
        (f"content-length: {5 + len(hidden)}", "transfer-encoding:\x0bchunked"),
    ):  # fmt: skip
        for door in ("front", "gateway", "engine"):
            answer = send(target.doors[door], request(POST, JSON, *headers, body=b"0\r\n\r\n" + hidden), quiet_s=0.5)
            check(door, answer)
            assert b'"owned_by"' not in answer


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("end", list(End))
def test_half_requests_leave_nothing_behind(target: Target, door: str, end: End) -> None:
    before = target.fds()
    for cut in (1, len(WHOLE) // 3, len(WHOLE) - len(BODY), len(WHOLE) - len(BODY) + 1, len(WHOLE) - 1):
        check(door, send(target.doors[door], WHOLE[:cut], end=end, quiet_s=0.2))
    until(lambda: target.fds() <= before + 8, "connections are closed", 30)


@pytest.mark.parametrize("door", ["front", "gateway", "engine"])
def test_slow_heads_keep_no_other_client_waiting_and_end(target: Target, door: str) -> None:
    before = target.fds()
    socks = [connect(target.doors[door], 60) for _ in range(200)]
    try:
        for byte in b"GET / HTTP":
            for sock in socks:
                sock.sendall(bytes([byte]))
        assert loopback.get(f"{target.system.url}/health", timeout=20).status_code == 200
        if door != "front":  # HAProxy gives a head more time (`haproxy.HEAD_S_MAX`) than is waited for here
            assert statuses(b"".join(read_end(sock) for sock in socks)) == [408] * 200
    finally:
        for sock in socks:
            sock.close()
    until(lambda: target.fds() <= before + 8, "connections are closed", 30)


def read_end(sock: object) -> bytes:
    """All until the server closes."""
    found = b""
    while more := sock.recv(65_536):  # type: ignore[attr-defined]
        found += more
    return found


def test_slow_bodies_end_with_a_408(target: Target) -> None:
    socks = [connect(target.doors["gateway"], 30) for _ in range(20)]
    try:
        for sock in socks:
            sock.sendall(WHOLE[: len(WHOLE) - len(BODY) + 5])
        assert statuses(b"".join(read_end(sock) for sock in socks)) == [408] * 20
    finally:
        for sock in socks:
            sock.close()


@pytest.mark.parametrize("door", ["front", "gateway", "engine"])
@pytest.mark.parametrize(
    ("begin", "part"),
    [(b"", b"a"), (b"GET /", b"a"), (request("GET /v1/models")[:-2], b"x: y\r\n"),
     (request("GET /v1/models")[:-2] + b"x: ", b"a")],
    ids=["method", "path", "headers", "header"],
)  # fmt: skip
def test_a_head_without_end_is_cut_and_not_kept(target: Target, door: str, begin: bytes, part: bytes) -> None:
    before = target.rss_mib()
    part *= 60_000 // len(part)
    sent = 0
    with connect(target.doors[door], 20) as sock:
        try:
            sock.sendall(begin)
            while sent < 64_000_000:
                sock.sendall(part)
                sent += len(part)
        except OSError:
            pass
    assert sent < 32_000_000
    assert target.rss_mib() < before + 32


@pytest.mark.parametrize("door", DOORS)
def test_huge_heads_are_the_clients_fault(target: Target, door: str) -> None:
    for data in (
        request("GET /" + "a" * 60_000), request("GET /v1/models?" + "a" * 60_000),
        request("GET /v1/models", *[f"x-{n}: y" for n in range(2_000)]),
        request("GET /v1/models", "x: " + "a" * 1_000_000),
        request("GET /v1/models", "x-request-id: " + "a" * 1_000_000),
        request("GET /v1/models", "authorization: Bearer " + "a" * 15_000),
    ):  # fmt: skip
        check(door, send(target.doors[door], data, quiet_s=0.5))


@pytest.mark.parametrize("door", ["front", "fallback", "gateway"])
def test_headers_that_are_no_text_change_nothing(target: Target, door: str) -> None:
    names = (
        "x-request-id", "x_request_id", "x-request-timeout-seconds", "x-request-disconnect-disabled", "x-session-id",
        "x_session-id", "serve_multiplexed_model_id", "serve-multiplexed_model-id", "traceparent", "tracestate",
        "x-forwarded-for", "forwarded", "user-agent", "accept", "cookie", "content-encoding", "x-api-key",
        "authorization", "x-tidegate-task", "x-tidegate-class", "x-tidegate-deadline-ms", "x-tidegate-task-outcome",
        "x-tidegate-gate", "x-tidegate-replica",
    )  # fmt: skip
    for name in names:
        for value in ("\xff\xfe", "\xc3\x28", "a" * 7_000, "1e999", "-1", "nan", '"\\', "a\tb"):
            data = request(POST, JSON, LENGTH, f"{name}: {value}", "connection: close", body=BODY)
            answer = send(target.doors[door], data, quiet_s=5)
            check(door, answer)
            assert statuses(answer), (name, value)
            if door != "fallback":  # Serve's own proxy says a client's request id again
                assert "a" * 1_000 not in answer.decode("latin-1")


@pytest.mark.parametrize("door", ["front", "gateway"])
def test_pipelined_requests_are_answered_in_order_or_refused(target: Target, door: str) -> None:
    count = 20
    answer = send(target.doors[door], request("GET /v1/models") * count, quiet_s=3, end=End.WAIT)
    assert statuses(answer) == [200] * count
    flood = send(target.doors[door], request("GET /v1/models") * 20_000, quiet_s=3, end=End.WAIT)
    assert set(statuses(flood)) <= {200, 400}


def test_clients_that_leave_at_any_moment_leave_nothing_behind(target: Target) -> None:
    before = target.fds()
    rng = random.Random(3)
    streamed = json.dumps(CHAT | {"stream": True, "max_tokens": 400, "ignore_eos": True}).encode()
    data = request(POST, JSON, f"content-length: {len(streamed)}", body=streamed)
    for n in range(150):
        with connect(target.doors["front" if n % 2 else "gateway"]) as sock:
            sock.sendall(data[: len(data) if n % 3 else rng.randrange(len(data))])
            time.sleep(rng.uniform(0, 0.03))
    until(target.system.idle, "everything given back", 60)
    until(lambda: target.fds() <= before + 8, "connections are closed", 30)
