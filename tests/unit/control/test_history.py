"""What a fleet was seen to carry: settings that are known to be as good, taken back, or neither."""

from __future__ import annotations

from policies.control.history import TICKS_MAX, History
from policies.control.objective import ObjectiveSample


def note(history: History, met: int, ticks: int = 5, serving: int = 2) -> None:
    for _ in range(ticks):
        history.note(ObjectiveSample(met, met, met, 0, 0, 0, 1.0, 1.0), serving)


def test_the_best_stretch_counts_per_replica_and_only_in_one_piece() -> None:
    history = History()
    note(history, 10)
    note(history, 20, ticks=4)
    assert history.proven_ps(history.settings, 5) == (4 * 20 + 10) / 5 / 2
    history.note(ObjectiveSample(90, 90, 90, 0, 0, 0, 1.0, 1.0), 0)
    assert history.proven_ps(history.settings, 5) == (4 * 20 + 10) / 5 / 2, "nobody served: not a stretch"
    assert history.proven_ps(history.settings, 20) == 0.0


def test_other_settings_prove_nothing_until_they_are_known_to_be_harmless() -> None:
    history = History()
    note(history, 20)
    history.changed()
    note(history, 10)
    assert history.proven_ps(history.settings, 5) == 5.0
    history.harmless(history.settings, 0)
    assert history.proven_ps(history.settings, 5) == 10.0


def test_settings_that_were_taken_back_are_the_old_ones_again() -> None:
    history = History()
    note(history, 20)
    history.changed()
    note(history, 2)
    history.restored(0)
    note(history, 10)
    assert history.proven_ps(history.settings, 5) == 10.0
    history.changed()
    assert history.settings == 2, "a number is never used twice"
    assert history.proven_ps(history.settings, 5) == 0.0


def test_chains_hold_and_old_ticks_are_forgotten() -> None:
    history = History()
    note(history, 20)
    for settings in (1, 2, 3):
        history.changed()
        note(history, 1)
        history.harmless(settings, settings - 1)
    assert history.proven_ps(3, 5) == 10.0
    note(history, 6, ticks=TICKS_MAX)
    assert history.proven_ps(3, 5) == 3.0
