"""Rendezvous hashing agrees between processes and moves little."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from policies.routing.rendezvous import score, text_key

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
