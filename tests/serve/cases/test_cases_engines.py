"""Cases 4, 6, 12 and 16: engines that fail, stall or fall silent about themselves."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import loopback
from tests.serve.cases.conftest import (
    CHAT,
    COMPLETIONS,
    REPLICAS,
    RETRY_BURST,
    at_once,
    by_replica,
    completion,
    fault_at,
    metric,
)
from tests.serve.gateway.conftest import MODEL, System, until

pytestmark = [pytest.mark.serve, pytest.mark.timeout(240)]


FRESH = itertools.count(1_000)
"""Requests that nobody sent before: one that breaks off on two replicas is refused when it comes again."""


def ask(system: System, number: int, tokens: int = 5, **more: Any) -> httpx.Response:
    return loopback.post(system.url + COMPLETIONS, json=completion(f"{number} ask", tokens, **more), timeout=90)


def events(text: str) -> list[str]:
    return [line[6:] for line in text.splitlines() if line.startswith("data: ")]


def text_of(answer: httpx.Response) -> str:
    return "".join(json.loads(e)["choices"][0]["text"] for e in events(answer.text) if e != "[DONE]")


# --- 4: half-alive ----------------------------------------------------------------------------------------------------


def test_case_4_an_engine_that_makes_no_tokens_is_replaced_and_its_requests_go_elsewhere(system: System) -> None:
    before = set(by_replica(system, "requests"))
    frozen, doors = door_of(system)
    wanted = [text_of(ask(system, n, 60, stream=True)) for n in range(12)]
    fault_at(system, frozen, kind="freeze", after_tokens=10)
    answers = at_once(12, lambda n: ask(system, n, 60, stream=True))
    assert [answer.status_code for answer in answers] == [200] * 12
    assert [text_of(answer) for answer in answers] == wanted
    assert all(answer.text.endswith("data: [DONE]\n\n") for answer in answers)

    def hold() -> None:
        with contextlib.suppress(
            httpx.HTTPError
        ):  # the gateway leaves it alone: work that stays, as another one's would
            loopback.post(doors[0] + COMPLETIONS, json=completion("hold", 60), headers=doors[1], timeout=90)

    holder = threading.Thread(target=hold)
    holder.start()
    until(lambda: replaced(system, frozen), "a new engine", 90)
    holder.join()
    assert before - {frozen} <= set(by_replica(system, "requests")), "engines that idle or work are no victims"


def door_of(system: System) -> tuple[str, tuple[str, dict[str, str]]]:
    """Some engine's id, and its own port."""
    url, gate = system.doors()[0]
    before = by_replica(system, "requests")
    assert loopback.post(url + COMPLETIONS, json=completion("who"), headers=gate, timeout=30).status_code == 200
    now = by_replica(system, "requests")
    return next(name for name, count in now.items() if count > before[name]), (url, gate)


def replaced(system: System, gone: str) -> bool:
    """The engine is gone and another one took its place."""
    if not system.try_faults():
        return False
    names = by_replica(system, "requests")
    return gone not in names and len(names) == REPLICAS


# --- 6: stale signals -------------------------------------------------------------------------------------------------


def test_case_6_a_replica_that_was_full_gets_requests_again_when_all_is_aborted(system: System) -> None:
    system.faults(slow_factor=20.0)
    with loopback.Client(base_url=system.url, timeout=30) as http:
        streams = [
            http.send(
                http.build_request("POST", COMPLETIONS, json=completion("y" * 12_000, 2_000, stream=True)), stream=True
            )
            for _ in range(4)
        ]
        assert any(stream.status_code == 200 for stream in streams)
        for stream in streams:
            stream.close()
    system.faults(slow_factor=1.0, signals="freeze")
    answers = at_once(REPLICAS * 4, lambda n: ask(system, n))
    assert [answer.status_code for answer in answers] == [200] * (REPLICAS * 4)


@pytest.mark.parametrize("signals", ["stop", "nan"])
def test_case_6_engines_that_say_nothing_still_serve_and_the_controller_holds(system: System, signals: str) -> None:
    until(lambda: not state(system)["blind"], "a controller that sees", 30)
    decided = {d["seq"] for d in decisions(system)}
    fault_at(system, min(by_replica(system, "requests")), signals=signals)
    assert [answer.status_code for answer in at_once(16, lambda n: ask(system, n))] == [200] * 16
    system.faults(signals=signals)
    if signals == "stop":
        until(lambda: not any(r["fresh"] for r in known(system)), "a controller that knows no replica", 30)
    before = by_replica(system, "requests")
    assert [answer.status_code for answer in at_once(32, lambda n: ask(system, n, 30))] == [200] * 32
    now = by_replica(system, "requests")
    served = [now[name] - count for name, count in before.items()]
    # on a busy machine not all are open at the same time, and one after the other may take the same way
    assert max(served) <= 2.5 * 32 / REPLICAS, "by its own counts the gateway spreads them"
    moved = [d for d in decisions(system) if d["seq"] not in decided and d["acted"] and d["lever"] == "replicas"]
    assert not moved


def decisions(system: System) -> list[dict[str, Any]]:
    """The ledger, once the controller answers: a busy machine may be too slow for one question."""

    def told() -> tuple[list[dict[str, Any]]] | None:
        answer = loopback.get(f"{system.url}/control/decisions?limit=1000", timeout=20)
        return (answer.json(),) if answer.status_code == 200 else None

    (found,) = until(told, "a controller that answers", 30)
    return list(found)


def state(system: System) -> dict[str, Any]:
    """What the controller knows."""
    found: dict[str, Any] = loopback.get(f"{system.url}/control/state", timeout=10).json()
    return found


def known(system: System) -> list[dict[str, Any]]:
    """Replicas as the controller sees them."""
    found: list[dict[str, Any]] = state(system)["replicas"]
    return found


# --- 12: failures in the middle of a stream ---------------------------------------------------------------------------


NOT_EXACT = {"logprobs": 1}
"""A stream that cannot be continued exactly."""


@pytest.mark.parametrize("kind", ["error", "cut", "silence"])
def test_case_12_a_failure_before_the_first_token_is_an_error_status(system: System, kind: str) -> None:
    system.faults(kind=kind, silence_s=0.2)
    answer = ask(system, next(FRESH), 30, stream=True, **NOT_EXACT)
    assert answer.status_code >= 500
    assert answer.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize("kind", ["error", "cut", "silence"])
def test_case_12_a_stream_that_cannot_go_on_ends_with_one_error_object(system: System, kind: str) -> None:
    before = metric(system, "tidegate_requests_total", 'outcome="failed"')
    system.faults(kind=kind, after_tokens=5, silence_s=0.2)
    answer = ask(system, next(FRESH), 30, stream=True, **NOT_EXACT)
    assert answer.status_code == 200
    parts = [json.loads(e) for e in events(answer.text) if e != "[DONE]"]
    assert [bool(part.get("error")) for part in parts].count(True) == 1
    assert parts[-1]["error"]["message"]
    reasons = [c["finish_reason"] for part in parts for c in part.get("choices") or []]
    assert not any(reasons), "nothing says that it is complete"
    until(
        lambda: metric(system, "tidegate_requests_total", 'outcome="failed"') == before + 1, "one failure counted", 10
    )


def test_case_12_a_broken_event_is_no_success_for_a_client(system: System) -> None:
    system.faults(kind="bad_json", after_tokens=5)
    answer = ask(system, next(FRESH), 30, stream=True, **NOT_EXACT)
    assert answer.status_code == 200
    unreadable = 0
    for event in events(answer.text):
        try:
            unreadable += event != "[DONE]" and "error" in json.loads(event)
        except ValueError:
            unreadable += 1
    assert unreadable == 1


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_case_12_and_16_a_stream_cut_after_40_of_60_tokens_goes_on_at_another_replica(
    system: System, path: str
) -> None:
    body = completion("river", 60, stream=True, stream_options={"include_usage": True})
    if path == CHAT:
        body = {**body, "messages": [{"role": "user", "content": body.pop("prompt")}]}
    calm = loopback.post(system.url + path, json=body, timeout=60)
    victim = calm.headers["x-tidegate-replica"]
    for replica_id in by_replica(system, "requests"):
        fault_at(system, replica_id, kind="cut", after_tokens=40)
    before = by_replica(system, "requests")

    def others_work() -> bool:
        return sum(by_replica(system, "requests").values()) > sum(before.values())

    with loopback.stream("POST", system.url + path, json=body, timeout=60) as answer:
        begun = answer.headers["x-tidegate-replica"]
        until(others_work, "a begun request", 10)
        for replica_id in set(before) - {begun}:
            fault_at(system, replica_id, kind="none", after_tokens=0)
        stormy = answer.read().decode()
    assert victim
    assert plain(stormy) == plain(calm.text)


def plain(text: str) -> tuple[str, int, list[str], Any, int]:
    """Text, ids, finish reasons, usage and ends of a stream."""
    said, ids, reasons, usage = "", set(), [], None
    for event in events(text):
        if event == "[DONE]":
            continue
        part = json.loads(event)
        assert "error" not in part, part
        ids.add(part["id"])
        usage = part.get("usage") or usage
        for choice in part["choices"]:
            said += (choice.get("delta") or {}).get("content") or choice.get("text") or ""
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    tokens = (usage or {}).get("prompt_tokens"), (usage or {}).get("completion_tokens")
    return said, len(ids), reasons, tokens, text.count("[DONE]")


# --- 16: retries ------------------------------------------------------------------------------------------------------


def test_case_16_with_every_replica_failing_extra_attempts_stay_within_the_budget(system: System) -> None:
    system.faults(kind="unavailable")
    before = system.total("requests")
    statuses = [ask(system, n).status_code for n in range(60)]
    assert set(statuses) == {503}
    assert system.total("requests") - before <= 60 + RETRY_BURST


def runs(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_case_16_a_dead_replica_of_four_costs_no_request(system: System) -> None:
    victim = system.counters()[0]
    os.kill(victim["pid"], signal.SIGKILL)
    until(lambda: not runs(victim["pid"]), "a dead engine", 30)
    answers = at_once(24, lambda n: ask(system, n))
    assert [answer.status_code for answer in answers] == [200] * 24
    assert victim["replica_id"] not in {answer.headers["x-tidegate-replica"] for answer in answers}
    until(lambda: replaced(system, victim["replica_id"]), "four engines again", 90)


@pytest.mark.parametrize(
    "body", [{"prompt": "x", "temperature": -1}, {"prompt": "x", "max_tokens": 10**9}, {"prompt": []}]
)
def test_case_16_a_clients_own_mistake_is_never_tried_again(system: System, body: dict[str, Any]) -> None:
    before = metric(system, "tidegate_retries_total")
    answer = loopback.post(system.url + COMPLETIONS, json={"model": MODEL} | body, timeout=30)
    assert answer.status_code == 400
    assert metric(system, "tidegate_retries_total") == before


def test_case_16_nothing_is_tried_again_after_the_first_byte_unless_it_is_exact(system: System) -> None:
    system.faults(kind="cut", after_tokens=5)
    before = system.total("requests")
    answer = ask(system, next(FRESH), 30, stream=True, **NOT_EXACT)
    assert "stream_broken" in answer.text
    assert system.total("requests") == before + 1
