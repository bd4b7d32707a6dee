"""Named conditions on a live fleet: found, explained, and met with the lever that cures them, or with none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from ray import serve

from policies.control.catalogue import SPECS
from policies.control.retire import KEPT_S
from policies.steering import Lever
from tests.serve.control.conftest import (
    APP,
    REPLICAS,
    WITHIN_S,
    Load,
    becomes_active,
    decisions,
    ends,
    fault_at,
    get,
    last_seq,
)
from tests.serve.gateway.conftest import System, until

pytestmark = [pytest.mark.serve, pytest.mark.timeout(400)]


def requests_of(system: System) -> dict[str, int]:
    return {c["replica_id"]: int(c["requests"]) for c in system.counters()}


def levers_of(entries: list[dict[str, Any]]) -> list[Lever]:
    """Levers that changed something, in order; what the guard rails wrote is theirs, not a lever's."""
    return [Lever(e["lever"]) for e in entries if e["lever"] != "guard" and e["acted"] and e["before"] != e["after"]]


def explains_itself(row: Mapping[str, Any]) -> None:
    """A condition that is active says with which figures, how sure it is, and what an operator does next."""
    assert row["evidence"], row
    assert row["text"], row
    assert 0 < row["confidence"] <= 1, row
    assert row["next_step"] == SPECS[row["name"]].next_step


def test_a_silent_replica_is_named_and_the_plan_holds(system: System) -> None:
    silent = max(requests_of(system))
    target = get(system, "state")["plan"]["replicas_target"]
    seq = last_seq(system)
    fault_at(system, silent, signals="stop")
    row = becomes_active(system, "signal_loss", lambda found: found["targets"])
    explains_itself(row)
    assert row["targets"] == [silent]
    assert get(system, "state")["plan"]["replicas_target"] == target
    assert Lever.REPLICAS not in levers_of(decisions(system, seq))
    fault_at(system, silent, signals="ok")
    ends(system, "signal_loss")


def test_clients_that_repeat_what_failed_are_a_retry_storm_and_buy_no_replica(system: System) -> None:
    seq = last_seq(system)
    system.faults(kind="error", share=0.7)
    with Load(system.url, 6, again=True) as load:
        row = becomes_active(system, "retry_storm")
        system.faults(kind="none", share=1.0)
        ends(system, "retry_storm")
    explains_itself(row)
    assert load.statuses[200]
    assert Lever.REPLICAS not in levers_of(decisions(system, seq))


def test_a_burst_burns_the_budget_and_brings_a_replica(system: System) -> None:
    seq = last_seq(system)
    with Load(system.url, 30, tokens=60):
        row = becomes_active(system, "slo_burn_fast", lambda found: "ttft_burn" in found["evidence"])
        until(lambda: Lever.REPLICAS in levers_of(decisions(system, seq)), "one more is asked for", WITHIN_S)
        until(lambda: _running() == REPLICAS + 1, "a fourth replica", WITHIN_S)
    explains_itself(row)
    entry = next(e for e in decisions(system, seq) if e["lever"] == Lever.REPLICAS and e["before"] != e["after"])
    assert entry["after"]["replicas_target"] == REPLICAS + 1
    assert entry["inputs"]["queue"] > 0
    assert entry["reason"]["text"]


def test_a_replica_that_became_slow_is_named_and_leaves_and_another_one_comes(system: System) -> None:
    seq = last_seq(system)
    with Load(system.url, 9) as load:
        kept_s = KEPT_S + 15  # the controller has seen every one of them keep the pace for long enough
        until(lambda: (get(system, "state") or {"uptime_s": 0})["uptime_s"] > kept_s, "a while", kept_s + WITHIN_S)
        slow = min(requests_of(system))
        fault_at(system, slow, slow_factor=6.0)
        row = becomes_active(system, "grey_failure", lambda found: found["targets"])
        until(lambda: slow not in requests_of(system), "it leaves", WITHIN_S)
        until(lambda: len(requests_of(system)) >= REPLICAS, "another one", WITHIN_S)
    explains_itself(row)
    assert row["targets"] == [slow]
    assert set(load.statuses) == {200}
    retired = [entry for entry in decisions(system, seq) if "retired" in entry["after"]]
    assert [(entry["target"], entry["after"]["retired"], entry["acted"]) for entry in retired] == [(slow, 1, True)]


def _running() -> int:
    states = serve.status().applications[APP].deployments["Engine"].replica_states
    return int(states.get("RUNNING", 0))
