"""Closed loops: the next request begins with the last one, comes after its pause, and does not depend on the fleet."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest

from autoscaling.simulator.spec import SimRequest, SourceFactory
from autoscaling.simulator.workload.blocks import PromptText, label_of, mix
from autoscaling.simulator.workload.conversations import Agents, Chat, agents, chat, concurrency
from autoscaling.simulator.workload.generators import poisson
from autoscaling.simulator.workload.lengths import Fixed, LogNormal
from autoscaling.simulator.workload.mixture import mixture
from autoscaling.simulator.workload.rates import RateCurve
from autoscaling.simulator.workload.trace import Options, TraceError


def played(
    factory: SourceFactory,
    latency_ns: Callable[[SimRequest], int] = lambda _request: 1_000_000_000,
    succeeds: Callable[[SimRequest], bool] = lambda _request: True,
) -> list[tuple[SimRequest, int]]:
    """Every request with the time it ended, in order of arrival."""
    source = factory(Random("1"))
    heap = [(r.arrival_ns, r.index, r) for r in source.arrivals()]
    heapq.heapify(heap)
    made: list[tuple[SimRequest, int]] = []
    ends: list[tuple[int, int, SimRequest]] = []
    while heap or ends:
        if ends and (not heap or ends[0][0] <= heap[0][0]):
            now_ns, _, request = heapq.heappop(ends)
            for follow_up in source.follow_ups(request, succeeds(request), now_ns):
                assert follow_up.arrival_ns >= now_ns
                heapq.heappush(heap, (follow_up.arrival_ns, follow_up.index, follow_up))
            continue
        _, _, request = heapq.heappop(heap)
        end_ns = request.arrival_ns + latency_ns(request)
        made.append((request, end_ns))
        heapq.heappush(ends, (end_ns, request.index, request))
    return made


def by_task(made: list[tuple[SimRequest, int]]) -> dict[str, list[tuple[SimRequest, int]]]:
    tasks: dict[str, list[tuple[SimRequest, int]]] = {}
    for request, end_ns in made:
        tasks.setdefault(request.task, []).append((request, end_ns))
    return tasks


CHAT = chat(RateCurve.constant(2.0), Chat(systems=5, turns_mean=4.0), Options(limit=200))
AGENTS = agents(RateCurve.constant(1.0), Agents(rounds=2, helpers=3, helper_calls=2), Options(limit=10))


def test_a_turn_begins_with_all_that_was_said() -> None:
    tasks = by_task(played(CHAT))
    turns = [len(turns) for turns in tasks.values()]
    assert len(turns) == 200
    assert sum(turns) / len(turns) == pytest.approx(4.0, rel=0.2)
    for task in tasks.values():
        for (before, end_ns), (after, _) in pairwise(task):
            assert after.blocks[: len(before.blocks_after)] == before.blocks_after
            assert after.prompt_tokens > before.prompt_tokens + before.output_tokens
            assert after.arrival_ns > end_ns
            assert len(before.blocks_after) == (before.prompt_tokens + before.output_tokens) // before.block_tokens
        assert [r.task_last for r, _ in task] == [False] * (len(task) - 1) + [True]


def test_conversations_share_system_prompts_by_popularity() -> None:
    firsts = [turns[0][0] for turns in by_task(played(CHAT)).values()]
    heads = [r.blocks[: 1_000 // r.block_tokens] for r in firsts]
    assert len(set(heads)) == 5
    counts = sorted((heads.count(head) for head in set(heads)), reverse=True)
    assert counts[0] / 200 == pytest.approx(1 / (1 + 1 / 2 + 1 / 3 + 1 / 4 + 1 / 5), abs=0.1)
    assert len({r.blocks for r in firsts if len(r.blocks) > 10}) == sum(len(r.blocks) > 10 for r in firsts)
    assert {r.tenant for r in firsts} == {f"chat-system-{n}" for n in range(5)}


def test_contexts_stay_below_their_limit() -> None:
    small = Chat(turns_mean=50.0, context_tokens_max=2_000, user_tokens_mean=200.0)
    made = played(chat(RateCurve.constant(1.0), small, Options(limit=30)))
    assert max(r.prompt_tokens + r.output_tokens for r, _ in made) <= 2_000
    assert all(turns[-1][0].task_last for turns in by_task(made).values())


@pytest.mark.parametrize("factory", [CHAT, AGENTS], ids=["chat", "agents"])
def test_what_a_session_asks_for_does_not_depend_on_the_fleet(factory: SourceFactory) -> None:
    def asked(latency_ns: Callable[[SimRequest], int]) -> dict[str, list[tuple[int, ...]]]:
        tasks = by_task(played(factory, latency_ns))
        return {t: sorted((r.prompt_tokens, r.output_tokens, *r.blocks) for r, _ in made) for t, made in tasks.items()}

    fast, slow = asked(lambda _r: 1_000_000), asked(lambda r: 10**9 * (1 + r.index * 7 % 11))
    assert fast == slow


def test_an_agent_task_forks_joins_and_ends_once() -> None:
    for made in by_task(played(AGENTS, lambda r: 10**9 * (1 + r.index % 3))).values():
        requests = [r for r, _ in made]
        assert len(requests) == 2 * (1 + 3 * 2) + 1
        assert sum(r.task_last for r in requests) == 1
        plan, last = requests[0], requests[-1]
        assert last.task_last
        helpers = requests[1:7]
        assert sum(r.arrival_ns == made[0][1] for r in helpers) == 3  # side by side, as soon as the plan is there
        for helper in helpers:
            assert helper.blocks[: len(plan.blocks_after)] == plan.blocks_after
        assert last.arrival_ns == max(end for _, end in made[:-1])
        assert len({r.blocks[:31] for r in requests}) == 1  # the instructions


def test_a_failed_call_ends_its_task_and_no_other() -> None:
    whole, cut = by_task(played(AGENTS)), by_task(played(AGENTS, succeeds=lambda r: r.task != "agent-3"))
    assert len(cut.pop("agent-3")) == 1
    whole.pop("agent-3")
    assert {t: len(m) for t, m in cut.items()} == {t: len(m) for t, m in whole.items()}


def test_a_helper_that_fails_lets_the_others_finish_what_is_open() -> None:
    made = by_task(played(AGENTS, lambda r: 10**9 * (1 + r.index % 5), lambda r: r.index % 15 != 4))
    assert any(len(task) < 15 for task in made.values())
    assert any(not any(r.task_last for r, _ in task) for task in made.values())


def test_fixed_concurrency_is_never_above_its_users() -> None:
    made = played(concurrency(8, LogNormal(100.0, 10.0), 100), lambda r: 10**8 * (1 + r.index % 7))
    assert len(made) == 100
    for request, _ in made:
        at = request.arrival_ns
        assert sum(r.arrival_ns <= at < end for r, end in made) <= 8
    assert all(r.task == "" and r.task_last for r, _ in made)


def test_users_go_on_after_a_failure() -> None:
    assert len(played(concurrency(4, Fixed(10, 10), 50), succeeds=lambda _r: False)) == 50
    assert len(played(concurrency(9, Fixed(10, 10), 3))) == 3


def test_a_mixture_hands_ends_to_the_part_that_asked() -> None:
    made = played(mixture(CHAT, poisson(3.0, 10, 10, limit=100), AGENTS))
    assert len({r.index for r, _ in made}) == len(made)
    tasks = by_task(made)
    assert len(tasks.pop("")) == 100
    assert len(tasks) == 200 + 10
    assert all(task[-1][0].task_last for task in tasks.values())


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Chat(systems=0), "systems must be"),
        (lambda: Chat(context_tokens_max=500), "context_tokens_max must be"),
        (lambda: Chat(turns_mean=0.5), "turns_mean must be"),
        (lambda: Agents(helpers=0), "helpers must be"),
        (lambda: Agents(rounds=1_000, helpers=1_000), "requests a task"),
        (lambda: concurrency(0, Fixed(1, 1), 1), "users must be"),
        (lambda: concurrency(1, Fixed(1, 1), 0), "requests must be"),
        (lambda: chat(RateCurve.constant(1.0)), "never ends"),
        (lambda: agents(RateCurve.constant(1.0)), "never ends"),
    ],
)
def test_impossible_sessions_are_named(make: Callable[[], object], expected: str) -> None:
    with pytest.raises(TraceError, match=expected):
        make()


def test_texts_share_blocks_exactly_as_far_as_their_pieces_agree() -> None:
    one, other = PromptText(16), PromptText(16)
    for text in (one, other):
        text.append(label_of("system"), 40)
    other.append(label_of("b"), 40)
    one.append(label_of("a"), 40)
    assert one.blocks[:2] == other.blocks[:2]
    assert one.blocks[2] != other.blocks[2]
    assert (one.tokens, len(one.blocks)) == (80, 5)
    copy = one.copy()
    copy.append(label_of("c"), 100)
    assert copy.blocks[:5] == one.blocks
    assert len(one.blocks) == 5


def test_pieces_cut_at_other_places_are_other_texts() -> None:
    whole, parts = PromptText(16), PromptText(16)
    whole.append(1, 32)
    parts.append(1, 16)
    parts.append(1, 16)
    assert whole.blocks[0] == parts.blocks[0]
    assert whole.blocks[1] != parts.blocks[1]  # the same words again, not the words after them
    whole.cut(20)
    assert (whole.tokens, whole.blocks) == (16, parts.blocks[:1])


def test_hashes_are_the_same_everywhere() -> None:
    assert mix(1, 2) == 0xBEEB8DA1658EEC67
    assert label_of("system", 3) == 0x8FB975A40A204E6D
    assert label_of("system", 3) != label_of("system3")
    assert len({mix(a, b) for a in range(100) for b in range(100)}) == 10_000
