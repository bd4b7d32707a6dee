"""``tenants list`` and ``tenants show NAME``: usage, money and limits of tenants, all gateways together.

They ask a gateway over HTTP (``/control/tenants``), as ``control_commands.py`` does. A failure is one line and exit
code 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from deployments.control_client import ControlError
from deployments.control_commands import URL, JsonOption, KeyFileOption, UrlOption, client_of, one_line_errors
from deployments.explain import number
from deployments.simulation.tables import console_for

tenants_cli = typer.Typer(help="Tenants: what they used, what they may.", no_args_is_help=True)

Row = Mapping[str, Any]
NONE = "-"


@tenants_cli.command("list")
def list_tenants(url: UrlOption = URL, key_file: KeyFileOption = None, as_json: JsonOption = False) -> None:
    """Show every tenant in a line: requests, tokens, money, weight."""
    with one_line_errors():
        tenants = client_of(url, key_file).get("/control/tenants")["tenants"]
        if as_json:
            typer.echo(json.dumps(tenants, indent=2))
            return
        console_for(Console(markup=False, highlight=False, emoji=False)).print(_table(tenants))


@tenants_cli.command("show")
def show_tenant(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tenant.")],
    url: UrlOption = URL,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one tenant in full."""
    with one_line_errors():
        tenants = client_of(url, key_file).get("/control/tenants")["tenants"]
        if name not in tenants:
            raise ControlError(f"there is no tenant {name!r}; there are: {', '.join(tenants) or 'none yet'}")
        if as_json:
            typer.echo(json.dumps(tenants[name], indent=2))
            return
        for line in told(name, tenants[name]):
            typer.echo(line)


def _table(tenants: Mapping[str, Row]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    titles = ("tenant", "requests", "refused", "in flight", "prompt", "cached", "output", "spent USD", "budget USD")
    for title in (*titles, "weight", "class"):
        table.add_column(title, justify="left" if title in {"tenant", "class"} else "right")
    for name, row in tenants.items():
        used, budget, limits = row["usage"], row["budget"], row["limits"]
        most = limits["budget_usd_max"]
        counts = ("requests", "refused", "inflight_requests", "prompt_tokens", "cached_tokens", "output_tokens")
        table.add_row(
            name,
            *(number(used[field]) for field in counts),
            number(used["spent_usd"]),
            NONE if most is None else f"{number(0 if budget is None else budget['used_usd'])} of {number(most)}",
            number(limits["weight"]),
            limits["class_max"],
        )
    return table


def told(name: str, row: Row) -> Iterator[str]:
    """Lines on one tenant of ``/control/tenants``; limits that are not set are left out."""
    yield f"Tenant       {name}"
    for label, values in (("Used", row["usage"]), ("Budget", row["budget"]), ("Limits", row["limits"])):
        given = [(field, value) for field, value in (values or {}).items() if value is not None]
        for index, (field, value) in enumerate(given or [("none", "")]):
            yield f"{'' if index else label:<13}{field:<28}{number(value)}".rstrip()


def register(cli: typer.Typer) -> None:
    """Add the commands to ``cli``."""
    cli.add_typer(tenants_cli, name="tenants")
