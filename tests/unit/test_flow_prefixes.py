"""Which prefixes replicas are believed to hold after attempts that failed, and after those that did not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.build import Policies
from policies.config import FaultsConfig
from policies.events import (
    Arrived,
    ClientGone,
    Event,
    FirstByte,
    HedgeDue,
    HedgeWon,
    RefusalKind,
    ReplicaRefused,
    ResponseEnded,
    ResponseStarted,
    Routed,
    TimeUp,
    UpstreamFailed,
    UpstreamFailure,
)
from policies.types import Priority, Reason, RouteChoice
from tests.unit.routing.build import chain
from tests.unit.test_flow import (  # fmt: skip
    ANSWERED,
    CONNECT,
    DRAINING,
    RESET,
    SENT,
    STREAMING,
    TIMEOUT,
    UNAVAILABLE,
    Case,
    a_policies,
    a_request,
    routed,
)

PREFIX = chain(0, 6)


def a_case(policies: Policies | None = None, blocks: tuple[int, ...] = PREFIX, name: str = "r") -> Case:
    return Case(policies, replace(a_request(name), blocks=blocks, prompt_tokens=64 * len(blocks)))


def held(case: Case, blocks: tuple[int, ...] = PREFIX) -> dict[str, int]:
    return case.policies.index.hit_blocks(blocks)


@pytest.mark.parametrize(
    "failure",
    [
        (*SENT, CONNECT),
        (*SENT, DRAINING),
        (*SENT, UNAVAILABLE),
        (*SENT, RESET),
        (*SENT, TIMEOUT),
        (*SENT, TimeUp()),
        (*SENT, ResponseStarted(500)),
        (*SENT, ResponseStarted(400), ResponseEnded()),
        (*ANSWERED, RESET),
    ],
)
def test_a_failed_attempt_leaves_no_prefix(failure: tuple[Event, ...]) -> None:
    case = a_case()
    case.after(*SENT)
    assert held(case) == {"a": 6}, "from the dispatch on, so that a burst follows its first"
    case.after(*failure[len(SENT) :])
    assert held(case) == {}


@pytest.mark.parametrize("events", [(*STREAMING, RESET), (*STREAMING, ResponseEnded()), (*SENT, ClientGone())])
def test_whoever_computed_it_or_may_have_keeps_it(events: tuple[Event, ...]) -> None:
    case = a_case()
    case.after(*events)
    assert held(case) == {"a": 6}


def test_a_failure_takes_back_its_own_part_only() -> None:
    policies = a_policies()
    a_case(policies, PREFIX[:4], "first").after(*STREAMING, ResponseEnded())
    case = a_case(policies)
    case.after(*SENT, RESET)
    assert held(case) == {"a": 4}


def test_the_retry_leaves_its_prefix_where_it_ran() -> None:
    case = a_case()
    case.after(*SENT, RESET, routed("b"), ResponseStarted(200), FirstByte(), ResponseEnded())
    assert held(case) == {"b": 6}
    assert case.nothing_held()


def test_one_that_followed_a_failed_one_brings_the_prefix_back() -> None:
    policies = a_policies()
    first, second = a_case(policies, PREFIX, "first"), a_case(policies, (*PREFIX[:4], *chain(1, 2)), "second")
    first.after(*SENT)
    second.after(*SENT)
    first.after(RESET)
    assert held(second) == {}
    second.after(ResponseStarted(200), FirstByte())
    assert held(second, second.flow.request.blocks) == {"a": 6}
    assert held(first) == {"a": 4}


HEDGE = FaultsConfig(hedge_after_factor=2.0, hedge_after_ms_min=10)


@pytest.mark.parametrize(
    ("events", "left"),
    [
        ((UpstreamFailed(UpstreamFailure.RESET), ResponseStarted(200), FirstByte()), {"b": 6}),
        ((UpstreamFailed(UpstreamFailure.RESET, hedge=True), ResponseStarted(200), FirstByte()), {"a": 6}),
        ((ReplicaRefused(RefusalKind.UNAVAILABLE, hedge=True),), {"a": 6}),
        ((UpstreamFailed(UpstreamFailure.RESET), UpstreamFailed(UpstreamFailure.RESET)), {}),
        ((HedgeWon(), ResponseStarted(200), FirstByte()), {"a": 6, "b": 6}),
        ((HedgeWon(), UpstreamFailed(UpstreamFailure.RESET)), {"a": 6}),
        ((TimeUp(),), {}),
    ],
)
def test_of_two_attempts_side_by_side_the_failed_one_leaves_none(
    events: tuple[Event, ...], left: dict[str, int]
) -> None:
    request = replace(a_case().flow.request, priority=Priority.INTERACTIVE)
    case = Case(a_policies(faults=HEDGE), request)
    choice = RouteChoice((("a",), ("b",)), Reason("test", ""), {"a": 50.0, "b": 50.0}, {})
    case.after(Arrived(), Routed(choice), HedgeDue())
    assert held(case) == {"a": 6, "b": 6}
    case.after(*events)
    assert held(case) == left
    case.after(ClientGone())
    assert case.nothing_held()
