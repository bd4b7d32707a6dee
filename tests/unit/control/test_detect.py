from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from policies.config import ObjectivesConfig, PolicyConfig, ScalingConfig
from policies.control.catalogue import CONDITIONS, SPECS
from policies.control.conditions_engine import is_stuck
from policies.control.detect import FROM_BOTH, FROM_GATEWAYS, FROM_REPLICAS, RULES, Condition, Detector
from policies.control.signals import SignalBook
from policies.measures import ClassCounts, GpuReading, StartPhase, StartReport
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
        self,
        replicas: Sequence[ReplicaReport] = (),
        gateway: GatewayReport | None = None,
        running: int | None = None,
        view: FleetView | None = None,
    ) -> None:
        self.now_ns += SECOND_NS
        self.seq += 1
        for report in replicas:
            self.book.receive_replica(report, self.now_ns)
        if gateway is not None:
            self.book.receive_gateway(gateway, self.now_ns)
            self.detector.receive_gateway(gateway)
        if running is not None:
            view = FleetView(running, running, 1, 8)
        if view is not None:
            self.book.receive_fleet(view, self.now_ns)
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


LATE = ClassCounts(arrivals=10, succeeded=10, met=2, late_ttft=8)
ON_TIME = ClassCounts(arrivals=10, succeeded=10, met=10)
LEARNED = StepCoefficients(20, 0.5, 0.5, 0.5, 1_000)


@pytest.mark.parametrize(
    ("name", "replica", "gateway"),
    [
        ("slo_burn_fast", {}, {"ttft": histogram(*[4_000.0] * 5)}),
        ("slo_burn_fast", {}, {"itl": histogram(*[400.0] * 5)}),
        ("slo_burn_fast", {}, {"by_class": {"interactive": LATE, "batch": ON_TIME}}),
        ("slo_burn_fast", {}, {"by_class": {"standard": ClassCounts(arrivals=9, succeeded=7, met=7, refused=7)}}),
        ("slo_burn_fast", {}, {"by_class": {"standard": ClassCounts(arrivals=9, succeeded=7, met=7, failed=4)}}),
        ("kv_pressure", {"kv_tokens_used": 39_000}, {}),
        ("preemption_thrash", {"preemptions": 2}, {}),
        ("stuck_replica", {"state": ReplicaState.STUCK}, {}),
        ("grey_failure", {}, {"ejected": {"r1": "grey_ttft"}}),
        ("grey_failure", {"gpu": GpuReading(xid_errors=1)}, {}),
        ("retry_storm", {}, {"arrivals": 10, "retries": 4}),
        ("retry_storm", {}, {"arrivals": 10, "repeats": 4}),
        (
            "prefill_bound",
            {"step_model": LEARNED, "prefill_tokens": 1_500, "busy_share": 1.0, "steps": 10, "waiting": 3},
            {},
        ),
        (
            "decode_bound",
            {"step_model": LEARNED, "decode_tokens": 700, "busy_share": 1.0, "steps": 50, "running": 16, "waiting": 3},
            {},
        ),
        (
            "cache_cold",
            {"prefix_query_tokens": 3_000, "prefix_hit_tokens": 300},
            {
                "routed": {"r1": 40},
                "predicted_prompt_tokens": {"r1": 100},
                "predicted_hit_tokens": {"r1": 80},
            },
        ),
    ],
)
def test_each_condition_begins_with_evidence_and_ends(
    name: str, replica: dict[str, Any], gateway: dict[str, Any]
) -> None:
    world = World()
    world.seconds(5)
    assert not world.active(name)
    world.seconds(20, replica, gateway)
    condition = world.conditions[name]
    assert condition.active
    assert condition.evidence
    assert condition.text
    assert condition.confidence > 0
    assert condition.since_ns is not None
    assert 5 * SECOND_NS < condition.since_ns <= 25 * SECOND_NS
    if condition.spec.targets:
        assert condition.targets == ("r1",)
    world.seconds(30)
    assert not world.active(name)
    assert world.conditions[name].targets == ()


def test_gaps_that_burned_while_caches_were_cold_are_no_limit_yet() -> None:
    late = {"by_class": {"standard": ClassCounts(arrivals=20, succeeded=20, met=18, late_itl=2)}}
    decoding = {"running": 4, "steps": 10, "busy_share": 0.9, "decode_tokens": 40, "step_model": LEARNED}
    world = World()
    world.seconds(25, decoding, late)
    assert not world.active("decode_bound")
    world.seconds(40, decoding, late)
    assert world.active("decode_bound")


def test_a_burn_says_which_objective_of_which_class() -> None:
    world = World()
    world.seconds(20, gateway={"by_class": {"interactive": LATE, "batch": ON_TIME}})
    fast = world.conditions["slo_burn_fast"]
    assert fast.burning == ("interactive/ttft",)
    assert fast.objectives == ("ttft",)
    assert fast.evidence["ttft_burn"] == pytest.approx(16.0)
    assert fast.evidence["availability_burn"] == 0
    assert fast.text.startswith("interactive/ttft: 80.0% missed, 5.0% may")


@pytest.mark.slow
def test_a_slow_burn_needs_many_minutes_and_a_fast_one_does_not_follow() -> None:
    world = World()
    some = {"by_class": {"standard": ClassCounts(arrivals=20, succeeded=20, met=18, late_itl=2)}}
    world.seconds(600, gateway={"by_class": {"standard": ClassCounts(arrivals=20, succeeded=20, met=20)}})
    began = world.now_ns
    world.seconds(700, gateway=some)
    slow = world.conditions["slo_burn_slow"]
    assert slow.active
    assert slow.since_ns is not None
    assert 300 * SECOND_NS < slow.since_ns - began < 700 * SECOND_NS
    assert slow.objectives == ("itl",)
    assert not world.active("slo_burn_fast")


def test_other_objectives_are_judged_from_the_next_tick_on() -> None:
    world = World()
    gateway = {"ttft": histogram(*[1_500.0] * 5)}
    world.seconds(20, gateway=gateway)
    assert not world.active("slo_burn_fast")
    world.detector.reconfigure(replace(CONFIG, objectives=ObjectivesConfig(ttft_ms=1_000.0)))
    world.seconds(80, gateway=gateway)
    assert world.active("slo_burn_fast")


def test_a_slow_replica_among_its_like_is_grey_and_a_busy_one_is_not() -> None:
    def after(busy: dict[str, tuple[float, int]], windows: int = 10, **changes: Any) -> Condition:
        world = World()
        for i in range(windows):
            world.second(
                [
                    replica_report(name, i + 1, busy_share=share, steps=steps, step_model=LEARNED, **changes)
                    for name, (share, steps) in busy.items()
                ],
                gateway_report(seq=i + 1),
            )
        return world.conditions["grey_failure"]

    grey = after({"r1": (0.4, 20), "r2": (0.4, 20), "r3": (0.9, 15)})
    assert grey.active
    assert grey.targets == ("r3",)
    assert grey.evidence["slowness_max"] == pytest.approx(3.0)
    assert not after({"r1": (0.4, 20), "r2": (0.4, 20), "r3": (0.8, 40)}).active
    assert after({"r1": (0.3, 15), "r2": (0.9, 15)}).targets == ("r2",)
    assert not after({"r1": (0.02, 1), "r2": (0.06, 1)}).active


def test_a_start_that_is_waited_for_is_a_gap_and_then_stuck() -> None:
    world = World()

    def seconds(n: int, running: int, target: int, waiting: int, unschedulable: int = 0) -> None:
        for _ in range(n):
            world.second(
                [replica_report("r1", world.seq + 1, waiting=waiting, running=4, steps=1, cold_start_ms=10_000.0)],
                gateway_report(seq=world.seq + 1),
                view=FleetView(running, target, 1, 8, unschedulable),
            )

    seconds(5, 1, 1, 5)
    assert not world.active("cold_start_gap")
    seconds(5, 1, 2, 5)
    assert world.active("cold_start_gap")
    assert not world.active("stuck_scale_up")
    seconds(62, 1, 2, 5)
    assert world.active("stuck_scale_up")
    seconds(5, 2, 2, 0)
    assert not world.active("stuck_scale_up")
    assert not world.active("cold_start_gap")
    seconds(4, 2, 3, 0, unschedulable=1)
    assert world.active("stuck_scale_up")


def test_starts_that_fail_again_and_again_are_a_condition_until_one_ends_well() -> None:
    world = World()
    for number in range(3):
        report = StartReport(f"s{number}", "m", StartPhase.LOAD, 1_000.0, failed="no such model")
        world.book.receive_start(report, world.now_ns)
    for _ in range(5):
        world.second(running=1)
    assert world.active("stuck_scale_up")
    assert "no such model" in world.conditions["stuck_scale_up"].text
    world.book.receive_start(StartReport("s3", "m", StartPhase.FIRST_TOKEN, 1_000.0), world.now_ns)
    for _ in range(5):
        world.second(running=1)
    assert not world.active("stuck_scale_up")


def test_every_condition_has_a_rule_and_is_read_from_somebody() -> None:
    assert set(RULES) == set(SPECS)
    assert FROM_BOTH | FROM_GATEWAYS | FROM_REPLICAS | {"signal_loss", "stuck_scale_up"} == set(SPECS)
    assert [spec.name for spec in CONDITIONS] == sorted(SPECS)
    for spec in CONDITIONS:
        assert spec.on_ticks >= 1
        assert list(spec.levers) == sorted(spec.levers, key=lambda lever: lever.rank)
        assert all((spec.title, spec.begin, spec.end, spec.scenario, spec.next_step))


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
    assert not world.active("slo_burn_fast")


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
                    replica_report(
                        f"r{k}", i + 1, busy_share=busy, waiting=waiting, running=waiting, steps=1, step_model=None
                    )
                    for k in range(n)
                ],
                gateway_report(seq=i + 1),
                running=n,
            )
        return world.active("over_provisioned")

    assert after(2, 0.15)
    assert not after(2, 0.25)
    assert not after(1, 0.0)
    assert not after(2, 0.15, waiting=3)
    assert after(4, 0.25)


def test_how_full_a_fleet_is_comes_from_the_step_law_not_from_the_busy_share() -> None:
    def full(decode_tokens: int) -> Condition:
        world = World()
        for i in range(20):
            reports = [
                replica_report(
                    f"r{k}", i + 1, busy_share=1.0, running=1, steps=40, decode_tokens=decode_tokens,
                    kv_tokens_used=300, step_model=LEARNED,
                )
                for k in range(2)
            ]  # fmt: skip
            world.second(reports, gateway_report(seq=i + 1), running=2)
        return world.conditions["over_provisioned"]

    one_stream = full(40)
    assert one_stream.active
    token_ms = 20 / 16 + 0.5 + 0.5 * 0.3
    assert one_stream.evidence["full_share"] == pytest.approx(40 * token_ms / 1_000)
    assert not full(300).active


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
