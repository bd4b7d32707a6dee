"""Membership, samples with their age, and garbage."""

from __future__ import annotations

import math
from typing import Any

import pytest

from policies.config import RoutingConfig
from policies.routing.fleet import COUNT_MAX, LEARNED_STEPS_MIN, Fleet
from policies.routing.load import LoadBook
from policies.types import ReplicaView, StepCoefficients

MS = 1_000_000
GOOD: dict[str, object] = {
    "seq": 1, "running": 2, "waiting": 3, "prefill_backlog_tokens": 400, "kv_tokens_used": 5_000,
    "kv_tokens_max": 60_000, "running_seqs_max": 16, "step_tokens_max": 512, "step_a_ms": 30.0, "step_b_ms": 1.8,
    "step_c_ms": 0.5, "step_d_ms": 1.9, "step_samples": 77, "state": "ready",
}  # fmt: skip


def fleet() -> tuple[Fleet, LoadBook]:
    book = LoadBook()
    return Fleet(RoutingConfig(sample_age_ms_max=5_000), book), book


def only(f: Fleet, now_ms: int = 0) -> ReplicaView:
    (v,) = f.views(now_ms * MS)
    return v


def test_views_carry_the_sample_and_the_local_counts() -> None:
    f, book = fleet()
    book.dispatched("a", "r1", 30, 100)
    f.update({"a": GOOD}, 0)
    book.dispatched("a", "r2", 50, 100)
    assert only(f, 250) == ReplicaView(
        "a",
        local_requests=2,
        local_prefill_tokens=80,
        local_decode_tokens=0,
        sample_age_ms=250.0,
        sample_running=2,
        sample_waiting=3,
        sample_prefill_backlog_tokens=400,
        sample_kv_tokens_used=5_000,
        sample_kv_tokens_max=60_000,
        running_seqs_max=16,
        step_tokens_max=512,
        step_model=StepCoefficients(30.0, 1.8, 0.5, 1.9, 77),
        local_requests_at_sample=1,
        local_prefill_tokens_at_sample=30,
        local_decode_tokens_at_sample=0,
    )


def test_age_counts_from_the_receipt_of_a_new_seq() -> None:
    f, _ = fleet()
    f.update({"a": GOOD}, 0)
    f.update({"a": {**GOOD, "running": 9}}, 1_000 * MS)  # the same seq handed over again
    assert (only(f, 2_000).sample_age_ms, only(f, 2_000).sample_running) == (2_000.0, 2)
    f.update({"a": {**GOOD, "seq": 2, "running": 9}}, 3_000 * MS)
    assert (only(f, 3_500).sample_age_ms, only(f, 3_500).sample_running) == (500.0, 9)
    f.update({"a": None}, 4_000 * MS)
    assert only(f, 4_500).sample_age_ms == 1_500.0


def test_a_member_without_statistics_is_known_by_local_counts() -> None:
    f, book = fleet()
    book.dispatched("a", "r1", 30, 100)
    f.update({"a": None}, 0)
    assert only(f) == ReplicaView("a", 1, 30, 0)


def test_members_come_and_go_sorted() -> None:
    f, _ = fleet()
    assert f.update({"c": None, "a": None, "b": GOOD}, 0) == frozenset()
    assert f.members() == ("a", "b", "c")
    assert [v.replica_id for v in f.views(0)] == ["a", "b", "c"]
    assert f.update({"b": GOOD}, 0) == {"a", "c"}
    assert f.update({}, 0) == {"b"}
    assert f.views(0) == []
    f.update({"b": None}, 0)
    assert only(f).sample_age_ms is None, "a member that comes back starts afresh"


def test_draining_stays_and_stuck_ages() -> None:
    f, _ = fleet()
    f.update({"a": {**GOOD, "state": "draining"}, "b": {**GOOD, "state": "stuck"}}, 0)
    assert [(v.available, v.unavailable_reason) for v in f.views(0)] == [(False, "is draining"), (False, "is stuck")]
    assert [v.available for v in f.views(5_001 * MS)] == [False, True]
    f.update({"a": {**GOOD, "seq": 2}, "b": {**GOOD, "seq": 2}}, 6_000 * MS)
    assert [v.available for v in f.views(6_000 * MS)] == [False, True]


def test_excluded_members_are_unavailable_and_say_so() -> None:
    f, _ = fleet()
    f.update({"a": None, "b": GOOD, "c": GOOD}, 0)
    assert [(v.available, v.unavailable_reason) for v in f.views(0, exclude={"a", "b", "unknown"})] == [
        (False, "was tried already"),
        (False, "was tried already"),
        (True, ""),
    ]


@pytest.mark.parametrize(
    "garbage", ["7", True, None, -1, math.nan, math.inf, -math.inf, COUNT_MAX * 2, 10**400, [1], {}]
)
@pytest.mark.parametrize("key", [k for k in GOOD if k != "state"])
def test_garbage_in_one_key_is_unknown_and_spares_the_rest(key: str, garbage: object) -> None:
    f, _ = fleet()
    f.update({"a": {**GOOD, key: garbage}}, 0)
    v = only(f)
    if key == "seq":
        assert v.sample_age_ms is None
        return
    assert (v.sample_running is None) == (key == "running")
    assert (v.sample_waiting is None) == (key == "waiting")
    assert (v.sample_prefill_backlog_tokens is None) == (key == "prefill_backlog_tokens")
    assert (v.sample_kv_tokens_used is None) == (key == "kv_tokens_used")
    assert (v.sample_kv_tokens_max is None) == (key == "kv_tokens_max")
    assert (v.running_seqs_max is None) == (key == "running_seqs_max")
    assert (v.step_tokens_max is None) == (key == "step_tokens_max")
    assert (v.step_model is None) == (key in {"step_a_ms", "step_b_ms", "step_c_ms", "step_d_ms"})


@pytest.mark.parametrize("state", [7, None, "asleep", ["stuck"], ""])
def test_an_unknown_state_is_available(state: object) -> None:
    f, _ = fleet()
    f.update({"a": {**GOOD, "state": state}}, 0)
    assert only(f).available


def test_statistics_that_are_no_mapping_are_ignored() -> None:
    f, _ = fleet()
    f.update({"a": "ready", "b": [1, 2], "c": {}, "d": {1: 2}}, 0)  # type: ignore[dict-item]
    assert [v.sample_age_ms for v in f.views(0)] == [None] * 4


def test_limits_of_zero_are_unknown_and_counts_of_zero_are_zero() -> None:
    f, _ = fleet()
    zeros = dict.fromkeys(("running", "kv_tokens_used", "kv_tokens_max", "running_seqs_max", "step_tokens_max"), 0)
    f.update({"a": {**GOOD, **zeros}}, 0)
    v = only(f)
    assert (v.sample_running, v.sample_kv_tokens_used) == (0, 0)
    assert (v.sample_kv_tokens_max, v.running_seqs_max, v.step_tokens_max) == (None, None, None)


def test_a_step_that_takes_no_time_is_no_step_model_and_the_last_good_one_stays() -> None:
    f, _ = fleet()
    f.update({"a": {**GOOD, "step_a_ms": 0, "step_b_ms": 0, "step_c_ms": 0, "step_d_ms": 0}}, 0)
    assert only(f).step_model is None
    f.update({"a": {**GOOD, "seq": 2}}, 0)
    f.update({"a": {**GOOD, "seq": 3, "step_d_ms": math.nan}}, 0)
    assert only(f).step_model == StepCoefficients(30.0, 1.8, 0.5, 1.9, 77)


def speed(seq: int, samples: int, a_ms: float) -> dict[str, object]:
    return {
        "seq": seq,
        "step_a_ms": a_ms,
        "step_b_ms": 0.1,
        "step_c_ms": 0.1,
        "step_d_ms": 0.01,
        "step_samples": samples,
    }


def test_a_replica_that_learned_nothing_yet_is_taken_to_be_as_fast_as_one_that_did() -> None:
    f, _ = fleet()
    f.board(0)

    def speeds() -> list[float | None]:
        return [v.step_model.a_ms if v.step_model else None for v in f.views(0)]

    f.update({"new": speed(1, 0, 20.0), "old": speed(1, LEARNED_STEPS_MIN - 1, 8.0)}, 0)
    assert speeds() == [20.0, 8.0], "nobody knows better"
    f.update({"new": speed(1, 0, 20.0), "old": speed(2, 100, 8.0), "silent": None}, 0)
    assert speeds() == [8.0, 8.0, 8.0]
    f.board(0)
    assert len({s.ttft_ms(500) for s in f.standings(["new", "old", "silent"], 0).values()}) == 1
    f.update({"new": speed(2, 40, 30.0), "old": speed(3, 1_000, 9.0), "silent": None}, 0)
    assert speeds() == [30.0, 9.0, 9.0], "its own measurement counts; what is known better is taken over"
    f.update({"silent": None}, 0)
    assert speeds() == [9.0], "what was learned outlives the replica that learned it"


def test_blocked_replicas_are_unavailable_and_say_why() -> None:
    f, _ = fleet()
    f.update({"a": GOOD, "b": GOOD}, 0)
    f.block(frozenset({"a"}), 0, lambda r: f"{r} failed")
    assert [(v.available, v.unavailable_reason) for v in f.views(0)] == [(False, "is ejected: a failed"), (True, "")]
    assert set(f.board(0).standings) == {"b"}
    f.block(frozenset({"b"}), 0)
    assert [v.unavailable_reason for v in f.views(0)] == ["", "is ejected"]
    assert set(f.board(0).standings) == {"a"}
    f.block(frozenset(), 0)
    assert set(f.board(0).standings) == {"a", "b"}


def test_a_block_outlives_new_samples_and_holds_for_late_comers() -> None:
    f, _ = fleet()
    f.update({"a": GOOD}, 0)
    f.board(0)
    f.block(frozenset({"a", "b"}), 0)
    f.update({"a": {**GOOD, "seq": 2}, "b": GOOD, "c": GOOD}, 0)
    assert set(f.board(0).standings) == {"c"}
    assert [v.available for v in f.views(0)] == [False, False, True]


def test_only_replicas_whose_block_changed_are_placed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    f, _ = fleet()
    f.update({f"r{i}": GOOD for i in range(200)}, 0)
    f.board(0)
    placed: list[str] = []
    place = f._place

    def noted(board: Any, member: Any, now_ns: int) -> None:
        placed.append(member.replica_id)
        place(board, member, now_ns)

    monkeypatch.setattr(f, "_place", noted)
    f.block(frozenset({"r1", "r2"}), 0)
    f.block(frozenset({"r2", "r3"}), 0)
    assert sorted(placed) == ["r1", "r1", "r2", "r3"]


def test_a_learned_step_model_is_the_replicas_own_and_of_enough_steps() -> None:
    f, _ = fleet()
    f.update({"a": GOOD, "b": {**GOOD, "step_samples": LEARNED_STEPS_MIN - 1}, "c": None}, 0)
    assert f.learned_step_model("a") == StepCoefficients(30.0, 1.8, 0.5, 1.9, 77)
    assert [f.learned_step_model(r) for r in ("b", "c", "unknown")] == [None] * 3


def test_a_fleet_says_whom_it_would_ask() -> None:
    f, _ = fleet()
    f.update({"a": GOOD, "b": {**GOOD, "state": "draining"}, "c": GOOD}, 0)
    f.block(frozenset({"c"}), 0)
    assert [f.takes(r, 0) for r in ("a", "b", "c", "unknown")] == [True, False, False, False]
