"""A day without trouble: a load that rises and falls like a day's, on a fleet that follows it.

Small and slow engines and few requests, so that 24 hours are affordable: ticks and reports are the greater part of it.
Used by ``test_conditions.py`` (a short one) and by ``tests/bench/scenarios.py`` (a whole day).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from autoscaling.recommend import ReplicaScaler
from autoscaling.simulator.spec import Pool, Scenario, SimRequest, StepLaw
from autoscaling.simulator.world import run
from policies.config import PolicyConfig, ScalingConfig
from policies.control.levers import TARGET
from policies.control.loop import TickResult
from policies.control.moves import Move
from tests.sim.troubles import PROFILE as SLOW
from tests.sim.troubles import SECOND

PROFILE = replace(
    SLOW,
    name="small",
    law=StepLaw(60.0, 2.0, 0.2, 0.6, jitter_share=0.02),
    kv_tokens=30_000,
    source="made up: 200 prompt and 25 output tokens cost about 0.35 s of one engine",
)

WARM_UP_S = 60.0
"""The fleet finds its size; what is active then is not judged."""

SOLD_WITHIN_S = 120.0
"""A fleet that is called too large is made smaller within this time, or the alarm was false."""


BOUGHT_WITHIN_S = PROFILE.cold_start_ms / 1_000
"""Requests may wait for a replica that was asked for as long as it starts."""


class Day:
    """Poisson arrivals whose rate goes once around between ``low_ps`` and ``high_ps`` in ``day_s``."""

    name = "day"

    def __init__(self, rng: Random, seconds: float, day_s: float, low_ps: float, high_ps: float) -> None:
        self._rng, self._seconds, self._day_s, self._low_ps, self._high_ps = rng, seconds, day_s, low_ps, high_ps

    def rate_ps(self, at_s: float) -> float:
        """Requests per second at one time of the day, which begins at its lowest."""
        return self._low_ps + (self._high_ps - self._low_ps) * (1 - math.cos(2 * math.pi * at_s / self._day_s)) / 2

    def arrivals(self) -> Iterator[SimRequest]:
        """By thinning: candidates at the highest rate, each kept with the odds of its time."""
        at_s, index, rng = 0.0, 0, self._rng
        while True:
            at_s += rng.expovariate(self._high_ps)
            if at_s >= self._seconds:
                return
            if rng.random() * self._high_ps < self.rate_ps(at_s):
                prompt, output = round(200 * rng.uniform(0.5, 1.5)), round(25 * rng.uniform(0.5, 1.5))
                yield SimRequest(index, round(at_s * SECOND), prompt, output, output_tokens_max=60)
                index += 1

    def follow_ups(self, request: SimRequest, succeeded: bool, now_ns: int) -> Sequence[SimRequest]:
        """None."""
        return ()


@dataclass(slots=True)
class Alarm:
    """One time that a condition was active."""

    name: str
    begin_s: float
    end_s: float
    text: str
    sold: bool = False
    """The fleet was made smaller meanwhile or soon after."""
    bought: bool = False
    """It was made larger at that time."""

    @property
    def false(self) -> bool:
        """Nothing is wrong in this load, but for a fleet that grows or shrinks with it: one that is too large for it is
        made smaller, and where requests wait while a replica that was asked for starts, they do wait for it.
        """
        return not ((self.name == "over_provisioned" and self.sold) or (self.name == "cold_start_gap" and self.bought))


@dataclass(slots=True)
class Alarms:
    """Observer that keeps what was active, not every tick."""

    found: list[Alarm] = field(default_factory=list)
    replicas: set[int] = field(default_factory=set)
    ticks: int = 0
    told: Callable[[Alarm], None] = lambda alarm: None
    """Called with each alarm as it begins."""
    _bought_s: float = -math.inf
    _open: dict[str, Alarm] = field(default_factory=dict)

    def flow(self, *_: object) -> None: ...

    def engine(self, *_: object) -> None: ...

    def replica(self, *_: object) -> None: ...

    def end(self, *_: object) -> None: ...

    def tick(self, now_ns: int, pool: int, result: TickResult) -> None:
        at_s = now_ns / SECOND
        self.ticks += 1
        if at_s < WARM_UP_S:
            return
        self.replicas.add(len(result.signals.serving))
        for condition in result.conditions:
            alarm = self._open.get(condition.name)
            if condition.active and alarm is None:
                bought = at_s - self._bought_s <= BOUGHT_WITHIN_S
                alarm = self._open[condition.name] = Alarm(condition.name, at_s, at_s, condition.text, bought=bought)
                self.found.append(alarm)
                self.told(alarm)
            elif not condition.active and alarm is not None:
                alarm.end_s = at_s
                del self._open[condition.name]
        if any(_sells(move) for move in result.adaptation.moves):
            self._sold(at_s)
        if any(_buys(move) for move in result.adaptation.moves):
            self._bought_s = at_s

    def _sold(self, at_s: float) -> None:
        for alarm in self.found:
            if alarm.name in self._open or at_s - alarm.begin_s <= SOLD_WITHIN_S:
                alarm.sold = True

    def false(self) -> list[Alarm]:
        """Those that should not have been."""
        return [alarm for alarm in self.found if alarm.false]


def _sells(move: Move) -> bool:
    before, after = move.before.get(TARGET), move.after.get(TARGET)
    return before is not None and after is not None and after < before


def _buys(move: Move) -> bool:
    before, after = move.before.get(TARGET), move.after.get(TARGET)
    return before is not None and after is not None and after > before


def day(
    seed: int, seconds: float, day_s: float = 86_400.0, told: Callable[[Alarm], None] = lambda alarm: None
) -> tuple[Alarms, int]:
    """Run a day, or a part of it; the alarms and the number of requests. ``told`` is called as alarms begin."""
    scaling = ScalingConfig(replicas_min=1, replicas_max=6)
    scenario = Scenario(
        name="day",
        source=lambda rng: Day(rng, seconds, day_s, 0.4, 2.6),
        pools=(Pool(PROFILE, 2, scaler=ReplicaScaler),),
        seed=seed,
        config=PolicyConfig(scaling=scaling),
        gateways=1,
    )
    alarms = Alarms(told=told)
    result = run(scenario, observer=alarms)
    return alarms, result.counters["requests"]
