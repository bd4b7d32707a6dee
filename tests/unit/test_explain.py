"""Decisions in words: everything that is known is said, nothing that is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autoscaling.simulator.recorded import ConditionNote, DecisionLine
from deployments import explain
from deployments.control_view import decision_state
from policies.control.catalogue import SPECS
from policies.split import SplitCode
from policies.steering import Alternative, Knob, Lever, Verdict
from policies.types import Decision, Reason

AT_NS = 500_000_000_000
UNIX_NS = 1_796_073_245_000_000_000  # 2026-11-30T21:14:05Z
DECISION = Decision(
    seq=42,
    tick=900,
    lever="batch",
    target="r1",
    before={"step_tokens_max": 2_048},
    after={"step_tokens_max": 512},
    acted=True,
    reason=Reason("WithinItl", "512 tokens a step keep gaps within 190 ms"),
    inputs={"running": 12, "step_a_ms": 10.1234, "prefill_tps": None},
    predicted={"met_share": 0.97, "successes_per_usd": 1_234.5, "itl_ms": 188.0},
    at_ns=AT_NS,
    conditions=("slo_burn_fast", "decode_bound"),
    alternatives=(Alternative("replicas", "3 replicas", {"met_share": 0.99}, "costs more than it keeps"),),
)
NOTE = ConditionNote("slo_burn_fast", AT_NS - 95_000_000_000, "standard/itl: 40% missed", {"itl_burn": 8.0})


def told(decision: Decision = DECISION, *notes: ConditionNote) -> str:
    return explain.explain(entry(decision, *notes), UNIX_NS / 1e9 + 61)


def entry(decision: Decision = DECISION, *notes: ConditionNote) -> dict[str, Any]:
    return decision_state(DecisionLine(UNIX_NS, decision, notes), "e1")


def test_the_whole_story_is_told() -> None:
    text = told(DECISION, NOTE)
    for part in (
        "Decision #42 at 11-30 21:14:05 UTC, 1 min 1 s ago: batch size of r1",
        "step_tokens_max 2,048 -> 512  (how many tokens one engine step may hold",
        "512 tokens a step keep gaps within 190 ms  [WithinItl]",
        f"{SPECS['slo_burn_fast'].title} [slo_burn_fast] (active for 1 min 35 s): standard/itl: 40% missed",
        "itl_burn = 8",
        "active as well: decode_bound",
        "number of replicas: 3 replicas; predicted: requests within their objectives 99.0%; not taken: costs more",
        "successful requests within objectives per dollar 1,234",
        "gap between tokens 188 ms",
        "not known yet",
        "override set step_tokens_max 2048 --target r1 --for 30m",
        "running = 12, step_a_ms = 10.12, prefill_tps = unknown",
    ):
        assert part in text, part


@pytest.mark.parametrize("verdict", [v for v in Verdict if v is not Verdict.PENDING])
def test_what_happened_is_told_once_it_is_known(verdict: Verdict) -> None:
    judged = replace(DECISION, verdict=verdict, verdict_text="met fell", realised={"met_share": 0.5}, judged_tick=920)
    text = told(judged)
    assert explain.VERDICT_WORDS[verdict] in text
    assert "Met fell" in text
    assert "measured: requests within their objectives 50.0% (after 20 ticks)" in text
    assert f"-> {verdict.value}" in explain.headline(entry(judged))


def test_in_shadow_mode_nothing_was_changed_and_a_hold_is_no_shadow_decision() -> None:
    shadow = replace(DECISION, acted=False)
    assert "Nothing was really changed" in told(shadow)
    assert "not acted on" in explain.headline(entry(shadow))
    assert "override set" not in told(shadow)
    hold = replace(DECISION, acted=False, before=DECISION.after)
    assert "step_tokens_max stays 512" in told(hold)
    assert "shadow" not in told(hold) + explain.headline(entry(hold))
    assert "nothing to judge" in told(hold)


def test_what_is_not_known_is_said_so() -> None:
    bare = replace(DECISION, before={"step_tokens_max": None}, predicted={}, alternatives=(), conditions=(), inputs={})
    text = told(bare)
    assert "step_tokens_max not set -> 512" in text
    assert "nothing was predicted" in text
    assert "nothing else was weighed" in text
    assert "No alarm condition was active" in text
    assert "None" not in text
    assert "override set" not in text  # there is nothing to go back to


def test_a_guards_decision_without_a_knob_says_its_reason_in_the_list() -> None:
    guard = replace(DECISION, lever="guard", target="*", before={}, after={}, reason=Reason("X", "batch is frozen"))
    assert explain.headline(entry(guard)) == "#42  11-30 21:14:05  guard rails: batch is frozen"


def test_every_knob_lever_and_verdict_has_words() -> None:
    assert set(explain.KNOB_WORDS) == set(Knob)
    assert set(explain.LEVER_WORDS) == {*Lever, "guard"}
    assert set(explain.SPLIT_WORDS) == set(SplitCode)
    assert set(explain.VERDICT_WORDS) == set(Verdict)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "unknown"), (0, "0"), (1_234_567, "1,234,567"), (0.123456, "0.1235"), (1_234.5, "1,234"), ("x", "x")],
)
def test_numbers_are_for_people(value: Any, text: str) -> None:
    assert explain.number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59, "59 s"), (60, "1 min"), (95, "1 min 35 s"), (7_260, "2 h 1 min"), (90_000, "1 d 1 h")],
)  # fmt: skip
def test_spans_have_two_units(seconds: float, text: str) -> None:
    assert explain.span(seconds) == text


def test_overrides_shadow_and_conditions_in_words() -> None:
    override = {"id": "a1", "knob": "load_bound", "target": "*", "value": 1.2, "mode": None, "expires_in_s": 90}
    assert explain.override_line(override) == (
        "a1  load_bound = 1.2, 1 min 30 s left, set by key nobody named (no keys)"
    )
    everything = override | {"knob": None, "value": None, "mode": "shadow", "by": "k1", "why": "drill"}
    assert explain.override_line(everything) == (
        "a1  every knob in shadow mode, 1 min 30 s left, set by key k1, because: drill"
    )
    row = {"knob": "load_bound", "mode": "shadow", "because": "control.mode", "expires_in_s": None}
    assert "SHADOW" in explain.shadow_line(row)
    held = [{"kind": "Frozen", "target": "r1", "reason": "turned back 3 times", "expires_in_s": 61}]
    assert explain.shadow_line(row | {"mode": "act", "held": held}).endswith(
        "FROZEN at r1 for 1 min 1 s: turned back 3 times"
    )
    spec = SPECS["hot_spot"]
    condition = {
        "name": "hot_spot", "title": spec.title, "active": True, "since_s": 12, "text": "r1 queues", "confidence": 0.9,
        "targets": ["r1"], "begin": spec.begin, "end": spec.end, "next_step": spec.next_step,
    }  # fmt: skip
    text = explain.explain_condition(condition)
    assert "hot_spot: ACTIVE for 12 s" in text
    assert f"Next step      {spec.next_step}" in text
    assert "r1 queues  (confidence 90%)" in text


def test_what_was_measured_before_and_expected_is_told_in_words() -> None:
    judged = replace(
        DECISION,
        realised={
            "met_share": 0.6,
            "met_share_before": 0.95,
            "met_share_expected": 0.9,
            "successes_per_usd_before": 7.0,
        },
        verdict=Verdict.WORSE,
    )
    text = " ".join(told(judged).split())
    assert "requests within their objectives 60.0%" in text
    assert "requests within their objectives before 95.0%" in text
    assert "what was to be expected without the change, at this load 90.0%" in text
    assert "successful requests within objectives per dollar before 7" in text
    assert "_before" not in text
