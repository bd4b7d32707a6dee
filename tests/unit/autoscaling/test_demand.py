from __future__ import annotations

from typing import Any

import pytest

from autoscaling.demand import Demand, DemandMeter
from policies.config import ControlConfig
from policies.control.signals import SignalBook
from tests.unit.control.fleet import SECOND_NS, gateway_report, replica_report


def measure(
    seconds: int, replica: dict[str, Any] | None, gateway: dict[str, Any] | None, meter: DemandMeter | None = None
) -> Demand:
    book, meter = SignalBook(ControlConfig()), meter or DemandMeter()
    demand = None
    for i in range(1, seconds + 1):
        if replica is not None:
            book.receive_replica(replica_report("r1", i, **replica), i * SECOND_NS)
        if gateway is not None:
            book.receive_gateway(gateway_report(seq=i, **gateway), i * SECOND_NS)
        demand = meter.measure(book.signals(i * SECOND_NS), i * SECOND_NS)
    assert demand is not None
    return demand


def sizes(arrivals: int, prompt_tokens: int, routed: int | None = None) -> dict[str, Any]:
    """A gateway's counts of requests of one size, all dispatched unless ``routed`` says otherwise."""
    n = arrivals if routed is None else routed
    return {"arrivals": arrivals, "routed": {"r1": n}, "predicted_prompt_tokens": {"r1": n * prompt_tokens}}


def test_nothing_known_asks_for_nothing() -> None:
    demand = measure(1, None, None)
    assert demand.rates(backlog=True) == demand.rates(backlog=False) == (0, 0)
    assert (demand.kv_tokens, demand.queue, demand.inflight) == (0, 0, 0)
    assert demand.arrivals_ps is None
    assert demand.output_tokens_mean is None


def test_a_full_replica_hides_demand_that_the_gateway_sees() -> None:
    served = {"prefill_tokens": 100, "decode_tokens": 50, "running": 16, "waiting": 40}
    offered = sizes(arrivals=10, prompt_tokens=50) | {"succeeded": 2, "output_tokens": 50}
    demand = measure(30, served, offered)
    assert demand.output_tokens_mean == pytest.approx(25)
    assert demand.rates(backlog=True) == pytest.approx((500, 250))
    assert demand.queue == 40


def test_work_in_progress_counts_when_nothing_arrives_any_more() -> None:
    demand = measure(20, {"prefill_tokens": 0, "decode_tokens": 200, "running": 8}, {"arrivals": 0})
    assert demand.rates(backlog=False) == pytest.approx((0, 200))


def test_working_off_a_backlog_is_no_demand_for_more() -> None:
    served = {"prefill_tokens": 900, "decode_tokens": 900, "running": 64, "waiting": 40}
    demand = measure(30, served, sizes(arrivals=10, prompt_tokens=50) | {"succeeded": 12, "output_tokens": 360})
    assert demand.rates(backlog=True) == pytest.approx((500, 300))
    assert demand.rates(backlog=False) == pytest.approx((900, 900))


def test_a_backlog_that_no_gateway_explains_is_judged_by_what_is_served() -> None:
    assert measure(9, {"decode_tokens": 90, "waiting": 4}, None).rates(backlog=True) == pytest.approx((0, 90))


def test_cached_prompt_tokens_cost_nothing() -> None:
    replica = {"prefix_query_tokens": 1_000, "prefix_hit_tokens": 750, "prefill_tokens": 250}
    demand = measure(30, replica, sizes(arrivals=10, prompt_tokens=100))
    assert demand.offered_prefill_tps == pytest.approx(250)
    assert demand.prompt_tokens_mean == pytest.approx(25)


def test_refused_requests_are_demand_and_do_not_shrink_the_means() -> None:
    gateway = sizes(arrivals=10, prompt_tokens=50, routed=4) | {"succeeded": 3, "failed": {"inflight": 6, "reset": 1}}
    demand = measure(30, {}, gateway | {"output_tokens": 80})
    assert demand.prompt_tokens_mean == pytest.approx(50)
    assert demand.output_tokens_mean == pytest.approx(20)
    assert demand.rates(backlog=True) == pytest.approx((500, 200))


def test_repeated_dispatches_are_not_taken_for_refusals() -> None:
    gateway = sizes(arrivals=10, prompt_tokens=50, routed=12) | {"succeeded": 8, "failed": {"reset": 2}}
    assert measure(30, {}, gateway | {"output_tokens": 100}).output_tokens_mean == pytest.approx(10)


def test_averages_outlive_a_quiet_minute() -> None:
    meter = DemandMeter()
    busy = sizes(arrivals=10, prompt_tokens=10) | {"succeeded": 10, "output_tokens": 300}
    measure(60, {"running": 4, "kv_tokens_used": 1_000}, busy, meter)
    demand = measure(60, {}, {}, meter)
    assert demand.output_tokens_mean == pytest.approx(30, rel=0.1)
    assert demand.kv_tokens_mean == pytest.approx(250, rel=0.1)
    assert demand.rates(backlog=False) == (0, 0)


def test_waiting_requests_hold_no_kv() -> None:
    gateway = sizes(arrivals=10, prompt_tokens=100) | {"inflight": 12}
    demand = measure(10, {"running": 2, "waiting": 10, "kv_tokens_used": 200}, gateway)
    assert demand.kv_tokens == 200
    assert demand.queue == 10
    assert demand.inflight == 12


def test_without_a_gateway_replicas_tell_what_is_open() -> None:
    assert measure(3, {"running": 2, "waiting": 1}, None).inflight == 3
