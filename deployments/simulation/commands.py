"""The simulator's commands: ``sim``, ``plan``, ``replay``, ``fit``. Wrong input is one line and exit code 2."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer

from autoscaling.simulator.fit import FitError
from autoscaling.simulator.profile import ProfileError
from autoscaling.simulator.workload.trace import TraceError
from deployments.settings_errors import SettingsError
from deployments.simulation.choices import ChoiceError
from deployments.simulation.fit_commands import fit
from deployments.simulation.plan_commands import plan_command
from deployments.simulation.plots import PlotError
from deployments.simulation.replay_commands import replay
from deployments.simulation.running import progress_on_stderr
from deployments.simulation.sim_commands import sim

BAD_INPUT = (ChoiceError, SettingsError, TraceError, ProfileError, FitError, PlotError)
"""Errors whose words are for the user."""


@contextmanager
def words_for_errors() -> Iterator[None]:
    """Turn wrong input into words and exit code 2."""
    progress = progress_on_stderr()
    try:
        yield
    except BAD_INPUT as error:
        progress.fail(str(error))
        raise typer.Exit(2) from None
    except OSError as error:
        progress.fail(f"{error.filename or 'a file'}: {error.strerror or error}")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        progress.say("ended")
        raise typer.Exit(130) from None


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Return ``command`` with :func:`words_for_errors` around it."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        with words_for_errors():
            command(*args, **kwargs)

    return run


def register(cli: typer.Typer) -> None:
    """Add the simulator's commands to ``cli``."""
    for name, command in (("sim", sim), ("plan", plan_command), ("replay", replay), ("fit", fit)):
        cli.command(name)(guarded(command))
