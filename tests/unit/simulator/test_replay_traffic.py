"""Recorded traffic becomes the load that was, and a recording in the shape of a run."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaling.simulator.codec import Blocks
from autoscaling.simulator.recorded import FleetLine, Header, Numbered, ReplicaLine, RequestLine, TickLine
from autoscaling.simulator.replay_traffic import (
    RecordedSource,
    Traffic,
    answered_ns,
    continuations,
    history_of,
    profile_of,
    recorded_run,
    recorded_until_ns,
    replicas_at,
    start_times_ms,
    token_blocks,
    tokens_per_block,
    traffic_of,
)
from autoscaling.simulator.report import summarise
from autoscaling.simulator.spec import SimRequest
from autoscaling.simulator.workload.trace import TraceError
from deployments.recording import new_header
from deployments.settings import Settings
from policies.types import Decision, FleetView, Reason, StepCoefficients
from tests.unit.control.fleet import replica_report

S = 1_000_000_000
HEADER = replace(new_header(Settings.load({}), "gateway", "g1"), started_ns=77 * S, started_unix_ns=1_000 * S)


def line(at_s: float, blocks: tuple[int, ...] = (), **changes: Any) -> RequestLine:
    values: dict[str, Any] = {
        "arrival_ns": round(at_s * S),
        "endpoint": "/v1/chat/completions",
        "stream": True,
        "tenant": "",
        "task": "",
        "prompt_tokens": 200,
        "prompt_tokens_estimate": 180,
        "prompt_bytes": 800,
        "output_tokens": 10,
        "output_tokens_max": None,
        "cached_tokens": 16,
        "blocks": Blocks(blocks),
        "block_tokens": 64,
        "ttft_ms": 50.0,
        "e2e_ms": 500.0,
        "outcome": "succeeded",
        "reason": "ok",
        "replica": "r1",
        "attempts": 1,
    }
    return RequestLine(**(values | changes))


def traffic(*lines: RequestLine, header: Header = HEADER) -> Traffic:
    return traffic_of((header, each) for each in lines)


def played(*lines: RequestLine, unit: int = 16) -> list[SimRequest]:
    return list(RecordedSource(traffic(*lines), unit).arrivals())


# --- arrivals and sizes -----------------------------------------------------------------------------------------------


def test_gateways_are_laid_beside_each_other_by_the_wall_clock() -> None:
    other = replace(HEADER, name="g2", started_unix_ns=1_002 * S)
    found = traffic_of([(HEADER, line(5, tenant="a")), (other, line(1, tenant="b")), (HEADER, line(2, tenant="c"))])
    requests = list(RecordedSource(found, 16).arrivals())
    assert [(r.tenant, r.arrival_ns, r.index) for r in requests] == [("c", 2 * S, 0), ("b", 3 * S, 1), ("a", 5 * S, 2)]


@pytest.mark.parametrize(("first_s", "lead_s"), [(0.0, 1), (5.0, 5), (100.0, 30)])
def test_a_replay_begins_when_the_gateway_did_within_bounds(first_s: float, lead_s: int) -> None:
    assert played(line(first_s))[0].arrival_ns == lead_s * S


def test_work_is_what_the_engine_counted_and_the_mean_where_nothing_was_answered() -> None:
    requests = played(
        line(1, output_tokens=10),
        line(2, output_tokens=30),
        line(3, prompt_tokens=None, output_tokens=0, outcome="refused", reason="overloaded"),
        line(4, output_tokens=0, outcome="refused", output_tokens_max=5),
        line(5, output_tokens=7, outcome="cancelled"),
    )
    assert [r.output_tokens for r in requests] == [10, 30, 20, 5, 7]
    assert [r.prompt_tokens for r in requests] == [200, 200, 180, 200, 200]


def test_requests_that_write_nothing_are_left_out_and_counted() -> None:
    found = traffic(line(1), line(2, output_tokens_max=0, output_tokens=0, endpoint="/tokenize"))
    assert (len(found.arrivals), found.left_out) == (1, 1)
    with pytest.raises(TraceError, match="holds no request"):
        traffic(line(2, output_tokens_max=0))


# --- blocks -----------------------------------------------------------------------------------------------------------


def test_tokens_in_a_text_block_are_what_engines_counted() -> None:
    told = traffic(line(1, prompt_bytes=1_000, prompt_tokens=200), line(2, prompt_bytes=600, prompt_tokens=200))
    assert tokens_per_block(told) == 256 * 400 / 1_600
    assert tokens_per_block(traffic(line(1, prompt_tokens=None, block_tokens=51))) == 51


@given(
    shared=st.lists(st.integers(0, 2**64 - 1), min_size=0, max_size=20, unique=True),
    ends=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    block_tokens=st.floats(16, 300),
    unit=st.sampled_from([16, 32, 64]),
)
def test_two_prompts_share_token_blocks_exactly_as_far_as_whole_text_blocks(
    shared: list[int], ends: tuple[int, int], block_tokens: float, unit: int
) -> None:
    chains = [(*shared, *((side << 60) + i for i in range(n))) for side, n in enumerate(ends, 1)]
    one, two = (token_blocks(c, block_tokens, unit, math.ceil(len(c) * block_tokens)) for c in chains)
    common = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    assert len(one) == int(len(chains[0]) * block_tokens / unit + 1e-9)
    assert abs(common * unit - len(shared) * block_tokens) < unit + 1e-6
    assert len(set(one)) == len(one)


def test_no_block_lies_beyond_the_prompt() -> None:
    assert len(token_blocks((1, 2, 3), 64.0, 16, 100)) == 6


def test_a_prompt_that_goes_on_says_what_the_cache_held_after_the_answer() -> None:
    first, other, second = line(1, (1, 2), prompt_tokens=130), line(2, (9,)), line(3, (1, 2, 3, 4), prompt_tokens=256)
    assert continuations(traffic(first, other, second)) == {0: 2}
    requests = played(first, other, second)
    assert requests[0].blocks == requests[2].blocks[: 2 * 62 // 16]  # two text blocks of 62.5 tokens
    assert requests[0].blocks_after == requests[2].blocks[: 140 // 16]  # prompt and answer
    assert (requests[1].blocks_after, requests[2].blocks_after) == ((), ())


# --- the fleet --------------------------------------------------------------------------------------------------------


def fleet_line(at_s: float, running: int, target: int) -> FleetLine:
    return FleetLine(round(at_s * S), FleetView(running, target, 1, 4))


def life(*lines: ReplicaLine | FleetLine | TickLine) -> tuple[Header, list[Numbered]]:
    header = replace(HEADER, source="controller", started_ns=0)
    return header, [Numbered("f", n, each) for n, each in enumerate(lines, 2)]


LEARNED = replica_report("r1", step_model=StepCoefficients(10.0, 1.0, 0.5, 0.1, samples=300))


def test_a_profile_is_what_the_replicas_reported() -> None:
    other = replace(LEARNED, replica_id="r2", step_model=StepCoefficients(14.0, 1.0, 0.5, 0.1, samples=100))
    fresh = replace(LEARNED, replica_id="r3", step_model=StepCoefficients(99.0, 9.0, 9.0, 9.0, samples=3))
    profile = profile_of(history_of([life(*(ReplicaLine(S, r) for r in (LEARNED, other, fresh)))]), "m")
    assert profile.law.a_ms == pytest.approx(11.0)
    assert (profile.kv_tokens, profile.running_seqs_max) == (LEARNED.kv_tokens_max, LEARNED.running_seqs_hard)
    with pytest.raises(TraceError, match="--profile"):
        profile_of(history_of([life(ReplicaLine(S, fresh))]), "m")
    with pytest.raises(TraceError, match="--profile"):
        profile_of(history_of([]), "m")


def test_a_start_lasts_from_the_wish_to_readiness_where_serve_told_both() -> None:
    words = (fleet_line(0, 1, 1), fleet_line(5, 1, 3), fleet_line(12, 2, 3), fleet_line(14, 3, 3), fleet_line(20, 2, 2))
    history = history_of([life(*words, ReplicaLine(21 * S, replace(LEARNED, cold_start_ms=500.0)))])
    assert start_times_ms(history) == [7_000.0, 9_000.0]
    assert profile_of(history, "m").cold_start_ms == 9_000.0
    told = history_of([life(ReplicaLine(S, replace(LEARNED, cold_start_ms=500.0)))])
    assert profile_of(told, "m").cold_start_ms == 500.0


def test_the_fleet_at_a_time_is_serve_s_last_word_before() -> None:
    history = history_of([life(fleet_line(5, 0, 1), fleet_line(8, 1, 2), fleet_line(20, 2, 2))])
    assert [replicas_at(history, (1_000 + s) * S) for s in (1, 8, 12, 20, 99)] == [1, 1, 1, 2, 2]
    assert replicas_at(history_of([]), 0) is None


def test_what_was_recorded_reads_like_a_run() -> None:
    decision = Decision(
        1, 1, "replicas", "m", {"replicas_target": 1}, {"replicas_target": 2}, True, Reason("R", ""), {}
    )
    tick = TickLine(12 * S, 1, "", 2, None, (), (decision,))
    words = (fleet_line(0, 1, 1), tick, fleet_line(12, 1, 2), fleet_line(30, 2, 2), fleet_line(40, 2, 2))
    history = history_of([life(*words, ReplicaLine(13 * S, replace(LEARNED, prefix_query_tokens=100)))])
    found = traffic(
        line(10, ttft_ms=40.0), line(11, ttft_ms=60.0), line(12, outcome="refused", ttft_ms=None, attempts=0)
    )
    result = recorded_run(found, history, profile_of(history, "m"))
    summary = summarise(result, HEADER.config.objectives)
    assert (summary.requests, summary.completed, summary.ttft.p50_ms) == (3, 2, 50.0)
    assert summary.endings == {"refused": {"ok": 1}}
    assert answered_ns(found) == 12 * S + 500_000_000
    assert recorded_until_ns(found, history) == result.end_ns == 40 * S
    assert result.pools[0].replica_hours * 3_600 == pytest.approx(12 * 1 + 28 * 2)
    assert [s.target for s in result.pools[0].timeline] == [1, 2, 2, 2]
    assert result.decisions == [decision]
