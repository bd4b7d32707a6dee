"""Quarantine: holds for its time, and holds no more than its bound."""

from __future__ import annotations

from policies.config import FaultsConfig
from policies.faults import Quarantine

S = 1_000_000_000


def test_holds_for_its_time() -> None:
    q = Quarantine(FaultsConfig(quarantine_s=10))
    q.add(7, 0)
    assert q.holds(7, 10 * S - 1)
    assert q.left_s(7, 4 * S) == 6.0
    assert not q.holds(7, 10 * S)
    assert q.left_s(7, 10 * S) is None
    assert not q.holds(8, 0)


def test_added_again_it_is_held_anew() -> None:
    q = Quarantine(FaultsConfig(quarantine_s=10))
    q.add(7, 0)
    q.add(7, 9 * S)
    assert q.holds(7, 18 * S)


def test_holds_no_more_than_its_bound_and_forgets_the_first() -> None:
    q = Quarantine(FaultsConfig(quarantine_s=10), requests_max=3)
    for fingerprint in range(1, 6):
        q.add(fingerprint, 0)
    assert len(q) == 3
    assert [f for f in range(1, 6) if q.holds(f, 0)] == [3, 4, 5]


def test_what_is_over_makes_room() -> None:
    q = Quarantine(FaultsConfig(quarantine_s=10))
    for fingerprint in range(1, 101):
        q.add(fingerprint, fingerprint * S)
    assert len(q) == 10


def test_an_unknown_fingerprint_and_no_time_hold_nothing() -> None:
    q = Quarantine(FaultsConfig(quarantine_s=10))
    q.add(0, 0)
    assert not q.holds(0, 0)
    off = Quarantine(FaultsConfig(quarantine_s=0))
    off.add(7, 0)
    assert not off.holds(7, 0)
