"""Admission's knobs: what came of those that were let in moves them, and quiet takes them back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.config import AdmissionConfig, ControlConfig, ObjectivesConfig
from policies.control.cutoffs import FORECAST_SHARE_MIN, QUIET_TICKS, REST_TICKS, SHED_FACTOR_MIN, TURN_TICKS, Cutoffs
from policies.control.signals import SignalBook, Traffic
from policies.measures import ClassCounts
from tests.unit.control.fleet import SECOND_NS, gateway_report

CONFIG = AdmissionConfig()
LATE = ClassCounts(arrivals=10, succeeded=7, met=3, refused=3, late_ttft=4)
CAREFUL = ClassCounts(arrivals=10, succeeded=8, met=8, refused=2)
FINE = ClassCounts(arrivals=10, succeeded=10, met=10)


def seen(**classes: ClassCounts) -> Traffic:
    book = SignalBook(ControlConfig())
    book.receive_gateway(gateway_report(seq=1, arrivals=10, by_class=classes), SECOND_NS)
    traffic = book.signals(SECOND_NS).traffic
    assert traffic is not None
    return traffic


def moved(cutoffs: Cutoffs, traffic: Traffic | None, ticks: int) -> list[str]:
    return [move.reason.code for _ in range(ticks) if (move := cutoffs.step(traffic)).changed]


def fresh() -> Cutoffs:
    return Cutoffs(CONFIG, ObjectivesConfig())


def test_answers_that_begin_late_let_fewer_in_down_to_a_floor() -> None:
    cutoffs = fresh()
    assert moved(cutoffs, seen(standard=LATE), 1) == ["ForecastHopeful"]
    assert cutoffs.forecast_share == pytest.approx(0.72)
    moved(cutoffs, seen(standard=LATE), 30 * REST_TICKS)
    assert cutoffs.forecast_share == FORECAST_SHARE_MIN


def test_late_answers_beside_one_refusal_are_too_long_themselves() -> None:
    late = ClassCounts(arrivals=5, succeeded=5, met=3, late_ttft=2)
    book = SignalBook(ControlConfig())
    for second in range(1, 13):
        counts = replace(late, succeeded=4, refused=1) if second == 6 else late
        book.receive_gateway(gateway_report(seq=second, by_class={"standard": counts}), second * SECOND_NS)
    assert moved(fresh(), book.signals(12 * SECOND_NS).traffic, 3 * REST_TICKS) == []


def test_refusals_beside_answers_in_time_let_more_in_up_to_all() -> None:
    cutoffs = fresh()
    assert moved(cutoffs, seen(standard=CAREFUL), REST_TICKS) == ["ForecastCareful"]
    moved(cutoffs, seen(standard=CAREFUL), 30 * REST_TICKS)
    assert cutoffs.forecast_share == 1.0


def test_one_step_per_window_of_reports() -> None:
    assert len(moved(fresh(), seen(standard=LATE), 2 * REST_TICKS)) == 2


def test_a_step_back_waits_so_that_noise_turns_nothing() -> None:
    cutoffs = fresh()
    moved(cutoffs, seen(standard=LATE), 1)
    assert moved(cutoffs, seen(standard=CAREFUL), TURN_TICKS - 2) == []
    assert moved(cutoffs, seen(standard=CAREFUL), 3) == ["ForecastCareful"]


def test_a_burst_just_begun_lets_nobody_more_in() -> None:
    assert moved(fresh(), seen(standard=CAREFUL), REST_TICKS - 1) == []


def test_quiet_brings_both_back() -> None:
    cutoffs = fresh()
    moved(cutoffs, seen(interactive=LATE, batch=FINE), 4 * REST_TICKS)
    moved(cutoffs, seen(standard=LATE), 4 * REST_TICKS)
    assert cutoffs.shed_factor < 1
    assert cutoffs.forecast_share != CONFIG.forecast_share
    moved(cutoffs, seen(interactive=FINE), QUIET_TICKS + 40 * REST_TICKS)
    assert (cutoffs.forecast_share, cutoffs.shed_factor) == (CONFIG.forecast_share, 1.0)
    assert moved(cutoffs, seen(interactive=FINE), 100) == []


def test_the_first_class_is_protected_from_those_below_it() -> None:
    cutoffs = fresh()
    assert moved(cutoffs, seen(interactive=LATE, batch=FINE), 1) == ["ProtectFirst"]
    moved(cutoffs, seen(interactive=LATE, batch=FINE), 30 * REST_TICKS)
    assert cutoffs.shed_factor == SHED_FACTOR_MIN


def test_a_class_alone_has_nobody_to_be_protected_from() -> None:
    cutoffs = fresh()
    moved(cutoffs, seen(interactive=LATE), 10 * REST_TICKS)
    assert cutoffs.shed_factor == 1.0


def test_silence_moves_nothing() -> None:
    cutoffs = fresh()
    assert moved(cutoffs, None, 100) == []
    assert moved(cutoffs, replace(seen(standard=FINE), by_class={}), 100) == []


def test_other_settings_are_followed_where_nothing_was_moved() -> None:
    cutoffs = fresh()
    cutoffs.reconfigure(replace(CONFIG, forecast_share=0.6), ObjectivesConfig())
    assert cutoffs.forecast_share == 0.6
