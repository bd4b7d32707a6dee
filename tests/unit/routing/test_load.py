"""The gateway's own load counts."""

from __future__ import annotations

import pytest

from policies.routing.load import LoadBook


def counts(book: LoadBook, replica_id: str) -> tuple[int, int, int]:
    return book.requests(replica_id), book.prefill_tokens(replica_id), book.decode_tokens(replica_id)


def test_counts_from_dispatch_over_first_byte_to_release() -> None:
    book = LoadBook()
    book.dispatched("a", "r1", 30, 100)
    book.dispatched("a", "r2", 5, 50)
    assert counts(book, "a") == (2, 35, 0)
    book.first_byte("r1")
    assert counts(book, "a") == (2, 5, 100)
    book.released("r1")
    assert counts(book, "a") == (1, 5, 0)
    book.released("r2")
    assert counts(book, "a") == (0, 0, 0)
    assert book.inflight == 0


def test_release_and_first_byte_are_idempotent() -> None:
    book = LoadBook()
    book.dispatched("a", "r1", 30, 100)
    book.dispatched("a", "r2", 7, 70)
    for _ in range(3):
        book.first_byte("r1")
    assert counts(book, "a") == (2, 7, 100)
    for _ in range(3):
        book.released("r1")
    book.first_byte("r1")
    book.released("never seen")
    book.first_byte("never seen")
    assert counts(book, "a") == (1, 7, 0)


def test_a_retry_moves_the_load() -> None:
    book = LoadBook()
    book.dispatched("a", "r1", 30, 100)
    book.dispatched("b", "r1", 80, 100)
    assert counts(book, "a") == (0, 0, 0)
    assert counts(book, "b") == (1, 80, 0)
    assert book.inflight == 1


def test_a_retry_at_the_same_replica_counts_once() -> None:
    book = LoadBook()
    book.dispatched("a", "r1", 30, 100)
    book.first_byte("r1")
    book.dispatched("a", "r1", 40, 100)
    assert counts(book, "a") == (1, 40, 0)


def test_forgetting_a_replica_makes_later_releases_harmless() -> None:
    book = LoadBook()
    book.dispatched("a", "r1", 30, 100)
    book.dispatched("b", "r2", 30, 100)
    book.forget("a")
    book.forget("unknown")
    assert book.inflight == 1
    book.dispatched("a", "r3", 1, 10)
    book.first_byte("r1")
    book.released("r1")
    assert counts(book, "a") == (1, 1, 0)


def test_zero_tokens_are_counts_too() -> None:
    book = LoadBook()
    book.dispatched("a", "r1", 0, 0)
    assert counts(book, "a") == (1, 0, 0)
    book.released("r1")
    assert book.inflight == 0


@pytest.mark.parametrize("tokens", [(-1, 10), (1, -10)])
def test_negative_counts_are_refused_and_change_nothing(tokens: tuple[int, int]) -> None:
    book = LoadBook()
    book.dispatched("a", "r1", 30, 100)
    with pytest.raises(ValueError, match="negative"):
        book.dispatched("b", "r1", *tokens)
    assert counts(book, "a") == (1, 30, 0)


def test_nothing_is_kept_of_replicas_without_requests() -> None:
    book = LoadBook()
    for i in range(1_000):
        book.dispatched(f"replica-{i}", "r", 1, 1)
    book.released("r")
    assert not book._loads
    assert not book._entries
