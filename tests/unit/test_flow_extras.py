"""The flow beyond the straight path: a turn to wait for, resumes, hedges, quarantine, budgets of tasks and of time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policies.build import Policies, build_policies
from policies.config import AdmissionConfig, FaultsConfig, PolicyConfig, PricesConfig
from policies.events import (
    AbortUpstream,
    ArmHedge,
    Arrived,
    ClientGone,
    Dispatch,
    Enqueue,
    Event,
    Expired,
    FirstByte,
    Granted,
    HedgeDue,
    HedgeWon,
    Outcome,
    RefusalKind,
    ReplicaRefused,
    ResponseEnded,
    ResponseStarted,
    Route,
    Routed,
    SendError,
    SendStreamError,
    TimeUp,
    UpstreamFailed,
    UpstreamFailure,
    Usage,
    WaitedOut,
    WaitForReplica,
)
from policies.flow import RequestFlow
from policies.steering import ColdModel, ColdPhase
from policies.tasks import TaskLimits
from policies.types import Mode, Plan, Priority, Reason, RouteChoice
from tests.unit.test_flow import (
    ANSWERED,
    CONNECT,
    MS,
    RESET,
    SENT,
    STREAMING,
    TIMEOUT,
    WAIT_MS,
    Case,
    a_policies,
    a_request,
    error_of,
    finish_of,
    routed,
    routes_without,
)  # fmt: skip


def test_who_waited_for_a_replica_is_told_why_none_starts() -> None:
    policies = a_policies()
    case = Case(policies)
    assert case.after(Arrived(), routed()) == [WaitForReplica(WAIT_MS)]
    cold = ColdModel(ColdPhase.FAILED, 50.0, measured=True, retry_after_s=50.0, why="no such model")
    policies.plan_follower.receive(Plan("e", 1, 10_000.0, Mode.ACT, replicas_target=1, cold=cold), 0)
    effects = case.after(WaitedOut(), now_ns=500 * MS)
    error = error_of(effects)
    assert (error.status, error.code) == (503, "model_cannot_start")
    assert "no such model" in error.message
    assert error.retry_after_s is not None
    assert error.retry_after_s >= 49.5
    assert case.nothing_held()


# --- waiting for its turn ---------------------------------------------------------------------------------------------


def a_full_gateway(**admission: Any) -> Policies:
    """One replica whose queue is long, as its sample says."""
    policies = a_policies(AdmissionConfig(no_replica_wait_ms=WAIT_MS, retry_after_s=1, **admission))
    policies.update_members({"a": sample(prefill_backlog_tokens=20_000)}, 0)
    Case(policies, a_request("first")).after(*SENT)  # a gateway with nothing at any replica may always send one
    return policies


def only_the_first_is_held(case: Case) -> bool:
    return (case.ctx.admission.requests, case.ctx.book.inflight) == (1, 1)


def sample(prefill_backlog_tokens: int = 0, seq: int = 1) -> dict[str, object]:
    return {
        "seq": seq, "running": 4, "waiting": 0, "prefill_backlog_tokens": prefill_backlog_tokens, "kv_tokens_used": 0,
        "kv_tokens_max": 100_000, "running_seqs_max": 16, "step_tokens_max": 2_048, "state": "ready",
        "step_a_ms": 10.0, "step_b_ms": 0.1, "step_c_ms": 0.0, "step_d_ms": 0.1, "step_samples": 100,
    }  # fmt: skip


def test_waits_for_its_turn_while_no_replica_would_begin_soon() -> None:
    policies = a_full_gateway()
    case = Case(policies)
    assert case.after(Arrived()) == [Enqueue()]
    assert policies.pump(MS).granted == ()
    policies.update_members({"a": sample(seq=2)}, 100 * MS)
    assert policies.pump(100 * MS).granted == ("r",)
    assert case.after(Granted(), now_ns=100 * MS) == [Route()]
    assert case.after(routed("a"), now_ns=100 * MS) == [Dispatch("a")]
    case.after(ResponseStarted(200), ResponseEnded())
    assert only_the_first_is_held(case)


def test_waited_too_long_is_refused_with_the_time_to_come_again() -> None:
    policies = a_full_gateway()
    case = Case(policies)
    case.after(Arrived())
    assert policies.pump(10_000 * MS).expired == ("r",)
    effects = case.after(Expired(), now_ns=10_000 * MS)
    error = error_of(effects)
    assert (error.status, error.code) == (429, "queue_timeout")
    assert error.retry_after_s is not None
    assert finish_of(effects).outcome is Outcome.REFUSED
    assert only_the_first_is_held(case)


def test_who_leaves_the_queue_is_never_granted() -> None:
    policies = a_full_gateway()
    case = Case(policies)
    case.after(Arrived(), ClientGone())
    policies.update_members({"a": sample(seq=2)}, 100 * MS)
    assert policies.pump(100 * MS).granted == ()
    assert only_the_first_is_held(case)


def test_queue_is_bounded_in_requests_and_in_tokens() -> None:
    for bound in ({"queue_requests_max": 3}, {"queue_tokens_max": 2_000}):
        policies = a_full_gateway(forecast_share=1.0, stretch=1_000.0, **bound)
        codes = []
        for i in range(20):
            effects = Case(policies, a_request(str(i))).after(Arrived())
            codes.append(error_of(effects).code if effects != [Enqueue()] else "")
        assert codes[:3] == [""] * 3
        assert codes[-1] == "queue_full"


def test_all_replicas_left_alone_is_503_at_once_with_the_time_of_the_next_probe() -> None:
    policies = a_policies(faults=FaultsConfig(breaker_failures=1, attempts_max=1))
    policies.update_members({"a": None}, 0)
    Case(policies, a_request("1")).after(*SENT, CONNECT)
    case = Case(policies, a_request("2"))
    effects = case.after(Arrived(), Routed(policies.choose(a_request("2"), (), 0)))
    error = error_of(effects)
    assert (error.status, finish_of(effects).reason.code) == (503, "all_ejected")
    assert error.retry_after_s is not None
    assert 0 < error.retry_after_s <= FaultsConfig().eject_ms / 1_000


def test_probe_of_a_replica_thought_slow_is_sent_and_refuses_nobody() -> None:
    policies = a_policies(faults=FaultsConfig(breaker_failures=1, attempts_max=1))
    slow = {"step_a_ms": 5_000.0}
    policies.update_members({"a": sample() | slow, "b": sample()}, 0)
    Case(policies, a_request("1")).after(Arrived(), routed("a"), CONNECT)
    for seq, now_ns in ((2, 60_000 * MS), (3, 62_000 * MS)):  # its time alone is over, then it is due for a request
        policies.update_members({"a": sample(seq=seq) | slow, "b": sample(seq=seq)}, now_ns)
        request = replace(a_request(str(seq)), arrival_ns=now_ns)
        case = Case(policies, request)
        case.after(Arrived(), now_ns=now_ns)
        effects = case.after(Routed(policies.choose(request, (), now_ns)), now_ns=now_ns)
        assert effects == [Dispatch("b" if seq == 2 else "a")]


def test_client_that_leaves_its_stream_says_nothing_of_a_probe_at_the_same_replica() -> None:
    policies = a_policies(faults=FaultsConfig(breaker_failures=1, attempts_max=1))
    policies.update_members({"a": None, "b": None}, 0)
    stream = Case(policies, a_request("1"))
    stream.after(*STREAMING)
    Case(policies, a_request("2")).after(*SENT, CONNECT)
    later = 20_000 * MS
    assert policies.flow_context.health.blocked(later) == frozenset()
    Case(policies, replace(a_request("3"), arrival_ns=later)).after(*SENT, now_ns=later)
    assert policies.flow_context.health.blocked(later) == {"a"}
    stream.after(ClientGone(), now_ns=later)
    assert policies.flow_context.health.blocked(later) == {"a"}


# --- quarantine -------------------------------------------------------------------------------------------------------


def test_repetition_of_a_quarantined_request_is_refused_and_others_are_not() -> None:
    policies = a_policies()
    bad = replace(a_request("1"), fingerprint=77)
    Case(policies, bad).after(*SENT, RESET, routed("b"), RESET)
    effects = Case(policies, replace(bad, request_id="2")).after(Arrived())
    error = error_of(effects)
    assert (error.status, error.code, error.should_retry) == (422, "quarantined", False)
    assert finish_of(effects).outcome is Outcome.REFUSED
    assert Case(policies, replace(a_request("3"), fingerprint=78)).after(Arrived()) == [Route()]


# --- resume -----------------------------------------------------------------------------------------------------------

CUT = UpstreamFailed(UpstreamFailure.RESET, resumable=True)


def test_cut_stream_goes_on_at_another_replica_and_is_paid() -> None:
    case = Case()
    left = case.ctx.budget.attempts_left
    assert routes_without(case.after(*STREAMING, CUT), "a")
    assert case.ctx.book.requests("a") == 0
    assert case.after(routed("a", "b")) == [Dispatch("b", resume=True)]
    assert case.ctx.budget.attempts_left == left - 1
    case.after(ResponseStarted(200), FirstByte())
    assert finish_of(case.after(ResponseEnded())).outcome is Outcome.SUCCEEDED
    assert (case.flow.resumes, case.flow.attempts) == (1, 2)
    assert case.nothing_held()


@pytest.mark.parametrize(
    ("then", "code"),
    [
        ((CUT, routed("b"), ResponseStarted(200), FirstByte(), CUT), "quarantined"),
        ((CUT, routed("b"), ResponseStarted(503)), "quarantined"),
        ((CUT, routed("b"), TIMEOUT), "stream_broken"),
        ((CUT, routed()), "upstream_failed"),
        ((UpstreamFailed(UpstreamFailure.RESET),), "stream_broken"),
        ((UpstreamFailed(UpstreamFailure.ENGINE),), "engine_stream_error"),
    ],
)
def test_stream_that_cannot_go_on_ends_with_one_stream_error(then: tuple[Event, ...], code: str) -> None:
    case = Case()
    effects = case.after(*STREAMING, *then)
    errors = [e for e in effects if isinstance(e, SendStreamError | SendError)]
    assert [type(e) for e in errors] == [SendStreamError]
    assert (finish_of(effects).outcome, finish_of(effects).reason.code) == (Outcome.FAILED, code)
    assert case.nothing_held()


@pytest.mark.parametrize(("status", "blocked"), [(500, {"b"}), (404, set())])
def test_replica_that_answers_a_continuation_with_an_error_is_judged(status: int, blocked: set[str]) -> None:
    policies = a_policies(faults=FaultsConfig(breaker_failures=2, probation_requests=9))
    policies.update_members({"a": None, "b": None, "c": None}, 0)
    Case(policies, a_request("0")).after(Arrived(), routed("b"), RESET)
    Case(policies, replace(a_request("1"), fingerprint=1)).after(*STREAMING, CUT, routed("b"), ResponseStarted(status))
    assert policies.flow_context.health.blocked(0) == blocked


def test_resume_can_be_switched_off_and_needs_the_budget() -> None:
    for faults in (FaultsConfig(resume=False), FaultsConfig(retry_burst=0, retry_share_max=0)):
        case = Case(a_policies(faults=faults))
        effects = case.after(*STREAMING, CUT)
        if isinstance(effects[-1], Route):
            effects = case.after(routed("b"))
        assert any(isinstance(e, SendStreamError) for e in effects)
        assert case.nothing_held()


# --- hedge ------------------------------------------------------------------------------------------------------------

HEDGING = FaultsConfig(hedge_after_factor=2.0, hedge_after_ms_min=10)


def hedged(predicted_ms: float = 50.0) -> Case:
    """An interactive request whose second attempt runs at ``b``."""
    case = Case(a_policies(faults=HEDGING), replace(a_request(), priority=Priority.INTERACTIVE))
    choice = RouteChoice((("a",), ("b",)), Reason("test", ""), {"a": predicted_ms, "b": predicted_ms}, {})
    assert case.after(Arrived(), Routed(choice)) == [ArmHedge(2 * predicted_ms), Dispatch("a")]
    assert case.after(HedgeDue(), now_ns=100 * MS) == [Dispatch("b", hedge=True)]
    assert (case.ctx.book.requests("a"), case.ctx.book.requests("b")) == (1, 1)
    return case


def test_second_attempt_that_wins_is_the_requests_own() -> None:
    case = hedged()
    assert case.after(HedgeWon(), now_ns=120 * MS) == []
    assert (case.flow.replica_id, case.ctx.book.requests("a"), case.ctx.book.requests("b")) == ("b", 0, 1)
    case.after(ResponseStarted(200), FirstByte(), ResponseEnded(), now_ns=130 * MS)
    assert case.nothing_held()


def test_first_attempt_that_wins_gives_the_second_back() -> None:
    case = hedged()
    case.after(ResponseStarted(200), FirstByte(), now_ns=120 * MS)
    assert (case.flow.replica_id, case.ctx.book.requests("b")) == ("a", 0)
    case.after(ResponseEnded())
    assert case.nothing_held()


@pytest.mark.parametrize("of_hedge", [False, True])
def test_one_attempt_that_fails_leaves_the_other(of_hedge: bool) -> None:
    case = hedged()
    assert case.after(UpstreamFailed(UpstreamFailure.RESET, hedge=of_hedge)) == []
    assert case.flow.replica_id == ("a" if of_hedge else "b")
    case.after(ResponseStarted(200), FirstByte(), ResponseEnded())
    assert case.nothing_held()


def test_first_attempt_that_answered_is_alone_from_then_on() -> None:
    """The driver reports an answer of one of two only when the other is aborted."""
    case = hedged()
    case.after(ResponseStarted(400), now_ns=120 * MS)
    assert (case.flow.hedge_id, case.ctx.book.requests("b")) == (None, 0)
    assert error_of(case.after(RESET)).status == 502
    assert case.nothing_held()


def test_second_attempt_refused_by_a_draining_replica_is_no_failure_of_it() -> None:
    policies = a_policies(faults=replace(HEDGING, breaker_failures=1))
    policies.update_members({"a": None, "b": None}, 0)
    case = Case(policies, replace(a_request(), priority=Priority.INTERACTIVE))
    choice = RouteChoice((("a",), ("b",)), Reason("test", ""), {"a": 50.0, "b": 50.0}, {})
    case.after(Arrived(), Routed(choice), HedgeDue(), ReplicaRefused(RefusalKind.DRAINING, hedge=True))
    assert policies.flow_context.health.blocked(0) == frozenset()
    case.after(ReplicaRefused(RefusalKind.CONNECT))
    assert policies.flow_context.health.blocked(0) == {"a"}


def test_hedge_is_for_interactive_requests_and_within_the_budget() -> None:
    choice = RouteChoice((("a",), ("b",)), Reason("test", ""), {"a": 5.0, "b": 5.0}, {})
    standard = Case(a_policies(faults=HEDGING))
    assert standard.after(Arrived(), Routed(choice)) == [Dispatch("a")]
    poor = replace(HEDGING, retry_burst=0, retry_share_max=0)
    case = Case(a_policies(faults=poor), replace(a_request(), priority=Priority.INTERACTIVE))
    case.after(Arrived(), Routed(choice))
    assert case.after(HedgeDue()) == []
    assert not case.flow.hedged


# --- time and tasks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [(Arrived(),), SENT, ANSWERED, STREAMING])
def test_time_up_ends_a_request_in_any_state(before: tuple[Event, ...]) -> None:
    case = Case()
    effects = case.after(*before, TimeUp())
    assert (AbortUpstream() in effects) == (len(before) > 1)
    assert isinstance(effects[-2], SendStreamError if before == STREAMING else SendError)
    assert finish_of(effects).outcome is Outcome.FAILED
    assert case.nothing_held()


def test_task_at_its_budget_is_refused_without_holding_anything() -> None:
    policies = a_policies()
    request = replace(a_request("1"), task="t")
    first = Case(policies, request)
    first.flow = RequestFlow(first.ctx, request, TaskLimits(calls_max=1))
    first.after(*STREAMING, ResponseEnded())
    case = Case(policies, replace(request, request_id="2"))
    effects = case.after(Arrived())
    assert (error_of(effects).status, error_of(effects).code) == (429, "task_calls")
    assert case.nothing_held()


def test_finished_request_knows_what_it_cost() -> None:
    prices = PricesConfig(prompt_usd_per_mtok=1.0, cached_usd_per_mtok=0.5, output_usd_per_mtok=4.0)
    case = Case(build_policies(PolicyConfig(prices=prices), seed=0))
    case.after(*STREAMING)
    case.flow.note_output(Usage(100, 50, 40), 50)
    case.after(ResponseEnded())
    assert case.flow.usd == pytest.approx((60 * 1.0 + 40 * 0.5 + 50 * 4.0) / 1e6)
