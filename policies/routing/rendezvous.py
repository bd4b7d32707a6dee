"""Rendezvous: the same key leads to the same replicas in every process, and a replica that leaves moves only its keys.

Two forms. In a small fleet each replica is weighed: ``score(key, replica) = mix(key xor id_hash(replica))``, the
highest comes first (highest random weight). Weighing a thousand would take longer than all the rest of a choice, so a
large fleet is a :class:`Ring` with :data:`POINTS` hashed points for each replica, and a key goes to the owners of the
points that follow it. Nothing here depends on Python's randomised ``hash``.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator
from functools import lru_cache
from hashlib import blake2b

from policies.types import ReplicaId

POINTS = 8
"""Points of one replica on the ring: one BLAKE2b digest of 64 bytes."""

INSORT_MAX = 64
"""Replicas that are put into the ring one by one; more are sorted in at once."""

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio, odd: multiples of it are spread evenly."""


def text_key(text: str) -> int:
    """64-bit hash of a text, equal in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


_id_key = lru_cache(maxsize=8_192)(text_key)


def mix(z: int) -> int:
    """64 bits stirred; splitmix64 finaliser (Steele et al., 2014)."""
    return stir((z + GOLDEN) & MASK)


def stir(z: int) -> int:
    """The finaliser alone, of a 64-bit number."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def score(key: int, replica_id: ReplicaId) -> int:
    """Weight of ``replica_id`` for ``key`` in 0..2**64-1."""
    return mix((key ^ _id_key(replica_id)) & MASK)


class Ring:
    """Consistent hashing of keys over replica ids."""

    def __init__(self) -> None:
        self._points: list[tuple[int, ReplicaId]] = []

    def add(self, replica_ids: Collection[ReplicaId]) -> None:
        """Take in replicas that are not in it."""
        points = [
            (point, r) for r in replica_ids for point in struct.unpack(f"<{POINTS}Q", blake2b(r.encode()).digest())
        ]
        if len(replica_ids) > INSORT_MAX:
            self._points += points
            self._points.sort()
            return
        for point in points:
            insort(self._points, point)

    def remove(self, replica_ids: Collection[ReplicaId]) -> None:
        """Take replicas out; unknown ids change nothing."""
        self._points = [p for p in self._points if p[1] not in replica_ids]

    def walk(self, key: int) -> Iterator[ReplicaId]:
        """Owners of the points that follow ``key``, once around; a replica comes up once for each of its points."""
        points = self._points
        begin = bisect_left(points, (mix(key & MASK), ""))
        for position in range(begin - len(points), begin):
            yield points[position][1]
