"""Waiting requests in the order of a number, with sums of their tokens. Decides nothing.

Adding and removing finds the place by bisection and moves the entries behind it; that copy takes well under a
microsecond for the hundreds of requests that wait in a gateway, and sums over a part of the line cost about as much.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from math import inf
from typing import TypeAlias

Place: TypeAlias = tuple[float, int]
"""Where a request stands: the number it is ordered by, then the order of arrival."""


class Line:
    """Requests by place; bounded by whoever adds them."""

    __slots__ = ("_ids", "_places", "_tokens", "total")

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._ids: list[str] = []
        self._tokens: list[int] = []
        self.total = 0
        """Tokens of all."""

    def __len__(self) -> int:
        return len(self._places)

    def add(self, place: Place, request_id: str, tokens: int) -> None:
        """Let a request stand at ``place``, which no other has."""
        index = bisect_left(self._places, place)
        self._places.insert(index, place)
        self._ids.insert(index, request_id)
        self._tokens.insert(index, tokens)
        self.total += tokens

    def remove(self, place: Place) -> None:
        """Take away the request at ``place``; somebody stands there."""
        index = bisect_left(self._places, place)
        del self._places[index], self._ids[index]
        self.total -= self._tokens.pop(index)

    def first(self) -> str | None:
        """Id of the first request; ``None`` when nobody waits."""
        return self._ids[0] if self._ids else None

    def tokens_until(self, number: float) -> int:
        """Tokens of those whose number is not above ``number``."""
        return sum(self._tokens[: bisect_right(self._places, (number, inf))])

    def tokens(self) -> Iterator[int]:
        """Tokens of each, in order."""
        return iter(self._tokens)
