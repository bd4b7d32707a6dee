from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from policies.config import PolicyConfig, ScalingConfig
from policies.control.detect import Condition, Detector, is_stuck
from policies.control.signals import SignalBook
from policies.types import FleetView, GatewayReport, ReplicaReport, ReplicaState, StepCoefficients
from tests.unit.control.fleet import SECOND_NS, gateway_report, histogram, replica_report

CONFIG = PolicyConfig(scaling=ScalingConfig(replicas_max=8))


class World:
    """Reports each second, and the conditions that follow."""

    def __init__(self) -> None:
        self.book = SignalBook(CONFIG.control)
        self.detector = Detector(CONFIG)
        self.now_ns = 0
        self.seq = 0
        self.conditions: dict[str, Condition] = {}

    def second(
        self, replicas: Sequence[ReplicaReport] = (), gateway: GatewayReport | None = None, running: int | None = None
    ) -> None:
        self.now_ns += SECOND_NS
        self.seq += 1
        for report in replicas:
            self.book.receive_replica(report, self.now_ns)
        if gateway is not None:
            self.book.receive_gateway(gateway, self.now_ns)
        if running is not None:
            self.book.receive_fleet(FleetView(running, running, 1, 8), self.now_ns)
        self.conditions = {c.name: c for c in self.detector.step(self.book.signals(self.now_ns), self.now_ns)}

    def seconds(self, n: int, replica: dict[str, Any] | None = None, gateway: dict[str, Any] | None = None) -> None:
        for _ in range(n):
            self.second(
                [replica_report("r1", self.seq + 1, **(replica or {}))],
                gateway_report(seq=self.seq + 1, **(gateway or {})),
            )

    def active(self, name: str) -> bool:
        return self.conditions[name].active

    def names(self) -> list[str]:
        return sorted(n for n, c in self.conditions.items() if c.active)


def test_a_calm_fleet_has_no_condition() -> None:
    world = World()
    calm = {"running": 4, "steps": 10, "busy_share": 0.7, "itl": histogram(*[50.0] * 50), "kv_tokens_used": 2_000}
    world.seconds(60, calm, {"ttft": histogram(*[300.0] * 5), "itl": histogram(*[50.0] * 50)})
    assert world.names() == []
    assert list(world.conditions) == sorted(world.conditions)


@pytest.mark.parametrize(
    ("name", "replica", "gateway"),
    [
        ("slo_ttft", {}, {"ttft": histogram(*[4_000.0] * 5)}),
        ("slo_itl", {}, {"itl": histogram(*[400.0] * 5)}),
        ("slo_itl", {"itl": histogram(*[400.0] * 5)}, {}),
        ("kv_pressure", {"kv_tokens_used": 39_000}, {}),
        ("preemptions", {"preemptions": 2}, {}),
        ("stuck_replica", {"state": ReplicaState.STUCK}, {}),
        (
            "cache_cold",
            {"prefix_query_tokens": 3_000, "prefix_hit_tokens": 300},
            {"predicted_prompt_tokens": {"r1": 100}, "predicted_hit_tokens": {"r1": 80}},
        ),
    ],
)
def test_each_condition_begins_with_evidence_and_ends(
    name: str, replica: dict[str, Any], gateway: dict[str, Any]
) -> None:
    world = World()
    world.seconds(5)
    assert not world.active(name)
    world.seconds(5, replica, gateway)
    condition = world.conditions[name]
    assert condition.active
    assert condition.evidence
    assert condition.text
    assert condition.since_ns is not None
    assert 5 * SECOND_NS < condition.since_ns <= 10 * SECOND_NS
    world.seconds(25)
    assert not world.active(name)


def test_one_bad_second_is_no_condition() -> None:
    world = World()
    world.seconds(20, {"kv_tokens_used": 100})
    world.seconds(1, {"kv_tokens_used": 39_900})
    world.seconds(1, {"kv_tokens_used": 100})
    assert not world.active("kv_pressure")


def test_bad_seconds_must_follow_one_another() -> None:
    world = World()
    for _ in range(10):
        world.seconds(1, {"kv_tokens_used": 39_900})
        world.seconds(1, {"kv_tokens_used": 100})
    assert not world.active("kv_pressure")


def test_between_the_two_thresholds_a_condition_keeps_its_state() -> None:
    world = World()
    world.seconds(10, {"kv_tokens_used": 34_000})
    assert not world.active("kv_pressure")
    world.seconds(5, {"kv_tokens_used": 39_000})
    world.seconds(30, {"kv_tokens_used": 34_000})
    assert world.active("kv_pressure")


def test_few_values_are_not_judged() -> None:
    world = World()
    world.seconds(1)
    world.seconds(1, gateway={"ttft": histogram(9_000.0, 9_000.0)})
    world.seconds(5)
    assert not world.active("slo_ttft")


def test_silence_keeps_conditions_as_they_were() -> None:
    world = World()
    world.seconds(10, {"kv_tokens_used": 39_000})
    for _ in range(20):
        world.second()
    assert world.active("kv_pressure")
    assert world.active("signal_loss")
    assert world.conditions["signal_loss"].text.startswith("blind")


def test_no_report_yet_is_no_signal_loss() -> None:
    world = World()
    for _ in range(20):
        world.second()
    assert world.names() == []


def test_a_replica_that_serve_runs_and_nobody_hears_is_a_signal_loss() -> None:
    world = World()
    for i in range(5):
        world.second([replica_report("r1", i + 1)], gateway_report(seq=i + 1), running=2)
    assert world.active("signal_loss")
    assert world.conditions["signal_loss"].evidence["unknown_replicas"] == 1
    for i in range(5, 10):
        world.second([replica_report("r1", i + 1), replica_report("r2", i + 1)], gateway_report(seq=i + 1), running=2)
    assert not world.active("signal_loss")


def test_a_queue_that_grows_is_told_from_one_that_is_long() -> None:
    world = World()
    for waiting in range(0, 24, 2):
        world.seconds(1, {"waiting": waiting, "steps": 1})
    assert world.active("queue_growing")
    world.seconds(20, {"waiting": 22, "steps": 1})
    assert not world.active("queue_growing")


def test_a_hot_spot_needs_one_that_queues_and_one_that_idles() -> None:
    def after(loads: Sequence[tuple[int, int]]) -> bool:
        world = World()
        for i in range(5):
            world.second(
                [replica_report(f"r{k}", i + 1, running=r, waiting=w, steps=1) for k, (r, w) in enumerate(loads)]
            )
        return world.active("hot_spot")

    assert after([(16, 8), (2, 0)])
    assert not after([(16, 8), (16, 8)])
    assert not after([(16, 0), (2, 0)])
    assert not after([(16, 8)])
    assert not after([(0, 0), (0, 0)])


def test_over_provisioned_needs_a_replica_to_spare_and_no_queue() -> None:
    def after(n: int, busy: float, waiting: int = 0) -> bool:
        world = World()
        for i in range(20):
            world.second(
                [
                    replica_report(f"r{k}", i + 1, busy_share=busy, waiting=waiting, running=waiting, steps=1)
                    for k in range(n)
                ],
                gateway_report(seq=i + 1),
                running=n,
            )
        return world.active("over_provisioned")

    assert after(2, 0.2)
    assert not after(2, 0.4)
    assert not after(1, 0.0)
    assert not after(2, 0.2, waiting=3)
    assert after(4, 0.3)


def stuck(windows: int, change: Callable[[int], dict[str, Any]]) -> bool:
    book = SignalBook(CONFIG.control)
    for i in range(1, windows + 1):
        book.receive_replica(replica_report("r1", i, **change(i)), i * SECOND_NS)
    return is_stuck(book.signals(windows * SECOND_NS).replicas[0])


def test_work_without_a_step_is_stuck_after_a_while() -> None:
    fast = StepCoefficients(6, 0.02, 0.03, 0.02, 1_000)
    assert stuck(12, lambda i: {"running": 1, "steps": 0, "step_model": fast})
    assert stuck(12, lambda i: {"waiting": 1, "steps": 0, "step_model": None})
    assert not stuck(8, lambda i: {"running": 1, "steps": 0, "step_model": fast})


def test_an_idle_replica_is_not_stuck() -> None:
    assert not stuck(12, lambda i: {"running": 0, "steps": 0})


def test_a_slow_step_is_not_stuck() -> None:
    slow = StepCoefficients(25, 2, 0.5, 3.0, 1_000)
    assert not stuck(11, lambda i: {"running": 1, "steps": 0, "step_model": slow})
    assert not stuck(12, lambda i: {"running": 1, "steps": int(i % 6 == 0)})
