"""Cases 1, 2 and 9: clients that leave, and what many requests leave behind."""

from __future__ import annotations

import json
import random
import socket
import time

import httpx
import pytest

from tests import loopback
from tests.serve.cases.conftest import (
    COMPLETIONS,
    INDEX_MAX,
    NO_FAULTS,
    QUEUE_MAX,
    at_once,
    by_replica,
    completion,
    metric,
)
from tests.serve.gateway.conftest import System, until

pytestmark = [pytest.mark.serve, pytest.mark.timeout(240)]


def send(system: System, body: dict[str, object], share: float = 1.0) -> socket.socket:
    """A connection on which this part of a request was sent."""
    host, port = system.url.removeprefix("http://").split(":")
    raw = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(raw)}\r\n\r\n".encode()
    sock = socket.create_connection((host, int(port)), 20)
    sock.sendall((head + raw)[: int(len(head + raw) * share)])
    return sock


@pytest.mark.parametrize("slow_body", [False, True])
def test_case_1_three_rounds_of_dropped_clients_leave_no_slot_taken(system: System, slow_body: bool) -> None:
    rng = random.Random(slow_body)
    for _ in range(3):
        plan = [(rng.uniform(0, 0.05), rng.random() < 0.5, rng.uniform(0.3, 1.0)) for _ in range(100)]

        def drop(n: int, plan: list[tuple[float, bool, float]] = plan) -> None:
            delay_s, stream, share = plan[n]
            with send(system, completion(f"{n} drop", 500, stream=stream), share if slow_body else 1.0):
                time.sleep(delay_s)

        at_once(100, drop)
        until(system.idle, "no slot taken at gateway and engines", 60)
        assert metric(system, "tidegate_queued_requests") == 0
        good = at_once(8, lambda n: loopback.post(system.url + COMPLETIONS, json=completion(f"{n} ok"), timeout=30))
        assert [answer.status_code for answer in good] == [200] * 8
    assert system.total("tokens_after_abort") == 0


def test_case_2_work_whose_client_left_the_queue_never_reaches_an_engine(system: System) -> None:
    system.faults(slow_factor=40.0)
    before = system.total("requests")
    socks = [send(system, completion(f"{n} " + "word " * 50, 400, stream=True)) for n in range(64)]
    queued = until(lambda: metric(system, "tidegate_queued_requests"), "a queue", 20)
    assert queued <= QUEUE_MAX
    at_engines = system.total("requests") - before
    for sock in socks:
        sock.close()
    until(lambda: metric(system, "tidegate_queued_requests") == 0, "an empty queue", 60)
    system.faults(slow_factor=1.0)
    until(system.idle, "everything given back", 60)
    assert at_engines < 64
    assert system.total("requests") - before <= at_engines + 4, "what waited was dropped, not sent"


def test_case_9_many_unique_prompts_aborts_and_faults_leave_nothing_behind(system: System) -> None:
    rng = random.Random(9)
    plan = [(rng.randint(2_000, 8_000), rng.random(), rng.random() < 0.5) for _ in range(600)]
    kinds = ("error", "cut", "unavailable", "none")

    def ask(n: int) -> int:
        size, luck, stream = plan[n]
        body = completion(f"{n} {rng.random()} " + "x" * size, 3, stream=stream)
        if luck < 0.1:
            with send(system, body):
                time.sleep(luck / 10)
            return 0
        try:
            return loopback.post(system.url + COMPLETIONS, json=body, timeout=60).status_code
        except httpx.RemoteProtocolError:  # cut in the middle of a whole answer: the client is told so
            return 0

    statuses: list[int] = []
    for part in range(0, len(plan), 24):
        system.faults(kind=kinds[part // 24 % 4], share=0.05)
        statuses += at_once(24, lambda n, part=part: ask(part + n))  # type: ignore[misc]
    system.faults(**NO_FAULTS)
    until(system.idle, "everything given back", 60)
    assert statuses.count(200) > 400
    assert metric(system, "tidegate_queued_requests") == 0
    assert 0 < metric(system, "tidegate_prefix_index_blocks") <= INDEX_MAX
    assert all(count == 0 for count in by_replica(system, "running").values())
