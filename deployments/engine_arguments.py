"""Names of the arguments that the installed vLLM takes, read from its source text.

Importing vLLM takes many seconds and several hundred MB; a configuration is checked in processes that never run it.
"""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

_ARGUMENT_CLASSES = ("EngineArgs", "AsyncEngineArgs")


def names_in(source: str) -> frozenset[str]:
    """Return the annotated public fields of vLLM's argument classes in ``source``."""
    return frozenset(
        statement.target.id
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name in _ARGUMENT_CLASSES
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        if not statement.target.id.startswith("_")
    )


@cache
def engine_arg_names() -> frozenset[str] | None:
    """Return the names vLLM takes; ``None`` when vLLM is not installed or its source does not look as expected."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(next(iter(spec.submodule_search_locations))) / "engine" / "arg_utils.py"
    try:
        return names_in(path.read_text(encoding="utf-8")) or None
    except (OSError, SyntaxError):
        return None
