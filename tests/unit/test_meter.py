"""Counts of a gateway: each value once, in the window it fell into and in the totals."""

from __future__ import annotations

from dataclasses import replace

from autoscaling.simulator.codec import dumps, encode
from deployments.meter import Meter
from policies.config import ObjectivesConfig
from policies.events import Finish, Outcome, Usage
from policies.histogram import Buckets
from policies.measures import ClassCounts, TenantCounts
from policies.steering import Knob, Override
from policies.tasks import TaskEnd, TaskEnding
from policies.types import LATENCY_BOUNDS_MS, Priority, Reason, Request, RouteChoice

MS = 1_000_000
CHAT = "/v1/chat/completions"
OK = Finish(Outcome.SUCCEEDED, Reason("ok", ""))
NO_USAGE = Usage()


def a_request(prompt_tokens: int = 90, priority: Priority = Priority.STANDARD, fingerprint: int = 0) -> Request:
    return Request("tg-1", "m", CHAT, "acme", prompt_tokens, None, (), 64, True, 0, priority, fingerprint=fingerprint)


def end(
    meter: Meter, request: Request, finish: Finish = OK, usage: Usage = NO_USAGE, tokens: int = 0, *, ms: float = 1
) -> bool:
    meter.arrived(request)
    ended_ns = round(ms * MS)
    return meter.ended(request, finish, usage, tokens, ended_ns=ended_ns, first_byte_ns=ended_ns // 2)


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
    meter.dispatched(choice, "r", 100)
    meter.first_byte(CHAT, 30 * MS, 25 * MS, 10.0)
    meter.itl.add(5 * MS)
    assert end(meter, a_request(), OK, Usage(100, 7, 64), 7, ms=50)
    assert not end(meter, a_request(50), Finish(Outcome.REFUSED, Reason("inflight_requests", "")))
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
    end(meter, a_request(80), OK, Usage(), 9)
    end(meter, a_request(80), OK, Usage(0, 0), 0)
    report = meter.report(0, 0, None)
    assert (report.prompt_tokens, report.output_tokens) == (80, 9)
    assert "tidegate_prompt_tokens_total 0.0" in meter.telemetry.render().decode()


def test_refusals_before_the_flow_are_counted_but_do_not_arrive() -> None:
    meter = Meter("g", "m")
    meter.ended_early("unknown", Outcome.REFUSED, "unknown_url")
    text = meter.telemetry.render().decode()
    assert 'tidegate_requests_total{endpoint="unknown",outcome="refused",reason="unknown_url"} 1.0' in text
    assert meter.report(0, 0, None).arrivals == 0


def test_each_task_that_is_over_is_in_every_metric_of_tasks() -> None:
    meter = Meter("g", "m")
    meter.tasks_ended(
        [
            TaskEnd("a", TaskEnding.SUCCESS, 4, 900, 0.02, 2_500.0),
            TaskEnd("b", TaskEnding.SUCCESS, 1, 100, 0.01, 500.0),
            TaskEnd("a", TaskEnding.STOPPED, 50, 1_000_000, 3.0, 60_000.0),
        ]
    )
    text = meter.telemetry.render().decode()
    assert 'tidegate_tasks_total{ending="success"} 2.0' in text
    assert 'tidegate_tasks_total{ending="stopped"} 1.0' in text
    assert 'tidegate_task_calls_sum{ending="success"} 5.0' in text
    assert 'tidegate_task_tokens_sum{ending="stopped"} 1e+06' in text
    assert 'tidegate_task_cost_usd_sum{ending="success"} 0.03' in text
    assert 'tidegate_task_e2e_seconds_bucket{ending="success",le="3.0"} 2.0' in text


def test_a_report_says_who_kept_promises_by_class_and_tenant() -> None:
    slow = {Priority.BATCH: ObjectivesConfig(ttft_ms=60_000)}
    meter = Meter("g", "m", lambda priority: slow.get(priority, ObjectivesConfig(ttft_ms=100, itl_ms=10)))
    end(meter, a_request(90), OK, Usage(90, 5), 5, ms=300)  # first byte after 150 ms
    end(meter, a_request(90, Priority.BATCH), OK, Usage(90, 5), 5, ms=300)
    end(meter, a_request(90, fingerprint=7), Finish(Outcome.REFUSED, Reason("queue_full", "")))
    end(meter, a_request(90, fingerprint=7), Finish(Outcome.FAILED, Reason("no_replica", "")))
    report = meter.report(0, 0, None, {"r1": "grey_ttft"}, (Override("o", Knob.LOAD_BOUND, value=2.0),))
    assert report.met == 1
    assert report.by_class == {
        "batch": ClassCounts(1, 1, 1),
        "standard": ClassCounts(3, 1, 0, refused=1, failed=1, late_ttft=1, late_itl=1),
    }
    assert report.by_tenant == {"acme": TenantCounts(4, 2, 1, 1, 190)}
    assert report.repeats == 1
    assert (report.ejected, report.overrides[0].id) == ({"r1": "grey_ttft"}, "o")
    assert meter.report(0, 0, None).by_class == {}
    text = meter.telemetry.render().decode()
    assert 'tidegate_met_requests_total{priority="batch"} 1.0' in text
    for objective, missed, judged in (("ttft", 2, 2), ("itl", 1, 1), ("e2e", 0, 1), ("availability", 1, 2)):
        labels = f'{{objective="{objective}",priority="standard"}}'
        assert f"tidegate_objective_missed_total{labels} {missed}.0" in text
        assert f"tidegate_objective_requests_total{labels} {judged}.0" in text


def test_extra_attempts_are_counted_when_they_begin_and_draining_is_none() -> None:
    meter = Meter("g", "m")
    for why in ("reset", "draining", "server_error"):
        meter.retried(why)
    meter.hedged()
    assert meter.report(0, 0, None).retries == 3
    assert meter.report(0, 0, None).retries == 0


def test_tasks_that_are_over_are_in_the_report_of_their_window() -> None:
    meter = Meter("g", "m")
    meter.tasks_ended(TaskEnd("a", ending, 1, 10, 0.0, 5.0) for ending in TaskEnding)
    report = meter.report(0, 0, None)
    assert (report.tasks_succeeded, report.tasks_failed) == (1, 2)


def test_a_report_does_not_grow_with_requests_or_tenants() -> None:
    sizes = []
    for requests in (2_000, 6_000):
        meter, choice = Meter("g", "m"), RouteChoice((("r",),), Reason("load", ""), {}, {})
        for i in range(requests):
            request = replace(a_request(fingerprint=i), tenant=f"t{i % 1_000}", priority=list(Priority)[i % 3])
            meter.dispatched(choice, f"r{i % 4}", 10)
            end(meter, request, OK if i % 2 else Finish(Outcome.FAILED, Reason("timeout", "")))
        sizes.append(len(dumps(encode(meter.report(0, 0, None)))))
    assert sizes[1] < 1.1 * sizes[0]
    assert max(sizes) < 5_000
