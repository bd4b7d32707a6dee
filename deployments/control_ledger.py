"""Reads the ledger's files: decisions of controllers that may be gone, in the shape in which the API answers them.

The last line of a decision counts: it is written again once its verdict is known. Several lives of the controller may
lie in one folder; their decisions come in order of time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoscaling.simulator.recorded import DecisionLine, DroppedLine, RecordingError
from deployments.control_api import since_unix_s
from deployments.control_view import decision_state
from deployments.simulation.recordings import find_writers, read_writer


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which decisions are asked for, as on the command line. ``None``: all."""

    lever: str | None = None
    target: str | None = None
    since: str | None = None
    """``15m``, or a time; as ``/control/decisions`` takes it."""


def read_ledger(
    folder: Path, limit: int, since_seq: int | None, wanted: Wanted, warn: Callable[[str], None]
) -> list[dict[str, Any]]:
    """The newest ``limit`` decisions in ``folder``, oldest first; with ``since_seq`` the first ones after it.

    With ``since_seq`` those of the last controller's life are meant: numbers begin again with each.

    Raises:
        RecordingError: there are no files of a ledger, or one is damaged.
        GatewayError: ``wanted.since`` is no time.
    """
    since_s = None if wanted.since is None else since_unix_s(wanted.since, time.time())
    writers = [writer for writer in find_writers([folder], warn) if writer.header.source == "ledger"]
    if not writers:
        raise RecordingError(str(folder), None, "holds no ledger; its files begin with 'ledger-'")
    found: dict[tuple[str, int], DecisionLine] = {}
    for writer in writers:
        for numbered in read_writer(writer, warn):
            if isinstance(numbered.line, DecisionLine):
                found[writer.header.name, numbered.line.decision.seq] = numbered.line
            elif isinstance(numbered.line, DroppedLine):
                warn(f"{numbered.file}:{numbered.number}: {numbered.line.lines} lines are missing here")
    last = writers[-1].header.name
    chosen = [
        (epoch, line)
        for (epoch, seq), line in sorted(found.items(), key=lambda item: (item[1].at_unix_ns, item[0][1]))
        if (wanted.lever is None or line.decision.lever == wanted.lever)
        and (wanted.target is None or line.decision.target == wanted.target)
        and (since_s is None or line.at_unix_ns >= since_s * 1e9)
        and (since_seq is None or (epoch == last and seq > since_seq))
    ]
    page = chosen[-limit:] if since_seq is None else chosen[:limit]
    return [decision_state(line, epoch) for epoch, line in page]
