"""Rendezvous hashing agrees between processes and moves little."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from policies.routing.rendezvous import Ring, score, text_key

REPLICAS = [f"replica-{i}" for i in range(8)]


def first(key: int, replicas: list[str]) -> str:
    return max(replicas, key=lambda r: score(key, r))


def test_equal_in_every_process_whatever_the_hash_seed() -> None:
    code = (
        "from policies.routing.rendezvous import score; print([score(k, r) for k in (0, 7, 2**64 - 1) for r in 'abc'])"
    )
    here = str([score(k, r) for k in (0, 7, 2**64 - 1) for r in "abc"])
    for seed in ("0", "1"):
        out = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[3],
            capture_output=True,
            text=True,
            check=True,
        )
        assert out.stdout.strip() == here


def test_scores_are_unsigned_64_bit() -> None:
    assert all(0 <= score(k, r) < 2**64 for k in (0, 1, 2**64 - 1, 2**70) for r in ("", "a", "ü" * 100))
    assert 0 <= text_key("") < 2**64


def test_keys_spread_evenly() -> None:
    count = Counter(first(text_key(str(k)), REPLICAS) for k in range(4_000))
    assert min(count.values()) > 400
    assert max(count.values()) < 600


def test_a_replica_that_leaves_moves_only_its_own_keys() -> None:
    for k in range(500):
        before = first(k, REPLICAS)
        if before != "replica-3":
            assert first(k, [r for r in REPLICAS if r != "replica-3"]) == before


def walked(ring: Ring, key: int) -> list[str]:
    return list(dict.fromkeys(ring.walk(key)))


def test_a_ring_does_not_depend_on_the_order_in_which_replicas_came() -> None:
    ids = [f"r{i}" for i in range(200)]
    at_once, one_by_one = Ring(), Ring()
    at_once.add(ids)
    for r in reversed(ids):
        one_by_one.add([r])
    for key in range(50):
        assert walked(at_once, key) == walked(one_by_one, key)
        assert sorted(walked(at_once, key)) == sorted(ids)


def test_a_replica_that_leaves_the_ring_moves_only_its_keys() -> None:
    ids = [f"r{i}" for i in range(50)]
    ring = Ring()
    ring.add(ids)
    before = [walked(ring, key) for key in range(300)]
    ring.remove({"r7", "unknown"})
    for key in range(300):
        assert walked(ring, key) == [r for r in before[key] if r != "r7"]
    ring.remove(ids)
    assert walked(ring, 1) == []


def test_keys_spread_over_the_ring_even_where_they_are_small_numbers() -> None:
    ring = Ring()
    ring.add([f"r{i}" for i in range(20)])
    firsts = Counter(walked(ring, key)[0] for key in range(4_000))
    assert len(firsts) == 20
    assert max(firsts.values()) < 3 * 4_000 / 20
