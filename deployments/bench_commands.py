"""``bench [NAME]``: the benchmarks of a source checkout, by name. Each is a program of its own, run as one.

Which there are, and what each prints, stands in the table of ``tests/bench/README.md``; nothing of ``tests`` is
imported.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from difflib import get_close_matches
from typing import Annotated

import typer

from deployments.control_commands import JsonOption
from deployments.launch import ROOT
from deployments.progress import Progress

TABLE = ROOT / "tests/bench/README.md"
_ROW = re.compile(r"^\| `python -m tests\.bench\.(\w+)` \| (.*) \|$", re.MULTILINE)


def bench(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME] [OPTIONS]...", help="Which; all are listed without.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List benchmarks, or run one; options behind its name are its own, and so is its exit code."""
    known = benches()
    if not known:
        Progress().fail(f"{TABLE.parent} is not here: benchmarks come with the source checkout, not with an image")
        raise typer.Exit(1)
    if name is None:
        _list(known, as_json)
    elif name not in known:
        near = get_close_matches(name, known, 1)
        Progress().fail(
            f"there is no benchmark '{name}'; {f'did you mean {near[0]!r}? ' if near else ''}`bench` lists them"
        )
        raise typer.Exit(2)
    else:
        command = [sys.executable, "-m", f"tests.bench.{name}", *context.args]
        raise typer.Exit(subprocess.run(command, cwd=ROOT, check=False).returncode)


def benches() -> dict[str, str]:
    """Names of the benchmarks and what each prints; empty where there is no source checkout."""
    return dict(_ROW.findall(TABLE.read_text(encoding="utf-8"))) if TABLE.is_file() else {}


def _list(known: dict[str, str], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(known, indent=2))
        return
    for name, what in known.items():
        typer.echo(f"{name:<16} {what}")


def register(cli: typer.Typer) -> None:
    """Add the command to ``cli``. Options it does not know belong to the benchmark."""
    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    cli.command("bench", context_settings=settings)(bench)
