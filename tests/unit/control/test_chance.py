"""Whether a load is another one, or the same by chance."""

from __future__ import annotations

import random

import pytest

from policies.control.chance import MARGIN_MIN, TURN_MARGIN, Chance

SECOND_NS = 1_000_000_000
WORK_S = 0.5


class Loaded:
    """Requests that come by chance, second by second."""

    def __init__(self, seed: int = 1) -> None:
        self.chance, self.rng, self.now_ns = Chance(), random.Random(seed), 0

    def seconds(self, count: int, rate_ps: float) -> list[tuple[bool, bool]]:
        """Whether it fell and rose, after each."""
        seen = []
        for _ in range(count):
            self.now_ns += SECOND_NS
            arrived, at_s = 0, self.rng.expovariate(rate_ps)
            while at_s < 1.0:
                arrived, at_s = arrived + 1, at_s + self.rng.expovariate(rate_ps)
            self.chance.step(arrived, WORK_S, self.now_ns)
            seen.append((self.chance.fell, self.chance.rose))
        return seen


@pytest.mark.parametrize("rate_ps", [1.0, 10.0])
def test_the_error_is_that_of_so_many_requests(rate_ps: float) -> None:
    means, errors = [], []
    for seed in range(60):
        loaded = Loaded(seed)
        loaded.seconds(300, rate_ps)
        means.append(loaded.chance.work / (rate_ps * WORK_S))
        errors.append(loaded.chance.error)
    spread = (sum((m - 1) ** 2 for m in means) / len(means)) ** 0.5
    assert 0.3 * errors[0] <= spread <= errors[0], "lengths vary as well, which is not played here"


def test_a_steady_load_hardly_ever_falls_or_rises() -> None:
    seen = 0
    for seed in range(20):
        loaded = Loaded(seed)
        loaded.seconds(120, 1.0)
        loaded.chance.moved(2, 3)
        seen += sum(fell for fell, _ in loaded.seconds(300, 1.0))
        loaded.chance.moved(3, 2)
        seen += sum(rose for _, rose in loaded.seconds(300, 1.0))
    assert seen <= 0.03 * 20 * 600


@pytest.mark.parametrize("seed", range(5))
def test_a_load_that_halves_fell_and_one_that_doubles_rose(seed: int) -> None:
    loaded = Loaded(seed)
    loaded.seconds(200, 4.0)
    loaded.chance.moved(2, 3)
    loaded.seconds(200, 4.0)
    assert loaded.chance.margin == TURN_MARGIN
    loaded.seconds(120, 1.6)
    assert loaded.chance.fell
    assert MARGIN_MIN <= loaded.chance.margin < TURN_MARGIN
    loaded.chance.moved(3, 2)
    assert loaded.chance.floor < 1
    loaded.seconds(120, 4.0)
    assert loaded.chance.rose
    assert loaded.chance.floor == 1


def test_the_first_change_and_going_on_ask_for_no_more_than_what_is_sure() -> None:
    loaded = Loaded()
    loaded.seconds(200, 20.0)
    assert loaded.chance.margin < 1.2, "a fleet that began too large is no turn"
    loaded.chance.moved(4, 3)
    assert loaded.chance.margin < 1.2
    loaded.chance.moved(3, 4)
    assert loaded.chance.floor == 1


def test_a_large_load_is_known_to_a_tenth() -> None:
    loaded = Loaded()
    loaded.seconds(200, 20.0)
    loaded.chance.moved(40, 39)
    assert loaded.chance.margin == MARGIN_MIN


def test_nothing_seen_is_nothing_known() -> None:
    chance = Chance()
    assert (chance.work, chance.error, chance.fell, chance.rose) == (0.0, 1.0, False, False)
