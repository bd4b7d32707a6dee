"""Calls of tasks on their way through the flow: counted, taken back, refused before they load anything."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.build import Policies, build_policies
from policies.config import AdmissionConfig, PolicyConfig, PricesConfig, TasksConfig
from policies.events import (
    Arrived,
    ClientGone,
    Event,
    Finish,
    FirstByte,
    Outcome,
    ResponseEnded,
    ResponseStarted,
    Routed,
    SendError,
    UpstreamFailed,
    UpstreamFailure,
    Usage,
    WaitedOut,
)
from policies.flow import RequestFlow
from policies.tasks import NO_LIMITS, TaskEnding, TaskLimits, TaskOutcome, TaskView
from policies.types import Reason, Request, RouteChoice

MS = 1_000_000
REQUEST = Request("r", "m", "/v1/chat/completions", "a", 100, 10, (), 64, True, 0, task="t")
ROUTED = Routed(RouteChoice((("r1",), ("r2",)), Reason("test", ""), {}, {}))
NOBODY = Routed(RouteChoice((), Reason("test", ""), {}, {}))
WHOLE: tuple[Event, ...] = (Arrived(), ROUTED, ResponseStarted(200), FirstByte(), ResponseEnded())
USAGE = Usage(90, 8, 40)


def a_policies(admission: AdmissionConfig | None = None, tasks: TasksConfig | None = None) -> Policies:
    prices = PricesConfig(prompt_usd_per_mtok=1.0, cached_usd_per_mtok=0.1, output_usd_per_mtok=10.0)
    admission = admission or AdmissionConfig(no_replica_wait_ms=100)
    return build_policies(PolicyConfig(admission=admission, prices=prices, tasks=tasks or TasksConfig()), seed=0)


def run(
    policies: Policies,
    *events: Event,
    request: Request = REQUEST,
    limits: TaskLimits = NO_LIMITS,
    outcome: TaskOutcome | None = None,
) -> tuple[Finish, SendError | None]:
    """Effects of one request that ends with the last event."""
    flow = RequestFlow(policies.flow_context, request, limits, outcome)
    for event in events[:-1]:
        flow.step(event, 5 * MS)
        assert not flow.done
    flow.note_output(USAGE, 8)
    effects = flow.step(events[-1], 5 * MS)
    finish = effects[-1]
    assert isinstance(finish, Finish)
    return finish, next((e for e in effects if isinstance(e, SendError)), None)


def view(policies: Policies) -> TaskView:
    found = policies.flow_context.tasks.get("a", "t", 5 * MS)
    assert found is not None
    return found


def test_a_call_is_counted_with_its_true_tokens_and_cost() -> None:
    policies = a_policies()
    run(policies, *WHOLE)
    counts = view(policies).counts
    assert (counts.calls, counts.calls_open, counts.succeeded, counts.tokens) == (1, 0, 1, 98)
    assert counts.usd == pytest.approx((50 * 1.0 + 40 * 0.1 + 8 * 10.0) / 1e6)
    assert counts.busy_ms == 5.0


def test_the_outcome_of_the_last_call_ends_the_task() -> None:
    policies = a_policies()
    run(policies, *WHOLE)
    run(policies, *WHOLE, outcome=TaskOutcome.SUCCESS)
    assert [(e.ending, e.calls, e.tokens) for e in policies.flow_context.tasks.take_ended()] == [
        (TaskEnding.SUCCESS, 2, 196)
    ]
    finish, error = run(policies, Arrived())
    assert (finish.outcome, finish.reason.code) == (Outcome.REFUSED, "task_ended")
    assert error is not None
    assert (error.status, error.should_retry) == (409, False)


@pytest.mark.parametrize(
    "events",
    [
        (Arrived(), ClientGone()),
        (Arrived(), NOBODY, WaitedOut()),
        (Arrived(), NOBODY, ClientGone()),
    ],
)
def test_a_call_no_engine_saw_costs_the_task_nothing(events: tuple[Event, ...]) -> None:
    policies = a_policies()
    run(policies, *events)
    counts = view(policies).counts
    assert (counts.calls, counts.calls_open, counts.failed, counts.tokens, counts.usd) == (0, 0, 0, 0, 0.0)
    assert policies.flow_context.tasks.open_calls == 0


def test_a_call_refused_under_load_costs_the_task_nothing() -> None:
    policies = a_policies(AdmissionConfig(inflight_requests_max=1), TasksConfig(calls_max=1))
    held = RequestFlow(policies.flow_context, replace(REQUEST, request_id="held", task=""))
    held.step(Arrived(), 0)
    finish, _ = run(policies, Arrived())
    assert finish.outcome is Outcome.REFUSED
    assert view(policies).counts.calls == 0
    held.step(ClientGone(), 0)
    finish, _ = run(policies, *WHOLE)
    assert finish.outcome is Outcome.SUCCEEDED


def test_a_call_that_broke_off_counts_as_failed() -> None:
    policies = a_policies()
    broken = UpstreamFailed(UpstreamFailure.TIMEOUT)
    run(policies, Arrived(), ROUTED, broken, outcome=TaskOutcome.SUCCESS)
    counts, seen = view(policies).counts, view(policies)
    assert (counts.calls, counts.failed, counts.calls_open) == (1, 1, 0)
    assert seen.outcome is None


def test_a_task_at_its_budget_is_refused_before_anything_is_held() -> None:
    policies = a_policies(AdmissionConfig(inflight_requests_max=1))
    run(policies, *WHOLE, limits=TaskLimits(calls_max=1))
    held = RequestFlow(policies.flow_context, replace(REQUEST, request_id="held", task=""))
    held.step(Arrived(), 0)
    finish, error = run(policies, Arrived())
    assert finish.reason.code == "task_calls"
    assert error is not None
    assert (error.status, error.type, error.retry_after_s) == (429, "insufficient_quota", None)
    assert policies.flow_context.admission.requests == 1
