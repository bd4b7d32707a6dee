"""The controller's process looks for cycles rarely, and still does."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from deployments.collector import THRESHOLDS, collect_rarely


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """Generations collected since :func:`collect_rarely`; the defaults are put back afterwards."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    before = gc.get_threshold()
    collect_rarely()
    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)
    gc.set_threshold(*before)
    gc.unfreeze()


def test_ticks_that_keep_as_much_as_they_drop_collect_nothing(collections: list[int]) -> None:
    window: list[list[int]] = [[] for _ in range(20_000)]
    collections.clear()
    for _ in range(20):
        window = [[] for _ in window]
    assert collections == []


def test_cycles_are_still_found(collections: list[int]) -> None:
    for _ in range(2 * THRESHOLDS[0]):
        cycle: list[object] = []
        cycle.append(cycle)
    assert collections
