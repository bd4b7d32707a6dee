"""Free pages of the C heap go back to the system, not too often."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.heap import TRIM_EVERY_NS, HeapTrimmer, _malloc_trim


def test_not_more_often_than_its_period() -> None:
    calls: list[int] = []

    def trim(pad: int) -> int:
        calls.append(pad)
        return 1

    heap = HeapTrimmer(trim)
    assert [heap.trim(at) for at in (1, 2, TRIM_EVERY_NS, TRIM_EVERY_NS + 1)] == [True, False, False, True]
    assert calls == [0, 0]


@pytest.mark.skipif(_malloc_trim() is None, reason="the C library is not glibc")
def test_holes_between_things_that_stay_are_given_back() -> None:
    mib = 64
    blocks = [bytearray(20_000) for _ in range(mib * 2**20 // 20_000)]
    del blocks[1::2]  # no end of the heap to cut: the last of them stays
    before = _resident_kib()
    assert HeapTrimmer().trim(1)
    assert before - _resident_kib() > mib * 1024 / 8
    assert blocks


def _resident_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4
