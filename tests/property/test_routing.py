"""What holds for every routing choice, whatever the replicas' state."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.config import RoutingConfig
from policies.routing.predict import estimate, joined_load
from policies.types import ReplicaView, Request, StepCoefficients
from tests.examples import examples
from tests.unit.routing.build import chain, request, router

counts = st.integers(0, 100_000)
maybe = st.none() | counts
limits = st.none() | st.integers(1, 100_000)
coefficients = st.floats(0, 100)
models = st.none() | st.builds(StepCoefficients, st.floats(0.1, 100), coefficients, coefficients, coefficients)
views = st.builds(
    ReplicaView,
    replica_id=st.just(""),
    local_requests=st.integers(0, 1_000),
    local_prefill_tokens=counts,
    local_decode_tokens=counts,
    sample_age_ms=st.none() | st.floats(0, 20_000),
    sample_running=maybe,
    sample_waiting=maybe,
    sample_prefill_backlog_tokens=maybe,
    sample_kv_tokens_used=maybe,
    sample_kv_tokens_max=limits,
    running_seqs_max=limits,
    step_tokens_max=limits,
    step_model=models,
    local_requests_at_sample=maybe,
    local_prefill_tokens_at_sample=maybe,
    local_decode_tokens_at_sample=maybe,
    available=st.booleans(),
)
fleets = st.lists(views, max_size=8).map(lambda vs: [replace(v, replica_id=f"r{i}") for i, v in enumerate(vs)])
prompts = st.builds(
    lambda prefix, blocks, extra: request(chain(prefix, blocks), blocks * 64 + extra),
    st.integers(0, 3),
    st.integers(0, 20),
    st.integers(0, 500),
)
configs = st.builds(
    RoutingConfig,
    strategy=st.sampled_from(("affinity", "random")),
    load_bound=st.floats(1, 3),
    load_slack_tokens=st.integers(0, 5_000),
)


@settings(max_examples=examples(300), deadline=None)
@given(
    configs, fleets, st.lists(st.tuples(prompts, st.integers(0, 9)), max_size=6), prompts, st.none() | st.floats(-1, 2)
)
def test_every_available_replica_is_offered_once_and_no_other(
    config: RoutingConfig,
    fleet: list[ReplicaView],
    history: list[tuple[Request, int]],
    prompt: Request,
    strength: float | None,
) -> None:
    r = router(config)
    for earlier, n in history:
        r.dispatched(earlier, f"r{n}")
    choice = r.choose(prompt, fleet, strength, 0)
    available = {v.replica_id for v in fleet if v.available}
    assert sorted(choice.order) == sorted(available)
    assert set(choice.predicted_ttft_ms) == set(choice.predicted_hit_tokens) == available
    assert all(math.isfinite(ms) and ms > 0 for ms in choice.predicted_ttft_ms.values())
    assert all(0 <= tokens <= prompt.prompt_tokens for tokens in choice.predicted_hit_tokens.values())
    assert (choice.reason.code == "none_available") == (not available)
    if config.strategy == "affinity":
        assert r.choose(prompt, fleet[::-1], strength, 0).order == choice.order, (
            "the order of the views does not matter"
        )


@settings(max_examples=examples(300), deadline=None)
@given(views, prompts, st.integers(0, 20), st.floats(0, 1))
def test_more_work_never_makes_a_prediction_shorter(
    v: ReplicaView, prompt: Request, hits: int, strength: float
) -> None:
    config = RoutingConfig()
    base = estimate(prompt, v, hits, strength, config)
    more = replace(v, local_prefill_tokens=v.local_prefill_tokens + 1_000)
    assert estimate(prompt, more, hits, strength, config).ttft_ms >= base.ttft_ms
    if hits:
        assert estimate(prompt, v, hits - 1, strength, config).ttft_ms >= base.ttft_ms
    assert estimate(prompt, v, hits, 0.0, config).ttft_ms >= base.ttft_ms


@given(views)
def test_joined_load_is_never_below_the_local_counts(v: ReplicaView) -> None:
    load = joined_load(v, 5_000)
    assert load.requests >= v.local_requests
    assert load.prefill_tokens >= v.local_prefill_tokens
    assert load.kv_tokens >= v.local_decode_tokens
