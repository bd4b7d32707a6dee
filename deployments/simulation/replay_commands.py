"""``replay``: what a recording of the live system says, and what other policies or settings would have made of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from autoscaling.recommend import ReplicaScaler
from autoscaling.simulator.baselines.tables import ROUTERS, SCALERS, as_users_run_it, router_for_run
from autoscaling.simulator.comparison import Json, compare, comparison_json, summary_json
from autoscaling.simulator.recorded import Header, RecordingError, RequestLine
from autoscaling.simulator.records import RunResult
from autoscaling.simulator.replay import Lost, Replayed, Writer, differences, replay_decisions
from autoscaling.simulator.replay_traffic import (
    FleetHistory,
    RecordedSource,
    Traffic,
    answered_ns,
    history_of,
    profile_of,
    recorded_run,
    recorded_until_ns,
    replicas_at,
    traffic_of,
)
from autoscaling.simulator.report import Summary, summarise
from autoscaling.simulator.spec import EngineProfile, NetworkSpec, Pool, Scenario
from deployments.progress import Progress
from deployments.recording import code_digest
from deployments.scaling import decide
from deployments.simulation import tables
from deployments.simulation.choices import ChoiceError, chosen, policy_settings
from deployments.simulation.outputs import write_json
from deployments.simulation.profile_files import load_profile
from deployments.simulation.recordings import find_writers, read_writer
from deployments.simulation.running import progress_on_stderr, run_shown, stop_on_ctrl_c
from deployments.simulation.scenarios import LIVE
from policies.config import PolicyConfig
from policies.types import Decision

DIFFERENCES_SHOWN = 10
"""Differing ticks whose fields are printed."""
MOVES_SHOWN = 12
"""Changes of the number of replicas that are printed of each run."""


@dataclass(frozen=True, slots=True)
class Life:
    """What came of replaying one life of the controller."""

    name: str
    ticks: int
    decisions: int
    differing: int
    examples: tuple[str, ...]
    note: str
    """Why some or all of it could not be replayed; empty: all of it was."""

    def words(self) -> str:
        """One line for people."""
        if not self.ticks:
            return f"controller {self.name[:8]}: not replayed: {self.note or 'it never ticked'}"
        same = "byte for byte as recorded" if not self.differing else f"{self.differing} ticks come out otherwise"
        text = f"controller {self.name[:8]}: {self.ticks:,} ticks, {self.decisions} decisions: {same}"
        return f"{text} ({self.note})" if self.note else text


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
    seed: Annotated[int, typer.Option(min=0, help="Seed of the simulation.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures into this file as well.")] = None,
) -> None:
    """Replay a recording: check its decisions, simulate its traffic as recorded and with changes, print both."""
    progress, console = progress_on_stderr(), tables.console_for(Console(highlight=False))
    if router is not None:
        chosen("router", router, ROUTERS)
    if scaler is not None:
        chosen("scaler", scaler, SCALERS)
    warn = cache(progress.warn)  # files are read more than once, and a warning is told once
    writers = find_writers(recording, warn)
    newest = writers[-1].header.config
    asked = _Asked(
        policy_settings(config, changes or (), newest) if config or changes else None,
        router,
        scaler,
        load_profile(profile) if profile else None,
        ", ".join([*([str(config)] if config else []), *(changes or ())]),
    )
    lives = [w for w in writers if w.header.source == "controller"]
    fleet = None if decisions else load_recording(writers, seed, warn)
    engine = None if fleet is None else _engine(fleet, asked)
    content: dict[str, Json] = {"command": "replay", "recording": [str(path) for path in recording]}
    found = [_replay_life(life, asked if decisions else _Asked(), warn) for life in lives]
    _tell_decisions(console, lives, found, changed=decisions and asked.name != "")
    content["controllers"] = [
        {"name": f.name, "ticks": f.ticks, "decisions": f.decisions, "differing": f.differing, "note": f.note}
        for f in found
    ]
    if fleet is not None and engine is not None:
        content |= _replay_traffic(console, fleet, engine, asked, progress)
    if json_file is not None:
        write_json(json_file, content)
    same_code = all(life.header.code == code_digest() for life in lives)
    if any(f.differing for f in found) and same_code and not (decisions and asked.name):
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is to be other than recorded; ``None``: as recorded."""

    config: PolicyConfig | None = None
    router: str | None = None
    scaler: str | None = None
    profile: EngineProfile | None = None
    settings: str = ""

    @property
    def name(self) -> str:
        """All of it in words; empty: nothing."""
        parts = (self.router, self.scaler, self.settings, self.profile.name if self.profile else "")
        return " + ".join(part for part in parts if part)


# --- decisions --------------------------------------------------------------------------------------------------------


def _replay_life(life: Writer, asked: _Asked, warn: Callable[[str], None]) -> Life:
    name, ticks, made, differing = life.header.name, 0, 0, 0
    examples: list[str] = []
    if life.missing:
        return Life(name, 0, 0, 0, (), f"{life.missing}; raise recording.files_max or file_bytes_max to keep more")
    note = ""
    make_scaler = SCALERS[asked.scaler] if asked.scaler else ReplicaScaler
    if make_scaler is None:
        raise ChoiceError("--scaler fixed: decides nothing that could be replayed")
    for item in replay_decisions(read_writer(life, warn), asked.config, make_scaler):
        if isinstance(item, Lost):
            note = f"{item.lines} lines were lost at {item.file}:{item.number}: what follows cannot be replayed"
        elif isinstance(item, Replayed):
            ticks += 1
            made += len(item.recorded.decisions)
            if not item.equal:
                differing += 1
                if differing <= DIFFERENCES_SHOWN:
                    examples += map(str, differences(item.recorded, item.replayed))
    return Life(name, ticks, made, differing, tuple(examples), note)


def _tell_decisions(console: Console, lives: Sequence[Writer], found: Sequence[Life], *, changed: bool) -> None:
    code = code_digest()
    for life, replayed in zip(lives, found, strict=True):
        console.print(replayed.words(), markup=False, soft_wrap=True)
        for line in replayed.examples:
            console.print(f"  {line}", markup=False, soft_wrap=True)
        if replayed.differing and life.header.code != code and not changed:
            text = f"  recorded with other code ({life.header.code}, this is {code}): differences are to be expected"
            console.print(text, markup=False, soft_wrap=True)
    if not lives:
        console.print("no controller in the recording: no decisions to replay")


# --- traffic ----------------------------------------------------------------------------------------------------------


def _replay_traffic(
    console: Console, fleet: RecordedFleet, engine: EngineProfile, asked: _Asked, progress: Progress
) -> dict[str, Json]:
    traffic, history, header = fleet.traffic, fleet.history, fleet.header
    runs = [("recorded", recorded_run(traffic, history, engine), header.config)]
    scenarios = [fleet.scenario("simulated as recorded", engine)]
    if asked.name:
        name = f"simulated with {asked.name}"
        scenarios.append(fleet.scenario(name, asked.profile or engine, asked.config, asked.router, asked.scaler))
    with stop_on_ctrl_c() as stop:
        for scenario in scenarios:
            if not stop.asked:
                result = run_shown(scenario, scenario.name, progress, stop)
                runs.append((scenario.name, result, scenario.config))
    summaries = [summarise(result, header.config.objectives, name) for name, result, _ in runs]
    _tell_traffic(console, traffic, runs, summaries, history)
    return {
        "runs": [summary_json(summary) for summary in summaries],
        "comparison": comparison_json(compare([[summary] for summary in summaries])),
        "moves": [[move.plain() for move in moves_of(result, c, history, traffic)] for _, result, c in runs],
        "interrupted": stop.asked,
    }


def _engine(fleet: RecordedFleet, asked: _Asked) -> EngineProfile:
    """The engine as its replicas reported it; without a report the one that was named."""
    if asked.profile is not None and not fleet.history.reports:
        return asked.profile
    return profile_of(fleet.history, fleet.header.model)


@dataclass(frozen=True, slots=True)
class RecordedFleet:
    """A recorded load on the fleet that ran when it began."""

    traffic: Traffic
    history: FleetHistory
    header: Header
    """Of a gateway."""
    seed: int

    def scenario(
        self,
        name: str,
        profile: EngineProfile,
        config: PolicyConfig | None = None,
        router: str | None = None,
        scaler: str | None = None,
    ) -> Scenario:
        """Return it as a scenario, as recorded but for what is given.

        Clients' way to the gateway is left out, because recorded times are the gateways'.
        """
        header, config = self.header, config or self.header.config
        if router not in (None, LIVE):
            config = as_users_run_it(config)
        bounds = config.scaling
        running = replicas_at(self.history, self.traffic.start_unix_ns) or header.replicas
        running = max(bounds.replicas_min, min(bounds.replicas_max, running))
        make_scaler = SCALERS[scaler] if scaler else ReplicaScaler if bounds.enabled else None
        return Scenario(
            name=name,
            source=lambda _: RecordedSource(self.traffic, profile.block_tokens),
            pools=(Pool(profile, running, scaler=make_scaler),),
            seed=self.seed,
            config=config,
            gateways=header.gateways,
            router=router_for_run(router) if router else None,
            network=NetworkSpec(
                client_ms=0.0, report_period_ms=header.report_period_ms, drain_ms_max=header.drain_ms_max
            ),
            settle_ns=recorded_until_ns(self.traffic, self.history) - answered_ns(self.traffic),
            local_rule=decide,
        )


def load_recording(writers: Sequence[Writer], seed: int, warn: Callable[[str], None]) -> RecordedFleet:
    """Return the traffic of all gateways among ``writers`` and what the controllers knew.

    Raises:
        RecordingError, TraceError: no gateway among them, no request, or a wrong line.
    """
    gateways = [w for w in writers if w.header.source == "gateway"]
    if not gateways:
        raise RecordingError(", ".join(f for w in writers for f in w.files), None, "holds no gateway's traffic")
    traffic = traffic_of(
        (w.header, item.line) for w in gateways for item in read_writer(w, warn) if isinstance(item.line, RequestLine)
    )
    lives = [w for w in writers if w.header.source == "controller"]
    history = history_of((w.header, read_writer(w, warn)) for w in lives)
    return RecordedFleet(traffic, history, gateways[-1].header, seed)


# --- what moved -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Move:
    """A decision on the number of replicas."""

    at_s: float
    before: float | None
    after: float | None
    reason: str

    def plain(self) -> dict[str, Json]:
        """For JSON."""
        return {"at_s": self.at_s, "before": self.before, "after": self.after, "reason": self.reason}

    def __str__(self) -> str:
        return f"{self.at_s:.0f} s: {_count(self.before)} to {_count(self.after)} ({self.reason})"


def _count(value: float | None) -> str:
    return "?" if value is None else f"{value:g}"


def moves_of(result: RunResult, config: PolicyConfig, history: FleetHistory, traffic: Traffic) -> list[Move]:
    """Decisions that changed the number of replicas, in seconds since the start of the replay."""
    if result.scenario == "recorded":
        start = traffic.start_unix_ns
        timed = [((at - start) / 1e9, d) for at, d in history.decisions if 0 <= at - start <= result.end_ns]
    else:
        timed = [(d.tick * config.control.tick_ms / 1e3, d) for d in result.decisions]
    return [_move(at_s, d) for at_s, d in timed if d.lever == "replicas" and d.before != d.after]


def _move(at_s: float, decision: Decision) -> Move:
    before, after = (side.get("replicas_target") for side in (decision.before, decision.after))
    return Move(round(at_s, 3), before, after, decision.reason.code)


def _tell_traffic(
    console: Console,
    traffic: Traffic,
    runs: Sequence[tuple[str, RunResult, PolicyConfig]],
    summaries: Sequence[Summary],
    history: FleetHistory,
) -> None:
    left = f"; {traffic.left_out:,} requests that write no tokens are left out" if traffic.left_out else ""
    console.print(f"traffic: {len(traffic.arrivals):,} requests{left}", markup=False, soft_wrap=True)
    console.print()
    tables.print_comparison(console, compare([[summary] for summary in summaries]))
    console.print("replicas, by decision of the controller (seconds since the replay's start):")
    for name, result, config in runs:
        moves = moves_of(result, config, history, traffic)
        more = f", and {len(moves) - MOVES_SHOWN} more" if len(moves) > MOVES_SHOWN else ""
        told = ", ".join(str(move) for move in moves[:MOVES_SHOWN]) or "none"
        console.print(f"  {name}: {told}{more}", markup=False, soft_wrap=True)
