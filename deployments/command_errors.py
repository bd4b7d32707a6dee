"""What goes wrong in a command, in one line and an exit code: 1 it failed, 2 wrong usage, 130 Ctrl-C."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from deployments import launch
from deployments.control_client import ControlError
from deployments.model import ModelError
from deployments.progress import Progress
from deployments.reload import ReloadError
from deployments.settings import SettingsError


@contextmanager
def one_line_errors(progress: Progress) -> Iterator[None]:
    """Turn whatever goes wrong into words and exit code 1; a traceback goes into ``.run/error.log``."""
    try:
        yield
    except (ControlError, SettingsError, ModelError, launch.StartError, ReloadError) as error:
        progress.fail(str(error))
        raise typer.Exit(1) from None
    except (launch.Interrupted, KeyboardInterrupt):
        progress.say("ended")
        raise typer.Exit(130) from None
    except typer.Exit:
        raise
    except Exception as error:  # noqa: BLE001 (the last resort of a command line)
        launch.RUN_FOLDER.mkdir(parents=True, exist_ok=True)
        (launch.RUN_FOLDER / "error.log").write_text(traceback.format_exc(), encoding="utf-8")
        progress.fail(f"unexpected: {type(error).__name__}: {error}; details are in .run/error.log, please report them")
        raise typer.Exit(1) from None
