"""Whole runs: every request ends once, counters come back to zero, and one seed is one result."""

import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from autoscaling.simulator.client import SourceError
from autoscaling.simulator.spec import ClientSpec, NetworkSpec, Pool, SimRequest
from autoscaling.simulator.world import ScenarioError, run
from policies.config import AdmissionConfig, PolicyConfig
from tests.sim.worlds import PROFILE, SECOND, SLOW, Watcher, listed, poisson, settled

ROOT = Path(__file__).parents[2]


def test_every_request_is_one_row_and_succeeds_in_a_fleet_with_room() -> None:
    watcher = Watcher()
    result = run(poisson(rate_ps=15, seconds=15, replicas=3), observer=watcher)
    settled(result, watcher)
    assert result.counters["succeeded"] == len(result.records) > 200
    for row in result.records:
        assert row.outcome == "succeeded"
        assert row.attempts == row.tries == 1
        assert 0 < row.ttft_ms <= row.e2e_ms
        assert 1 <= row.output_tokens <= 100
        assert row.cached_tokens < row.prompt_tokens


def test_a_lone_request_takes_what_its_steps_and_hops_take() -> None:
    result = run(listed([SimRequest(0, 5 * SECOND, 1_000, 11)]))
    row = result.records.row(0)
    law, network = PROFILE.law, 2 * 0.2 + 1.0 + 2 * 0.5
    prefill_ms = law.step_ms(0, 0, 1_000)
    assert row.ttft_ms == pytest.approx(network + prefill_ms, rel=0.05)
    assert row.tpot_ms == pytest.approx(law.step_ms(1, 1_005), rel=0.01)
    assert row.arrival_ns == 5 * SECOND
    assert row.replica == "replica-00000"


def test_what_is_not_streamed_has_its_first_byte_with_its_last() -> None:
    row = run(listed([SimRequest(0, 0, 100, 20, stream=False)])).records.row(0)
    assert row.ttft_ms == row.e2e_ms > 20 * PROFILE.law.a_ms


def test_one_seed_is_one_digest_and_another_seed_another() -> None:
    scenario = poisson(seconds=8, clients=ClientSpec(patience_ms=400, retries_max=2, abort_share=0.2))
    first = run(scenario)
    assert run(scenario).digest == first.digest
    assert run(scenario.with_seed(2)).digest != first.digest


@pytest.mark.parametrize("hash_seed", ["0", "4711"])
def test_the_hash_seed_changes_nothing(hash_seed: str) -> None:
    code = "from tests.sim.worlds import poisson; from autoscaling.simulator.world import run; "
    code += "print(run(poisson(seconds=5, replicas=5)).digest)"
    environment = {"PYTHONHASHSEED": hash_seed, "PATH": ""}
    out = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, check=True)
    assert out.stdout.decode().strip() == run(poisson(seconds=5, replicas=5)).digest


def test_arrivals_are_read_as_time_goes_on() -> None:
    read = []

    class Endless:
        name = "endless"

        def arrivals(self) -> Iterator[SimRequest]:
            for i in range(1_000_000_000):
                read.append(i)
                yield SimRequest(i, i * SECOND, 10, 2)

        def follow_ups(self, request: SimRequest, succeeded: bool, now_ns: int) -> Sequence[SimRequest]:
            return ()

    scenario = replace(listed([]), source=lambda _: Endless(), duration_ns=20 * SECOND)
    assert len(run(scenario).records) == 21
    assert len(read) == 22


def test_a_closed_loop_goes_on_when_its_answer_is_there() -> None:
    turns = {0: [SimRequest(1, 3 * SECOND, 200, 5, task="t")], 1: [SimRequest(2, SECOND, 300, 5, task="t")]}
    result = run(listed([SimRequest(0, 0, 100, 5, task="t", task_last=False)], turns))
    first, second, third = result.records
    assert [r.index for r in (first, second, third)] == [0, 1, 2]
    assert second.arrival_ns == round(first.e2e_ms * 1e6) + 3 * SECOND
    assert third.arrival_ns == second.arrival_ns + round(second.e2e_ms * 1e6) + SECOND
    assert {r.task for r in result.records} == {"t"}


ALL_SENT_ON = PolicyConfig(admission=AdmissionConfig(engine_wait_share=None))
"""Gateways without a queue of their own."""


def test_impatient_clients_leave_and_their_work_is_aborted() -> None:
    watcher = Watcher()
    clients = ClientSpec(patience_ms=300)
    scenario = poisson(
        rate_ps=7, seconds=15, replicas=1, profile=SLOW, prompt=2_000, clients=clients, config=ALL_SENT_ON
    )
    result = run(scenario, observer=watcher)
    settled(result, watcher)
    gave_up = [r for r in result.records if r.outcome == "cancelled"]
    assert len(gave_up) > 20
    assert all(r.reason == "gave_up" and math.isnan(r.ttft_ms) and r.e2e_ms == 300 for r in gave_up)
    assert sum(kind == "abort" for _, _, _, kind, _ in watcher.engines) == len(gave_up) == result.counters["aborts"]


def test_clients_repeat_at_most_as_often_as_they_may() -> None:
    watcher = Watcher()
    clients = ClientSpec(patience_ms=200, retries_max=2, retry_pause_ms=100)
    scenario = poisson(rate_ps=7, seconds=10, replicas=1, profile=SLOW, prompt=2_000, clients=clients)
    result = run(scenario, observer=watcher)
    settled(result, watcher)
    tries = [r.tries for r in result.records]
    assert max(tries) == 3
    assert sum(tries) - len(tries) == result.counters["client_retries"] > 0
    assert all(r.tries == 3 for r in result.records if r.outcome == "cancelled")


def test_retry_after_is_waited_for() -> None:
    config = PolicyConfig(
        admission=AdmissionConfig(inflight_requests_max=1, retry_after_s=2.0, retry_after_jitter_share=0.0)
    )
    requests = [SimRequest(0, 0, 100, 400), SimRequest(1, SECOND, 100, 5)]
    clients = ClientSpec(retries_max=3, retry_pause_ms=10)
    result = run(listed(requests, config=config, gateways=1, clients=clients))
    row = next(r for r in result.records if r.index == 1)
    assert row.outcome == "succeeded"
    assert row.tries == 3
    assert 4_000 < row.ttft_ms < 4_100
    refused = next(r for r in run(listed(requests, config=config, gateways=1)).records if r.index == 1)
    assert (refused.outcome, refused.attempts) == ("refused", 0)
    assert math.isnan(refused.ttft_ms)


def test_some_clients_leave_in_the_middle_of_the_answer() -> None:
    watcher = Watcher()
    result = run(poisson(rate_ps=10, seconds=15, clients=ClientSpec(abort_share=0.3)), observer=watcher)
    settled(result, watcher)
    left = [r for r in result.records if r.reason == "left"]
    assert 0.2 < len(left) / len(result.records) < 0.4
    assert all(r.outcome == "cancelled" and r.output_tokens >= 1 and r.e2e_ms >= r.ttft_ms for r in left)


def test_serves_slots_bound_what_a_replica_holds_and_nobody_is_lost() -> None:
    watcher = Watcher()
    pool = Pool(PROFILE, 2, ongoing_max=3)
    result = run(poisson(rate_ps=40, seconds=5, pool=pool, config=ALL_SENT_ON), observer=watcher)
    settled(result, watcher)
    assert result.counters["slot_waits"] > 50
    assert result.counters["succeeded"] == len(result.records)
    inside: dict[str, int] = {}
    for _, replica, _, kind, _ in watcher.engines:
        inside[replica] = inside.get(replica, 0) + {"submit": 1, "finish": -1, "abort": -1}.get(kind, 0)
        assert inside[replica] <= 3


def test_a_prompt_no_replica_can_hold_is_the_clients_fault_and_ends_nothing_else() -> None:
    requests = [SimRequest(0, SECOND, 9_000, 10), SimRequest(1, 2 * SECOND, 100, 10)]
    scenario = replace(listed(requests), clients=ClientSpec(retries_max=3))
    rows = {row.index: row for row in run(scenario).records}
    assert (rows[0].outcome, rows[0].reason, rows[0].tries) == ("failed", "engine_client_error", 1)
    assert rows[1].outcome == "succeeded"


def test_what_is_open_after_the_last_moment_is_lost() -> None:
    result = run(listed([SimRequest(0, 0, 100, 10), SimRequest(1, 0, 100, 5_000)], drain_ns_max=SECOND))
    assert [(r.index, r.outcome) for r in result.records] == [(0, "succeeded"), (1, "lost")]
    assert result.end_ns == SECOND


def test_a_wish_to_stop_ends_the_run_and_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    result = run(poisson(seconds=60), progress=lambda n, at: told.append((n, at)), stop=lambda: len(told) == 2)
    assert told == sorted(told)
    assert told[-1] == (len(result.records), result.end_ns)
    assert result.end_ns < 50 * SECOND


def test_an_empty_source_ends_at_once() -> None:
    result = run(listed([]))
    assert (len(result.records), result.end_ns) == (0, 0)


def test_a_request_that_ends_at_once_is_not_taken_for_the_last() -> None:
    config = PolicyConfig(admission=AdmissionConfig(no_replica_wait_ms=0.0))
    requests = [SimRequest(n, n * SECOND, 100, 10) for n in range(3)]
    result = run(listed(requests, replicas=0, config=config))
    assert [r.reason for r in result.records] == ["no_replica"] * 3


def test_nonsense_is_named() -> None:
    with pytest.raises(SourceError, match="request 1 arrives at 5 ns, before"):
        run(listed([SimRequest(0, SECOND, 1, 1), SimRequest(1, 5, 1, 1)]))
    with pytest.raises(SourceError, match="request 0 has no prompt or no output"):
        run(listed([SimRequest(0, 0, 0, 1)]))
    with pytest.raises(ScenarioError, match=r"pools: roles \('decode',\)"):
        run(listed([], pools=(Pool(PROFILE, 1, "decode"),)))
    with pytest.raises(ScenarioError, match="gateways: 0"):
        run(listed([], gateways=0))
    with pytest.raises(ScenarioError, match=r"clients.abort_share: 2: must be in \[0, 1\]"):
        run(listed([], clients=ClientSpec(abort_share=2)))
    with pytest.raises(ScenarioError, match=r"network.hop_ms: nan: must be finite"):
        run(listed([], network=NetworkSpec(hop_ms=math.nan)))


def test_use_of_the_pool_is_counted() -> None:
    result = run(poisson(rate_ps=12, seconds=15, replicas=3))
    pool = result.pools[0]
    assert pool.replica_hours == pytest.approx(3 * result.end_ns / 3.6e12)
    assert pool.gpu_hours == 2 * pool.replica_hours
    assert pool.usd == pytest.approx(3.0 * pool.gpu_hours)
    assert 0.1 < pool.busy_share < 1
    assert 0 < pool.prefix_hit_tokens < pool.prefix_query_tokens
    tokens = sum(r.output_tokens - 1 for r in result.records)
    assert pool.itl.count == pytest.approx(tokens, rel=0.01)
    assert [s.ready for s in pool.timeline] == [3] * len(pool.timeline)
