"""``doctor``: what is wrong with the configuration and this machine, or with what answers at ``--url``.

Exit code 0: nothing stands in the way, though there may be warnings. 1: an error was found. 2: a wrong command line.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from deployments import doctor as findings
from deployments import launch
from deployments.cluster import Ports
from deployments.command_errors import one_line_errors
from deployments.control_commands import JsonOption, KeyFileOption, client_of
from deployments.preflight import Finding, Level
from deployments.progress import Progress
from deployments.settings import SettingsError


def doctor(
    config: Annotated[Path, typer.Option("--config", help="Serve configuration file.")] = launch.ROOT
    / "serve_config.yaml",
    url: Annotated[
        str | None, typer.Option("--url", help="Look at the gateway there instead of at this machine.")
    ] = None,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what is wrong with configuration and machine, or with what runs at --url; start nothing, change nothing."""
    progress = Progress()
    with one_line_errors(progress):
        found = _of_machine(config) if url is None else findings.ask(client_of(url, key_file))
    _print(found, progress, as_json, "the machine is ready" if url is None else f"nothing is wrong at {url}")
    if any(finding.level is Level.ERROR for finding in found):
        raise typer.Exit(1)


def _of_machine(config: Path) -> list[Finding]:
    """A configuration that is wrong says nothing of what the machine must be: only it is told then."""
    run = list(findings.of_run(launch.RUN_FOLDER))
    try:
        plan = launch.read_plan(config, Ports())
    except SettingsError as error:
        return [*findings.configuration_findings(error), *run]
    return findings.without_own_ports([*run, *launch.findings_of(plan, config)])


def _print(found: Sequence[Finding], progress: Progress, as_json: bool, well: str) -> None:
    if as_json:
        typer.echo(json.dumps({"findings": [asdict(finding) for finding in found]}, indent=2))
        return
    for finding in found:
        say = {Level.ERROR: progress.fail, Level.WARNING: progress.warn, Level.NOTE: progress.note}[finding.level]
        say(finding.text)
    if not any(finding.level is Level.ERROR for finding in found):
        progress.say(well)


def register(cli: typer.Typer) -> None:
    """Add the command to ``cli``."""
    cli.command("doctor")(doctor)
