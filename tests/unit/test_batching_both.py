"""The batch tuner under loads whose sizes are known: both objectives at once, and loads that come back."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

from policies.batching import OfferedLoad
from policies.config import ObjectivesConfig
from policies.types import Knobs, StepCoefficients
from tests.unit.batching_rig import CONFIG, Replica
from tests.unit.control.fleet import SECOND_NS, histogram

FAST = StepCoefficients(5.0, 0.025, 0.03, 0.015, samples=1_000, error_share=0.03)
BOTH = ObjectivesConfig(ttft_ms=200.0, itl_ms=10.0)


def heavy(**changes: Any) -> dict[str, Any]:
    """A second at full capacity of an H200: prompts of 3,000 and answers of 300 tokens."""
    values: dict[str, Any] = {
        "step_model": FAST, "running": 24, "kv_tokens_used": 75_600, "kv_tokens_max": 945_024, "running_seqs_hard": 256,
        "step_tokens_hard": 8_192, "finished": 7, "prefill_tokens": 21_000, "decode_tokens": 2_100, "steps": 110,
        "itl": histogram(*[8.0] * 100),
    }  # fmt: skip
    return values | changes


def light() -> dict[str, Any]:
    return heavy(running=2, kv_tokens_used=400, finished=2, prefill_tokens=200, decode_tokens=200, steps=60)


def test_the_cap_of_a_full_engine_reckons_with_the_prompts_that_join() -> None:
    r = Replica(CONFIG, BOTH)
    r.seconds(40, **light())
    r.seconds(60, **heavy())
    assert r.tuner.wish.running_seqs_max is not None
    assert 13 <= r.tuner.wish.running_seqs_max <= 18
    last = r.changes[-1]
    assert last.reason.code == "BothObjectives"
    assert {"met_share", "ttft_ms", "itl_ms", "gap_ms"} <= set(last.predicted)
    assert last.predicted["gap_ms"] <= 10


def test_told_load_comes_before_what_the_reports_show() -> None:
    r = Replica(CONFIG, BOTH)
    r.seconds(40, **light())
    before = r.tuner.wish
    told = OfferedLoad(arrivals_ps=9.0, prompt_tokens_mean=3_000.0, output_tokens_mean=300.0)
    for _ in range(20):
        r.now_ns += SECOND_NS
        r.tuner.step(r.window, r.now_ns, told)
    assert (r.tuner.wish.step_tokens_max or 0) > 2 * (before.step_tokens_max or 0), "prompts of 3,000 tokens come"


def test_a_load_that_comes_back_gets_its_setting_back_at_once() -> None:
    r = Replica(CONFIG, BOTH)
    r.seconds(80, **heavy())
    proved = r.tuner.wish
    r.seconds(150, **light())
    assert r.tuner.wish != proved
    moves = [r.second(**heavy(prefill_tokens=87_000)), *r.seconds(60, **heavy())]
    back = next(i for i, m in enumerate(moves) if m.reason.code == "KnownGood")
    assert moves[back].after == proved
    assert back < 12, "long before the slow averages know of the load"
    assert r.tuner.wish == proved


def test_an_engine_that_changed_is_not_given_old_settings() -> None:
    r = Replica(CONFIG, BOTH)
    r.seconds(80, **heavy())
    r.seconds(150, **light())
    slow = replace(FAST, a_ms=7.5, b_ms=0.0375, c_ms=0.045, d_ms=0.0225, drifts=1)
    moves = r.seconds(60, **heavy(step_model=slow))
    assert "KnownGood" not in {m.reason.code for m in moves if m.changed}


def test_a_steady_heavy_load_with_noise_turns_no_knob_back_and_forth() -> None:
    rng = random.Random(4)
    r = Replica(CONFIG, BOTH)
    for _ in range(600):
        factor = rng.uniform(0.8, 1.2)
        r.second(**heavy(
            finished=round(7 * factor), prefill_tokens=round(21_000 * factor), decode_tokens=round(2_100 * factor),
            step_model=replace(FAST, d_ms=FAST.d_ms * rng.uniform(0.9, 1.1)),
        ))  # fmt: skip
    for knob in ("running_seqs_max", "step_tokens_max"):
        values = [getattr(m.after, knob) or 0 for m in r.changes]
        signs = [b > a for a, b in itertools.pairwise(values) if a != b]
        assert sum(a != b for a, b in itertools.pairwise(signs)) <= 1, (knob, values)


def test_what_somebody_else_set_is_gone_on_from() -> None:
    r = Replica(CONFIG, BOTH)
    r.seconds(40, **heavy())
    r.tuner.adopt(Knobs(5, 300, None), r.now_ns)
    moves = r.seconds(CONFIG.settle_ticks, **heavy(), obey=True)
    assert {m.reason.code for m in moves} == {"Settling"}
    assert r.tuner.wish == Knobs(5, 300)
    r.seconds(40, **heavy())
    assert (r.tuner.wish.running_seqs_max or 0) > 5
