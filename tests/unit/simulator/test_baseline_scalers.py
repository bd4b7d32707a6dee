"""Baseline scalers do what their projects document, on values worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from autoscaling.simulator.baselines.dynamo import DynamoPlanner, DynamoSettings, dynamo_scaler
from autoscaling.simulator.baselines.dynamo_engine import surface_of_profile
from autoscaling.simulator.baselines.hpa import HpaScaler, HpaSettings
from autoscaling.simulator.baselines.kpa import KpaScaler, KpaSettings
from autoscaling.simulator.baselines.predictors import Predictor
from autoscaling.simulator.baselines.ray_serve import RayServeScaler, RayServeSettings
from autoscaling.simulator.baselines.tables import SCALERS, as_users_run_it
from autoscaling.simulator.spec import EngineProfile, StepLaw
from policies.config import ObjectivesConfig, PolicyConfig, ScalingConfig
from policies.control.scaler import ScaleAdvice, Scaler
from policies.control.signals import SignalBook
from policies.types import FleetView, Histogram, StepCoefficients
from tests.unit.control.fleet import SECOND_NS, gateway_report, histogram, replica_report

CONFIG = PolicyConfig(scaling=ScalingConfig(replicas_max=100), objectives=ObjectivesConfig(ttft_ms=500.0, itl_ms=20.0))


class World:
    """Signals of like replicas, second by second; the fleet stays as the test sets it."""

    def __init__(self, scaler: Scaler, running: int, target: int | None = None) -> None:
        self.scaler = scaler
        self.running = running
        self.target = running if target is None else target
        self.now_s = 0

    def run(
        self, seconds: int, open_now: int = 0, busy: float = 0.0, reporting: int | None = None, **gateway: Any
    ) -> int:
        """So many seconds alike; the last answer."""
        answer: ScaleAdvice | None = None
        for _ in range(seconds):
            self.now_s += 1
            book = SignalBook(CONFIG.control)
            now_ns = self.now_s * SECOND_NS
            for i in range(self.running if reporting is None else reporting):
                book.receive_replica(replica_report(f"r{i}", self.now_s, busy_share=busy), now_ns)
            book.receive_gateway(gateway_report(seq=self.now_s, inflight=open_now, **gateway), now_ns)
            book.receive_fleet(FleetView(self.running, self.target, 1, 100), now_ns)
            answer = self.scaler.recommend(book.signals(now_ns), now_ns)
        assert answer is not None
        assert answer.replicas is not None
        return answer.replicas


# --- Ray Serve --------------------------------------------------------------------------------------------------------


def test_ray_serve_defaults_are_those_of_the_source() -> None:
    assert RayServeSettings() == RayServeSettings(2, 30, 30, 600, 1, 1, 10)


def test_ray_serve_goes_up_after_thirty_seconds_of_wishing() -> None:
    world = World(RayServeScaler(CONFIG), 4)  # 12 open at 2 a replica: 6 replicas
    assert world.run(30, open_now=12) == 4
    assert world.run(1, open_now=12) == 6


def test_ray_serve_goes_down_after_ten_minutes_and_never_below_one() -> None:
    world = World(RayServeScaler(CONFIG), 4)
    assert world.run(600) == 4
    assert world.run(1) == 1


def test_ray_serve_starts_its_delay_anew_when_the_wish_turns() -> None:
    scaler = RayServeScaler(CONFIG, RayServeSettings(look_back_period_s=1.0, push_interval_s=1.0))
    world = World(scaler, 4)
    assert world.run(25, open_now=12) == 4
    assert world.run(3, open_now=8) == 4  # 4 is right
    assert world.run(31, open_now=12) == 4  # heard a second later: wished for since second 30
    assert world.run(1, open_now=12) == 6


def test_ray_serve_looks_back_thirty_seconds_and_hears_every_ten() -> None:
    scaler = RayServeScaler(CONFIG, RayServeSettings(upscale_delay_s=0, downscale_delay_s=0))
    world = World(scaler, 2)
    world.run(15)
    assert world.run(5, open_now=24) == 1  # pushed at 1, 11: nothing heard yet
    # Pushed at 31 s: 15 s of nothing, 15 s of 24: 12 requests, 6 replicas.
    assert world.run(11, open_now=24) == 6


@pytest.mark.parametrize(
    ("running", "requests", "factor", "replicas"),
    [(4, 2, 0.5, 3), (2, 2, 0.3, 1), (4, 16, 0.5, 6), (4, 20, 2.0, 16)],
    ids=["ceil(4 - 1.5)", "stuck: one less", "ceil(4 + 2)", "ceil(4 + 12)"],
)
def test_ray_serve_factors_scale_the_difference(running: int, requests: int, factor: float, replicas: int) -> None:
    settings = RayServeSettings(
        upscale_delay_s=0, downscale_delay_s=0, upscaling_factor=factor, downscaling_factor=factor
    )
    assert World(RayServeScaler(CONFIG, settings), running).run(1, open_now=requests) == replicas


# --- HPA --------------------------------------------------------------------------------------------------------------


def test_hpa_holds_within_the_tolerance_and_rounds_up_beyond_it() -> None:
    assert World(HpaScaler(CONFIG), 4).run(1, busy=0.87) == 4  # 1.0875
    assert World(HpaScaler(CONFIG), 4).run(1, busy=0.73) == 4  # 0.9125
    assert World(HpaScaler(CONFIG), 4).run(1, busy=0.95) == 5  # 4 * 1.1875 = 4.75


def test_hpa_looks_every_fifteen_seconds() -> None:
    world = World(HpaScaler(CONFIG), 4)
    assert world.run(1, busy=0.8) == 4
    assert world.run(14, busy=0.95) == 4
    assert world.run(1, busy=0.95) == 5


def test_hpa_rises_by_four_pods_or_doubles_whichever_is_more() -> None:
    greedy = HpaSettings(target_share=0.1)
    assert World(HpaScaler(CONFIG, greedy), 3).run(1, busy=0.95) == 7
    assert World(HpaScaler(CONFIG, greedy), 10).run(1, busy=0.95) == 20


def test_hpa_counts_pods_that_start_as_idle_when_going_up() -> None:
    assert World(HpaScaler(CONFIG), 4, target=6).run(1, busy=0.95) == 6  # 3.8 / (0.8 * 6) = 0.79: turned round
    # 3.8 / (0.3 * 6) = 2.11: 13 pods, and twice 6 at most.
    assert World(HpaScaler(CONFIG, HpaSettings(target_share=0.3)), 4, target=6).run(1, busy=0.95) == 12


def test_hpa_counts_silent_pods_as_on_target_when_going_down_and_waits_five_minutes() -> None:
    # (3 * 0.4 + 0.8) / (0.8 * 4) = 0.625: 2.5 pods.
    world = World(HpaScaler(CONFIG), 4)
    assert world.run(301, busy=0.4, reporting=3) == 4
    assert world.run(15, busy=0.4, reporting=3) == 3


def test_hpa_on_kv_use() -> None:
    settings = HpaSettings(metric="kv")
    with pytest.raises(ValueError, match="metric"):
        HpaSettings(metric="cpu")
    assert World(HpaScaler(CONFIG, settings), 2).run(400) == 0 + 1  # an empty cache asks for nothing: the minimum


# --- KPA --------------------------------------------------------------------------------------------------------------

TEN = KpaSettings(concurrency=10.0)
"""Seven open requests a pod."""


def test_kpa_defaults_are_those_of_the_config_map() -> None:
    assert KpaSettings() == KpaSettings(100, 0.7, 60, 0.1, 2.0, 1_000, 2.0, 0.0, 2.0)


def test_kpa_panics_on_the_mean_of_the_last_tenth_and_then_never_falls() -> None:
    world = World(KpaScaler(CONFIG, TEN), 1)
    assert world.run(61, open_now=5) == 1
    assert world.run(2, open_now=20) == 2  # last six seconds: (4 * 5 + 2 * 20) / 6 = 10: 2 pods, twice what is ready
    assert world.run(6, open_now=20) == 3
    world.running = world.target = 3
    assert world.run(60) == 3
    assert world.run(4) == 1


def test_kpa_without_panic_follows_the_mean_of_a_minute() -> None:
    world = World(KpaScaler(CONFIG, TEN), 1)
    world.run(65, open_now=5)
    world.running = world.target = 3
    # 3 pods are ready: panic would need 6. (30 * 5 + 30 * 13) / 60 = 9: 2 pods.
    assert world.run(30, open_now=13) == 2


def test_kpa_that_finds_a_fleet_holds_it_for_a_minute_and_halves_it_then() -> None:
    world = World(KpaScaler(CONFIG, TEN), 4)
    assert world.run(62) == 4
    assert world.run(1) == 2  # floor(4 / 2)


def test_kpa_scale_down_delay_keeps_the_highest_answer() -> None:
    world = World(KpaScaler(CONFIG, replace(TEN, scale_down_delay_s=30.0, panic_threshold_share=100.0)), 1)
    assert world.run(1, open_now=14) == 2
    assert world.run(30, open_now=0) == 2  # one sample of 14 in a minute asks for one pod
    assert world.run(2) == 1


# --- Dynamo -----------------------------------------------------------------------------------------------------------


def profile(**changes: Any) -> EngineProfile:
    values: dict[str, Any] = {
        "name": "p", "gpu": "G", "gpus": 1, "model": "m", "law": StepLaw(10.0, 0.1, 0.1, 0.1), "kv_tokens": 1_000_000,
        "context_tokens_max": 100_000, "cold_start_ms": 0.0, "usd_per_gpu_hour": 1.0, "source": "made up",
        "step_tokens_max": 1_000,
    }  # fmt: skip
    return EngineProfile(**(values | changes))


def test_engine_surface_computes_what_a_sweep_would_measure() -> None:
    s = surface_of_profile(profile(law=StepLaw(10.0, 0.0, 0.0, 0.1)))
    assert s.prefill_ms(2_000) == pytest.approx(220.0)
    assert s.prefill_tps(2_000) == pytest.approx(9_090.9, rel=1e-4)
    s = surface_of_profile(profile())
    assert s.itl_ms(10, 1_000) == pytest.approx(12.0)
    assert s.decode_batch(20.0, 1_000) == 50  # 10 + 0.2 B
    assert s.decode_tps(20.0, 1_000) == pytest.approx(2_500.0)
    assert s.decode_batch(1.0, 1_000) == 1
    assert surface_of_profile(profile(kv_tokens=7_500)).decode_batch(20.0, 1_000) == 7
    table = surface_of_profile(profile(law=StepLaw(0, 0, 0, 0, batch=((1, 5.0), (11, 10.0), (21, 20.0)))))
    assert [table.itl_ms(n, 0) for n in (1, 6, 11, 31)] == [5.0, 7.5, 10.0, 30.0]


def test_engine_that_does_both_is_held_by_its_token_gap() -> None:
    # Batch x: 10 x prompt tokens a step, 10 + x ms. 20 ms: x = 10, each sequence 2,000 ms: 5 requests/s.
    s = surface_of_profile(profile(law=StepLaw(10.0, 0.0, 0.0, 0.1)))
    assert s.both_rps(1_000, 100, 500.0, 20.0) == pytest.approx(5.0)
    # Behind 1,000 + 10 x prompt tokens: 110 ms and 10 + x ms. 123 ms: x = 3: 3 / 1,300 ms.
    assert s.both_rps(1_000, 100, 123.0, 20.0) == pytest.approx(3 / 1.3)
    assert s.both_rps(1_000, 100, 1.0, 1.0) == pytest.approx(1 / 1.1)  # out of reach: a batch of one counts
    assert s.both_rps(1_000, 100, 500.0, 20.0, hit_share=0.5) == pytest.approx(20 / 2.0)


SIZES: dict[str, Any] = {
    "arrivals": 10, "routed": {"r0": 10}, "predicted_prompt_tokens": {"r0": 20_000}, "succeeded": 10,
    "output_tokens": 4_000,
}  # fmt: skip
"""10 requests a second of 2,000 and 400 tokens."""


def planner(role: str, running: int, **settings: Any) -> World:
    made = DynamoSettings(role, interval_s=60.0, predictor="constant", **settings)
    return World(DynamoPlanner(CONFIG, made, profile()), running)


def test_dynamo_prefill_replicas_are_prompt_tokens_over_throughput() -> None:
    # 2,000 tokens: (10.1 + 100) + (10.1 + 0.1 + 100) = 220.3 ms, 9,079 tokens/s; 20,000 fill 2.2.
    world = planner("prefill", 1)
    assert world.run(60, **SIZES) == 1
    assert world.run(1, **SIZES) == 3


def test_dynamo_decode_replicas_are_output_tokens_over_throughput_within_the_gap() -> None:
    # Context 2,200: 10 + 0.32 B <= 20: B = 31, 1,556 tokens/s; 4,000 fill 2.57.
    assert planner("decode", 2).run(61, **SIZES) == 3


def test_dynamo_decode_correction_tightens_the_gap_and_a_step_is_bounded() -> None:
    # 40 ms measured, 400 tokens: 16 s, 160 at once, 40 a replica: 22.8 ms expected, correction 1.754.
    # Gap of 11.4 ms: B = 4, 354.6 tokens/s: 11.3 engines.
    gaps: dict[str, Any] = {"itl": histogram(*[40.0] * 5)}
    assert planner("decode", 4).run(61, **SIZES, **gaps) == 12
    assert planner("decode", 4, step_replicas_max=3).run(61, **SIZES, **gaps) == 7
    assert planner("decode", 4, correct=False).run(61, **SIZES, **gaps) == 3


def test_dynamo_prefill_correction_only_ever_lowers() -> None:
    expected_ms = surface_of_profile(profile()).ttft_ms(2_000)
    slow, fast = histogram(expected_ms * 4), histogram(expected_ms / 4)
    assert planner("prefill", 1).run(61, **SIZES, ttft=slow) == 3
    assert planner("prefill", 1).run(61, **SIZES, ttft=fast) == 1  # 2.2 / 4


def test_dynamo_for_both_roles_takes_the_replicas_own_models_where_it_has_no_profile() -> None:
    made = DynamoSettings(interval_s=60.0, predictor="constant")
    world = World(dynamo_scaler(None, made)(CONFIG), 2)
    rate = surface_of_profile(
        profile(law=StepLaw(25.0, 2.0, 0.5, 1.9), kv_tokens=40_000, running_seqs_max=16, step_tokens_max=2_048)
    ).both_rps(2_000, 400, 500.0, 20.0)
    assert world.run(61, **SIZES) == min(10, math.ceil(10 / rate))


def test_dynamo_holds_while_replicas_start_and_without_traffic() -> None:
    world = planner("decode", 2)
    world.target = 4
    assert world.run(61, **SIZES) == 4
    assert planner("decode", 2).run(200) == 2


def test_dynamo_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="role"):
        DynamoSettings(role="encode")
    with pytest.raises(ValueError, match="interval_s"):
        DynamoSettings(interval_s=0)
    with pytest.raises(ValueError, match="predictor"):
        Predictor("prophet")


def test_predictors_repeat_the_last_value_or_follow_a_wave() -> None:
    constant, arima = Predictor("constant"), Predictor("arima")
    assert arima.predict() == 0.0
    wave = [20 + 10 * math.sin(2 * math.pi * t / 10) for t in range(61)]
    for value in [0.0, 0.0, *wave[:60]]:  # leading zeros are skipped
        constant.add(value)
        arima.add(value)
    assert constant.predict() == wave[59]
    assert arima.predict() == pytest.approx(wave[60], abs=0.3)
    flat = Predictor("arima")
    for _ in range(9):
        flat.add(7.0)
    assert flat.predict() == 7.0


# --- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n, factory in SCALERS.items() if factory is not None])
def test_every_scaler_keeps_within_bounds_and_says_nothing_of_a_fleet_it_does_not_know(name: str) -> None:
    factory = SCALERS[name]
    assert factory is not None
    config = replace(CONFIG, scaling=ScalingConfig(replicas_min=2, replicas_max=5))
    scaler = factory(config)
    nothing = SignalBook(CONFIG.control).signals(0)
    assert scaler.recommend(nothing, 0).replicas is None
    world = World(factory(config), 3)
    heavy = world.run(200, open_now=5_000, busy=1.0, **SIZES, ttft=histogram(900.0), itl=Histogram())
    assert 3 <= heavy <= 5
    assert 2 <= world.run(100) <= 5


def test_a_baselines_run_has_none_of_our_loops_on_engines_and_routing() -> None:
    config = as_users_run_it(PolicyConfig())
    assert not config.batching.enabled
    assert not config.affinity.enabled
    assert config.scaling.enabled


def test_step_coefficients_without_samples_are_no_engine_model() -> None:
    scaler = DynamoPlanner(CONFIG, DynamoSettings(interval_s=10.0))
    book = SignalBook(CONFIG.control)
    untold = replica_report("r0", 1, step_model=StepCoefficients(1, 1, 1, 1))
    for second in range(1, 13):
        book.receive_replica(replace(untold, seq=second), second * SECOND_NS)
        book.receive_gateway(gateway_report(seq=second, **SIZES), second * SECOND_NS)
        answer = scaler.recommend(book.signals(second * SECOND_NS), second * SECOND_NS)
    assert answer.reason.code == "Waiting"
    assert answer.replicas == 1
