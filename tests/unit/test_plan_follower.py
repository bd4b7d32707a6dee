"""Which plan is followed: the newest of its epoch, young enough by the receiver's clock."""

from __future__ import annotations

from policies.plan_follower import PlanFollower
from policies.types import Mode, Plan

MS = 1_000_000


def a_plan(seq: int, epoch: str = "e1", ttl_ms: float = 100.0) -> Plan:
    return Plan(epoch=epoch, seq=seq, ttl_ms=ttl_ms, mode=Mode.ACT)


def test_before_the_first_plan_nothing_is_known() -> None:
    follower = PlanFollower()
    assert follower.current(0) is None
    assert follower.age_ms(0) is None


def test_newer_plan_of_the_epoch_replaces_and_older_does_not() -> None:
    follower = PlanFollower()
    assert follower.receive(a_plan(5), 0)
    assert not follower.receive(a_plan(4), 1 * MS)
    assert follower.current(2 * MS) == a_plan(5)
    assert follower.receive(a_plan(6), 2 * MS)
    assert follower.current(2 * MS) == a_plan(6)


def test_plan_received_again_does_not_grow_younger() -> None:
    follower = PlanFollower()
    follower.receive(a_plan(5), 0)
    assert not follower.receive(a_plan(5), 90 * MS)
    assert follower.age_ms(90 * MS) == 90
    assert follower.current(101 * MS) is None


def test_plan_is_followed_up_to_its_ttl_and_not_a_nanosecond_longer() -> None:
    follower = PlanFollower()
    follower.receive(a_plan(1, ttl_ms=100), 0)
    assert follower.current(100 * MS) is not None
    assert follower.current(100 * MS + 1) is None
    assert follower.age_ms(200 * MS) == 200


def test_restarted_controller_is_followed_though_it_counts_from_one() -> None:
    follower = PlanFollower()
    follower.receive(a_plan(900, "e1"), 0)
    assert follower.receive(a_plan(1, "e2"), 1 * MS)
    assert follower.current(1 * MS) == a_plan(1, "e2")


def test_plan_after_silence_is_followed_again() -> None:
    follower = PlanFollower()
    follower.receive(a_plan(1), 0)
    assert follower.current(500 * MS) is None
    assert follower.receive(a_plan(2), 500 * MS)
    assert follower.current(500 * MS) == a_plan(2)
