from __future__ import annotations

import pytest

from policies.speculation import batch_class, depths
from policies.speculation.depths import DEPTH_MAX


@pytest.mark.parametrize(("batch", "expected"), [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (64, 64), (65, 128)])
def test_a_class_is_the_least_power_of_two_that_holds_the_batch(batch: int, expected: int) -> None:
    assert batch_class(batch) == expected


@pytest.mark.parametrize(
    ("hard", "expected"), [(0, (0,)), (1, (0, 1)), (3, (0, 1, 2, 3)), (4, (0, 1, 2, 4)), (6, (0, 1, 2, 4, 6))]
)
def test_depths_are_none_powers_of_two_and_the_start_up_depth(hard: int, expected: tuple[int, ...]) -> None:
    assert depths(hard) == expected


def test_depths_are_bounded() -> None:
    assert depths(10_000)[-1] == DEPTH_MAX
    assert len(depths(10_000)) == 8
