"""Cases 8, 15, 17 and 19: hot spots, overload, draining, and one long prompt among short ones."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest
from ray import serve

from deployments.app import build
from tests import loopback
from tests.serve.cases.conftest import (
    APP,
    ARGS,
    CHAT,
    COMPLETIONS,
    QUEUE_MAX,
    REPLICAS,
    all_serve,
    at_once,
    by_replica,
    completion,
    metric,
)
from tests.serve.gateway.conftest import MODEL, System, until

pytestmark = [pytest.mark.serve, pytest.mark.timeout(240)]


# --- 8: hot spots -----------------------------------------------------------------------------------------------------


def body_of(path: str, prompt: str, stream: bool) -> dict[str, Any]:
    user = [{"role": "user", "content": prompt}]
    return {
        CHAT: {"model": MODEL, "messages": user, "max_tokens": 20, "stream": stream, "ignore_eos": True},
        COMPLETIONS: completion(prompt, 20, stream=stream),
        "/v1/responses": {"model": MODEL, "input": prompt, "max_output_tokens": 20, "stream": stream},
        "/v1/messages": {"model": MODEL, "messages": user, "max_tokens": 20, "stream": stream},
    }[path]


@pytest.mark.parametrize("tokens", [20, 1])
def test_case_8_a_prefix_that_all_share_does_not_gather_them_on_one_replica(system: System, tokens: int) -> None:
    prefix = "shared " * 2_000
    paths = (CHAT, COMPLETIONS, "/v1/responses", "/v1/messages")
    before = by_replica(system, "requests")

    def ask(n: int) -> int:
        body = body_of(paths[n % 4], f"{prefix} {n}", n % 8 < 4)
        for name in ("max_tokens", "max_output_tokens"):
            body |= {name: tokens} if name in body else {}
        return loopback.post(system.url + paths[n % 4], json=body, timeout=60).status_code

    statuses = at_once(64, ask)
    now = by_replica(system, "requests")
    served = [now[name] - count for name, count in before.items()]
    assert set(statuses) <= {200, 429}
    assert sum(served) >= 16
    assert max(served) <= 2 * sum(served) / REPLICAS, served


# --- 15: overload -----------------------------------------------------------------------------------------------------


def test_case_15_far_above_capacity_the_rest_is_refused_at_once_and_told_when_to_come_back(system: System) -> None:
    system.faults(slow_factor=10.0)
    before = system.total("requests")
    queued: list[float] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            queued.append(metric(system, "tidegate_queued_requests"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    answers = at_once(
        160, lambda n: loopback.post(system.url + COMPLETIONS, json=completion(f"{n} far above", 20), timeout=90)
    )
    over.set()
    watcher.join()
    refused = [answer for answer in answers if answer.status_code != 200]
    assert {answer.status_code for answer in refused} == {429}
    assert len(refused) >= 80
    for answer in refused:
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] in ("overloaded", "queue_full", "queue_timeout", "shed")
    assert max(queued) <= QUEUE_MAX
    assert system.total("requests") - before == 160 - len(refused), "what was refused reached no engine"


# --- 17: draining -----------------------------------------------------------------------------------------------------


def test_case_17_a_rolling_update_cuts_no_stream_and_refuses_nobody(system: System) -> None:
    old = set(by_replica(system, "requests"))
    body = completion("long", 1_200, stream=True)
    calm = loopback.post(system.url + COMPLETIONS, json=body, timeout=90).text
    found: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda: found.append(loopback.post(system.url + COMPLETIONS, json=body, timeout=120)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    until(lambda: system.total("running") == 8, "open streams", 20)
    model = ARGS["model"] | {"report_interval_ms": 250}
    update = threading.Thread(target=lambda: serve.run(build(ARGS | {"model": model}), name=APP, route_prefix="/"))
    update.start()
    statuses: list[int] = []
    while update.is_alive():
        statuses.append(loopback.post(system.url + COMPLETIONS, json=completion("short"), timeout=60).status_code)
    for thread in threads:
        thread.join()
    assert set(statuses) == {200}
    assert [events_of(answer.text) for answer in found] == [events_of(calm)] * 8
    until(lambda: system.try_faults() and not old & set(by_replica(system, "requests")), "new engines only", 60)
    until(lambda: all_serve(system), "all new engines serve", 60)


def events_of(text: str) -> tuple[int, bool, bool]:
    """Events, whether it ended properly, whether it carries an error."""
    return text.count("data: "), text.endswith("data: [DONE]\n\n"), '"error"' in text


# --- 19: one long prompt ----------------------------------------------------------------------------------------------


def test_case_19_short_requests_go_past_one_long_prompt(system: System) -> None:
    system.faults(slow_factor=20.0)
    order: list[int] = []
    where: dict[int, str] = {}

    def ask(n: int, prompt: str) -> None:
        with loopback.stream(
            "POST", system.url + COMPLETIONS, json=completion(prompt, 3, stream=True), timeout=90
        ) as got:
            got.read()
            order.append(n)
            where[n] = got.headers.get("x-tidegate-replica", f"refused: {got.status_code}")

    long = threading.Thread(target=ask, args=(99, "long " * 6_000))
    long.start()
    until(lambda: system.total("prefill_backlog_tokens") > 0, "a long prompt in the works", 20)
    at_once(10, lambda n: ask(n, f"{n} short"))
    long.join()
    assert order[-1] == 99, "all short ones were answered before the long one"
    assert where[99] not in [where[n] for n in range(10)], where
