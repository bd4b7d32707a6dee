"""Whatever the order of dispatches, retries, first bytes, releases and departures: counts match and end at zero."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from policies.routing.load import LoadBook
from tests.examples import examples

REPLICAS = ("a", "b", "c")
requests = st.integers(0, 7).map(lambda n: f"tg-{n}")
replicas = st.sampled_from(REPLICAS)
tokens = st.integers(0, 1_000)


class LoadBookMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.book = LoadBook()
        self.model: dict[str, tuple[str, int, int, bool]] = {}

    @rule(replica=replicas, request=requests, uncached=tokens, prompt=tokens)
    def dispatched(self, replica: str, request: str, uncached: int, prompt: int) -> None:
        self.book.dispatched(replica, request, uncached, prompt)
        self.model[request] = (replica, uncached, prompt, False)

    @rule(request=requests)
    def first_byte(self, request: str) -> None:
        self.book.first_byte(request)
        if request in self.model:
            self.model[request] = (*self.model[request][:3], True)

    @rule(request=requests)
    def released(self, request: str) -> None:
        self.book.released(request)
        self.model.pop(request, None)

    @rule(replica=replicas)
    def forget(self, replica: str) -> None:
        self.book.forget(replica)
        self.model = {r: e for r, e in self.model.items() if e[0] != replica}

    @invariant()
    def counts_match(self) -> None:
        for replica in REPLICAS:
            here = [e for e in self.model.values() if e[0] == replica]
            assert self.book.requests(replica) == len(here)
            assert self.book.prefill_tokens(replica) == sum(e[1] for e in here if not e[3])
            assert self.book.decode_tokens(replica) == sum(e[2] for e in here if e[3])
        assert self.book.inflight == len(self.model)

    def teardown(self) -> None:
        for request in [f"tg-{n}" for n in range(8)]:
            self.book.released(request)
        assert self.book.inflight == 0
        for replica in REPLICAS:
            counts = self.book.requests(replica), self.book.prefill_tokens(replica), self.book.decode_tokens(replica)
            assert counts == (0, 0, 0)


LoadBookMachine.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
TestLoadBook = LoadBookMachine.TestCase
