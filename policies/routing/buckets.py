"""Replicas in the rough order of one figure, so that the least few of a thousand are found without looking at all.

A bucket holds the replicas whose figure is equal within a tenth, which is all that the router's predictions tell apart.
A change inside a bucket costs one logarithm; a move costs O(1) and, where a bucket appears or empties, a search in the
sorted list of the few buckets there are.

What this must not do: order within a bucket. Whoever asks says where to begin, so that callers spread.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Container

from policies.types import ReplicaId

MOST_MAX = 64
"""Larger buckets are not looked at for the largest figures: there is nothing special about so many."""

PER_E_FOLD = 10.5
"""Buckets per factor of e: neighbours differ by a tenth."""


class Buckets:
    """Replica ids by a figure that is at least 0."""

    def __init__(self) -> None:
        self._levels: list[int] = []
        """Levels that have replicas, sorted."""
        self._buckets: dict[int, list[ReplicaId]] = {}
        self._places: dict[ReplicaId, tuple[int, int]] = {}
        """Level and position in its bucket of each replica."""

    def __len__(self) -> int:
        return len(self._places)

    def put(self, replica_id: ReplicaId, value: float) -> None:
        """Give ``replica_id`` the figure ``value``."""
        level = _level(value)
        place = self._places.get(replica_id)
        if place is not None:
            if place[0] == level:
                return
            self.drop(replica_id)
        bucket = self._buckets.get(level)
        if bucket is None:
            bucket = self._buckets[level] = []
            insort(self._levels, level)
        self._places[replica_id] = level, len(bucket)
        bucket.append(replica_id)

    def drop(self, replica_id: ReplicaId) -> None:
        """Take ``replica_id`` out; unknown ids change nothing."""
        place = self._places.pop(replica_id, None)
        if place is None:
            return
        level, position = place
        bucket = self._buckets[level]
        last = bucket.pop()
        if last != replica_id:
            bucket[position] = last
            self._places[last] = place
        elif not bucket:
            del self._buckets[level]
            del self._levels[bisect_left(self._levels, level)]

    def level(self, replica_id: ReplicaId) -> int:
        """Number of the bucket a known replica is in: less is better."""
        return self._places[replica_id][0]

    def level_max(self, share: float, least: float) -> int:
        """Bucket of figures that are above the least one by ``share`` of it, or by ``least``."""
        value = math.exp(self._levels[0] / PER_E_FOLD) - 1.0 if self._levels else 0.0
        return _level(value + max(least, share * value))

    def least(self, count: int, turn: float, skip: Container[ReplicaId]) -> list[ReplicaId]:
        """At most ``count`` replicas with the least figures, without ``skip``.

        ``turn`` in [0, 1) says where in each bucket to begin.
        """
        if count <= 0:
            return []
        found: list[ReplicaId] = []
        for level in self._levels:
            bucket = self._buckets[level]
            begin = int(turn * len(bucket))
            for position in range(begin - len(bucket), begin):
                replica_id = bucket[position]
                if replica_id not in skip:
                    found.append(replica_id)
                    if len(found) >= count:
                        return found
        return found

    def most(self, count: int, skip: Container[ReplicaId]) -> list[ReplicaId]:
        """At most ``count`` replicas with the largest figures, without ``skip``."""
        found: list[ReplicaId] = []
        for level in reversed(self._levels):
            bucket = self._buckets[level]
            for replica_id in bucket if len(bucket) <= MOST_MAX else ():
                if replica_id not in skip:
                    found.append(replica_id)
                    if len(found) >= count:
                        return found
        return found


def _level(value: float) -> int:
    return int(math.log(value + 1.0) * PER_E_FOLD)
