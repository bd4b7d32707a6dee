"""A model that may sleep: reached and left reliably, whatever faults and counts that nobody gives back."""

from __future__ import annotations

import pytest

from tests.sim.idle import WINDOW_S, ZERO_AFTER_S, idle
from tests.sim.worlds import settled


@pytest.mark.parametrize("seed", range(5))
def test_the_fleet_is_at_zero_in_time_after_the_load_and_serves_the_next_request(seed: int) -> None:
    run = idle(seed)
    settled(run.result, run.watcher)
    assert run.asleep_s is not None, run.words
    assert run.asleep_s - run.busy_until_s <= ZERO_AFTER_S + WINDOW_S, run.words
    assert run.late == "succeeded", run.words
    assert run.asleep_at_end, run.words
