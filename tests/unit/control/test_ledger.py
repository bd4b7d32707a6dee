from __future__ import annotations

from dataclasses import replace

from policies.control.ledger import Draft, Ledger
from policies.steering import Verdict
from policies.types import Reason


def draft(n: int) -> Draft:
    return Draft("batch", f"r{n}", {"x": n}, {"x": n + 1}, Reason("Code", "text"), {"i": n}, {"p": 1.0})


def filled(entries: int, decisions_max: int) -> Ledger:
    ledger = Ledger(decisions_max)
    for n in range(1, entries + 1):
        ledger.write(draft(n), tick=n)
    return ledger


def test_an_entry_keeps_everything_it_was_drafted_with() -> None:
    entry = Ledger(10).write(replace(draft(7), acted=False), 3, 17, ("slo_burn_fast",))
    assert (entry.seq, entry.tick, entry.lever, entry.target, entry.acted) == (1, 3, "batch", "r7", False)
    assert (entry.at_ns, entry.conditions) == (17, ("slo_burn_fast",))
    assert (entry.before, entry.after, entry.inputs, entry.predicted) == ({"x": 7}, {"x": 8}, {"i": 7}, {"p": 1.0})


def test_the_ring_is_bounded_and_the_oldest_go() -> None:
    ledger = filled(1_000, decisions_max=10)
    assert len(ledger) == 10
    assert [d.seq for d in ledger.since(0, 100)] == list(range(991, 1_001))
    assert ledger.last_seq == 1_000


def test_paging_meets_every_entry_once() -> None:
    ledger = filled(25, decisions_max=100)
    seen: list[int] = []
    while page := ledger.since(seen[-1] if seen else 0, 10):
        seen += [d.seq for d in page]
    assert seen == list(range(1, 26))


def test_the_latest_are_the_newest_oldest_first() -> None:
    ledger = filled(25, decisions_max=100)
    assert [d.seq for d in ledger.latest(3)] == [23, 24, 25]
    assert [d.seq for d in ledger.latest(1_000)] == list(range(1, 26))


def test_empty_and_zero() -> None:
    assert Ledger(5).since(0, 10) == []
    assert Ledger(5).latest(10) == []
    assert Ledger(5).last_seq == 0
    ledger = filled(5, decisions_max=5)
    assert ledger.since(0, 0) == []
    assert ledger.latest(0) == []
    assert ledger.since(99, 10) == []
    assert ledger.since(-99, 10)[0].seq == 1


def test_a_verdict_is_written_into_the_entry_it_is_about() -> None:
    ledger = filled(25, decisions_max=10)
    judged = ledger.judge(20, Verdict.WORSE, "fewer kept their promises", {"met_share": 0.5}, 40)
    assert judged is not None
    assert ledger.since(19, 1) == [judged]
    assert (judged.verdict, judged.verdict_text, judged.judged_tick) == (Verdict.WORSE, "fewer kept their promises", 40)
    assert judged.realised == {"met_share": 0.5}
    assert [d.seq for d in ledger.latest(100)] == list(range(16, 26))


def test_a_verdict_on_an_entry_that_has_left_the_ring_is_dropped() -> None:
    ledger = filled(25, decisions_max=10)
    assert ledger.judge(15, Verdict.BETTER, "", {}, 40) is None
    assert ledger.judge(26, Verdict.BETTER, "", {}, 40) is None
    assert all(d.verdict is Verdict.PENDING for d in ledger.latest(100))
