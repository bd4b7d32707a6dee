"""The rules that keep the project simple, checked on its source: sizes, purity, layers, words where they are due."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("policies", "autoscaling", "dashboards", "deployments")
PURE = ("policies", "autoscaling")
FILE_LINES_MAX = 499
FUNCTION_LINES_MAX = 69
IMPURE_MODULES = frozenset({
    "asyncio", "concurrent", "ctypes", "datetime", "http", "io", "logging", "mmap", "multiprocessing", "os", "pathlib",
    "queue", "secrets", "select", "selectors", "shutil", "signal", "socket", "ssl", "subprocess", "sys", "tempfile",
    "threading", "time", "urllib", "uuid",
})  # fmt: skip
IMPURE_CALLS = frozenset({"open", "print", "input", "exec", "eval", "__import__"})
JOINERS = frozenset({"attainment", "flow", "flow_context", "hedge", "endings", "build", "split"})
"""Modules of policies/ that may import every family."""
SHARED = frozenset(
    {
        "types",
        "config",
        "config_base",
        "config_guard",
        "config_objectives",
        "objectives",
        "events",
        "step_model",
        "drift",
        "queueing",
        "histogram",
        "prices",
        "measures",
        "roofline",
        "steering",
    }
)
"""Modules of policies/ that every family may import."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def sources(*tops: str) -> tuple[Path, ...]:
    return tuple(p for top in tops for p in sorted((ROOT / top).rglob("*.py")))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def where(path: Path, node: ast.stmt | ast.expr | None = None) -> str:
    return f"{path.relative_to(ROOT)}{f':{node.lineno}' if node else ''}"


def imports(module: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Every module imported anywhere; ``from a.b import c`` counts as ``a.b`` and as ``a.b.c``."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node
            yield from ((f"{node.module}.{alias.name}", node) for alias in node.names)


def impurities(module: ast.Module) -> Iterator[tuple[str, ast.stmt | ast.expr]]:
    """What a decision must not use: input, output, clocks, hidden randomness, anything outside the standard library."""
    for name, node in imports(module):
        top = name.partition(".")[0]
        own = top in PURE or top == "__future__"
        if not own and (top in IMPURE_MODULES or top not in sys.stdlib_module_names):
            yield f"imports {name}", node
        if top == "random" and name not in {"random", "random.Random"}:
            yield f"imports {name}", node
    for expr in ast.walk(module):
        if isinstance(expr, ast.Attribute) and isinstance(expr.value, ast.Name) and expr.value.id == "random":
            if expr.attr != "Random":
                yield f"uses random.{expr.attr}", expr
        elif isinstance(expr, ast.Call) and isinstance(expr.func, ast.Name) and expr.func.id in IMPURE_CALLS:
            yield f"calls {expr.func.id}()", expr


def long_functions(module: ast.Module) -> Iterator[tuple[str, Function]]:
    for node in ast.walk(module):
        if isinstance(node, Function) and node.end_lineno and node.end_lineno - node.lineno >= FUNCTION_LINES_MAX:
            yield f"{node.name} has {node.end_lineno - node.lineno + 1} lines", node


def undocumented(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Public functions, classes and methods without a docstring; overloads and setters need none."""
    for node in body:
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        decorators = {ast.unparse(d) for d in node.decorator_list}
        if not ast.get_docstring(node) and not any(d.endswith(("overload", ".setter", "override")) for d in decorators):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            yield from undocumented(node.body)


def family(module_name: str) -> str:
    """``policies.routing.load`` -> ``routing``; the package itself has none."""
    return module_name.partition(".")[2].partition(".")[0]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def policy_imports() -> dict[str, set[str]]:
    """Module of policies/ -> the modules of policies/ it imports."""
    known = {module_name(p) for p in sources("policies")}
    return {
        module_name(path): {name for name, _ in imports(tree(path)) if name in known} - {module_name(path)}
        for path in sources("policies")
    }


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Some cycle as a list that starts and ends with the same node; empty when there is none."""
    done: set[str] = set()

    def visit(node: str, trail: list[str]) -> list[str]:
        if node in trail:
            return [*trail[trail.index(node) :], node]
        if node not in done:
            for successor in sorted(graph.get(node, ())):
                if cycle := visit(successor, [*trail, node]):
                    return cycle
            done.add(node)
        return []

    return next((cycle for node in sorted(graph) if (cycle := visit(node, []))), [])


# --- the rules --------------------------------------------------------------------------------------------------------


def test_files_are_short() -> None:
    lengths = {where(p): len(p.read_text(encoding="utf-8").splitlines()) for p in sources(*PRODUCT, "tests")}
    assert {name: n for name, n in lengths.items() if n > FILE_LINES_MAX} == {}


def test_functions_are_short() -> None:
    found = [f"{where(p, node)} {what}" for p in sources(*PRODUCT, "tests") for what, node in long_functions(tree(p))]
    assert found == []


def test_decisions_are_pure() -> None:
    assert [f"{where(p, node)} {what}" for p in sources(*PURE) for what, node in impurities(tree(p))] == []


def test_modules_say_what_they_do() -> None:
    assert [where(p) for p in sources(*PRODUCT) if not ast.get_docstring(tree(p))] == []


def test_public_names_are_documented() -> None:
    found = [f"{where(p, node)} {name}" for p in sources(*PRODUCT) for name, node in undocumented(tree(p).body)]
    assert found == []


def test_folders_explain_themselves() -> None:
    folders = {p.parent for p in sources(*PRODUCT)} | {ROOT, ROOT / "tests"}
    assert sorted(where(f) for f in folders if not (f / "README.md").is_file()) == []


def test_nothing_changes_module_globals() -> None:
    found = [where(p, n) for p in sources(*PRODUCT) for n in ast.walk(tree(p)) if isinstance(n, ast.Global)]
    assert found == []


def test_policies_have_no_import_cycle() -> None:
    assert find_cycle(policy_imports()) == []


def test_policy_families_have_no_import_cycle() -> None:
    families: dict[str, set[str]] = {}
    for importer, imported in policy_imports().items():
        families.setdefault(family(importer), set()).update(family(name) for name in imported)
    assert find_cycle({name: reached - {name} for name, reached in families.items()}) == []


def test_every_policy_family_is_under_the_independence_contract() -> None:
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    independent = next(c["modules"] for c in linter["contracts"] if c["type"] == "independence")
    families = {family(module_name(p)) for p in sources("policies")} - {""} - SHARED - JOINERS
    assert sorted(independent) == sorted(f"policies.{name}" for name in families)


def test_import_contracts_hold(capsys: pytest.CaptureFixture[str]) -> None:
    exit_status = lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True, no_logo=True)
    assert exit_status == 0, capsys.readouterr().out


# --- the rules can fail -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "import os.path",
        "from os import environ",
        "import ray",
        "from vllm.config import X",
        "import numpy as np",
        "def f():\n    import asyncio",
        "from random import choice",
        "import random\nrandom.random()",
        "import random\nf = random.shuffle",
        "open('x')",
        "from deployments import settings",
    ],
)
def test_impure_source_is_found(source: str) -> None:
    assert list(impurities(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "import random\nrng = random.Random(1)\nrng.random()",
        "from random import Random",
        "from __future__ import annotations\nimport math\nfrom policies.types import Plan",
    ],
)
def test_pure_source_is_let_through(source: str) -> None:
    assert list(impurities(ast.parse(source))) == []


def test_long_function_is_found_at_the_limit() -> None:
    fits = "def f():\n" + "    x = 1\n" * (FUNCTION_LINES_MAX - 1)
    assert list(long_functions(ast.parse(fits))) == []
    assert list(long_functions(ast.parse(fits + "    x = 1\n")))


def test_missing_docstrings_are_found() -> None:
    source = 'def f(): ...\ndef _g(): ...\nclass C:\n    """Text."""\n    def m(self): ...\n    def _n(self): ...\n'
    assert [name for name, _ in undocumented(ast.parse(source).body)] == ["f", "m"]


def test_cycle_is_found() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
