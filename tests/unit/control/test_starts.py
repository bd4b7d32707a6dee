"""Starts of replicas as the controller knows them: phases, schedule time, failures, silence."""

from __future__ import annotations

from typing import Any

from policies.control.starts import SILENT_NS, StartBook
from policies.measures import StartPhase, StartReport
from policies.types import FleetView

S = 1_000_000_000


def a_report(
    replica_id: str = "a", phase: StartPhase = StartPhase.LOAD, age_s: float = 1.0, **more: Any
) -> StartReport:
    return StartReport(replica_id, "m", phase, age_s * 1_000, **more)


def ready(replica_id: str = "a", age_s: float = 10.0, **phases_s: float) -> StartReport:
    phases = {StartPhase(name): seconds * 1_000 for name, seconds in phases_s.items()}
    return a_report(replica_id, StartPhase.FIRST_TOKEN, age_s, phases_ms=phases)


def test_a_start_is_under_way_until_its_port_is_open_and_told_once() -> None:
    book = StartBook()
    assert book.receive(a_report(), S) is None
    assert [(s.replica_id, s.phase) for s in book.step(S).under_way] == [("a", StartPhase.LOAD)]
    start = book.receive(ready(process=1, load=8, open=1), 10 * S)
    assert start is not None
    assert start.phases_ms == {StartPhase.PROCESS: 1_000, StartPhase.LOAD: 8_000, StartPhase.OPEN: 1_000}
    assert book.receive(ready(process=1, load=8, open=1), 11 * S) is None
    starts = book.step(11 * S)
    assert starts.under_way == ()
    assert [s.replica_id for s in starts.ended] == ["a"]


def test_the_schedule_phase_is_from_the_rise_of_the_target_to_the_process_and_each_rise_is_used_once() -> None:
    book = StartBook()
    book.receive_fleet(FleetView(1, 1, 0, 4), 0)
    book.receive_fleet(FleetView(1, 3, 0, 4), 10 * S)
    for name, at_s, age_s in (("a", 14, 1.0), ("b", 40, 5.0), ("c", 50, 1.0)):
        book.receive(a_report(name, age_s=age_s), at_s * S)
    found = {s.replica_id: s.phases_ms.get(StartPhase.SCHEDULE) for s in book.step(50 * S).under_way}
    assert found == {"b": 25_000, "c": None}, "a was silent for too long; c answers no rise"
    start = book.receive(ready("b", 12.0), 52 * S)
    assert start is not None
    assert start.total_ms == 25_000 + 12_000


def test_the_first_token_is_told_by_itself_and_kept_with_its_start() -> None:
    book = StartBook()
    book.receive(ready(load=8), 10 * S)
    first = book.receive(ready(load=8, first_token=3), 14 * S)
    assert first is not None
    assert first.phases_ms == {StartPhase.FIRST_TOKEN: 3_000}
    assert book.step(15 * S).ended[0].phases_ms == {StartPhase.LOAD: 8_000, StartPhase.FIRST_TOKEN: 3_000}
    assert book.receive(ready(load=8, first_token=3), 16 * S) is None


def test_failures_in_a_row_are_counted_with_the_last_reason_until_a_start_ends_well() -> None:
    book = StartBook()
    for name in ("a", "b"):
        book.receive(a_report(name), S)
        for _ in range(2):
            book.receive(a_report(name, failed=f"{name} is broken"), S)
    book.receive(a_report("c"), S)
    book.receive_fleet(FleetView(0, 1, 0, 4), S)
    starts = book.step(S)
    assert (starts.failed_in_a_row, starts.failed_why) == (2, "b is broken")
    starts = book.step(S + SILENT_NS + 1)
    assert (starts.failed_in_a_row, starts.under_way) == (3, ())
    book.receive(ready("d"), 30 * S)
    assert book.step(30 * S).failed_in_a_row == 0


def test_a_start_that_serve_wants_no_more_did_not_fail() -> None:
    book = StartBook()
    book.receive_fleet(FleetView(1, 2, 0, 4), 0)
    book.receive(a_report(), S)
    book.receive_fleet(FleetView(1, 1, 0, 4), 2 * S)
    starts = book.step(S + SILENT_NS + 1)
    assert (starts.failed_in_a_row, starts.under_way) == (0, ())
