"""The reasons with which requests end are the ones that deployments/README.md lists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from dashboards.catalogue import LABELS

ROOT = Path(__file__).resolve().parents[2]
WHERE = {
    "Refusal": 0, "_overload": 0, "_later": 0, "_unavailable": 0, "_try_again": 0, "_stop": 0,
    "_finish": 1, "_error": 2, "_stream_broken": 2, "ended_early": 2, "GatewayError": 2, "bad_request": 2,
}  # fmt: skip
"""Calls that end a request, or refuse it, and which argument is the code."""
KEYWORDS = ("code", "reason_code", "reason")
ELSEWHERE = {
    "bad_request",  # errors without a code
    "budget_unknown",  # a constant with a name
    "inflight_requests", "inflight_tokens",  # reasons of policies/admission/limits.py
}  # fmt: skip
NO_ENDING = {"controller_unavailable", "engine_error"}


def _codes_in_source() -> Iterator[str]:
    files = [*(ROOT / "policies").rglob("*.py"), *(ROOT / "deployments").glob("*.py")]
    for tree in (ast.parse(path.read_text(encoding="utf-8")) for path in files):
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            at = WHERE.get(name)
            if at is None:
                continue
            found = node.args[at] if len(node.args) > at else None
            found = found or next((k.value for k in node.keywords if k.arg in KEYWORDS), None)
            if isinstance(found, ast.Constant) and isinstance(found.value, str):
                yield found.value


def _codes_in_readme() -> set[str]:
    text = (ROOT / "deployments" / "README.md").read_text(encoding="utf-8")
    table = text.split("| reason | outcome | status | when |\n")[1].split("\n\n")[0]
    return {code for row in table.splitlines()[1:] for code in re.findall(r"`([a-z_]+)`", row.split("|")[1])}


def test_every_reason_is_in_the_table_and_no_other() -> None:
    assert set(_codes_in_source()) - NO_ENDING | ELSEWHERE == _codes_in_readme()


def test_reasons_fit_into_their_label() -> None:
    assert len(_codes_in_readme()) < LABELS["reason"].values_max
