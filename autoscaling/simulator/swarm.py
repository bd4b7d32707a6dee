"""Draws a whole scenario from a seed, runs it under the checker, and says in words what it was and what broke.

A scenario has three parts in time, so that both kinds of rules can be asked of it::

    0 .. LOAD_S           load of any kind and weight, faults of every kind: nothing unsafe may happen
    .. LOAD_S + FAULT_S   the last faults end, queues drain
    .. quiet_ns           a little more time, then a light load that must be served
    .. the end            no load for a while: the fleet must stand still

Load is drawn relative to what the fleet carries, from a third of it to three times as much; bounds of admission are
drawn so that a full backlog can be worked off in the quiet part.

What this must not do: open files or print; ``deployments/simulation/swarm.py`` does.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import TypeAlias

from autoscaling.recommend import ReplicaScaler
from autoscaling.simulator.checks import Checker, Violation
from autoscaling.simulator.events import LOOK_EVENTS
from autoscaling.simulator.faults import KINDS
from autoscaling.simulator.records import RunResult
from autoscaling.simulator.spec import (
    ClientSpec,
    EngineProfile,
    Fault,
    NetworkSpec,
    Pool,
    ScalerFactory,
    Scenario,
    SourceFactory,
    StepLaw,
)
from autoscaling.simulator.workload.blocks import mix
from autoscaling.simulator.workload.conversations import Agents, Chat, agents, chat, concurrency
from autoscaling.simulator.workload.generators import from_curve, shared_prefix
from autoscaling.simulator.workload.lengths import Fixed, LogNormal
from autoscaling.simulator.workload.mixture import mixture
from autoscaling.simulator.workload.rates import RateCurve
from autoscaling.simulator.workload.trace import Options
from autoscaling.simulator.world import World
from policies.config import (
    AdmissionConfig,
    AffinityConfig,
    BatchingConfig,
    ControlConfig,
    FaultsConfig,
    ObjectivesConfig,
    PolicyConfig,
    RoutingConfig,
    ScalingConfig,
)
from policies.control.scaler import ScaleAdvice
from policies.control.signals import Signals
from policies.types import Reason

LOAD_S = 16.0
FAULT_S = 10.0
"""Longest fault; the last one begins when the load ends."""
RECOVER_S = 25.0
"""From the end of the last fault to the light load."""
LIGHT_REQUESTS = 2
"""One after the other, each alone: no bound of admission may refuse them."""
SETTLE_S = 26.0
"""More than the down window and the longest back-off of failed starts that can still be open."""
EVENTS_MAX = 3_000_000
"""A run with more events never ends."""
ALONE_MS_MAX = 4_000.0
"""Time of one request alone in an engine; engines are drawn no slower."""

LocalRule: TypeAlias = Callable[[Mapping[str, object] | None, int, tuple[int, int], float | None, int], tuple[int, str]]
QUIET_NS = round((LOAD_S + FAULT_S + RECOVER_S) * 1e9)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A scenario and what it is in words."""

    scenario: Scenario
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one seed."""

    drawn: Drawn
    violation: Violation | None
    result: RunResult | None
    """``None`` where the run broke off."""

    def report(self) -> str:
        """The scenario, the rule, and the command that repeats it."""
        lines = [f"seed {self.drawn.scenario.seed}", *(f"  {line}" for line in self.drawn.words)]
        if self.violation is not None:
            lines += [f"broken: {self.violation}", f"repeat: make sim SEED={self.drawn.scenario.seed}"]
        return "\n".join(lines)


def examine(seed: int, local_rule: LocalRule | None = None) -> Verdict:
    """Run the scenario of ``seed``; every failure of any part is a violation."""
    drawn = draw(seed, local_rule)
    try:
        return Verdict(drawn, None, check(drawn.scenario))
    except Violation as violation:
        return Verdict(drawn, violation, None)


def check(scenario: Scenario) -> RunResult:
    """Run ``scenario`` under the checker; raises :class:`Violation`."""
    checker = Checker(scenario)
    world: World | None = None
    looks = 0

    def stop() -> bool:
        nonlocal looks
        looks += 1
        return looks * LOOK_EVENTS > EVENTS_MAX

    try:
        world = World(scenario, checker)
        checker.watch(world)
        result = world.run(None, stop)
    except Violation:
        raise
    except Exception as error:
        at_ns = world.now_ns if world is not None else 0
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}"
        raise Violation("no-error", at_ns, f"{type(error).__name__}: {error} ({where})") from error
    if looks * LOOK_EVENTS > EVENTS_MAX:
        raise Violation("drained", result.end_ns, f"no end after {EVENTS_MAX} events")
    checker.finish(result, QUIET_NS)
    return result


@dataclass(frozen=True, slots=True)
class Restless:
    """A ``Scaler`` that wants another number every few seconds while there is load, so that replicas come and go."""

    seed: int
    bounds: tuple[int, int] = (1, 1)

    def of(self, config: PolicyConfig) -> Restless:
        """With the bounds of a run."""
        return replace(self, bounds=(config.scaling.replicas_min, config.scaling.replicas_max))

    def recommend(self, signals: Signals, now_ns: int) -> ScaleAdvice:  # noqa: ARG002 - the protocol's arguments
        """Any number within the bounds, then the least."""
        low, high = self.bounds
        turn = now_ns // 4_000_000_000
        target = low + mix(self.seed, turn) % (high - low + 1) if now_ns < LOAD_S * 1e9 else low
        return ScaleAdvice(target, Reason("Restless", "so that replicas come and go"))


# --- drawing ----------------------------------------------------------------------------------------------------------


def draw(seed: int, local_rule: LocalRule | None = None) -> Drawn:
    """The scenario of ``seed``, the same on every machine."""
    rng = Random(f"swarm/{seed}")
    prompt, output = rng.choice((60, 300, 1_200)), rng.choice((20, 80, 200))
    pools = _pools(rng, _profile(rng, prompt, output))
    wanted_rps, factor = rng.choice((2.0, 5.0, 12.0)), rng.choice((0.3, 0.7, 1.0, 1.5, 3.0))
    pools = _paced(pools, prompt, output, wanted_rps / factor)
    profile = pools[0].profile
    carried_rps = _carried_rps(pools, prompt, output)
    gateways = rng.choice((1, 1, 2, 3, 4))
    config = _config(rng, pools, carried_rps, gateways, prompt + 256)
    rate_rps = min(wanted_rps, factor * carried_rps)
    source, load = _load(rng, profile.law, rate_rps, prompt, output)
    load += f" ({rate_rps / carried_rps:.1f} of what the fleet carries)"
    clients = ClientSpec(
        patience_ms=rng.choice((None, None, 3_000.0, 15_000.0)),
        retries_max=rng.choice((0, 0, 1, 3)),
        retry_pause_ms=rng.choice((200.0, 1_000.0, 3_000.0)),
        abort_share=rng.choice((0.0, 0.0, 0.1, 0.4)),
    )
    scenario = Scenario(
        name=f"swarm-{seed}",
        source=source,
        pools=pools,
        seed=seed,
        config=config,
        gateways=gateways,
        clients=clients,
        network=_network(rng),
        faults=_faults(rng),
        drain_ns_max=600_000_000_000,
        settle_ns=round(SETTLE_S * 1e9),
        start_spread_share=rng.choice((0.0, 0.3)),
        local_rule=local_rule,
        learn=rng.random() < 0.8,
    )
    return Drawn(scenario, (load, *_words(scenario)))


def _profile(rng: Random, prompt: int, output: int) -> EngineProfile:
    law = StepLaw(
        a_ms=rng.choice((20.0, 35.0, 60.0)),
        b_ms=rng.choice((0.05, 0.5)),
        c_ms=rng.choice((0.02, 0.2)),
        d_ms=rng.choice((0.02, 0.1)),
        e_ms=rng.choice((0.0, 0.5)),
        jitter_share=rng.choice((0.0, 0.1)),
    )
    seqs = rng.choice((2, 4, 8))
    one = 6 * (prompt + output) + 64
    """No request is longer than this, see :func:`_load`."""
    least = 2 * (prompt + output)
    """Some are longer than this: the engine answers those with an error."""
    kv_tokens = rng.choice((one * seqs, one * seqs, one + round((prompt + output) * rng.random()), least))
    return EngineProfile(
        name="swarm",
        gpu="none",
        gpus=1,
        model="m",
        law=law,
        kv_tokens=kv_tokens,
        context_tokens_max=one,
        cold_start_ms=rng.choice((1_000.0, 4_000.0, 10_000.0)),
        usd_per_gpu_hour=1.0,
        source="drawn",
        running_seqs_max=seqs,
        step_tokens_max=rng.choice((128, 512, 2_048)),
        request_overhead_ms=rng.choice((0.0, 3.0)),
        first_token_overhead_ms=rng.choice((0.0, 2.0)),
        kv_bytes_per_token=100_000,
        kv_transfer_gb_s=rng.choice((0.0, 1.0)),
        prefix_cache=rng.random() < 0.9,
        async_scheduling=rng.random() < 0.3,
    )


def _pools(rng: Random, profile: EngineProfile) -> tuple[Pool, ...]:
    replicas = rng.choice((1, 1, 2, 2, 3, 4, 6, 12))
    ongoing = rng.choice((None, None, None, profile.running_seqs_max, 3 * profile.running_seqs_max))
    unrest = Restless(rng.getrandbits(32))
    scaler: ScalerFactory | None = rng.choice((None, None, ReplicaScaler, ReplicaScaler, unrest.of))
    if rng.random() < 0.25:
        decode = rng.choice((1, 2, 4))
        return (
            Pool(profile, min(replicas, 4), "prefill", ongoing, scaler),
            Pool(profile, decode, "decode", ongoing, scaler),
        )
    return (Pool(profile, replicas, "both", ongoing, scaler),)


def _paced(pools: tuple[Pool, ...], prompt: int, output: int, carried_rps: float) -> tuple[Pool, ...]:
    """The same pools with engines as slow as it takes to carry ``carried_rps``, down to :data:`ALONE_MS_MAX`."""
    slower = min(_carried_rps(pools, prompt, output) / carried_rps, ALONE_MS_MAX / _alone_ms(pools, prompt, output))
    law = pools[0].profile.law
    law = replace(law, **{name: getattr(law, name) * slower for name in ("a_ms", "b_ms", "c_ms", "d_ms", "e_ms")})
    return tuple(replace(pool, profile=replace(pool.profile, law=law)) for pool in pools)


def _alone_ms(pools: tuple[Pool, ...], prompt: int, output: int) -> float:
    law = pools[0].profile.law
    return prompt * law.d_ms + output * law.step_ms(1, prompt + output)


def _carried_rps(pools: tuple[Pool, ...], prompt: int, output: int) -> float:
    """Requests per second, roughly: prefill alone, decoding in a full batch as far as the KV goes."""
    profile = pools[0].profile
    batch = max(1, min(profile.running_seqs_max, int(profile.kv_tokens / (prompt + output))))
    step_ms = profile.law.step_ms(batch, round(batch * (prompt + output / 2)))
    prefill_ms, decode_ms = prompt * profile.law.d_ms, output * step_ms / batch
    if len(pools) == 1:
        return pools[0].replicas * 1_000.0 / (prefill_ms + decode_ms)
    first_ms = prefill_ms + profile.law.step_ms(1, 0)
    return min(pools[0].replicas * 1_000.0 / first_ms, pools[1].replicas * 1_000.0 / decode_ms)


def _config(rng: Random, pools: tuple[Pool, ...], carried_rps: float, gateways: int, per_request: int) -> PolicyConfig:
    replicas = max(p.replicas for p in pools)
    smallest = max(1, round(replicas * rng.choice((0.25, 0.5, 1.0))))
    backlog = max(2, round(carried_rps * smallest / replicas * rng.uniform(2.0, 15.0) / gateways))
    tokens = round(backlog * per_request * rng.uniform(0.4, 2.0)) if rng.random() < 0.3 else 4_000_000
    return PolicyConfig(
        objectives=ObjectivesConfig(ttft_ms=rng.choice((500.0, 2_000.0)), itl_ms=rng.choice((40.0, 200.0))),
        admission=AdmissionConfig(
            inflight_requests_max=backlog,
            inflight_tokens_max=max(1, tokens),
            retry_after_s=rng.choice((0.5, 2.0)),
            retry_after_s_max=rng.choice((2.0, 5.0)),
            no_replica_wait_ms=rng.choice((0.0, 2_000.0, 30_000.0)),
            engine_wait_share=rng.choice((None, 0.25, 0.25, 0.9)),
            queue_requests_max=rng.choice((0, 5, 500)),
            queue_tokens_max=rng.choice((2_000, 2_000_000)),
        ),
        faults=FaultsConfig(
            attempts_max=rng.choice((1, 2, 3, 5)),
            retry_share_max=rng.choice((0.0, 0.2, 0.5)),
            retry_burst=rng.choice((0, 2, 10)),
            draining_refusals_max=rng.choice((1, 4, 16)),
            resume=rng.random() < 0.8,
            hedge_after_factor=rng.choice((None, None, 1.0, 3.0)),
            breaker_failures=rng.choice((1, 3, 5)),
            eject_ms=rng.choice((500.0, 3_000.0)),
            eject_ms_max=rng.choice((3_000.0, 10_000.0)),
            ejected_share_max=rng.choice((0.0, 0.5, 0.9)),
            probation_requests=rng.choice((1, 3)),
            grey_samples_min=rng.choice((2, 8)),
        ),
        routing=RoutingConfig(
            index_blocks_max=rng.choice((20, 500, 20_000)),
            load_bound=rng.choice((1.0, 1.5, 3.0)),
            sample_age_ms_max=rng.choice((1_000.0, 5_000.0)),
        ),
        batching=BatchingConfig(enabled=rng.random() < 0.8),
        affinity=AffinityConfig(enabled=rng.random() < 0.8),
        scaling=ScalingConfig(
            replicas_min=smallest,
            replicas_max=max(replicas, rng.choice((replicas, 2 * replicas, 12))),
            up_ticks=rng.choice((1, 3)),
            down_window_s=rng.choice((4.0, 8.0)),
            inflight_target=rng.choice((2, 8)),
        ),
        control=ControlConfig(
            tick_ms=rng.choice((1_000.0, 2_000.0, 2_000.0)),
            plan_ttl_ms=rng.choice((3_000.0, 10_000.0)),
            decisions_max=rng.choice((5, 1_000)),
            forget_after_ms=20_000.0,
        ),
    )


def _network(rng: Random) -> NetworkSpec:
    return NetworkSpec(
        client_ms=rng.choice((0.0, 0.2, 20.0)),
        hop_ms=rng.choice((0.0, 0.5, 5.0)),
        stats_period_ms=rng.choice((500.0, 4_000.0)),
        report_period_ms=rng.choice((1_000.0, 2_000.0, 2_000.0)),
        membership_lag_ms=rng.choice((0.0, 150.0, 1_500.0)),
        drain_grace_ms=rng.choice((0.0, 0.0, 1_000.0)),
        drain_ms_max=rng.choice((3_000.0, 30_000.0)),
        idle_timeout_ms=rng.choice((4_000.0, 60_000.0)),
        first_byte_timeout_ms=rng.choice((8_000.0, 60_000.0)),
        health_period_ms=rng.choice((1_000.0, 5_000.0)),
        stuck_after_ms=rng.choice((3_000.0, 30_000.0)),
    )


def _faults(rng: Random) -> tuple[Fault, ...]:
    together_s = rng.uniform(2.0, LOAD_S - 1.0) if rng.random() < 0.5 else None
    faults = [
        Fault(
            kind=rng.choice((*KINDS, "kill", "kill", "kill", "refuse", "freeze")),
            at_ns=round((together_s + rng.uniform(0.0, 0.4) if together_s else rng.uniform(0.5, LOAD_S)) * 1e9),
            duration_ns=round(rng.uniform(0.5, FAULT_S) * 1e9),
            replica=rng.randrange(12),
            factor=rng.choice((2.0, 5.0, 20.0)),
        )
        for _ in range(rng.choice((0, 1, 2, 4, 6, 6)))
    ]
    return tuple(sorted(faults, key=lambda f: f.at_ns))


def _load(rng: Random, law: StepLaw, rate_rps: float, prompt: int, output: int) -> tuple[SourceFactory, str]:
    kind = rng.choice(("poisson", "bursty", "crowd", "chat", "agents", "groups", "users"))
    lengths = LogNormal(prompt, output, rng.choice((0.0, 0.7)), rng.choice((0.0, 0.7)), 3 * max(prompt, output))
    until = Options(duration_s=LOAD_S)
    constant = RateCurve.constant(rate_rps)
    if kind == "poisson":
        source = from_curve(constant, lengths, until)
    elif kind == "bursty":
        source = from_curve(constant, lengths, until, cv=4.0)
    elif kind == "crowd":
        curve = RateCurve.flash_crowd(rate_rps / 4, rate_rps * 2, 5.0, 1.0, 6.0, 2.0, LOAD_S)
        source = from_curve(curve, lengths)
    elif kind == "chat":
        talk = Chat(
            systems=3,
            system_tokens=prompt // 2,
            turns_mean=3.0,
            turns_max=5,
            user_tokens_mean=prompt / 4,
            output_tokens_mean=output,
            think_s_mean=1.5,
            cv=0.5,
            context_tokens_max=3 * (prompt + output),
            block_tokens=16,
        )
        source = chat(RateCurve.constant(rate_rps / 3), talk, until)
    elif kind == "agents":
        task = Agents(
            rounds=1,
            helpers=2,
            helper_calls=2,
            system_tokens=prompt // 2,
            task_tokens_mean=prompt / 8,
            output_tokens_mean=output / 4,
            result_tokens_mean=prompt / 8,
            tool_s_mean=0.5,
            cv=0.3,
            block_tokens=16,
        )
        source = agents(RateCurve.constant(rate_rps / 6), task, until)
    elif kind == "groups":
        source = shared_prefix(constant, until, groups=5, prompts=4, prefix_tokens=prompt, question_tokens=20,
                               output_tokens=output, block_tokens=16)  # fmt: skip
    else:
        source = concurrency(max(1, round(rate_rps * 3)), lengths, max(1, round(rate_rps * LOAD_S)), stagger_s=1.0)
    alone_s = (prompt * law.d_ms + output * law.step_ms(1, prompt + output)) / 1e3 + 0.5
    light = RateCurve.steps([(QUIET_NS / 1e9, 0.0), (LIGHT_REQUESTS * 2 * alone_s, 1 / (2 * alone_s))])
    after = from_curve(light, Fixed(prompt, output), cv=0.0)
    words = f"load: {kind}, {rate_rps:.2f} requests/s of about {prompt} prompt and {output} output tokens"
    return mixture(source, after), words


def _words(scenario: Scenario) -> tuple[str, ...]:
    admission, clients, scaling = scenario.config.admission, scenario.clients, scenario.config.scaling
    bounds = f"{admission.inflight_requests_max} requests and {admission.inflight_tokens_max} tokens"
    patience = f"{clients.patience_ms / 1e3:g} s patience" if clients.patience_ms else "patient"
    faults = tuple(
        f"fault: {f.kind} at {f.at_ns / 1e9:.1f} s for {f.duration_ns / 1e9:.1f} s, replica {f.replica}"
        + (f", {f.factor:g} times slower" if f.kind == "slow" else "")
        for f in scenario.faults
    )
    profile, first = scenario.pools[0].profile, scenario.pools[0]
    engine = f"{profile.running_seqs_max} sequences, {profile.kv_tokens} KV tokens"
    fleet = ", ".join(f"{p.replicas} {'replicas' if p.role == 'both' else p.role}" for p in scenario.pools)
    fleet += ", fixed" if first.scaler is None else ", autoscaled" if first.scaler is ReplicaScaler else ", restless"
    fleet += f", at most {first.ongoing_max} open at one" if first.ongoing_max else ""
    return (
        f"fleet: {fleet}",
        f"engine: {profile.law.step_ms(1, 0):.1f} ms a step of one, {engine}",
        f"gateways: {scenario.gateways}, each at most {bounds}",
        f"bounds: {scaling.replicas_min}..{scaling.replicas_max} replicas",
        f"clients: {patience}, {clients.retries_max} retries, {clients.abort_share:.0%} leave early",
        *(faults or ("no faults",)),
    )
