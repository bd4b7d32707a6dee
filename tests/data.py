"""Finds recorded traces and measurements outside the repository; tests that need them skip without them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def data_dir() -> Path:
    """Folder of the data: ``TIDEGATE_DATA``, else ``../shared/data`` beside the project."""
    return Path(os.environ.get("TIDEGATE_DATA") or ROOT.parent / "shared" / "data")


def data_path(name: str) -> Path | None:
    """Path of the data file ``name``, e.g. ``traces/mooncake_conversation.jsonl.gz``; ``None`` where it is absent."""
    path = data_dir() / name
    return path if path.is_file() else None


def data_file(name: str) -> Path:
    """Path of the data file ``name``; the test that asks is skipped, with the reason, where it is absent."""
    path = data_path(name)
    if path is None:
        pytest.skip(f"{name} is not in {data_dir()} (set TIDEGATE_DATA to the folder that holds it)")
    return path
