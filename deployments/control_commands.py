"""``explain``, ``decisions``, ``conditions``, ``override``, ``shadow``: the control plane from a terminal.

They ask a gateway over HTTP (``--url``; the key from ``TIDEGATE_API_KEY`` or ``--key-file``, never from the command
line). ``explain`` and ``decisions`` also read the ledger's files (``--ledger``), for when nothing is up any more. With
``--json`` each prints what the API answered. A failure is one line and exit code 1.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from autoscaling.simulator.recorded import RecordingError
from deployments import explain as words
from deployments.control_client import ControlClient, ControlError
from deployments.control_ledger import Wanted, read_ledger
from deployments.errors import GatewayError
from deployments.progress import Progress
from deployments.settings import api_key
from policies.steering import Knob

FOLLOW_S = 1.0
"""Time between two looks of ``decisions --follow``."""
PAGE = 1_000
_SPAN_HELP = "such as 90s, 15m, 2h or 1d"

override_cli = typer.Typer(
    help="Values set by hand: they win over every decision until they end.", no_args_is_help=True
)
shadow_cli = typer.Typer(help="Shadow mode: decide and write down, but change nothing.", no_args_is_help=True)

UrlOption = Annotated[str, typer.Option("--url", help="The gateway.")]
KeyFileOption = Annotated[
    Path | None, typer.Option("--key-file", help="File whose first line is the API key; else TIDEGATE_API_KEY.")
]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="Of an application that serves several; else its first one.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
LedgerOption = Annotated[
    Path | None, typer.Option("--ledger", help="Read the ledger's files in this folder instead of asking the gateway.")
]
LeverOption = Annotated[str | None, typer.Option(help="Only this lever: affinity, batch, ..., guard.")]
TargetOption = Annotated[str | None, typer.Option(help="Only this replica or model.")]
SinceOption = Annotated[str | None, typer.Option(help=f"Only those so long ago or later, {_SPAN_HELP}; or a time.")]
ForOption = Annotated[str, typer.Option("--for", help=f"How long it lasts, {_SPAN_HELP}.")]
WhyOption = Annotated[str | None, typer.Option(help="Why; it is shown to everybody who looks.")]
KnobArgument = Annotated[str, typer.Argument(metavar="KNOB", help=f"One of {', '.join(Knob)}.")]
URL = "http://127.0.0.1:8000"


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn what goes wrong into one line and exit code 1."""
    try:
        yield
    except (ControlError, RecordingError) as error:
        Progress().fail(str(error))
        raise typer.Exit(1) from None
    except GatewayError as error:
        Progress().fail(error.message)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def client_of(url: str, key_file: Path | None, model: str | None = None) -> ControlClient:
    """A client of the gateway at ``url`` with the key of ``key_file``, else of the environment, about ``model``."""
    if key_file is None:
        return ControlClient(url, api_key(), model)
    try:
        lines = key_file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ControlError(f"{key_file}: cannot be read: {getattr(error, 'strerror', None) or 'is not text'}") from None
    if not lines or not lines[0].strip():
        raise ControlError(f"{key_file}: its first line must be the API key")
    return ControlClient(url, lines[0].strip(), model)


def _print(value: Any, as_json: bool, lines: Callable[[], Sequence[str]]) -> None:
    if as_json:
        typer.echo(json.dumps(value, indent=2))
        return
    for line in lines():
        typer.echo(line)


# --- decisions --------------------------------------------------------------------------------------------------------


def explain(
    which: Annotated[str, typer.Argument(metavar="[N|last]", help="Number of a decision, or last.")] = "last",
    since: SinceOption = None,
    lever: LeverOption = None,
    target: TargetOption = None,
    ledger: LedgerOption = None,
    url: UrlOption = URL,
    key_file: KeyFileOption = None,
    model: ModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a decision changed, why, what else was considered, what was predicted and what happened."""
    with one_line_errors():
        wanted = Wanted(lever, target, since)
        fetch = _source(ledger, url, key_file, model)
        if which != "last" and not (which.isascii() and which.isdigit()):
            raise ControlError(f"{which!r}: give the number of a decision, or last; `decisions` lists them")
        if which != "last":
            number = int(which)
            found = [entry for entry in fetch(1, max(0, number - 1), Wanted()) if entry["seq"] == number]
            if not found:
                raise ControlError(f"there is no decision #{number}: too old, or not made yet; `decisions` lists them")
        else:
            found = fetch(1 if since is None else PAGE, None, wanted)
        now_s = time.time()
        empty = "no decision was made" + ("" if since is None else f" since {since}") + ": the fleet was steady"
        _print(found, as_json, lambda: ["\n\n".join(words.explain(e, now_s) for e in found) or empty])


def decisions(
    limit: Annotated[int, typer.Option(min=1, max=PAGE, help="The newest so many.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new ones until Ctrl-C.")] = False,
    since: SinceOption = None,
    lever: LeverOption = None,
    target: TargetOption = None,
    ledger: LedgerOption = None,
    url: UrlOption = URL,
    key_file: KeyFileOption = None,
    model: ModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """List decisions, oldest first, one line each; with --json --follow one object a line."""
    with one_line_errors():
        if follow and ledger is not None:
            raise ControlError("--follow asks the gateway; it does not go with --ledger")
        fetch, wanted = _source(ledger, url, key_file, model), Wanted(lever, target, since)
        found = fetch(limit, None, wanted)
        if not follow:
            _print(found, as_json, lambda: [words.headline(e) for e in found] or ["no decisions: the fleet was steady"])
            return
        _follow(fetch, found, Wanted(lever, target), as_json)


def _follow(fetch: Fetch, found: list[dict[str, Any]], wanted: Wanted, as_json: bool) -> None:
    """Print ``found`` and whatever comes. A new life of the controller counts from 1 again: it is told and followed."""
    epoch, seq = "", 0
    while True:
        for entry in found:
            if epoch and entry["epoch"] != epoch:
                typer.echo("a new controller took over: its decisions count from 1", err=True)
            epoch, seq = entry["epoch"], entry["seq"]
            typer.echo(json.dumps(entry) if as_json else words.headline(entry))
        time.sleep(FOLLOW_S)
        try:
            newest = fetch(1, None, Wanted())
            if newest and epoch and newest[-1]["epoch"] != epoch:
                seq = 0
            found = fetch(PAGE, seq, wanted)
        except ControlError as error:
            typer.echo(f"{error} Trying again.", err=True)
            found = []


Fetch = Callable[[int, int | None, Wanted], list[dict[str, Any]]]
"""Limit, number after which to begin, filter -> entries, oldest first."""


def _source(ledger: Path | None, url: str, key_file: Path | None, model: str | None) -> Fetch:
    """Where decisions come from: the ledger's files, or a gateway."""
    if ledger is not None:
        return lambda limit, since_seq, wanted: read_ledger(ledger, limit, since_seq, wanted, Progress().warn)
    client = client_of(url, key_file, model)

    def fetch(limit: int, since_seq: int | None, wanted: Wanted) -> list[dict[str, Any]]:
        query = {
            "limit": limit,
            "since_seq": since_seq,
            "lever": wanted.lever,
            "target": wanted.target,
            "since": wanted.since,
        }
        found: list[dict[str, Any]] = client.get("/control/decisions", query)
        return found

    return fetch


def conditions(
    name: Annotated[str | None, typer.Argument(help="Only this one, in full.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Inactive ones as well.")] = False,
    url: UrlOption = URL,
    key_file: KeyFileOption = None,
    model: ModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what is wrong now: active conditions with figures and the next step."""
    with one_line_errors():
        rows = client_of(url, key_file, model).get("/control/conditions")["data"]
        if name is not None and name not in {row["name"] for row in rows}:
            raise ControlError(f"there is no condition {name!r}; there are: {', '.join(row['name'] for row in rows)}")
        chosen = [row for row in rows if row["name"] == name or (name is None and (everything or row["active"]))]
        none = f"no condition is active; {len(rows)} are watched (--all shows them)"
        _print(chosen, as_json, lambda: ["\n\n".join(words.explain_condition(row) for row in chosen) or none])


# --- overrides --------------------------------------------------------------------------------------------------------


@override_cli.command("set")
def override_set(
    knob: KnobArgument,
    value: Annotated[float, typer.Argument(metavar="VALUE", help="What it shall stand at.")],
    target: Annotated[str | None, typer.Option(help="A replica's id; all of them when absent.")] = None,
    lasts: ForOption = "1h",
    why: WhyOption = None,
    url: UrlOption = URL,
    key_file: KeyFileOption = None,
    model: ModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Hold a knob at a value."""
    with one_line_errors():
        given: float | int = int(value) if value.is_integer() else value
        body = {"knob": knob, "value": given, "target": target, "expires_in_s": seconds_of(lasts), "why": why}
        held = client_of(url, key_file, model).post("/control/overrides", body)
        _print(held, as_json, lambda: [words.override_line(held), f"to take it back: override clear {held['id']}"])


@override_cli.command("list")
def override_list(
    url: UrlOption = URL, key_file: KeyFileOption = None, model: ModelOption = None, as_json: JsonOption = False
) -> None:
    """Show all overrides in force."""
    with one_line_errors():
        rows = client_of(url, key_file, model).get("/control/overrides")["data"]
        _print(rows, as_json, lambda: [words.override_line(row) for row in rows] or ["no override is in force"])


@override_cli.command("clear")
def override_clear(
    override_id: Annotated[str | None, typer.Argument(metavar="ID", help="Which one.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    url: UrlOption = URL,
    key_file: KeyFileOption = None,
    model: ModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take an override back: the control plane decides again."""
    with one_line_errors():
        if (override_id is None) is not everything:
            raise ControlError("give the id of one override (`override list` shows them), or --all")
        path = "/control/overrides" if override_id is None else f"/control/overrides/{override_id}"
        rows = client_of(url, key_file, model).delete(path)["data"]
        gone = "no override was in force"
        _print(rows, as_json, lambda: [f"taken back: {words.override_line(row)}" for row in rows] or [gone])


# --- shadow mode ------------------------------------------------------------------------------------------------------


@shadow_cli.command("on")
def shadow_on(
    knob: Annotated[str | None, typer.Argument(metavar="[KNOB]", help="Only this one; all when absent.")] = None,
    lasts: ForOption = "1h",
    why: WhyOption = None,
    url: UrlOption = URL,
    key_file: KeyFileOption = None,
    model: ModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Decide and write down, but change nothing any more."""
    _set_shadow({"shadow": True, "knob": knob, "why": why}, lasts, partial(client_of, url, key_file, model), as_json)


@shadow_cli.command("off")
def shadow_off(
    knob: Annotated[str | None, typer.Argument(metavar="[KNOB]", help="Only this one; all when absent.")] = None,
    lasts: ForOption = "1h",
    why: WhyOption = None,
    url: UrlOption = URL,
    key_file: KeyFileOption = None,
    model: ModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Act on decisions again; where the configuration says shadow, for as long as --for says."""
    _set_shadow({"shadow": False, "knob": knob, "why": why}, lasts, partial(client_of, url, key_file, model), as_json)


@shadow_cli.command("status")
def shadow_status(
    url: UrlOption = URL, key_file: KeyFileOption = None, model: ModelOption = None, as_json: JsonOption = False
) -> None:
    """Show for every knob whether decisions about it are acted on."""
    with one_line_errors():
        rows = client_of(url, key_file, model).get("/control/shadow")["data"]
        _print(rows, as_json, lambda: [words.shadow_line(row) for row in rows])


def _set_shadow(body: Mapping[str, Any], lasts: str, client: Callable[[], ControlClient], as_json: bool) -> None:
    with one_line_errors():
        rows = client().post("/control/shadow", {**body, "expires_in_s": seconds_of(lasts)})["data"]
        _print(rows, as_json, lambda: [words.shadow_line(row) for row in rows])


_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def seconds_of(text: str) -> float:
    """Seconds of ``90s``, ``15m``, ``2h`` or ``1d``. Raises :class:`ControlError`."""
    try:
        seconds = float(text[:-1]) * _UNITS[text[-1:]]
    except (ValueError, KeyError):
        raise ControlError(f"--for {text}: must be a length of time, {_SPAN_HELP}") from None
    return seconds


def register(cli: typer.Typer) -> None:
    """Add the commands to ``cli``."""
    for command in (explain, decisions, conditions):
        cli.command(command.__name__)(command)
    cli.add_typer(override_cli, name="override")
    cli.add_typer(shadow_cli, name="shadow")
