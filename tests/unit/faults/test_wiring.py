"""What one gateway's policies make of its replicas' health: whom they choose, and whom they leave alone."""

from __future__ import annotations

import pytest

from policies.build import Policies, build_policies
from policies.config import FaultsConfig, PolicyConfig
from policies.faults import BreakerState
from policies.faults.grey import LEARNED_STEPS_MIN, STEPS_MIN
from policies.types import Request
from tests.unit.routing.build import request

S = 1_000_000_000
FAULTS = FaultsConfig(breaker_failures=3, eject_ms=1_000)
SAMPLE: dict[str, object] = {
    "seq": 1, "running": 0, "waiting": 0, "prefill_backlog_tokens": 0, "kv_tokens_used": 0, "kv_tokens_max": 60_000,
    "running_seqs_max": 16, "step_tokens_max": 512, "step_a_ms": 30.0, "step_b_ms": 1.8, "step_c_ms": 0.5,
    "step_d_ms": 1.9, "step_samples": 500, "state": "ready",
}  # fmt: skip


def policies(*members: str) -> Policies:
    p = build_policies(PolicyConfig(faults=FAULTS), seed=1)
    p.update_members(dict.fromkeys(members, SAMPLE), 0)
    return p


def ask(number: int = 0) -> Request:
    return request((), 500, f"r-{number}")


def break_down(p: Policies, replica_id: str, now_ns: int = 0) -> None:
    for fingerprint in range(1, FAULTS.breaker_failures + 1):
        p.flow_context.health.failed(replica_id, fingerprint, now_ns)


def test_an_ejected_replica_is_not_chosen() -> None:
    p = policies("a", "b", "c")
    break_down(p, "a")
    for number in range(20):
        assert set(p.choose(ask(number), (), 0).order) == {"b", "c"}


def test_when_all_are_ejected_the_choice_says_why() -> None:
    p = policies("a", "b")
    break_down(p, "a")
    break_down(p, "b")
    choice = p.choose(ask(), (), 0)
    assert not choice.order
    assert choice.reason.code == "none_available"
    assert choice.reason.text.count("is ejected: 3 requests in a row failed") == 2


def test_a_replica_on_probation_is_asked_first_when_it_is_due_but_by_no_repeated_request() -> None:
    p = policies("a", "b")
    break_down(p, "b")
    busy = {**SAMPLE, "seq": 2, "running": 16, "waiting": 9, "prefill_backlog_tokens": 50_000}
    p.update_members({"a": SAMPLE, "b": busy}, 0)
    p.choose(ask(), (), S)
    assert p.choose(ask(), (), S).order[0] == "a"
    assert p.choose(ask(), ("z",), 3 * S).order[0] == "a"
    choice = p.choose(ask(), (), 3 * S)
    assert (list(choice.order), choice.reason.code) == (["b", "a"], "probation")
    p.flow_context.health.sent("b", 3 * S)
    assert list(p.choose(ask(), (), 3 * S).order) == ["a"]


def test_a_replica_that_drains_is_not_probed() -> None:
    p = policies("a", "b")
    break_down(p, "b")
    p.update_members({"a": SAMPLE, "b": {**SAMPLE, "seq": 2, "state": "draining"}}, 0)
    p.choose(ask(), (), S)
    assert list(p.choose(ask(), (), 9 * S).order) == ["a"]


def test_step_models_in_samples_are_compared_with_the_peers() -> None:
    p = policies("a", "b", "c")
    for second in range(1, 40):
        slower = 10.0 if second > 30 else 1.0
        steps = {"seq": second + 1, "step_samples": LEARNED_STEPS_MIN + second * STEPS_MIN}
        slow = {"step_a_ms": 30.0 * slower, "step_d_ms": 1.9 * slower}
        p.update_members({"a": SAMPLE | steps | slow, "b": SAMPLE | steps, "c": SAMPLE | steps}, second * S)
    assert p.flow_context.health.states()["a"].code == "grey_steps"
    assert p.flow_context.health.state("b") is BreakerState.CLOSED


@pytest.mark.parametrize("own", [0, 1])
def test_a_gateway_with_nothing_at_any_replica_may_send_one_whatever_samples_say(own: int) -> None:
    p = policies("a")
    busy = {**SAMPLE, "seq": 2, "running": 16, "waiting": 90, "prefill_backlog_tokens": 500_000}
    p.update_members({"a": busy}, 0)
    for number in range(own):
        p.flow_context.book.dispatched("a", f"own-{number}", 500, 500)
    verdict = p.flow_context.admission.arrive(ask(), 0)
    assert (verdict.entry.value == "admitted") is (own == 0)
