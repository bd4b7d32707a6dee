"""The fast engine against the plain one: same events at the same ns, same preemptions, hits, counts, gauges."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaling.simulator.engine import Job, SimEngine
from autoscaling.simulator.spec import EngineProfile, SimRequest, StepLaw
from deployments.emulation.blocks import BlockPool
from deployments.emulation.scheduler import Scheduler, Sequence
from policies.types import LATENCY_BOUNDS_MS, Knobs
from tests.examples import examples
from tests.property.reference_engine import RefEngine, RefJob

LAW = StepLaw(a_ms=4.0, b_ms=0.25, c_ms=0.5, d_ms=0.125, e_ms=4.0)
"""Every duration is a whole number of ns, even its half, so that both engines round nothing and must agree exactly."""


def profile(
    blocks: int, seqs: int, tokens: int, *, cache: bool = True, reserve: bool = True, ahead: bool = False
) -> EngineProfile:
    return EngineProfile(
        "test", "none", 1, "none", LAW, blocks * 4, 10_000, 0.0, 0.0, "made up", block_tokens=4, running_seqs_max=seqs,
        step_tokens_max=tokens, prefix_cache=cache, reserve_full_prompt=reserve, async_scheduling=ahead,
    )  # fmt: skip


@dataclass(frozen=True)
class Arrival:
    gap_us: int
    prompt: int
    output: int
    family: int
    shared: int
    kind: str
    leaves_us: int | None


@dataclass(frozen=True)
class Change:
    at_us: int
    speed: float | None
    knobs: Knobs


arrivals = st.builds(
    Arrival,
    gap_us=st.integers(0, 9_000),
    prompt=st.integers(1, 120),
    output=st.integers(1, 60),
    family=st.integers(0, 2),
    shared=st.integers(0, 12),
    kind=st.sampled_from(["plain", "plain", "plain", "prefill_only", "kv_ready"]),
    leaves_us=st.none() | st.none() | st.integers(0, 300_000),
)
knobs = st.builds(Knobs, st.none() | st.integers(1, 8), st.none() | st.integers(1, 64))
changes = st.builds(
    Change, at_us=st.integers(0, 600_000), speed=st.none() | st.sampled_from([0.5, 2.0, 3.0, math.inf]), knobs=knobs
)
profiles = st.builds(
    profile,
    st.integers(46, 120),
    st.integers(1, 12),
    st.integers(12, 96),
    cache=st.booleans(),
    reserve=st.booleans(),
    ahead=st.booleans(),
)


def chain(family: int, shared: int, count: int, own: int) -> tuple[int, ...]:
    """Hashes of ``count`` blocks, of which the first ``shared`` are those of a family."""
    return tuple(family * 1_000 + i if i < shared else 10_000 + own * 100 + i for i in range(count))


def requests(plan: list[Arrival], unit: int) -> list[SimRequest]:
    at_ns, made = 0, []
    for i, a in enumerate(plan):
        at_ns += a.gap_us * 1_000
        after = chain(a.family, a.shared, (a.prompt + a.output) // unit, i)
        known = after if a.shared % 2 else ()
        made.append(SimRequest(i, at_ns, a.prompt, a.output, after[: a.prompt // unit], unit, known))
    return made


class Both:
    """Two engines that get the same calls, and whose states are compared after each."""

    def __init__(self, engine_profile: EngineProfile) -> None:
        self.fast, self.plain = SimEngine(engine_profile, Random(1), learn=False), RefEngine(engine_profile)
        self.events: list[tuple[int, str, int]] = []
        self.jobs: list[tuple[Job, RefJob]] = []

    def drive(self, upto_ns: int) -> None:
        while (at_ns := self.fast.wake_ns()) is not None and at_ns <= upto_ns:
            self.events += [(e.at_ns, e.kind, e.job.request.index) for e in self.fast.advance(at_ns)]

    def check(self, now_ns: int) -> None:
        self.drive(now_ns)
        self.events += [(e.at_ns, e.kind, e.job.request.index) for e in self.fast.advance(now_ns)]
        plain = self.plain
        plain.run_until(now_ns)
        assert self.events == plain.events
        gauges = self.fast.gauges(now_ns)
        assert (gauges.running, gauges.waiting) == (len(plain.running), len(plain.waiting))
        assert gauges.kv_tokens_used == (plain.blocks_max - len(plain.queue)) * plain.block
        backlog = sum(j.tokens for j in plain.waiting)
        backlog += sum(j.tokens - j.computed for j in plain.running if not j.decoding)
        assert gauges.prefill_backlog_tokens == backlog
        for job, ref in self.jobs:
            assert self.fast.output_done(job, now_ns) == (ref.output_done if ref.said is None else ref.said)


def play(engine_profile: EngineProfile, unit: int, plan: list[Arrival], turns: list[Change], looks: list[int]) -> Both:
    both = Both(engine_profile)
    calls: list[tuple[int, int, object]] = []
    for request, a in zip(requests(plan, unit), plan, strict=True):
        first, ready = a.kind == "prefill_only", a.kind == "kv_ready"
        fast = Job(request, a.output, prefill_only=first, kv_ready=ready)
        pair = (fast, RefJob(request, 1 if first else a.output, kv_ready=ready))
        calls.append((request.arrival_ns, 0, pair))
        if a.leaves_us is not None:
            calls.append((request.arrival_ns + a.leaves_us * 1_000, 1, pair))
    calls += [(turn.at_us * 1_000, 2, turn) for turn in turns]
    calls += [(look * 1_000, 3, None) for look in looks]
    calls.append((700_000_000, 2, Change(0, 1.0, Knobs())))
    for at_ns, _, what in sorted(calls, key=lambda call: call[:2]):
        both.drive(at_ns)
        if isinstance(what, Change):
            both.fast.set_knobs(what.knobs, at_ns)
            both.plain.run_until(at_ns)
            both.plain.knobs = what.knobs
            if what.speed is not None:
                both.fast.set_speed(what.speed, at_ns)
                both.plain.set_speed(what.speed, at_ns)
        elif isinstance(what, tuple):
            if what in both.jobs:
                both.fast.abort(what[0], at_ns)
                both.plain.abort(what[1], at_ns)
            else:
                both.jobs.append(what)
                both.fast.submit(what[0], at_ns)
                both.plain.submit(what[1], at_ns)
        both.check(at_ns)
    both.check(10**13)
    return both


@settings(max_examples=examples(80), deadline=None)
@given(
    profiles,
    st.sampled_from([4, 8, 12]),
    st.lists(arrivals, min_size=1, max_size=14),
    st.lists(changes, max_size=4),
    st.lists(st.integers(0, 900_000), max_size=6),
)
def test_fast_engine_is_the_plain_one(
    engine_profile: EngineProfile, unit: int, plan: list[Arrival], turns: list[Change], looks: list[int]
) -> None:
    both = play(engine_profile, unit, plan, turns, looks)
    plain, window = both.plain, both.fast.take_window(10**13)
    for job, ref in both.jobs:
        assert (job.first_token_ns, job.finished_ns, job.aborted) == (
            ref.first_token_ns, ref.finished_ns, ref.aborted
        )  # fmt: skip
        assert (job.cached_tokens, job.preemptions) == (ref.cached_tokens, ref.preemptions)
        assert job.aborted or job.finished_ns is not None
    assert (window.prefill_tokens, window.decode_tokens) == (plain.prefilled, plain.written)
    assert (window.prefix_query_tokens, window.prefix_hit_tokens) == (plain.queried, plain.hit)
    assert (window.preemptions, window.steps) == (plain.preempted, plain.step)
    counts = [0] * (len(LATENCY_BOUNDS_MS) + 1)
    for gap in plain.gaps:
        counts[sum(gap > bound * 1e6 for bound in LATENCY_BOUNDS_MS)] += 1
    assert window.itl.counts == tuple(counts)
    assert window.itl.sum_ms == pytest.approx(sum(plain.gaps) / 1e6)
    assert both.fast.gauges(10**13).kv_tokens_used == 0


def emulated(engine_profile: EngineProfile, plan: list[SimRequest]) -> list[tuple[int, str, int]]:
    """Events of ``deployments/emulation``'s scheduler under the same law, step by step."""
    law, pool = engine_profile.law, BlockPool(engine_profile.kv_tokens // 4, 4)
    scheduler, todo, owner = Scheduler(pool, 1_000), list(plan), {}
    events: list[tuple[int, str, int]] = []
    wrote: dict[int, int] = {}
    now_ns = 0
    while todo or scheduler.has_work:
        if not scheduler.has_work:
            now_ns = max(now_ns, todo[0].arrival_ns)
        while todo and (todo[0].arrival_ns < now_ns or not scheduler.has_work):
            request = todo.pop(0)
            words = [(unit, i) for unit in request.blocks for i in range(4)]
            tokens = [unit * 10 + i for unit, i in words]
            tokens += [-request.index * 1_000 - i for i in range(request.prompt_tokens - len(tokens))]
            seq = Sequence(tokens, [-(10**6) - request.index * 1_000 - i for i in range(request.output_tokens)])
            owner[id(seq)] = (request.index, seq)
            scheduler.add(seq)
        if not engine_profile.prefix_cache:
            pool.forget_all()
        step = scheduler.schedule(engine_profile.running_seqs_max, engine_profile.step_tokens_max)
        decoding = {id(seq) for seq, _ in step.parts if wrote.get(id(seq)) == seq.preemptions}
        chunks = [(n, seq.computed_tokens) for seq, n in step.parts if id(seq) not in decoding]
        context = sum(seq.computed_tokens for seq, _ in step.parts)
        pairs = sum(n * (p + n / 2) for n, p in chunks)
        now_ns += round(law.step_ms(len(step.parts), context, sum(n for n, _ in chunks), pairs) * 1e6)
        ended = scheduler.finish(step)
        wrote |= {id(seq): seq.preemptions for seq, _ in ended}
        events += [(now_ns, "finished", owner[id(s)][0]) for s, _ in ended if id(s) in decoding and s.finished]
        for seq, _ in ended:
            if id(seq) in decoding:
                continue
            if seq.output_tokens == 1:
                events.append((now_ns, "first_token", owner[id(seq)][0]))
            if seq.finished:
                events.append((now_ns, "finished", owner[id(seq)][0]))
    return events


def modelled(engine_profile: EngineProfile, plan: list[SimRequest]) -> list[tuple[int, str, int]]:
    engine = SimEngine(engine_profile, Random(1), learn=False)
    events: list[tuple[int, str, int]] = []
    for request in plan:
        engine.submit(Job(request, request.output_tokens), request.arrival_ns)
    while (at_ns := engine.wake_ns()) is not None:
        events += [(e.at_ns, e.kind, e.job.request.index) for e in engine.advance(at_ns)]
    return events


sizes = st.lists(st.tuples(st.integers(1, 9_000), st.integers(1, 120), st.integers(1, 60)), min_size=1, max_size=14)


@settings(max_examples=examples(25), deadline=None)
@given(sizes, st.integers(46, 90), st.integers(1, 12), st.integers(12, 96))
def test_model_is_the_emulated_engine_when_blocks_are_scarce(
    plan: list[tuple[int, int, int]], blocks: int, seqs: int, tokens: int
) -> None:
    at_ns, load = 0, []
    for i, (gap_us, prompt, output) in enumerate(plan):
        at_ns += gap_us * 1_000 + 1
        load.append(SimRequest(i, at_ns, prompt, output, (), 4))
    engine_profile = profile(blocks, seqs, max(seqs, tokens), reserve=False, cache=False)
    assert modelled(engine_profile, load) == emulated(engine_profile, load)


@settings(max_examples=examples(25), deadline=None)
@given(st.lists(arrivals, min_size=1, max_size=14), st.integers(12, 96))
def test_model_is_the_emulated_engine_with_a_prefix_cache(plan: list[Arrival], tokens: int) -> None:
    """One after the other, so that nothing depends on whether blocks are findable in the very step that fills them, and
    without eviction: the emulated engine reuses empty blocks in another order.
    """
    load = []
    for i, a in enumerate(plan):
        units = chain(a.family, a.shared, a.prompt // 4, i)
        load.append(SimRequest(i, 1 + i * 10**10, a.prompt, a.output, units, 4))
    engine_profile = profile(2_000, 4, tokens, reserve=False)
    assert modelled(engine_profile, load) == emulated(engine_profile, load)
