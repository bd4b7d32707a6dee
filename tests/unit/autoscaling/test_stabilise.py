from __future__ import annotations

from dataclasses import replace

import pytest

from autoscaling.stabilise import GAP_MAX_NS, WINDOW_SAMPLES_MAX, Ask, DownWindow, Stabilised, Stabiliser
from policies.config import ScalingConfig
from policies.types import FleetView, Reason
from tests.unit.control.fleet import SECOND_NS

CONFIG = ScalingConfig(replicas_min=1, replicas_max=8, up_ticks=3, down_window_s=60, up_replicas_max=4)
WHY = Reason("Demand", "the load")


class Fleet:
    """A Serve that follows at once."""

    def __init__(self, config: ScalingConfig = CONFIG, replicas: int = 1) -> None:
        self.stabiliser = Stabiliser(config)
        self.now_ns = 0
        self.serve = FleetView(replicas, replicas, 1, 100)
        self.follows = True

    def tick(self, up: int, down: int | None = None, hold_down: Reason | None = None) -> Stabilised:
        self.now_ns += SECOND_NS
        self.stabiliser.adopt(self.serve, self.serve.replicas_running, self.now_ns)
        ask = Ask(up, up if down is None else down, WHY)
        result = self.stabiliser.step(ask, self.serve.replicas_running, self.serve, hold_down, self.now_ns)
        if self.follows:
            self.serve = replace(self.serve, replicas_running=result.target, replicas_target=result.target)
        return result

    def ticks(self, n: int, up: int, **more: Reason | int | None) -> list[Stabilised]:
        return [self.tick(up, **more) for _ in range(n)]  # type: ignore[arg-type]


def codes(result: Stabilised) -> list[str]:
    return [r.code for r in result.stages]


def test_a_rise_needs_consecutive_asks_and_takes_the_least_of_them() -> None:
    fleet = Fleet()
    assert [fleet.tick(n).target for n in (3, 1, 4, 2)] == [1, 1, 1, 1]
    result = fleet.tick(3)
    assert result.target == 2
    assert codes(result) == ["Demand", "UpConfirmed"]
    assert "the load" in result.reason.text


def test_waiting_for_confirmation_is_said() -> None:
    assert codes(Fleet().tick(2)) == ["Demand", "UpWaiting"]


def test_a_rise_is_limited_per_decision() -> None:
    fleet = Fleet()
    results = fleet.ticks(6, 8)
    assert [r.target for r in results] == [1, 1, 5, 5, 5, 8]
    assert "RiseLimited" in codes(results[2])


def test_the_maximum_bounds_and_says_so() -> None:
    fleet = Fleet(replace(CONFIG, replicas_max=2))
    results = fleet.ticks(6, 5)
    assert results[-1].target == 2
    assert "BoundedByMax" in codes(results[-1])
    assert results[-1].held


def test_serves_own_bounds_hold_too() -> None:
    fleet = Fleet()
    fleet.serve = FleetView(2, 2, 2, 3)
    assert fleet.ticks(3, 8)[-1].target == 3
    assert fleet.ticks(200, 1)[-1].target == 2


def test_a_target_outside_the_bounds_comes_inside_at_once() -> None:
    fleet = Fleet(replace(CONFIG, replicas_min=2))
    result = fleet.tick(1)
    assert result.target == 2
    assert result.reason.code == "BoundedByMin"


def test_a_fall_waits_for_the_whole_window_and_goes_to_its_highest_ask() -> None:
    fleet = Fleet(replicas=4)
    results = [*fleet.ticks(10, 4), *fleet.ticks(10, 2), *fleet.ticks(200, 1)]
    targets = [r.target for r in results]
    assert targets.index(2) == 10 + 60
    assert targets.index(1) == 20 + 60
    assert results[15].reason.code == "ScaleDownStabilised"
    assert results[70].reason.code == "DownConfirmed"


def test_a_new_controller_sees_a_whole_window_before_it_goes_down() -> None:
    fleet = Fleet(replicas=3)
    targets = [r.target for r in fleet.ticks(100, 1)]
    assert targets.index(1) == 60


def test_no_window_goes_down_at_once() -> None:
    fleet = Fleet(replace(CONFIG, down_window_s=0), replicas=3)
    assert fleet.tick(1).target == 1


def test_a_tolerance_between_up_and_down_is_respected() -> None:
    fleet = Fleet(replicas=2)
    assert {r.target for r in fleet.ticks(200, 1, down=2)} == {2}


def test_a_hold_keeps_the_target_and_names_itself() -> None:
    fleet = Fleet(replicas=3)
    blind = Reason("HeldPartial", "one is silent")
    results = fleet.ticks(200, 1, hold_down=blind)
    assert {r.target for r in results} == {3}
    assert results[-1].reason == blind
    assert results[-1].held


def test_a_short_hold_does_not_start_the_window_anew_a_long_one_does() -> None:
    fleet = Fleet(replicas=3)
    fleet.ticks(50, 1)
    fleet.ticks(5, 1, hold_down=Reason("HeldPartial", ""))
    assert fleet.ticks(10, 1)[-1].target == 1
    fleet = Fleet(replicas=3)
    fleet.ticks(50, 1)
    fleet.ticks(GAP_MAX_NS // SECOND_NS + 1, 1, hold_down=Reason("HeldPartial", ""))
    assert fleet.ticks(50, 1)[-1].target == 3
    assert fleet.ticks(20, 1)[-1].target == 1


def test_a_hold_does_not_keep_from_going_up() -> None:
    fleet = Fleet()
    assert fleet.ticks(3, 2, hold_down=Reason("HeldPartial", ""))[-1].target == 2


def test_pending_replicas_cover_what_is_asked() -> None:
    fleet = Fleet()
    fleet.follows = False
    fleet.ticks(3, 3)
    fleet.serve = replace(fleet.serve, replicas_target=3)
    results = fleet.ticks(90, 3)
    assert {r.target for r in results} == {3}
    assert codes(results[-1]) == ["Demand", "PendingCovers"]


def test_someone_elses_target_is_adopted_and_our_own_is_not_mistaken_for_it() -> None:
    fleet = Fleet(replicas=1)
    fleet.follows = False
    fleet.ticks(3, 2)
    assert fleet.stabiliser.target == 2
    assert fleet.ticks(3, 2)[-1].target == 2
    fleet.serve = replace(fleet.serve, replicas_target=2, replicas_running=2)
    fleet.ticks(10, 2)
    fleet.serve = replace(fleet.serve, replicas_target=5, replicas_running=5)
    assert fleet.tick(2).target == 5


def test_a_serve_that_follows_in_steps_is_not_taken_for_someone_else() -> None:
    fleet = Fleet()
    fleet.follows = False
    fleet.ticks(3, 4)
    fleet.serve = replace(fleet.serve, replicas_target=2)
    assert fleet.tick(4).target == 4


def test_without_serves_word_the_known_replicas_are_the_target() -> None:
    stabiliser = Stabiliser(CONFIG)
    stabiliser.adopt(None, 0, 0)
    assert stabiliser.target is None
    assert stabiliser.hold(Reason("HeldBlind", ""), None, 0) is None
    with pytest.raises(ValueError, match="no target"):
        stabiliser.step(Ask(1, 1, WHY), 0, None, None, 0)
    stabiliser.adopt(None, 2, 1)
    assert stabiliser.target == 2


def test_the_down_window_is_bounded_and_still_remembers_its_highest() -> None:
    window = DownWindow(100 * SECOND_NS)
    step = SECOND_NS // 100
    for i in range(20_000):
        window.add(9 if i == 15_000 else 1, i * step)
    assert len(window) <= WINDOW_SAMPLES_MAX
    assert window.highest(20_000 * step) == 9
    for i in range(20_000, 26_000):
        window.add(1, i * step)
    assert window.highest(26_000 * step) == 1


def test_a_held_target_is_within_its_bounds() -> None:
    stabiliser = Stabiliser(replace(CONFIG, replicas_min=2))
    stabiliser.adopt(FleetView(1, 1, 2, 6), 1, SECOND_NS)
    held = stabiliser.hold(Reason("HeldBlind", ""), FleetView(1, 1, 2, 6), SECOND_NS)
    assert held is not None
    assert held.target == 2
    stabiliser.adopt(FleetView(1, 9, 2, 6), 1, 20 * SECOND_NS)
    held = stabiliser.hold(Reason("HeldBlind", ""), FleetView(1, 9, 2, 6), 20 * SECOND_NS)
    assert held is not None
    assert held.target == 6


def test_serve_that_follows_late_is_not_taken_for_someone_else() -> None:
    """Serve tells its target, then follows the plan of the last tick: what it tells next is an echo.

    The local rule raised the target from 2 to 3 just before the first plan came. Taken for someone else's, each echo
    was handed back, and the target went 2, 3, 2, 3 for ever.
    """
    stabiliser = Stabiliser(CONFIG)
    serve, plan, told = 2, None, []
    for second in range(1, 40):
        now_ns = second * SECOND_NS
        view = FleetView(2, serve, 1, 8)
        serve = plan if plan is not None else serve + (second == 1)
        stabiliser.adopt(view, 2, now_ns)
        plan = stabiliser.step(Ask(3, 3, WHY), 2, view, None, now_ns).target
        told.append(serve)
    assert told == [3, 2] + [3] * 37


def test_someone_else_may_set_what_was_given_long_ago() -> None:
    fleet = Fleet(replicas=2)
    fleet.ticks(12, up=4)
    assert fleet.stabiliser.target == 4
    fleet.serve = replace(fleet.serve, replicas_target=2)
    assert fleet.tick(up=2).target == 2


def test_a_load_that_goes_on_asking_is_not_confirmed_anew_each_time_it_is_overruled() -> None:
    fleet = Fleet()
    fleet.follows = False
    seen = []
    for _ in range(8):
        seen.append(fleet.tick(3).target)
        fleet.stabiliser.overrule(1, fleet.now_ns)
    assert seen == [1, 1, 3, 3, 3, 3, 3, 3]
    assert fleet.tick(1).target == 1
    fleet.stabiliser.overrule(1, fleet.now_ns)
    assert fleet.tick(3).target == 1


def test_asks_that_the_new_target_covers_are_not_counted_any_more() -> None:
    fleet = Fleet()
    fleet.follows = False
    fleet.ticks(3, 3)
    fleet.stabiliser.overrule(2, fleet.now_ns)
    assert fleet.tick(3).target == 3
    fleet.stabiliser.overrule(3, fleet.now_ns)
    assert [fleet.tick(4).target for _ in range(3)] == [3, 3, 4]


def test_who_is_overruled_at_each_tick_still_sees_that_someone_else_set_the_target() -> None:
    fleet = Fleet()
    fleet.follows = False
    for _ in range(20):
        fleet.tick(3)
        fleet.stabiliser.overrule(1, fleet.now_ns)
    fleet.serve = replace(fleet.serve, replicas_target=5)
    assert "Adopted" in [r.code for r in [fleet.stabiliser.adopt(fleet.serve, 1, fleet.now_ns + SECOND_NS)] if r]


def test_a_held_tick_is_no_part_of_a_row() -> None:
    fleet = Fleet()
    fleet.follows = False
    fleet.ticks(3, 3)
    fleet.stabiliser.overrule(1, fleet.now_ns)
    fleet.stabiliser.hold(WHY, fleet.serve, fleet.now_ns)
    fleet.stabiliser.overrule(1, fleet.now_ns)
    assert [fleet.tick(3).target for _ in range(3)] == [1, 1, 3]
