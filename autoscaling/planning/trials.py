"""Trying fleets by simulation: on the hardest windows of a load, or on all of it with every seed; each run once.

A trial on windows holds when each window does, one on the whole load when each seed does; the first that does not ends
it. Runs are counted against a limit, and a wish to stop ends the search between two looks of the run at hand.

What this must not do: choose what to try.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from autoscaling.planning.fleets import Candidate, Goal, Work
from autoscaling.planning.judge import Broken, Scene, Verdict, judge
from autoscaling.planning.load import LoadFigures, Window, faster, part_of
from autoscaling.simulator.records import RunResult
from autoscaling.simulator.spec import EngineProfile, NetworkSpec, Scenario, SourceFactory
from autoscaling.simulator.world import run
from policies.config import PolicyConfig

Scope: TypeAlias = Literal["windows", "whole"]

GATEWAYS_MIN = 2
GATEWAY_ROOM = 2.0
"""Gateways are planned for this multiple of the requests and tokens open in the hardest minute."""


@dataclass(frozen=True, slots=True)
class Task:
    """What to plan for."""

    name: str
    factory: SourceFactory
    profiles: tuple[EngineProfile, ...]
    goal: Goal
    config: PolicyConfig
    seeds: tuple[int, ...] = (1,)
    gateways: int | None = None
    """``None``: as many as keep their own limits out of the way."""
    replicas_max: int = 1_000
    divided: bool = True
    """Fleets with prefill and decode replicas are tried as well."""
    autoscaled: bool = True
    runs_max: int = 200
    network: NetworkSpec = field(default_factory=NetworkSpec)


@dataclass(frozen=True, slots=True)
class Trial:
    """One fleet, tried."""

    candidate: Candidate
    scope: Scope
    verdicts: tuple[Verdict, ...]
    """Of the windows or seeds run; only the last may not hold."""
    speed: float = 1.0

    @property
    def holds(self) -> bool:
        """Whether it held everywhere."""
        return all(v.holds for v in self.verdicts)

    @property
    def worst(self) -> Verdict:
        """The verdict that does not hold, else the one with the lowest attainment."""
        return min(self.verdicts, key=lambda v: (v.holds, v.attainment))

    @property
    def broken(self) -> tuple[Broken, ...]:
        """What it did not hold."""
        return self.worst.broken

    @property
    def usd_per_hour(self) -> float:
        """What it costs: by its number where that is fixed, as simulated where it moves."""
        if self.candidate.mode == "static":
            return self.candidate.usd_per_hour
        return sum(v.usd_per_hour for v in self.verdicts) / len(self.verdicts)


class SearchEndedError(Exception):
    """The search ends before it is done; the words say why."""


class Trials:
    """Runs trials and remembers them."""

    def __init__(
        self,
        task: Task,
        load: LoadFigures,
        works: Mapping[str, Work],
        tell: Callable[[str], None],
        stop: Callable[[], bool],
    ) -> None:
        self.task, self.load = task, load
        self.done: list[Trial] = []
        """In order of trying."""
        self.runs = 0
        self.gateways = task.gateways or gateways_for(load, task)
        self.kept: dict[Candidate, RunResult] = {}
        """The first seed's run of the last fleet that held the whole load."""
        self._works, self._tell, self._stop = works, tell, stop
        self._tried: set[tuple[Candidate, Scope]] = set()
        self._verdicts: dict[tuple[Candidate, Window | None, int, float], Verdict] = {}

    def try_(self, candidate: Candidate, scope: Scope, speed: float = 1.0) -> Trial:
        """Try ``candidate``; a speed above 1 asks for that much more load, with the first seed alone.

        Raises:
            SearchEndedError: somebody asked to stop, or no more runs are allowed.
        """
        if not self.windows(candidate.profile) and len(self.task.seeds) == 1:
            scope = "whole"
        verdicts = []
        for window, seed in self._parts(candidate, scope, speed):
            verdicts.append(self._verdict(candidate, window, seed, speed))
            if not verdicts[-1].holds:
                break
        trial = Trial(candidate, scope, tuple(verdicts), speed)
        if speed == 1.0 and (candidate, scope) not in self._tried:
            self._tried.add((candidate, scope))
            self.done.append(trial)
        return trial

    def _parts(self, candidate: Candidate, scope: Scope, speed: float) -> Sequence[tuple[Window | None, int]]:
        seeds = self.task.seeds
        windows = self.windows(candidate.profile)
        if scope == "windows" and windows:
            return [(window, seeds[0]) for window in windows]
        return [(None, seed) for seed in (seeds if scope == "whole" and speed == 1.0 else seeds[:1])]

    def windows(self, profile: EngineProfile) -> tuple[Window, ...]:
        """Hardest windows of the load for ``profile``; empty where it is run whole."""
        work = self._works[profile.name]
        return self.load.windows(work.prefill_ms, work.decode_ms)

    def _verdict(self, candidate: Candidate, window: Window | None, seed: int, speed: float) -> Verdict:
        key = (candidate, window, seed, speed)
        if key in self._verdicts:
            return self._verdicts[key]
        if self.runs >= self.task.runs_max:
            raise SearchEndedError(f"{self.task.runs_max} simulations were allowed and are used up")
        self.runs += 1
        where = f"{window.judged_s:,.0f}..{window.end_s:,.0f} s" if window else "the whole load"
        more = f", {speed:g} times the load" if speed > 1 else ""
        self._tell(f"{candidate.words()} on {where}, seed {seed}{more}")
        result = run(self._scenario(candidate, window, seed, speed), stop=self._stop)
        if self._stop():
            raise SearchEndedError("ended by the user")
        scene = Scene(candidate.profile, self._works[candidate.profile.name], self.task.network)
        if window is not None:
            scene = replace(scene, begin_s=window.begin_s, judged_s=window.judged_s)
        verdict = judge(result, self.task.goal, scene)
        self._verdicts[key] = verdict
        if window is None and speed == 1.0 and seed == self.task.seeds[0] and verdict.holds:
            self.kept[candidate] = result
        return verdict

    def _scenario(self, candidate: Candidate, window: Window | None, seed: int, speed: float) -> Scenario:
        task = self.task
        factory = part_of(task.factory, window) if window else task.factory
        return Scenario(
            name=candidate.words(), source=faster(factory, speed) if speed > 1 else factory, pools=candidate.pools(),
            seed=seed, config=candidate.config(task.config), gateways=self.gateways, network=task.network,
        )  # fmt: skip

    def keep_only(self, candidates: Iterator[Candidate]) -> None:
        """Forget the runs of all others."""
        wanted = list(candidates)
        self.kept = {c: r for c, r in self.kept.items() if c in wanted}


def gateways_for(load: LoadFigures, task: Task) -> int:
    """Gateways whose own limits stay out of the way in the hardest minute, were every request as slow as it may be."""
    objectives, limits = task.goal.objectives, task.config.admission
    begin_s, end_s = load.peak_s(1.0, 1.0, 60)
    rate_ps, _, _ = load.token_rates(begin_s, end_s)
    open_s = (objectives.ttft_ms + load.output_mean * objectives.itl_ms) / 1e3
    requests = rate_ps * open_s * GATEWAY_ROOM
    tokens = requests * (load.prompt_mean + max(load.output_mean, limits.output_tokens_estimate))
    needed = max(requests / limits.inflight_requests_max, tokens / limits.inflight_tokens_max)
    return max(GATEWAYS_MIN, -int(-needed // 1))
