"""How many examples property tests draw: all of them, or the share that `make check` asks for to stay quick."""

from __future__ import annotations

import os

SHARE = "TIDEGATE_EXAMPLES_SHARE"


def examples(full: int) -> int:
    """Examples to draw where the whole suite draws ``full``."""
    return max(10, round(full * float(os.environ.get(SHARE, "1"))))
