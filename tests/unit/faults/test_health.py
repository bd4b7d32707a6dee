"""Breakers of a gateway's replicas: what opens, probes and closes them."""

from __future__ import annotations

from random import Random

from policies.config import FaultsConfig
from policies.faults import ReplicaHealth, with_probe
from policies.faults.breaker import JITTER_SHARE, BreakerState
from policies.faults.health import CODES, GONE_MAX
from policies.types import Reason, RouteChoice

S = 1_000_000_000
CONFIG = FaultsConfig(breaker_failures=3, eject_ms=1_000, eject_ms_max=10_000, probation_requests=2)


def health(*members: str, config: FaultsConfig = CONFIG) -> ReplicaHealth:
    h = ReplicaHealth(config, Random(1))
    h.update(members, 0)
    return h


def break_down(h: ReplicaHealth, replica_id: str, now_ns: int, failures: int = CONFIG.breaker_failures) -> None:
    for fingerprint in range(1, failures + 1):
        h.failed(replica_id, fingerprint, now_ns)


def test_failures_in_a_row_block_the_replica() -> None:
    h = health("a", "b")
    break_down(h, "a", 0, failures=2)
    assert h.blocked(0) == frozenset()
    h.failed("a", 7, 0)
    assert h.blocked(0) == {"a"}
    assert h.reason("a") == "3 requests in a row failed"
    assert h.reason("b") == ""


def test_an_answer_ends_the_row() -> None:
    h = health("a")
    for _ in range(10):
        break_down(h, "a", 0, failures=2)
        h.answered("a", 0)
    assert h.blocked(0) == frozenset()


def test_one_request_repeated_opens_no_breaker() -> None:
    h = health("a")
    for _ in range(100):
        h.failed("a", 42, 0)
    assert h.blocked(0) == frozenset()


def test_failed_connections_count_without_a_request() -> None:
    h = health("a")
    for _ in range(3):
        h.failed("a", 0, 0)
    assert h.blocked(0) == {"a"}


def test_one_probe_at_a_time_until_probation_is_passed() -> None:
    h = health("a")
    break_down(h, "a", 0)
    assert h.blocked(int((1 - JITTER_SHARE) * S) - 1) == {"a"}
    for _ in range(CONFIG.probation_requests):
        assert h.blocked(S) == frozenset()
        h.sent("a", S)
        assert h.blocked(S) == {"a"}
        h.answered("a", S)
    h.sent("a", S)
    h.sent("a", S)
    assert h.blocked(S) == frozenset()
    assert h.states()["a"].state is BreakerState.CLOSED


def test_a_failed_probe_doubles_the_time() -> None:
    h = health("a", "b")
    break_down(h, "a", 0)
    now = S
    for doubling in range(1, 8):
        assert h.blocked(now) == frozenset()
        h.sent("a", now)
        h.failed("a", 1, now)
        span = min(10, 2**doubling) * S
        assert h.blocked(now + int(span * (1 - JITTER_SHARE)) - 1) == {"a"}
        now += span


def test_while_no_replica_takes_requests_failed_probes_do_not_double_the_time() -> None:
    h = health("a", "b")
    break_down(h, "a", 0)
    break_down(h, "b", 0)
    for now in range(S, 8 * S, S):
        assert h.blocked(now) == frozenset()
        for replica_id in ("a", "b"):
            h.sent(replica_id, now)
            h.failed(replica_id, 1, now)
        assert h.blocked(now) == {"a", "b"}
        retry_after_s = h.retry_after_s(now)
        assert retry_after_s is not None
        assert retry_after_s <= 1


def test_a_probe_without_the_first_byte_it_should_have_given_has_failed() -> None:
    """The replica is left alone twice as long, and not sent one request after the other into its queue."""
    h = health("a", "b")
    break_down(h, "a", 0)
    assert h.blocked(S) == frozenset()
    h.sent("a", S, 100)
    assert h.blocked(2 * S) == {"a"}
    assert h.states()["a"].state is BreakerState.OPEN
    assert h.ejections()["failures"] == 2
    assert h.blocked(3 * S) == {"a"}, "its second ejection lasts twice as long"
    assert h.blocked(4 * S) == frozenset()


def test_a_probe_is_given_the_time_that_was_predicted_for_it() -> None:
    h = health("a", "b")
    break_down(h, "a", 0)
    assert h.blocked(S) == frozenset()
    h.sent("a", S, 5_000)
    assert h.blocked(5 * S) == {"a"}
    assert h.states()["a"].state is BreakerState.HALF_OPEN
    h.blocked(6 * S)
    assert h.states()["a"].state is BreakerState.OPEN


def test_a_silent_probe_of_which_nothing_can_be_expected_is_given_up() -> None:
    h = health("a")
    break_down(h, "a", 0)
    assert h.blocked(S) == frozenset()
    h.sent("a", S)
    assert h.blocked(S) == {"a"}
    assert h.blocked(2 * S) == frozenset()


def test_a_probe_whose_client_left_makes_room_for_the_next() -> None:
    h = health("a")
    break_down(h, "a", 0)
    h.blocked(S)
    h.sent("a", S)
    h.withdrew("a", S)
    assert h.blocked(S) == frozenset()


def test_late_words_of_older_requests_do_not_pass_for_probes() -> None:
    h = health("a")
    break_down(h, "a", 0)
    for _ in range(5):
        h.answered("a", 0)
        h.failed("a", 9, 0)
    assert h.states()["a"].state is BreakerState.OPEN
    h.blocked(S)
    h.answered("a", S)
    h.failed("a", 9, S)
    assert h.states()["a"].state is BreakerState.HALF_OPEN


def test_all_replicas_may_be_blocked_and_clients_are_told_when_to_come_again() -> None:
    h = health("a", "b")
    break_down(h, "a", 0)
    assert h.retry_after_s(0) is None
    break_down(h, "b", 0)
    assert h.blocked(0) == {"a", "b"}
    wait_s = h.retry_after_s(0)
    assert wait_s is not None
    assert 1 - JITTER_SHARE <= wait_s <= 1
    assert h.retry_after_s(S) is None


def test_blocked_is_the_same_object_while_nothing_changes() -> None:
    h = health("a", "b")
    before = h.blocked(0)
    h.sent("a", 0)
    h.answered("a", 0)
    h.failed("a", 1, 0)
    assert h.blocked(S) is before


def test_a_replica_that_left_leaves_nothing_behind() -> None:
    h = health("a", "b")
    break_down(h, "a", 0)
    h.update(["b"], 0)
    assert h.blocked(0) == frozenset()
    h.failed("a", 1, 0)
    assert set(h.states()) == {"b"}


def test_time_is_short_again_after_it_worked_for_longer_than_it_was_left_alone() -> None:
    h = health("a")
    now = 0
    for _ in range(4):
        break_down(h, "a", now)
        now += 10 * S
        for _ in range(CONFIG.probation_requests):
            h.blocked(now)
            h.sent("a", now)
            h.answered("a", now)
        now += 10 * S
    break_down(h, "a", now)
    assert h.blocked(now + S) == frozenset()


def test_ejections_are_counted_by_code() -> None:
    h = health("a", "b")
    break_down(h, "a", 0)
    break_down(h, "b", 0)
    assert h.ejections() == {**dict.fromkeys(CODES, 0), "failures": 2}


def test_a_replica_on_probation_is_due_for_a_request_when_it_gets_none() -> None:
    h = health("a", "b")
    break_down(h, "a", 0)
    assert h.probe_due(0, lambda _: True) is None
    h.blocked(S)
    assert h.probe_due(2 * S - 1, lambda _: True) is None
    assert h.probe_due(2 * S, lambda _: True) == "a"
    assert h.probe_due(2 * S, lambda _: False) is None
    h.sent("a", 2 * S)
    assert h.probe_due(2 * S, lambda _: True) is None
    h.answered("a", 2 * S)
    assert h.probe_due(3 * S, lambda _: True) == "a"
    h.forget("a")
    assert h.probe_due(3 * S, lambda _: True) is None


def test_the_replica_that_is_due_comes_first_and_once() -> None:
    choice = RouteChoice((("b",), ("a", "c")), Reason("least_ttft", "b is best"), {"a": 9.0, "b": 1.0, "c": 9.0}, {})
    assert with_probe(choice, "a").tiers == (("a",), ("b",), ("c",))
    assert with_probe(choice, "b").tiers == (("b",), ("a", "c"))
    assert with_probe(choice, "z").tiers == (("z",), ("b",), ("a", "c"))
    assert with_probe(choice, "a").reason.code == "probation"
    assert "b is best" in with_probe(choice, "a").reason.text
    assert with_probe(choice, "a").predicted_ttft_ms is choice.predicted_ttft_ms


def test_a_replica_that_is_dropped_at_each_refusal_is_ejected_all_the_same() -> None:
    h = health("a", "b")
    for _ in range(CONFIG.breaker_failures):
        h.update(["b"], 0)
        h.failed("a", 0, 0)
        h.update(["a", "b"], 0)
    assert h.blocked(0) == {"a"}
    h.update(["b"], S)
    assert h.blocked(S) == frozenset()
    h.update(["a", "b"], S)
    h.sent("a", S)
    h.update(["b"], S)
    h.failed("a", 0, S)
    h.update(["a", "b"], S)
    assert h.blocked(S) == {"a"}
    assert h.reason("a").endswith("and a probe no better")


def test_replicas_that_left_are_remembered_up_to_a_bound() -> None:
    h = health("a")
    break_down(h, "a", 0)
    h.update([], 0)
    for number in range(GONE_MAX):
        h.update([f"r{number}"], 0)
    h.update(["a"], 0)
    assert len(h._gone) == GONE_MAX
    assert h.blocked(0) == frozenset()


def test_forgetting_is_for_good() -> None:
    h = health("a")
    break_down(h, "a", 0)
    h.forget("a")
    h.failed("a", 1, 0)
    h.update(["a"], 0)
    assert h.blocked(0) == frozenset()
