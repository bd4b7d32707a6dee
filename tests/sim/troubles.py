"""Scenarios in which one thing goes wrong, and what the control plane must make of each: the suite of its conditions.

Each begins with :data:`CALM_S` of a load that the fleet carries; then its trouble begins. Engines are slow ones, so
that a few requests a second are a load. Used by ``test_conditions.py`` (one seed) and ``tests/bench/scenarios.py``
(ten).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from autoscaling.recommend import ReplicaScaler
from autoscaling.simulator.records import RunResult
from autoscaling.simulator.spec import (
    ClientSpec,
    EngineProfile,
    Fault,
    NetworkSpec,
    Pool,
    RouterFactory,
    Scenario,
    SimRequest,
    StepLaw,
)
from autoscaling.simulator.world import run
from policies.config import ObjectivesConfig, PolicyConfig, ScalingConfig
from policies.control.catalogue import SPECS
from policies.control.loop import TickResult
from policies.control.moves import Move
from policies.routing.prefix_index import PrefixIndex
from policies.routing.strategy import RoutingStrategy
from policies.steering import Lever
from policies.types import Reason, ReplicaId, ReplicaView, Request, RouteChoice

SECOND = 1_000_000_000
CALM_S = 60
BLOCK_TOKENS = 64

PROFILE = EngineProfile(
    name="slow",
    gpu="none",
    gpus=1,
    model="m",
    law=StepLaw(30.0, 1.0, 0.1, 0.2, jitter_share=0.02),
    kv_tokens=60_000,
    context_tokens_max=8_192,
    cold_start_ms=20_000.0,
    usd_per_gpu_hour=1.0,
    source="made up: 300 prompt and 40 output tokens cost about 0.2 s of one engine",
    running_seqs_max=16,
)


@dataclass(frozen=True, slots=True)
class Load:
    """Poisson arrivals of one kind of requests; lengths are drawn evenly from half to one and a half of the mean."""

    rate_ps: float = 5.0
    prompt: int = 300
    output: int = 40
    families: int = 10_000
    """Beginnings that prompts share."""
    shared: int = 0
    """Tokens of a prompt's shared beginning."""
    long_share: float = 0.0
    """Share of requests whose prompts are :attr:`long_prompt` tokens instead."""
    long_prompt: int = 0


class Shifting:
    """One load until ``at_s``, then another until ``seconds``."""

    name = "shifting"

    def __init__(self, rng: Random, calm: Load, after: Load, at_s: float, seconds: float) -> None:
        self._rng, self._calm, self._after, self._at_s, self._seconds = rng, calm, after, at_s, seconds

    def arrivals(self) -> Iterator[SimRequest]:
        at_s, index, rng = 0.0, 0, self._rng
        while True:
            load = self._calm if at_s < self._at_s else self._after
            at_s += rng.expovariate(load.rate_ps)
            if at_s >= self._seconds:
                return
            yield self._request(index, at_s, load)
            index += 1

    def _request(self, index: int, at_s: float, load: Load) -> SimRequest:
        rng = self._rng
        mean = load.long_prompt if rng.random() < load.long_share else load.prompt
        prompt = load.shared + round(mean * rng.uniform(0.5, 1.5))
        output = round(load.output * rng.uniform(0.5, 1.5))
        family = rng.randrange(load.families)
        common = load.shared // BLOCK_TOKENS
        blocks = tuple((family if n < common else 1_000_000 + index) * 1_000 + n for n in range(prompt // BLOCK_TOKENS))
        return SimRequest(
            index, round(at_s * SECOND), prompt, max(1, output), blocks, BLOCK_TOKENS, output_tokens_max=2 * load.output
        )

    def follow_ups(self, request: SimRequest, succeeded: bool, now_ns: int) -> Sequence[SimRequest]:
        return ()


class OneForAll(RoutingStrategy):
    """A router that believes the first replica holds every prompt, and sends everything there."""

    def choose(
        self, request: Request, views: Sequence[ReplicaView], strength: float | None, now_ns: int
    ) -> RouteChoice:
        order = sorted(v.replica_id for v in views if v.available)
        tiers = tuple((name,) for name in order)
        hits = {name: request.prompt_tokens if name == order[0] else 0 for name in order}
        return RouteChoice(tiers, Reason("one_for_all", "always the first"), {}, hits)

    def dispatched(self, request: Request, replica_id: ReplicaId) -> None: ...

    def forget(self, replica_id: ReplicaId) -> None: ...


@dataclass(frozen=True, slots=True)
class Trouble:
    """One thing that goes wrong."""

    name: str
    expected: tuple[str, ...]
    """Conditions that must become active within their stated time."""
    first: tuple[Lever, ...]
    """Levers of which one must be the first to move because of it; empty: none may move for a symptom."""
    scenario: Callable[[int], Scenario]
    """By seed."""
    tolerated: tuple[Lever, ...] = ()
    """Levers that may move although they are not meant for it."""
    quiet_s: float = 20.0
    """From then on until the trouble begins no condition may be active."""


@dataclass(slots=True)
class Seen:
    """What the controller saw and did in one run."""

    ticks: list[tuple[float, frozenset[str]]] = field(default_factory=list)
    """Time in s and the active conditions."""
    moves: list[tuple[float, Move]] = field(default_factory=list)
    """Changes that levers asked for, with their time."""

    def flow(self, *_: object) -> None: ...

    def engine(self, *_: object) -> None: ...

    def replica(self, *_: object) -> None: ...

    def end(self, *_: object) -> None: ...

    def tick(self, now_ns: int, pool: int, result: TickResult) -> None:
        at_s = now_ns / SECOND
        self.ticks.append((at_s, frozenset(c.name for c in result.conditions if c.active)))
        self.moves.extend((at_s, move) for move in result.adaptation.moves if move.changes)

    def first_s(self, condition: str, since_s: float = 0.0) -> float | None:
        """Time from ``since_s`` until it was active; ``None`` if it never was."""
        return next((at - since_s for at, active in self.ticks if at >= since_s and condition in active), None)

    def active_between(self, begin_s: float, end_s: float) -> set[str]:
        """Every condition that was active at some tick between two times."""
        return {name for at, active in self.ticks if begin_s <= at < end_s for name in active}

    def first_lever(self, right: Sequence[Lever], since_s: float) -> tuple[float, Move] | None:
        """The first move of a right lever, or of another that is meant for a symptom; other tuning is neither."""
        for at_s, move in self.moves:
            if at_s >= since_s and (move.lever in right or move.cures or move.lever is Lever.REPLICAS):
                return at_s - since_s, move
        return None


def watch(trouble: Trouble, seed: int) -> tuple[Seen, RunResult]:
    """Run one trouble with one seed."""
    seen = Seen()
    result = run(trouble.scenario(seed), observer=seen)
    return seen, result


FROM_REQUEST = frozenset({"cold_start_gap", "stuck_scale_up"})
"""Conditions whose time counts from the first wish for another replica."""


def times(trouble: Trouble, seen: Seen) -> dict[str, float | None]:
    """How long each expected condition took; ``None``: it never came."""
    asked_s = next((at for at, move in seen.moves if at >= CALM_S and move.lever is Lever.REPLICAS), CALM_S)
    return {name: seen.first_s(name, asked_s if name in FROM_REQUEST else CALM_S) for name in trouble.expected}


def late(trouble: Trouble, seen: Seen) -> dict[str, float | None]:
    """Expected conditions that came late, with their time, or never."""
    found = times(trouble, seen)
    return {name: at for name, at in found.items() if at is None or at > SPECS[name].detect_s}


def right_lever(trouble: Trouble, seen: Seen) -> bool:
    """Whether the first lever to move for the trouble was a right one; where there is none, whether none moved."""
    first = seen.first_lever(trouble.first, CALM_S)
    if first is None:
        return not trouble.first
    return first[1].lever in (*trouble.first, *trouble.tolerated)


def scenario(
    after: Load,
    *,
    calm: Load | None = None,
    seconds: float = 90.0,
    replicas: int = 3,
    replicas_max: int = 3,
    replicas_min: int = 3,
    profile: EngineProfile = PROFILE,
    faults: tuple[Fault, ...] = (),
    router: RouterFactory | None = None,
    clients: ClientSpec | None = None,
    **config: Any,
) -> Callable[[int], Scenario]:
    """By seed: ``calm`` for :data:`CALM_S`, then ``after`` for ``seconds``."""
    before = calm or Load()
    scaling = ScalingConfig(replicas_min=replicas_min, replicas_max=replicas_max)
    base = Scenario(
        name="trouble",
        source=lambda rng: Shifting(rng, before, after, CALM_S, CALM_S + seconds),
        pools=(Pool(profile, replicas, scaler=ReplicaScaler),),
        seed=0,
        config=PolicyConfig(scaling=scaling, **config),
        router=router,
        clients=clients or ClientSpec(),
        network=NetworkSpec(first_byte_timeout_ms=60_000, idle_timeout_ms=60_000),
        faults=faults,
        drain_ns_max=120 * SECOND,
    )
    return lambda seed: replace(base, seed=seed)


def fault(kind: str, seconds: float = 60.0, replica: int = 0, factor: float = 1.0) -> Fault:
    """A fault that begins when the calm ends."""
    return Fault(kind, CALM_S * SECOND, round(seconds * SECOND), replica, factor)


def one_for_all(config: PolicyConfig, index: PrefixIndex, rng: Random) -> OneForAll:
    """A router that makes a hot spot."""
    return OneForAll()


BURST = Load(rate_ps=30.0)
CALM = Load()
SHARED = Load(rate_ps=8.0, prompt=60, output=10, families=150, shared=1_024)

TROUBLES: tuple[Trouble, ...] = (
    Trouble(
        "burst",
        ("queue_growing", "slo_burn_fast", "cold_start_gap"),
        (Lever.ADMISSION, Lever.REPLICAS),
        scenario(BURST, replicas_max=8),
    ),
    Trouble(
        "long prompts",
        ("prefill_bound", "slo_burn_fast"),
        (Lever.BATCH, Lever.ADMISSION, Lever.REPLICAS),
        scenario(Load(prompt=3_000), replicas_max=6),
    ),
    Trouble(
        "long answers",
        ("decode_bound",),
        (Lever.BATCH, Lever.ADMISSION, Lever.REPLICAS),
        scenario(Load(output=500), replicas_max=6),
    ),
    Trouble(
        "full KV cache",
        ("kv_pressure", "preemption_thrash"),
        (Lever.BATCH,),
        scenario(Load(rate_ps=6.0, prompt=200, output=400), profile=replace(PROFILE, kv_tokens=4_000)),
    ),
    Trouble(
        "slow device",
        ("grey_failure",),
        (Lever.AFFINITY, Lever.BATCH, Lever.REPLICAS),
        scenario(CALM, faults=(fault("slow", factor=3.0),)),
    ),
    Trouble("silent replica", ("signal_loss",), (), scenario(CALM, faults=(fault("mute"),))),
    Trouble("frozen engine", ("stuck_replica",), (), scenario(CALM, faults=(fault("freeze"),))),
    Trouble(
        "engines fail, clients repeat",
        ("retry_storm", "slo_burn_fast"),
        (),
        scenario(
            CALM,
            seconds=35,
            faults=tuple(fault("errors", 20.0, i) for i in range(3)),
            clients=ClientSpec(retries_max=3, retry_pause_ms=500.0),
        ),
        # Routers believe that a replica holds the prompts which it failed, and the repeated ones show that it does not.
        tolerated=(Lever.AFFINITY,),
    ),
    Trouble(
        "all to one",
        ("hot_spot",),
        (Lever.AFFINITY,),
        scenario(Load(rate_ps=9.0), calm=Load(rate_ps=1.0), router=one_for_all),
    ),
    Trouble(
        "caches are emptied",
        ("cache_cold",),
        (Lever.AFFINITY,),
        scenario(
            SHARED,
            calm=SHARED,
            profile=replace(PROFILE, kv_tokens=150_000),
            faults=tuple(fault("flush", 0.0, i) for i in range(3)),
        ),
        quiet_s=40.0,
    ),
    Trouble(
        "no room for replicas",
        ("stuck_scale_up",),
        (Lever.ADMISSION, Lever.REPLICAS),
        scenario(Load(rate_ps=20.0), replicas_max=8, seconds=120, faults=(fault("start_fail", 200.0),)),
    ),
    Trouble(
        "load falls",
        ("over_provisioned",),
        (Lever.REPLICAS,),
        scenario(Load(rate_ps=0.5), calm=Load(rate_ps=10.0), replicas_min=1, seconds=120),
        quiet_s=CALM_S,  # the fleet finds its size meanwhile, and queues while one replica drains
    ),
    Trouble(
        "some requests are too long",
        ("slo_burn_slow",),
        (),
        scenario(
            Load(rate_ps=1.5, prompt=100, output=20, long_share=0.18, long_prompt=4_500),
            calm=Load(rate_ps=1.5, prompt=100, output=20),
            seconds=500,
            objectives=ObjectivesConfig(ttft_ms=500.0),
        ),
    ),
)
