"""JSON of the simulator's commands: one format, stable keys, and ``null`` for what is not known."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from autoscaling.simulator.comparison import Json

FORMAT = 1
"""Of the JSON; grows when a key changes its meaning."""


def text_of(content: Mapping[str, Json]) -> str:
    """Return ``content`` as JSON. Raises ``ValueError`` for NaN or infinity, which JSON cannot say."""
    return json.dumps({"format": FORMAT, **content}, indent=2, allow_nan=False, ensure_ascii=False)


def print_json(content: Mapping[str, Json]) -> None:
    """Print ``content`` on standard output."""
    sys.stdout.write(text_of(content) + "\n")
    sys.stdout.flush()


def write_json(path: Path, content: Mapping[str, Json]) -> Path:
    """Write ``content`` to ``path`` and return it. Raises ``OSError``."""
    path.write_text(text_of(content) + "\n", encoding="utf-8")
    return path
