"""When a share changed: the right change is found, early and late ones are told apart, noise decides nothing."""

from __future__ import annotations

import random

import pytest

from policies.control.onset import DECISIVE, Ended, evidence


def ticks(seed: int, begin: int, after: float, before: float = 0.95, rate: int = 10) -> list[Ended]:
    rng = random.Random(seed)
    found = []
    for number in range(1, 36):
        n = rng.randint(rate // 2, rate * 3 // 2)
        share = before if number < begin else after
        found.append(Ended(number, sum(rng.random() < share for _ in range(n)), n))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_the_change_that_the_fall_followed_is_found(seed: int) -> None:
    assert evidence(ticks(seed, 18, 0.5), [15], [25], lag=6) >= DECISIVE
    assert evidence(ticks(seed, 28, 0.5), [15], [25], lag=6) <= -DECISIVE
    assert evidence(ticks(seed, 18, 0.5), [25], [15], lag=6) <= -DECISIVE


@pytest.mark.parametrize("seed", range(20))
def test_a_fall_before_the_change_is_not_its_own(seed: int) -> None:
    assert evidence(ticks(seed, 10, 0.5), [15], [], lag=6) <= -DECISIVE


def test_changes_at_one_time_cannot_be_told_apart() -> None:
    assert evidence(ticks(1, 18, 0.5), [15], [15], lag=6) < DECISIVE


def test_noise_is_hardly_ever_decisive() -> None:
    found = [evidence(ticks(seed, 99, 0.8, before=0.8), [15], [25], lag=6) for seed in range(200)]
    assert sum(abs(e) >= DECISIVE for e in found) <= 20


def test_ticks_without_endings_say_nothing() -> None:
    silent = [Ended(number, 0, 0) for number in range(1, 30)]
    assert evidence(silent, [10], [20], lag=6) == 0.0
    assert evidence([], [10], [], lag=6) == 0.0
