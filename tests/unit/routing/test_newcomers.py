"""A replica that has learned nothing yet is taken to be like its fellows."""

from __future__ import annotations

import math
from typing import Any

import pytest

from policies.build import Policies, build_policies
from policies.config import PolicyConfig
from policies.routing.newcomers import SAMPLES_MIN, like_their_fellows
from policies.types import Request

FAST = {"step_a_ms": 6.0, "step_b_ms": 0.1, "step_c_ms": 0.05, "step_d_ms": 0.03}
PRIOR = {"step_a_ms": 20.0, "step_b_ms": 0.5, "step_c_ms": 0.5, "step_d_ms": 0.5}


def stats(model: dict[str, float], samples: object, seq: int = 1, **load: Any) -> dict[str, object]:
    told: dict[str, object] = {"seq": seq, "state": "ready", "running": 0, "waiting": 0, "prefill_backlog_tokens": 0}
    return {**told, "kv_tokens_used": 0, "kv_tokens_max": 100_000, "step_samples": samples, **model, **load}


def test_a_newcomer_has_the_mean_model_and_its_own_load() -> None:
    slower = {**FAST, "step_a_ms": 8.0}
    members = {"a": stats(FAST, 500), "b": stats(slower, 500), "new": stats(PRIOR, 0, waiting=3), "gone": None}
    believed = like_their_fellows(members)
    assert believed["new"] == {**members["new"], **FAST, "step_a_ms": 7.0}  # type: ignore[dict-item]
    assert (believed["a"], believed["b"], believed["gone"]) == (members["a"], members["b"], None)
    assert members["new"] is not None
    assert members["new"]["step_a_ms"] == 20.0


@pytest.mark.parametrize("samples", [0, SAMPLES_MIN - 1, None, "many", True])
def test_who_has_not_learned_yet(samples: object) -> None:
    found = like_their_fellows({"a": stats(FAST, 500), "new": stats(PRIOR, samples)})["new"]
    assert found is not None
    assert found["step_d_ms"] == 0.03


@pytest.mark.parametrize("nonsense", [math.nan, -1.0, "fast", None, math.inf, True])
def test_a_fellow_that_talks_nonsense_is_no_example(nonsense: object) -> None:
    members = {"a": {**stats(FAST, 500), "step_a_ms": nonsense}, "new": stats(PRIOR, 0)}
    assert like_their_fellows(members) is members


def test_where_nobody_or_everybody_has_learned_nothing_changes() -> None:
    for samples in (0, 500):
        members = {"a": stats(FAST, samples), "b": stats(PRIOR, samples)}
        assert like_their_fellows(members) is members
    assert like_their_fellows({}) == {}


def policies() -> Policies:
    return build_policies(PolicyConfig(), 1)


def request(i: int, blocks: tuple[int, ...] = ()) -> Request:
    return Request(f"q{i}", "m", "/v1/completions", "", 3_000, 100, blocks, 64, True, 0)


def test_a_fresh_replica_of_a_fast_fleet_gets_requests_at_once() -> None:
    made = policies()
    busy = stats(FAST, 500, running=8, waiting=2, prefill_backlog_tokens=6_000)
    made.update_members({"old": busy, "new": stats(PRIOR, 0)}, 1)
    choice = made.choose(request(1), (), 2)
    assert choice.order[0] == "new"
    assert choice.predicted_ttft_ms["new"] < 200
