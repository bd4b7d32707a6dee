"""Values set by hand and shadow mode on a live fleet: they win, they outlive the controller, and they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import httpx
import pytest

from tests import loopback
from tests.serve.control.conftest import WITHIN_S, Load, decisions, fault_at, get, last_seq
from tests.serve.gateway.conftest import ROOT, System, until

pytestmark = [pytest.mark.serve, pytest.mark.timeout(400)]

BY_HAND = 33
"""Tokens a step: below what the tuner may choose (``batching.step_tokens_min``), so that it leaves it at once."""


def step_tokens(system: System) -> dict[str, int]:
    """The token budget that each engine says is in force."""
    found = (get(system, "state") or {"replicas": []})["replicas"]
    return {replica["replica_id"]: replica["knobs"]["step_tokens_max"] for replica in found}


def at_work(system: System) -> str | None:
    """A replica that has work now and is not about to leave."""
    replicas = (get(system, "state") or {"replicas": []})["replicas"]
    busy = [r for r in replicas if r["state"] == "ready" and r["running"]]
    return max(busy, key=lambda r: (r["running"], r["replica_id"]))["replica_id"] if busy else None


def put(system: System, path: str, body: dict[str, Any]) -> httpx.Response:
    return loopback.post(f"{system.url}/control/{path}", json=body, timeout=20)


def test_an_override_outlives_the_controller_and_ends_when_it_is_taken_back(system: System) -> None:
    with Load(system.url, 6):  # an engine takes new values between two steps
        target = until(lambda: at_work(system), "a replica at work", WITHIN_S)
        body = {"knob": "step_tokens_max", "value": BY_HAND, "target": target, "expires_in_s": 600, "why": "a drill"}
        made = put(system, "overrides", body)
        assert made.status_code == 200, made.text
        until(lambda: step_tokens(system).get(target) == BY_HAND, "the engine follows", WITHIN_S)
        assert [name for name, tokens in step_tokens(system).items() if tokens == BY_HAND] == [target]
        old = get(system, "state")
        os.kill(old["pid"], signal.SIGKILL)

        def adopted() -> bool:
            state, held = get(system, "state"), get(system, "overrides")
            if state is None or held is None or state["epoch"] == old["epoch"] or state["plan"] is None:
                return False
            return [(o["id"], o["value"], o["why"]) for o in held["data"]] == [(made.json()["id"], BY_HAND, "a drill")]

        until(adopted, "a new controller that knows of the override", WITHIN_S)
        until(lambda: (get(system, "state") or {"tick": 0})["tick"] > 10, "ten more ticks", WITHIN_S)
        assert step_tokens(system)[target] == BY_HAND
        assert get(system, "state")["plan"]["knobs"][target]["step_tokens_max"] == BY_HAND
        gone = loopback.delete(f"{system.url}/control/overrides/{made.json()['id']}", timeout=20)
        assert gone.status_code == 200, gone.text
        until(lambda: step_tokens(system).get(target) not in (None, BY_HAND), "the tuner's own value", WITHIN_S)
    assert get(system, "overrides")["data"] == []


def test_an_override_that_makes_no_sense_is_refused_and_changes_nothing(system: System) -> None:
    for body, param in (
        ({"knob": "step_tokens_max", "value": 64, "target": "nobody"}, "target"),
        ({"knob": "step_token_max", "value": 64}, "knob"),
        ({"knob": "step_tokens_max", "value": "many"}, "value"),
        ({"knob": "step_tokens_max", "value": 64, "expires_in_s": 1e9}, "expires_in_s"),
    ):
        refused = put(system, "overrides", body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
    assert get(system, "overrides")["data"] == []


def test_in_shadow_mode_what_would_be_done_is_written_down_and_what_stands_stays(system: System) -> None:
    slow = min(step_tokens(system))
    assert put(system, "shadow", {"shadow": True, "expires_in_s": 600}).status_code == 200
    assert {row["mode"] for row in get(system, "shadow")["data"]} == {"shadow"}
    shadowed = get(system, "state")["tick"]
    until(lambda: get(system, "state")["tick"] > shadowed + 2, "ticks in shadow mode", WITHIN_S)
    running, seq = len(system.counters()), last_seq(system)
    stands = standing(system)

    def moved() -> list[dict[str, Any]]:
        return [e for e in decisions(system, seq) if e["before"] != e["after"] and e["lever"] != "guard"]

    with Load(system.url, 9, tokens=60):
        fault_at(system, slow, slow_factor=6.0)  # one sequence alone misses the pace there: it would be held at few
        until(moved, "decisions", WITHIN_S)
        fault_at(system, slow, slow_factor=1.0)
    assert {entry["acted"] for entry in moved()} == {False}
    assert len(system.counters()) == running
    assert standing(system) == stands


def standing(system: System) -> tuple[Any, Any]:
    """What the plan says of the fleet's size and of every engine."""
    plan = get(system, "state")["plan"]
    return plan["replicas_target"], plan["knobs"]


def test_every_decision_is_explained_on_the_command_line(system: System) -> None:
    entries = decisions(system)
    assert entries
    for entry in entries[-3:]:
        command = [sys.executable, "-m", "deployments.cli", "explain", str(entry["seq"]), "--url", system.url]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        told = done.stdout
        assert f"#{entry['seq']}" in told
        assert entry["reason"]["code"] in told
        for part in ("What changed", "Why", "Considered", "Predicted", "What happened"):
            assert part in told
        for name in entry["after"]:
            assert name in told
