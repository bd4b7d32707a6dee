"""One trouble after the other in whole runs: what is wrong is named in time, before it nothing is, and a right lever
moves first. Ten seeds of each, and a whole day without trouble: ``python -m tests.bench.scenarios``.
"""

from __future__ import annotations

import pytest

from policies.control.catalogue import SPECS
from tests.sim.diurnal import day
from tests.sim.troubles import CALM_S, TROUBLES, Trouble, late, right_lever, watch

LONG = {"some requests are too long"}
"""Left to the bench."""


@pytest.mark.parametrize("trouble", [t for t in TROUBLES if t.name not in LONG], ids=lambda t: t.name)
def test_each_trouble_is_named_in_time_and_nothing_before(trouble: Trouble) -> None:
    seen, _ = watch(trouble, seed=1)
    assert seen.active_between(trouble.quiet_s, CALM_S) == set()
    assert late(trouble, seen) == {}
    assert right_lever(trouble, seen)


def test_half_an_hour_of_a_changing_load_raises_no_alarm() -> None:
    alarms, requests = day(seed=2, seconds=1_800, day_s=3_600)
    assert requests > 1_000
    assert len(alarms.replicas) > 1
    assert alarms.false() == []


def test_every_condition_has_a_trouble() -> None:
    assert {name for trouble in TROUBLES for name in trouble.expected} == set(SPECS)
