from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from policies.config import ControlConfig
from policies.control.signals import (
    GATEWAYS_MAX,
    REPLICAS_MAX,
    SignalBook,
)
from policies.control.windows import WINDOW_MS, WINDOW_REPORTS_MAX
from policies.types import FleetView, ReplicaState
from tests.unit.control.fleet import SECOND_NS, gateway_report, replica_report

CONFIG = ControlConfig(report_age_ms_max=5_000, forget_after_ms=60_000)


def at(seconds: float) -> int:
    return int(seconds * SECOND_NS)


def test_nothing_received_is_blind_and_nothing_is_zero() -> None:
    signals = SignalBook(CONFIG).signals(at(1))
    assert signals.blind
    assert signals.work is None
    assert signals.traffic is None
    assert signals.queue is None
    assert signals.fleet is None
    assert signals.model == ""


def test_rates_are_counts_over_the_time_their_windows_cover_summed_over_reporters() -> None:
    book = SignalBook(CONFIG)
    for seq in (1, 2, 3):
        book.receive_replica(replica_report("a", seq, window_ms=500, decode_tokens=10, prefill_tokens=100), at(seq))
        book.receive_replica(replica_report("b", seq, window_ms=1_000, decode_tokens=5), at(seq))
        counts: dict[str, Any] = {
            "arrivals": 4,
            "prompt_tokens": 40,
            "routed": {"a": 2, "b": 4},
            "predicted_prompt_tokens": {"a": 80},
        }
        book.receive_gateway(gateway_report(seq=seq, window_ms=2_000, **counts), at(seq))
    signals = book.signals(at(3))
    assert signals.work is not None
    assert signals.traffic is not None
    assert signals.work.decode_tps == pytest.approx(25)
    assert signals.work.prefill_tps == pytest.approx(200)
    assert signals.traffic.arrivals_ps == pytest.approx(2)
    assert signals.traffic.prompt_tps == pytest.approx(20)
    assert signals.traffic.routed_ps == pytest.approx(3)
    assert signals.traffic.routed_prompt_tps == pytest.approx(40)


def test_a_lost_report_makes_a_rate_older_not_lower() -> None:
    book = SignalBook(CONFIG)
    for seq in (1, 2, 4):
        book.receive_replica(replica_report("a", seq, decode_tokens=10), at(seq))
    work = book.signals(at(4)).work
    assert work is not None
    assert work.decode_tps == pytest.approx(10)


def test_totals_hold_the_fresh_reports_only_and_the_silent_stay_known() -> None:
    book = SignalBook(CONFIG)
    book.receive_replica(replica_report("a", 1, running=3, waiting=1, kv_tokens_used=100, kv_tokens_max=1_000), at(1))
    book.receive_replica(replica_report("b", 1, running=5, kv_tokens_used=900, kv_tokens_max=1_000), at(5))
    signals = book.signals(at(7))
    assert [(r.replica_id, r.fresh) for r in signals.replicas] == [("a", False), ("b", True)]
    assert signals.work is not None
    assert (signals.work.running, signals.work.waiting, signals.work.kv_share) == (5, 0, 0.9)
    assert signals.replicas[0].age_ms == 6_000
    assert not signals.blind


def test_all_silent_is_blind_and_later_forgotten() -> None:
    book = SignalBook(CONFIG)
    book.receive_replica(replica_report("a", 1), at(1))
    book.receive_gateway(gateway_report(seq=1), at(1))
    assert book.signals(at(6)).blind is False
    signals = book.signals(at(6.1))
    assert signals.blind
    assert (len(signals.replicas), signals.gateways_known, signals.gateways_fresh) == (1, 1, 0)
    signals = book.signals(at(61.1))
    assert (len(signals.replicas), signals.gateways_known) == (0, 0)


def test_duplicates_and_late_reports_are_ignored() -> None:
    book = SignalBook(CONFIG)
    assert book.receive_replica(replica_report("a", 2, decode_tokens=10), at(1))
    assert not book.receive_replica(replica_report("a", 2, decode_tokens=10), at(1.1))
    assert not book.receive_replica(replica_report("a", 1, decode_tokens=10), at(1.2))
    assert not book.receive_replica(replica_report("a", 2, decode_tokens=10), at(50))
    work = book.signals(at(2)).work
    assert work is not None
    assert work.decode_tps == pytest.approx(10)


def test_a_reporter_that_starts_again_after_a_silence_is_heard() -> None:
    book = SignalBook(CONFIG)
    book.receive_gateway(gateway_report(seq=40, arrivals=9), at(1))
    assert book.receive_gateway(gateway_report(seq=1, arrivals=2), at(8))
    traffic = book.signals(at(8)).traffic
    assert traffic is not None
    assert traffic.arrivals_ps == pytest.approx(2)


@pytest.mark.parametrize("window_ms", [0.0, -1.0, math.nan, math.inf])
def test_a_report_without_a_window_makes_no_sense(window_ms: float) -> None:
    book = SignalBook(CONFIG)
    assert not book.receive_replica(replica_report("a", 1, window_ms=window_ms), at(1))
    assert not book.receive_gateway(gateway_report(seq=1, window_ms=window_ms), at(1))
    assert book.signals(at(1)).blind


def test_the_window_is_bounded_in_time_and_number() -> None:
    book = SignalBook(CONFIG)
    for seq in range(1, 500):
        book.receive_replica(replica_report("a", seq, window_ms=10), at(1) + seq * 10_000_000)
    now_ns = at(1) + 499 * 10_000_000
    assert len(book.signals(now_ns).replicas[0].window) == WINDOW_REPORTS_MAX
    later = book.signals(now_ns + int(WINDOW_MS * 1e6) + 1).replicas[0]
    assert later.window == ()
    assert later.decode_tps == 0.0


def test_reporters_are_bounded_and_only_a_silent_one_makes_room() -> None:
    book = SignalBook(CONFIG)
    for i in range(REPLICAS_MAX):
        assert book.receive_replica(replica_report(f"r{i}", 1), at(1) + i)
    assert not book.receive_replica(replica_report("late", 1), at(2))
    assert book.refused == 1
    assert book.receive_replica(replica_report("r1", 2), at(2))
    assert book.receive_replica(replica_report("late", 1), at(7))
    known = {r.replica_id for r in book.signals(at(7)).replicas}
    assert len(known) == REPLICAS_MAX
    assert "r0" not in known
    assert "late" in known


def test_gateways_are_bounded() -> None:
    book = SignalBook(CONFIG)
    for i in range(GATEWAYS_MAX + 1):
        book.receive_gateway(gateway_report(f"g{i}", 1), at(1))
    assert book.signals(at(1)).gateways_known == GATEWAYS_MAX


def test_replicas_that_serve_runs_and_nobody_hears_are_unknown() -> None:
    book = SignalBook(CONFIG)
    book.receive_replica(replica_report("a", 1), at(1))
    book.receive_fleet(FleetView(3, 3, 1, 4), at(1))
    assert book.signals(at(2)).unknown_replicas == 2


def test_without_serves_word_the_silent_are_unknown_and_the_draining_are_not() -> None:
    book = SignalBook(CONFIG)
    book.receive_replica(replica_report("a", 1), at(1))
    book.receive_replica(replica_report("b", 1, state=ReplicaState.DRAINING), at(1))
    book.receive_replica(replica_report("c", 1), at(7))
    assert book.signals(at(7)).unknown_replicas == 1


def test_serves_word_ages_like_every_other() -> None:
    book = SignalBook(CONFIG)
    book.receive_fleet(FleetView(1, 1, 1, 2), at(1))
    assert book.signals(at(6)).fleet == FleetView(1, 1, 1, 2)
    assert book.signals(at(6.1)).fleet is None


def test_draining_and_stuck_replicas_do_not_serve() -> None:
    book = SignalBook(CONFIG)
    for name, state in (("a", ReplicaState.READY), ("b", ReplicaState.DRAINING), ("c", ReplicaState.STUCK)):
        book.receive_replica(replica_report(name, 1, state=state), at(1))
    signals = book.signals(at(1))
    assert [r.replica_id for r in signals.serving] == ["a"]
    assert len(signals.fresh) == 3


def test_gpu_utilisation_is_unknown_without_a_gpu_and_never_the_busy_share() -> None:
    book = SignalBook(CONFIG)
    book.receive_replica(replica_report("a", 1, busy_share=0.9), at(1))
    work = book.signals(at(1)).work
    assert work is not None
    assert work.gpu_utilisation_share is None
    assert work.busy_share == pytest.approx(0.9)
    book.receive_replica(replica_report("b", 1, busy_share=None, gpu_utilisation_share=0.5), at(1))
    work = book.signals(at(1)).work
    assert work is not None
    assert work.gpu_utilisation_share == 0.5
    assert work.busy_share == pytest.approx(0.9)


def test_shares_without_anything_to_share_are_unknown() -> None:
    book = SignalBook(CONFIG)
    book.receive_replica(replica_report("a", 1, kv_tokens_max=0), at(1))
    book.receive_gateway(gateway_report(seq=1), at(1))
    signals = book.signals(at(1))
    assert signals.work is not None
    assert signals.traffic is not None
    assert signals.work.kv_share is None
    assert signals.work.kv_share_max is None
    assert signals.work.prefix_hit_share is None
    assert signals.traffic.predicted_hit_share is None


def test_failed_requests_count_by_all_their_reasons() -> None:
    book = SignalBook(CONFIG)
    book.receive_gateway(gateway_report(seq=1, failed={"upstream": 2, "timeout": 1}, queued=4), at(1))
    signals = book.signals(at(1))
    assert signals.traffic is not None
    assert signals.traffic.failed_ps == pytest.approx(3)
    assert signals.queue == 4


def test_what_is_made_ready_for_a_tick_is_right_whenever_it_comes() -> None:
    """A book that is asked at odd times against one that is asked only now."""
    rng = Random(5)
    for _ in range(200):
        asked, unasked, now_ns = SignalBook(CONFIG), SignalBook(CONFIG), at(1)
        for seq in range(1, rng.randrange(2, 40)):
            now_ns += rng.choice((0, at(0.3), at(1), at(1), at(1), at(3), at(13)))
            report = replica_report("a", seq, window_ms=rng.choice((300, 1_000, 4_000)), steps=rng.randrange(3))
            for book in (asked, unasked):
                book.receive_replica(report, now_ns)
            now_ns += rng.choice((0, at(0.4), at(1), at(2)))
            if rng.random() < 0.7:
                asked.signals(now_ns)
        now_ns += rng.choice((0, at(0.7), at(4), at(6), at(12)))
        assert asked.signals(now_ns).replicas == unasked.signals(now_ns).replicas


def test_a_model_name_comes_from_whoever_reports() -> None:
    book = SignalBook(CONFIG)
    book.receive_gateway(replace(gateway_report(seq=1), model="x"), at(1))
    assert book.signals(at(1)).model == "x"
