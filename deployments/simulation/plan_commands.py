"""``plan``: the cheapest fleet that holds the objectives for a load, its margins, and what broke in cheaper ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console

from autoscaling.planner import Goal, Plan, Task, plan
from autoscaling.planning.load import LoadEndedError, LoadError
from autoscaling.simulator.spec import EngineProfile
from autoscaling.simulator.workload.trace import Options
from deployments.progress import Step
from deployments.simulation import plan_report, tables
from deployments.simulation.choices import ChoiceError, near, policy_settings, priced, prices_of
from deployments.simulation.loads import load_of
from deployments.simulation.outputs import print_json, write_json
from deployments.simulation.profile_files import load_profile, profile_names
from deployments.simulation.running import progress_on_stderr, stop_on_ctrl_c
from deployments.simulation.sim_commands import (
    ConfigOption,
    DurationOption,
    FormatOption,
    ItlOption,
    JsonOption,
    LengthsOption,
    LimitOption,
    LoadArgument,
    OutOption,
    PriceOption,
    QuantileOption,
    ScaleOption,
    SeedOption,
    SetOption,
    SpreadOption,
    StartOption,
    TtftOption,
    make_folder,
    objective_changes,
    seeds_of,
)
from policies.config import PolicyConfig

DEFAULT_MODEL = "Llama-3.1-8B"


def plan_command(
    load: LoadArgument,
    model: Annotated[str, typer.Option(help="Model: its profiles of all kinds of GPU are tried.")] = DEFAULT_MODEL,
    profile: Annotated[
        list[str] | None, typer.Option(help="Try this profile (name or file) instead; may be repeated.")
    ] = None,
    gpu: Annotated[list[str] | None, typer.Option(help="Only this kind of GPU, e.g. H100; may be repeated.")] = None,
    ttft_ms: TtftOption = None,
    itl_ms: ItlOption = None,
    quantile: QuantileOption = None,
    attainment: Annotated[
        float | None, typer.Option(help="Share of requests that must keep both. Default: the quantile.")
    ] = None,
    price: PriceOption = None,
    replicas_max: Annotated[int, typer.Option("--max-replicas", min=1, max=100_000, help="Largest fleet.")] = 1_000,
    runs_max: Annotated[int, typer.Option("--max-runs", min=1, help="Most simulations.")] = 200,
    no_divided: Annotated[bool, typer.Option("--no-split", help="No divided prefill and decode fleets.")] = False,
    no_autoscaled: Annotated[bool, typer.Option("--static", help="Only fleets whose number does not change.")] = False,
    gateways: Annotated[int | None, typer.Option(min=1, help="Gateways. Default: enough for their own limits.")] = None,
    seed: SeedOption = None,
    config: ConfigOption = None,
    changes: SetOption = None,
    scale: ScaleOption = 1.0,
    start: StartOption = 0.0,
    duration: DurationOption = None,
    limit: LimitOption = None,
    trace_format: FormatOption = "auto",
    lengths: LengthsOption = None,
    spread: SpreadOption = False,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the cheapest fleet that holds the objectives, by simulating the live policies."""
    settings = policy_settings(config, [*(changes or ()), *objective_changes(ttft_ms, itl_ms, quantile)])
    goal = goal_of(settings.objectives.quantile if attainment is None else attainment, settings)
    profiles = priced(profiles_of(profile, model, gpu), prices_of(price or ()))
    options = Options(scale=scale, start_s=start, duration_s=duration, limit=limit)
    source = load_of(load, options, trace_format=trace_format, lengths=lengths, spread=spread)
    make_folder(out)
    task = Task(
        source.name, source.factory, tuple(profiles), goal, settings, tuple(seeds_of(seed)), gateways, replicas_max,
        divided=not no_divided, autoscaled=not no_autoscaled, runs_max=runs_max,
    )  # fmt: skip
    found = search(task)
    content = plan_report.plan_json(found)
    if as_json:
        print_json(content)
    else:
        plan_report.print_plan(tables.console_for(Console(highlight=False, emoji=False)), found)
    if out is not None:
        written = [write_json(out / "plan.json", content), *plan_report.save_plan_plots(out, found)]
        progress_on_stderr().say("written: " + ", ".join(str(path) for path in written))
    raise typer.Exit(_exit_code(found))


def _exit_code(found: Plan) -> int:
    if found.best is None or not found.complete:
        return 130 if found.why_incomplete == "ended by the user" else 1
    return 0


def search(task: Task) -> Plan:
    """Plan with progress on standard error; Ctrl-C leaves the best so far.

    Raises:
        ChoiceError: the load cannot be planned for.
    """
    progress = progress_on_stderr()
    with stop_on_ctrl_c() as stop, progress.step("plan") as step:

        def tell(text: str) -> None:
            note(step, text)

        try:
            return plan(task, tell=tell, stop=stop)
        except LoadError as error:
            raise ChoiceError(f"{task.name}: {error}") from None
        except LoadEndedError:
            raise KeyboardInterrupt from None


def note(step: Step, text: str) -> None:
    """Say what is tried now."""
    step.note(text)


def goal_of(attainment: float, settings: PolicyConfig) -> Goal:
    """Return the goal.

    Raises:
        ChoiceError: an attainment that is none.
    """
    try:
        return Goal(settings.objectives, attainment)
    except ValueError as error:
        raise ChoiceError(f"--attainment: {error}") from None


def profiles_of(names: Sequence[str] | None, model: str, gpus: Sequence[str] | None) -> list[EngineProfile]:
    """Return the profiles asked for: by name, else all of the model; of these kinds of GPU.

    Raises:
        ChoiceError: there are none.
        ProfileError: a profile is wrong.
    """
    if names:
        found = [load_profile(name) for name in names]
    else:
        shipped = [load_profile(name) for name in profile_names()]
        found = [p for p in shipped if p.model.lower() == model.lower()]
        if not found:
            raise ChoiceError(f"--model {model}: no profile of it{near(model, sorted({p.model for p in shipped}))}")
    twice = sorted({p.name for p in found if sum(q.name == p.name for q in found) > 1})
    if twice:
        raise ChoiceError(f"--profile: {twice[0]} is given twice")
    kinds = sorted({p.gpu for p in found})
    for gpu in gpus or ():
        if gpu.upper() not in {kind.upper() for kind in kinds}:
            raise ChoiceError(f"--gpu {gpu}: no profile of it{near(gpu, kinds)}")
    wanted = {gpu.upper() for gpu in gpus or kinds}
    return [p for p in found if p.gpu.upper() in wanted]
