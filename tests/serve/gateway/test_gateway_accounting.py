"""Truthful accounting: each request ends once, with one reason, one log line, one count, and one trace if asked for."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from tests import loopback
from tests.serve.gateway.conftest import ARGS, MODEL, System, until

pytestmark = [pytest.mark.serve, pytest.mark.timeout(180)]

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Name a river."}], "max_tokens": 5}
PATH = "/v1/chat/completions"
SECRET_TEXT = "Whose lighthouse is it"


def connect(system: System) -> socket.socket:
    host, port = system.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), 30)


def message(body: object, path: str = PATH, extra: bytes = b"") -> bytes:
    raw = json.dumps(body).encode()
    head = b"POST %s HTTP/1.1\r\nhost: localhost\r\n%scontent-length: %d\r\n\r\n"
    return head % (path.encode(), extra, len(raw)) + raw


def answer_of(sock: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer that says its length."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += sock.recv(65_536)
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    while len(body) < int(headers["content-length"]):
        body += sock.recv(65_536)
    return int(first.split()[1]), headers, body


def counts(system: System) -> Counter[tuple[str, ...]]:
    """Requests that ended, by endpoint, outcome and reason."""
    page, found = loopback.get(f"{system.url}/metrics", timeout=20).text, Counter[tuple[str, ...]]()
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == "tidegate_requests_total":
                labels = sample.labels
                found[labels["endpoint"], labels["outcome"], labels["reason"]] = int(sample.value)
    return found


class Log:
    """The gateway's log from now on."""

    def __init__(self) -> None:
        node = ray._private.worker._global_node
        assert node is not None
        time.sleep(0.6)  # lines of earlier requests are written a quarter of a second late
        self._folder = Path(node.get_logs_dir_path()) / "serve"
        self._begin = {path: path.stat().st_size for path in self._files()}

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("replica_*Gateway*.log"))

    def text(self) -> str:
        return "".join(path.read_text(encoding="utf-8")[self._begin.get(path, 0) :] for path in self._files())

    def lines(self) -> list[dict[str, Any]]:
        """Lines of requests that ended."""
        found = [json.loads(line[line.index("{") :]) for line in self.text().splitlines() if '"request_end"' in line]
        return [line for line in found if line["endpoint"] != "/metrics"]


def lines_of(log: Log, count: int) -> list[dict[str, Any]]:
    until(lambda: len(log.lines()) >= count, f"{count} lines in the log", 60)
    time.sleep(0.3)  # a second line of a request would come about now
    return log.lines()


def test_each_request_is_one_line_and_one_count_however_it_ends(system: System) -> None:
    log, before = Log(), counts(system)
    with loopback.Client(base_url=system.url, timeout=30) as client:
        assert client.post(PATH, json=CHAT).status_code == 200
        assert client.post(PATH, json=CHAT | {"stream": True}).status_code == 200
        assert client.post(PATH, json=CHAT | {"model": "other"}).status_code == 404
        assert client.post(PATH, content=b"{").status_code == 400
        assert client.post("/v1/nothing").status_code == 404
        assert client.get(PATH).status_code == 405
        assert client.post(PATH, json=CHAT | {"max_tokens": -1}).status_code == 400
        assert client.post(PATH, json=CHAT | {"user": "x" * ARGS["gateway"]["body_bytes_max"]}).status_code == 413
        with client.stream("POST", PATH, json=CHAT | {"stream": True, "max_tokens": 3_000, "ignore_eos": True}) as got:
            next(got.iter_raw())
    with connect(system) as sock:
        sock.sendall(message(CHAT)[:-5])
        time.sleep(0.3)
    expected = Counter(
        {
            (PATH, "succeeded", "ok"): 2,
            (PATH, "refused", "model_not_found"): 1,
            (PATH, "refused", "invalid_json"): 1,
            ("unknown", "refused", "unknown_url"): 1,
            (PATH, "refused", "method_not_allowed"): 1,
            (PATH, "failed", "engine_client_error"): 1,
            (PATH, "refused", "request_too_large"): 1,
            (PATH, "cancelled", "client_gone"): 2,
        }
    )
    lines = lines_of(log, expected.total())
    assert Counter((line["endpoint"], line["outcome"], line["reason"]) for line in lines) == expected
    assert counts(system) - before == expected
    assert len({line["id"] for line in lines}) == len(lines)
    statuses = {(line["reason"], line["status"]) for line in lines}
    assert {("ok", 200), ("model_not_found", 404), ("engine_client_error", 400), ("request_too_large", 413)} <= statuses


def test_a_streams_line_splits_its_ttft_and_says_who_served_it(system: System) -> None:
    log = Log()
    headers = {"x-tidegate-task": "goal-1", "x-tidegate-class": "interactive", "x-request-id": "mine"}
    body = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
    answer = loopback.post(system.url + PATH, json=body, headers=headers, timeout=30)
    (line,) = lines_of(log, 1)
    assert line["id"] == answer.headers["x-request-id"]
    assert (line["client_id"], line["task"], line["class"]) == ("mine", "goal-1", "interactive")
    assert line["replicas"] == [answer.headers["x-tidegate-replica"]]
    assert (line["ends"], line["attempts"], line["resumed"], line["hedged"]) == (["ok"], 1, 0, False)
    assert line["queue_ms"] + line["route_ms"] + line["engine_ttft_ms"] == pytest.approx(line["ttft_ms"], abs=0.002)
    assert 0 <= line["route_ms"] < line["engine_ttft_ms"] < line["ttft_ms"] <= line["e2e_ms"]
    usage = json.loads(answer.text.split("data: ")[-2])["usage"]
    assert (line["prompt_tokens"], line["output_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])


def test_a_line_says_how_each_attempt_ended(system: System) -> None:
    first = loopback.post(system.url + PATH, json=CHAT, timeout=30).headers["x-tidegate-replica"]
    log = Log()
    system.engine.broadcast("set_faults", {"kind": "unavailable"}, first).results(timeout_s=20)
    asked = 0
    with loopback.Client(base_url=system.url, timeout=30) as client:
        while asked < 40 and not any(line["attempts"] == 2 for line in lines_of(log, asked)):
            body = CHAT | {"messages": [{"role": "user", "content": f"{asked} names {asked * 7_919 % 1_000}."}]}
            assert client.post(PATH, json=body).status_code == 200
            asked += 1
    lines = lines_of(log, asked)
    assert len(lines) == asked
    again = [line for line in lines if line["attempts"] == 2]
    assert again
    for line in again:
        assert line["ends"] == ["unavailable", "ok"]
        assert line["replicas"][0] == first != line["replicas"][1]
    assert all(line["ends"] == ["ok"] for line in lines if line not in again)


def test_the_log_holds_no_prompt_and_no_answer(system: System) -> None:
    log = Log()
    body = CHAT | {"messages": [{"role": "user", "content": SECRET_TEXT}], "user": SECRET_TEXT}
    answer = loopback.post(system.url + PATH, json=body, timeout=30).json()["choices"][0]["message"]["content"]
    assert loopback.post(system.url + PATH, json=body | {"max_tokens": -1}, timeout=30).status_code == 400
    assert loopback.post(system.url + PATH, content=json.dumps(body)[:-3], timeout=30).status_code == 400
    lines_of(log, 3)
    assert SECRET_TEXT not in log.text()
    assert answer.strip() not in log.text()


def test_a_traced_request_is_one_trace_below_its_callers(system: System) -> None:
    log, trace_id = Log(), "0af7651916cd43dd8448eb211c80319c"
    assert system.collector is not None
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    assert loopback.post(system.url + PATH, json=CHAT, headers=headers, timeout=30).status_code == 200
    assert loopback.post(system.url + PATH, json=CHAT, timeout=30).status_code == 200
    until(system.collector.spans, "spans at the collector", 60)
    spans = system.collector.spans()
    assert {span.trace_id.hex() for span in spans} == {trace_id}
    (root,) = [span for span in spans if span.name == "gateway.request"]
    assert root.parent_span_id.hex() == "b7ad6b7169203331"
    assert {span.name for span in spans if span.parent_span_id == root.span_id} >= {"route", "attempt"}
    traced = [line for line in lines_of(log, 2) if line["trace_id"] == trace_id]
    assert len(traced) == 1


def test_a_slow_body_ends_with_408_in_openais_shape(system: System) -> None:
    with connect(system) as sock:
        sock.sendall(message(CHAT)[:-5])
        status, headers, body = answer_of(sock)
    assert (status, headers["content-type"]) == (408, "application/json")
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "request_timeout")
    assert "not complete after 3 s" in error["message"]


def test_a_body_that_comes_slowly_but_in_time_is_served(system: System) -> None:
    raw = message(CHAT)
    with connect(system) as sock:
        for at in range(0, len(raw), 60):
            sock.sendall(raw[at : at + 60])
            time.sleep(0.05)
        assert answer_of(sock)[0] == 200


BIG = CHAT | {
    "stream": True, "n": 16, "max_tokens": 1_200, "ignore_eos": True, "logprobs": True, "top_logprobs": 20,
}  # fmt: skip
"""Some 28 MB of answer: more than the kernel's buffers on the way can grow to."""


def test_a_slow_reader_holds_no_engine_memory(system: System) -> None:
    with connect(system) as sock:
        sock.sendall(message(BIG, extra=b"connection: close\r\n"))
        read = len(sock.recv(1_000))
        assert system.total("kv_tokens_used") > 0
        while system.total("kv_tokens_used") + system.total("running"):
            read += len(sock.recv(40_000))
            time.sleep(0.05)
        page = loopback.get(f"{system.url}/metrics", timeout=20).text
        assert "tidegate_inflight_requests 1.0" in page  # the answer is still on its way
        rest = b""
        while part := sock.recv(1_000_000):
            read += len(part)
            rest = (rest + part)[-100:]
    assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert read > 20_000_000


def test_a_reader_that_stops_is_given_up(system: System) -> None:
    log = Log()
    with connect(system) as sock:
        sock.sendall(message(BIG))
        assert sock.recv(1_000)
        until(log.lines, "the request's end", 30)
        (line,) = lines_of(log, 1)
    assert (line["outcome"], line["reason"], line["status"]) == ("cancelled", "client_gone", 200)
    assert line["e2e_ms"] >= ARGS["gateway"]["client_idle_timeout_ms"]
