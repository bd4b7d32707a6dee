"""Who prefills, and which requests are split over two replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.config import PolicyConfig
from policies.config_guard import DisaggregationConfig
from policies.faults import PROBATION
from policies.split import Roles, SplitCode, decide, decode_first, handed_over, without_prompt
from policies.types import Mode, Plan, Reason, Request, RouteChoice

CONFIG = PolicyConfig(disaggregation=DisaggregationConfig(enabled=True, prefill_replicas=2))
PREFILL = frozenset({"p"})


def request(prompt_tokens: int = 1_000) -> Request:
    return Request("r", "m", "/v1/completions", "t", prompt_tokens, 10, (1, 2), 16, True, 0)


def choice(**ttft_ms: float) -> RouteChoice:
    order = tuple((r,) for r in sorted(ttft_ms, key=lambda r: ttft_ms[r]))
    return RouteChoice(order, Reason("least_ttft", "so"), ttft_ms, dict.fromkeys(ttft_ms, 0))


def plan(prefill: int | None) -> Plan:
    return Plan("e", 1, 1_000, Mode.ACT, prefill_replicas=prefill)


def test_the_plan_says_how_many_prefill_else_the_configuration() -> None:
    members = [f"r{i}" for i in range(6)]
    assert len(Roles(CONFIG).prefill(members, None)) == 2
    assert len(Roles(CONFIG).prefill(members, plan(None))) == 2
    assert len(Roles(CONFIG).prefill(members, plan(4))) == 4
    assert len(Roles(CONFIG).prefill(members, plan(0))) == 0
    assert len(Roles(CONFIG).prefill(members, plan(9))) == 5, "somebody decodes"
    assert Roles(CONFIG).prefill(["alone"], plan(3)) == frozenset()
    assert Roles(CONFIG).prefill([], plan(3)) == frozenset()
    assert Roles(PolicyConfig()).prefill(members, plan(4)) == frozenset()


def test_gateways_agree_and_roles_move_no_further_than_needed() -> None:
    roles, members = Roles(CONFIG), [f"r{i}" for i in range(8)]
    three = roles.prefill(members, plan(3))
    assert Roles(CONFIG).prefill(members[::-1], plan(3)) == three
    assert roles.prefill(members, plan(4)) > three
    assert roles.prefill(members, plan(2)) < three
    gone = min(three)
    after = roles.prefill([r for r in members if r != gone], plan(3))
    assert three - {gone} < after


def test_a_replica_that_stands_by_has_no_role() -> None:
    roles, members = Roles(CONFIG), [f"r{i}" for i in range(4)]
    (first,) = roles.prefill(members, plan(1))
    resting = replace(plan(1), warm=frozenset({first}))
    (other,) = roles.prefill(members, resting)
    assert other != first, "nobody would prefill"
    assert roles.prefill(members, plan(1)) == {first}
    assert roles.prefill(["a", "b"], replace(plan(1), warm=frozenset({"a"}))) == frozenset(), "the other one decodes"


def test_a_long_prompt_is_split() -> None:
    split = decide(choice(p=100, a=90, b=95), PREFILL, request(), 512, 1_000)
    assert (split.code, split.prefill_id) == (SplitCode.SPLIT, "p")
    assert split.choice.order == ["a", "b", "p"]


@pytest.mark.parametrize(
    ("routed", "prefill", "tokens", "code"),
    [
        (choice(p=100, a=90), PREFILL, 511, SplitCode.SHORT),
        (choice(a=90), PREFILL, 1_000, SplitCode.NO_PREFILL),
        (choice(p=90), PREFILL, 1_000, SplitCode.NO_DECODE),
        (choice(a=1, b=2), frozenset(), 1_000, SplitCode.NO_PREFILL),
        (choice(p=1_001, a=90), PREFILL, 1_000, SplitCode.BUSY),
        (choice(p=2_000, a=2_000), PREFILL, 1_000, SplitCode.SPLIT),
        (choice(p=2_001, a=2_000), PREFILL, 1_000, SplitCode.BUSY),
    ],
)
def test_why_a_request_is_split_or_not(
    routed: RouteChoice, prefill: frozenset[str], tokens: int, code: SplitCode
) -> None:
    split = decide(routed, prefill, request(tokens), 512, 1_000)
    assert split.code is code
    assert (split.prefill_id is None) == (code is not SplitCode.SPLIT)
    assert sorted(split.choice.order) == sorted(routed.order), "nobody is left out"


def test_cached_tokens_do_not_count() -> None:
    routed = choice(p=100, a=90)
    held = RouteChoice(routed.tiers, routed.reason, routed.predicted_ttft_ms, {"p": 0, "a": 600})
    assert decide(held, PREFILL, request(1_000), 512, 1_000).code is SplitCode.SHORT


def test_a_replica_on_probation_gets_its_request_whole() -> None:
    routed = choice(p=1, a=2)
    probed = RouteChoice(routed.tiers, Reason(PROBATION, "due"), routed.predicted_ttft_ms, routed.predicted_hit_tokens)
    split = decide(probed, PREFILL, request(), 512, 1_000)
    assert (split.code, split.choice.order) == (SplitCode.AGAIN, ["p", "a"])


def test_what_is_handed_over_is_nothing_to_compute() -> None:
    assert (without_prompt(request()).prompt_tokens, without_prompt(request()).blocks) == (1, ())
    over = handed_over(choice(p=1, a=3, b=2), PREFILL, request())
    assert over.order == ["b", "a", "p"]
    assert over.reason.code == "handed_over"
    assert over.predicted_hit_tokens == dict.fromkeys("abp", 1_000)
    assert over.predicted_ttft_ms == {}, "what has begun is not refused for being late"
    empty = RouteChoice((), Reason("none_available", ""), {}, {})
    assert handed_over(empty, PREFILL, request()) is empty


def test_order_within_a_role_stays() -> None:
    routed = RouteChoice((("p", "a"), ("q", "b")), Reason("x", ""), {}, {})
    assert decode_first(routed, {"p", "q"}).tiers == (("a",), ("b",), ("p",), ("q",))
    assert decode_first(routed, ()) is routed
