"""Speculation of the emulated engine: n-gram drafts that repetitive text keeps, and the depth that moves live."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from deployments.emulation.blocks import BlockPool
from deployments.emulation.drafts import NGRAM, Drafter
from deployments.emulation.scheduler import Scheduler, Sequence
from deployments.knobs import EngineShared
from policies.speculation import Bounds
from policies.types import Knobs
from tests.unit.emulation.drive import engine

WORDS = [7, 8, 9, 10, 11]


def decode_all(prompt: list[int], answer: list[int], depth: int) -> tuple[list[int], int]:
    """Tokens in order, and the steps they took."""
    scheduler = Scheduler(BlockPool(64, 16), 10)
    scheduler.add(Sequence(prompt, answer))
    tokens: list[int] = []
    steps = 0
    while scheduler.has_work:
        tokens += [token for _, token in scheduler.finish(scheduler.schedule(4, 64, depth))]
        steps += 1
    assert scheduler.pool.used_tokens == 0
    return tokens, steps


@pytest.mark.parametrize("depth", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("seed", range(4))
def test_the_text_is_the_same_at_every_depth(depth: int, seed: int) -> None:
    rng = random.Random(seed)
    prompt, answer = rng.choices(WORDS, k=40), rng.choices(WORDS, k=100)
    assert decode_all(prompt, answer, depth)[0] == answer


def test_repetitive_text_takes_a_step_for_each_run_of_drafts() -> None:
    prompt, answer = WORDS * 3, WORDS * 20
    assert decode_all(prompt, answer, 0)[1] == 100
    assert decode_all(prompt, answer, 4)[1] == pytest.approx(1 + 99 / 5, abs=1)


def test_new_text_is_never_drafted() -> None:
    assert decode_all(list(range(40)), list(range(40, 140)), 4)[1] == 100


def test_a_draft_is_what_followed_the_last_tokens() -> None:
    drafter = Drafter([1, 2, 3, 4, 5])
    assert drafter.propose(4) == []
    drafter.add([1, 2, 3])
    assert drafter.propose(4) == [4, 5, 1, 2]
    assert drafter.propose(1) == [4]
    drafter.add([9])
    assert drafter.propose(4) == []
    assert Drafter([1] * (NGRAM - 1)).propose(4) == []


def test_drafts_stay_within_the_budget_of_a_step() -> None:
    scheduler = Scheduler(BlockPool(64, 16), 10)
    for _ in range(3):
        scheduler.add(Sequence(WORDS * 3, WORDS * 20))
    scheduler.finish(scheduler.schedule(4, 64, 8))
    plan = scheduler.schedule(4, 16, 8)
    assert sum(count for _, count in plan.parts) + plan.draft_tokens <= 16
    assert plan.draft_tokens > 0


def test_a_preempted_sequence_verifies_no_drafts() -> None:
    scheduler = Scheduler(BlockPool(6, 16), 10)
    for _ in range(2):
        scheduler.add(Sequence(WORDS * 6, WORDS * 12))
    written = 0
    while scheduler.has_work:
        plan = scheduler.schedule(4, 64, 8)
        assert set(plan.drafts) <= {id(seq) for seq, _ in plan.parts}
        written += len(scheduler.finish(plan))
    assert scheduler.preemptions_total > 0
    assert written == 2 * len(WORDS * 12)


async def test_depth_moves_live_and_records_say_at_which_a_step_ran(tmp_path: Path) -> None:
    shared = EngineShared.create(tmp_path / "shared")
    async with engine(shared=shared, speculative_depth=4, repeat_marker="again", text="tide") as e:
        assert shared.read_gauges().speculative_depth_hard == 4
        texts = []
        for depth in (None, 0, 2, 9):
            shared.write_knobs(Knobs(speculative_depth=depth))
            _, after, _ = shared.read_steps(0)
            texts.append((await e.chat("and again", max_tokens=60, stream=True).end()).text)
            await e.idle()
            assert shared.read_gauges().speculative_depth_now == {None: 4, 9: 4}.get(depth, depth)
            steps = [s for s in shared.read_steps(after)[0] if not s.prefill_tokens][1:]
            assert {s.depth for s in steps} == {shared.read_gauges().speculative_depth_now}
            assert all((s.output_tokens or 0) == s.decode_seqs + s.accepted_tokens for s in steps)
            assert any(s.draft_tokens for s in steps) == (depth != 0)
    assert len(set(texts)) == 1


async def test_an_engine_that_may_explores_other_depths(tmp_path: Path) -> None:
    shared = EngineShared.create(tmp_path / "shared")
    async with engine(shared=shared, speculative_depth=4, context_tokens_max=2_048) as e:
        shared.write_knobs(Knobs(speculative_depth=0), Bounds(0.2, 4))
        seen: set[int] = set()
        for _ in range(10):  # a trial that the machine holds up must be earned back before the next
            before = shared.read_steps(0)[1]
            await e.chat(max_tokens=400).end()
            await e.idle()
            seen |= {s.depth for s in shared.read_steps(before)[0][2:]}
            if seen > {0}:
                break
    assert seen > {0}


async def test_prompts_with_the_marker_are_answered_with_one_word(tmp_path: Path) -> None:
    async with engine(repeat_marker="again", text="tide gate") as e:
        words = (await e.chat("and again", stream=True).end()).text.split()
        assert len(set(words[:-1])) == 1  # the last one may be cut
        others = (await e.chat("once", stream=True).end()).text.split()
        assert len(set(others[:-1])) == 2
