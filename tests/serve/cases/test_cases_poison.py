"""Recipe 11: a request that kills engines is not carried from one to the next until none is left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import loopback
from tests.serve.cases.conftest import COMPLETIONS, REPLICAS, completion
from tests.serve.gateway.conftest import System, until

pytestmark = [pytest.mark.serve, pytest.mark.timeout(240)]
KILLED_MAX = 2


@pytest.fixture
def killable(system: System) -> Iterator[System]:
    """Engines that die of the word ``poison``, and all of them back afterwards."""
    system.faults(die_marker="poison")
    yield system
    until(lambda: system.try_faults(die_marker=None), "engines that answer", 60)
    until(lambda: len(system.counters()) == REPLICAS, "all engines are back", 90)


def test_case_11_a_request_that_kills_engines_kills_two_at_most_however_often_it_is_sent(killable: System) -> None:
    pids = {c["pid"] for c in killable.counters()}
    bad = completion("some poison", 20)
    first = loopback.post(killable.url + COMPLETIONS, json=bad, timeout=60)
    assert first.status_code in {502, 503}
    repeated = [loopback.post(killable.url + COMPLETIONS, json=bad, timeout=60) for _ in range(5)]
    assert {answer.status_code for answer in repeated} == {422}
    assert {answer.json()["error"]["code"] for answer in repeated} == {"quarantined"}
    good = [loopback.post(killable.url + COMPLETIONS, json=completion(f"{n} good"), timeout=60) for n in range(10)]
    assert [answer.status_code for answer in good] == [200] * 10
    until(lambda: len(survivors(killable)) == REPLICAS, "all engines are back", 90)
    assert len(pids - survivors(killable)) <= KILLED_MAX


def survivors(system: System) -> set[int]:
    """Processes of the engines that answer now; none while Serve still names a dead one."""
    return {c["pid"] for c in system.counters()} if system.try_faults() else set()
