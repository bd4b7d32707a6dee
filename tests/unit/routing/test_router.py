"""Which replica comes first, and why."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from policies.config import RoutingConfig
from policies.types import StepCoefficients
from tests.unit.routing.build import chain, request, router, view

LONG = chain(0, 40)  # 2,560 tokens


def test_the_replica_that_holds_the_prefix_comes_first() -> None:
    r = router()
    r.dispatched(request(LONG), "b")
    choice = r.choose(request(LONG, 2_600), [view("a"), view("b"), view("c")], None, 0)
    assert choice.order[0] == "b"
    assert choice.reason.code == "prefix_hit"
    assert choice.predicted_hit_tokens == {"a": 0, "b": 2_560, "c": 0}
    assert choice.predicted_ttft_ms["b"] < choice.predicted_ttft_ms["a"] / 10
    assert "2,560 of 2,600 prompt tokens cached" in choice.reason.text
    assert "runner-up" in choice.reason.text


def test_every_replica_is_offered_one_to_a_tier() -> None:
    choice = router().choose(request(LONG), [view(x) for x in "abcd"], None, 0)
    assert sorted(choice.order) == list("abcd")
    assert all(len(tier) == 1 for tier in choice.tiers)


def test_a_long_queue_outweighs_a_short_hit() -> None:
    r = router()
    r.dispatched(request(LONG[:2]), "a")
    views = [view("a", requests=2, prefill_tokens=3_000), view("b", requests=2, prefill_tokens=2_000)]
    choice = r.choose(request(LONG), views, None, 0)
    assert choice.order[0] == "b"
    assert choice.reason.code == "least_ttft"


def test_without_trust_in_hits_load_alone_decides() -> None:
    r = router()
    r.dispatched(request(LONG), "a")
    views = [view("a", requests=3, prefill_tokens=1_500), view("b")]
    assert r.choose(request(LONG), views, 1.0, 0).order[0] == "a"
    assert r.choose(request(LONG), views, 0.0, 0).order[0] == "b"


def test_strength_comes_from_the_plan_else_from_the_configuration_and_is_clamped() -> None:
    r = router(RoutingConfig(affinity_strength=0.0))
    r.dispatched(request(LONG), "a")
    views = [view("a", requests=3, prefill_tokens=1_500), view("b")]
    assert [r.choose(request(LONG), views, s, 0).order[0] for s in (None, math.nan, -5.0, 0.0)] == ["b"] * 4
    assert [r.choose(request(LONG), views, s, 0).order[0] for s in (1.0, 7.0)] == ["a"] * 2


def test_a_cold_prefix_goes_to_the_same_replica_at_every_gateway() -> None:
    views = [view(x) for x in "abcdefgh"]
    firsts: Counter[str] = Counter()
    for prefix in range(200):
        orders = {
            tuple(router(seed=g).choose(request(chain(prefix, 8), request_id=f"tg-{g}"), v, None, 0).order)
            for g, v in enumerate((views, views[::-1], views))
        }
        assert len(orders) == 1
        firsts[orders.pop()[0]] += 1
    assert min(firsts.values()) >= 10, "and different prefixes spread"


def test_a_cold_prefix_avoids_replicas_that_are_clearly_slower() -> None:
    views = [view("a", requests=1, prefill_tokens=1_000), view("b", requests=1, prefill_tokens=1_000), view("c")]
    for prefix in range(50):
        choice = router().choose(request(chain(prefix, 8)), views, None, 0)
        assert choice.order[0] == "c"
        assert choice.reason.code == "cold_rendezvous"


def test_a_millisecond_more_or_less_does_not_move_a_cold_prefix() -> None:
    fast = StepCoefficients(6.0, 0.1, 0.03, 0.015)
    idle = [view(x, step_model=fast) for x in "abcd"]
    for prefix in range(20):
        home = router().choose(request(chain(prefix, 8)), idle, None, 0).order[0]
        views = [view(x, requests=30 * (x == home), step_model=fast) for x in "abcd"]
        assert router().choose(request(chain(prefix, 8)), views, None, 0).order[0] == home


def test_among_equals_the_one_with_most_cached_comes_first() -> None:
    for holder in "abcd":
        r = router()
        r.dispatched(request(LONG[:3]), holder)
        views = [view(x, requests=1, prefill_tokens=2_000 + 192 * (x == holder)) for x in "abcd"]
        assert r.choose(request(LONG), views, None, 0).order[0] == holder


def test_a_burst_of_one_cold_prefix_follows_its_first() -> None:
    r = router()
    views = [view(x) for x in "abcdefgh"]
    first = r.choose(request(LONG, 2_600), views, None, 0).order[0]
    r.dispatched(request(LONG), first)
    for sent in range(1, 4):  # the first is still computing its 2,600 tokens, the others add 40 each
        views = [
            view(x, requests=sent, prefill_tokens=2_560 + 40 * sent) if x == first else view(x) for x in "abcdefgh"
        ]
        assert r.choose(request(LONG, 2_600), views, None, 0).order[0] == first


def test_a_prompt_without_blocks_goes_where_least_is_open() -> None:
    views = [view("a", requests=3), view("b", requests=1), view("c", requests=2)]
    choice = router().choose(request((), 20), views, None, 0)
    assert choice.order == ["b", "c", "a"]
    assert choice.reason.code == "least_ttft"


def test_prompts_without_blocks_spread_over_equals() -> None:
    views = [view(x) for x in "abcd"]
    firsts = Counter(router().choose(request((), 20, f"tg-{n}"), views, None, 0).order[0] for n in range(200))
    assert min(firsts.values()) > 25


def test_bounded_load_moves_a_hot_replica_behind_the_others_but_keeps_it() -> None:
    r = router(RoutingConfig(load_bound=1.25, load_slack_tokens=500))
    r.dispatched(request(LONG), "a")
    hot = view("a", requests=12, decode_tokens=12 * 2_600)
    choice = r.choose(request(LONG), [hot, view("b"), view("c")], None, 0)
    assert choice.order[-1] == "a"
    assert choice.reason.code == "load_bound"
    assert "a passed over" in choice.reason.text


def test_load_below_the_slack_is_never_unbalanced() -> None:
    r = router(RoutingConfig(load_bound=1.0, load_slack_tokens=10_000))
    r.dispatched(request(LONG), "a")
    hot = view("a", requests=12, decode_tokens=12 * 2_600)
    assert r.choose(request(LONG), [hot, view("b"), view("c")], None, 0).order[0] == "a"


def test_one_stream_as_long_as_the_request_is_no_hot_spot() -> None:
    blocks = chain(0, 500)
    r = router(RoutingConfig(load_bound=1.0, load_slack_tokens=0))
    r.dispatched(request(blocks), "a")
    views = [view("a", requests=1, decode_tokens=32_020), *(view(x) for x in "bcdefgh")]
    assert r.choose(request(blocks), views, None, 0).order[0] == "a"


def test_imbalance_of_one_replica_leaves_the_affinity_of_the_others() -> None:
    r = router()
    r.dispatched(request(LONG), "a")
    r.dispatched(request(LONG), "c")
    hot = view("a", requests=40, decode_tokens=40 * 2_600)
    choice = r.choose(request(LONG), [hot, *(view(x, requests=1) for x in "bcdefgh")], None, 0)
    assert choice.order[0] == "c"
    assert choice.order[-1] == "a"


def test_unavailable_replicas_are_skipped() -> None:
    choice = router().choose(
        request(LONG), [view("a", why="is draining"), view("b"), view("c", why="is stuck")], None, 0
    )
    assert choice.order == ["b"]
    assert choice.reason.code == "only_replica"
    assert set(choice.predicted_ttft_ms) == {"b"}


def test_nobody_available_is_an_empty_choice_that_says_why() -> None:
    choice = router().choose(request(LONG), [view("a", why="is draining"), view("b", why="was tried already")], None, 0)
    assert (choice.tiers, choice.order) == ((), [])
    assert choice.reason.code == "none_available"
    assert choice.reason.text == "a is draining, b was tried already"
    assert router().choose(request(LONG), [], None, 0).reason.text == "no replica is known"


def test_random_is_uniform_over_available_replicas_and_still_predicts() -> None:
    r = router(RoutingConfig(strategy="random"))
    r.dispatched(request(LONG), "a")
    views = [view(x, why="is stuck" if x == "d" else "") for x in "abcd"]
    choices = [r.choose(request(LONG), views, None, 0) for _ in range(600)]
    firsts = Counter(c.order[0] for c in choices)
    assert set(firsts) == set("abc")
    assert min(firsts.values()) > 150
    assert {c.reason.code for c in choices} == {"random"}
    assert choices[0].predicted_hit_tokens["a"] == 2_560


def test_the_same_seed_gives_the_same_random_choices() -> None:
    def orders(seed: int) -> list[list[str]]:
        r = router(RoutingConfig(strategy="random"), seed)
        return [list(r.choose(request(LONG), [view(x) for x in "abcd"], None, 0).order) for _ in range(20)]

    assert orders(1) == orders(1) != orders(2)


def test_only_request_blocks_max_blocks_are_indexed_and_looked_up() -> None:
    r = router(RoutingConfig(request_blocks_max=10))
    r.dispatched(request(LONG), "a")
    assert len(r._index) == 10
    assert r.choose(request(LONG), [view("a"), view("b")], None, 0).predicted_hit_tokens["a"] == 640


def test_a_forgotten_replica_holds_nothing() -> None:
    r = router()
    r.dispatched(request(LONG), "a")
    r.forget("a")
    r.forget("unknown")
    assert r.choose(request(LONG), [view("a"), view("b")], None, 0).predicted_hit_tokens == {"a": 0, "b": 0}


@pytest.mark.parametrize("tokens", [0, 1, 10_000_000])
def test_extreme_prompts_still_get_an_order(tokens: int) -> None:
    choice = router().choose(request((), tokens), [view("a"), view("b", running_seqs_max=1, requests=5)], None, 0)
    assert choice.order[0] == "a"
    assert all(math.isfinite(ms) for ms in choice.predicted_ttft_ms.values())
