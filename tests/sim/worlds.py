"""Small worlds for tests: an engine profile, sources, scenarios."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from autoscaling.simulator.records import RunResult
from autoscaling.simulator.spec import EngineProfile, Pool, Scenario, SimRequest, StepLaw
from policies.control.loop import TickResult
from policies.events import Effect, Event, Finish

SECOND = 1_000_000_000

PROFILE = EngineProfile(
    name="test",
    gpu="none",
    gpus=2,
    model="m",
    law=StepLaw(8.0, 0.05, 0.02, 0.01),
    kv_tokens=100_000,
    context_tokens_max=8_192,
    cold_start_ms=10_000.0,
    usd_per_gpu_hour=3.0,
    source="made up for tests",
)

SLOW = replace(PROFILE, name="slow", law=StepLaw(60.0, 0.5, 0.2, 0.1))
"""A tenth as fast: a few requests are a load."""


class Poisson:
    """Open-loop arrivals at ``rate_ps`` for ``seconds``."""

    def __init__(
        self, rng: Random, rate_ps: float, seconds: float, prompt: int = 500, output: int = 50, families: int = 20
    ) -> None:
        self.name = "poisson"
        self._rng, self._rate_ps, self._seconds = rng, rate_ps, seconds
        self._prompt, self._output, self._families = prompt, output, families

    def arrivals(self) -> Iterator[SimRequest]:
        at_s, i, rng = 0.0, 0, self._rng
        while True:
            at_s += rng.expovariate(self._rate_ps)
            if at_s >= self._seconds:
                return
            prompt = rng.randint(1, 2 * self._prompt)
            family = rng.randrange(self._families)
            blocks = tuple(family * 1_000_000 + n + (i * 1_000 if n > 4 else 0) for n in range(prompt // 64))
            output = rng.randint(1, 2 * self._output)
            yield SimRequest(i, round(at_s * SECOND), prompt, output, blocks, 64, output_tokens_max=4 * self._output)
            i += 1

    def follow_ups(self, request: SimRequest, succeeded: bool, now_ns: int) -> Sequence[SimRequest]:
        return ()


class Listed:
    """Given requests, and for each index the requests that its end leads to."""

    name = "listed"

    def __init__(self, requests: Sequence[SimRequest], after: dict[int, list[SimRequest]] | None = None) -> None:
        self._requests, self._after = requests, after or {}

    def arrivals(self) -> Iterator[SimRequest]:
        return iter(self._requests)

    def follow_ups(self, request: SimRequest, succeeded: bool, now_ns: int) -> Sequence[SimRequest]:
        return [replace(r, arrival_ns=now_ns + r.arrival_ns) for r in self._after.get(request.index, ())]


def poisson(rate_ps: float = 10.0, seconds: float = 20.0, replicas: int = 2, **more: Any) -> Scenario:
    """A scenario with one pool of ``replicas`` under a steady load of prompts with ``families`` common beginnings."""
    pool = more.pop("pool", Pool(more.pop("profile", PROFILE), replicas))
    prompt, output = more.pop("prompt", 500), more.pop("output", 50)
    families = more.pop("families", 20)
    pools = more.pop("pools", (pool,))
    return Scenario(
        name="test",
        source=lambda rng: Poisson(rng, rate_ps, seconds, prompt, output, families),
        pools=pools,
        seed=more.pop("seed", 1),
        **more,
    )


def listed(requests: Sequence[SimRequest], after: dict[int, list[SimRequest]] | None = None, **more: Any) -> Scenario:
    """A scenario of given requests."""
    pools = more.pop("pools", (Pool(more.pop("profile", PROFILE), more.pop("replicas", 1)),))
    return Scenario("test", lambda _: Listed(requests, after), pools, more.pop("seed", 1), **more)


class Watcher:
    """Keeps what it sees, and how often each call finished."""

    def __init__(self) -> None:
        self.finishes: dict[tuple[int, str], int] = {}
        self.flows: list[tuple[int, int, str, Event, list[Effect]]] = []
        self.engines: list[tuple[int, str, str, str, str]] = []
        self.phases: list[tuple[int, str, str]] = []
        self.ticks: list[tuple[int, int, TickResult]] = []
        self.ends: list[dict[str, int]] = []

    def flow(self, now_ns: int, gateway: int, request_id: str, event: Event, effects: Sequence[Effect]) -> None:
        self.flows.append((now_ns, gateway, request_id, event, list(effects)))
        self.finishes.setdefault((gateway, request_id), 0)
        self.finishes[gateway, request_id] += sum(isinstance(e, Finish) for e in effects)

    def engine(self, now_ns: int, replica_id: str, phase: str, kind: str, request_id: str) -> None:
        self.engines.append((now_ns, replica_id, phase, kind, request_id))

    def replica(self, now_ns: int, replica_id: str, phase: str) -> None:
        self.phases.append((now_ns, replica_id, phase))

    def tick(self, now_ns: int, pool: int, result: TickResult) -> None:
        self.ticks.append((now_ns, pool, result))

    def end(self, now_ns: int, gateway: int, counts: dict[str, int]) -> None:
        self.ends.append(counts)

    def times(self, phase: str) -> list[float]:
        """Seconds at which replicas entered ``phase``."""
        return [at / SECOND for at, _, p in self.phases if p == phase]


def settled(result: RunResult, watcher: Watcher) -> None:
    """What must hold after every run that lost nothing."""
    records, counters = result.records, result.counters
    assert len(set(records.index)) == len(records) == counters["requests"]
    ends = ("succeeded", "failed", "cancelled", "refused", "lost")
    assert sum(counters[k] for k in ends) == counters["requests"]
    assert set(watcher.finishes.values()) <= {1}
    for counts in watcher.ends:
        assert {k: v for k, v in counts.items() if v and k != "attempts_left"} == {}
    assert {phase for _, _, phase, kind, _ in watcher.engines if kind == "submit"} <= {"ready", "draining", "refusing"}
