"""Capacity planner: the cheapest fleet that holds the objectives, found by simulating the live policies.

    measure the load                       autoscaling/planning/load.py
    what no such replica can hold          autoscaling/planning/fleets.py: said at once, with what could be held
    for each kind, cheapest guess first
        a kind whose lower bound costs more than the best so far is left out
        smallest number that holds         bracket around the guess, then bisection; on the hardest windows of a long
                                           load, then on all of it with every seed
    the same with a number that moves      smallest minimum that holds, the live scaler above it
    how much more load the best takes      ladder of faster arrivals

It assumes that a fleet which holds goes on holding with one replica more; the final check on the whole load catches
where a window misled. Deterministic: the same task gives the same plan. Every search is bounded by ``replicas_max``,
``runs_max``, and by the fleet's growth no longer helping.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from autoscaling.capacity import ceiling
from autoscaling.planning.fleets import Candidate, Goal, Kind, Unreachable, unreachable, work_of
from autoscaling.planning.load import LoadFigures, measure
from autoscaling.planning.trials import Scope, SearchEndedError, Task, Trial, Trials
from autoscaling.simulator.records import RunResult
from autoscaling.simulator.spec import EngineProfile

LADDER = (1.05, 1.1, 1.2, 1.3, 1.5, 2.0, 3.0)
"""Multiples of the load that the best fleet is tried with."""

HELP_MIN = 0.002
"""A fleet grown by half that gains less attainment than this is not helped by growing."""

RUNNER_UP_PRICE_MAX = 2.0
"""A runner-up is looked for up to this multiple of the best's price."""

AUTOSCALED_ROOM = 1.5
"""Most replicas of a fleet that moves, as a multiple of the static fleet that holds."""

SHIFTS_MAX = 2
"""Replicas moved between prefill and decode in search of a better division of one number."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one kind of fleet."""

    words: str
    status: str
    """``holds``, ``too dear``, ``out of reach``, ``not found``, ``not finished`` or ``not tried``."""
    usd_per_hour: float
    """Of its cheapest fleet that holds; NaN where there is none."""
    text: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer."""

    task: Task
    load: LoadFigures
    best: Trial | None
    """``None``: nothing that was tried holds."""
    room: tuple[float, float]
    """Multiples of the load: the largest that was tried and held, the smallest that did not (infinite: none)."""
    runner_up: Trial | None
    """Cheapest fleet of another kind that holds."""
    next_cheaper: Trial | None
    """Dearest fleet below the best's price that does not hold."""
    outcomes: tuple[Outcome, ...]
    trials: tuple[Trial, ...]
    out_of_reach: tuple[tuple[str, Unreachable], ...]
    """By profile."""
    gateways: int
    runs: int
    complete: bool
    why_incomplete: str
    best_run: RunResult | None
    """The best fleet's run of the whole load, first seed."""

    @property
    def impossible(self) -> bool:
        """Whether no fleet of any of the profiles can hold the goal."""
        return len(self.out_of_reach) == len(self.task.profiles)


def plan(
    task: Task, *, tell: Callable[[str], None] = lambda _text: None, stop: Callable[[], bool] = lambda: False
) -> Plan:
    """Find the cheapest fleet.

    Args:
        task: load, goal, profiles and limits of the search.
        tell: told what is tried next, with the best so far.
        stop: asked now and then; ``True`` ends the search with the best so far.

    Raises:
        LoadError: a load that cannot be planned for.
        LoadEndedError: ``stop`` said so before the load was known: there is no best yet.
        ValueError: no profile.
    """
    if not task.profiles:
        raise ValueError("a plan needs at least one profile")
    tell("reading the load")
    load = measure(task.factory, task.seeds[0], task.goal.objectives, stop)
    search = _Search(task, load, tell, stop)
    why = ""
    try:
        search.run()
    except SearchEndedError as error:
        why = str(error)
    return search.plan(why)


class _Search:
    """State of one search."""

    def __init__(self, task: Task, load: LoadFigures, tell: Callable[[str], None], stop: Callable[[], bool]) -> None:
        self._task, self._load, self._tell_user = task, load, tell
        self._works = {p.name: work_of(p, load, task.goal) for p in task.profiles}
        self._trials = Trials(task, load, self._works, self._tell, stop)
        self._out: list[tuple[str, Unreachable]] = []
        self._held: list[Trial] = []
        self._outcomes: dict[str, Outcome] = {}
        self._room = (1.0, math.inf)

    # --- the whole ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """All steps."""
        reachable = [p for p in self._task.profiles if not self._is_out(p)]
        kinds = [Kind(p, divided) for p in reachable for divided in ((False, True) if self._task.divided else (False,))]
        kinds.sort(key=lambda k: (self._guess(k) * k.profile.usd_per_hour, k.words()))
        for kind in kinds:
            self._outcomes[kind.words()] = Outcome(kind.words(), "not tried", math.nan, "the search ended before it")
        for kind in kinds:
            self._static(kind)
        if self._task.autoscaled:
            for profile in sorted(reachable, key=lambda p: (self._works[p.name].mean * p.usd_per_hour, p.name)):
                self._autoscaled(profile)
        if self._held:
            self._room = self._find_room(self._best())

    def plan(self, why_incomplete: str) -> Plan:
        """What was found."""
        best = self._so_far()
        others = [t for t in self._held if best and _sort_of(t) != _sort_of(best)]
        below = [t for t in self._trials.done if best and not t.holds and t.usd_per_hour < best.usd_per_hour]
        return Plan(
            task=self._task,
            load=self._load,
            best=best,
            room=self._room,
            runner_up=min(others, key=_cost) if others else None,
            next_cheaper=max(below, key=lambda t: (t.usd_per_hour, t.scope == "whole")) if below else None,
            outcomes=tuple(self._outcomes.values()),
            trials=tuple(self._trials.done),
            out_of_reach=tuple(self._out),
            gateways=self._trials.gateways,
            runs=self._trials.runs,
            complete=not why_incomplete,
            why_incomplete=why_incomplete,
            best_run=self._trials.kept.get(best.candidate) if best else None,
        )

    def _best(self) -> Trial:
        return min(self._held, key=_cost)

    def _so_far(self) -> Trial | None:
        """The cheapest that held the whole load, while there is none the cheapest that held its hardest windows."""
        held = [t for t in self._trials.done if t.holds]
        whole = [t for t in held if t.scope == "whole"]
        return min(whole or held, key=_cost, default=None)

    def _limit(self) -> float:
        """Dollars per hour from which nothing is of interest: the runner-up's, or so much above the best's."""
        if not self._held:
            return math.inf
        best = self._best()
        others = [t.usd_per_hour for t in self._held if _sort_of(t) != _sort_of(best)]
        return min(others, default=best.usd_per_hour * RUNNER_UP_PRICE_MAX)

    def _tell(self, text: str) -> None:
        best = self._so_far()
        words = f"best so far ${best.usd_per_hour:.2f}/h: {best.candidate.words()}" if best else "none holds yet"
        self._tell_user(f"{text} (simulation {self._trials.runs}; {words})")

    def _is_out(self, profile: EngineProfile) -> bool:
        found = unreachable(profile, self._load, self._task.goal, self._task.network)
        if found is not None:
            self._out.append((profile.name, found))
            self._outcomes[profile.name] = Outcome(profile.name, "out of reach", math.nan, found.text)
        return found is not None

    # --- a number that stays ------------------------------------------------------------------------------------------

    def _guess(self, kind: Kind) -> int:
        return max(2 if kind.divided else 1, self._works[kind.profile.name].guess)

    def _static(self, kind: Kind) -> None:
        work, price = self._works[kind.profile.name], kind.profile.usd_per_hour
        low = max(2 if kind.divided else 1, ceiling(work.bound))
        words = kind.words()
        if low * price >= self._limit():
            text = f"{low} replicas, the least that could do, cost ${low * price:.2f}/h"
            self._outcomes[words] = Outcome(words, "too dear", math.nan, text)
            return
        self._outcomes[words] = Outcome(words, "not finished", math.nan, "the search ended within it")
        make = self._divided if kind.divided else self._plain
        found = self._smallest(kind, make, low, self._guess(kind), "windows")
        if found is not None and found.usd_per_hour < self._limit():
            found = self._smallest(kind, make, low, found.candidate.replicas, "whole")
        if found is None:
            return
        self._outcomes[words] = Outcome(words, "holds", found.usd_per_hour, found.candidate.words())
        if found.scope == "whole":
            self._keep(found)

    def _keep(self, trial: Trial) -> None:
        self._held.append(trial)
        self._trials.keep_only(iter([self._best().candidate]))

    def _plain(self, kind: Kind, replicas: int, scope: Scope) -> Trial:
        return self._trials.try_(kind.static(replicas), scope)

    def _divided(self, kind: Kind, replicas: int, scope: Scope) -> Trial:
        """The best division of ``replicas``: by engine time first, then one more where it broke."""
        share = self._works[kind.profile.name].prefill_share
        prefill = min(replicas - 1, max(1, round(replicas * share)))
        best = self._trials.try_(kind.static(replicas, prefill), scope)
        step = 0
        for _ in range(SHIFTS_MAX):
            if best.holds:
                return best
            wanted = -1 if any(b.objective == "ITL" or b.cause == "decode" for b in best.broken) else 1
            prefill += wanted
            if wanted == -step or not 1 <= prefill < replicas:
                return best
            step = wanted
            other = self._trials.try_(kind.static(replicas, prefill), scope)
            if (other.holds, other.worst.attainment) <= (best.holds, best.worst.attainment):
                return best
            best = other
        return best

    def _smallest(
        self, kind: Kind, make: Callable[[Kind, int, Scope], Trial], low: int, guess: int, scope: Scope
    ) -> Trial | None:
        """The smallest number from ``low`` on that holds; ``None`` where none does below the best's price."""
        fails, holds = low - 1, None
        n, step = min(max(low, guess), self._task.replicas_max), 1
        before: Trial | None = None
        while holds is None:
            if n * kind.profile.usd_per_hour >= self._limit():
                self._give_up(kind, "too dear", f"{n} replicas cost ${n * kind.profile.usd_per_hour:.2f}/h")
                return None
            trial = make(kind, n, scope)
            if trial.holds:
                holds = trial
                break
            fails = n
            if before is not None and _helped_little(before, trial):
                self._give_up(kind, "not found", f"more than {before.candidate.replicas} replicas do not help")
                return None
            if n >= self._task.replicas_max:
                self._give_up(kind, "not found", f"{n} replicas, the most allowed, do not hold it")
                return None
            if before is None or n >= before.candidate.replicas * 1.5:
                before = trial
            n, step = min(n + step, self._task.replicas_max), step * 2
        return self._narrow(kind, make, fails, holds, scope)

    def _narrow(
        self, kind: Kind, make: Callable[[Kind, int, Scope], Trial], fails: int, holds: Trial, scope: Scope
    ) -> Trial:
        """Down from a number that holds: by one, two, four, then halves."""
        step = 1
        while (n := holds.candidate.replicas) - fails > 1:
            at = max(fails + 1, n - step) if step else (fails + n) // 2
            trial = make(kind, at, scope)
            if trial.holds:
                holds, step = trial, step * 2
            else:
                fails, step = at, 0
        return holds

    def _give_up(self, kind: Kind, status: str, text: str) -> None:
        self._outcomes[kind.words()] = Outcome(kind.words(), status, math.nan, text)

    # --- a number that moves ------------------------------------------------------------------------------------------

    def _autoscaled(self, profile: EngineProfile) -> None:
        kind = Kind(profile, False)
        words, work = f"{kind.words()}, autoscaled", self._works[profile.name]
        if max(1.0, work.mean) * profile.usd_per_hour >= self._limit():
            least = max(1.0, work.mean)
            text = f"{least:.1f} replicas, the least on average, cost ${least * profile.usd_per_hour:.2f}/h"
            self._outcomes[words] = Outcome(words, "too dear", math.nan, text)
            return
        static = [t.candidate.replicas for t in self._trials.done if t.holds and t.candidate.kind == kind]
        most = min(static, default=work.guess)
        found, fails, at_most = None, 0, most
        while at_most - fails > 1:
            at = (fails + at_most) // 2
            trial = self._trials.try_(self._moving(profile, at, most), "whole")
            if trial.holds:
                at_most, found = at, trial if found is None else min(found, trial, key=_cost)
            else:
                fails = at
        if found is None:
            self._outcomes[words] = Outcome(words, "not found", math.nan, f"no minimum below {most} holds")
            return
        self._outcomes[words] = Outcome(words, "holds", found.usd_per_hour, found.candidate.words())
        self._keep(found)

    def _moving(self, profile: EngineProfile, replicas_min: int, static: int) -> Candidate:
        most = min(self._task.replicas_max, math.ceil(static * AUTOSCALED_ROOM))
        work = self._works[profile.name]
        _, prompt_tps, output_tps = self._load.token_rates(0.0, min(60.0, self._load.span_s))
        busy = (prompt_tps * work.prefill_ms + output_tps * work.decode_ms) / 1e3
        start = max(replicas_min, min(static, math.ceil(busy / self._task.config.scaling.headroom)))
        return Candidate(profile, "autoscaled", start, replicas_min, most)

    # --- room ---------------------------------------------------------------------------------------------------------

    def _find_room(self, best: Trial) -> tuple[float, float]:
        """Bisection on :data:`LADDER`."""
        low, high = -1, len(LADDER)
        while high - low > 1:
            middle = (low + high) // 2
            if self._trials.try_(best.candidate, "whole", LADDER[middle]).holds:
                low = middle
            else:
                high = middle
            self._room = (LADDER[low] if low >= 0 else 1.0, LADDER[high] if high < len(LADDER) else math.inf)
        return self._room


def _helped_little(before: Trial, after: Trial) -> bool:
    grown = after.candidate.replicas >= before.candidate.replicas * 1.5
    return grown and after.worst.attainment - before.worst.attainment < HELP_MIN


def _cost(trial: Trial) -> tuple[float, int, str]:
    return trial.usd_per_hour, trial.candidate.replicas, trial.candidate.words()


def _sort_of(trial: Trial) -> tuple[str, bool, str]:
    return trial.candidate.profile.name, trial.candidate.divided, trial.candidate.mode


def goal_text(goal: Goal) -> str:
    """Say a goal in words."""
    limits, percent = goal.objectives, f"{goal.objectives.quantile * 100:g}"
    both = f"TTFT <= {limits.ttft_ms:g} ms and gaps <= {limits.itl_ms:g} ms at the {percent}th percentile"
    return f"{both}, {goal.attainment * 100:g} % of the requests within both"


__all__ = ["Goal", "Outcome", "Plan", "Task", "Trial", "goal_text", "plan"]
