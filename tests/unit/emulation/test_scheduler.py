from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.emulation.blocks import BlockPool, block_hashes
from deployments.emulation.scheduler import Scheduler, Sequence
from tests.examples import examples

BLOCK = 4


def scheduler(blocks: int = 64, waiting_max: int = 100) -> Scheduler:
    return Scheduler(BlockPool(blocks, BLOCK), waiting_max)


def seq(prompt: int, answer: int, first: int = 0, salt: str = "") -> Sequence:
    return Sequence(list(range(first, first + prompt)), [7] * answer, salt)


def run(s: Scheduler, steps_max: int = 10_000, seqs: int = 16, tokens: int = 64) -> int:
    """Steps until nothing is left."""
    for step in range(steps_max):
        if not s.has_work:
            return step
        s.finish(s.schedule(seqs, tokens))
    raise AssertionError("the scheduler does not finish")


# --- blocks -----------------------------------------------------------------------------------------------------------


def test_hash_of_a_block_depends_on_everything_before_it_and_on_the_salt() -> None:
    a, b = block_hashes([1, 2, 3, 4, 5, 6, 7, 8], 4), block_hashes([0, 2, 3, 4, 5, 6, 7, 8], 4)
    assert len(a) == 2
    assert not set(a) & set(b)
    assert not set(a) & set(block_hashes([1, 2, 3, 4, 5, 6, 7, 8], 4, "tenant"))
    assert block_hashes([1, 2, 3], 4) == []


def test_hashes_can_be_continued() -> None:
    tokens = list(range(12))
    assert block_hashes(tokens, 4, "s", known=block_hashes(tokens[:5], 4, "s")) == block_hashes(tokens, 4, "s")


def test_pool_gives_no_more_than_it_has() -> None:
    pool = BlockPool(3, BLOCK)
    assert pool.take_new(4) is None
    assert pool.free_blocks == 3
    assert pool.take_new(3) is not None
    assert pool.take_new(0) == []
    assert pool.used_tokens == 12


def test_known_block_is_forgotten_when_it_is_taken_for_something_else_least_recently_freed_first() -> None:
    pool = BlockPool(2, BLOCK)
    first, second = pool.take_new(1) or [], pool.take_new(1) or []
    pool.remember(first[0], 11)
    pool.remember(second[0], 22)
    pool.give_back(first)
    pool.give_back(second)
    pool.take_new(1)
    assert pool.known_prefix([11]) == []
    assert pool.known_prefix([22]) == second


def test_last_block_of_a_request_goes_before_its_first() -> None:
    pool = BlockPool(2, BLOCK)
    blocks = pool.take_new(2) or []
    for block, value in zip(blocks, (11, 22), strict=True):
        pool.remember(block, value)
    pool.give_back(blocks)
    pool.take_new(1)
    assert pool.known_prefix([11, 22]) == blocks[:1]


def test_shared_block_is_free_only_when_all_have_given_it_back() -> None:
    pool = BlockPool(2, BLOCK)
    blocks = pool.take_new(1) or []
    pool.take_known(blocks)
    pool.give_back(blocks)
    assert pool.free_blocks == 1
    pool.give_back(blocks)
    assert pool.free_blocks == 2


def test_forgetting_keeps_what_is_held() -> None:
    pool = BlockPool(2, BLOCK)
    blocks = pool.take_new(1) or []
    pool.remember(blocks[0], 11)
    pool.forget_all()
    assert pool.known_prefix([11]) == []
    assert pool.used_tokens == BLOCK


# --- steps ------------------------------------------------------------------------------------------------------------


def test_one_request_takes_one_step_for_its_prompt_and_one_for_each_further_token() -> None:
    s = scheduler()
    s.add(seq(10, 5))
    plan = s.schedule(16, 64)
    assert (plan.prefill_tokens, plan.decode_seqs, plan.kv_tokens) == (10, 0, 0)
    assert len(s.finish(plan)) == 1
    plan = s.schedule(16, 64)
    assert (plan.prefill_tokens, plan.decode_seqs, plan.kv_tokens) == (0, 1, 12)
    s.finish(plan)
    assert run(s) == 3
    assert s.pool.used_tokens == 0


def test_long_prompts_are_computed_in_chunks_of_the_budget() -> None:
    s = scheduler()
    s.add(seq(100, 1))
    sizes = []
    while s.has_work:
        plan = s.schedule(16, 40)
        sizes.append(plan.prefill_tokens)
        s.finish(plan)
    assert sizes == [40, 40, 20]


def test_decoding_sequences_come_before_a_prompt_in_the_budget() -> None:
    s = scheduler()
    for i in range(3):
        s.add(seq(4, 10, first=100 * i))
    s.finish(s.schedule(16, 64))
    s.add(seq(60, 1, first=1_000))
    plan = s.schedule(16, 16)
    assert plan.decode_seqs == 3
    assert plan.prefill_tokens == 13


def test_running_sequences_are_capped_and_the_others_wait_in_order() -> None:
    s = scheduler()
    for i in range(5):
        s.add(seq(4, 3, first=100 * i))
    plan = s.schedule(2, 64)
    assert len(plan.parts) == 2
    assert (len(s.running), len(s.waiting)) == (2, 3)
    assert [p[0].prompt[0] for p in plan.parts] == [0, 100]


def test_lower_cap_lets_running_sequences_go_on() -> None:
    s = scheduler()
    for i in range(4):
        s.add(seq(4, 5, first=100 * i))
    s.finish(s.schedule(4, 64))
    assert s.schedule(1, 64).decode_seqs == 4


def test_full_queue_refuses() -> None:
    s = scheduler(waiting_max=2)
    assert s.add(seq(1, 1))
    assert s.add(seq(1, 1))
    assert not s.add(seq(1, 1))


def test_same_prompt_again_is_read_from_the_cache_but_for_its_last_token() -> None:
    s = scheduler()
    s.add(seq(16, 1))
    run(s)
    again = seq(16, 1)
    s.add(again)
    plan = s.schedule(16, 64)
    assert again.cached_tokens == 12
    assert plan.prefill_tokens == 4
    assert (s.prefix_query_tokens_total, s.prefix_hit_tokens_total) == (32, 12)


def test_cache_does_not_cross_salts() -> None:
    s = scheduler()
    s.add(seq(16, 1, salt="a"))
    run(s)
    other = seq(16, 1, salt="b")
    s.add(other)
    s.schedule(16, 64)
    assert other.cached_tokens == 0


def test_output_is_cached_for_the_next_turn() -> None:
    s = scheduler()
    first = Sequence(list(range(8)), list(range(100, 109)))
    s.add(first)
    run(s)
    turn = Sequence([*range(8), *range(100, 109), 5, 6], [7])
    s.add(turn)
    s.schedule(16, 64)
    assert turn.cached_tokens == 16


def test_two_requests_share_the_blocks_of_a_common_beginning() -> None:
    s = scheduler(blocks=64)
    s.add(seq(32, 20))
    s.finish(s.schedule(16, 64))
    used = s.pool.used_tokens
    s.add(seq(32, 20))
    s.finish(s.schedule(16, 64))
    assert s.pool.used_tokens <= used + 2 * BLOCK


def test_too_few_blocks_preempt_the_youngest_which_later_ends_all_the_same() -> None:
    s = scheduler(blocks=8)
    old, young = seq(12, 12), seq(12, 12, first=500)
    s.add(old)
    s.add(young)
    done: list[Sequence] = []
    preempted = 0
    for _ in range(200):
        if not s.has_work:
            break
        plan = s.schedule(16, 64)
        preempted += plan.preempted
        done += [q for q, _ in s.finish(plan) if q.finished]
    assert done == [old, young]
    assert preempted == s.preemptions_total == young.preemptions > 0
    assert old.preemptions == 0
    assert s.pool.used_tokens == 0


def test_preempted_sequence_keeps_its_output_and_counts_its_prompt_lookup_once() -> None:
    s = scheduler(blocks=8)
    old, young = seq(12, 12), seq(12, 12, first=500)
    s.add(old)
    s.add(young)
    tokens = 0
    for _ in range(200):
        if s.has_work:
            tokens += len(s.finish(s.schedule(16, 64)))
    assert tokens == 24
    assert s.prefix_query_tokens_total == 24


def test_removed_sequence_gives_everything_back_running_or_waiting() -> None:
    s = scheduler()
    a, b = seq(12, 12), seq(12, 12, first=500)
    s.add(a)
    s.add(b)
    plan = s.schedule(1, 64)
    s.remove(a)
    s.remove(b)
    s.remove(b)
    assert s.finish(plan) == []
    assert not s.has_work
    assert s.pool.used_tokens == 0
    assert s.prefill_backlog_tokens == 0


def test_backlog_is_the_prompt_tokens_still_to_be_computed() -> None:
    s = scheduler()
    s.add(seq(50, 2))
    s.add(seq(30, 2, first=500))
    assert s.prefill_backlog_tokens == 80
    s.finish(s.schedule(1, 20))
    assert s.prefill_backlog_tokens == 60
    run(s)
    assert s.prefill_backlog_tokens == 0


@settings(max_examples=examples(60))
@given(st.integers(0, 2**32), st.integers(8, 40), st.integers(1, 6), st.integers(1, 40))
def test_any_load_ends_gives_every_token_once_and_leaks_no_block(seed: int, blocks: int, cap: int, budget: int) -> None:
    rng, s = random.Random(seed), scheduler(blocks)
    longest = blocks * BLOCK
    waiting = []
    for _ in range(15):
        prompt = rng.randint(1, longest - 1)
        waiting.append(Sequence([rng.randint(0, 2) for _ in range(prompt)], [7] * rng.randint(1, longest - prompt)))
    expected = {id(q): len(q.answer) for q in waiting}
    got: dict[int, int] = {}
    for _ in range(50_000):
        if waiting and rng.random() < 0.3:
            s.add(waiting.pop())
        if rng.random() < 0.01 and s.running:
            victim = rng.choice(s.running)
            s.remove(victim)
            expected[id(victim)] = victim.output_tokens
        if not waiting and not s.has_work:
            break
        plan = s.schedule(cap, budget)
        assert sum(n for _, n in plan.parts) <= budget
        assert len(s.running) <= cap
        assert plan.parts or not s.has_work
        for q, _ in s.finish(plan):
            got[id(q)] = got.get(id(q), 0) + 1
    assert not s.has_work
    assert s.pool.used_tokens == 0
    assert {k: v for k, v in expected.items() if v} == got
    assert s.prefill_backlog_tokens == 0
