"""The wiring: gateways share nothing, the parts of one gateway share their counts, and what leaves leaves no trace."""

from __future__ import annotations

from policies.admission.gate import Entry
from policies.build import build_policies
from policies.config import PolicyConfig, RoutingConfig
from policies.events import Arrived, Dispatch, Finish, FirstByte, Relay, ResponseEnded, ResponseStarted, Route, Routed
from policies.flow import RequestFlow
from policies.types import Mode, Plan, Request


def a_request(request_id: str) -> Request:
    return Request(
        request_id=request_id,
        model="m",
        endpoint="/v1/completions",
        tenant="",
        prompt_tokens=128,
        output_tokens_max=8,
        blocks=(1, 2),
        block_tokens=64,
        stream=True,
        arrival_ns=0,
    )


def test_one_request_through_the_real_parts() -> None:
    policies = build_policies(PolicyConfig(), seed=0)
    policies.update_members({"a": None}, 0)
    flow = RequestFlow(policies.flow_context, a_request("r"))
    assert flow.step(Arrived(), 0) == [Route()]
    choice = policies.router.choose(flow.request, policies.fleet.views(0), None, 0)
    assert flow.step(Routed(choice), 0) == [Dispatch("a")]
    assert policies.fleet.views(0)[0].local_requests == 1
    assert len(policies.index) == 2
    assert flow.step(ResponseStarted(200), 0) == [Relay()]
    assert flow.step(FirstByte(), 0) == []
    assert isinstance(flow.step(ResponseEnded(), 0)[-1], Finish)
    assert policies.fleet.views(0)[0].local_requests == 0


def test_replica_that_left_leaves_no_trace() -> None:
    policies = build_policies(PolicyConfig(), seed=0)
    policies.update_members({"a": None, "b": None}, 0)
    policies.flow_context.book.dispatched("a", "r", 10, 10)
    policies.router.dispatched(a_request("r"), "a")
    assert policies.update_members({"b": None}, 0) == {"a"}
    assert policies.fleet.members() == ("b",)
    assert policies.flow_context.book.inflight == 0
    assert policies.index.hit_blocks((1, 2)) == {}


def test_gateways_share_nothing() -> None:
    one, other = build_policies(PolicyConfig(), seed=0), build_policies(PolicyConfig(), seed=0)
    one.update_members({"a": None}, 0)
    one.router.dispatched(a_request("r"), "a")
    assert one.flow_context.admission.arrive(a_request("r"), 0).entry is Entry.ADMITTED
    assert other.fleet.members() == ()
    assert (len(other.index), other.flow_context.admission.requests) == (0, 0)


def test_same_seed_makes_the_same_choices() -> None:
    config = PolicyConfig(routing=RoutingConfig(strategy="random"))
    orders = []
    for seed in (7, 7, 8):
        policies = build_policies(config, seed)
        policies.update_members(dict.fromkeys("abcdef"), 0)
        views = policies.fleet.views(0)
        orders.append([tuple(policies.router.choose(a_request(str(i)), views, None, 0).order) for i in range(5)])
    assert orders[0] == orders[1] != orders[2]


def test_warm_replicas_get_requests_only_where_nobody_else_takes_them() -> None:
    policies = build_policies(PolicyConfig(), seed=0)
    policies.update_members({"a": None, "b": None}, 0)
    policies.plan_follower.receive(Plan("e", 1, 10_000.0, Mode.ACT, replicas_target=1, warm=frozenset({"b"})), 0)
    assert policies.choose(a_request("r"), (), 0).order == ["a"]
    policies.update_members({"a": {"seq": 1, "state": "draining"}, "b": None}, 1)
    assert policies.choose(a_request("r"), (), 1).order == ["b"]
    policies.plan_follower.receive(Plan("e", 2, 10_000.0, Mode.ACT, replicas_target=2), 2)
    policies.update_members({"a": None, "b": None}, 2)
    policies.update_members({"b": None, "c": None}, 3)
    assert set(policies.choose(a_request("r"), (), 3).order) == {"b", "c"}
