"""Tasks: budgets stop a runaway, each task is counted once, and memory is bounded whoever names ids."""

from __future__ import annotations

import pytest

from policies.config import TasksConfig
from policies.tasks import ENDED_MAX, NO_LIMITS, TaskBook, TaskEnd, TaskEnding, TaskLimits, TaskOutcome

MS = 1_000_000
S = 1_000 * MS


def book(**changes: float | None) -> TaskBook:
    return TaskBook(TasksConfig(**changes))  # type: ignore[arg-type]


def begin(
    tasks: TaskBook,
    task: str = "t",
    limits: TaskLimits = NO_LIMITS,
    tokens: int = 100,
    now_ns: int = 0,
    tenant: str = "a",
) -> str | None:
    """Code of the refusal, ``None`` for a call that may go on."""
    refusal = tasks.call(tenant, task, limits, tokens, now_ns)
    return None if refusal is None else refusal.code


def end(
    tasks: TaskBook,
    task: str = "t",
    *,
    expected: int = 100,
    tokens: int = 100,
    usd: float = 0.0,
    replica_id: str | None = "r1",
    succeeded: bool = True,
    now_ns: int = 0,
    outcome: TaskOutcome | None = None,
    tenant: str = "a",
) -> None:
    tasks.ended(
        tenant,
        task,
        tokens_expected=expected,
        tokens=tokens,
        usd=usd,
        replica_id=replica_id,
        succeeded=succeeded,
        e2e_ms=5.0,
        now_ns=now_ns,
        outcome=outcome,
    )


def calls(tasks: TaskBook, task: str, n: int = 1, tenant: str = "a", now_ns: int = 0) -> None:
    for _ in range(n):
        assert begin(tasks, task, now_ns=now_ns, tenant=tenant) is None
        end(tasks, task, now_ns=now_ns, tenant=tenant)


# --- budgets ----------------------------------------------------------------------------------------------------------


def test_a_task_is_stopped_after_its_calls() -> None:
    tasks = book()
    for _ in range(3):
        assert begin(tasks, limits=TaskLimits(calls_max=3)) is None
        end(tasks)
    assert begin(tasks, limits=TaskLimits(calls_max=3)) == "task_calls"


def test_a_refusal_at_a_budget_tells_clients_not_to_retry() -> None:
    refusal = None
    tasks = book(calls_max=1)
    for _ in range(2):
        refusal = tasks.call("a", "t", NO_LIMITS, 1, 0)
    assert refusal is not None
    assert (refusal.status, refusal.type, refusal.retry_after_s) == (429, "insufficient_quota", None)
    assert refusal.should_retry is False


def test_a_task_that_names_no_budget_has_the_configured_one() -> None:
    tasks = book(calls_max=2)
    calls(tasks, "t", 2)
    assert begin(tasks) == "task_calls"


def test_a_budget_of_its_own_goes_before_the_configured_one() -> None:
    tasks = book(calls_max=1)
    for _ in range(5):
        assert begin(tasks, limits=TaskLimits(calls_max=5)) is None
        end(tasks)
    assert begin(tasks) == "task_calls"


def test_a_runaway_task_cannot_raise_its_own_budget() -> None:
    tasks = book()
    assert begin(tasks, limits=TaskLimits(calls_max=1)) is None
    end(tasks)
    assert begin(tasks, limits=TaskLimits(calls_max=1_000)) == "task_calls"


def test_calls_side_by_side_do_not_overrun_a_token_budget_together() -> None:
    tasks = book(tokens_max=1_000)
    assert begin(tasks, tokens=600) is None
    assert begin(tasks, tokens=600) == "task_tokens"
    end(tasks, expected=600, tokens=50)
    assert begin(tasks, tokens=600) is None


def test_tokens_used_count_at_their_true_number() -> None:
    tasks = book(tokens_max=1_000)
    assert begin(tasks, tokens=100) is None
    end(tasks, expected=100, tokens=950)
    assert begin(tasks, tokens=51) == "task_tokens"
    assert begin(tasks, tokens=50) is None


def test_a_deadline_counts_from_the_first_call() -> None:
    tasks, limits = book(), TaskLimits(deadline_s=10)
    assert begin(tasks, limits=limits, now_ns=1 * S) is None
    end(tasks, now_ns=2 * S)
    assert tasks.deadline_ns("a", "t", NO_LIMITS, 5 * S) == 11 * S
    assert begin(tasks, limits=limits, now_ns=11 * S - 1) is None
    assert begin(tasks, limits=limits, now_ns=11 * S) == "task_deadline"


def test_a_call_no_engine_saw_is_taken_back() -> None:
    tasks = book(calls_max=1, tokens_max=100)
    for _ in range(3):
        assert begin(tasks, tokens=100) is None
        end(tasks, tokens=0, replica_id=None, succeeded=False)
    view = tasks.get("a", "t", 0)
    assert view is not None
    assert (view.counts.calls, view.counts.calls_open, view.counts.failed, view.counts.tokens) == (0, 0, 0, 0)


def test_tasks_of_one_name_in_two_tenants_are_two() -> None:
    tasks = book(calls_max=1)
    calls(tasks, "t", tenant="a")
    assert begin(tasks, tenant="b") is None
    assert begin(tasks, tenant="a") == "task_calls"


def test_requests_without_a_task_leave_no_trace() -> None:
    tasks = book(calls_max=1)
    for _ in range(3):
        assert begin(tasks, "") is None
        end(tasks, "")
    assert len(tasks) == 0


# --- endings ----------------------------------------------------------------------------------------------------------


def test_an_outcome_on_the_last_call_ends_the_task() -> None:
    tasks = book()
    assert begin(tasks, now_ns=0) is None
    end(tasks, tokens=70, usd=0.5, now_ns=1 * S)
    assert begin(tasks, now_ns=2 * S) is None
    end(tasks, tokens=30, usd=0.25, now_ns=3 * S, outcome=TaskOutcome.SUCCESS)
    assert tasks.take_ended() == [TaskEnd("a", TaskEnding.SUCCESS, 2, 100, 0.75, 3_000.0)]
    assert begin(tasks) == "task_ended"


def test_success_said_by_a_call_that_failed_does_not_count() -> None:
    tasks = book()
    assert begin(tasks) is None
    end(tasks, succeeded=False, outcome=TaskOutcome.SUCCESS)
    assert tasks.take_ended() == []
    assert begin(tasks) is None
    end(tasks, succeeded=False, outcome=TaskOutcome.FAILURE)
    assert [e.ending for e in tasks.take_ended()] == [TaskEnding.FAILURE]


def test_a_call_after_the_outcome_is_told_not_to_come_again() -> None:
    tasks = book()
    calls(tasks, "t")
    assert tasks.outcome("a", "t", TaskOutcome.FAILURE, 0) is None
    refusal = tasks.call("a", "t", NO_LIMITS, 1, 0)
    assert refusal is not None
    assert (refusal.code, refusal.status, refusal.should_retry) == ("task_ended", 409, False)


def test_an_outcome_may_be_repeated_but_not_changed() -> None:
    tasks = book()
    calls(tasks, "t")
    assert tasks.outcome("a", "t", TaskOutcome.SUCCESS, 0) is None
    assert tasks.outcome("a", "t", TaskOutcome.SUCCESS, 0) is None
    changed = tasks.outcome("a", "t", TaskOutcome.FAILURE, 0)
    assert changed is not None
    assert changed.code == "task_ended"
    assert len(tasks.take_ended()) == 1


def test_an_outcome_for_a_task_nobody_knows_is_refused() -> None:
    refusal = book().outcome("a", "t", TaskOutcome.SUCCESS, 0)
    assert refusal is not None
    assert (refusal.code, refusal.status) == ("task_not_found", 404)


def test_a_task_is_counted_when_its_last_open_call_has_ended() -> None:
    tasks = book()
    assert begin(tasks) is None
    assert begin(tasks) is None
    end(tasks, tokens=10, now_ns=1 * S, outcome=TaskOutcome.SUCCESS)
    assert tasks.take_ended() == []
    end(tasks, tokens=20, now_ns=4 * S)
    assert tasks.take_ended() == [TaskEnd("a", TaskEnding.SUCCESS, 2, 30, 0.0, 4_000.0)]


def test_a_task_without_outcome_ends_as_unknown_when_it_is_forgotten() -> None:
    tasks = book(idle_s_max=10)
    calls(tasks, "t")
    assert tasks.get("a", "t", 10 * S - 1) is not None
    assert tasks.get("a", "t", 10 * S) is None
    assert [e.ending for e in tasks.take_ended()] == [TaskEnding.UNKNOWN]


def test_a_stopped_task_without_outcome_ends_as_stopped() -> None:
    tasks = book(idle_s_max=10, calls_max=1)
    calls(tasks, "t")
    assert begin(tasks) == "task_calls"
    tasks.expire(20 * S)
    assert [e.ending for e in tasks.take_ended()] == [TaskEnding.STOPPED]


def test_a_stopped_task_may_still_be_told_how_it_ended() -> None:
    tasks = book(calls_max=1)
    calls(tasks, "t")
    assert begin(tasks) == "task_calls"
    assert tasks.outcome("a", "t", TaskOutcome.FAILURE, 0) is None
    assert [e.ending for e in tasks.take_ended()] == [TaskEnding.FAILURE]


def test_a_call_longer_than_the_idle_time_keeps_its_task() -> None:
    tasks = book(idle_s_max=10)
    assert begin(tasks, now_ns=0) is None
    tasks.expire(100 * S)
    assert len(tasks) == 1
    end(tasks, now_ns=101 * S)
    assert tasks.get("a", "t", 102 * S) is not None


def test_totals_say_successes_per_dollar() -> None:
    tasks = book()
    assert tasks.successes_per_usd() is None
    for task, outcome in (("t1", TaskOutcome.SUCCESS), ("t2", TaskOutcome.SUCCESS), ("t3", TaskOutcome.FAILURE)):
        assert begin(tasks, task) is None
        end(tasks, task, usd=0.5, outcome=outcome)
    assert tasks.successes_per_usd() == pytest.approx(2 / 1.5)
    total = tasks.totals[TaskEnding.SUCCESS]
    assert (total.tasks, total.calls, total.tokens, total.usd) == (2, 2, 200, 1.0)


def test_the_deadline_a_call_will_have_is_known_before_it_begins() -> None:
    tasks, limits = book(), TaskLimits(deadline_s=10)
    assert tasks.deadline_ns("a", "t", NO_LIMITS, 1 * S) is None
    assert tasks.deadline_ns("a", "t", limits, 1 * S) == 11 * S
    assert begin(tasks, limits=limits, now_ns=1 * S) is None
    assert tasks.deadline_ns("a", "t", TaskLimits(deadline_s=4), 2 * S) == 5 * S
    assert tasks.deadline_ns("a", "t", TaskLimits(deadline_s=99), 2 * S) == 11 * S


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_no_more_tasks_than_tasks_max_are_remembered() -> None:
    tasks = book(tasks_max=3)
    for i in range(10):
        calls(tasks, f"t{i}")
    assert len(tasks) == 3
    assert tasks.totals[TaskEnding.UNKNOWN].tasks == 7
    assert tasks.get("a", "t9", 0) is not None
    assert tasks.get("a", "t6", 0) is None


def test_a_tenant_that_names_many_tasks_pushes_out_its_own() -> None:
    tasks = book(tasks_max=10)
    calls(tasks, "quiet", tenant="b")
    for i in range(1_000):
        calls(tasks, f"t{i}", tenant="a")
    assert len(tasks) == 10
    assert tasks.get("b", "quiet", 0) is not None


def test_a_newcomer_tenant_gets_room_from_the_tenant_that_holds_most() -> None:
    tasks = book(tasks_max=10)
    calls(tasks, "c0", tenant="c")
    for i in range(9):
        calls(tasks, f"t{i}", tenant="a")
    calls(tasks, "b0", tenant="b")
    assert tasks.get("b", "b0", 0) is not None
    assert tasks.get("c", "c0", 0) is not None
    assert tasks.get("a", "t0", 0) is None


def test_a_task_with_an_open_call_is_not_forgotten_for_room() -> None:
    tasks = book(tasks_max=2)
    for i in range(5):
        assert begin(tasks, f"t{i}") is None
    assert len(tasks) == 5
    for i in range(5):
        end(tasks, f"t{i}")
    assert len(tasks) == 2
    assert tasks.totals[TaskEnding.UNKNOWN].calls == 3


def test_open_calls_fall_to_zero_with_the_last_end() -> None:
    tasks = book()
    for task in ("t1", "t1", "t2"):
        assert begin(tasks, task) is None
    assert tasks.open_calls == 3
    for task in ("t1", "t1", "t2", "t2"):
        end(tasks, task)
    assert tasks.open_calls == 0


def test_endings_nobody_takes_are_dropped_but_stay_in_the_totals() -> None:
    tasks = book(tasks_max=1)
    for i in range(ENDED_MAX + 10):
        calls(tasks, f"t{i}")
    assert len(tasks.take_ended()) == ENDED_MAX
    assert tasks.totals[TaskEnding.UNKNOWN].tasks == ENDED_MAX + 9
