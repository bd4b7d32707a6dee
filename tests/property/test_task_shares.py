"""Three gateways that exchange counts of tasks while messages are lost and controllers replaced.

Claims, once everybody has talked to everybody: all see the same counts, which are the true ones; and each task whose
outcome was told was counted once in all.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from deployments.task_link import TaskLink
from policies.config import TasksConfig
from policies.tasks import NO_LIMITS, TaskBook, TaskLedger, TaskOutcome, TaskShares
from policies.tasks.shares import GRACE_S
from tests.examples import examples

GATEWAYS = 3
GRACE_NS = round(GRACE_S * 1e9)
WHO = st.integers(0, GATEWAYS - 1)
NAMES = st.sampled_from(["t0", "t1", "t2"])


class Shares(RuleBasedStateMachine):
    """Nothing is forgotten here: forgetting is in test_task_book.py."""

    def __init__(self) -> None:
        super().__init__()
        self.config = TasksConfig()
        self.books = [TaskBook(self.config, GATEWAYS) for _ in range(GATEWAYS)]
        self.links = [TaskLink(f"g{i}", book) for i, book in enumerate(self.books)]
        self.epoch = 0
        self.now_ns = 0
        self.ledger = TaskLedger(self.config, "e0", -GRACE_NS)
        self.calls: Counter[str] = Counter()
        self.over: set[str] = set()

    @rule(who=WHO, name=NAMES, outcome=st.sampled_from([None, None, TaskOutcome.SUCCESS]))
    def call(self, who: int, name: str, outcome: TaskOutcome | None) -> None:
        if self.books[who].call("a", name, NO_LIMITS, 10, 0) is not None:
            return
        self.calls[name] += 1
        if outcome is not None:
            self.over.add(name)
        self.books[who].ended(
            "a",
            name,
            tokens_expected=10,
            tokens=7,
            usd=0.0,
            replica_id="r",
            succeeded=True,
            e2e_ms=1.0,
            now_ns=0,
            outcome=outcome,
        )

    @rule(who=WHO, name=NAMES)
    def tell(self, who: int, name: str) -> None:
        if self.books[who].outcome("a", name, TaskOutcome.SUCCESS, 0) is None:
            self.over.add(name)

    @rule(who=WHO, asked=st.booleans(), answered=st.booleans())
    def exchange(self, who: int, asked: bool, answered: bool) -> None:
        async def call(_: str, *args: Any) -> TaskShares:
            if not asked:
                raise TimeoutError
            gateway_id, epoch, seq, uses = args
            shares = self.ledger.exchange(gateway_id, epoch, seq, uses, self.now_ns)
            if not answered:
                raise TimeoutError
            return shares

        try:
            self.links[who].exchange(call).send(None)
        except StopIteration:
            assert asked
            assert answered
        except TimeoutError:
            assert not (asked and answered)

    @rule(order=st.permutations(range(GATEWAYS)))
    def replace_controller(self, order: list[int]) -> None:
        """Each gateway reaches the new one within its grace."""
        self.epoch += 1
        self.ledger = TaskLedger(self.config, f"e{self.epoch}", self.now_ns)
        for who in order:
            self.exchange(who, True, True)
        self.now_ns += GRACE_NS

    def teardown(self) -> None:
        for _ in range(3):
            for who in range(GATEWAYS):
                self.exchange(who, True, True)
        for name, calls in self.calls.items():
            for book in self.books:
                view = book.get("a", name, 0)
                assert view is not None
                assert (view.counts.calls, view.counts.tokens) == (calls, 7 * calls)
                assert (view.outcome is not None) is (name in self.over)
        assert sum(len(book.take_ended()) for book in self.books) == len(self.over)


Shares.TestCase.settings = settings(max_examples=examples(200), stateful_step_count=30, deadline=None)
TestShares = Shares.TestCase
