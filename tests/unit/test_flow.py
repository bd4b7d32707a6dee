"""The request flow, event by event: what the driver is told on every path, and that every path gives all back."""

from __future__ import annotations

import pytest

from policies.build import Policies, build_policies
from policies.config import AdmissionConfig, FaultsConfig, PolicyConfig
from policies.events import (
    AbortUpstream,
    Arrived,
    ClientGone,
    Dispatch,
    Effect,
    Event,
    Finish,
    FirstByte,
    Outcome,
    RefusalKind,
    Relay,
    ReplicaRefused,
    ResponseEnded,
    ResponseStarted,
    Route,
    Routed,
    SendError,
    SendStreamError,
    UpstreamFailed,
    UpstreamFailure,
    WaitedOut,
    WaitForReplica,
)
from policies.flow import FlowError, RequestFlow, State
from policies.types import Reason, Request, RouteChoice

MS = 1_000_000
WAIT_MS = 500.0


def a_policies(admission: AdmissionConfig | None = None, faults: FaultsConfig | None = None) -> Policies:
    return build_policies(
        PolicyConfig(
            admission=admission or AdmissionConfig(no_replica_wait_ms=WAIT_MS, retry_after_s=3),
            faults=faults or FaultsConfig(),
        ),
        seed=0,
    )


def a_request(request_id: str = "r", prompt_tokens: int = 100) -> Request:
    return Request(
        request_id=request_id,
        model="m",
        endpoint="/v1/chat/completions",
        tenant="",
        prompt_tokens=prompt_tokens,
        output_tokens_max=10,
        blocks=(),
        block_tokens=64,
        stream=True,
        arrival_ns=0,
    )


def routed(*replicas: str, hits: dict[str, int] | None = None) -> Routed:
    """The router's answer with these replicas, best first; none at all is "nobody may take it"."""
    return Routed(RouteChoice(tuple((r,) for r in replicas), Reason("test", ""), {}, hits or {}))


CONNECT = ReplicaRefused(RefusalKind.CONNECT)
DRAINING = ReplicaRefused(RefusalKind.DRAINING)
UNAVAILABLE = ReplicaRefused(RefusalKind.UNAVAILABLE)
RESET = UpstreamFailed(UpstreamFailure.RESET)
TIMEOUT = UpstreamFailed(UpstreamFailure.TIMEOUT)
PROTOCOL = UpstreamFailed(UpstreamFailure.PROTOCOL)
SENT: tuple[Event, ...] = (Arrived(), routed("a", "b"))
ANSWERED: tuple[Event, ...] = (*SENT, ResponseStarted(200))
STREAMING: tuple[Event, ...] = (*ANSWERED, FirstByte())


class Case:
    """One flow over fresh policies."""

    def __init__(self, policies: Policies | None = None, request: Request | None = None) -> None:
        self.policies = policies or a_policies()
        self.ctx = self.policies.flow_context
        self.flow = RequestFlow(self.ctx, request or a_request())

    def after(self, *events: Event, now_ns: int = 0) -> list[Effect]:
        """Effects of the last of ``events``."""
        effects: list[Effect] = []
        for event in events:
            effects = self.flow.step(event, now_ns)
        return effects

    def nothing_held(self) -> bool:
        counts = (self.ctx.admission.requests, self.ctx.admission.tokens, self.ctx.book.inflight)
        return counts == (0, 0, 0) and not self.ctx.unproven


def error_of(effects: list[Effect]) -> SendError:
    found = [e for e in effects if isinstance(e, SendError)]
    assert len(found) == 1
    return found[0]


def routes_without(effects: list[Effect], *tried: str, paused: bool = True) -> bool:
    """The last effect asks for another replica, after a jittered pause where there must be one."""
    route = effects[-1]
    assert isinstance(route, Route)
    pause_ms = FaultsConfig().retry_pause_ms
    assert 0.5 * pause_ms <= route.pause_ms <= 1.5 * pause_ms if paused else route.pause_ms == 0
    return route.exclude == frozenset(tried)


def finish_of(effects: list[Effect]) -> Finish:
    assert isinstance(effects[-1], Finish)
    assert not any(isinstance(e, Finish) for e in effects[:-1])
    return effects[-1]


# --- the straight path ------------------------------------------------------------------------------------------------


def test_straight_path() -> None:
    case = Case()
    assert case.after(Arrived()) == [Route()]
    assert case.after(routed("a", "b")) == [Dispatch("a")]
    assert (case.flow.attempts, case.flow.replica_id) == (1, "a")
    assert case.after(ResponseStarted(200)) == [Relay()]
    assert case.after(FirstByte()) == []
    assert not case.flow.done
    assert finish_of(case.after(ResponseEnded())).outcome is Outcome.SUCCEEDED
    assert case.flow.done
    assert case.nothing_held()


def test_response_without_a_body_succeeds() -> None:
    case = Case()
    assert finish_of(case.after(*ANSWERED, ResponseEnded())).outcome is Outcome.SUCCEEDED
    assert case.nothing_held()


def test_load_is_counted_at_dispatch_without_what_is_cached() -> None:
    case = Case()
    case.after(Arrived(), routed("a", hits={"a": 60, "b": 90}))
    assert case.ctx.book.requests("a") == 1
    assert case.ctx.book.prefill_tokens("a") == 40
    case.after(ResponseStarted(200), FirstByte())
    assert case.ctx.book.prefill_tokens("a") == 0
    assert case.ctx.book.decode_tokens("a") >= 100
    case.after(ResponseEnded())
    assert case.ctx.book.requests("a") == case.ctx.book.decode_tokens("a") == 0


def test_hit_larger_than_the_prompt_counts_as_all_cached() -> None:
    case = Case(request=a_request(prompt_tokens=10))
    case.after(Arrived(), routed("a", hits={"a": 64}))
    assert case.ctx.book.prefill_tokens("a") == 0


# --- admission --------------------------------------------------------------------------------------------------------


def test_refused_at_the_door_with_the_bound_named() -> None:
    policies = a_policies(AdmissionConfig(inflight_requests_max=1, retry_after_s=3))
    first, second = Case(policies, a_request("1")), Case(policies, a_request("2"))
    first.after(Arrived())
    effects = second.after(Arrived())
    error = error_of(effects)
    assert (error.status, error.type, error.code) == (429, "rate_limit_error", "inflight_requests")
    assert error.retry_after_s is not None
    assert 3 <= error.retry_after_s <= 4.5
    assert "1 requests are in flight, the limit is 1" in error.message
    assert (finish_of(effects).outcome, finish_of(effects).reason.code) == (Outcome.REFUSED, "inflight_requests")
    assert second.flow.done
    assert policies.flow_context.admission.requests == 1


def test_refused_requests_do_not_pay_into_the_retry_budget() -> None:
    policies = a_policies(
        AdmissionConfig(inflight_requests_max=1), FaultsConfig(retry_share_max=1, retry_burst=1, attempts_max=9)
    )
    first = Case(policies, a_request("first"))
    first.after(Arrived(), routed("a"), CONNECT, routed("b"))  # spends the burst
    for i in range(5):
        Case(policies, a_request(f"refused-{i}")).after(Arrived())
    assert error_of(first.after(CONNECT, routed("c"))).code == "upstream_unavailable"


def test_answered_requests_pay_into_the_retry_budget_once() -> None:
    policies = a_policies(faults=FaultsConfig(retry_share_max=0.5, retry_burst=1))
    first = Case(policies, a_request("first"))
    first.after(Arrived(), routed("a"), CONNECT, routed("b"))
    assert first.ctx.budget.attempts_left == 0
    Case(policies, a_request("second")).after(*SENT)
    assert first.ctx.budget.attempts_left == 0
    Case(policies, a_request("third")).after(*STREAMING, ResponseEnded())
    assert first.ctx.budget.attempts_left == 0.5


# --- nobody there -----------------------------------------------------------------------------------------------------


def test_waits_for_the_first_replica_and_goes_on() -> None:
    case = Case()
    assert case.after(Arrived(), routed()) == [WaitForReplica(WAIT_MS)]
    assert case.after(routed("a"), now_ns=10 * MS) == [Dispatch("a")]


def test_waits_in_all_no_longer_than_allowed() -> None:
    case = Case()
    case.after(Arrived(), routed(), now_ns=7 * MS)
    assert case.after(routed(), now_ns=107 * MS) == [WaitForReplica(WAIT_MS - 100)]
    assert error_of(case.after(routed(), now_ns=507 * MS)).code == "no_capacity"


def test_waited_out_is_503_with_retry_after() -> None:
    case = Case()
    effects = case.after(Arrived(), routed(), WaitedOut())
    error = error_of(effects)
    assert (error.status, error.type, error.code, error.retry_after_s) == (503, "server_error", "no_capacity", 3)
    assert (finish_of(effects).outcome, finish_of(effects).reason.code) == (Outcome.FAILED, "no_replica")
    assert case.nothing_held()


def test_no_wait_allowed_fails_at_once() -> None:
    case = Case(a_policies(AdmissionConfig(no_replica_wait_ms=0)))
    assert error_of(case.after(Arrived(), routed())).code == "no_capacity"
    assert case.nothing_held()


# --- refusals: nothing was started ------------------------------------------------------------------------------------


@pytest.mark.parametrize("refusal", [CONNECT, DRAINING, UNAVAILABLE])
def test_refused_request_goes_to_another_replica(refusal: Event) -> None:
    case = Case()
    assert routes_without(case.after(*SENT, refusal), "a", paused=refusal is not DRAINING)
    assert case.ctx.book.requests("a") == 0
    assert case.after(routed("b")) == [Dispatch("b")]
    assert case.ctx.book.requests("b") == 1


def test_replica_that_refused_is_skipped_even_when_the_router_names_it() -> None:
    case = Case()
    case.after(*SENT, CONNECT)
    assert case.after(routed("a", "b")) == [Dispatch("b")]


@pytest.mark.parametrize("refusal", [CONNECT, DRAINING])
def test_lone_replica_restarting_does_not_fail_its_requests(refusal: Event) -> None:
    policies = a_policies(faults=FaultsConfig(retry_burst=0, retry_share_max=0))
    case = Case(policies)
    case.after(Arrived(), routed("old"), refusal)
    assert case.after(routed()) == [WaitForReplica(WAIT_MS, frozenset({"old"}))]
    assert case.after(routed("new"), now_ns=100 * MS) == [Dispatch("new")]
    assert case.after(ResponseStarted(200), ResponseEnded())
    assert case.nothing_held()


def test_wait_after_a_second_refusal_is_what_is_left_of_the_first() -> None:
    case = Case()
    case.after(Arrived(), routed())
    case.after(routed("old"), DRAINING, now_ns=200 * MS)
    assert case.after(routed(), now_ns=300 * MS) == [WaitForReplica(WAIT_MS - 300, frozenset({"old"}))]


def test_draining_refusals_cost_neither_attempt_nor_budget() -> None:
    case = Case(a_policies(faults=FaultsConfig(attempts_max=1, retry_burst=0, retry_share_max=0)))
    case.after(Arrived())
    for i in range(16):
        assert case.after(routed(f"old-{i}")) == [Dispatch(f"old-{i}")]
        case.after(DRAINING)
    assert case.after(routed("new")) == [Dispatch("new")]
    assert case.flow.attempts == 1


def test_draining_refusals_are_bounded() -> None:
    case = Case(a_policies(faults=FaultsConfig(draining_refusals_max=2)))
    case.after(Arrived(), routed("a"), DRAINING, routed("b"), DRAINING, routed("c"))
    effects = case.after(DRAINING)
    assert (error_of(effects).status, finish_of(effects).reason.code) == (503, "replicas_refused")
    assert case.nothing_held()


def test_failed_connections_are_bounded_by_attempts() -> None:
    case = Case(a_policies(faults=FaultsConfig(attempts_max=2)))
    case.after(Arrived(), routed("a"), CONNECT, routed("b"))
    effects = case.after(CONNECT)
    error = error_of(effects)
    assert (error.status, error.type, error.code) == (503, "server_error", "upstream_unavailable")
    assert finish_of(effects).reason.code == "replicas_refused"
    assert case.flow.attempts == 2
    assert case.nothing_held()


def test_failed_connections_are_bounded_by_the_budget() -> None:
    case = Case(a_policies(faults=FaultsConfig(retry_burst=0, retry_share_max=0)))
    effects = case.after(*SENT, CONNECT, routed("b"))
    assert (error_of(effects).status, finish_of(effects).reason.code) == (503, "retry_budget")
    assert case.nothing_held()


def test_paid_dispatch_that_meets_a_draining_replica_is_not_paid_twice() -> None:
    case = Case(a_policies(faults=FaultsConfig(retry_burst=1, retry_share_max=0)))
    case.after(*SENT, CONNECT, routed("b"), DRAINING)
    assert case.after(routed("c")) == [Dispatch("c")]
    assert case.ctx.budget.attempts_left == 0


# --- broken before the first byte -------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [SENT, ANSWERED])
@pytest.mark.parametrize("failure", [RESET, PROTOCOL])
def test_broken_before_the_first_byte_is_tried_elsewhere_and_paid(
    before: tuple[Event, ...], failure: UpstreamFailed
) -> None:
    case = Case()
    left = case.ctx.budget.attempts_left
    effects = case.after(*before, failure)
    assert effects[:-1] == ([] if failure is RESET else [AbortUpstream()])
    assert routes_without(effects, "a")
    assert case.ctx.book.requests("a") == 0
    assert case.after(routed("b")) == [Dispatch("b")]
    assert case.ctx.budget.attempts_left == left - 1
    assert case.after(ResponseStarted(200)) == [Relay()]


def test_broken_on_two_replicas_is_quarantined() -> None:
    case = Case(a_policies(faults=FaultsConfig(attempts_max=9)))
    effects = case.after(*SENT, RESET, routed("b"), RESET)
    error = error_of(effects)
    assert (error.status, error.code, error.retry_after_s) == (503, "upstream_unavailable", None)
    assert (finish_of(effects).outcome, finish_of(effects).reason.code) == (Outcome.FAILED, "quarantined")
    assert case.nothing_held()


def test_broken_and_nobody_else_fails_at_once() -> None:
    case = Case()
    effects = case.after(Arrived(), routed("a"), RESET, routed())
    assert (error_of(effects).status, error_of(effects).code) == (503, "upstream_unavailable")
    assert finish_of(effects).reason.code == "upstream_failed"
    assert case.nothing_held()


def test_broken_without_a_second_attempt_allowed() -> None:
    case = Case(a_policies(faults=FaultsConfig(attempts_max=1)))
    assert error_of(case.after(*SENT, RESET)).status == 503
    assert case.nothing_held()


@pytest.mark.parametrize("before", [SENT, ANSWERED])
def test_time_out_before_the_first_byte_is_504_and_not_tried_again(before: tuple[Event, ...]) -> None:
    case = Case()
    effects = case.after(*before, TIMEOUT)
    assert isinstance(effects[0], AbortUpstream)
    assert (error_of(effects).status, error_of(effects).code) == (504, "timeout")
    assert finish_of(effects).reason.code == "timeout"
    assert case.nothing_held()


# --- answered by the engine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "engine_client_error"),
        (499, "engine_client_error"),
    ],
)
def test_engine_refusal_is_relayed_never_sent_again_and_counted(status: int, code: str) -> None:
    case = Case()
    assert case.after(*SENT, ResponseStarted(status)) == [Relay()]
    effects = case.after(ResponseEnded())
    assert len(effects) == 1
    assert (finish_of(effects).outcome, finish_of(effects).reason.code) == (Outcome.FAILED, code)
    assert case.nothing_held()


def test_engine_failure_is_tried_on_one_other_replica_and_then_relayed() -> None:
    case = Case()
    left = case.ctx.budget.attempts_left
    effects = case.after(*SENT, ResponseStarted(500))
    assert effects[0] == AbortUpstream()
    assert routes_without(effects, "a")
    assert case.after(routed("b")) == [Dispatch("b")]
    assert case.ctx.budget.attempts_left == left - 1
    assert case.after(ResponseStarted(500)) == [Relay()]
    effects = case.after(ResponseEnded())
    assert (finish_of(effects).outcome, finish_of(effects).reason.code) == (Outcome.FAILED, "engine_server_error")
    assert case.ctx.budget.attempts_left == left - 1
    assert case.nothing_held()


def test_engine_error_that_breaks_off_is_502_and_not_tried_again() -> None:
    case = Case(a_policies(faults=FaultsConfig(attempts_max=1)))
    effects = case.after(*SENT, ResponseStarted(500), RESET)
    assert error_of(effects).status == 502
    assert finish_of(effects).outcome is Outcome.FAILED
    assert case.nothing_held()


def test_status_of_a_broken_attempt_does_not_colour_the_next() -> None:
    case = Case()
    case.after(*ANSWERED, RESET, routed("b"), ResponseStarted(200), FirstByte())
    assert finish_of(case.after(ResponseEnded())).outcome is Outcome.SUCCEEDED


def test_error_inside_a_stream_is_a_failure() -> None:
    case = Case()
    effects = case.after(*STREAMING, ResponseEnded(stream_error=True))
    assert effects == [finish_of(effects)]
    assert (finish_of(effects).outcome, finish_of(effects).reason.code) == (Outcome.FAILED, "engine_stream_error")


@pytest.mark.parametrize("failure", [RESET, TIMEOUT, PROTOCOL])
def test_broken_stream_is_told_as_such_and_never_sent_again(failure: UpstreamFailed) -> None:
    case = Case()
    effects = case.after(*STREAMING, failure)
    error = effects[-2]
    assert isinstance(error, SendStreamError)
    assert (error.type, error.code) == ("server_error", "stream_broken")
    assert (AbortUpstream() in effects) == (failure is not RESET)
    assert not any(isinstance(e, Route | Dispatch | SendError) for e in effects)
    assert (finish_of(effects).outcome, finish_of(effects).reason.code) == (Outcome.FAILED, "stream_broken")
    assert case.nothing_held()


# --- the client leaves ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "aborts"),
    [
        ((), False),
        ((Arrived(),), False),
        ((Arrived(), routed()), False),
        ((*SENT, CONNECT), False),
        (SENT, True),
        (ANSWERED, True),
        (STREAMING, True),
    ],
)
def test_client_gone_gives_all_back_and_aborts_what_runs(before: tuple[Event, ...], aborts: bool) -> None:
    case = Case()
    effects = case.after(*before, ClientGone())
    assert (AbortUpstream() in effects) == aborts
    assert (finish_of(effects).outcome, finish_of(effects).reason.code) == (Outcome.CANCELLED, "client_gone")
    assert case.nothing_held()
    for late in (*EVENTS[1:], ClientGone()):
        assert case.flow.step(late, 0) == []
    assert case.nothing_held()


def test_client_gone_after_the_end_changes_nothing() -> None:
    case = Case()
    case.after(*STREAMING, ResponseEnded())
    assert case.after(ClientGone()) == []
    assert case.flow.state is State.OVER


# --- programming errors -----------------------------------------------------------------------------------------------

LEGAL: dict[State, tuple[tuple[Event, ...], set[type[Event]]]] = {
    State.NEW: ((), {Arrived}),
    State.ROUTING: ((Arrived(),), {Routed}),
    State.WAITING: ((Arrived(), routed()), {Routed, WaitedOut}),
    State.SENT: (SENT, {ReplicaRefused, ResponseStarted, UpstreamFailed}),
    State.ANSWERED: (ANSWERED, {ResponseStarted, FirstByte, ResponseEnded, UpstreamFailed}),
    State.STREAMING: (STREAMING, {ResponseEnded, UpstreamFailed}),
    State.OVER: ((*STREAMING, ResponseEnded()), set()),
}
EVENTS: tuple[Event, ...] = (
    Arrived(), routed("a"), CONNECT, ResponseStarted(200), FirstByte(), ResponseEnded(), RESET, WaitedOut(),
)  # fmt: skip


@pytest.mark.parametrize("state", LEGAL)
@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
def test_event_out_of_place_is_an_error_and_changes_nothing(state: State, event: Event) -> None:
    before, legal = LEGAL[state]
    case = Case()
    case.after(*before)
    assert case.flow.state is state
    if type(event) in legal:
        case.flow.step(event, 0)
        return
    held = case.ctx.admission.requests
    with pytest.raises(FlowError, match=type(event).__name__):
        case.flow.step(event, 0)
    assert case.flow.state is state
    assert case.ctx.admission.requests == held
