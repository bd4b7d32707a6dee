"""Load from local counts and samples, and the TTFT predicted from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.config import RoutingConfig
from policies.routing.predict import (
    CHUNK_TOKENS_GUESS,
    DECODE_LOAD_SHARE,
    OUTPUT_TOKENS_GUESS,
    REQUEST_LOAD_TOKENS,
    Load,
    estimate,
    joined_load,
)
from policies.step_model import predict_step_ms, prefill_ms
from policies.types import ReplicaView
from tests.unit.routing.build import STEP, chain, request, view

CONFIG = RoutingConfig()
MAX_MS = CONFIG.sample_age_ms_max


def sampled(**at_sample: int) -> ReplicaView:
    sample: dict[str, int] = {
        "sample_running": 2,
        "sample_waiting": 4,
        "sample_prefill_backlog_tokens": 900,
        "sample_kv_tokens_used": 5_000,
        "sample_age_ms": 100,
    }
    return replace(view("a", requests=3, prefill_tokens=300, decode_tokens=1_000), **{**sample, **at_sample})  # type: ignore[arg-type]


def test_without_a_sample_local_counts_stand() -> None:
    assert joined_load(view("a", requests=3, prefill_tokens=300, decode_tokens=1_000), MAX_MS) == Load(3, 300, 1_000)


def test_without_counts_at_its_arrival_the_larger_of_local_and_sample_stands() -> None:
    assert joined_load(sampled(), MAX_MS) == Load(6, 900, 5_000)
    small = replace(
        sampled(), sample_running=0, sample_waiting=0, sample_prefill_backlog_tokens=0, sample_kv_tokens_used=0
    )
    assert joined_load(small, MAX_MS) == Load(3, 300, 1_000)


def test_what_was_sent_since_the_sample_is_added() -> None:
    v = sampled(local_requests_at_sample=1, local_prefill_tokens_at_sample=100, local_decode_tokens_at_sample=1_000)
    assert joined_load(v, MAX_MS) == Load(8, 1_100, 5_000)


def test_what_was_answered_since_the_sample_is_taken_off_down_to_the_local_count() -> None:
    v = sampled(local_requests_at_sample=5, local_prefill_tokens_at_sample=700, local_decode_tokens_at_sample=9_000)
    assert joined_load(v, MAX_MS) == Load(4, 500, 1_000)


def test_an_old_sample_is_ignored_and_one_at_the_limit_is_not() -> None:
    local = Load(3, 300, 1_000)
    assert joined_load(replace(sampled(), sample_age_ms=MAX_MS + 0.1), MAX_MS) == local
    assert joined_load(replace(sampled(), sample_age_ms=None), MAX_MS) == local
    assert joined_load(replace(sampled(), sample_age_ms=MAX_MS), MAX_MS) != local


def test_a_sample_with_gaps_counts_where_it_speaks() -> None:
    v = replace(sampled(), sample_running=None, sample_waiting=7, sample_prefill_backlog_tokens=None)
    assert joined_load(v, MAX_MS) == Load(7, 300, 5_000)
    v = replace(v, sample_waiting=None, sample_kv_tokens_used=None)
    assert joined_load(v, MAX_MS) == Load(3, 300, 1_000)


def test_load_in_tokens_weighs_prefill_decode_and_requests() -> None:
    assert Load(2, 300, 1_000).tokens == 300 + DECODE_LOAD_SHARE * 1_000 + REQUEST_LOAD_TOKENS * 2
    assert Load(0, 0, 0).tokens == 0


def test_an_idle_replica_takes_the_prefill_of_the_uncached_tokens() -> None:
    e = estimate(request(chain(0, 10), 660), view("a"), hit_blocks=4, strength=1.0, config=CONFIG)
    assert (e.hit_tokens, e.uncached_tokens) == (256, 404)
    assert e.ttft_ms == pytest.approx(prefill_ms(STEP, 404, CHUNK_TOKENS_GUESS, 0, 0))


def test_strength_scales_the_trust_in_the_hit_but_not_the_belief() -> None:
    e = estimate(request(chain(0, 10), 660), view("a"), hit_blocks=10, strength=0.5, config=CONFIG)
    assert (e.hit_tokens, e.uncached_tokens) == (640, 340)
    e = estimate(request(chain(0, 10), 660), view("a"), hit_blocks=10, strength=0.0, config=CONFIG)
    assert (e.hit_tokens, e.uncached_tokens) == (640, 660)


def test_a_fully_cached_prompt_still_computes_a_token() -> None:
    e = estimate(request(chain(0, 10), 600), view("a"), hit_blocks=10, strength=1.0, config=CONFIG)
    assert (e.hit_tokens, e.uncached_tokens) == (600, 1)
    assert e.ttft_ms > 0
    assert estimate(request((), 0), view("a"), 0, 1.0, CONFIG).uncached_tokens == 1


def test_backlog_is_computed_first() -> None:
    v = view("a", requests=2, prefill_tokens=1_000)
    e = estimate(request((), 100), v, 0, 1.0, CONFIG)
    assert e.ttft_ms == pytest.approx(prefill_ms(STEP, 1_100, CHUNK_TOKENS_GUESS, 2, 0))


def test_a_small_token_budget_makes_prefill_slower() -> None:
    def ttft_ms(budget: int | None) -> float:
        return estimate(request((), 1_000), view("a", step_tokens_max=budget), 0, 1.0, CONFIG).ttft_ms

    assert ttft_ms(128) > ttft_ms(1_024) > 0
    assert ttft_ms(None) == ttft_ms(CHUNK_TOKENS_GUESS)


def test_an_unknown_step_model_takes_the_prior() -> None:
    e = estimate(request((), 100), view("a", step_model=None), 0, 1.0, CONFIG)
    assert e.ttft_ms == pytest.approx(prefill_ms(CONFIG.step_prior, 100, CHUNK_TOKENS_GUESS, 0, 0))


def test_full_slots_are_waited_for() -> None:
    r = request((), 100)
    busy = estimate(r, view("a", requests=15, running_seqs_max=16), 0, 1.0, CONFIG).ttft_ms
    full = estimate(r, view("a", requests=16, running_seqs_max=16), 0, 1.0, CONFIG).ttft_ms
    queued = estimate(r, view("a", requests=18, running_seqs_max=16), 0, 1.0, CONFIG).ttft_ms
    end_ms = OUTPUT_TOKENS_GUESS * predict_step_ms(STEP, 16, 0, 0) / 16
    assert full == pytest.approx(busy + end_ms, rel=0.05)
    assert queued == pytest.approx(full + 2 * end_ms)


def test_full_kv_is_waited_for() -> None:
    def ttft_ms(kv_tokens_max: int | None) -> float:
        v = view("a", requests=10, decode_tokens=10_000, sample_kv_tokens_max=kv_tokens_max)
        return estimate(request((), 500), v, 0, 1.0, CONFIG).ttft_ms

    assert ttft_ms(None) == ttft_ms(10_500) < ttft_ms(10_400) < ttft_ms(8_000)
    assert ttft_ms(1) < float("inf")


def test_backlog_that_may_be_the_requests_own_prefix_is_not_held_against_a_replica() -> None:
    v = view("a", requests=2, prefill_tokens=700)
    e = estimate(request(chain(0, 10), 660), v, hit_blocks=10, strength=1.0, config=CONFIG)
    assert e.load_tokens - e.bounded_tokens == 640
    e = estimate(request(chain(0, 10), 660), v, hit_blocks=0, strength=1.0, config=CONFIG)
    assert e.load_tokens == e.bounded_tokens
