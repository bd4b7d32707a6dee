from __future__ import annotations

from typing import Any

import pytest

from policies.config import ControlConfig
from policies.control.peers import Peers, kinds_of, law_of
from policies.control.signals import ReplicaSignals, SignalBook
from policies.measures import Roofline
from policies.types import StepCoefficients
from tests.unit.control.fleet import SECOND_NS, histogram, replica_report

LAW = StepCoefficients(20, 0.5, 0.5, 0.5, 1_000)


def replicas(*changes: dict[str, Any]) -> tuple[ReplicaSignals, ...]:
    book = SignalBook(ControlConfig())
    for i, change in enumerate(changes):
        values = {"steps": 30, "busy_share": 0.6, "step_model": LAW, **change}
        book.receive_replica(replica_report(f"r{i}", 1, **values), SECOND_NS)
    return book.signals(SECOND_NS).replicas


def test_pace_is_judged_by_the_work_that_was_done() -> None:
    work = {"itl": histogram(*[20.0] * 300), "kv_tokens_used": 10_000, "prefill_tokens": 400}
    expected_ms = 30 * (20 + 0.5 * 10) + 0.5 * 300 + 0.5 * 400
    fleet = replicas(
        {}, {}, {**work, "busy_share": expected_ms / 1_000}, {**work, "busy_share": 2 * expected_ms / 1_000}
    )
    slowness = Peers().compare(fleet).slowness
    assert slowness == pytest.approx({"r0": 1.0, "r1": 1.0, "r2": 1.0, "r3": 2.0})


def test_unlike_engines_are_not_compared() -> None:
    fast, slow = Roofline(1e15, 4e12, 1e10, 1e10, 1e5), Roofline(2e14, 1e12, 1e10, 1e10, 1e5)
    fleet = replicas(
        {"roofline": fast}, {"roofline": fast}, {"roofline": slow, "busy_share": 1.0}, {"running_seqs_hard": 64}
    )
    assert sorted(len(members) for members in kinds_of(fleet).values()) == [1, 1, 2]
    assert set(Peers().compare(fleet).slowness) == {"r0", "r1"}


def test_a_little_more_or_less_memory_is_the_same_kind() -> None:
    fleet = replicas(*({"kv_tokens_max": n} for n in (100_000, 104_000, 118_000, 300_000)))
    assert sorted(len(members) for members in kinds_of(fleet).values()) == [1, 3]


def test_who_did_too_little_or_knows_no_law_is_not_judged() -> None:
    assert Peers().compare(replicas({}, {}, {"steps": 2, "busy_share": 0.9})).slowness == {"r0": 1.0, "r1": 1.0}
    assert Peers().compare(replicas({"step_model": None}, {"step_model": None})).slowness == {}
    assert Peers().compare(replicas({}, {"busy_share": None})).slowness == {}
    assert Peers().compare(()).slowness == {}


def test_the_law_of_a_kind_is_not_moved_by_one_that_differs() -> None:
    odd = StepCoefficients(200, 5, 5, 5, 1_000)
    law = law_of(replicas({}, {}, {"step_model": odd}))
    assert law is not None
    assert (law.a_ms, law.d_ms) == (20, 0.5)
    assert law_of(replicas({"step_model": StepCoefficients(1, 1, 1, 1, 0)})) is None


def test_a_kind_is_known_again_until_somebody_new_comes() -> None:
    peers, fleet = Peers(), replicas({}, {}, {"kv_tokens_max": 300_000})
    first = peers.compare(fleet)
    again = peers.compare(fleet)
    assert {k: [r.replica_id for r in m] for k, m in again.members.items()} == {
        k: [r.replica_id for r in m] for k, m in first.members.items()
    }
    more = peers.compare(replicas({}, {}, {"kv_tokens_max": 300_000}, {"kv_tokens_max": 310_000}))
    assert sorted(len(members) for members in more.members.values()) == [2, 2]
