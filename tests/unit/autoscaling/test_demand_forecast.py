from __future__ import annotations

from dataclasses import replace

import pytest

from autoscaling.demand import Demand
from autoscaling.demand_forecast import DemandForecast
from autoscaling.forecast import GAP_S_MAX
from policies.config import ControlConfig, ScalingConfig
from policies.control.signals import SignalBook, Signals
from policies.control.traffic import ClassTraffic
from tests.unit.control.fleet import SECOND_NS, gateway_report, replica_report

DEMAND = Demand(
    served_prefill_tps=600.0, served_decode_tps=360.0, offered_prefill_tps=600.0, offered_decode_tps=360.0,
    kv_tokens=4_000, queue=0, inflight=8, arrivals_ps=6.0, output_tokens_mean=60.0, prompt_tokens_mean=100.0,
    kv_tokens_mean=500.0,
)  # fmt: skip


def signals(repeats_ps: float = 0.0, tasks_open: int = 0, **arrivals_ps: float) -> Signals:
    """What one gateway and one replica say, with these arrivals by class."""
    book = SignalBook(ControlConfig())
    book.receive_replica(replica_report("r0", 1), SECOND_NS)
    book.receive_gateway(gateway_report(seq=1, arrivals=6), SECOND_NS)
    found = book.signals(SECOND_NS)
    assert found.traffic is not None
    by_class = {name: ClassTraffic(arrivals_ps=rate) for name, rate in arrivals_ps.items()}
    total = sum(arrivals_ps.values())
    traffic = replace(found.traffic, arrivals_ps=total, repeats_ps=repeats_ps, tasks_open=tasks_open, by_class=by_class)
    return replace(found, traffic=traffic)


def play(forecast: DemandForecast, seen: Signals, seconds: int, demand: Demand = DEMAND, begin: int = 0) -> None:
    for t in range(begin, begin + seconds):
        forecast.measure(demand, seen, 60.0, t * SECOND_NS)


def test_a_steady_load_is_what_comes_in_tokens_and_kv() -> None:
    forecast = DemandForecast(ScalingConfig())
    assert forecast.ahead() is None
    play(forecast, signals(standard=6.0), 900)
    ahead = forecast.ahead()
    assert ahead is not None
    assert ahead.trusted
    assert ahead.horizon_s == 60.0
    assert ahead.prefill_tps == pytest.approx(600.0)
    assert ahead.decode_tps == pytest.approx(360.0)
    assert ahead.kv_tokens == pytest.approx(4_000.0)


def test_classes_have_their_own_series_and_add_up() -> None:
    forecast = DemandForecast(ScalingConfig())
    play(forecast, signals(interactive=4.0, batch=2.0), 60)
    prefill, decode, _ = forecast.by_class()["interactive"]
    assert prefill.value == pytest.approx(400.0)
    assert decode.value == pytest.approx(240.0)
    ahead = forecast.ahead()
    assert ahead is not None
    assert ahead.decode_tps == pytest.approx(360.0)


def test_batch_counts_without_its_margin() -> None:
    margins = {}
    for name in ("standard", "batch"):
        forecast = DemandForecast(ScalingConfig())
        seen = signals(standard=6.0) if name == "standard" else signals(batch=6.0)
        for t in range(1_500):
            high = replace(DEMAND, offered_decode_tps=360.0 if t // 100 % 2 else 120.0)
            forecast.measure(high, seen, 60.0, t * SECOND_NS)
        ahead = forecast.ahead()
        assert ahead is not None
        margins[name] = ahead.margin
    assert margins["standard"] > 0.1
    assert margins["batch"] <= 0


def test_what_clients_repeat_is_no_demand() -> None:
    forecast = DemandForecast(ScalingConfig())
    play(forecast, signals(standard=6.0, repeats_ps=3.0), 60)
    ahead = forecast.ahead()
    assert ahead is not None
    assert ahead.decode_tps == pytest.approx(180.0)


def test_ticks_without_sight_leave_no_mark() -> None:
    forecast = DemandForecast(ScalingConfig())
    play(forecast, signals(standard=6.0), 60)
    blind = replace(signals(standard=6.0), traffic=None)
    play(forecast, blind, int(GAP_S_MAX), begin=60)
    play(forecast, signals(standard=6.0), 30, begin=130)
    ahead = forecast.ahead()
    assert ahead is not None
    assert ahead.decode_tps == pytest.approx(360.0)


@pytest.mark.parametrize(
    ("key", "value"), [("forecast_quantile", 1.0), ("forecast_quantile", 0.1), ("seasons_s", (60.0,))]
)
def test_settings_are_checked(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key):
        ScalingConfig(**{key: value})  # type: ignore[arg-type]
