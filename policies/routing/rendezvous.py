"""Rendezvous (highest random weight) hashing: the same key ranks the same replicas alike in every process.

``score(key, replica) = mix(key xor id_hash(replica))``; the highest score comes first. A replica that leaves moves
only the keys it held. Nothing here depends on Python's randomised ``hash``.
"""

from __future__ import annotations

from hashlib import blake2b

from policies.types import ReplicaId

_MASK = (1 << 64) - 1


def text_key(text: str) -> int:
    """64-bit hash of a text, equal in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def score(key: int, replica_id: ReplicaId) -> int:
    """Weight of ``replica_id`` for ``key`` in 0..2**64-1; splitmix64 finaliser (Steele et al., 2014)."""
    z = (key ^ text_key(replica_id)) & _MASK
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
