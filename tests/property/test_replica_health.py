"""Breakers and ejections over random histories of one gateway: what holds whatever happens."""

from __future__ import annotations

from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from policies.config import FaultsConfig
from policies.faults import ReplicaHealth
from policies.faults.breaker import BreakerState
from policies.faults.grey import LEARNED_STEPS_MIN
from policies.faults.health import CODES, FAILURES
from policies.types import StepCoefficients
from tests.examples import examples

MS = 1_000_000
S = 1_000 * MS
NAMES = [f"r{i}" for i in range(7)]
names = st.sampled_from(NAMES)


class Machine(RuleBasedStateMachine):
    """Everything that can be told of seven replicas, in any order, of members and of strangers."""

    def __init__(self) -> None:
        super().__init__()
        self.config = FaultsConfig(
            breaker_failures=3, eject_ms=1_000, eject_ms_max=8_000, probation_requests=2, grey_samples_min=2
        )
        self.health = ReplicaHealth(self.config, Random(7))
        self.members: list[str] = []
        self.now_ns = 0
        self.fingerprint = 0
        self.steps = LEARNED_STEPS_MIN
        self.join(NAMES[:4])

    @rule(members=st.lists(names, unique=True))
    def join(self, members: list[str]) -> None:
        self.members = members
        self.health.update(members, self.now_ns)

    @rule(ms=st.sampled_from([1, 100, 900, 5_000, 20_000]))
    def time_passes(self, ms: int) -> None:
        self.now_ns += ms * MS

    @rule(name=names, predicted_ms=st.sampled_from([None, 0.0, 100.0]), times=st.integers(1, 3))
    def sent(self, name: str, predicted_ms: float | None, times: int) -> None:
        for _ in range(times):
            self.health.sent(name, self.now_ns, predicted_ms)

    @rule(name=names, ttft_ms=st.sampled_from([None, 0.0, 90.0, 5_000.0]), times=st.integers(1, 3))
    def answered(self, name: str, ttft_ms: float | None, times: int) -> None:
        for _ in range(times):
            self.health.answered(name, self.now_ns, ttft_ms, 100.0)

    @rule(name=names, same=st.booleans(), times=st.integers(1, 4))
    def failed(self, name: str, same: bool, times: int) -> None:
        for _ in range(times):
            self.fingerprint += not same
            self.health.failed(name, self.fingerprint, self.now_ns)

    @rule(name=names)
    def withdrew(self, name: str) -> None:
        self.health.withdrew(name, self.now_ns)

    @rule(slow=st.sets(names))
    def steps_taken(self, slow: set[str]) -> None:
        self.steps += 100
        self.now_ns += S
        factors = {r: 9.0 if r in slow else 1.0 for r in NAMES}
        self.health.update(
            self.members, self.now_ns, lambda r: StepCoefficients(6 * factors[r], 0.1, 0.1, factors[r], self.steps)
        )

    @precondition(lambda self: self.members)
    @rule()
    def all_are_sent_a_probe_in_time(self) -> None:
        """No one is left alone for longer than the longest ejection, after a probe that failed by silence as well."""
        self.now_ns += 8 * S
        self.health.blocked(self.now_ns)
        self.now_ns += 8 * S
        assert self.health.blocked(self.now_ns) == frozenset()
        assert self.health.retry_after_s(self.now_ns) is None

    @rule()
    def everything_heals(self) -> None:
        for _ in range(20 * self.config.probation_requests):
            self.now_ns += 8 * S
            for name in self.members:
                if name not in self.health.blocked(self.now_ns):
                    self.health.sent(name, self.now_ns, 100)
                    self.health.answered(name, self.now_ns, 100, 100)
        assert {s.state for s in self.health.states().values()} <= {BreakerState.CLOSED}

    @invariant()
    def bounds_hold(self) -> None:
        states = self.health.states()
        assert set(states) == set(self.members)
        away = {r: s for r, s in states.items() if s.state is not BreakerState.CLOSED}
        outliers = [r for r, s in away.items() if s.code != FAILURES]
        assert len(outliers) <= int(self.config.ejected_share_max * len(self.members))
        assert not outliers or len(away) < len(self.members)
        assert all(s.code in CODES and s.reason for s in away.values())
        assert all(not s.code and not s.reason for r, s in states.items() if r not in away)

    @invariant()
    def blocked_are_members_that_are_away(self) -> None:
        blocked = self.health.blocked(self.now_ns)
        away = {r for r, s in self.health.states().items() if s.state is not BreakerState.CLOSED}
        assert blocked <= away
        assert self.health.blocked(self.now_ns) is blocked
        wait_s = self.health.retry_after_s(self.now_ns)
        assert (wait_s is not None) == (bool(self.members) and len(blocked) == len(self.members))
        assert wait_s is None or 0 <= wait_s <= self.config.eject_ms_max / 1e3

    @invariant()
    def whoever_is_due_for_a_probe_may_be_sent_one(self) -> None:
        due = self.health.probe_due(self.now_ns, lambda _: True)
        if due is not None:
            assert self.health.state(due) is BreakerState.HALF_OPEN
            assert due not in self.health.blocked(self.now_ns)
            self.health.sent(due, self.now_ns)
            assert self.health.probe_due(self.now_ns, lambda _: True) != due

    @invariant()
    def what_is_kept_is_bounded(self) -> None:
        for replica in self.health._replicas.values():
            assert replica.breaker.failures < self.config.breaker_failures
            assert replica.pace.waiting is None or replica.pace.waiting.requests > 0


TestReplicaHealth = Machine.TestCase
TestReplicaHealth.settings = settings(max_examples=examples(100), stateful_step_count=60, deadline=None)
