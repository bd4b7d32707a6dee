"""Tasks under any order of calls, ends, outcomes and silence: budgets hold, nothing is counted twice or lost."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, consumes, invariant, multiple, rule

from policies.config import TasksConfig
from policies.tasks import NO_LIMITS, TaskBook, TaskLimits, TaskOutcome
from tests.examples import examples

TASKS_MAX = 6
IDLE_S = 50.0
CALLS_MAX = 4
TOKENS_MAX = 1_000
TENANTS = st.sampled_from(["a", "b", "c"])
NAMES = st.sampled_from([f"t{i}" for i in range(5)])
Call = tuple[str, str, int]


class Tasks(RuleBasedStateMachine):
    """Every call is ended once, with no more tokens than were expected of it."""

    open_calls: Bundle[Call] = Bundle("open_calls")

    def __init__(self) -> None:
        super().__init__()
        self.book = TaskBook(TasksConfig(TASKS_MAX, IDLE_S, CALLS_MAX, TOKENS_MAX))
        self.now_ns = 0
        self.begun = 0
        """Tasks that began, by what the book says before and after a call."""

    @rule(target=open_calls, tenant=TENANTS, name=NAMES, tokens=st.integers(0, 600))
    def call(self, tenant: str, name: str, tokens: int) -> Call | MultipleResults[Call]:
        before = self.book.get(tenant, name, self.now_ns)
        refusal = self.book.call(
            tenant, name, TaskLimits(calls_max=3) if name == "t0" else NO_LIMITS, tokens, self.now_ns
        )
        self.begun += before is None
        after = self.book.get(tenant, name, self.now_ns)
        assert after is not None
        if before is not None and before.outcome is not None:
            assert refusal is not None
            assert refusal.code == "task_ended"
        assert after.counts.calls == (before.counts.calls if before else 0) + (refusal is None)
        return multiple() if refusal is not None else (tenant, name, tokens)

    @rule(
        call=consumes(open_calls),
        share=st.floats(0, 1),
        seen=st.booleans(),
        succeeded=st.booleans(),
        outcome=st.sampled_from([None, None, TaskOutcome.SUCCESS, TaskOutcome.FAILURE]),
    )
    def end(self, call: Call, share: float, seen: bool, succeeded: bool, outcome: TaskOutcome | None) -> None:
        tenant, name, expected = call
        self.book.ended(
            tenant,
            name,
            tokens_expected=expected,
            tokens=math.floor(expected * share) if seen else 0,
            usd=0.25 if seen else 0.0,
            replica_id="r" if seen else None,
            succeeded=succeeded and seen,
            e2e_ms=1.0,
            now_ns=self.now_ns,
            outcome=outcome,
        )

    @rule(tenant=TENANTS, name=NAMES, outcome=st.sampled_from(TaskOutcome))
    def tell(self, tenant: str, name: str, outcome: TaskOutcome) -> None:
        before = self.book.get(tenant, name, self.now_ns)
        refusal = self.book.outcome(tenant, name, outcome, self.now_ns)
        fits = before is not None and before.outcome in (None, outcome)
        assert (refusal is None) is fits

    @rule(seconds=st.integers(0, 40))
    def wait(self, seconds: int) -> None:
        self.now_ns += seconds * 1_000_000_000

    @invariant()
    def memory_is_bounded(self) -> None:
        assert len(self.book) <= max(TASKS_MAX, self.book.open_calls)

    @invariant()
    def budgets_hold(self) -> None:
        for tenant in ("a", "b", "c"):
            for name in (f"t{i}" for i in range(5)):
                view = self.book.get(tenant, name, self.now_ns)
                if view is not None:
                    assert view.counts.calls <= (3 if name == "t0" else CALLS_MAX)
                    assert view.counts.tokens <= TOKENS_MAX
                    assert view.counts.calls == view.counts.calls_open + view.counts.succeeded + view.counts.failed

    @invariant()
    def open_tasks_are_those_without_an_outcome(self) -> None:
        views = [self.book.get(t, f"t{i}", self.now_ns) for t in ("a", "b", "c") for i in range(5)]
        assert self.book.open_tasks == sum(view is not None and view.outcome is None for view in views)

    @invariant()
    def each_task_is_counted_at_most_once(self) -> None:
        counted = sum(total.tasks for total in self.book.totals.values())
        assert self.begun - len(self.book) <= counted <= self.begun

    def teardown(self) -> None:
        """Long after everything, each task that began was counted exactly once, but for those with open calls."""
        self.now_ns += 10_000 * 1_000_000_000
        self.book.expire(self.now_ns)
        counted = sum(total.tasks for total in self.book.totals.values())
        assert counted + len(self.book) == self.begun
        assert len(self.book) <= self.book.open_calls
        ended = self.book.take_ended()
        assert len(ended) == counted
        assert sum(total.usd for total in self.book.totals.values()) == sum(end.usd for end in ended)


Tasks.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
TestTasks = Tasks.TestCase
