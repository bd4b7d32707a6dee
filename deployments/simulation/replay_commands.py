"""``replay``: what a recording of the live system says, and what would have happened with other policies or settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def replay(
    recording: Annotated[list[Path], typer.Argument(help="Folder of a recording, or some of its files.")],
    decisions: Annotated[
        bool, typer.Option("--decisions", help="Replay the controller's decisions only and compare them.")
    ] = False,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change a setting, e.g. scaling.replicas_max=4; may be repeated.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Take the settings of this Serve configuration file instead.")
    ] = None,
    router: Annotated[str | None, typer.Option(help="Route as this baseline does, e.g. round_robin.")] = None,
    scaler: Annotated[str | None, typer.Option(help="Scale as this baseline does, e.g. hpa.")] = None,
    profile: Annotated[
        str | None, typer.Option(help="Engine profile, a name or a file; default: learned from the recording.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the simulation.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures into this file as well.")] = None,
) -> None:
    """Replay a recording: check its decisions, simulate its traffic as recorded and with changes, print both."""
    raise NotImplementedError
