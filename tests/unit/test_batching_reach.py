"""The first loads of a fresh engine: knobs that nobody reaches, and a law that has seen one kind of load only."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from policies.batching.reach import REACH, Reach, within_reach
from policies.config import ObjectivesConfig
from policies.step_model import StepModel, predict_step_ms
from policies.types import Knobs, StepCoefficients
from tests.unit.batching_rig import Replica, point
from tests.unit.control.fleet import histogram

LAW = StepCoefficients(54.0, 9.2, 5.0, 5.5)
"""About one core with SmolLM2-135M; ``tests/sim/test_batch_steady.py``."""
PRIOR = StepCoefficients(20.0, 0.5, 0.5, 0.5)
SERVED = ObjectivesConfig(ttft_ms=5_000.0, itl_ms=500.0)


class Fresh:
    """An engine that has just begun, on a machine whose pace may wander; its step model learns from every step."""

    def __init__(self, seed: int, wander: float = 0.0) -> None:
        self.replica = Replica(objectives=SERVED)
        self.model, self._rng = StepModel(PRIOR), random.Random(seed)
        self._wander, self._pace = wander, 0.0

    def second(self, running: int, kv_tokens: int, prompt_tokens: int = 0, waiting: int = 0) -> None:
        """One second with ``running`` sequences; a prompt is computed in its first step."""
        left_ms, gaps, prompt = 1_000.0, [], prompt_tokens
        while left_ms > 0:
            self._pace += 0.03 * (self._rng.gauss(0, 6) * self._wander - self._pace)
            noise = math.exp(self._pace) * (1 + 0.1 * self._rng.uniform(-1, 1))
            ms = predict_step_ms(LAW, running, kv_tokens, prompt) * noise
            self.model.observe(running, kv_tokens, prompt, ms)
            prompt, left_ms = 0, left_ms - ms
            gaps.append(ms)
        wish = self.replica.tuner.wish
        self.replica.second(
            knobs=Knobs(wish.running_seqs_max or 128, wish.step_tokens_max or 2_048), running_seqs_hard=128,
            step_tokens_hard=2_048, running=running, kv_tokens_used=kv_tokens, steps=len(gaps),
            decode_tokens=running * len(gaps), prefill_tokens=prompt_tokens, itl=histogram(*gaps),
            step_model=self.model.coefficients(), waiting=waiting,
        )  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_one_long_answer_moves_no_knob(seed: int) -> None:
    fresh = Fresh(seed, wander=0.25)
    fresh.second(1, 40, prompt_tokens=39)
    for second in range(90):
        fresh.second(1, 40 + 8 * second)
    assert [m.after for m in fresh.replica.changes if m.after != Knobs(128, 2_048)] == []


@pytest.mark.parametrize("seed", range(3))
def test_when_the_load_comes_both_are_set(seed: int) -> None:
    fresh = Fresh(seed)
    for second in range(60):
        fresh.second(1, 40 + 8 * second)
    for second in range(60):
        running = 4 + 12 * (second % 4)
        fresh.second(running, 200 * running, prompt_tokens=300)
    wish = fresh.replica.tuner.wish
    assert fresh.model.coefficients().batch_known
    assert fresh.model.coefficients().prompts_known
    assert (wish.step_tokens_max or 2_048) < 2_048
    assert (wish.running_seqs_max or 128) < 128


def reach(**changes: float) -> Reach:
    return replace(Reach(running=4.0, waiting=0.0, prompts=True, braked=False, tokens_min=32), **changes)  # type: ignore[arg-type]


NARROW, WIDE = Knobs(16, 128), Knobs(64, 512)
BUSY = point(running_seqs_hard=128)


@pytest.mark.parametrize(("before", "after"), [(NARROW, WIDE), (WIDE, NARROW)])
def test_a_cap_moves_when_it_is_reached(before: Knobs, after: Knobs) -> None:
    assert within_reach(before, after, BUSY, reach()).running_seqs_max == before.running_seqs_max
    for reached in ({"running": 16 / REACH}, {"waiting": 1.0}, {"braked": True}):
        assert within_reach(before, after, BUSY, reach(**reached)).running_seqs_max == after.running_seqs_max


def test_a_budget_moves_while_prompts_come_when_it_is_the_first_and_when_it_is_too_small() -> None:
    assert within_reach(WIDE, NARROW, BUSY, reach()).step_tokens_max == 128
    assert within_reach(WIDE, NARROW, BUSY, reach(prompts=False)).step_tokens_max == 512
    assert within_reach(Knobs(), NARROW, BUSY, reach(prompts=False)).step_tokens_max == 128
    assert within_reach(NARROW, WIDE, BUSY, reach(prompts=False, tokens_min=200)).step_tokens_max == 512


def test_what_the_law_has_not_seen_moves_nothing() -> None:
    unseen = point(running_seqs_hard=128, model=replace(LAW, batch_known=False, prompts_known=False))
    assert within_reach(WIDE, NARROW, unseen, reach(waiting=9.0)) == WIDE
    assert within_reach(Knobs(), NARROW, unseen, reach(waiting=9.0)) == Knobs(128, 2_048)


@pytest.mark.parametrize("cap", [1, 4])
def test_a_cap_that_somebody_lowered_before_a_batch_was_seen_rises_while_requests_wait(cap: int) -> None:
    fresh = Fresh(0)
    fresh.replica.tuner.adopt(Knobs(cap, 2_048), 0)
    for _ in range(60):
        fresh.second(cap, cap * 400, waiting=5)
    assert not fresh.model.coefficients().batch_known
    assert (fresh.replica.tuner.wish.running_seqs_max or 128) > cap
