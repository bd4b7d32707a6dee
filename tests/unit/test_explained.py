"""The comparison of ``tests.bench.explained``, without a fleet: what it accepts, and what it must not let pass."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from tests.bench.explained import Samples, compare

STATE: dict[str, Any] = {
    "epoch": "e",
    "tick": 7,
    "unknown_replicas": 0,
    "work": {"prefill_tps": 100.0, "decode_tps": 60.0, "busy_share": 0.5, "waiting": 2},
    "traffic": {"queued": 3, "inflight": 9},
    "objectives": {"itl_ms": 60.0},
    "conditions": [{"name": "hot_spot", "active": True}, {"name": "cache_cold", "active": False}],
    "plan": {
        "knobs": {"r1": {"running_seqs_max": 8}},
        "replicas_target": 3,
        "retired": [],
        "admission": {"shed_factor": 1.0},
    },
    "replicas": [
        {
            "replica_id": "r1", "kv_tokens_max": 1_000, "running": 4, "running_seqs_hard": 16,
            "step_model": {"a_ms": 20.0, "b_ms": 0.3, "c_ms": 0.05, "d_ms": 0.05, "samples": 90},
        }
    ],
}  # fmt: skip
ENTRY: dict[str, Any] = {
    "epoch": "e",
    "seq": 1,
    "tick": 7,
    "lever": "batch",
    "target": "r1",
    "reason": {"code": "WithinItl"},
    "acted": True,
    "before": {"running_seqs_max": 16},
    "after": {"running_seqs_max": 8},
    "conditions": ["hot_spot"],
    "inputs": {
        "running": 5, "kv_tokens": 400, "kv_tokens_max": 1_000, "step_a_ms": 20.0, "itl_objective_ms": 60.0,
        "queue": 5, "brake_seqs": None, "not shown anywhere": 1,
    },
}  # fmt: skip
PAGE = 'tidegate_replica_step_coefficient_seconds{replica="r1",term="base"} 0.02\n'


def samples(entry: dict[str, Any], state: dict[str, Any] = STATE, page: str | None = PAGE) -> Samples:
    pages = {} if page is None else {("e", 7): page}
    return Samples({("e", state["tick"]): state}, set(), pages, {("e", 1): entry})


def changed(of: dict[str, Any], *path: Any, value: Any) -> dict[str, Any]:
    """A copy with one value replaced."""
    copy: Any = deepcopy(of)
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return dict(copy)


def test_a_decision_with_the_figures_of_its_tick_is_right() -> None:
    outcome = compare(samples(ENTRY))
    assert (outcome.wrong, outcome.unseen) == ([], [])
    assert outcome.compared == {"batch": 9}  # of eight inputs six are shown, one of them twice; conditions and the plan
    assert outcome.metrics == 1
    assert compare(samples(ENTRY, page=None)).compared == {"batch": 8}


@pytest.mark.parametrize(
    ("path", "value", "what"),
    [
        (("inputs", "queue"), 6, "queue"),
        (("inputs", "kv_tokens_max"), 990, "kv_tokens_max"),
        (("inputs", "running"), 3, "running in 4..16"),
        (("inputs", "running"), 17, "running in 4..16"),
        (("inputs", "kv_tokens"), 1_001, "kv_tokens in 0..1000"),
        (("conditions",), [], "conditions"),
        (("conditions",), ["cache_cold", "hot_spot"], "conditions"),
        (("after", "running_seqs_max"), 9, "plan's running_seqs_max"),
    ],
)
def test_one_figure_that_differs_is_found(path: tuple[Any, ...], value: Any, what: str) -> None:
    (wrong,) = compare(samples(changed(ENTRY, *path, value=value))).wrong
    assert wrong[:2] == ("#1 batch [WithinItl]", what)


def test_who_leaves_is_looked_for_among_those_that_the_plan_retires() -> None:
    entry = changed(changed(ENTRY, "before", value={"retired": 0}), "after", value={"retired": 1})
    assert [row[1] for row in compare(samples(entry)).wrong] == ["plan's retired"]
    assert compare(samples(entry, changed(STATE, "plan", "retired", value=["r1"]))).wrong == []


def test_state_and_metrics_are_both_compared() -> None:
    wrong = compare(samples(changed(ENTRY, "inputs", "step_a_ms", value=21.0))).wrong
    assert [row[1] for row in wrong] == ["step_a_ms", "step_a_ms (metric)"]
    other = changed(STATE, "replicas", 0, "step_model", "a_ms", value=19.0)
    assert [row[1] for row in compare(samples(ENTRY, other)).wrong] == ["step_a_ms"]


def test_the_state_of_another_tick_or_life_does_not_count() -> None:
    for entry in (changed(ENTRY, "tick", value=8), changed(ENTRY, "epoch", value="other")):
        known = samples(entry)
        known.entries = {(entry["epoch"], 1): entry}
        outcome = compare(known)
        assert (outcome.unseen, sum(outcome.compared.values())) == (["#1 batch [WithinItl]"], 0)


def test_only_ticks_that_decided_and_may_still_be_kept_are_asked_for() -> None:
    known = Samples(entries={("e", n): {"epoch": "e", "tick": tick} for n, tick in enumerate((3, 3, 4, 5))})
    assert known.missing() == {("e", 3), ("e", 4), ("e", 5)}
    known.states["e", 4] = STATE
    known.lost.add(("e", 3))
    assert known.missing() == {("e", 5)}
