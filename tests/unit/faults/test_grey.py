"""Replicas that still answer, but worse than their peers: who is ejected, who is not, and how many may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

import pytest

from policies.config import FaultsConfig
from policies.faults import ReplicaHealth
from policies.faults.breaker import BreakerState
from policies.faults.grey import (
    FINGERPRINTS_MAX,
    LEARNED_STEPS_MIN,
    NEWCOMER_NS,
    SMOOTHING_NS,
    STEPS_MIN,
    Figures,
    Pace,
    residual_of,
)
from policies.faults.health import STEP_MODELS_AT_ONCE
from policies.types import StepCoefficients

MS = 1_000_000
S = 1_000 * MS
CONFIG = FaultsConfig(eject_ms=1_000, eject_ms_max=10_000, probation_requests=2, breaker_failures=10**6)
TEN_SECONDS = 100


def health(*members: str, config: FaultsConfig = CONFIG) -> ReplicaHealth:
    h = ReplicaHealth(config, Random(1))
    h.update(members, 0)
    return h


def serve(
    h: ReplicaHealth, ttft_of: Mapping[str, float], rounds: int = TEN_SECONDS, predicted_ms: float = 100, at_ns: int = 0
) -> int:
    """A request to each replica that takes some, ten times a second; returns when that is over."""
    for _ in range(rounds):
        at_ns += 100 * MS
        for replica_id, ttft_ms in ttft_of.items():
            if replica_id not in h.blocked(at_ns):
                h.sent(replica_id, at_ns, predicted_ms)
                h.answered(replica_id, at_ns, ttft_ms, predicted_ms)
    return at_ns


def away(h: ReplicaHealth) -> dict[str, str]:
    return {r: s.code for r, s in h.states().items() if s.state is not BreakerState.CLOSED}


# --- first tokens -----------------------------------------------------------------------------------------------------


def test_a_replica_slower_than_predicted_is_ejected_when_its_peers_are_not() -> None:
    h = health("a", "b", "c")
    serve(h, {"a": 1_000, "b": 110, "c": 90})
    assert away(h) == {"a": "grey_ttft"}
    assert "its first tokens take 8." in h.reason("a")
    assert "those of its peers 1.0 times" in h.reason("a")


def test_a_prediction_that_is_wrong_for_all_ejects_nobody() -> None:
    h = health("a", "b", "c")
    serve(h, {"a": 1_000, "b": 1_200, "c": 800})
    assert away(h) == {}


def test_a_replica_ten_times_slower_than_peers_that_are_five_times_slower_stays() -> None:
    h = health("a", "b", "c")
    serve(h, {"a": 1_000, "b": 500, "c": 500})
    assert away(h) == {}


def test_one_late_answer_ejects_nobody() -> None:
    h = health("a", "b", "c")
    now = serve(h, {"a": 100, "b": 100, "c": 100})
    h.answered("a", now, 60_000, 100)
    serve(h, {"a": 100, "b": 100, "c": 100}, at_ns=now)
    assert h.ejections()["grey_ttft"] == 0


def test_jitter_of_a_few_ms_is_nothing_however_short_the_prediction() -> None:
    h = health("a", "b", "c")
    serve(h, {"a": 40, "b": 1, "c": 1}, predicted_ms=1)
    assert away(h) == {}


def test_fewer_samples_than_the_least_eject_nobody() -> None:
    h = health("a", "b", "c")
    now = serve(h, {"b": 100, "c": 100})
    for n in range(1, CONFIG.grey_samples_min + 1):
        serve(h, {"a": 5_000}, rounds=1, at_ns=now + n * S)
        assert bool(away(h)) == (n == CONFIG.grey_samples_min)
    assert away(h) == {"a": "grey_ttft"}


def test_however_many_answers_a_moment_has_it_ejects_nobody() -> None:
    """Gateways that see the same sample send all they have to the same replica; the next sample ends that."""
    h, late_ns = health("a", "b"), SMOOTHING_NS // 2
    now = 0
    for n in range(8):
        slow, quick = ("a", "b") if n % 2 else ("b", "a")
        for at_ns in range(now, now + late_ns, 10 * MS):
            for replica_id, ttft_ms in ((slow, 900), (quick, 60)):
                h.sent(replica_id, at_ns, 100)
                h.answered(replica_id, at_ns, ttft_ms, 100)
        now += late_ns
    assert h.ejections()["grey_ttft"] == 0


# --- newcomers --------------------------------------------------------------------------------------------------------


def join(h: ReplicaHealth, at_ns: int, samples: int | None = None) -> None:
    """``new`` is there beside ``a`` and ``b``; its step model, where it told one, is of so many steps."""

    def step_model_of(replica_id: str) -> StepCoefficients | None:
        return None if samples is None or replica_id != "new" else StepCoefficients(10.0, 0.5, 0.5, 0.5, samples)

    h.update(("a", "b", "new"), at_ns, step_model_of)


def test_a_newcomer_is_not_measured_by_those_that_have_settled() -> None:
    h = health("a", "b")
    now = serve(h, {"a": 100, "b": 100})
    join(h, now)
    now = serve(h, {"a": 100, "b": 100, "new": 2_000}, at_ns=now)
    join(h, now, LEARNED_STEPS_MIN - 1)
    serve(h, {"a": 100, "b": 100, "new": 2_000}, at_ns=now)
    assert away(h) == {}
    assert h.states()["new"].ttft_factor is None


@pytest.mark.parametrize("how", ["it has learned its steps", "a minute is over"])
def test_a_newcomer_that_stays_slow_is_found(how: str) -> None:
    h = health("a", "b")
    now = serve(h, {"a": 100, "b": 100})
    join(h, now)
    now = serve(h, {"a": 100, "b": 100, "new": 2_000}, at_ns=now)
    if how == "it has learned its steps":
        join(h, now, LEARNED_STEPS_MIN)
    else:
        now += NEWCOMER_NS
    assert away(h) == {}
    serve(h, {"a": 100, "b": 100, "new": 2_000}, rounds=SMOOTHING_NS // (100 * MS) + 2, at_ns=now)
    assert away(h) == {"new": "grey_ttft"}


def test_the_first_members_a_gateway_is_told_are_no_newcomers() -> None:
    h = health()
    h.update(("a", "b"), 5 * S)
    serve(h, {"a": 2_000, "b": 100}, at_ns=5 * S)
    assert away(h) == {"a": "grey_ttft"}


def test_a_newcomer_that_fails_or_is_silent_is_found_at_once() -> None:
    h = health("a", "b", config=FaultsConfig(breaker_failures=3))
    now = serve(h, {"a": 100, "b": 100})
    join(h, now)
    for fingerprint in range(1, 4):
        h.failed("new", fingerprint, now)
    assert away(h) == {"new": "failures"}


# --- more of first tokens ---------------------------------------------------------------------------------------------


def test_without_peers_nobody_is_judged() -> None:
    h = health("a")
    serve(h, {"a": 5_000})
    assert away(h) == {}


def test_peers_that_have_been_idle_are_no_measure() -> None:
    h = health("a", "b")
    now = serve(h, {"b": 100}, rounds=20)
    serve(h, {"a": 5_000}, at_ns=now + 3_600 * S)
    assert away(h) == {}


def test_answers_without_a_figure_do_not_keep_those_with_one_from_counting() -> None:
    h = health("a", "b")
    now = 0
    for _ in range(50):
        now = serve(h, {"a": 1_000, "b": 100}, rounds=1, at_ns=now)
        h.answered("a", now)
        h.answered("b", now)
    assert away(h) == {"a": "grey_ttft"}


@pytest.mark.parametrize("ttft_ms", [None, -1.0, float("nan"), float("inf")])
def test_figures_that_make_no_sense_say_nothing(ttft_ms: float | None) -> None:
    assert residual_of(ttft_ms, 100) is None
    assert residual_of(100, ttft_ms) is None


def test_a_slow_probe_ends_probation_and_a_fast_one_passes() -> None:
    h = health("a", "b", "c")
    now = serve(h, {"a": 1_000, "b": 100, "c": 100}, rounds=22)
    assert away(h) == {"a": "grey_ttft"}
    first = h.ejections()["grey_ttft"]
    now = serve(h, {"a": 1_000, "b": 100, "c": 100}, at_ns=now)
    assert away(h) == {"a": "grey_ttft"}
    assert h.ejections()["grey_ttft"] > first
    assert h.reason("a").endswith("and a probe no better")
    serve(h, {"a": 100, "b": 100, "c": 100}, rounds=2 * TEN_SECONDS, at_ns=now)
    assert away(h) == {}


# --- engine steps -----------------------------------------------------------------------------------------------------


def models(speed_of: Mapping[str, float], steps: int) -> Callable[[str], StepCoefficients | None]:
    return lambda r: StepCoefficients(6 * speed_of[r], 0.06 * speed_of[r], 0.03, 0.015 * speed_of[r], steps)


def drift(h: ReplicaHealth, before: Mapping[str, float], after: Mapping[str, float]) -> None:
    for second in range(60):
        h.update(list(before), second * S, models(before, LEARNED_STEPS_MIN + second * STEPS_MIN))
    for second in range(60, 70):
        h.update(list(before), second * S, models(after, LEARNED_STEPS_MIN + second * STEPS_MIN))


def test_an_engine_whose_steps_became_slower_is_ejected_when_those_of_its_peers_did_not() -> None:
    h = health("a", "b", "c")
    drift(h, {"a": 1, "b": 1, "c": 2}, {"a": 10, "b": 1, "c": 2})
    assert away(h) == {"a": "grey_steps"}
    assert "times as long for a step as it used to" in h.reason("a")


def test_slower_steps_everywhere_eject_nobody() -> None:
    h = health("a", "b", "c")
    drift(h, {"a": 1, "b": 1, "c": 1}, {"a": 10, "b": 10, "c": 10})
    assert away(h) == {}


def test_a_slow_kind_of_device_is_no_fault() -> None:
    h = health("a", "b", "c")
    drift(h, {"a": 20, "b": 1, "c": 1}, {"a": 20, "b": 1, "c": 1})
    assert away(h) == {}


def test_a_step_model_of_few_steps_or_without_time_says_nothing() -> None:
    pace = Pace()
    pace.take_step_model(StepCoefficients(6, 0.06, 0.03, 0.015, LEARNED_STEPS_MIN - 1), 0)
    pace.take_step_model(StepCoefficients(0, 0, 0, 0, LEARNED_STEPS_MIN), 0)
    assert pace.drift is None


def test_in_a_large_fleet_replicas_take_turns_and_all_have_one() -> None:
    members = [f"r{i:03}" for i in range(3 * STEP_MODELS_AT_ONCE + 1)]
    h = health(*members)
    asked: list[str] = []
    for second in range(4):
        before = len(asked)
        h.update(members, second * S, asked.append)
        assert len(asked) - before <= STEP_MODELS_AT_ONCE
    assert sorted(asked) == members


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_replica_that_fails_half_its_requests_is_ejected() -> None:
    h = health("a", "b", "c")
    now = 0
    for i in range(1, 100):
        now = serve(h, {"a": 100, "b": 100, "c": 100}, rounds=1, at_ns=now)
        h.failed("a", i, now)
    assert away(h) == {"a": "failing_share"}


def test_failures_everywhere_eject_nobody_for_its_share() -> None:
    h = health("a", "b", "c")
    now = 0
    for i in range(1, 200):
        now = serve(h, {"a": 100, "b": 100, "c": 100}, rounds=1, at_ns=now)
        for replica_id in "abc":
            h.failed(replica_id, i, now)
    assert away(h) == {}


def test_one_request_that_fails_again_and_again_ejects_nobody() -> None:
    h = health("a", "b", "c")
    now = 0
    for _ in range(200):
        now = serve(h, {"a": 100, "b": 100, "c": 100}, rounds=1, at_ns=now)
        h.failed("a", 42, now)
    assert away(h) == {}


def test_failing_a_twentieth_of_requests_by_chance_ejects_nobody() -> None:
    h, rng, now = health("a", "b", "c"), Random(3), 0
    for i in range(1, 20_000):
        now += 10 * MS
        replica_id = rng.choice("abc")
        if rng.random() < 0.05:
            h.failed(replica_id, i, now)
        else:
            h.answered(replica_id, now, 100, 100)
    assert h.ejections()["failing_share"] == 0


def test_remembered_failures_are_bounded() -> None:
    pace = Pace()
    for fingerprint in range(1, 10 * FINGERPRINTS_MAX):
        pace.take_outcome(True, fingerprint, CONFIG)
    assert len(pace._fingerprints) == FINGERPRINTS_MAX


# --- silence ----------------------------------------------------------------------------------------------------------


def fall_silent(h: ReplicaHealth, peers: tuple[str, ...], predicted_ms: float = 100, seconds: int = 20) -> None:
    for second in range(1, seconds + 1):
        h.sent("a", second * S, predicted_ms)
        for replica_id in peers:
            h.sent(replica_id, second * S, 100)
            h.answered(replica_id, second * S, 100, 100)
        h.update(("a", *peers), second * S)


def test_a_replica_that_gives_no_first_byte_while_its_peers_do_is_ejected() -> None:
    h = health("a", "b", "c")
    fall_silent(h, ("b", "c"))
    assert away(h) == {"a": "silent"}
    assert "got no first token within" in h.reason("a")


def test_silence_that_was_predicted_is_none() -> None:
    h = health("a", "b", "c")
    fall_silent(h, ("b", "c"), predicted_ms=7_000)
    assert away(h) == {}


def test_silence_of_all_replicas_ejects_nobody() -> None:
    h = health("a", "b")
    for second in range(1, 60):
        h.sent("a", second * S, 100)
        h.sent("b", second * S, 100)
        h.update(("a", "b"), second * S)
    assert away(h) == {}


def test_an_idle_replica_is_not_silent() -> None:
    h = health("a", "b")
    for second in range(1, 60):
        h.sent("a", second * S, 100)
        h.withdrew("a", second * S)
        h.sent("b", second * S, 100)
        h.answered("b", second * S, 100, 100)
        h.update(("a", "b"), second * S)
    assert away(h) == {}


# --- how many ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("members", "share", "most"), [(2, 0.5, 1), (5, 0.5, 2), (4, 0.99, 3), (3, 0.3, 0), (9, 0, 0)])
def test_no_more_than_the_share_is_ejected_and_one_stays(members: int, share: float, most: int) -> None:
    names = [f"r{i}" for i in range(members)]
    config = FaultsConfig(ejected_share_max=share, breaker_failures=10**6)
    h = health(*names, config=config)
    now = serve(h, dict.fromkeys(names, 100.0))
    for slow in range(members - 1):
        now = serve(h, {n: 5_000.0 if i <= slow else 100.0 for i, n in enumerate(names)}, at_ns=now)
    assert len(away(h)) <= most
    if most and members <= 4:
        assert away(h)


def test_breakers_may_take_all_and_bring_back_who_was_only_slow() -> None:
    config = FaultsConfig(breaker_failures=3)
    h = health("a", "b", "c", "d", config=config)
    now = serve(h, {"a": 5_000, "b": 100, "c": 100, "d": 100}, rounds=30)
    assert away(h) == {"a": "grey_ttft"}
    for replica_id in "bcd":
        for fingerprint in range(1, 4):
            h.failed(replica_id, fingerprint, now)
    assert away(h) == dict.fromkeys("bcd", "failures")
    assert h.blocked(now) == {"b", "c", "d"}


def test_members_that_leave_bring_back_those_ejected_for_being_slow() -> None:
    h = health("a", "b", "c", "d")
    serve(h, {"a": 5_000, "b": 100, "c": 100, "d": 100}, rounds=30)
    assert away(h) == {"a": "grey_ttft"}
    h.update(["a"], 4 * S)
    assert away(h) == {}
    assert h.blocked(4 * S) == frozenset()


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 5.0], [3.0, 1.0, 2.0], [2.0, 2.0, 7.0, 1.0], [4.0, 4.0, 4.0]])
def test_medians_without_one(values: list[float]) -> None:
    figures = Figures({str(i): v for i, v in enumerate(values)})
    for i in range(len(values)):
        others = sorted(values[:i] + values[i + 1 :])
        n = len(others)
        expected = (others[(n - 1) // 2] + others[n // 2]) / 2 if n else None
        assert figures.of_others(str(i)) == expected
    assert figures.of_others("unknown") == figures.median()


def test_two_requests_that_wait_are_no_silence() -> None:
    h = health("a", "b")
    for second in range(1, 60):
        if second <= 2:
            h.sent("a", second * S, 100)
        h.answered("b", second * S, 100, 100)
        h.update(("a", "b"), second * S)
    assert away(h) == {}
