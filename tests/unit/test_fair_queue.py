"""The gateway's queue: who is next, and what is forgotten."""

from __future__ import annotations

import itertools

import pytest

from policies.admission.class_queue import IDLE_TENANTS_MAX
from policies.admission.fair_queue import FairQueue, Waiting
from policies.config import AdmissionConfig, PolicyConfig, TasksConfig, TenantConfig
from policies.types import Priority

FAR_NS = 10**18


class Queue(FairQueue):
    """A queue with short words for tests."""

    def __init__(self, config: PolicyConfig | None = None) -> None:
        super().__init__(config or PolicyConfig())
        self._names = itertools.count()

    def put(
        self,
        tenant: str = "t",
        tokens: int = 100,
        priority: Priority = Priority.STANDARD,
        task: str = "",
        deadline_ns: int | None = None,
        expires_ns: int = FAR_NS,
        name: str | None = None,
    ) -> str:
        name = name or f"r{next(self._names)}"
        self.add(Waiting(name, tenant, priority, task, tokens, deadline_ns, expires_ns, 0))
        return name

    def drain(self, count: int | None = None) -> list[str]:
        popped = (self.pop() for _ in range(self.requests if count is None else count))
        return [waiting.request_id for waiting in popped if waiting is not None]

    def next(self) -> Waiting:
        waiting = self.pop()
        assert waiting is not None
        return waiting


def weights(**weight: float) -> PolicyConfig:
    return PolicyConfig(tenants={name: TenantConfig(weight=value) for name, value in weight.items()})


# --- in and out -------------------------------------------------------------------------------------------------------


def test_equal_requests_of_one_tenant_go_in_the_order_they_came() -> None:
    queue = Queue()
    names = [queue.put() for _ in range(20)]
    assert queue.drain() == names


def test_peek_says_who_pop_takes() -> None:
    queue = Queue(weights(a=1, b=2))
    for n in range(30):
        queue.put("ab"[n % 2], 50 + n, list(Priority)[n % 3])
    while queue.requests:
        assert queue.peek() == queue.pop()
    assert queue.peek() is None
    assert queue.pop() is None


def test_a_class_that_is_skipped_for_long_goes_ahead_of_others_once_and_not_as_often_as_it_was_skipped() -> None:
    queue = Queue()
    for _ in range(50):
        queue.put("heavy", priority=Priority.BATCH)
    for _ in range(2_000):
        queue.put("light", priority=Priority.INTERACTIVE)
        assert queue.pop({"heavy"}) is not None
    for _ in range(50):
        queue.put("light", priority=Priority.INTERACTIVE)
    assert [queue.next().tenant for _ in range(10)] == ["heavy"] + ["light"] * 9


def test_an_id_that_waits_cannot_be_added_again() -> None:
    queue = Queue()
    queue.put(name="r")
    with pytest.raises(ValueError, match="waits already"):
        queue.put(name="r")
    assert queue.requests == 1


def test_a_removed_request_is_not_served_and_a_second_removal_finds_nothing() -> None:
    queue = Queue()
    names = [queue.put(task="same") for _ in range(3)]
    removed = queue.remove(names[1])
    assert removed is not None
    assert removed.request_id == names[1]
    assert queue.remove(names[1]) is None
    assert queue.drain() == [names[0], names[2]]


def test_tokens_and_requests_return_to_zero_whatever_way_requests_leave() -> None:
    queue = Queue()
    for n in range(30):
        queue.put(f"t{n % 3}", 10 + n, list(Priority)[n % 3], task=f"k{n % 2}", expires_ns=n)
    assert (queue.requests, queue.tokens) == (30, sum(range(10, 40)))
    queue.expired(9)
    for n in range(10, 20):
        queue.remove(f"r{n}")
    queue.drain()
    assert (queue.requests, queue.tokens) == (0, 0)


def test_those_whose_time_is_over_come_out_once_and_earliest_first() -> None:
    queue = Queue()
    late, early, never = queue.put(expires_ns=20), queue.put(expires_ns=10), queue.put()
    assert queue.expired(9) == []
    assert [w.request_id for w in queue.expired(20)] == [early, late]
    assert queue.expired(20) == []
    assert queue.drain() == [never]


def test_an_id_that_waits_a_second_time_expires_by_its_second_time() -> None:
    queue = Queue()
    queue.put(name="r", expires_ns=10)
    queue.remove("r")
    queue.put(name="r", expires_ns=30)
    assert queue.expired(20) == []
    assert [w.request_id for w in queue.expired(30)] == ["r"]


# --- classes ----------------------------------------------------------------------------------------------------------


def test_more_important_classes_go_first() -> None:
    queue = Queue(PolicyConfig(admission=AdmissionConfig(class_floor_share=0.0)))
    batch, standard, interactive = (queue.put(priority=p) for p in reversed(Priority))
    assert queue.drain() == [interactive, standard, batch]


@pytest.mark.parametrize("share", [0.05, 0.2])
def test_a_class_that_waits_gets_its_floor_share_under_a_flood_from_above(share: float) -> None:
    queue = Queue(PolicyConfig(admission=AdmissionConfig(class_floor_share=share)))
    for _ in range(400):
        queue.put(priority=Priority.BATCH, tokens=500)
    served = 0
    for _ in range(2_000):
        queue.put(priority=Priority.INTERACTIVE, tokens=100)
        if queue.next().priority is Priority.BATCH:
            served += 500
    total = 2_000 * 100 + served - queue.tokens_above(Priority.BATCH)
    assert served / total == pytest.approx(share, rel=0.15)


def test_the_floor_is_earned_by_waiting_and_not_saved_up_while_the_class_is_empty() -> None:
    queue = Queue(PolicyConfig(admission=AdmissionConfig(class_floor_share=0.1)))
    for _ in range(100):
        queue.put(priority=Priority.INTERACTIVE)
        queue.pop()
    queue.put(priority=Priority.BATCH, tokens=100)
    for _ in range(9):
        queue.put(priority=Priority.INTERACTIVE)
    assert [queue.next().priority for _ in range(9)] == [Priority.INTERACTIVE] * 9


def test_work_that_went_past_the_queue_earns_the_floor_too() -> None:
    queue = Queue(PolicyConfig(admission=AdmissionConfig(class_floor_share=0.1)))
    batch = queue.put(priority=Priority.BATCH, tokens=100)
    queue.put(priority=Priority.INTERACTIVE)
    queue.charge("t", Priority.INTERACTIVE, "", 1_000)
    assert queue.next().request_id == batch


# --- tenants ----------------------------------------------------------------------------------------------------------


def test_service_follows_weights_under_backlog() -> None:
    queue = Queue(weights(a=1, b=3))
    for n in range(400):
        queue.put("a", 80 + n % 40)
        queue.put("b", 60 + n % 80)
    served = {"a": 0, "b": 0}
    for _ in range(300):
        waiting = queue.next()
        served[waiting.tenant] += waiting.tokens
    assert served["b"] / served["a"] == pytest.approx(3, rel=0.1)


def test_a_tenant_that_just_came_waits_for_no_request_of_one_that_floods() -> None:
    queue = Queue()
    for _ in range(100):
        queue.put("flood", 1_000)
    queue.drain(40)
    mine = queue.put("small", 100)
    assert queue.drain(2)[0] == mine


def test_a_tenant_that_was_away_saved_nothing_up() -> None:
    queue = Queue()
    queue.put("away", 100)
    for _ in range(50):
        queue.put("busy", 100)
    queue.drain(30)
    for _ in range(20):
        queue.put("away", 100)
    first = [queue.next().tenant for _ in range(20)]
    assert 9 <= first.count("away") <= 11


def test_what_was_used_while_nobody_waited_counts_against_nobody() -> None:
    queue = Queue()
    queue.charge("early", Priority.STANDARD, "", 1_000_000)
    for _ in range(10):
        queue.put("late", 100)
        queue.put("early", 100)
    tenants = [queue.next().tenant for _ in range(10)]
    assert tenants.count("early") == 5


def test_work_past_the_queue_counts_while_others_wait() -> None:
    queue = Queue()
    for _ in range(20):
        queue.put("a", 100)
        queue.put("b", 100)
    queue.charge("a", Priority.STANDARD, "", 500)
    assert [queue.next().tenant for _ in range(5)] == ["b"] * 5


def test_a_correction_gives_back_what_was_counted_too_much() -> None:
    queue = Queue()
    for _ in range(20):
        queue.put("a", 1_000)
        queue.put("b", 1_000)
    assert queue.next().tenant == "a"
    queue.charge("a", Priority.STANDARD, "", -900)
    assert queue.next().tenant == "b"
    assert queue.next().tenant == "a"
    queue.charge("a", Priority.STANDARD, "", -900)
    assert queue.next().tenant == "a"  # 200 used against 1,000


def test_a_correction_from_an_earlier_backlog_gives_no_credit_in_this_one() -> None:
    queue = Queue()
    queue.put("a", 10_000)
    queue.drain()
    for _ in range(20):
        queue.put("a", 100)
        queue.put("b", 100)
    queue.charge("a", Priority.STANDARD, "", -9_900)
    assert [queue.next().tenant for _ in range(10)].count("a") == 5


def test_the_weight_of_a_tenant_without_configuration_is_that_of_the_default() -> None:
    queue = Queue(weights(default=2, paid=4))
    for _ in range(100):
        queue.put("unknown", 100)
        queue.put("paid", 100)
    assert [queue.next().tenant for _ in range(60)].count("paid") == pytest.approx(40, abs=2)


# --- requests of one tenant -------------------------------------------------------------------------------------------


def test_deadlines_go_first_and_the_earliest_of_them_before_the_others() -> None:
    queue = Queue()
    plain = queue.put()
    late, early = queue.put(deadline_ns=2_000), queue.put(deadline_ns=1_000)
    assert queue.drain() == [early, late, plain]


def test_deadlines_of_one_tenant_do_not_come_before_another_tenants_turn() -> None:
    queue = Queue()
    for _ in range(10):
        queue.put("hasty", deadline_ns=1)
    for _ in range(10):
        queue.put("calm")
    assert [queue.next().tenant for _ in range(10)].count("calm") == 5


def test_a_call_of_an_old_task_goes_ahead_of_newcomers() -> None:
    queue = Queue()
    queue.put(task="agent")
    for _ in range(20):
        queue.put()
    queue.drain(11)  # the agent's call and ten others
    call = queue.put(task="agent")
    assert queue.next().request_id == call


def test_a_task_that_took_more_than_half_while_others_waited_falls_behind_newcomers() -> None:
    queue = Queue()
    queue.put(task="heavy")
    queue.put()
    queue.charge("t", Priority.STANDARD, "heavy", 2_000)
    call = queue.put(task="heavy")
    for _ in range(5):
        queue.put()
    assert queue.drain()[-1] == call


def test_a_task_served_alone_gets_about_half_beside_newcomers_from_then_on() -> None:
    queue = Queue()
    for _ in range(40):
        queue.put(task="heavy")
    queue.drain(20)
    newcomers = [queue.put() for _ in range(3)]
    assert set(newcomers) <= set(queue.drain(6))


def test_calls_of_one_task_keep_their_order_whatever_their_sizes() -> None:
    queue = Queue()
    queue.put(tokens=500)
    names = [queue.put(task="k", tokens=tokens) for tokens in (4_000, 10, 900, 1)]
    assert [name for name in queue.drain() if name in names] == names


def test_a_thousand_calls_at_once_are_one_task_and_not_a_thousand() -> None:
    queue = Queue()
    for _ in range(1_000):
        queue.put(task="fan")
    queue.drain(10)
    single = queue.put()
    assert single in queue.drain(2)


@pytest.mark.parametrize(("credit_tokens_max", "ahead_most"), [(300, 10), (65_536, 20)])
def test_an_old_task_goes_ahead_of_those_that_wait_by_no_more_than_its_credit(
    credit_tokens_max: int, ahead_most: int
) -> None:
    queue = Queue(PolicyConfig(tasks=TasksConfig(credit_tokens_max=credit_tokens_max)))
    queue.put(task="old")
    for _ in range(100):
        queue.put()
    queue.drain(61)
    calls = [queue.put(task="old") for _ in range(20)]
    ahead = len(set(queue.drain(20)) & set(calls))
    assert ahead_most - 3 <= ahead <= ahead_most


def test_a_short_prompt_does_not_wait_for_all_long_ones_of_its_tenant() -> None:
    queue = Queue()
    for _ in range(50):
        queue.put(tokens=10_000)
    queue.drain(5)
    short = queue.put(tokens=50)
    assert short in queue.drain(2)


def test_a_long_prompt_waits_for_at_most_twice_what_was_ahead_of_it_however_many_short_ones_come() -> None:
    queue = Queue()
    for _ in range(50):
        queue.put(tokens=100)
    long = queue.put(tokens=8_000)
    served = 0
    while True:
        queue.put(tokens=100)
        waiting = queue.next()
        if waiting.request_id == long:
            break
        served += waiting.tokens
        assert served <= 2 * 5_000 + 100


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_tasks_beyond_the_bound_are_forgotten_longest_unheard_of_first() -> None:
    queue = Queue(PolicyConfig(tasks=TasksConfig(tasks_max=5)))
    for n in range(50):
        queue.put(task=f"k{n}")
    assert len(queue._tasks) == 5
    assert [key[2] for key in queue._tasks] == [f"k{n}" for n in range(45, 50)]
    assert len(queue.drain()) == 50


def test_idle_tenants_beyond_the_bound_are_forgotten() -> None:
    queue = Queue()
    for n in range(IDLE_TENANTS_MAX + 50):
        queue.charge(f"t{n}", Priority.STANDARD, "", 10)
        queue.put(f"u{n}")
        queue.drain()
    assert queue._classes[Priority.STANDARD].tenants == IDLE_TENANTS_MAX


def test_requests_that_leave_early_leave_no_expiry_times_behind() -> None:
    queue = Queue()
    for n in range(5_000):
        queue.put(name=f"x{n}")
        queue.remove(f"x{n}")
    assert len(queue._expiry) <= 65


# --- what is ahead ----------------------------------------------------------------------------------------------------


def test_what_waits_in_classes_above_is_ahead_and_below_only_its_floor() -> None:
    queue = Queue(PolicyConfig(admission=AdmissionConfig(class_floor_share=0.1)))
    for _ in range(10):
        queue.put(priority=Priority.INTERACTIVE)
        queue.put(priority=Priority.BATCH)
    assert queue.tokens_above(Priority.STANDARD) == 1_000
    assert queue.tokens_above(Priority.INTERACTIVE) == 0
    assert 1_000 <= queue.tokens_ahead("t", Priority.STANDARD, "", 100) <= 1_000 + 0.1 / 0.9 * 1_000 + 1


def test_a_flood_of_another_tenant_is_not_ahead_of_a_newcomer() -> None:
    queue = Queue()
    for _ in range(100):
        queue.put("flood", 1_000)
    queue.drain(10)
    assert queue.tokens_ahead("small", Priority.STANDARD, "", 100) <= 1_000
    assert queue.tokens_ahead("flood", Priority.STANDARD, "", 1_000) == 90_000


def test_asking_what_is_ahead_changes_nothing() -> None:
    queue = Queue()
    names = [queue.put(task=f"k{n % 3}") for n in range(10)]
    for n in range(20):
        queue.tokens_ahead(f"t{n}", Priority.STANDARD, f"k{n}", 100)
    assert len(queue._tasks) == 3
    assert sorted(queue.drain()) == sorted(names)
