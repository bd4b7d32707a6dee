"""``sim``: simulate a load on a fleet with the live policies, beside others if asked, and print what it was worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from autoscaling.simulator.comparison import Json, compare, comparison_json, summary_json
from autoscaling.simulator.records import RunResult
from autoscaling.simulator.report import Summary, summarise
from autoscaling.simulator.spec import ClientSpec, Fault
from autoscaling.simulator.workload.trace import Options
from deployments.progress import Progress
from deployments.simulation import plots, tables
from deployments.simulation.choices import ChoiceError, fault_of, policy_settings, priced, prices_of
from deployments.simulation.loads import Load, load_of
from deployments.simulation.outputs import print_json, write_json
from deployments.simulation.profile_files import load_profile
from deployments.simulation.running import progress_on_stderr, run_shown, stop_on_ctrl_c
from deployments.simulation.scenarios import FIXED, LIVE, Arm, Fleet, arms_of, check_arms, fleet_of, scenario_of
from policies.config import ObjectivesConfig, PolicyConfig

DEFAULT_PROFILE = "h100-llama-3.1-8b-bf16"

LoadArgument = Annotated[
    str,
    typer.Argument(help="A trace file, or a generator such as poisson:rate=10,prompt=1000,output=200,duration=600."),
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="Take the policies' settings from this Serve configuration file.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Change a setting, e.g. scaling.headroom=0.7; may be repeated.")
]
PriceOption = Annotated[
    list[str] | None, typer.Option("--price", help="Dollars per GPU-hour, e.g. H100=2.5; may be repeated.")
]
TtftOption = Annotated[float | None, typer.Option("--ttft-ms", help="Objective: time to first token.")]
ItlOption = Annotated[float | None, typer.Option("--itl-ms", help="Objective: gap between tokens.")]
QuantileOption = Annotated[float | None, typer.Option("--quantile", help="Share of requests the objectives are for.")]
SeedOption = Annotated[list[int] | None, typer.Option("--seed", min=0, help="Seed; may be repeated. Default: 1.")]
ScaleOption = Annotated[float, typer.Option(help="Factor of the rate.")]
StartOption = Annotated[float, typer.Option(help="Skip what was recorded before this time, in seconds.")]
DurationOption = Annotated[float | None, typer.Option(help="Stop arrivals after this simulated time, in seconds.")]
LimitOption = Annotated[int | None, typer.Option(min=1, help="Stop after so many requests or sessions.")]
FormatOption = Annotated[str, typer.Option("--format", help="Format of the trace; auto looks at it.")]
LengthsOption = Annotated[
    str | None, typer.Option(help="For traces that hold rates only: PROMPT,OUTPUT in tokens, or FILE:CATEGORY.")
]
SpreadOption = Annotated[bool, typer.Option("--spread", help="Spread requests of one recorded time up to the next.")]
OutOption = Annotated[Path | None, typer.Option("--out", help="Folder for report.json and pictures.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@dataclass(slots=True)
class Finished:
    """What was run so far of one arm."""

    arm: Arm
    summaries: list[Summary]
    first: RunResult | None = None
    """The first seed's run, for pictures; the others are not kept."""


def sim(
    load: LoadArgument,
    profile: Annotated[str, typer.Option(help="Engine profile: a name or a file.")] = DEFAULT_PROFILE,
    replicas: Annotated[int | None, typer.Option(help="Replicas at the start; fixed without --min and --max.")] = None,
    low: Annotated[int | None, typer.Option("--min", help="Fewest replicas; 0: it may sleep.")] = None,
    high: Annotated[int | None, typer.Option("--max", help="Most replicas.")] = None,
    split: Annotated[str | None, typer.Option(help="PREFILL:DECODE replicas of a divided fleet, e.g. 2:1.")] = None,
    router: Annotated[str, typer.Option(help="Router: tidegate or a baseline, e.g. round_robin.")] = LIVE,
    scaler: Annotated[str | None, typer.Option(help="Scaler: tidegate or a baseline, e.g. hpa.")] = None,
    compare_names: Annotated[
        str | None, typer.Option("--compare", help="Arms side by side, e.g. tidegate,round_robin,power_of_two+hpa.")
    ] = None,
    seed: SeedOption = None,
    gateways: Annotated[int, typer.Option(min=1, max=10_000, help="Gateways.")] = 2,
    fault: Annotated[
        list[str] | None, typer.Option("--fault", help="KIND@SECONDS[:for=...,factor=...]; may be repeated.")
    ] = None,
    patience_s: Annotated[
        float | None, typer.Option(min=0.001, max=1e9, help="Clients leave without a first byte after so long.")
    ] = None,
    client_retries: Annotated[int, typer.Option(min=0, max=100, help="Times a client repeats.")] = 0,
    config: ConfigOption = None,
    changes: SetOption = None,
    price: PriceOption = None,
    ttft_ms: TtftOption = None,
    itl_ms: ItlOption = None,
    quantile: QuantileOption = None,
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
    """Simulate a load on a fleet with the live policies, beside others if asked; print latencies, cost and worth."""
    settings = policy_settings(config, [*(changes or ()), *objective_changes(ttft_ms, itl_ms, quantile)])
    engine = priced([load_profile(profile)], prices_of(price or ()))[0]
    fleet = fleet_of(
        engine, settings, replicas=replicas, low=low, high=high, split=split, settings_given=config is not None
    )
    moves = fleet.replicas_min < fleet.replicas_max
    arms = arms_of(compare_names, router, scaler or (LIVE if moves else FIXED))
    check_arms(arms, moves=moves)
    faults = [fault_of(text, fleet.largest) for text in fault or ()]
    options = Options(scale=scale, start_s=start, duration_s=duration, limit=limit)
    source = load_of(load, options, trace_format=trace_format, lengths=lengths, spread=spread)
    clients = ClientSpec(patience_ms=patience_s * 1e3 if patience_s else None, retries_max=client_retries)
    make_folder(out)
    plan = _Plan(source, fleet, arms, settings, seeds_of(seed), gateways, clients, faults)
    finished, interrupted = _run(plan, progress_on_stderr(), pictures=out is not None)
    _report(plan, finished, interrupted, out, as_json=as_json)
    if interrupted:
        raise typer.Exit(130)


def objective_changes(ttft_ms: float | None, itl_ms: float | None, quantile: float | None) -> list[str]:
    """Return the options for objectives as settings."""
    given = (("ttft_ms", ttft_ms), ("itl_ms", itl_ms), ("quantile", quantile))
    return [f"objectives.{key}={value!r}" for key, value in given if value is not None]


def seeds_of(seeds: Sequence[int] | None) -> list[int]:
    """Return the seeds asked for, 1 by default.

    Raises:
        ChoiceError: one is given twice.
    """
    found = list(seeds or [1])
    if len(set(found)) < len(found):
        raise ChoiceError("--seed: the same seed twice gives the same run twice")
    return found


def make_folder(out: Path | None) -> None:
    """Make the folder for what is written, now rather than after a long run.

    Raises:
        ChoiceError: it cannot be made.
    """
    if out is None:
        return
    if not out.name and out == Path():
        raise ChoiceError("--out: expected a folder; for this one write --out ./pictures or the like")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ChoiceError(f"--out {out}: {error.strerror or error}") from None


@dataclass(frozen=True, slots=True)
class _Plan:
    load: Load
    fleet: Fleet
    arms: list[Arm]
    config: PolicyConfig
    seeds: list[int]
    gateways: int
    clients: ClientSpec
    faults: list[Fault]


def _run(plan: _Plan, progress: Progress, *, pictures: bool) -> tuple[list[Finished], bool]:
    """Run every arm with every seed, seeds outermost so that a cut leaves arms that can be compared."""
    done = [Finished(arm, []) for arm in plan.arms]
    total = len(plan.seeds) * len(plan.arms)
    with stop_on_ctrl_c() as stop:
        for k, seed in enumerate(plan.seeds):
            for i, finished in enumerate(done):
                scenario = scenario_of(
                    plan.load, plan.fleet, finished.arm, plan.config, seed=seed, gateways=plan.gateways,
                    clients=plan.clients, faults=plan.faults,
                )  # fmt: skip
                count = f"{k * len(done) + i + 1}/{total} " if total > 1 else ""
                result = run_shown(scenario, f"{count}{finished.arm.name}, seed {seed}", progress, stop)
                finished.summaries.append(summarise(result, plan.config.objectives))
                if pictures and k == 0:
                    finished.first = result
                if stop.asked:
                    return [f for f in done if f.summaries], True
    return done, False


def _report(plan: _Plan, done: list[Finished], interrupted: bool, out: Path | None, *, as_json: bool) -> None:
    complete = [f.summaries for f in done]
    compared = compare(complete) if len(done) > 1 or len(plan.seeds) > 1 else ()
    content: dict[str, Json] = {
        "command": "sim",
        "load": plan.load.name,
        "fleet": plan.fleet.words(),
        "gateways": plan.gateways,
        "interrupted": interrupted,
        "runs": [summary_json(s) for f in done for s in f.summaries],
        "comparison": comparison_json(compared),
    }
    if as_json:
        print_json(content)
    else:
        _print(plan, done, interrupted)
    if out is not None:
        written = [write_json(out / "report.json", content)]
        written += _draw(out, done, plan.config.objectives)
        if len(done) > 1:
            written.append(plots.save_comparison_plot(out, compared))
        progress_on_stderr().say("written: " + ", ".join(str(path) for path in written))


def _draw(out: Path, done: list[Finished], objectives: ObjectivesConfig) -> list[Path]:
    drawn = [plots.Arm(f.arm.name, f.first) for f in done if f.first is not None]
    return plots.save_run_plots(out, drawn, objectives)


def _print(plan: _Plan, done: list[Finished], interrupted: bool) -> None:
    console = tables.console_for(Console(highlight=False, emoji=False))
    if interrupted:
        console.print("[bold]cut short by Ctrl-C[/]: the last run ended early, its open requests count as lost")
    where = f"{plan.load.name} on {plan.fleet.words()}, {plan.gateways} gateways"
    console.print(where, markup=False, soft_wrap=True)
    console.print()
    if len(done) == 1 or len(plan.seeds) == 1:
        for finished in done:
            tables.print_summary(console, finished.summaries[0])
            console.print()
    if len(done) > 1 or len(plan.seeds) > 1:
        tables.print_comparison(console, compare([f.summaries for f in done]))
