"""A choice from the shortlist against one that looks at every replica, over random histories of one gateway.

Claims: in a fleet of up to ``SIZE`` available replicas both are the same in every figure; beyond, predictions of those
on the list are the same, the first is at most :data:`FACTOR` slower than the best of all, and nobody who is available
is ever missed.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.build import Policies, build_policies
from policies.config import PolicyConfig, RoutingConfig
from policies.routing.fleet import SAMPLES_AT_ONCE, SAMPLES_PER_CHOICE
from policies.routing.shortlist import SIZE
from policies.types import Request, RouteChoice, StepCoefficients
from tests.examples import examples
from tests.unit.routing.build import chain, request

MS = 1_000_000
FACTOR, FACTOR_MS = 1.25, 5.0
"""TTFT of the replica chosen from a shortlist, against that of the one chosen among all (who are equals within a tenth,
at least 5 ms)."""

H100 = StepCoefficients(6.0, 0.06, 0.03, 0.015)
L40S = StepCoefficients(18.0, 0.15, 0.12, 0.07)
CPU = StepCoefficients(30.0, 1.8, 0.5, 1.9)
KINDS: dict[str, tuple[tuple[StepCoefficients, int, int, int], ...]] = {
    "one kind": ((H100, 256, 400_000, 2_048),),
    "mixed": ((H100, 256, 400_000, 2_048), (L40S, 128, 150_000, 2_048)),
    "few slots": ((CPU, 16, 60_000, 512),),
}
"""Step model, slots, KV tokens and token budget of the replicas of a fleet."""


class Gateway:
    """One gateway's policies and what happens to them, drawn from ``rng``."""

    def __init__(self, rng: Random, kind: str, replicas: int, odd: bool) -> None:
        self.rng, self.odd = rng, odd
        self.kinds = KINDS[kind]
        self.policies: Policies = build_policies(PolicyConfig(routing=RoutingConfig(sample_age_ms_max=5_000)), seed=1)
        self.now_ns = 0
        self.made = 0
        self.members: list[str] = []
        self.open: list[str] = []
        for _ in range(replicas):
            self.join()
        self.update()

    def join(self) -> None:
        self.members.append(f"r{self.made}")
        self.made += 1

    def stats(self, replica_id: str) -> dict[str, object] | None:
        rng = self.rng
        step, slots, kv_tokens_max, chunk = self.kinds[int(replica_id[1:]) % len(self.kinds)]
        running = rng.randrange(slots // 2 if slots > 16 else 20)
        stats: dict[str, object] = {
            "seq": rng.randrange(10**9), "running": min(slots, running), "waiting": max(0, running - slots),
            "prefill_backlog_tokens": rng.choice((0, 0, rng.randrange(6_000))),
            "kv_tokens_used": min(kv_tokens_max, running * rng.randrange(200, 3_000)), "kv_tokens_max": kv_tokens_max,
            "running_seqs_max": slots, "step_tokens_max": chunk, "step_a_ms": step.a_ms * rng.uniform(0.95, 1.05),
            "step_b_ms": step.b_ms, "step_c_ms": step.c_ms, "step_d_ms": step.d_ms * rng.uniform(0.95, 1.05),
            "step_samples": 500, "state": rng.choice(("ready",) * 20 + ("draining", "stuck")),
        }  # fmt: skip
        if self.odd and rng.random() < 0.3:
            for key in rng.sample(sorted(stats), 3):
                stats[key] = rng.choice((None, -1, float("nan"), "x", 0))
        return None if rng.random() < 0.1 else stats

    def update(self) -> None:
        told = [r for r in self.members if self.rng.random() < 0.7]
        known = {r: self.stats(r) if r in told else None for r in self.members}
        self.policies.update_members(known, self.now_ns)

    def prompt(self) -> Request:
        rng = self.rng
        blocks = chain(rng.randrange(6), rng.choice((0, 1, 5, 20, 60)))
        if len(blocks) > 3 and rng.random() < 0.5:
            blocks = blocks[: rng.randrange(1, len(blocks))] + chain(rng.randrange(10**6), 5)
        self.made += 1
        return request(blocks, len(blocks) * 64 + rng.randrange(1, 200), f"tg-{self.made}")

    def live(self, prompt: Request, exclude: frozenset[str] = frozenset()) -> RouteChoice:
        return self.policies.choose(prompt, exclude, self.now_ns)

    def exhaustive(self, prompt: Request, exclude: frozenset[str] = frozenset()) -> RouteChoice:
        views = self.policies.fleet.views(self.now_ns, exclude)
        return self.policies.router.choose(prompt, views, None, self.now_ns)

    def happen(self) -> None:
        """One thing happens."""
        rng, book = self.rng, self.policies.flow_context.book
        self.now_ns += rng.choice((0, 1, 300 * MS, 2_500 * MS))
        match rng.randrange(8):
            case 0:
                self.update()
            case 1 if len(self.members) > 1 and rng.random() < 0.3:
                self.members.remove(rng.choice(self.members))
                self.update()
            case 2 if rng.random() < 0.3:
                self.join()
                self.update()
            case 3 if self.open:
                book.first_byte(rng.choice(self.open))
            case 4 if self.open:
                book.released(self.open.pop(rng.randrange(len(self.open))))
            case _:
                prompt = self.prompt()
                choice = self.live(prompt)
                if choice.order:
                    replica_id = rng.choice(choice.order[:3])
                    uncached = prompt.prompt_tokens - choice.predicted_hit_tokens[replica_id]
                    book.dispatched(replica_id, prompt.request_id, uncached, prompt.prompt_tokens)
                    self.policies.router.dispatched(prompt, replica_id)
                    self.open.append(prompt.request_id)


kinds = st.sampled_from(sorted(KINDS))
seeds = st.integers(0, 2**32)


@settings(max_examples=examples(60), deadline=None)
@given(seeds, kinds, st.integers(1, SIZE), st.booleans())
def test_in_a_small_fleet_the_choice_is_that_of_looking_at_everybody(
    seed: int, kind: str, replicas: int, odd: bool
) -> None:
    gateway = Gateway(Random(seed), kind, replicas, odd)
    for _ in range(40):
        gateway.happen()
        if len(gateway.members) <= SIZE:
            prompt = gateway.prompt()
            exclude = frozenset(gateway.rng.sample(gateway.members, gateway.rng.randrange(len(gateway.members) + 1)))
            assert gateway.live(prompt, exclude) == gateway.exhaustive(prompt, exclude)


@settings(max_examples=examples(40), deadline=None)
@given(seeds, kinds, st.integers(SIZE + 1, SAMPLES_AT_ONCE), st.booleans())
def test_in_a_large_fleet_figures_are_the_same_and_nobody_is_missed(
    seed: int, kind: str, replicas: int, odd: bool
) -> None:
    gateway = Gateway(Random(seed), kind, replicas, odd)
    for _ in range(30):
        gateway.happen()
    prompt, exclude = gateway.prompt(), set(gateway.rng.sample(gateway.members, replicas // 10))
    everybody = gateway.exhaustive(prompt, frozenset(exclude))
    left = set(everybody.order)
    while True:
        choice = gateway.live(prompt, frozenset(exclude))
        assert len(choice.order) == len(set(choice.order)) == min(SIZE, len(left))
        assert left.issuperset(choice.order)
        assert all(choice.predicted_ttft_ms[r] == everybody.predicted_ttft_ms[r] for r in choice.order)
        assert all(choice.predicted_hit_tokens[r] == everybody.predicted_hit_tokens[r] for r in choice.order)
        if not left:
            assert choice.reason.code == "none_available"
            return
        exclude.add(choice.order[0])
        left.remove(choice.order[0])


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("replicas", [20, 64, 3 * SAMPLES_AT_ONCE])
def test_in_a_large_fleet_the_first_is_about_as_fast_as_the_best_of_all(kind: str, replicas: int) -> None:
    rng = Random(f"{kind}/{replicas}")
    for _ in range(3):
        gateway = Gateway(rng, kind, replicas, odd=False)
        for _ in range(30):
            gateway.happen()
            for _ in range(replicas // SAMPLES_PER_CHOICE):
                gateway.policies.fleet.board(gateway.now_ns)
            prompt = gateway.prompt()
            choice, everybody = gateway.live(prompt), gateway.exhaustive(prompt)
            ttft_ms = everybody.predicted_ttft_ms
            assert ttft_ms[choice.order[0]] <= FACTOR * ttft_ms[everybody.order[0]] + FACTOR_MS
