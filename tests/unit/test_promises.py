"""Times that refused requests are told: room is kept then, and newcomers do not take it."""

from __future__ import annotations

import pytest

from policies.admission.promises import EARLY_S, GRACE_S, LATE_S, PROMISES_MAX, SHARE, Promises
from policies.types import Priority

SECOND = 1_000_000_000
NOW = 1_000 * SECOND + 300_000_000
RATE = 1_000.0
ROOM = SHARE * RATE
"""Tokens that one second has room for."""


class Book(Promises):
    """With the arguments that most tests do not care for."""

    def put(
        self,
        fingerprint: int,
        tokens: int = 425,
        priority: Priority = Priority.STANDARD,
        after_s: float = 0.0,
        rate: float = RATE,
        max_s: float = 60.0,
        now_ns: int = NOW,
    ) -> float | None:
        return self.give(fingerprint, priority, tokens, after_s, lambda _: rate, max_s, now_ns)


def test_each_second_has_room_for_what_is_served_in_it() -> None:
    book = Book()
    assert [book.put(n) for n in range(1, 7)] == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    assert book.put(7, after_s=7.4) == 8.0, "not before what waits has drained"


def test_a_request_that_takes_longer_than_a_second_takes_the_next_ones_as_well() -> None:
    book = Book()
    assert book.put(1, tokens=round(2.5 * ROOM)) == 1.0
    assert book.put(2, tokens=round(0.5 * ROOM)) == 3.0
    assert book.put(3) == 4.0


def test_replicas_that_start_make_room_from_the_time_on_at_which_they_serve() -> None:
    book = Book()
    told = [
        book.give(n, Priority.STANDARD, 425, 0.0, lambda s: RATE * (1 if s < 3 else 2), 60.0, NOW) for n in range(1, 9)
    ]
    assert told == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 3.0, 3.0]


def test_nothing_is_promised_beyond_the_longest_time_or_to_a_body_that_nobody_knows() -> None:
    book = Book()
    assert [book.put(n, max_s=2.0) for n in range(1, 6)] == [1.0, 1.0, 2.0, 2.0, None]
    assert book.put(0) is None


def test_who_comes_too_early_is_told_the_same_time_again() -> None:
    book = Book()
    assert book.put(1) == 1.0
    assert book.put(2, after_s=9.0) == 9.0
    later = NOW + 4 * SECOND
    assert not book.redeem(2, later)
    assert book.put(2, now_ns=later) == 5.0
    assert len(book) == 2


@pytest.mark.parametrize(
    ("at_s", "kept"), [(-EARLY_S - 0.1, False), (-EARLY_S, True), (0.0, True), (LATE_S, True), (LATE_S + 0.1, False)]
)
def test_it_is_kept_for_who_comes_when_told(at_s: float, kept: bool) -> None:
    book = Book()
    book.put(1, after_s=20.0)
    assert book.redeem(1, NOW + round((20 + at_s) * SECOND)) is kept


def test_it_is_kept_once() -> None:
    book = Book()
    book.put(1)
    assert book.redeem(1, NOW + SECOND)
    assert not book.redeem(1, NOW + SECOND)


def test_newcomers_count_what_is_due_before_them_until_it_came_or_is_late() -> None:
    book = Book()
    for n in (1, 2):
        book.put(n, after_s=1.0)
    assert book.ahead(Priority.STANDARD, 3.0, NOW) == 850.0
    assert book.ahead(Priority.INTERACTIVE, 3.0, NOW) == 0.0, "a more important class goes first"
    assert book.ahead(Priority.BATCH, 3.0, NOW) == 850.0
    assert book.ahead(Priority.STANDARD, 0.2, NOW) == 0.0
    assert book.redeem(1, NOW + SECOND)
    assert book.ahead(Priority.STANDARD, 3.0, NOW + SECOND) == pytest.approx(425.0)
    assert book.ahead(Priority.STANDARD, 3.0, NOW + round((2 + GRACE_S) * SECOND)) == 0.0


def test_clients_that_do_not_come_back_hold_nobody_off_and_their_room_is_promised_to_others() -> None:
    book, now_ns = Book(), NOW
    for n in range(1, 300):
        book.put(n, max_s=1_000.0, now_ns=now_ns)
    now_ns += 600 * SECOND
    told = [book.put(1_000 + n, now_ns=now_ns) for n in range(12)]
    assert told == [1.0] * 10 + [2.0] * 2, "five times the room"
    assert book.ahead(Priority.STANDARD, 2.0, now_ns) < 0.05 * 12 * 425
    for n in range(12):
        assert book.redeem(1_000 + n, now_ns + round(2.0 * SECOND))
    book.put(2_000, now_ns=now_ns + 3 * SECOND)
    assert book.ahead(Priority.STANDARD, 2.0, now_ns + 3 * SECOND) == pytest.approx(425 * 0.21, abs=15)


def test_what_is_over_is_forgotten_and_what_is_remembered_is_bounded() -> None:
    book = Book()
    for n in range(1, PROMISES_MAX + 5):
        book.put(n, tokens=1, max_s=1_000.0)
    assert len(book) == PROMISES_MAX
    assert book.put(PROMISES_MAX + 9, now_ns=NOW + 200 * SECOND) == 1.0
    assert len(book) == 1
    assert len(book._taken.by_second) == 1


def test_a_tenant_counts_no_more_of_others_promises_than_its_weight_says() -> None:
    book = Book()
    for n in range(1, 13):
        book.give(n, Priority.STANDARD, 425, 0.0, lambda _: RATE, 60.0, NOW, "flood", 1.0)
    assert book.ahead(Priority.STANDARD, 10.0, NOW, "flood", 1.0, 100) == 12 * 425
    assert book.ahead(Priority.STANDARD, 10.0, NOW, "other", 1.0, 100) == 100
    assert book.ahead(Priority.STANDARD, 10.0, NOW, "other", 2.0, 100) == 50
    book.give(20, Priority.STANDARD, 425, 0.0, lambda _: RATE, 60.0, NOW, "other", 1.0)
    assert book.ahead(Priority.STANDARD, 10.0, NOW, "other", 1.0, 100) == 425 + 525, "its own come first as well"


def test_nothing_is_kept_of_tenants_whose_promises_are_over() -> None:
    book = Book()
    for n in range(1, 50):
        book.give(n, Priority.STANDARD, 425, 0.0, lambda _: RATE, 60.0, NOW, f"t{n}", 0.1)
    assert book.redeem(1, NOW + SECOND)
    book.put(100, now_ns=NOW + 300 * SECOND)
    assert list(book._tenants) == [""]
    assert book.ahead(Priority.STANDARD, 60.0, NOW + 300 * SECOND, "new", 1.0, 10) <= 10


def test_a_request_far_larger_than_what_is_served_takes_no_room_beyond_the_longest_time() -> None:
    book = Book()
    assert book.put(1, tokens=1_000_000, rate=1.0) == 1.0
    assert len(book._taken.by_second) <= 61
