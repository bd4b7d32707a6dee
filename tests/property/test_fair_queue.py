"""Properties of the gateway's queue, whatever comes and goes in whatever order."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from policies.admission.fair_queue import FairQueue, Waiting
from policies.config import AdmissionConfig, PolicyConfig, TasksConfig, TenantConfig
from policies.types import Priority
from tests.examples import examples

FAR_NS = 10**18
TENANTS = ("a", "b", "c", "d")
CONFIG = PolicyConfig(
    tenants={"a": TenantConfig(weight=1), "b": TenantConfig(weight=2.5), "c": TenantConfig(weight=0.3)},
    tasks=TasksConfig(tasks_max=3, credit_tokens_max=2_000),
)
TOKENS = st.integers(1, 20_000)
PLACES = st.tuples(st.sampled_from(TENANTS), st.sampled_from(list(Priority)), st.sampled_from(["", "k", "l", "m", "n"]))


def waiting(name: str, tenant: str, tokens: int, **changes: Any) -> Waiting:
    values: dict[str, Any] = {"priority": Priority.STANDARD, "task": "", "deadline_ns": None, "expires_ns": FAR_NS}
    return Waiting(request_id=name, tenant=tenant, tokens=tokens, enqueued_ns=0, **(values | changes))


class QueueMachine(RuleBasedStateMachine):
    """Every request that waits is served, removed or expires exactly once, and sums are those of who waits."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue(CONFIG)
        self.waits: dict[str, Waiting] = {}
        self.names = 0
        self.now_ns = 0

    @rule(place=PLACES, tokens=TOKENS, due=st.none() | st.integers(0, 50), lasts=st.integers(1, 60))
    def add(self, place: tuple[str, Priority, str], tokens: int, due: int | None, lasts: int) -> None:
        tenant, priority, task = place
        self.names += 1
        name = f"r{self.names}"
        expires_ns = self.now_ns + lasts
        item = waiting(name, tenant, tokens, priority=priority, task=task, deadline_ns=due, expires_ns=expires_ns)
        self.queue.add(item)
        self.waits[name] = item

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([*self.waits, "nobody"]))
        assert self.queue.remove(name) == self.waits.pop(name, None)

    @rule()
    def pop(self) -> None:
        expected = self.queue.peek()
        served = self.queue.pop()
        assert served == expected
        assert (served is None) == (not self.waits)  # work-conserving
        if served is not None:
            assert self.waits.pop(served.request_id) == served

    @rule(place=PLACES, tokens=st.integers(-20_000, 20_000))
    def charge(self, place: tuple[str, Priority, str], tokens: int) -> None:
        self.queue.charge(place[0], place[1], place[2], tokens)

    @rule(ns=st.integers(1, 30))
    def expire(self, ns: int) -> None:
        self.now_ns += ns
        found = self.queue.expired(self.now_ns)
        late = {name for name, item in self.waits.items() if item.expires_ns <= self.now_ns}
        assert {item.request_id for item in found} == late
        assert [item.expires_ns for item in found] == sorted(item.expires_ns for item in found)
        for name in late:
            del self.waits[name]

    @invariant()
    def sums_are_of_those_who_wait(self) -> None:
        assert self.queue.requests == len(self.waits)
        assert self.queue.tokens == sum(item.tokens for item in self.waits.values())
        for priority in Priority:
            above = sum(item.tokens for item in self.waits.values() if item.priority.rank < priority.rank)
            assert self.queue.tokens_above(priority) == above

    @invariant()
    def memory_is_bounded(self) -> None:
        assert len(self.queue._tasks) <= CONFIG.tasks.tasks_max
        assert len(self.queue._expiry) <= 2 * len(self.waits) + 65


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=examples(60), stateful_step_count=60, deadline=None)


@given(
    st.lists(st.tuples(st.sampled_from(TENANTS), TOKENS), min_size=1, max_size=80),
    st.integers(1, 40),
    st.integers(1, 20_000),
)
@settings(max_examples=examples(150), deadline=None)
def test_a_newcomer_waits_for_what_was_said_to_be_ahead_and_no_more(
    items: list[tuple[str, int]], served: int, tokens: int
) -> None:
    queue = FairQueue(CONFIG)
    for n, (tenant, size) in enumerate(items):
        queue.add(waiting(f"r{n}", tenant, size, task=f"k{n % 3}" if n % 2 else ""))
    for _ in range(min(served, len(items) - 1)):
        queue.pop()
    for tenant in (*TENANTS, "new"):
        said = queue.tokens_ahead(tenant, Priority.STANDARD, "", tokens)
        assert 0 <= said <= queue.tokens
    tenant = items[0][0]
    said = queue.tokens_ahead(tenant, Priority.STANDARD, "", tokens)
    queue.add(waiting("mine", tenant, tokens))
    ahead = 0
    while (item := queue.pop()) is not None and item.request_id != "mine":
        ahead += item.tokens
    assert ahead <= said


@given(
    st.dictionaries(st.sampled_from(TENANTS), st.floats(0.2, 5), min_size=2),
    st.integers(0, 2**32),
    st.integers(1, 2_000),
)
@settings(max_examples=examples(60), deadline=None)
def test_shares_under_backlog_are_within_a_tenth_of_the_weights(
    weights: dict[str, float], seed: int, size_max: int
) -> None:
    rng = random.Random(seed)
    queue = FairQueue(PolicyConfig(tenants={name: TenantConfig(weight=w) for name, w in weights.items()}))
    names = 0
    for name in weights:
        for _ in range(8):
            names += 1
            queue.add(waiting(f"r{names}", name, rng.randint(1, size_max)))
    served: Counter[str] = Counter()
    least = min(weights.values()) / sum(weights.values())
    while sum(served.values()) < 30 * size_max / least:
        item = queue.pop()
        assert item is not None
        served[item.tenant] += item.tokens
        names += 1
        queue.add(waiting(f"r{names}", item.tenant, rng.randint(1, size_max)))
    total_weight, total = sum(weights.values()), sum(served.values())
    for name, weight in weights.items():
        assert served[name] / total == pytest.approx(weight / total_weight, rel=0.1)


@given(st.lists(st.tuples(st.sampled_from(("a", "b", "c")), TOKENS), min_size=1, max_size=60), st.integers(0, 59))
@settings(max_examples=examples(100), deadline=None)
def test_a_tenant_that_comes_in_waits_for_one_request_of_each_that_was_not_served_yet_and_no_other(
    items: list[tuple[str, int]], served: int
) -> None:
    queue = FairQueue(CONFIG)
    for n, (tenant, size) in enumerate(items):
        queue.add(waiting(f"r{n}", tenant, size))
    popped = [queue.pop() for _ in range(min(served, len(items) - 1))]
    new = {tenant for tenant, _ in items} - {item.tenant for item in popped if item is not None}
    queue.add(waiting("mine", "d", 500))
    before = []
    while (item := queue.pop()) is not None and item.request_id != "mine":
        before.append(item.tenant)
    assert len(before) == len(set(before))
    assert set(before) <= new


@given(st.lists(st.tuples(PLACES, TOKENS, st.none() | st.integers(0, 9)), min_size=1, max_size=60))
@settings(max_examples=examples(100), deadline=None)
def test_nobody_starves_while_others_keep_coming(
    items: list[tuple[tuple[str, Priority, str], int, int | None]],
) -> None:
    """Every request of a backlog is served although each one that is served is replaced by an equal one."""
    queue = FairQueue(CONFIG)
    for n, ((tenant, priority, task), size, _) in enumerate(items):
        queue.add(waiting(f"r{n}", tenant, size, priority=priority, task=task))
    left = {f"r{n}" for n in range(len(items))}
    tokens = sum(size for _, size, _ in items)
    served = 0
    bound = 400 * (tokens + 20_000 * 10)
    n = len(items)
    while left:
        item = queue.pop()
        assert item is not None
        left.discard(item.request_id)
        served += item.tokens
        assert served <= bound, f"{len(left)} of {len(items)} still wait"
        queue.add(waiting(f"r{n}", item.tenant, item.tokens, priority=item.priority, task=item.task))
        n += 1


@given(st.lists(st.tuples(st.sampled_from(["k", "l", ""]), TOKENS), min_size=1, max_size=60))
@settings(max_examples=examples(100), deadline=None)
def test_calls_of_a_task_are_served_in_the_order_they_came(items: list[tuple[str, int]]) -> None:
    queue = FairQueue(PolicyConfig())
    came: dict[str, list[str]] = defaultdict(list)
    for n, (task, size) in enumerate(items):
        queue.add(waiting(f"r{n}", "a", size, task=task))
        came[task].append(f"r{n}")
    went: dict[str, list[str]] = defaultdict(list)
    while (item := queue.pop()) is not None:
        went[item.task].append(item.request_id)
    assert all(went[task] == came[task] for task in ("k", "l"))


@given(st.floats(0.02, 0.3), st.integers(300, 3_000), st.integers(300, 3_000))
@settings(max_examples=examples(40), deadline=None)
def test_the_floor_of_a_class_holds_against_any_flood_from_above(share: float, above: int, below: int) -> None:
    queue = FairQueue(PolicyConfig(admission=AdmissionConfig(class_floor_share=share)))
    served: Counter[Priority] = Counter()
    queue.add(waiting("b", "b", below, priority=Priority.BATCH))
    queue.add(waiting("b0", "b", below, priority=Priority.BATCH))
    queue.add(waiting("a0", "a", above, priority=Priority.INTERACTIVE))
    n = 0
    while served[Priority.INTERACTIVE] < 20 * (below + above) / share:
        item = queue.pop()
        assert item is not None
        n += 1
        served[item.priority] += item.tokens
        queue.add(waiting(f"{item.tenant}{n}", item.tenant, item.tokens, priority=item.priority))
    assert served[Priority.BATCH] / sum(served.values()) == pytest.approx(share, rel=0.1)
