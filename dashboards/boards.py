"""All boards, and their files: ``dashboards/grafana/<uid>.json``, written by ``dashboards export``.

The files are committed, so that they can be loaded without this code; a test fails while they differ from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dashboards.board_capacity import capacity
from dashboards.board_control import control
from dashboards.board_fleet import fleet
from dashboards.board_replica import replica
from dashboards.board_requests import requests
from dashboards.board_tenants import tenants

BOARDS = (fleet, requests, control, capacity, tenants, replica)


def all_boards() -> Mapping[str, dict[str, Any]]:
    """Every board as Grafana's JSON, by its uid."""
    return {document["uid"]: document for document in (make() for make in BOARDS)}


def text(document: Mapping[str, Any]) -> str:
    """A board as its file holds it."""
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def files(folder: Path) -> Mapping[Path, str]:
    """What the files of all boards in ``folder`` must hold."""
    return {folder / f"{uid}.json": text(document) for uid, document in all_boards().items()}
