"""Guard rails in the simulator: harm is taken back and frozen, noise turns no knob back and forth."""

from __future__ import annotations

import pytest

from tests.sim.harm import HARMLESS, HARMS, Harm, play_harm, play_harmless, play_noise


@pytest.mark.parametrize("harm", HARMS, ids=[h.name for h in HARMS])
def test_a_harmful_lever_is_rolled_back_within_30_ticks_and_frozen_after_three(harm: Harm) -> None:
    played = play_harm(harm, seed=1)
    assert played.first_ticks is not None
    assert played.first_ticks <= 30
    assert (played.rollbacks, played.frozen_after) == (3, 3)
    assert played.harmless_at_end


@pytest.mark.parametrize("harmless", HARMLESS, ids=[h.name for h in HARMLESS])
def test_a_change_that_nobody_can_feel_is_not_taken_back(harmless: Harm) -> None:
    changes, taken_back = play_harmless(harmless, seed=1, seconds=300)
    assert changes >= 3
    assert taken_back == []


def test_no_knob_turns_back_and_forth_under_noise() -> None:
    noisy = play_noise(seed=1, seconds=480, settle_s=120)
    counts = noisy.turns
    assert noisy.taken_back == []
    assert len(counts) > 4
    assert max(counts.values()) <= 1, {k: n for k, n in counts.items() if n > 1}
