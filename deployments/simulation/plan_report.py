"""A plan as text, JSON and pictures: the fleet, its margins, the runner-up, what broke below it, and what was tried."""

from __future__ import annotations

import math
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from autoscaling.planner import Plan, Trial, goal_text
from autoscaling.planning.judge import Broken
from autoscaling.planning.load import LoadFigures
from autoscaling.simulator.comparison import Json, finite, summary_json
from deployments.simulation import plots
from deployments.simulation.tables import number, print_table, share

HOURS_PER_MONTH = 730.0

TRIED_MAX = 40
"""Rows of what was tried on a terminal; JSON has all."""


# --- words ------------------------------------------------------------------------------------------------------------


def print_plan(console: Console, plan: Plan) -> None:
    """Print a plan."""
    console.print(escape(f"load       {plan.task.name}: {load_words(plan.load)}"), soft_wrap=True)
    console.print(escape(f"objectives {goal_text(plan.task.goal)}"), soft_wrap=True)
    if not plan.complete:
        what = "the best so far" if plan.best else "nothing that holds was found so far"
        console.print(f"[bold]not complete[/]: {escape(plan.why_incomplete)}; {what}", soft_wrap=True)
    console.print()
    if plan.best is None:
        _print_nothing(console, plan)
    else:
        _print_best(console, plan, plan.best)
    _print_kinds(console, plan)
    _print_tried(console, plan)


def load_words(load: LoadFigures) -> str:
    """Say what a load is like."""
    return (
        f"{load.requests:,} requests in {number(load.span_s)} s, prompts {number(load.prompt_mean)} tokens on average "
        f"(longest {max(load.prompt_tokens):,}), answers {number(load.output_mean)}; "
        f"at most {share(load.shared_share)} of the prompt tokens can be cached"
    )


def _print_nothing(console: Console, plan: Plan) -> None:
    if plan.impossible:
        console.print("[bold]impossible[/]: no number of these replicas holds the objectives", soft_wrap=True)
        for name, found in plan.out_of_reach:
            console.print(f"  {name}: {escape(found.text)}", soft_wrap=True)
        console.print(escape(f"closest: {closest_words(plan)}"), soft_wrap=True)
    elif plan.complete:
        console.print("[bold]nothing found[/]: no fleet within the limits holds the objectives", soft_wrap=True)
        for broken in (b for t in plan.trials[-1:] for b in t.broken):
            console.print(f"  last tried, {plan.trials[-1].candidate.words()}: {escape(broken_words(broken))}")
    console.print()


def closest_words(plan: Plan) -> str:
    """Say what could be asked for where nothing holds the goal."""
    words = []
    for objective, unit in (("TTFT", "ms"), ("ITL", "ms"), ("context", "tokens")):
        reachable = [(found.reachable, name) for name, found in plan.out_of_reach if found.objective == objective]
        if reachable:
            value, name = min(reachable)
            verb = "an engine that takes" if objective == "context" else f"{objective} of"
            words.append(f"{verb} {number(math.ceil(value * 100) / 100)} {unit} ({name})")
    return ", or ".join(words)


def _print_best(console: Console, plan: Plan, best: Trial) -> None:
    hours = best.usd_per_hour
    console.print(f"[bold]{escape(best.candidate.words())}[/]", soft_wrap=True)
    for label, text in _best_lines(plan, best, hours):
        console.print(f"  {label:<14}{escape(text)}", soft_wrap=True)
    console.print()


def _best_lines(plan: Plan, best: Trial, usd_per_hour: float) -> list[tuple[str, str]]:
    goal, worst = plan.task.goal, best.worst
    ttft, itl, attained = worst.margins(goal)
    lines = [
        ("cost", f"${usd_per_hour:.2f}/h, ${usd_per_hour * HOURS_PER_MONTH:,.0f} a month like this"),
        ("TTFT", f"{number(worst.ttft_ms)} ms at the quantile: {share(ttft)} of the limit is left"),
        ("gaps", f"{number(worst.itl_ms)} ms at the quantile: {share(itl)} of the limit is left"),
        ("kept", f"{share(worst.attainment)} of the requests, {attained * 100:+.1f} points over the goal"),
        ("takes", room_words(plan)),
        ("replicas", replicas_words(best)),
        ("gateways", f"{plan.gateways}"),
    ]
    if best.scope == "windows":
        lines.append(("checked", "on the hardest windows of the load only: the search ended before the rest"))
    if plan.runner_up is not None:
        dearer = plan.runner_up.usd_per_hour / usd_per_hour - 1
        lines.append(
            ("runner-up", f"{plan.runner_up.candidate.words()}, ${plan.runner_up.usd_per_hour:.2f}/h ({dearer:+.0%})")
        )
    if any(t is not None and t.candidate.divided for t in (best, plan.runner_up)):
        lines.append(("note", "divided fleets are simulated; the live system does not divide prefill and decode yet"))
    if plan.next_cheaper is None:
        lines.append(("next cheaper", "nothing cheaper was left to try"))
    else:
        below = plan.next_cheaper
        lines.append(("next cheaper", f"{below.candidate.words()}, ${below.usd_per_hour:.2f}/h, does not hold:"))
        lines += [("", broken_words(broken)) for broken in below.broken]
    return lines


def room_words(plan: Plan) -> str:
    """Say how much more load the best fleet takes."""
    held, broke = plan.room
    if math.isinf(broke) and held == 1.0:
        return "how much more load was not tried"
    least = "no more load was seen to hold" if held == 1.0 else f"{held:g} times the load"
    return f"{least}; {broke:g} times it does not hold" if math.isfinite(broke) else f"{least} and more"


def replicas_words(trial: Trial) -> str:
    """Say how many replicas there were over time."""
    pools = trial.worst.summary.pools
    if trial.candidate.mode == "static":
        return f"{trial.candidate.replicas} at all times"
    return (
        f"{trial.candidate.replicas_min} to {max(p.replicas_max for p in pools)}, {pools[0].replicas_mean:.1f} on "
        f"average, {pools[0].starts} starts, {pools[0].direction_changes} turns"
    )


def broken_words(broken: Broken) -> str:
    """Say what broke, when and why."""
    if broken.objective == "attainment":
        what = f"{share(broken.value)} of the requests kept the objectives, {share(broken.limit)} must"
    else:
        name = "gaps" if broken.objective == "ITL" else broken.objective
        what = f"{name} {number(broken.value)} ms at the quantile, limit {number(broken.limit)} ms"
    if broken.missed_share == 0:
        return f"{what}; {broken.cause}: {broken.text}"
    return (
        f"{what}; worst at {number(broken.at_s)} s ({share(broken.missed_share)} missed); {broken.cause}: {broken.text}"
    )


def _print_kinds(console: Console, plan: Plan) -> None:
    table = _table("kind", "result", "$/h", "", left=(0, 1, 3))
    for outcome in plan.outcomes:
        price = "-" if math.isnan(outcome.usd_per_hour) else f"{outcome.usd_per_hour:.2f}"
        table.add_row(escape(outcome.words), outcome.status, price, escape(outcome.text))
    print_table(console, table)
    console.print()


def _print_tried(console: Console, plan: Plan) -> None:
    console.print(f"tried, {plan.runs} simulations:", soft_wrap=True)
    table = _table("fleet", "on", "holds", "kept", "TTFT (ms)", "gaps (ms)", "$/h", "broke", left=(0, 1, 7))
    shown = sorted(plan.trials, key=lambda t: (t.usd_per_hour, t.candidate.words()))[:TRIED_MAX]
    for trial in shown:
        worst = trial.worst
        broke = ", ".join(f"{b.objective} ({b.cause})" for b in trial.broken)
        table.add_row(
            escape(trial.candidate.words()), trial.scope, "yes" if trial.holds else "no", share(worst.attainment),
            number(worst.ttft_ms), number(worst.itl_ms), f"{trial.usd_per_hour:.2f}", escape(broke),
        )  # fmt: skip
    print_table(console, table)
    if len(plan.trials) > len(shown):
        console.print(f"and {len(plan.trials) - len(shown)} dearer ones")


def _table(*names: str, left: tuple[int, ...]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for i, name in enumerate(names):
        table.add_column(name, justify="left" if i in left else "right", no_wrap=True)
    return table


# --- JSON -------------------------------------------------------------------------------------------------------------


def plan_json(plan: Plan) -> dict[str, Json]:
    """Return a plan as plain values with stable keys."""
    goal, load = plan.task.goal, plan.load
    held, broke = plan.room
    return {
        "command": "plan",
        "complete": plan.complete,
        "why_incomplete": plan.why_incomplete or None,
        "impossible": plan.impossible,
        "load": {
            "name": plan.task.name,
            "requests": load.requests,
            "span_s": load.span_s,
            "prompt_tokens_mean": load.prompt_mean,
            "output_tokens_mean": load.output_mean,
            "cacheable_share_max": load.shared_share,
        },
        "goal": {
            "ttft_ms": goal.objectives.ttft_ms,
            "itl_ms": goal.objectives.itl_ms,
            "quantile": goal.objectives.quantile,
            "attainment_share": goal.attainment,
        },
        "best": _trial_json(plan.best, plan) if plan.best else None,
        "load_room": {"holds": held if plan.best else None, "fails": finite(broke)},
        "runner_up": _trial_json(plan.runner_up, plan) if plan.runner_up else None,
        "next_cheaper": _trial_json(plan.next_cheaper, plan) if plan.next_cheaper else None,
        "out_of_reach": [
            {"profile": name, "objective": u.objective, "limit": u.limit, "reachable": u.reachable, "text": u.text}
            for name, u in plan.out_of_reach
        ],
        "kinds": [
            {"kind": o.words, "result": o.status, "usd_per_hour": finite(o.usd_per_hour), "text": o.text}
            for o in plan.outcomes
        ],
        "tried": [_trial_json(t, plan, brief=True) for t in plan.trials],
        "gateways": plan.gateways,
        "simulations": plan.runs,
    }


def _trial_json(trial: Trial, plan: Plan, *, brief: bool = False) -> dict[str, Json]:
    candidate, worst = trial.candidate, trial.worst
    ttft, itl, attained = worst.margins(plan.task.goal)
    content: dict[str, Json] = {
        "profile": candidate.profile.name,
        "gpu": candidate.profile.gpu,
        "mode": candidate.mode,
        "replicas": candidate.replicas,
        "replicas_min": candidate.replicas_min,
        "replicas_max": candidate.replicas_max,
        "prefill_replicas": candidate.prefill or None,
        "holds": trial.holds,
        "checked_on": trial.scope,
        "usd_per_hour": trial.usd_per_hour,
        "ttft_ms": finite(worst.ttft_ms),
        "itl_ms": finite(worst.itl_ms),
        "attainment_share": finite(worst.attainment),
        "margins": {"ttft_share": finite(ttft), "itl_share": finite(itl), "attainment_points": finite(attained)},
        "broken": [
            {
                "objective": b.objective,
                "limit": b.limit,
                "value": finite(b.value),
                "at_s": b.at_s,
                "missed_share": finite(b.missed_share),
                "cause": b.cause,
                "text": b.text,
            }
            for b in trial.broken
        ],
    }
    if not brief:
        content["run"] = summary_json(worst.summary)
    return content


# --- pictures ---------------------------------------------------------------------------------------------------------


def save_plan_plots(folder: Path, plan: Plan) -> list[Path]:
    """Draw the tried fleets, and the best one's run. Raises as ``plots.save_run_plots``."""
    written = [plots.save_figure(folder, "plan", plots.tried(list(plan.trials), plan.task.goal.attainment, plan.best))]
    if plan.best is not None and plan.best_run is not None:
        arm = plots.Arm(plan.best.candidate.words(), plan.best_run)
        written += plots.save_run_plots(folder, [arm], plan.task.goal.objectives)
    return written
