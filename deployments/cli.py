"""The command line ``tidegate``, which is ``python -m deployments.cli``. A failure is one line and an exit code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from deployments import (
    bench_commands,
    control_commands,
    dashboard_commands,
    doctor_commands,
    key_commands,
    launch,
    model,
    status_commands,
    tenant_commands,
)
from deployments.cluster import Ports, ServeApi
from deployments.command_errors import one_line_errors
from deployments.control_commands import JsonOption
from deployments.model import ModelError
from deployments.progress import Progress
from deployments.reload import reload_objectives
from deployments.simulation import commands
from deployments.simulation.running import progress_on_stderr

EXIT_CODES = "Exit codes: 0 done; 1 it failed, or a check found something; 2 wrong usage or input; 130 ended by Ctrl-C."

cli = typer.Typer(
    help="Start Tidegate, look at it, steer it, and find out what it would do.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

DEFAULTS = Ports()
CONFIG = launch.ROOT / "serve_config.yaml"

ConfigOption = Annotated[Path, typer.Option("--config", help="Serve configuration file.")]
DashboardPort = Annotated[int, typer.Option(help="Port of Ray's dashboard.")]
GcsPort = Annotated[int, typer.Option(help="Port of Ray's control store.")]
StatsPort = Annotated[int, typer.Option(help="Port of HAProxy's statistics.")]
MetricsPort = Annotated[int, typer.Option(help="Port of HAProxy's metrics.")]
FallbackPort = Annotated[int, typer.Option(help="Port of Serve's fallback proxy, HTTP.")]
FallbackGrpcPort = Annotated[int, typer.Option(help="Port of Serve's fallback proxy, gRPC.")]


@cli.command()
def up(
    config: ConfigOption = CONFIG,
    detach: Annotated[bool, typer.Option("--detach", help="Return when it is up; `down` ends it.")] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Return as soon as Serve has the configuration.")] = False,
    timeout_s: Annotated[float, typer.Option(min=1, help="Longest wait for the first answer, in seconds.")] = 600.0,
    dashboard_port: DashboardPort = DEFAULTS.dashboard,
    gcs_port: GcsPort = DEFAULTS.gcs,
    haproxy_stats_port: StatsPort = DEFAULTS.haproxy_stats,
    haproxy_metrics_port: MetricsPort = DEFAULTS.haproxy_metrics,
    fallback_port: FallbackPort = DEFAULTS.fallback_http,
    fallback_grpc_port: FallbackGrpcPort = DEFAULTS.fallback_grpc,
) -> None:
    """Start Ray, Serve and Tidegate on this machine and stay until Ctrl-C."""
    progress = Progress()
    ports = Ports(
        dashboard=dashboard_port,
        gcs=gcs_port,
        haproxy_stats=haproxy_stats_port,
        haproxy_metrics=haproxy_metrics_port,
        fallback_http=fallback_port,
        fallback_grpc=fallback_grpc_port,
    )
    with one_line_errors(progress):
        launch.up(config, ports, detach=detach or no_wait, wait=not no_wait, timeout_s=timeout_s, progress=progress)


@cli.command()
def down(as_json: JsonOption = False) -> None:
    """End everything that `up` started from this folder, and nothing else."""
    progress = progress_on_stderr() if as_json else Progress()
    with one_line_errors(progress):
        ended = launch.down(progress)
        words = "ended" if ended else "nothing to end: Tidegate was not started from this folder"
        _print({"ended": ended}, words, progress, as_json)


@cli.command("model")
def model_command(
    name: Annotated[str, typer.Argument(help="Bundled model.")] = next(iter(model.CATALOGUE)),
    verify: Annotated[bool, typer.Option("--verify", help="Compare every file with its checksum.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Fetch and convert a bundled model, once."""
    progress = progress_on_stderr() if as_json else Progress()
    with one_line_errors(progress):
        if name not in model.CATALOGUE:
            raise ModelError(f"{name!r} is not a bundled model; there are: {', '.join(model.CATALOGUE)}")
        if verify:
            folder = model.folder_of(name)
            if not model.is_intact(folder, model.CATALOGUE[name], full=True):
                raise ModelError(f"{folder} is absent or damaged; remove it and run: make model")
            _print({"model": name, "folder": str(folder)}, f"{folder} is intact", progress, as_json)
            return
        with launch.signals_as_interrupts(), progress.step(f"model {name}") as step:
            folder = model.ensure(name, step.note)
        _print({"model": name, "folder": str(folder)}, str(folder), progress, as_json)


@cli.command()
def reload(
    config: ConfigOption = CONFIG, dashboard_port: DashboardPort = DEFAULTS.dashboard, as_json: JsonOption = False
) -> None:
    """Take the objectives of the file's user_config into what runs; nothing restarts."""
    progress = Progress()
    with one_line_errors(progress):
        changed = reload_objectives(config, ServeApi(dashboard_port))
        words = (
            f"handed to {', '.join(changed)}; /control/state shows what is in force"
            if changed
            else "nothing to do: the running application has this user_config"
        )
        _print({"changed": changed}, words, progress, as_json)


doctor_commands.register(cli)


def _print(value: Mapping[str, Any], words: str, progress: Progress, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(value))
    else:
        progress.say(words)


def _tell_exit_codes(app: typer.Typer) -> None:
    """Every command's help ends with the exit codes."""
    app.info.epilog = EXIT_CODES
    for command in app.registered_commands:
        command.epilog = EXIT_CODES
    for group in app.registered_groups:
        group.epilog = EXIT_CODES
        if group.typer_instance is not None:
            _tell_exit_codes(group.typer_instance)


commands.register(cli)
key_commands.register(cli)
tenant_commands.register(cli)
control_commands.register(cli)
status_commands.register(cli)
dashboard_commands.register(cli)
bench_commands.register(cli)
_tell_exit_codes(cli)

if __name__ == "__main__":
    cli()
