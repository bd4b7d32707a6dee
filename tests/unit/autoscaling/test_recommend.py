from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from autoscaling.recommend import SETTLE_NS, ReplicaScaler
from policies.config import PolicyConfig, ScalingConfig
from policies.control.scaler import ScaleAdvice
from policies.control.signals import SignalBook
from policies.types import FleetView, ReplicaState, StepCoefficients
from tests.unit.control.fleet import CPU_STEP, SECOND_NS, gateway_report, histogram, replica_report

CONFIG = PolicyConfig(scaling=ScalingConfig(replicas_max=8, up_ticks=1, down_window_s=0))
UNTRUSTED = StepCoefficients(25, 2, 0.5, 1.9, samples=0)


SIZES: dict[str, Any] = {
    "arrivals": 6,
    "routed": {"r0": 6},
    "predicted_prompt_tokens": {"r0": 600},
    "succeeded": 5,
    "output_tokens": 300,
}
"""Six requests a second of 100 prompt and 60 output tokens."""


class World:
    """Signals of ``n`` like replicas, second by second."""

    def __init__(self, n: int = 1, config: PolicyConfig = CONFIG) -> None:
        self.n = n
        self.book = SignalBook(config.control)
        self.scaler = ReplicaScaler(config)
        self.now_ns = 0
        self.target = n

    def second(
        self,
        replica: dict[str, Any] | None = None,
        gateway: dict[str, Any] | None = None,
        *,
        reporting: int | None = None,
        fleet: bool = True,
    ) -> ScaleAdvice:
        self.now_ns += SECOND_NS
        seq = self.now_ns // SECOND_NS
        for i in range(self.n if reporting is None else reporting):
            self.book.receive_replica(replica_report(f"r{i}", seq, **(replica or {})), self.now_ns)
        if gateway is not None:
            self.book.receive_gateway(gateway_report(seq=seq, **gateway), self.now_ns)
        if fleet:
            self.book.receive_fleet(FleetView(self.n, self.target, 1, 8), self.now_ns)
        return self.scaler.recommend(self.book.signals(self.now_ns), self.now_ns)

    def seconds(self, n: int, *args: Any, **kwargs: Any) -> ScaleAdvice:
        advice = None
        for _ in range(n):
            advice = self.second(*args, **kwargs)
        assert advice is not None
        return advice


def codes(advice: ScaleAdvice) -> list[str]:
    return [r.code for r in advice.stages]


FULL: dict[str, Any] = {
    "running": 16,
    "waiting": 30,
    "kv_tokens_used": 4_800,
    "busy_share": 1.0,
    "decode_tokens": 120,
    "prefill_tokens": 200,
    "steps": 10,
    "finished": 2,
}


def test_nothing_known_is_no_opinion() -> None:
    world = World(0)
    advice = world.second(fleet=False)
    assert advice.replicas is None
    assert advice.reason.code == "Unknown"


def test_replicas_follow_token_demand_over_what_one_carries_with_headroom() -> None:
    world = World(1)
    # 320 prompt tokens/s x 1.9 ms and 260 tokens/s at 61.5/16 ms are 1.6 replicas; 1.6 / 0.8 = 2.0
    replica = {"running": 16, "kv_tokens_used": 4_800, "decode_tokens": 260, "prefill_tokens": 320, "steps": 10}
    advice = world.seconds(5, replica, {"inflight": 16})
    share = (320 * 1.9 + 260 * (25 + 32 + 0.5 * 4.8) / 16) / 1_000
    assert advice.inputs["demand_share"] == pytest.approx(share, rel=0.01)
    assert advice.inputs["ask_up"] == 2
    assert advice.replicas == 2


def test_one_busy_stream_needs_no_second_replica() -> None:
    world = World(1)
    replica = {"running": 1, "kv_tokens_used": 300, "decode_tokens": 32, "steps": 32, "busy_share": 1.0}
    advice = world.seconds(60, replica, {"arrivals": 0, "inflight": 1})
    assert advice.replicas == 1


def test_one_client_that_sends_long_prompts_one_by_one_needs_no_second_replica() -> None:
    world = World(1)
    replica = {"running": 1, "prefill_tokens": 520, "steps": 6, "busy_share": 1.0}
    gateway = {"arrivals": 1, "routed": {"r0": 1}, "predicted_prompt_tokens": {"r0": 520}, "inflight": 1}
    gateway |= {"ttft": histogram(2_700.0)}
    advice = world.seconds(60, replica, gateway)
    assert advice.replicas == 1
    assert "FewRequests" in codes(advice)


def test_before_any_model_is_trusted_open_requests_count() -> None:
    world = World(1)
    advice = world.second({"step_model": UNTRUSTED, "running": 8}, {"inflight": 17})
    assert advice.replicas == 3
    assert "InflightTarget" in codes(advice)
    assert advice.inputs["demand_share"] is None


def test_a_queue_that_cannot_start_in_time_asks_for_one_more() -> None:
    world = World(1)
    advice = world.second(FULL | {"decode_tokens": 10, "prefill_tokens": 10}, {"inflight": 46})
    assert advice.replicas == 2
    assert "QueuePressure" in codes(advice)
    assert advice.inputs["queue"] == 30


def test_a_growing_queue_asks_for_as_many_as_it_takes() -> None:
    world = World(2, replace(CONFIG, scaling=replace(CONFIG.scaling, up_ticks=100)))
    sizes = SIZES | {"inflight": 60}
    for i in range(12):
        advice = world.second(FULL | {"waiting": 4 * i, "decode_tokens": 10, "prefill_tokens": 10}, sizes)
    # two queues grow by 4 a second each, one replica serves 2.4 requests a second: four more at least
    assert advice.inputs["queue_slope_ps"] == pytest.approx(8)
    assert advice.stages[0].code == "QueuePressure"
    assert int(advice.inputs["ask_up"] or 0) >= 6


def test_a_queue_that_shrinks_fast_enough_asks_for_nothing_and_gives_up_nothing() -> None:
    world = World(2, replace(CONFIG, scaling=replace(CONFIG.scaling, up_ticks=8)))
    for i in range(14):
        report = FULL | {"waiting": 60 - 4 * i, "decode_tokens": 10, "prefill_tokens": 10}
        advice = world.second(report, {"inflight": 20})
        if i == 12:
            assert advice.inputs["queue_slope_ps"] == pytest.approx(-8)
            assert (advice.inputs["ask_up"], advice.inputs["ask_down"]) == (1, 2)
            assert advice.replicas == 2


def test_a_short_queue_on_busy_replicas_asks_for_nothing() -> None:
    world = World(1)
    sizes = {"arrivals": 2, "routed": {"r0": 2}, "predicted_prompt_tokens": {"r0": 40}, "inflight": 9}
    sizes |= {"succeeded": 2, "output_tokens": 40}
    replica = {"running": 8, "waiting": 1, "busy_share": 1.0, "decode_tokens": 40, "prefill_tokens": 40, "steps": 20}
    assert world.seconds(60, replica, sizes).replicas == 1


def test_missed_ttft_on_busy_replicas_asks_for_one_more() -> None:
    world = World(1)
    sizes = {"arrivals": 4, "routed": {"r0": 4}, "predicted_prompt_tokens": {"r0": 80}, "inflight": 16}
    sizes |= {"succeeded": 4, "output_tokens": 80}
    replica = {"running": 16, "waiting": 2, "busy_share": 1.0, "decode_tokens": 80, "prefill_tokens": 80, "steps": 20}
    slow = {"ttft": histogram(*[5_000.0] * 4)}
    assert "TtftMissed" in codes(world.seconds(2, replica, sizes | slow))
    assert World(1).seconds(4, replica | {"busy_share": 0.5}, sizes | slow).replicas == 1


def test_replicas_that_are_not_busy_are_not_under_pressure() -> None:
    assert World(1).seconds(10, FULL | {"busy_share": 0.5, "decode_tokens": 1, "prefill_tokens": 1}).replicas == 1


def test_an_unknown_replica_counts_as_empty_when_deciding_to_go_up() -> None:
    busy = FULL | {"decode_tokens": 10, "prefill_tokens": 10}
    assert World(2).seconds(10, busy, {"inflight": 40}, reporting=1).replicas == 2
    assert World(2).seconds(10, busy, {"inflight": 40}).replicas == 3


def test_a_stuck_replica_counts_as_full() -> None:
    world = World(2)
    world.book.receive_replica(replica_report("s", 1, state=ReplicaState.STUCK), 5 * SECOND_NS)
    busy = FULL | {"decode_tokens": 10, "prefill_tokens": 10}
    assert world.seconds(5, busy, {"inflight": 40}, reporting=1).replicas == 3


def test_pending_replicas_silence_pressure_and_so_does_their_arrival() -> None:
    world = World(1)
    busy = FULL | {"decode_tokens": 10, "prefill_tokens": 10, "waiting": 200}
    assert world.seconds(2, busy, {"inflight": 216}).replicas is not None
    first = world.second(busy, {"inflight": 216}).replicas
    assert first is not None
    world.target = first
    assert world.seconds(90, busy, {"inflight": 216}).replicas == first
    world.n = first
    settle_s = SETTLE_NS // SECOND_NS
    assert world.seconds(settle_s, busy, {"inflight": 216}).replicas == first


def test_a_queue_that_grows_while_replicas_start_asks_for_nothing_more() -> None:
    world = World(1)
    busy = FULL | {"decode_tokens": 10, "prefill_tokens": 10}
    targets = set()
    for i in range(90):
        advice = world.second(busy | {"waiting": 10 + 8 * i}, SIZES | {"inflight": 700})
        world.target = advice.replicas or world.target
        targets.add(world.target)
    offered = (600 * CPU_STEP.d_ms + 360 * 61 / 16) / 1_000
    assert max(targets) <= math.ceil(offered / 0.8)
    assert advice.inputs["pressure"] == "Settling"


def test_working_a_backlog_off_asks_for_no_more_than_what_arrives() -> None:
    world = World(4, replace(CONFIG, scaling=replace(CONFIG.scaling, up_ticks=3)))
    served = FULL | {"decode_tokens": 250, "prefill_tokens": 200, "waiting": 3}
    advice = world.seconds(20, served, SIZES | {"inflight": 76})
    offered = (600 * CPU_STEP.d_ms + 360 * 61 / 16) / 1_000
    assert advice.inputs["demand_share"] == pytest.approx(offered, rel=0.02)
    assert advice.replicas == 4


def test_an_idle_fleet_goes_to_the_minimum_unless_it_cannot_see() -> None:
    assert World(3).seconds(3, {}, {}).replicas == 1
    held = {
        "HeldPartial": World(3).seconds(3, {}, {}, reporting=2),
        "HeldNoGateway": World(3).seconds(3, {}),
        "HeldNoFleetView": World(3).seconds(3, {}, {}, fleet=False),
    }
    for code, advice in held.items():
        assert advice.replicas == 3
        assert advice.reason.code == code
        assert advice.held


def test_going_down_needs_the_rest_to_carry_the_load_with_room_to_spare() -> None:
    def after(decode_tps: int) -> int | None:
        # 3.7 ms a token: 100 tokens/s are 0.37 of a replica
        replica = {"running": 8, "kv_tokens_used": 2_400, "decode_tokens": decode_tps // 2, "steps": 10}
        return World(2).seconds(14, replica, {"inflight": 16}).replicas

    assert after(160) == 1
    assert after(200) == 2
    assert after(260) == 2


def test_blind_holds_whatever_was_decided_last() -> None:
    world = World(3)
    world.seconds(3, FULL, {})
    target = world.scaler.recommend(world.book.signals(world.now_ns), world.now_ns).replicas
    advice = world.seconds(30, reporting=0)
    assert advice.replicas == target
    assert advice.reason.code == "HeldBlind"


def test_someone_elses_change_is_noted() -> None:
    world = World(1)
    world.seconds(10, {}, {})
    world.target = world.n = 4
    assert "Adopted" in codes(world.second({}, {}, reporting=1))


def test_every_figure_of_the_inputs_is_a_plain_value() -> None:
    advice = World(1).seconds(5, FULL, {"inflight": 20})
    assert all(v is None or isinstance(v, int | float | str) for v in advice.inputs.values())


@pytest.mark.slow
def test_a_load_that_is_expected_is_asked_for_before_it_comes() -> None:
    world = World(1, replace(CONFIG, scaling=replace(CONFIG.scaling, seasons_s=(600.0,))))
    advices = []
    for t in range(2_100):
        rate = 6 if t // 300 % 2 else 1  # ten minutes a day: a quiet half, a busy one
        gateway = SIZES | {"arrivals": rate, "routed": {"r0": rate}, "succeeded": rate, "output_tokens": 60 * rate}
        gateway |= {"predicted_prompt_tokens": {"r0": 100 * rate}, "inflight": 2 * rate}
        work = {"running": 2 * rate, "kv_tokens_used": 600 * rate, "decode_tokens": 60 * rate, "steps": 10}
        advices.append(world.second(work | {"prefill_tokens": 100 * rate, "cold_start_ms": 60_000.0}, gateway))
    quiet, eve = advices[1_950], advices[2_070]
    assert quiet.inputs["ahead_trusted"] == 1
    assert quiet.ahead is not None
    assert quiet.ahead.horizon_s == 60
    assert quiet.ahead.decode_tps < 200
    assert eve.inputs["ahead_by"] == "season 600 s"
    assert eve.ahead is not None
    assert eve.ahead.decode_tps > 250
    assert eve.stages[0].code == "Forecast"
    assert eve.inputs["ask_up"] > 1  # type: ignore[operator]


def test_without_a_forecast_the_load_of_now_is_asked_for() -> None:
    world = World(1, replace(CONFIG, scaling=replace(CONFIG.scaling, forecast=False)))
    advice = world.seconds(5, {"running": 2, "decode_tokens": 100, "steps": 10}, {"inflight": 2})
    assert advice.ahead is None
    assert "ahead_s" not in advice.inputs
