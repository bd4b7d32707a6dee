"""Baseline routers do what their projects document, on values worked out by hand."""

from __future__ import annotations

import hashlib
from collections import Counter
from random import Random

import pytest

from autoscaling.simulator.baselines.cache_aware import SGLANG, CacheAware, CacheAwareSettings
from autoscaling.simulator.baselines.hash_ring import ConsistentHashing, HashRingSettings
from autoscaling.simulator.baselines.load_routers import LeastTokens, PowerOfTwo, RandomChoice, RoundRobin
from autoscaling.simulator.baselines.prefix_tree import PrefixTree
from autoscaling.simulator.baselines.ray_prefix import RayPrefixAffinity, RayPrefixSettings, SharedTree
from autoscaling.simulator.baselines.tables import ROUTERS, router_for_run
from policies.build import build_policies
from policies.config import PolicyConfig
from policies.routing.strategy import RoutingStrategy
from policies.types import ReplicaView, Request
from tests.unit.routing.build import chain, request, view

S = 1_000_000_000


def fleet(*loads: int) -> list[ReplicaView]:
    """Replicas a, b, c, ... with so many open requests of this gateway."""
    return [view("abcdefgh"[i], requests=n) for i, n in enumerate(loads)]


def first(router: RoutingStrategy, views: list[ReplicaView], r: Request | None = None, now_ns: int = 0) -> str:
    return router.choose(r or request(), views, None, now_ns).order[0]


def route(router: RoutingStrategy, views: list[ReplicaView], r: Request, now_ns: int = 0) -> str:
    """Choose and dispatch."""
    chosen = first(router, views, r, now_ns)
    router.dispatched(r, chosen)
    return chosen


# --- load alone -------------------------------------------------------------------------------------------------------


def test_round_robin_takes_turns_and_skips_who_is_unavailable() -> None:
    router = RoundRobin(Random(1))
    got = "".join(first(router, fleet(9, 0, 0)) for _ in range(6))
    assert got in {"abcabc", "bcabca", "cabcab"}
    views = [view("a"), view("b", why="is draining"), view("c")]
    assert Counter(first(router, views) for _ in range(10)) == {"a": 5, "c": 5}


def test_random_draws_evenly_whatever_the_load() -> None:
    router = RandomChoice(Random(1))
    counts = Counter(first(router, fleet(50, 0, 0, 0)) for _ in range(1_200))
    assert all(abs(n - 300) < 75 for n in counts.values()), counts


def test_power_of_two_takes_the_shorter_queue_of_the_pair() -> None:
    router = PowerOfTwo(Random(1))
    orders = {tuple(router.choose(request(), fleet(3, 2, 1), None, 0).order) for _ in range(100)}
    assert orders == {("b", "a"), ("c", "a"), ("c", "b")}  # "a" is never first: it loses to either


def test_power_of_two_wins_two_thirds_for_the_idlest_of_three() -> None:
    router = PowerOfTwo(Random(2))
    counts = Counter(first(router, fleet(3, 2, 1)) for _ in range(900))
    assert abs(counts["c"] - 600) < 60  # in two of the three pairs


def test_power_of_two_counts_the_replicas_word_and_what_it_sent_since() -> None:
    # The replica said 5 when two of ours were open; three of ours are open now: 6. Other one: 5 of ours, no word.
    told = view("a", requests=3, sample_running=4, sample_waiting=1, sample_age_ms=900.0, local_requests_at_sample=2)
    assert first(PowerOfTwo(Random(1)), [told, view("b", requests=5)]) == "b"
    assert first(PowerOfTwo(Random(1)), [told, view("b", requests=7)]) == "a"


def test_power_of_two_leaves_full_replicas_out_and_waits_when_all_are() -> None:
    router = PowerOfTwo(Random(1), ongoing_max=5)
    assert {first(router, fleet(5, 4, 7)) for _ in range(20)} == {"b"}
    assert router.choose(request(), fleet(5, 6), None, 0).order == []


def test_least_tokens_counts_waiting_and_held_tokens_not_requests() -> None:
    router = LeastTokens(Random(1))
    views = [
        view("a", requests=1, prefill_tokens=9_000),
        view("b", requests=8, prefill_tokens=100, decode_tokens=7_000),
    ]
    assert first(router, views) == "b"
    equals = [view("a", requests=2, decode_tokens=500), view("b", requests=1, prefill_tokens=500)]
    assert first(router, equals) == "b"


# --- Ray's prefix router ----------------------------------------------------------------------------------------------


def ray(shared: SharedTree | None = None, **settings: float) -> RayPrefixAffinity:
    return RayPrefixAffinity(shared or SharedTree(RayPrefixSettings(**settings)), Random(1))  # type: ignore[arg-type]


def test_ray_defaults_are_those_of_the_source() -> None:
    s = RayPrefixSettings()
    assert s.imbalanced_threshold == float("inf")
    assert s.match_rate_threshold == 0.1
    assert not s.do_eviction
    assert (s.eviction_threshold_chars, s.eviction_target_chars, s.eviction_interval_s) == (400_000, 360_000, 10)


def test_ray_follows_a_prefix_whatever_the_queue() -> None:
    router, prompt = ray(), request(chain(1, 10))
    home = route(router, fleet(0, 0, 0), prompt)
    busy = [view(v.replica_id, requests=500 if v.replica_id == home else 0) for v in fleet(0, 0, 0)]
    assert first(router, busy, prompt) == home


def test_ray_match_of_exactly_a_tenth_counts_and_less_does_not() -> None:
    # 1 block of 64 tokens: 256 characters. Prompts of 640 and 644 tokens: rates 0.1 and 0.0994.
    router = ray()
    router.choose(request(), fleet(0, 0), None, 0)
    block = chain(1, 1)
    router.dispatched(request(block, 64), "a")
    at = router.choose(request(block, 640), fleet(9, 0), None, 0)
    assert (at.reason.code, at.order) == ("prefix_match", ["a"])
    below = router.choose(request(block, 644), fleet(9, 0), None, 0)
    assert (below.reason.code, below.order) == ("smallest_tenant", ["b"])


def test_ray_without_a_match_takes_the_smallest_tenants_then_the_shortest_queue() -> None:
    router = ray()
    views = fleet(4, 2, 3)
    router.choose(request(), views, None, 0)
    router.dispatched(request(chain(1, 2)), "b")  # b holds the most characters now, a and c none
    chosen = router.choose(request(chain(2, 5)), views, None, 0)
    assert chosen.order == ["c", "a"]


def test_ray_offers_all_that_hold_the_whole_match_shortest_queue_first() -> None:
    router, prompt = ray(), request(chain(1, 8))
    router.choose(request(), fleet(0, 0, 0), None, 0)
    router.dispatched(prompt, "a")
    router.dispatched(prompt, "c")
    router.dispatched(request(chain(1, 3)), "b")  # holds less than the whole match
    assert router.choose(prompt, fleet(5, 0, 4), None, 0).order == ["c", "a"]


def test_ray_falls_back_to_power_of_two_only_above_a_finite_threshold() -> None:
    router, prompt = ray(imbalanced_threshold=10.0), request(chain(1, 8))
    home = route(router, fleet(0, 0), prompt)
    other = "b" if home == "a" else "a"
    loads = {home: 10, other: 0}
    assert first(router, [view(r, requests=loads[r]) for r in "ab"], prompt) == home
    loads[home] = 11
    assert first(router, [view(r, requests=loads[r]) for r in "ab"], prompt) == other


def test_ray_routers_share_one_tree_within_a_run_and_none_between_runs() -> None:
    factory = router_for_run("ray_prefix_affinity")
    assert factory is not None
    config, prompt = PolicyConfig(), request(chain(1, 8))
    one, two = (build_policies(config, seed, factory) for seed in (1, 2))
    home = route(one.router, fleet(0, 0, 0, 0), prompt)
    assert first(two.router, fleet(0, 0, 0, 0), prompt) == home
    other_run = router_for_run("ray_prefix_affinity")
    assert other_run is not None
    fresh = build_policies(config, 1, other_run).router
    assert fresh.choose(prompt, fleet(0, 0, 0, 0), None, 0).reason.code == "smallest_tenant"


def test_ray_evicts_only_when_told_and_down_to_its_target() -> None:
    # 8 blocks and a tail of 20 tokens: 2,048 + 80 characters a prompt.
    router = ray(do_eviction=True, eviction_threshold_chars=5_000, eviction_target_chars=4_300)
    prompts = [request(chain(k, 8), request_id=f"tg-{k}") for k in range(3)]
    for n, prompt in enumerate(prompts):
        router.choose(prompt, fleet(0), None, n * S)
        router.dispatched(prompt, "a")
    assert router.choose(prompts[0], fleet(0), None, 9 * S).reason.code == "prefix_match"
    assert router.choose(prompts[0], fleet(0), None, 11 * S).reason.code == "smallest_tenant"  # 6,384 > 5,000
    assert router.choose(prompts[1], fleet(0), None, 11 * S).reason.code == "prefix_match"


def test_ray_forgets_a_replica_that_left() -> None:
    router, prompt = ray(), request(chain(1, 8))
    home = route(router, fleet(0, 0), prompt)
    router.forget(home)
    assert router.choose(prompt, fleet(0, 0), None, 0).reason.code == "smallest_tenant"


# --- vllm-router and SGLang -------------------------------------------------------------------------------------------


def test_cache_aware_defaults_are_those_of_the_launchers() -> None:
    assert CacheAwareSettings() == CacheAwareSettings(0.3, 64, 1.5, 120.0, 33_554_432)
    assert CacheAwareSettings(0.3, 64, 1.5, 60.0, 67_108_864) == SGLANG


def test_cache_aware_follows_a_match_above_the_threshold_and_else_the_least_load() -> None:
    # 3 blocks of 64 tokens of a prompt of 640: 0.3 is not above 0.3; of 639 it is.
    router = CacheAware()
    router.choose(request(), fleet(0, 0), None, 0)
    router.dispatched(request(chain(1, 3), 192), "a")
    at = router.choose(request(chain(1, 3), 640), fleet(9, 0), None, 0)
    assert (at.reason.code, at.order) == ("low_match_min_load", ["b"])
    above = router.choose(request(chain(1, 3), 639), fleet(9, 0), None, 0)
    assert (above.reason.code, above.order) == ("cache_affinity", ["a"])
    assert above.predicted_hit_tokens == {"a": 192}


def test_cache_aware_balances_only_when_both_thresholds_are_passed() -> None:
    router, prompt = CacheAware(), request(chain(1, 8))
    router.choose(prompt, fleet(0, 0), None, 0)
    router.dispatched(prompt, "a")
    assert first(router, fleet(64, 0), prompt) == "a"  # the difference is not above 64
    assert first(router, fleet(65, 0), prompt) == "b"
    assert first(router, fleet(195, 130), prompt) == "a"  # 195 is not above 1.5 * 130
    assert first(router, fleet(196, 130), prompt) == "b"


def test_cache_aware_sticks_to_who_was_first_while_it_holds_the_prefix() -> None:
    router, prompt = CacheAware(), request(chain(1, 8))
    router.choose(prompt, fleet(0, 0), None, 0)
    router.dispatched(prompt, "a")
    router.dispatched(prompt, "b")
    assert first(router, fleet(60, 0), prompt) == "a"
    router.forget("a")
    assert first(router, fleet(60, 60), prompt) == "b"


def test_cache_aware_gives_a_gone_workers_prompt_to_the_first_and_forgets_it() -> None:
    router, prompt = CacheAware(), request(chain(1, 8))
    router.choose(prompt, fleet(0, 0, 0), None, 0)
    router.dispatched(prompt, "b")
    without = [view("a", requests=7), view("b", why="is draining"), view("c")]
    assert router.choose(prompt, without, None, 0).reason.code == "stale_worker"
    assert router.choose(prompt, without, None, 0).order == ["c"]


def test_cache_aware_evicts_least_recent_leaves_at_its_interval() -> None:
    # 4 blocks of 64 tokens and no tail: 1,024 characters a prompt; room for one and a half.
    router = CacheAware(CacheAwareSettings(max_tree_chars=1_536, eviction_interval_s=120.0))
    old, new = request(chain(1, 4), 256), request(chain(2, 4), 256)
    for prompt in (old, new):
        router.choose(prompt, fleet(0, 0), None, 0)
        router.dispatched(prompt, "b")
    assert router.choose(old, fleet(0, 9), None, 119 * S).reason.code == "cache_affinity"
    half = router.choose(old, fleet(0, 9), None, 120 * S)
    assert half.predicted_hit_tokens == {"b": 128}  # the last two of its four blocks are gone
    assert router.choose(new, fleet(0, 9), None, 120 * S).predicted_hit_tokens == {"b": 256}


# --- consistent hashing -----------------------------------------------------------------------------------------------


def test_hash_ring_sends_one_prefix_to_one_replica_from_every_gateway() -> None:
    prompt, longer = request(chain(3, 1)), request(chain(3, 9))
    homes = {first(ConsistentHashing(), fleet(*[0] * 8), r) for r in (prompt, longer)}
    assert len(homes) == 1


def test_hash_ring_bound_is_a_quarter_above_the_mean_rounded_up() -> None:
    # 8 requests over 4 replicas: ceil(1.25 * 9 / 4) = 3, so a replica with 3 has no room and one with 2 has.
    router, prompt = ConsistentHashing(), request(chain(3, 1))
    home = first(router, fleet(0, 0, 0, 0), prompt)
    others = [r for r in "abcd" if r != home]
    two = [view(r, requests=2) for r in "abcd"]
    assert first(router, two, prompt) == home
    loads = {home: 3, others[0]: 2, others[1]: 2, others[2]: 1}
    assert first(router, [view(r, requests=loads[r]) for r in "abcd"], prompt) != home
    unbounded = ConsistentHashing(HashRingSettings(load_factor=None))
    assert first(unbounded, [view(r, requests=loads[r]) for r in "abcd"], prompt) == home


def test_hash_ring_moves_only_the_keys_of_a_replica_that_left() -> None:
    router = ConsistentHashing()
    prompts = [request(chain(k, 1)) for k in range(300)]
    before = [first(router, fleet(*[0] * 5), p) for p in prompts]
    left = [view(r) for r in "abcd"]
    after = [first(router, left, p) for p in prompts]
    assert all(b == a for b, a in zip(before, after, strict=True) if b != "e")
    shares = Counter(before)
    assert all(30 <= shares[r] <= 95 for r in "abcde"), shares  # 60 each, 256 places make it even


# --- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n, factory in ROUTERS.items() if factory is not None])
def test_every_router_offers_only_available_replicas_and_says_why_nobody(name: str) -> None:
    router = build_policies(PolicyConfig(), 5, router_for_run(name)).router
    views = [view("a", why="is draining"), view("b", requests=3), view("c", why="is stuck"), view("d")]
    for k in range(50):
        prompt = request(chain(k % 7, k % 5), request_id=f"tg-{k}")
        order = router.choose(prompt, views, None, k * S).order
        assert order
        assert set(order) <= {"b", "d"}
        router.dispatched(prompt, order[0])
    nobody = router.choose(request(), views[::2], None, 60 * S)
    assert nobody.order == []
    assert nobody.reason.text == "a is draining, c is stuck"
    assert router.choose(request(), [], None, 60 * S).reason.text == "no replica is known"
    router.forget("b")
    assert router.choose(request(), views, None, 61 * S).order


@pytest.mark.parametrize("name", [n for n, factory in ROUTERS.items() if factory is not None])
def test_every_router_repeats_itself_under_one_seed(name: str) -> None:
    def digest() -> str:
        router = build_policies(PolicyConfig(), 5, router_for_run(name)).router
        order = [route(router, fleet(*[(k * i) % 11 for i in range(6)]), request(chain(k % 9, 3))) for k in range(80)]
        return hashlib.sha256("".join(order).encode()).hexdigest()

    assert digest() == digest()


def test_tree_sizes_return_to_zero_when_its_tenants_leave() -> None:
    tree = PrefixTree(inner_times=True, keep_tails=True)
    for k in range(30):
        tree.insert(request(chain(k % 6, 1 + k % 4), request_id=f"tg-{k}"), "ab"[k % 2], k + 1)
    tree.evict_oldest("a", 500)
    tree.evict_leaves(2_000)
    assert max(tree.tenant_chars.values()) <= 2_000
    tree.remove_tenant("a")
    tree.remove_tenant("b")
    assert len(tree) == 0
