"""Roles of a split fleet: loads, the best ratio, and when a replica changes."""

from dataclasses import replace

import pytest

from policies.config import ObjectivesConfig
from policies.disaggregation import (
    ASK_TICKS,
    SETTLE_TICKS,
    USE_MAX,
    USE_MIN,
    RolePoint,
    RoleTuner,
    best_split,
    decode_batch,
    fullness,
    loads,
    prefill_use_max,
)
from policies.types import StepCoefficients

OBJECTIVES = ObjectivesConfig(ttft_ms=1_000, itl_ms=20)
MODEL = StepCoefficients(8.0, 0.05, 0.02, 0.02, 1_000)
POINT = RolePoint(MODEL, MODEL, 50_000, 2_000, 2_000, 1_000, 400_000, 256)


def test_loads_follow_the_step_law() -> None:
    prefill, decode = loads(POINT, OBJECTIVES)
    assert prefill == pytest.approx(50_000 * 0.02 / 1_000 / prefill_use_max(POINT, OBJECTIVES))
    batch = decode_batch(POINT, OBJECTIVES)
    assert 8 + 0.05 * batch + 0.02 * batch <= 20 < 8 + 0.07 * (batch + 1)
    assert decode == pytest.approx(2_000 * (8 + 0.07 * batch) / batch / 1_000)


def test_a_decode_batch_fits_into_memory_and_the_engine() -> None:
    assert decode_batch(replace(POINT, kv_tokens_max=10_000), OBJECTIVES) == 9
    assert decode_batch(replace(POINT, running_seqs_max=4), OBJECTIVES) == 4
    assert decode_batch(replace(POINT, kv_tokens_max=0), ObjectivesConfig(itl_ms=1)) == 1


@pytest.mark.parametrize(("prompt", "bound"), [(1, USE_MAX), (1_000_000, USE_MIN)])
def test_prefill_is_planned_within_bounds(prompt: float, bound: float) -> None:
    assert prefill_use_max(replace(POINT, prompt_tokens=prompt), OBJECTIVES) == bound


def test_longer_prompts_leave_less_room() -> None:
    uses = [prefill_use_max(replace(POINT, prompt_tokens=p), OBJECTIVES) for p in (5_000, 15_000, 25_000, 40_000)]
    assert uses == sorted(uses, reverse=True)
    assert uses[0] > uses[2]


def test_the_best_ratio_is_the_one_that_no_other_beats() -> None:
    for wants in ((1.0, 1.0), (3.0, 0.2), (0.1, 5.0), (0.0, 0.0)):
        best = best_split(*wants, 7)
        assert all(fullness(*wants, best, 7) <= fullness(*wants, n, 7) for n in range(1, 7))


def test_a_replica_changes_after_asking_for_long_enough_and_then_rests() -> None:
    tuner, moves = RoleTuner(OBJECTIVES), []
    prefill = 1
    for _ in range(ASK_TICKS + SETTLE_TICKS + ASK_TICKS):
        move = tuner.step(replace(POINT, prefill_tps=200_000), prefill, 6)
        moves.append(move)
        prefill = move.after
    assert [i for i, m in enumerate(moves) if m.changed] == [ASK_TICKS - 1, 2 * ASK_TICKS + SETTLE_TICKS - 1]
    assert [m.after for m in moves if m.changed] == [3, 4]
    assert moves[ASK_TICKS - 1].predicted["fullness"] < moves[ASK_TICKS - 1].predicted["fullness_before"]
    assert moves[ASK_TICKS].reason.code == "Settling"


def test_noise_changes_nothing() -> None:
    tuner = RoleTuner(OBJECTIVES)
    wants = loads(POINT, OBJECTIVES)
    prefill = best_split(*wants, 6)
    for i in range(200):
        factor = 1.2 if i % 2 else 0.8
        point = replace(POINT, prefill_tps=POINT.prefill_tps * factor, decode_tps=POINT.decode_tps / factor)
        assert not tuner.step(point, prefill, 6).changed


def test_one_of_each_role_stays() -> None:
    tuner = RoleTuner(OBJECTIVES)
    for _ in range(3 * ASK_TICKS):
        assert not tuner.step(replace(POINT, prefill_tps=1e9), 1, 2).changed
        assert tuner.step(POINT, 1, 1).reason.code == "OneOfEach"
