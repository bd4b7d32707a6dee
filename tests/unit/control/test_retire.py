"""Which slow replica leaves, and when nobody does."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from policies.config import ControlConfig
from policies.control.moves import Move
from policies.control.retire import AFTER_S, GIVE_UP_S, KEPT_S, RETIRED_MAX, WINDOW_S, Retirement
from policies.control.signals import SignalBook
from policies.steering import Knob, Lever
from policies.types import FleetView
from tests.unit.control.fleet import SECOND_NS, gateway_report, replica_report

ALL = ("r1", "r2", "r3")


class Fleet:
    """Replicas that report, some of them slow."""

    def __init__(self) -> None:
        self.retirement = Retirement()
        self.now_ns = 0
        self.book = SignalBook(ControlConfig())
        self.running = self.target = len(ALL)

    def run(self, seconds: float, slow: Iterable[str] = (), ids: Iterable[str] = ALL) -> list[Move]:
        moves: list[Move] = []
        for _ in range(round(seconds)):
            self.now_ns += SECOND_NS
            seq = self.now_ns // SECOND_NS
            for replica_id in ids:
                self.book.receive_replica(replica_report(replica_id, seq), self.now_ns)
            self.book.receive_gateway(gateway_report(seq=seq), self.now_ns)
            self.book.receive_fleet(FleetView(self.running, self.target, 1, 9), self.now_ns)
            quick = [r for r in ids if r not in slow]
            moves += self.retirement.step(self.book.signals(self.now_ns), quick, slow, {"met_share": 1.0}, self.now_ns)
        return moves


def test_one_that_became_slow_leaves_after_a_while_and_is_not_counted_as_missing() -> None:
    fleet = Fleet()
    fleet.run(KEPT_S + 1)
    assert fleet.run(AFTER_S, ["r2"]) == []
    assert fleet.retirement.wishes == {(Knob.RETIRED, "r2"): 0}
    assert fleet.retirement.replaced == {"r2"}
    (move,) = fleet.run(1, ["r2"])
    assert (move.lever, move.target, move.reason.code) == (Lever.REPLICAS, "r2", "Retired")
    assert (move.before, move.after) == ({(Knob.RETIRED, "r2"): 0}, {(Knob.RETIRED, "r2"): 1})
    assert move.predicted == {"met_share": 1.0}
    assert move.alternatives
    assert fleet.retirement.wishes == {(Knob.RETIRED, "r2"): 1}
    assert fleet.retirement.replaced == {"r2"}


def test_what_is_slow_for_a_moment_stays() -> None:
    fleet = Fleet()
    fleet.run(KEPT_S + 1)
    for _ in range(5):
        assert fleet.run(AFTER_S, ["r2"]) == []
        assert fleet.run(1) == []
    assert fleet.retirement.wishes == {}


def test_an_engine_that_was_never_quick_is_of_another_kind() -> None:
    fleet = Fleet()
    assert fleet.run(10 * KEPT_S, ["r2"]) == []
    assert fleet.retirement.replaced == frozenset()


def test_one_at_a_time_and_only_from_a_whole_fleet() -> None:
    fleet = Fleet()
    fleet.run(KEPT_S + 1)
    fleet.running = 2
    assert fleet.run(60, ["r2", "r3"]) == []
    fleet.running = 3
    (first,) = fleet.run(60, ["r2", "r3"])
    left = [r for r in ALL if r != first.target]
    fleet.running = 2
    assert fleet.run(70, [r for r in left if r != "r1"], left) == []
    fleet.running = 3
    (second,) = fleet.run(3, [r for r in left if r != "r1"], [*left, "r4"])
    assert {first.target, second.target} == {"r2", "r3"}


@pytest.mark.parametrize("target", [1, 4])
def test_the_last_one_and_one_of_a_fleet_that_grows_stay(target: int) -> None:
    fleet = Fleet()
    fleet.run(KEPT_S + 1)
    fleet.running, fleet.target = min(3, target), target
    assert fleet.run(60, ["r2"]) == []


def test_a_fleet_that_becomes_slow_one_after_the_other_is_not_replaced_for_ever() -> None:
    fleet = Fleet()
    moves: list[Move] = []
    for n in range(RETIRED_MAX + 2):
        ids = ["r1", f"n{n}"]
        fleet.run(KEPT_S + 100, ids=ids)
        moves += fleet.run(20, [f"n{n}"], ids)
    assert len(moves) == RETIRED_MAX
    assert fleet.retirement.replaced == frozenset()
    fleet.now_ns += round(WINDOW_S * 1e9)
    fleet.run(KEPT_S + 100, ids=["r1", "n9"])
    assert len(fleet.run(20, ["n9"], ["r1", "n9"])) == 1


def test_one_that_serve_does_not_replace_may_stay() -> None:
    fleet = Fleet()
    fleet.run(KEPT_S + 1)
    assert len(fleet.run(AFTER_S + 1, ["r2"])) == 1
    (given_up,) = fleet.run(GIVE_UP_S + 30, ["r2"])
    assert (given_up.reason.code, given_up.after) == ("NotReplaced", {(Knob.RETIRED, "r2"): 0})
    assert fleet.retirement.replaced == frozenset()
    assert fleet.run(300, ["r2"]) == []


def test_one_that_somebody_holds_stays() -> None:
    fleet = Fleet()
    fleet.run(KEPT_S + 1)
    fleet.run(AFTER_S + 1, ["r2"])
    fleet.retirement.adopt({(Knob.RETIRED, "r2"): 0})
    assert fleet.retirement.wishes == {(Knob.RETIRED, "r2"): 0}
    assert fleet.run(100, ["r2"]) == []


def test_nothing_is_remembered_of_those_that_are_gone() -> None:
    fleet = Fleet()
    fleet.run(KEPT_S + 1)
    fleet.run(AFTER_S + 1, ["r2"])
    fleet.run(ControlConfig().forget_after_ms / 1_000 + 2, ids=["r1", "r3"])
    assert fleet.retirement.wishes == {}
    assert fleet.retirement.replaced == frozenset()
