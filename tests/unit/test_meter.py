"""Counts of a gateway: each value once, in the window it fell into and in the totals."""

from __future__ import annotations

from deployments.meter import Buckets, Meter
from policies.events import Finish, Outcome, Usage
from policies.types import LATENCY_BOUNDS_MS, Reason, RouteChoice

MS = 1_000_000
CHAT = "/v1/chat/completions"
OK = Finish(Outcome.SUCCEEDED, Reason("ok", ""))


def test_buckets_take_nanoseconds_and_start_again() -> None:
    buckets = Buckets()
    for ms in (0, 1, 2, 700_000):
        buckets.add(ms * MS)
    taken = buckets.take()
    assert taken.count == 4
    assert taken.sum_ms == 700_003
    assert taken.counts[0] == 2
    assert taken.counts[-1] == 1
    assert buckets.take().count == 0


def test_a_value_on_a_bound_is_in_its_bucket() -> None:
    buckets = Buckets()
    buckets.add(round(LATENCY_BOUNDS_MS[5] * MS))
    assert buckets.take().counts[5] == 1


def test_report_closes_the_window() -> None:
    meter = Meter("g", "m")
    choice = RouteChoice((("r",),), Reason("prefix_hit", ""), {"r": 10.0}, {"r": 64})
    meter.arrived()
    meter.dispatched(choice, "r", 100)
    meter.first_byte(CHAT, 30 * MS, 25 * MS, 10.0)
    meter.itl.add(5 * MS)
    meter.ended(CHAT, OK, 50 * MS, Usage(100, 7, 64), 7, 90)
    meter.arrived()
    meter.ended(CHAT, Finish(Outcome.REFUSED, Reason("inflight_requests", "")), MS, Usage(), 0, 50)
    first = meter.report(inflight=1, queued=0, plan_seq=4)
    assert (first.arrivals, first.succeeded, first.failed) == (2, 1, {"inflight_requests": 1})
    assert (first.ttft.count, first.itl.count, first.e2e.count, first.ttft_error_ms.count) == (1, 1, 1, 1)
    assert first.ttft_error_ms.sum_ms == 15
    assert (first.prompt_tokens, first.output_tokens) == (100, 7)
    assert (first.routed, first.predicted_prompt_tokens, first.predicted_hit_tokens) == (
        {"r": 1},
        {"r": 100},
        {"r": 64},
    )
    assert (first.gateway_id, first.model, first.seq, first.plan_seq, first.inflight) == ("g", "m", 1, 4, 1)
    second = meter.report(0, 0, None)
    assert (second.seq, second.arrivals, second.itl.count, second.routed) == (2, 0, 0, {})
    assert second.window_ms >= 0


def test_totals_keep_what_reports_have_taken() -> None:
    meter = Meter("g", "m")
    for _ in range(3):
        meter.itl.add(5 * MS)
        meter.report(0, 0, None)
    meter.itl.add(5 * MS)
    meter.fold()
    meter.fold()
    text = meter.telemetry.render().decode()
    assert "tidegate_itl_seconds_count 4.0" in text
    meter.retried("draining")
    assert 'tidegate_retries_total{reason="draining"} 1.0' in meter.telemetry.render().decode()


def test_prompt_tokens_of_a_stream_without_usage_are_the_estimate() -> None:
    meter = Meter("g", "m")
    meter.ended(CHAT, OK, MS, Usage(), 9, 80)
    meter.ended(CHAT, OK, MS, Usage(0, 0), 0, 80)
    report = meter.report(0, 0, None)
    assert (report.prompt_tokens, report.output_tokens) == (80, 9)
    assert "tidegate_prompt_tokens_total 0.0" in meter.telemetry.render().decode()


def test_refusals_before_the_flow_are_counted_but_do_not_arrive() -> None:
    meter = Meter("g", "m")
    meter.refused("unknown", "unknown_url")
    text = meter.telemetry.render().decode()
    assert 'tidegate_requests_total{endpoint="unknown",outcome="refused",reason="unknown_url"} 1.0' in text
    assert meter.report(0, 0, None).arrivals == 0
