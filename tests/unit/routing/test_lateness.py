"""Requests that can be served in time go where they are; the others join those that are late."""

from __future__ import annotations

from random import Random

import pytest

from policies.build import build_policies
from policies.config import ObjectivesConfig, PolicyConfig, RoutingConfig
from policies.config_base import ConfigError
from policies.routing.lateness import DECODE_SHARE, TTFT_SHARE, promise
from policies.routing.predict import standing_of
from policies.routing.prefix_index import PrefixIndex
from policies.routing.router import Router
from policies.types import ReplicaView, StepCoefficients
from tests.unit.routing.build import chain, request, view

FAST = StepCoefficients(10.0, 0.0, 0.05, 0.1)
"""1,000 prompt tokens take 100 ms, 100,000 tokens of KV lengthen a step by 5 ms."""
OBJECTIVES = ObjectivesConfig(ttft_ms=2_000.0, itl_ms=50.0)
"""A prediction may take 1,500 ms: a backlog of about 14,800 tokens; decoding may take 25 ms: 300,000 tokens of KV."""


def make(objectives: ObjectivesConfig | None = OBJECTIVES, config: RoutingConfig | None = None) -> Router:
    config = config or RoutingConfig(load_bound=100.0)
    return Router(config, PrefixIndex(config.index_blocks_max), Random(1), objectives)


def replica(name: str, backlog: int = 0, kv_tokens: int = 0) -> ReplicaView:
    return view(
        name,
        requests=1 if backlog or kv_tokens else 0,
        prefill_tokens=backlog,
        decode_tokens=kv_tokens,
        step_model=FAST,
        step_tokens_max=8_192,
    )


def test_the_promise_leaves_a_quarter_of_the_wait_and_half_of_the_gap() -> None:
    given = promise(OBJECTIVES, 60_000.0)
    assert (given.ttft_ms, given.gap_ms) == (2_000 * TTFT_SHARE, 50 * DECODE_SHARE) == (1_500, 25)
    assert given.late(standing_of(replica("a", 15_000), RoutingConfig()))
    assert not given.late(standing_of(replica("a", 14_000), RoutingConfig()))


def test_who_keeps_the_promise_goes_before_who_starts_sooner_but_makes_streams_slow() -> None:
    # a: 10 + 0.05 * 301 = 25.05 ms a step with the request in it; b: a wait of 0.6 s.
    views = [replica("a", kv_tokens=300_000), replica("b", backlog=6_000)]
    choice = make().choose(request((), 1_000), views, None, 0)
    assert choice.order == ["b", "a"]
    assert choice.reason.code == "in_time"
    assert "a passed over" in choice.reason.text
    assert make(None).choose(request((), 1_000), views, None, 0).order == ["a", "b"]


def test_a_surplus_request_joins_the_latest_and_leaves_the_others_in_time() -> None:
    # Nobody has room for 5,000 tokens within 1.5 s; b and c are late for everything already.
    views = [replica("a", 11_000), replica("b", 16_000), replica("c", 40_000), replica("d", 12_000)]
    choice = make().choose(request((), 5_000), views, None, 0)
    assert choice.order == ["c", "b", "a", "d"]
    assert choice.reason.code == "late"
    # One of 1,000 tokens can still be served in time.
    assert make().choose(request((), 1_000), views, None, 0).order[0] == "a"


def test_no_wait_grows_beyond_the_longest_allowed() -> None:
    config = RoutingConfig(load_bound=100.0, late_ms_max=3_000.0)
    views = [replica("a", 14_000), replica("b", 16_000), replica("c", 28_000)]
    # c would take 3.3 s with it, b 2.1 s.
    assert make(config=config).choose(request((), 5_000), views, None, 0).order[0] == "b"


def test_while_nobody_is_late_a_hopeless_prompt_goes_where_it_starts_soonest() -> None:
    views = [replica("a", 3_000), replica("b", 10), replica("c", 1_000)]
    choice = make().choose(request((), 50_000), views, None, 0)
    assert choice.order[0] == "b"
    assert choice.reason.code != "late"


def test_nobody_waits_with_the_late_while_a_replica_has_nothing_to_do() -> None:
    views = [replica("a", 40_000), replica("b", 14_000), replica("c")]
    assert make().choose(request((), 50_000), views, None, 0).order[0] == "c"
    views[2] = replica("c", 10)
    assert make().choose(request((), 50_000), views, None, 0).order[0] == "a"


def test_it_can_be_switched_off() -> None:
    views = [replica("a", 11_000), replica("b", 16_000), replica("c", 40_000)]
    off = make(config=RoutingConfig(load_bound=100.0, late_ms_max=0.0))
    assert off.choose(request((), 5_000), views, None, 0).order == ["a", "b", "c"]
    with pytest.raises(ConfigError, match="late_ms_max"):
        RoutingConfig(late_ms_max=-1.0)


def test_an_overloaded_fleet_keeps_most_of_its_replicas_in_time() -> None:
    """Twice the prompts that eight replicas compute: most end up at few, the rest stays within the promise."""
    router, backlog = make(), dict.fromkeys("abcdefgh", 0.0)
    in_time = 0
    for n in range(2_000):
        chosen = router.choose(request((), 2_000, f"tg-{n}"), [replica(r, int(t)) for r, t in backlog.items()], None, 0)
        first = chosen.order[0]
        in_time += chosen.predicted_ttft_ms[first] <= 2_000
        backlog[first] += 2_000
        backlog = {r: max(0.0, t - 125.0) for r, t in backlog.items()}  # eight of them: 1,000 tokens a turn
    assert in_time > 0.4 * 2_000
    assert sum(t * 0.1 < 1_600 for t in backlog.values()) >= 4  # 2,000,000 surplus tokens fill three lanes of 60 s


def test_a_request_whose_prefix_is_held_stays_in_time_where_others_cannot() -> None:
    router = make()
    prompt = request(chain(1, 40), 2_600)
    router.dispatched(prompt, "b")
    views = [replica("a", 13_500), replica("b", 13_500), replica("c", 40_000)]
    assert router.choose(prompt, views, None, 0).order[0] == "b"
    assert router.choose(request(chain(2, 40), 2_600), views, None, 0).order[0] == "c"


def test_a_gateway_believes_in_no_more_than_its_share_of_the_fleets_caches() -> None:
    policies = build_policies(PolicyConfig(), 1)
    stats = {"running": 0, "waiting": 0, "kv_tokens_used": 0, "kv_tokens_max": 640}
    policies.update_members({r: {**stats, "seq": 1} for r in "ab"}, 0)
    for n in range(5):
        prompt = request(chain(n, 8), 520, f"tg-{n}")
        policies.router.dispatched(prompt, policies.choose(prompt, (), 0).order[0])
    assert len(policies.index) == 20  # 2 * 640 tokens in blocks of 64
    policies.update_members({"a": {**stats, "seq": 2}, "c": None}, 0)
    policies.choose(request(chain(9, 8)), (), 0)
    policies.router.dispatched(request(chain(9, 8)), "a")
    assert len(policies.index) > 20, "a replica that has not told its cache may hold anything"
