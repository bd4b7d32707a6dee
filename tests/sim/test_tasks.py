"""Tasks in whole runs: under overload the calls of a task go on while newcomers wait or are refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import merge
from random import Random
from statistics import mean

from autoscaling.simulator.checks import Checker
from autoscaling.simulator.records import Row
from autoscaling.simulator.spec import Pool, Scenario, SimRequest
from autoscaling.simulator.world import World
from policies.config import PolicyConfig, TasksConfig
from policies.tasks import TaskEnding
from tests.sim.worlds import SECOND, SLOW, Poisson

BEGIN_S = 10
CALLS = 15
AGENT = 1_000_000
"""Index of the agent's first call."""


class AgentInACrowd(Poisson):
    """Newcomers as :class:`Poisson` makes them, and one agent that makes a call when its last one is answered."""

    def __init__(self, rng: Random, rate_ps: float, seconds: float, named: bool) -> None:
        super().__init__(rng, rate_ps, seconds, output=20, families=10**6)
        blocks = tuple(range(8))
        self._call = SimRequest(AGENT, BEGIN_S * SECOND, 500, 20, blocks, 64, output_tokens_max=40)
        self._call = replace(self._call, task="agent", task_last=False, task_header=named)

    def arrivals(self) -> Iterator[SimRequest]:
        return merge(super().arrivals(), [self._call], key=lambda r: r.arrival_ns)

    def follow_ups(self, request: SimRequest, succeeded: bool, now_ns: int) -> Sequence[SimRequest]:
        made = request.index - AGENT + 1
        if request.task != "agent" or made == CALLS:
            return ()
        at_ns = now_ns + (SECOND // 10 if succeeded else SECOND)
        return [replace(request, index=request.index + 1, arrival_ns=at_ns, task_last=made + 1 == CALLS)]


class Run:
    """One run under the checker: newcomers for a minute, nearly twice what two replicas carry."""

    def __init__(self, named: bool, tasks: TasksConfig | None = None) -> None:
        scenario = Scenario(
            "tasks",
            lambda rng: AgentInACrowd(rng, 60, 60, named),
            (Pool(SLOW, 2),),
            seed=3,
            config=PolicyConfig(tasks=tasks or TasksConfig()),
            gateways=1,
        )
        checker = Checker(scenario)
        world = World(scenario, checker)
        checker.watch(world)
        result = world.run(None, lambda: False)
        rows = sorted(result.records, key=lambda row: row.index)
        self.agent = [row for row in rows if row.index >= AGENT]
        self.newcomers = [row for row in rows if row.index < AGENT]
        self.book = world.gateways[0].policies.flow_context.tasks

    def later(self) -> list[Row]:
        """The agent's calls after its first one that was let in: until then it is a newcomer itself."""
        first = next(i for i, row in enumerate(self.agent) if row.outcome != "refused")
        return self.agent[first + 1 :]

    def later_ttfts_ms(self) -> list[float]:
        """Of the later calls that were answered in the crowd."""
        end_ns = 60 * SECOND
        return [r.ttft_ms for r in self.later() if r.outcome == "succeeded" and r.arrival_ns < end_ns]


def refused(rows: list[Row]) -> int:
    return sum(row.outcome == "refused" for row in rows)


def test_calls_of_a_task_go_on_while_newcomers_are_refused() -> None:
    named, unnamed = Run(named=True), Run(named=False)
    assert refused(named.newcomers) > len(named.newcomers) / 3
    assert len(named.agent) == len(unnamed.agent) == CALLS
    assert refused(named.later()) == 0
    assert refused(unnamed.later()) > 0
    assert mean(named.later_ttfts_ms()) < 0.7 * mean(unnamed.later_ttfts_ms())
    assert named.book.open_calls == 0


def test_a_runaway_task_is_stopped_at_its_budget_and_nobody_else() -> None:
    run = Run(named=True, tasks=TasksConfig(calls_max=5))
    stopped = [row for row in run.agent if row.reason == "task_calls"]
    served = [row for row in run.agent if row.outcome == "succeeded"]
    assert len(served) == 5
    assert run.agent[-len(stopped) :] == stopped
    assert all(row.attempts == 0 for row in stopped)
    assert not any(row.reason.startswith("task_") for row in run.newcomers)
    run.book.expire(10**15)
    assert run.book.totals[TaskEnding.STOPPED].tasks == 1
