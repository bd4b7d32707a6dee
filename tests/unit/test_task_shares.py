"""Tasks over several gateways: one budget, one owner, and no message that may not be lost or repeated."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.task_link import ROUNDS_MAX, USES_MAX, TaskLink
from policies.config import TasksConfig
from policies.tasks import (
    NO_LIMITS,
    TaskBook,
    TaskCounts,
    TaskEnding,
    TaskLedger,
    TaskLimits,
    TaskOutcome,
    TaskShares,
    TaskUse,
)
from policies.tasks.shares import ANSWER_TASKS_MAX, GATEWAYS_MAX, GRACE_S

S = 1_000_000_000


class Fleet:
    """Gateways, the controller's ledger, and messages that arrive at once."""

    def __init__(self, gateways: int = 2, **config: Any) -> None:
        self.config = TasksConfig(**config)
        self.books = [TaskBook(self.config, gateways) for _ in range(gateways)]
        self.ledger = TaskLedger(self.config, "e1", -round(GRACE_S * S))
        self.links = [TaskLink(f"g{i}", book) for i, book in enumerate(self.books)]

    async def call(self, _name: str, *args: Any) -> TaskShares:
        gateway_id, epoch, seq, uses = args
        return self.ledger.exchange(gateway_id, epoch, seq, uses, 1 * S)

    def exchange(self, *gateways: int) -> None:
        for i in gateways:
            with pytest.raises(StopIteration):
                self.links[i].exchange(self.call).send(None)

    def one_call(self, gateway: int, task: str = "t", limits: TaskLimits = NO_LIMITS, tokens: int = 10) -> str | None:
        book = self.books[gateway]
        refusal = book.call("a", task, limits, tokens, 0)
        if refusal is None:
            self.end(gateway, task, tokens)
        return None if refusal is None else refusal.code

    def end(self, gateway: int, task: str = "t", tokens: int = 10, outcome: TaskOutcome | None = None) -> None:
        self.books[gateway].ended(
            "a",
            task,
            tokens_expected=tokens,
            tokens=tokens,
            usd=0.5,
            replica_id="r",
            succeeded=True,
            e2e_ms=1.0,
            now_ns=0,
            outcome=outcome,
        )


def test_a_budget_is_one_for_all_gateways() -> None:
    fleet, limits = Fleet(), TaskLimits(calls_max=4)
    for gateway in (0, 0, 1):
        assert fleet.one_call(gateway, limits=limits) is None
    fleet.exchange(0, 1, 0)
    assert fleet.one_call(0, limits=limits) is None
    fleet.exchange(0, 1)
    assert [fleet.one_call(0), fleet.one_call(1)] == ["task_calls", "task_calls"]


def test_a_limit_told_to_one_gateway_holds_at_the_others() -> None:
    fleet = Fleet()
    assert fleet.one_call(0, limits=TaskLimits(tokens_max=25)) is None
    fleet.exchange(0, 1)
    assert fleet.one_call(1) is None
    assert fleet.one_call(1) == "task_tokens"


def test_tokens_held_elsewhere_count() -> None:
    fleet = Fleet(tokens_max=100)
    assert fleet.books[0].call("a", "t", NO_LIMITS, 90, 0) is None
    fleet.exchange(0, 1)
    assert fleet.one_call(1, tokens=20) == "task_tokens"


def test_a_task_is_counted_once_with_the_calls_of_all_gateways() -> None:
    fleet = Fleet()
    for gateway in (0, 1, 1):
        assert fleet.one_call(gateway) is None
    fleet.exchange(0, 1)
    assert fleet.books[1].outcome("a", "t", TaskOutcome.SUCCESS, 0) is None
    fleet.exchange(1, 0)
    ended = [end for book in fleet.books for end in book.take_ended()]
    assert [(end.ending, end.calls, end.tokens, end.usd) for end in ended] == [(TaskEnding.SUCCESS, 3, 30, 1.5)]


def test_an_outcome_told_to_one_gateway_ends_the_task_at_the_others() -> None:
    fleet = Fleet()
    assert fleet.one_call(0) is None
    fleet.exchange(0, 1)
    assert fleet.books[1].outcome("a", "t", TaskOutcome.FAILURE, 0) is None
    fleet.exchange(1, 0)
    assert fleet.one_call(0) == "task_ended"


def test_a_task_that_others_only_heard_of_is_not_theirs_to_count() -> None:
    fleet = Fleet(idle_s_max=10)
    assert fleet.one_call(0) is None
    fleet.exchange(0, 1)
    for book in fleet.books:
        book.expire(1_000_000 * S)
    assert [len(book.take_ended()) for book in fleet.books] == [1, 0]


def test_a_lost_message_is_told_again() -> None:
    fleet = Fleet()
    assert fleet.one_call(0) is None

    async def lost(*_: object) -> TaskShares:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        fleet.links[0].exchange(lost).send(None)
    fleet.exchange(0, 1)
    view = fleet.books[1].get("a", "t", 0)
    assert view is not None
    assert view.counts.calls == 1


def test_a_lost_answer_counts_nothing_twice() -> None:
    fleet = Fleet()
    assert fleet.one_call(0) is None
    assert fleet.one_call(1) is None
    fleet.exchange(0)

    async def answer_lost(name: str, *args: Any) -> TaskShares:
        await fleet.call(name, *args)
        raise TimeoutError

    for _ in range(3):
        with pytest.raises(TimeoutError):
            fleet.links[1].exchange(answer_lost).send(None)
    fleet.exchange(1, 0)
    for book in fleet.books:
        view = book.get("a", "t", 0)
        assert view is not None
        assert view.counts.calls == 2


def test_a_new_controller_is_told_everything_again() -> None:
    fleet = Fleet()
    assert fleet.one_call(0) is None
    assert fleet.one_call(1) is None
    fleet.exchange(0, 1, 0)
    fleet.ledger = TaskLedger(fleet.config, "e2", 1 * S)
    fleet.exchange(0, 1, 0, 1)
    assert len(fleet.ledger) == 1
    for book in fleet.books:
        view = book.get("a", "t", 0)
        assert view is not None
        assert view.counts.calls == 2


def test_a_new_controller_names_no_other_owner_before_all_had_time_to_say_who_it_is() -> None:
    fleet = Fleet()
    assert fleet.one_call(1) is None
    fleet.exchange(1)
    assert fleet.one_call(0) is None
    fleet.ledger = TaskLedger(fleet.config, "e2", 1 * S)
    fleet.exchange(0, 1, 0)
    assert fleet.books[0].outcome("a", "t", TaskOutcome.SUCCESS, 0) is None
    fleet.exchange(0, 1, 0)
    assert [len(book.take_ended()) for book in fleet.books] == [0, 1]


def test_one_gateway_alone_asks_nobody() -> None:
    fleet = Fleet(gateways=1)
    assert fleet.one_call(0) is None
    fleet.exchange(0)
    assert len(fleet.ledger) == 0
    assert fleet.books[0].changes(1, 0) == []


def test_more_than_one_message_holds_is_told_in_several() -> None:
    tasks = ANSWER_TASKS_MAX + USES_MAX + 1
    fleet = Fleet()
    for i in range(tasks):
        assert fleet.one_call(0, f"t{i}") is None
    fleet.exchange(0, 1)
    assert len(fleet.books[1]) == tasks
    assert tasks < ROUNDS_MAX * ANSWER_TASKS_MAX


def test_the_ledger_is_bounded_in_tasks_and_in_gateways_of_one() -> None:
    ledger = TaskLedger(TasksConfig(tasks_max=50), "e1", 0)
    one = TaskCounts(calls=1)
    ledger.exchange("g", "", 0, [TaskUse("quiet", "t", one, 0.0, 0.0)], 0)
    for i in range(200):
        ledger.exchange("g", "", 0, [TaskUse("a", f"t{i}", one, 0.0, 0.0)], 0)
    assert len(ledger) == 50
    kept = ledger.exchange("g", "", 0, [], 0).uses
    assert ("quiet", "t") in {(use.tenant, use.task) for use in kept}
    for i in range(GATEWAYS_MAX + 5):
        ledger.exchange(f"g{i}", "", 0, [TaskUse("b", "t", one, 0.0, 0.0)], 0)
    answer = ledger.exchange("asks", "e1", 201, [], 0)
    assert [use.counts.calls for use in answer.uses] == [GATEWAYS_MAX + 5]


def test_the_ledger_forgets_what_did_not_change_for_long() -> None:
    ledger = TaskLedger(TasksConfig(idle_s_max=10), "e1", 0)
    ledger.exchange("g", "", 0, [TaskUse("a", "t", TaskCounts(calls=1), 0.0, 0.0)], 0)
    ledger.exchange("g", "", 0, [], 11 * S)
    assert len(ledger) == 0
