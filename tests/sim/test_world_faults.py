"""Each kind of fault has the effect it is named for, and nothing is lost by it that the live rules would save."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from autoscaling.simulator.faults import KINDS, FaultError
from autoscaling.simulator.records import RunResult
from autoscaling.simulator.spec import Fault, NetworkSpec, Pool, Scenario, SimRequest
from autoscaling.simulator.world import run
from policies.config import AdmissionConfig, FaultsConfig, PolicyConfig
from policies.events import Dispatch, Routed
from tests.sim.worlds import PROFILE, SECOND, Watcher, listed, poisson, settled

AT = 5 * SECOND


def faulty(*faults: Fault, replicas: int = 3, seconds: float = 15, rate_ps: float = 9, **more: Any) -> Scenario:
    return poisson(rate_ps=rate_ps, seconds=seconds, replicas=replicas, faults=faults, **more)


def watched(scenario: Scenario) -> tuple[RunResult, Watcher]:
    watcher = Watcher()
    result = run(scenario, observer=watcher)
    settled(result, watcher)
    return result, watcher


def sent(watcher: Watcher, begin_s: float, end_s: float) -> dict[str, int]:
    """Dispatches by replica between two times."""
    counts: dict[str, int] = {}
    for at, _, _, _, effects in watcher.flows:
        if begin_s <= at / SECOND < end_s:
            for effect in effects:
                if isinstance(effect, Dispatch):
                    counts[effect.replica_id] = counts.get(effect.replica_id, 0) + 1
    return counts


def test_a_killed_replica_is_replaced_and_streams_on_it_break() -> None:
    result, watcher = watched(faulty(Fault("kill", AT, replica=1), seconds=25, families=10**6))
    lost = {call for _, _, _, kind, call in watcher.engines if kind == "lost"}
    failed = [r for r in result.records if r.outcome != "succeeded"]
    assert {r.reason for r in failed} <= {"stream_broken"}
    assert len(failed) + result.counters["retries"] >= len(lost) > 0
    assert [s for s in watcher.times("starting") if s > 0] == [10.0]  # noticed at the next health check
    assert watcher.times("ready")[-1] == 20.0
    assert sent(watcher, 5.0, 100)["replica-00001"] <= 2, "each of two gateways learns it from one refused connection"
    assert "replica-00003" in sent(watcher, 20.2, 100)


def test_a_request_without_a_first_byte_survives_the_death_of_its_replica() -> None:
    requests = [SimRequest(i, i, 8_000, 10, blocks=(7,), block_tokens=16) for i in range(4)]
    slow = replace(PROFILE, law=replace(PROFILE.law, d_ms=1.0))
    result, _ = watched(listed(requests, profile=slow, replicas=3, faults=(Fault("kill", SECOND),)))
    assert result.counters["broken"] > 0
    assert [r.outcome for r in result.records] == ["succeeded"] * 4
    assert max(r.attempts for r in result.records) == 2


def test_requests_that_break_two_replicas_are_quarantined() -> None:
    slow = replace(PROFILE, law=replace(PROFILE.law, d_ms=1.0))
    faults = tuple(Fault("kill", s * SECOND) for s in (1, 2))
    scenario = listed([SimRequest(0, 0, 8_000, 10)], profile=slow, replicas=2, faults=faults)
    result, _ = watched(scenario)
    assert [(r.outcome, r.reason, r.attempts) for r in result.records] == [("failed", "quarantined", 2)]


def test_a_slow_replica_takes_longer_and_recovers() -> None:
    fault = Fault("slow", AT, 8 * SECOND, factor=5.0)
    plain, _ = watched(faulty(replicas=1, rate_ps=3, seconds=25))
    slow, _ = watched(faulty(fault, replicas=1, rate_ps=3, seconds=25))

    def tpot_ms(result: RunResult, begin_s: float, end_s: float) -> float:
        rows = [r for r in result.records if begin_s <= r.arrival_ns / SECOND < end_s and r.output_tokens > 1]
        return sum(r.tpot_ms for r in rows) / len(rows)

    assert tpot_ms(slow, 5.5, 11) > 3 * tpot_ms(plain, 5.5, 11)
    assert tpot_ms(slow, 18, 25) == pytest.approx(tpot_ms(plain, 18, 25), rel=0.05)


def test_a_frozen_replica_makes_nothing_and_goes_on_afterwards() -> None:
    result, watcher = watched(faulty(Fault("freeze", AT, 6 * SECOND)))
    busy = [at / SECOND for at, r, _, kind, _ in watcher.engines if r == "replica-00000" and kind == "first_token"]
    assert not [t for t in busy if 5.5 < t < 11]
    assert [t for t in busy if t > 11]
    assert result.counters["succeeded"] == len(result.records)
    assert max(r.e2e_ms for r in result.records) > 5_000


@pytest.mark.parametrize("resume", [True, False])
def test_gateways_give_up_replicas_that_stay_silent(resume: bool) -> None:
    network = NetworkSpec(idle_timeout_ms=1_000, first_byte_timeout_ms=1_500)
    config = PolicyConfig(faults=FaultsConfig(resume=resume))
    result, _ = watched(faulty(Fault("freeze", AT, 6 * SECOND), network=network, config=config))
    reasons = {r.reason for r in result.records if r.outcome == "failed"}
    assert reasons == ({"timeout"} if resume else {"timeout", "stream_broken"})
    late = [r.e2e_ms for r in result.records if r.reason == "timeout"]
    assert all(1_500 <= ms < 1_800 for ms in late)
    failed = [r for r in result.records if r.outcome == "failed"]
    assert result.counters["timeouts"] == len(failed) + result.counters["resumes"]
    assert bool(result.counters["resumes"]) is resume


def test_a_replica_that_is_stuck_for_long_is_replaced() -> None:
    network = NetworkSpec(stuck_after_ms=5_000, health_period_ms=1_000)
    result, watcher = watched(faulty(Fault("freeze", AT, 1_000 * SECOND), seconds=30, network=network))
    left, gone = watcher.times("draining"), watcher.times("stopped")
    assert 12 <= left[0] <= 14
    assert gone[0] == left[0] + 2
    assert result.counters["cut"] == result.counters["broken"] > 0
    assert len(watcher.times("starting")) == 4


def test_a_mute_replica_sends_no_report_and_no_sample() -> None:
    result, watcher = watched(faulty(Fault("mute", AT, 8 * SECOND)))
    ages = {round(at / SECOND): {r.replica_id: r.age_ms for r in t.signals.replicas} for at, _, t in watcher.ticks}
    assert ages[12]["replica-00000"] > 5_500
    assert max(ages[12]["replica-00001"], ages[15]["replica-00000"]) < 2_000
    assert result.counters["samples"] < len(watcher.ticks) * 3
    assert result.counters["succeeded"] == len(result.records)


def test_a_refusing_replica_gets_requests_again_afterwards() -> None:
    result, watcher = watched(faulty(Fault("refuse", AT, 4 * SECOND)))
    assert result.counters["refused_connect"] > 0
    assert result.counters["succeeded"] == len(result.records)
    submits = [at / SECOND for at, r, _, kind, _ in watcher.engines if r == "replica-00000" and kind == "submit"]
    assert not [t for t in submits if 5 < t < 9]
    assert [t for t in submits if t > 9]


@pytest.mark.parametrize("kind", ["errors", "unavailable"])
def test_a_replica_that_answers_errors_keeps_nobody_from_an_answer(kind: str) -> None:
    result, watcher = watched(faulty(Fault(kind, AT, 4 * SECOND)))
    assert result.counters["rejected" if kind == "errors" else "refused_unavailable"] > 0
    assert result.counters["succeeded"] == len(result.records)
    submits = [at / SECOND for at, r, _, what, _ in watcher.engines if r == "replica-00000" and what == "submit"]
    assert not [t for t in submits if 5 < t < 9]
    assert [t for t in submits if t > 9]


def test_retries_stay_within_the_budget() -> None:
    config = PolicyConfig(faults=FaultsConfig(retry_share_max=0.05, retry_burst=2, attempts_max=3))
    faults = tuple(Fault("refuse", SECOND, 30 * SECOND, replica=i) for i in range(3))
    result, _ = watched(faulty(*faults, replicas=4, rate_ps=30, gateways=1, config=config))
    assert 0 < result.counters["retries"] <= 2 + 0.05 * len(result.records)
    assert "retry_budget" in {r.reason for r in result.records}


def test_blind_gateways_route_on_by_their_own_counts() -> None:
    result, watcher = watched(faulty(Fault("gateway_blind", AT, 8 * SECOND)))
    assert result.counters["succeeded"] == len(result.records)
    assert set(sent(watcher, 11, 13)) == {f"replica-{i:05d}" for i in range(3)}


def test_failed_starts_are_tried_again_until_one_succeeds() -> None:
    faults = (Fault("start_fail", 0, 40 * SECOND), Fault("kill", AT))
    result, watcher = watched(faulty(*faults, seconds=60, rate_ps=2))
    begins = [s for s in watcher.times("starting") if s > 0]
    assert begins == [10.0, 20.1, 30.2, 40.3]  # each takes 10 s, Serve's loop the rest
    assert result.counters["starts_failed"] == 3
    assert watcher.times("ready")[-1] == 50.3


def test_requests_wait_for_the_first_replica_to_come_back() -> None:
    network = NetworkSpec(health_period_ms=1_000)
    result, _ = watched(faulty(Fault("kill", AT), replicas=1, seconds=10, rate_ps=4, network=network))
    waited = [r for r in result.records if 6 < r.arrival_ns / SECOND < 10]
    assert all(r.outcome == "succeeded" for r in waited)
    assert min(r.ttft_ms for r in waited) > 5_000
    assert result.counters["waits"] >= len(waited)


def test_nobody_waits_for_ever() -> None:
    config = PolicyConfig(admission=AdmissionConfig(no_replica_wait_ms=2_000))
    network = NetworkSpec(health_period_ms=1_000)
    result, _ = watched(faulty(Fault("kill", AT), replicas=1, seconds=10, rate_ps=4, network=network, config=config))
    gone = [r for r in result.records if r.reason == "no_replica"]
    assert gone
    pause_ms = 1.5 * config.faults.retry_pause_ms
    assert all(1_999 < r.e2e_ms < 2_010 + pause_ms for r in gone)


def test_the_first_choice_is_the_live_routers() -> None:
    _, watcher = watched(poisson(seconds=5))
    routed = [event for _, _, _, event, _ in watcher.flows if isinstance(event, Routed)]
    assert routed
    assert all(event.choice.order and event.choice.predicted_ttft_ms for event in routed)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault("kil", 0), "faults\\[0\\].kind: 'kil': must be one of kill, slow"),
        (Fault("slow", 0, factor=0.0), "the factor above 0"),
        (Fault("kill", -1), "must not be negative"),
    ],
)
def test_a_fault_that_cannot_be_is_named(fault: Fault, words: str) -> None:
    with pytest.raises(FaultError, match=words):
        run(listed([], faults=(fault,)))


def all_kinds() -> Sequence[Fault]:
    return [Fault(kind, (2 + i) * SECOND, 3 * SECOND, replica=i, factor=3.0) for i, kind in enumerate(KINDS)]


def test_all_faults_together_lose_nothing_and_repeat() -> None:
    scenario = poisson(rate_ps=12, seconds=12, pool=Pool(PROFILE, 4), faults=tuple(all_kinds()))
    first, _ = watched(scenario)
    assert run(scenario).digest == first.digest


def test_those_in_line_for_a_slot_outlive_a_replica_that_refuses() -> None:
    pool = Pool(PROFILE, 1, ongoing_max=1)
    result, _ = watched(poisson(rate_ps=3, seconds=4, pool=pool, faults=(Fault("refuse", SECOND, 2 * SECOND),)))
    assert result.end_ns < 60 * SECOND
    assert result.counters["lost"] == 0
