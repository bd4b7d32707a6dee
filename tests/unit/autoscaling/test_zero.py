"""When a model sleeps, what wakes it, and when its starts are given up."""

from __future__ import annotations

from typing import Any

import pytest

from autoscaling.zero import BACKOFF_FACTOR_MAX, Rest, ZeroRule
from policies.config import AdmissionConfig, ControlConfig, PolicyConfig, ScalingConfig
from policies.control.signals import SignalBook
from policies.measures import ClassCounts, StartPhase, StartReport
from policies.steering import ColdPhase
from policies.types import FleetView
from tests.unit.control.fleet import SECOND_NS, gateway_report, replica_report

CONFIG = ScalingConfig(
    replicas_min=0, replicas_max=4, zero_after_s=20.0, start_s_prior=40.0, start_s_max=100.0, start_backoff_s=30.0
)
WINDOW_S = 13
"""A little more than arrivals are remembered for."""


class World:
    """One gateway, Serve, and as many replicas as run; what the rule says is followed at once."""

    def __init__(self, running: int = 1) -> None:
        self.book = SignalBook(ControlConfig())
        self.rule = ZeroRule(PolicyConfig(scaling=CONFIG, admission=AdmissionConfig(retry_after_jitter_share=0.0)))
        self.now_ns = 0
        self.running = self.target = running

    def second(self, gateway: dict[str, Any] | None = None, replica: dict[str, Any] | None = None) -> Rest | None:
        self.now_ns += SECOND_NS
        seq = self.now_ns // SECOND_NS
        for i in range(self.running):
            self.book.receive_replica(replica_report(f"r{i}", seq, **(replica or {})), self.now_ns)
        self.book.receive_gateway(gateway_report(seq=seq, **(gateway or {})), self.now_ns)
        self.book.receive_fleet(FleetView(self.running, self.target, 0, 4), self.now_ns)
        rest = self.rule.step(self.book.signals(self.now_ns), self.target, self.now_ns)
        if rest is not None:
            self.target = rest.replicas
            self.running = min(self.running, self.target)
        return rest

    def seconds(self, n: float, **said: Any) -> Rest | None:
        rest = None
        for _ in range(int(n)):
            rest = self.second(**said)
        return rest

    def asleep(self) -> None:
        """Let it fall asleep, and everything of before be forgotten."""
        for _ in range(80):
            self.second()
        assert self.target == 0

    def fail(self, number: int) -> None:
        report = StartReport(f"start-{number}", "m", StartPhase.LOAD, 1_000.0, failed="no such model")
        self.book.receive_start(report, self.now_ns)


def test_it_sleeps_when_nobody_asked_for_so_long_and_not_before() -> None:
    world = World()
    world.second(gateway={"arrivals": 1})
    assert world.seconds(CONFIG.zero_after_s) is None
    rest = world.seconds(WINDOW_S)
    assert rest is not None
    assert (world.target, rest.cold.phase) == (0, ColdPhase.ASLEEP)


@pytest.mark.parametrize(
    ("gateway", "replica"),
    [
        ({"arrivals": 1}, {}),
        ({"inflight": 1}, {"running": 1}),
        ({"inflight": 1}, {"http_inflight": 1}),
        ({}, {"decode_tokens": 5}),
    ],
)
def test_it_does_not_sleep_while_anybody_needs_it(gateway: dict[str, Any], replica: dict[str, Any]) -> None:
    assert World().seconds(100, gateway=gateway, replica=replica) is None


@pytest.mark.parametrize(
    ("gateway", "replica"), [({"inflight": 3}, {}), ({}, {"running": 3, "http_inflight": 3}), ({"queued": 2}, {})]
)
def test_counts_that_nobody_gives_back_hold_nothing_up_and_wake_nobody(
    gateway: dict[str, Any], replica: dict[str, Any]
) -> None:
    world = World()
    world.seconds(CONFIG.zero_after_s + WINDOW_S, gateway=gateway, replica=replica)
    assert world.target == 0
    rest = world.seconds(200, gateway=gateway)
    assert rest is not None
    assert (world.target, rest.cold.phase) == (0, ColdPhase.ASLEEP)


def test_what_a_gateway_holds_may_be_at_a_replica_that_says_nothing() -> None:
    world = World()
    for _ in range(100):
        world.now_ns += SECOND_NS
        world.book.receive_gateway(gateway_report(seq=world.now_ns // SECOND_NS, inflight=1), world.now_ns)
        world.book.receive_fleet(FleetView(1, 1, 0, 4), world.now_ns)
        assert world.rule.step(world.book.signals(world.now_ns), 1, world.now_ns) is None


def test_without_a_gateway_s_word_nothing_falls_asleep() -> None:
    world = World()
    for _ in range(100):
        world.now_ns += SECOND_NS
        world.book.receive_replica(replica_report("r0", world.now_ns // SECOND_NS), world.now_ns)
        world.book.receive_fleet(FleetView(1, 1, 0, 4), world.now_ns)
        assert world.rule.step(world.book.signals(world.now_ns), 1, world.now_ns) is None


@pytest.mark.parametrize("gateway", [{"arrivals": 1}, {"inflight": 1, "queued": 1}])
def test_a_request_wakes_it_with_one_replica(gateway: dict[str, Any]) -> None:
    world = World()
    world.asleep()
    rest = world.second(gateway=gateway)
    assert rest is not None
    assert (rest.replicas, rest.reason.code, rest.cold.phase) == (1, "Woken", ColdPhase.STARTING)
    rest = world.seconds(10, gateway={"inflight": 30, "queued": 30})
    assert rest is not None
    assert (rest.replicas, rest.cold.elapsed_s) == (1, 10.0)


def test_a_start_is_measured_and_stands_for_the_next_one_and_idle_time_counts_from_its_end() -> None:
    world = World()
    world.asleep()
    rest = world.second(gateway={"arrivals": 1})
    assert rest is not None
    assert (rest.cold.start_s, rest.cold.measured) == (40.0, False)
    world.seconds(49)
    world.running = 1
    assert world.second() is None
    assert world.seconds(CONFIG.zero_after_s - 1) is None
    rest = world.second()
    assert rest is not None
    assert (world.target, rest.cold.start_s, rest.cold.measured) == (0, 50.0, True)


def test_before_the_first_wake_the_cold_start_that_a_replica_told_counts() -> None:
    world = World()
    rest = world.seconds(CONFIG.zero_after_s + WINDOW_S, replica={"cold_start_ms": 25_000.0})
    assert rest is not None
    assert (rest.cold.start_s, rest.cold.measured) == (25.0, True)


def test_starts_that_fail_are_given_up_and_tried_again_after_a_longer_pause_each_time() -> None:
    world = World()
    world.asleep()
    failures, pauses = 0, []
    for _ in range(7):
        while (rest := world.second(gateway={"arrivals": 1})) is not None and rest.replicas == 0:
            pass
        for _ in range(CONFIG.start_tries_max):
            failures += 1
            world.fail(failures)
        rest = world.second(gateway={"arrivals": 1})
        assert rest is not None
        assert (rest.replicas, rest.reason.code, rest.cold.phase) == (0, "CannotStart", ColdPhase.FAILED)
        assert "no such model" in rest.cold.why
        pauses.append(rest.cold.retry_after_s)
    assert pauses == [30.0 * min(2**n, BACKOFF_FACTOR_MAX) for n in range(7)]


def test_a_start_that_takes_too_long_has_failed_and_one_that_works_ends_the_counting() -> None:
    world = World()
    world.asleep()
    world.second(gateway={"arrivals": 1})
    rest = world.seconds(CONFIG.start_s_max + 1)
    assert rest is not None
    assert (rest.replicas, rest.cold.phase) == (0, ColdPhase.FAILED)
    world.seconds(31)
    world.second(gateway={"arrivals": 1})
    assert world.target == 1
    world.running = 1
    assert world.second() is None
    world.asleep()
    assert world.second(gateway={"arrivals": 1}) is not None
    assert world.target == 1


def test_a_replica_that_died_is_a_start_under_way() -> None:
    world = World()
    world.second()
    world.running = 0
    world.seconds(6)
    rest = world.second()
    assert rest is not None
    assert (rest.replicas, rest.cold.phase) == (1, ColdPhase.STARTING)


def test_a_wake_that_finds_a_replica_still_serving_is_no_start() -> None:
    world = World()
    world.seconds(CONFIG.zero_after_s + WINDOW_S, replica={"cold_start_ms": 25_000.0})
    assert world.target == 0
    world.running = 1  # it drains
    world.second(gateway={"arrivals": 1})
    assert world.target == 1
    world.seconds(CONFIG.zero_after_s + WINDOW_S, replica={"cold_start_ms": 25_000.0})
    rest = world.second()
    assert rest is not None
    assert (rest.replicas, rest.cold.start_s) == (0, 25.0)


def test_a_replica_that_dies_long_after_a_wake_that_found_one_serving_is_started_anew() -> None:
    world = World()
    world.asleep()
    world.second(gateway={"arrivals": 1})
    world.running = 1
    world.seconds(CONFIG.start_s_max + 100, gateway={"arrivals": 1})
    world.running = 0
    rests = [rest for _ in range(40) if (rest := world.second(gateway={"inflight": 1})) is not None]
    assert {(rest.replicas, rest.reason.code) for rest in rests} == {(1, "Starting")}
    assert rests[-1].cold.elapsed_s < 40


@pytest.mark.parametrize("refused", [0, 1])
def test_it_stays_awake_for_those_that_were_told_to_come_again(refused: int) -> None:
    world = World()
    world.asleep()
    for _ in range(2):
        world.second(gateway={"arrivals": 1, "by_class": {"standard": ClassCounts(arrivals=1, refused=refused)}})
    world.running = 1
    world.seconds(CONFIG.zero_after_s + WINDOW_S)
    assert world.target == refused
    world.seconds(CONFIG.start_s_prior)
    assert world.target == 0


def test_a_gateway_that_fell_silent_does_not_wake_a_model_that_was_given_up() -> None:
    world = World()
    world.asleep()
    world.second(gateway={"gateway_id": "lost", "arrivals": 1, "inflight": 1, "queued": 1})
    for number in range(CONFIG.start_tries_max):
        world.fail(number)
    rest = world.second()
    assert rest is not None
    assert rest.cold.phase is ColdPhase.FAILED
    rests = [world.second() for _ in range(55)]
    assert {rest.replicas for rest in rests if rest is not None} == {0}, "its last word is no request"
    assert rests[-1] is not None
    assert rests[-1].cold.phase is ColdPhase.ASLEEP


def test_replicas_that_run_say_nothing_and_get_nothing_are_given_up_like_a_start_that_takes_too_long() -> None:
    world = World()
    found = []
    for _ in range(int(CONFIG.start_s_max) + 2):
        world.now_ns += SECOND_NS
        world.book.receive_gateway(gateway_report(seq=world.now_ns // SECOND_NS, inflight=1, queued=1), world.now_ns)
        world.book.receive_fleet(FleetView(1, 1, 0, 4), world.now_ns)
        found.append(world.rule.step(world.book.signals(world.now_ns), 1, world.now_ns))
    assert found[-2] is None
    assert found[-1] is not None
    assert (found[-1].replicas, found[-1].cold.phase) == (0, ColdPhase.FAILED)
