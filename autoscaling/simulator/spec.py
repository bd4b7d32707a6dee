"""What a simulation is given: engines as data, requests, clients, faults, and the scenario that joins them.

Every time is an integer in ns since the start of the run, every duration has its unit in its name. Everything here is a
value: the same scenario gives the same run, byte for byte, whatever ``PYTHONHASHSEED`` says.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Protocol, TypeAlias

from policies.config import PolicyConfig
from policies.control.levers import LeverLoop
from policies.control.scaler import Scaler
from policies.routing.prefix_index import PrefixIndex
from policies.routing.strategy import RoutingStrategy
from policies.types import Priority, StepCoefficients

# --- engines ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepLaw:
    """Duration of an engine step; the world's truth, richer than the model that policies learn.

    ``step_ms = batch_ms(running) + c_ms * kv_tokens / 1000 + d_ms * prefill_tokens + e_ms * pairs / 1e6``, where
    ``batch_ms(running)`` is ``a_ms + b_ms * running``, or interpolated in ``batch`` where that is given, and ``pairs``
    sums ``n * (p + n / 2)`` over the step's prompt chunks of ``n`` tokens that start at position ``p``: attention of
    a prompt to its own beginning, which makes long prompts cost more than their tokens.
    """

    a_ms: float
    b_ms: float
    c_ms: float
    d_ms: float
    e_ms: float = 0.0
    batch: tuple[tuple[int, float], ...] = ()
    """Measured ``(running, ms)`` of decode steps with an empty cache, by growing ``running``; linear in between, the
    last slope beyond."""
    jitter_share: float = 0.0
    """Standard deviation of one step's duration, as a share of it."""

    def coefficients(self) -> StepCoefficients:
        """The linear part, as policies know it."""
        return StepCoefficients(self.a_ms, self.b_ms, self.c_ms, self.d_ms)

    def batch_ms(self, running: int) -> float:
        """The part of a step that depends on its number of sequences alone, in ms, never negative."""
        points = self.batch
        if not points:
            return self.a_ms + self.b_ms * running
        if len(points) == 1 or running <= points[0][0]:
            return points[0][1]
        i = min(bisect_left(points, (running, -math.inf)), len(points) - 1)
        (x0, y0), (x1, y1) = points[i - 1], points[i]
        return max(0.0, y0 + (y1 - y0) * (running - x0) / (x1 - x0))

    def step_ms(self, running: int, kv_tokens: int, prefill_tokens: int = 0, pairs: float = 0.0) -> float:
        """Duration of a step in ms without jitter; ``kv_tokens`` is the context its sequences had when it began."""
        prefill_ms = self.d_ms * prefill_tokens + self.e_ms * pairs / 1e6
        return self.batch_ms(running) + self.c_ms * kv_tokens / 1000 + prefill_ms


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """One engine on one kind of device: speed, memory, start, price, and where the figures come from."""

    name: str
    """E.g. ``h100-llama-3.1-8b-bf16``."""
    gpu: str
    """Kind of device, e.g. ``H100``."""
    gpus: int
    """Devices of one replica."""
    model: str
    law: StepLaw
    kv_tokens: int
    """KV cache of one replica."""
    context_tokens_max: int
    cold_start_ms: float
    """From the wish for a replica to its readiness."""
    usd_per_gpu_hour: float
    source: str
    """Where each figure comes from, and which are estimates."""
    block_tokens: int = 16
    running_seqs_max: int = 256
    step_tokens_max: int = 2_048
    request_overhead_ms: float = 0.0
    """Time a request spends in the server outside steps before it is queued: HTTP, tokenising."""
    first_token_overhead_ms: float = 0.0
    """Time between the end of the step that made the first token and the first byte at the port."""
    kv_bytes_per_token: int = 0
    """For the transfer between prefill and decode replicas."""
    kv_transfer_gb_s: float = 0.0
    """Speed of that transfer, GB/s; 0: not known, transfers take no time."""
    prefix_cache: bool = True
    """vLLM's ``enable_prefix_caching``."""
    reserve_full_prompt: bool = True
    """A request is admitted only when its whole prompt fits into the free KV blocks, not just the first chunk: vLLM's
    ``scheduler_reserve_full_isl``, on by default in 0.29."""
    speculative_depth: int = 0
    """Start-up depth of its drafts; 0: it does not speculate. How many come true is each request's."""
    async_scheduling: bool = False
    """Steps are composed while the one before runs, so that what arrives or ends in a step counts from the next but
    one: vLLM's default on GPUs, off on CPUs."""

    @property
    def kv_blocks(self) -> int:
        """Blocks of one replica's KV cache. ``ValueError``: it holds none, or no sequence may run."""
        blocks = self.kv_tokens // max(1, self.block_tokens)
        if blocks < 1 or self.running_seqs_max < 1 or self.step_tokens_max < 1:
            raise ValueError(f"profile {self.name}: kv_tokens, running_seqs_max and step_tokens_max must be positive")
        return blocks

    @property
    def usd_per_hour(self) -> float:
        """Price of one replica."""
        return self.usd_per_gpu_hour * self.gpus


# --- load -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request a client will make."""

    index: int
    """Unique in the run, grows with the order of creation."""
    arrival_ns: int
    prompt_tokens: int
    """At least 1."""
    output_tokens: int
    """What the engine will write, at least 1."""
    blocks: tuple[int, ...] = ()
    """Chain hashes of the prompt's full blocks of ``block_tokens`` tokens, first block first."""
    block_tokens: int = 512
    """Tokens in one block; a multiple of the engine's block size."""
    blocks_after: tuple[int, ...] = ()
    """Chain hashes of the full blocks of prompt and output together, what the cache holds when the request is over;
    empty: only ``blocks`` are known."""
    output_tokens_max: int | None = None
    tenant: str = ""
    task: str = ""
    """Session or agent task the request belongs to; empty: a task of its own."""
    task_last: bool = True
    """The task is over when this request is."""
    stream: bool = True
    priority: Priority = Priority.STANDARD
    deadline_ms: float | None = None
    """From the client's sending to the whole answer, told to the gateway."""
    task_header: bool = False
    """The client tells the gateway which task the request is of."""
    draft_acceptance: float | None = None
    """Chance of each token drafted for its answer to be kept when those before it were; ``None``: none is drafted."""


class Source(Protocol):
    """Where requests come from. One object serves one run: it may keep state."""

    name: str

    def arrivals(self) -> Iterator[SimRequest]:
        """Open-loop arrivals by growing ``arrival_ns``, made while they are read so that a million need no memory."""
        ...

    def follow_ups(self, request: SimRequest, succeeded: bool, now_ns: int) -> Sequence[SimRequest]:
        """Requests that the end of ``request`` leads to, each with ``arrival_ns >= now_ns``: the next turn of a
        conversation after its pause, the calls an agent makes. Empty for open-loop sources.
        """
        ...


SourceFactory: TypeAlias = Callable[[Random], Source]
"""Makes a fresh source from a stream of random numbers of its own."""


@dataclass(frozen=True, slots=True)
class ClientSpec:
    """How clients behave."""

    patience_ms: float | None = None
    """Time to the first byte after which a client hangs up; ``None``: never."""
    retries_max: int = 0
    """Times a client repeats a request that was refused, failed or given up."""
    retry_pause_ms: float = 1_000.0
    """Mean pause before a repetition, drawn from half to one and a half of it; ``Retry-After`` wins where longer."""
    abort_share: float = 0.0
    """Share of requests whose clients leave at a random point of the answer."""


@dataclass(frozen=True, slots=True)
class NetworkSpec:
    """Delays and periods between the parts, as measured or configured in the live system."""

    client_ms: float = 0.2
    """Client to gateway, one way."""
    hop_ms: float = 0.5
    """Gateway to replica, one way."""
    gateway_ms: float = 1.0
    """Work of the gateway before it routes."""
    stats_period_ms: float = 1_000.0
    """Period of the replicas' samples to the gateways' routers."""
    stats_lag_ms: float = 100.0
    """Age of a sample when a gateway gets it."""
    report_period_ms: float = 1_000.0
    """Period of reports to the controller; 10 % jitter."""
    report_lag_ms: float = 5.0
    tick_late_ms: float = 2.5
    """Ticks of the controller come up to this late on their grid (measured: 0 to 2.7 ms, evenly). On the exact grid a
    sample would be just inside a window of whole seconds at each tick, as it never is live."""
    membership_lag_ms: float = 150.0
    """From a change of the fleet to the gateways' knowledge of it."""
    drain_grace_ms: float = 2_000.0
    """A leaving replica takes requests for this long; then it refuses them."""
    drain_ms_max: float = 600_000.0
    idle_timeout_ms: float = 600_000.0
    """Silence of a replica within an answer after which the gateway gives it up."""
    first_byte_timeout_ms: float = 600_000.0
    """Time from a dispatch to the first byte after which the gateway gives it up."""
    health_period_ms: float = 5_000.0
    """Serve's health check: a dead replica is noticed at the next one."""
    stuck_after_ms: float = 30_000.0
    """A replica with work that makes no step for this long says it is stuck; Serve replaces it after three checks."""


# --- faults -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong, by ``kind``.

    ``kill``: a replica dies and Serve replaces it; ``slow``: its steps take ``factor`` times as long for ``duration``;
    ``freeze``: it makes no step for ``duration`` and looks healthy; ``mute``: its samples and reports stop for
    ``duration``; ``refuse``: it refuses connections for ``duration``; ``unavailable``: its server answers 503 for
    ``duration``; ``errors``: its engine answers 500 to what comes within ``duration``; ``controller``: no controller
    for ``duration``, then a new one that knows nothing; ``gateway_blind``: gateways get no samples for ``duration``;
    ``start_fail``: starts that begin within ``duration`` fail and are tried again; ``flush``: its prefix cache is
    emptied and gateways do not know.
    """

    kind: str
    at_ns: int
    duration_ns: int = 0
    replica: int = 0
    """Index into the replicas that are ready at that time, modulo their number."""
    factor: float = 1.0


# --- the scenario -----------------------------------------------------------------------------------------------------

RouterFactory: TypeAlias = Callable[[PolicyConfig, PrefixIndex, Random], RoutingStrategy]
"""Makes one gateway's router; ``None`` in a scenario means the live one."""

ScalerFactory: TypeAlias = Callable[[PolicyConfig], Scaler]
"""Makes the scaler of one pool."""

LeversFactory: TypeAlias = Callable[[PolicyConfig], Sequence[LeverLoop]]
"""Makes more levers for each life of one pool's controller."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Replicas of one kind. ``role``: ``both``, or ``prefill`` and ``decode`` of a split fleet."""

    profile: EngineProfile
    replicas: int
    """Ready at the start."""
    role: str = "both"
    ongoing_max: int | None = None
    """Serve's ``max_ongoing_requests``: a replica with as many refuses more, and routers that respect it wait."""
    scaler: ScalerFactory | None = None
    """``None``: the number is fixed."""
    levers: LeversFactory | None = None
    """More levers for the pool's controller, such as one that does harm on purpose."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything one run needs. ``seed`` is split into one stream per part, so that changing one part (a router, a
    fault) leaves the load of the others as it was.
    """

    name: str
    source: SourceFactory
    pools: tuple[Pool, ...]
    """One pool, or a ``prefill`` and a ``decode`` pool."""
    seed: int
    config: PolicyConfig = field(default_factory=PolicyConfig)
    gateways: int = 2
    router: RouterFactory | None = None
    clients: ClientSpec = field(default_factory=ClientSpec)
    network: NetworkSpec = field(default_factory=NetworkSpec)
    faults: tuple[Fault, ...] = ()
    duration_ns: int | None = None
    """Arrivals after this time are not made; ``None``: all the source has. The run ends when everything is answered."""
    drain_ns_max: int = 3_600_000_000_000
    """Longest time after the last arrival: what is open then counts as lost."""
    settle_ns: int = 0
    """The run goes on for this long after everything is answered, so that the fleet can settle."""
    start_spread_share: float = 0.0
    """Cold starts are drawn from ``cold_start_ms`` times 1 minus to 1 plus this share."""
    local_rule: (
        Callable[[Mapping[str, object] | None, int, tuple[int, int], float | None, int], tuple[int, str]] | None
    ) = None
    """Serve's side without a plan (``deployments.scaling.decide``); ``None``: the number stays."""
    learn: bool = True
    """Replicas learn their step model online as live ones do; else they report the law's linear part."""

    def with_seed(self, seed: int) -> Scenario:
        """The same scenario with other random numbers."""
        return replace(self, seed=seed)
