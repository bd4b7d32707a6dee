"""Warm replicas: how many their price allows, which they are, and that the hot fleet does not see them."""

from __future__ import annotations

from typing import Any

import pytest

from autoscaling.recommend import ReplicaScaler
from autoscaling.warm import HALF_LIFE_S, PRIOR_S, Want, WarmPool
from policies.config import ControlConfig, PolicyConfig, PricesConfig, ScalingConfig
from policies.control.loop import ControlState, tick
from policies.control.pool import Spares
from policies.control.scaler import ScaleAdvice
from policies.control.signals import SignalBook
from policies.types import FleetView, Reason, ReplicaId
from tests.unit.control.fleet import SECOND_NS, gateway_report, replica_report


class World:
    """Serve, replicas that report, and one pool; Serve does in the next second what it is asked for."""

    def __init__(self, hot: int = 1, missed_usd: float = 1.0, by_hand: int | None = None, **scaling: Any) -> None:
        limits = {"replicas_max": 6} | scaling
        config = PolicyConfig(
            scaling=ScalingConfig(**limits), prices=PricesConfig(replica_usd_per_hour=2.0, missed_usd=missed_usd)
        )
        self.pool, self.book = WarmPool(config), SignalBook(ControlConfig())
        self.hot, self.total, self.by_hand = hot, hot, by_hand
        self.replicas = [f"r{n}" for n in range(hot)]
        self.acting = True
        self.now_ns = 0
        self.spares = Spares()
        self.codes: list[str] = []

    def second(self, filled: float = 0.0, arrivals: int = 10, mute: ReplicaId = "", starts: bool = True) -> Spares:
        self.now_ns += SECOND_NS
        seq, said = self.now_ns // SECOND_NS, self.total
        while starts and len(self.replicas) < self.total:
            self.replicas.append(f"r{len(self.replicas)}")
        del self.replicas[self.total :]
        for replica_id in self.replicas:
            if replica_id != mute:
                self.book.receive_replica(replica_report(replica_id, seq, cold_start_ms=30_000.0), self.now_ns)
        self.book.receive_gateway(gateway_report(seq=seq, arrivals=arrivals), self.now_ns)
        self.book.receive_fleet(FleetView(len(self.replicas), said, 1, 6), self.now_ns)
        seen = self.book.signals(self.now_ns)
        self.seen_hot = self.pool.hot(seen, self.now_ns)
        advice = ScaleAdvice(self.hot, Reason("Demand", "as the test says"), {"demand_share": filled})
        self.spares = self.pool.step(seen, self.seen_hot, self.hot, advice, self.allowed, self.now_ns)
        self.total = self.hot + self.spares.wanted
        self.codes += [draft.reason.code for draft in self.spares.written]
        return self.spares

    def allowed(self, wish: int) -> tuple[int, bool]:
        return (wish if self.by_hand is None else self.by_hand), self.acting

    def seconds(self, n: int, **said: Any) -> Spares:
        for _ in range(n):
            self.second(**said)
        return self.spares

    @property
    def hot_counts(self) -> tuple[int, int, int]:
        """Running, target and serving, as the levers see them."""
        fleet = self.seen_hot.fleet
        assert fleet is not None
        return fleet.replicas_running, fleet.replicas_target, len(self.seen_hot.serving)


def test_what_is_short_within_a_start_is_what_a_warm_replica_would_have_saved() -> None:
    want = Want()
    want.add(0.5, 1, 10.0, 30.0, 2, 0)
    for second in range(1, 41):
        target = 1 if second <= 10 else 3  # asked for after ten seconds, there after thirty more
        short = want.add(2.0, target, 10.0, 30.0, 2, second * SECOND_NS)
        assert short == (1.0 if second <= 40 else 0.0)
    assert want.add(2.0, 3, 10.0, 30.0, 2, 42 * SECOND_NS) == 0.0
    assert want.saved_ph(1) == pytest.approx(40 * 5.0 * 3_600 / (42 + PRIOR_S), rel=0.01)
    assert want.saved_ph(2) == 0.0
    assert want.saved_ph(3) == 0.0


def test_a_day_later_it_counts_half() -> None:
    want = Want()
    want.add(0.5, 1, 10.0, 30.0, 1, 0)
    want.add(4.0, 1, 10.0, 30.0, 1, SECOND_NS)
    before = want.saved[0]
    for ten in range(1, round(HALF_LIFE_S / 10) + 1):
        want.add(0.5, 1, 10.0, 30.0, 1, SECOND_NS + ten * 10 * SECOND_NS)
    assert want.saved[0] == pytest.approx(before / 2, rel=0.01)


def test_none_stands_by_without_a_want_and_none_where_it_is_not_allowed() -> None:
    assert World(warm_max=3).seconds(200, filled=0.8).wanted == 0
    assert World(warm_max=0).seconds(200, filled=3.0).wanted == 0


@pytest.mark.parametrize(("missed_usd", "wanted"), [(1.0, 2), (0.0001, 0), (0.0, 0)])
def test_how_many_follows_from_what_a_missed_request_costs(missed_usd: float, wanted: int) -> None:
    world = World(missed_usd=missed_usd, warm_max=2)
    assert world.seconds(60, filled=3.0).wanted == wanted
    assert ("WarmPays" in world.codes) is (wanted > 0)


def test_one_is_given_up_when_the_want_was_long_ago() -> None:
    world = World(missed_usd=0.02, warm_max=2)
    assert world.seconds(60, filled=2.0).wanted == 1
    world.pool._want.watched_s += 100_000
    assert world.second().wanted == 0
    assert world.codes[-1] == "WarmCostsMore"


def test_the_newest_rest_and_the_hot_fleet_does_not_see_them() -> None:
    world = World(hot=2, by_hand=1)
    world.second()
    assert (world.total, world.spares.warm) == (3, frozenset()), "nobody rests before there is one more"
    world.seconds(3)
    assert world.spares.warm == {"r2"}
    assert world.hot_counts == (2, 2, 2)
    assert (world.seen_hot.warm, world.seen_hot.warm_wanted) == (1, 1)
    assert world.codes == ["WarmBounded", "WarmRests"]


def test_a_rise_of_the_target_wakes_one_in_the_same_tick_and_asks_for_another() -> None:
    world = World(hot=1, by_hand=1)
    world.seconds(4)
    world.hot = 2
    world.second(starts=False)
    assert (world.spares.warm, world.total) == (frozenset(), 3)
    world.second(starts=False)
    assert world.hot_counts == (2, 2, 2), "Serve's new number is no order of somebody else's"
    world.seconds(2)
    assert world.spares.warm == {"r2"}


def test_a_hot_one_that_falls_silent_is_replaced_by_the_warm_one() -> None:
    world = World(hot=1, by_hand=1)
    world.seconds(4)
    assert world.spares.warm == {"r1"}
    world.seconds(7, mute="r0")
    assert world.spares.warm == frozenset()


def test_a_warm_one_that_serve_is_to_stop_keeps_its_mark() -> None:
    world = World(hot=1, by_hand=1)
    world.seconds(4)
    world.by_hand = 0
    world.second()
    assert world.spares.warm == {"r1"}
    assert (world.spares.wanted, world.total) == (0, 1)
    world.second()
    assert world.hot_counts == (1, 1, 1)
    assert world.seconds(6).warm == frozenset()


def test_there_is_room_within_serve_s_maximum_or_none_stands_by() -> None:
    world = World(hot=5, by_hand=3)
    assert world.second().wanted == 1
    world.hot = 6
    assert world.second().wanted == 0


def test_somebody_else_s_number_is_seen_without_ours() -> None:
    world = World(hot=1, by_hand=1)
    world.seconds(4)
    world.total = 5
    world.second()
    assert world.hot_counts[1] == 4


@pytest.mark.parametrize("total", [1, 2, 4])
def test_a_controller_that_is_replaced_asks_for_no_more_than_the_one_before(total: int) -> None:
    config = PolicyConfig(scaling=ScalingConfig(replicas_max=6, warm_min=1, warm_max=1))
    state = ControlState(config, ReplicaScaler(config), "e", pool=WarmPool(config))
    asked = []
    for second in range(1, 6):
        now_ns = second * SECOND_NS
        for n in range(total):
            state.receive_replica(replica_report(f"r{n}", second), now_ns)
        state.receive_gateway(gateway_report(seq=second, arrivals=1), now_ns)
        state.receive_fleet(FleetView(total, total, 1, 6), now_ns)
        asked.append(tick(state, now_ns).plan.replicas_total)
    assert asked == [max(2, total)] * 5


def test_in_shadow_mode_it_is_written_down_and_nobody_stands_by() -> None:
    world = World(warm_min=1, warm_max=1)
    world.acting = False
    assert world.seconds(5).wanted == 0
    assert world.spares.warm == frozenset()
    assert world.codes == ["WarmLeast"]


def test_where_engines_sleep_those_of_little_worth_do_and_more_of_them_pay() -> None:
    awake = World(missed_usd=0.006, warm_max=2)
    assert awake.seconds(60, filled=3.0).wanted == 0
    world = World(missed_usd=0.006, warm_max=2, asleep_price_share=0.1, wake_s=3.0)
    assert world.seconds(60, filled=3.0).wanted == 2
    world.seconds(3, filled=0.5)
    assert world.spares.warm == {"r1", "r2"}
    assert world.spares.asleep == {"r1", "r2"}, "a tenth of the worth is lost, nine tenths of the price are spared"
    slow = World(missed_usd=1.0, warm_max=2, asleep_price_share=0.9, wake_s=29.0)
    slow.seconds(63, filled=3.0)
    assert (len(slow.spares.warm), slow.spares.asleep) == (2, frozenset())
