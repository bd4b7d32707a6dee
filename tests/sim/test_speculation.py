"""Speculation under the whole control loop, simulated: the depth follows text and batch, and the plan carries it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from autoscaling.simulator.records import RunResult
from autoscaling.simulator.spec import EngineProfile, Pool, Scenario, SimRequest, StepLaw
from autoscaling.simulator.world import run
from policies.config import BatchingConfig, PolicyConfig, ScalingConfig
from policies.config_guard import SpeculationConfig
from tests.sim.worlds import PROFILE, SECOND, Watcher

DRAFTING = replace(PROFILE, law=StepLaw(8.0, 0.05, 0.02, 0.5), speculative_depth=4)
"""A draft token costs half a millisecond: verifying pays at batch 1 and does not at batch 16."""


@dataclass
class Streams:
    """``streams`` closed loops of long answers; the text of each is ``acceptance``'s at the time it begins."""

    rng: Random
    streams: int
    seconds: float
    changes: Sequence[tuple[float, float | None]]
    """(from second, acceptance)."""
    name: str = "streams"
    _next: int = field(default=0)

    def _request(self, at_ns: int) -> SimRequest:
        self._next += 1
        acceptance = next(a for at_s, a in reversed(self.changes) if at_ns >= at_s * SECOND)
        return SimRequest(self._next - 1, at_ns, 100, 400, draft_acceptance=acceptance)

    def arrivals(self) -> Iterator[SimRequest]:
        for i in range(self.streams):
            yield self._request(i * SECOND // 50)

    def follow_ups(self, request: SimRequest, succeeded: bool, now_ns: int) -> Sequence[SimRequest]:
        return [self._request(now_ns)] if now_ns < self.seconds * SECOND else []


def scenario(streams: int, seconds: float, changes: Sequence[tuple[float, float | None]], on: bool = True) -> Scenario:
    config = PolicyConfig(
        batching=BatchingConfig(enabled=False),
        scaling=ScalingConfig(enabled=False),
        speculation=SpeculationConfig(enabled=on),
    )
    return Scenario(
        "speculation", lambda rng: Streams(rng, streams, seconds, changes), (Pool(DRAFTING, 1),), seed=1, config=config,
        gateways=1,
    )  # fmt: skip


def depth_at(watcher: Watcher, second: float) -> int | None:
    """Depth in the last plan before ``second``."""
    plans = [r.plan for at_ns, _, r in watcher.ticks if at_ns <= second * SECOND]
    (knobs,) = plans[-1].knobs.values()
    return knobs.speculative_depth


def tokens(result: RunResult) -> int:
    """Tokens of answers that ended."""
    return 400 * result.counters["succeeded"]


def test_depth_follows_the_text_and_the_ledger_says_so() -> None:
    watcher = Watcher()
    run(scenario(1, 180, [(0, 0.95), (60, 0.0), (120, 0.95)]), observer=watcher)
    assert [depth_at(watcher, second) for second in (55, 115, 175)] == [4, 0, 4]
    moves = [d for _, _, r in watcher.ticks for d in r.decisions if d.lever == "speculation"]
    assert 2 <= len(moves) <= 6
    assert {"LessGoodput", "MoreGoodput"} <= {d.reason.code for d in moves}


def test_a_burst_brings_the_depth_down_within_two_ticks() -> None:
    watcher = Watcher()
    burst = scenario(1, 90, [(0, 0.6)])
    crowd = replace(burst, source=lambda rng: Crowd(rng, 1, 90, [(0, 0.6)]))
    run(crowd, observer=watcher)
    assert (depth_at(watcher, 59) or 0) > 0
    assert depth_at(watcher, 63) == 0


@dataclass
class Crowd(Streams):
    """One stream, and 31 more from the 60th second on."""

    def arrivals(self) -> Iterator[SimRequest]:
        yield from super().arrivals()
        for _ in range(31):
            yield self._request(60 * SECOND)


def test_what_speculation_brings_and_what_it_costs() -> None:
    repetitive, undraftable = [(0.0, 0.97)], [(0.0, 0.02)]
    off = replace(DRAFTING, speculative_depth=0)

    def done(changes: Sequence[tuple[float, float | None]], profile: EngineProfile) -> int:
        return tokens(run(replace(scenario(1, 200, changes), pools=(Pool(profile, 1),))))

    assert done(repetitive, DRAFTING) >= 2.5 * done(repetitive, off)
    assert done(undraftable, DRAFTING) >= 0.97 * done(undraftable, off)


def test_switched_off_the_start_up_depth_stays() -> None:
    watcher = Watcher()
    run(scenario(1, 20, [(0, 0.0)], on=False), observer=watcher)
    reports = [s.latest for _, _, r in watcher.ticks for s in r.signals.replicas]
    assert {r.knobs.speculative_depth for r in reports} == {4}
    assert {use.depth for r in reports for use in r.depth_use} == {4}
