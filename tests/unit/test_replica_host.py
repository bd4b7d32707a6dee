"""deployments/replica_host.py and reporting.py over real sockets in one event loop, without Ray or vLLM."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from deployments.clock import now_ns
from deployments.knobs import EngineGauges, StepRecord
from deployments.replica_host import ReplicaUnhealthyError
from deployments.reporting import WARM_UP_STEPS
from policies.measures import DepthUse, GpuReading
from policies.steering import ANY, Knob, Override
from policies.types import LATENCY_BOUNDS_MS, Knobs, Mode, Plan, ReplicaState
from tests.unit.replica_bench import REPLICA, Bench, until

SECOND_NS = 1_000_000_000


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    b = Bench(tmp_path / "shared")
    yield b
    await b.close()


def plan(seq: int = 1, mode: Mode = Mode.ACT, ttl_ms: float = 60_000, **knobs: int) -> Plan:
    return Plan("epoch", seq, ttl_ms, mode, knobs={REPLICA: Knobs(**knobs)})


# --- draining ---------------------------------------------------------------------------------------------------------


async def test_drain_serves_on_then_refuses_and_waits_for_open_streams(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.replica_host.DRAIN_GRACE_S", 0.2)
    await bench.start()
    gate = bench.host._gate
    assert gate is not None
    async with bench.get("/stream") as stream:
        await stream.content.readany()
        draining = asyncio.create_task(bench.host.drain())
        await asyncio.sleep(0)
        assert bench.host.state() is ReplicaState.DRAINING
        assert bench.host.routing_stats()["state"] == "draining"
        async with bench.get("/") as response:
            assert response.status == 200
        await until(lambda: gate.refuse_new)
        async with bench.get("/") as response:
            assert response.status == 503
            assert response.headers["x-tidegate-refused"] == "draining"
            assert json.loads(await response.text())["error"]["code"] == "replica_draining"
        assert not draining.done()
        bench.engine.release.set()
        assert await stream.read() == b"last"
    await asyncio.wait_for(draining, 5)


async def test_drain_gives_up_after_its_limit(tmp_path: Path) -> None:
    bench = await Bench(tmp_path / "shared", drain_s_max=0.2).start()
    async with bench.get("/stream") as stream:
        await stream.content.readany()
        await asyncio.wait_for(bench.host.drain(), 5)
        assert bench.host._gate is not None
        assert bench.host._gate.inflight == 1
    await bench.close()


async def test_drain_does_not_wait_for_a_stuck_engine(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.replica_host.DRAIN_GRACE_S", 0.0)
    monkeypatch.setattr("deployments.replica_host.DRAIN_LOOK_S", 0.05)
    await bench.start()
    async with bench.get("/stream") as stream:
        await stream.content.readany()
        draining = asyncio.create_task(bench.host.drain())
        await asyncio.sleep(0.2)
        assert not draining.done()
        long_ago = now_ns() - 3_600 * SECOND_NS
        bench.core.write_gauges(EngineGauges(running=1, progress_ns=long_ago, work_since_ns=long_ago))
        await asyncio.wait_for(draining, 5)


async def test_drain_before_start_and_twice_is_harmless(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.replica_host.DRAIN_GRACE_S", 0.0)
    await bench.host.drain()
    assert bench.host.state() is ReplicaState.STARTING
    await bench.start()
    await bench.host.drain()
    await bench.host.drain()


async def test_the_port_is_closed_after_stop(bench: Bench) -> None:
    await bench.start()
    await bench.host.stop()
    with pytest.raises(aiohttp.ClientConnectorError):
        async with bench.get("/"):
            pass


# --- health -----------------------------------------------------------------------------------------------------------


async def test_idle_is_healthy_however_long(bench: Bench) -> None:
    await bench.start()
    bench.core.write_gauges(EngineGauges(progress_ns=1, work_since_ns=0))
    await bench.host.check_health()
    assert bench.host.state() is ReplicaState.READY


@pytest.mark.parametrize(
    ("work_s", "progress_s", "healthy"),
    [
        (29, 1_000, True),  # a long first step
        (1_000, 29, True),  # always busy, the last step ended not long ago
        (31, 1_000, False),
        (1_000, 31, False),
    ],
)
async def test_health_follows_progress(bench: Bench, work_s: int, progress_s: int, healthy: bool) -> None:
    await bench.start()
    now = now_ns()
    bench.core.write_gauges(
        EngineGauges(running=1, progress_ns=now - progress_s * SECOND_NS, work_since_ns=now - work_s * SECOND_NS)
    )
    if healthy:
        await bench.host.check_health()
    else:
        with pytest.raises(ReplicaUnhealthyError, match="no step"):
            await bench.host.check_health()
        assert bench.host.routing_stats()["state"] == "stuck"


@pytest.mark.parametrize(("still_s", "healthy"), [(31, True), (140, True), (170, False), (3_600, False)])
async def test_a_slow_device_has_time_for_a_full_step(bench: Bench, still_s: int, healthy: bool) -> None:
    """25 ms a prompt token, as bfloat16 without hardware support: a full budget of 2,048 tokens takes 51 s."""
    await bench.start()
    for n in range(1, 60):
        tokens = n * 7 % 60
        bench.core.append_step(StepRecord(n, 0, 20_000 + tokens * 25_000, 1, tokens, 1, 16, 0))
    bench.host.build_report()
    began = now_ns() - still_s * SECOND_NS
    bench.core.write_gauges(EngineGauges(running=1, step_tokens_now=2048, progress_ns=began, work_since_ns=began))
    if healthy:
        await bench.host.check_health()
    else:
        with pytest.raises(ReplicaUnhealthyError, match="no step"):
            await bench.host.check_health()


async def test_requests_that_never_reach_the_engine_are_noticed(tmp_path: Path) -> None:
    bench = await Bench(tmp_path / "shared", stuck_after_s=0.05).start()
    async with bench.get("/silent"):
        await bench.engine.started.wait()
        await asyncio.sleep(0.1)
        with pytest.raises(ReplicaUnhealthyError, match="do not reach"):
            await bench.host.check_health()
        bench.core.write_gauges(EngineGauges(progress_ns=now_ns() + SECOND_NS))
        await bench.host.check_health()
    await bench.close()


async def test_a_slow_reader_is_no_fault_of_the_engine(tmp_path: Path) -> None:
    bench = await Bench(tmp_path / "shared", stuck_after_s=0.05).start()
    async with bench.get("/stream") as response:
        await response.content.readany()
        await asyncio.sleep(0.1)
        await bench.host.check_health()
    await bench.close()


async def test_one_that_the_plan_retires_fails_its_check_until_the_plan_is_gone(bench: Bench) -> None:
    await bench.start()
    bench.host.apply_plan(Plan("epoch", 1, 60_000, Mode.SHADOW, retired=frozenset({REPLICA})))
    await bench.host.check_health()
    bench.host.apply_plan(Plan("epoch", 2, 60_000, Mode.ACT, retired=frozenset({REPLICA, "another"})))
    with pytest.raises(ReplicaUnhealthyError, match="retires"):
        await bench.host.check_health()
    assert bench.host.routing_stats()["state"] == "draining"
    async with bench.get("/") as response:
        assert response.status == 200
    bench.host.apply_plan(Plan("epoch", 3, 60_000, Mode.ACT, retired=frozenset({"another"})))
    await bench.host.check_health()
    assert bench.host.state() is ReplicaState.READY


async def test_a_dead_server_is_unhealthy(bench: Bench) -> None:
    with pytest.raises(ReplicaUnhealthyError, match="server"):
        await bench.host.check_health()
    await bench.start()
    await bench.host.stop()
    with pytest.raises(ReplicaUnhealthyError, match="server"):
        await bench.host.check_health()


# --- knobs ------------------------------------------------------------------------------------------------------------


async def test_a_plan_sets_the_knobs_of_this_replica_only(bench: Bench) -> None:
    bench.host.apply_plan(plan(1, running_seqs_max=4, step_tokens_max=128))
    assert bench.core.read_knobs() == Knobs(4, 128)
    bench.host.apply_plan(Plan("epoch", 2, 60_000, Mode.ACT, knobs={"another": Knobs(1)}))
    assert bench.core.read_knobs() == Knobs()


async def test_an_older_plan_changes_nothing(bench: Bench) -> None:
    bench.host.apply_plan(plan(5, running_seqs_max=4))
    bench.host.apply_plan(plan(4, running_seqs_max=8))
    assert bench.core.read_knobs() == Knobs(4)


async def test_shadow_mode_leaves_the_start_up_values(bench: Bench) -> None:
    bench.host.apply_plan(plan(1, running_seqs_max=4))
    bench.host.apply_plan(plan(2, Mode.SHADOW, running_seqs_max=2))
    assert bench.core.read_knobs() == Knobs()
    assert bench.host.build_report().plan_seq == 2


async def test_a_plan_too_old_gives_the_start_up_values_back(bench: Bench) -> None:
    bench.host.apply_plan(plan(1, ttl_ms=50, running_seqs_max=4))
    assert bench.core.read_knobs() == Knobs(4)
    await asyncio.sleep(0.1)
    bench.host.follow_plan()
    assert bench.core.read_knobs() == Knobs()
    assert bench.host.build_report().plan_seq is None


# --- signals ----------------------------------------------------------------------------------------------------------


async def test_reports_flow_and_plans_come_back(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "shared", report_interval_ms=50.0)

    async def answer() -> Plan:
        return plan(len(bench.reports.got), running_seqs_max=3)

    bench.reports.answer = answer
    await bench.start()
    await until(lambda: len(bench.reports.got) >= 3)
    assert [r.seq for r in bench.reports.got[:3]] == [1, 2, 3]
    assert bench.core.read_knobs() == Knobs(3)
    assert bench.reports.got[0].cold_start_ms is not None
    await bench.close()


async def test_a_failing_and_a_hanging_controller_cost_nothing_but_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.replica_host.REPORT_TIMEOUT_S", 0.1)
    bench = Bench(tmp_path / "shared", report_interval_ms=50.0)

    async def fail() -> Plan:
        raise ConnectionError("the controller is gone")

    async def hang() -> Plan:
        await asyncio.sleep(3_600)
        raise AssertionError

    bench.reports.answer = fail
    await bench.start()
    await until(lambda: len(bench.reports.got) >= 2)
    bench.reports.answer = hang
    seen = len(bench.reports.got)
    await until(lambda: len(bench.reports.got) >= seen + 3)
    async with bench.get("/") as response:
        assert response.status == 200
    await bench.host.check_health()
    await bench.close()


async def test_a_report_counts_one_window(bench: Bench) -> None:
    await bench.start()
    for n in range(1, 11):
        bench.core.append_step(StepRecord(n, 0, 20_000, 4, 100, 3, 640, 0, 5))
    bench.core.append_step(StepRecord(11, 0, 80_000, 2, 0, 2, 640, 1))
    totals = EngineGauges(
        running=4,
        waiting=2,
        kv_tokens_used=640,
        kv_tokens_max=8192,
        running_seqs_hard=16,
        step_tokens_hard=2048,
        running_seqs_now=8,
        step_tokens_now=512,
        finished_total=7,
        aborted_total=1,
        preemptions_total=1,
        prefix_query_tokens_total=900,
        prefix_hit_tokens_total=300,
    )
    bench.core.write_gauges(totals)
    first = bench.host.build_report()
    assert (first.steps, first.prefill_tokens, first.decode_tokens) == (11, 1_000, 52)
    assert (first.finished, first.aborted, first.preemptions) == (7, 1, 1)
    assert (first.prefix_query_tokens, first.prefix_hit_tokens) == (900, 300)
    assert (first.running, first.waiting, first.kv_tokens_used, first.kv_tokens_max) == (4, 2, 640, 8192)
    assert (first.running_seqs_hard, first.step_tokens_hard) == (16, 2048)
    assert first.knobs == Knobs(8, 512, None)
    assert first.itl.count == 32
    assert first.itl.counts[LATENCY_BOUNDS_MS.index(20)] == 30
    assert first.itl.sum_ms == pytest.approx(30 * 20 + 2 * 80)
    assert first.gpu_utilisation_share is None
    assert first.busy_share is not None
    assert 0 < first.busy_share <= 1
    second = bench.host.build_report()
    assert (second.seq, second.steps, second.finished, second.prefix_query_tokens) == (2, 0, 0, 0)
    assert second.itl.count == 0
    assert second.busy_share == 0


async def test_a_report_tells_goodput_by_depth_and_batch_and_no_model_learns_from_drafts(bench: Bench) -> None:
    await bench.start()
    before = bench.host._builder.coefficients()
    steps = [
        StepRecord(100, 0, 20_000, 1, 0, 1, 16, 0, 5, 4, 4, 4),
        StepRecord(101, 0, 30_000, 1, 0, 1, 16, 0, 1, 4, 4, 0),
        StepRecord(102, 0, 10_000, 3, 0, 3, 16, 0, 3, 0, 0, 0),
        StepRecord(103, 0, 90_000, 4, 50, 3, 16, 0, 4, 4, 9, 0),  # with a prompt: no decode step
    ]
    for n, step in enumerate(steps, start=1):
        bench.core.append_step(replace(step, seq=n))
    bench.core.write_gauges(EngineGauges(speculative_depth_now=2, speculative_depth_hard=4))
    report = bench.host.build_report()
    assert report.depth_use == (DepthUse(0, 4, 1, 3, 3, 10.0, 0), DepthUse(4, 1, 2, 2, 6, 50.0, 8))
    assert (report.draft_tokens, report.accepted_tokens) == (17, 4)
    assert (report.knobs.speculative_depth, report.speculative_depth_hard) == (2, 4)
    for seq in range(len(steps) + 1, WARM_UP_STEPS + 2):
        bench.core.append_step(replace(steps[0], seq=seq))
    assert bench.host.build_report().step_model == before
    bench.core.append_step(replace(steps[2], seq=WARM_UP_STEPS + 2))
    assert bench.host.build_report().step_model != before


async def test_an_engine_that_does_not_speculate_tells_no_depths(bench: Bench) -> None:
    await bench.start()
    bench.core.append_step(StepRecord(1, 0, 20_000, 1, 0, 1, 16, 0))
    bench.core.write_gauges(EngineGauges(speculative_depth_now=None))
    report = bench.host.build_report()
    assert (report.depth_use, report.speculative_depth_hard) == ((), None)


async def test_exploration_comes_with_the_plan_and_ends_with_a_depth_set_by_hand(bench: Bench) -> None:
    await bench.start()
    knobs = {bench.host._identity.replica_id: Knobs(speculative_depth=2)}

    def bounds() -> float:
        bench.core.read_knobs()
        return bench.core.bounds.share

    assert bounds() == 0
    bench.host.apply_plan(Plan("e", 1, 60_000, Mode.ACT, knobs=knobs))
    assert bounds() == 0.02
    held = Override("o", Knob.SPECULATIVE_DEPTH, ANY, 2)
    bench.host.apply_plan(Plan("e", 2, 60_000, Mode.ACT, knobs=knobs, overrides=(held,)))
    assert bounds() == 0
    bench.host.apply_plan(Plan("e", 3, 60_000, Mode.ACT, knobs=knobs))
    assert bounds() == 0.02
    bench.host.apply_plan(Plan("e", 4, 60_000, Mode.SHADOW, knobs=knobs))
    assert bounds() == 0


async def test_a_device_that_hangs_makes_readings_unknown_and_nothing_late(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.replica_host.GPU_READ_S", 0.05)
    let_go, reads = threading.Event(), 0

    def read() -> GpuReading:
        nonlocal reads
        reads += 1
        if reads == 2:
            let_go.wait(20)
        return GpuReading(sm_share=0.5, power_w=300.0)

    bench.host._gpu = read
    first = bench.host.build_report(await bench.host._read_gpu())
    assert (first.gpu, first.gpu_utilisation_share) == (GpuReading(sm_share=0.5, power_w=300.0), 0.5)
    for _ in range(3):
        hanging = bench.host.build_report(await bench.host._read_gpu())
        assert (hanging.gpu, hanging.gpu_utilisation_share) == (None, None)
    assert reads == 2  # one that hangs is not joined by others
    let_go.set()
    await until(lambda: bench.host._gpu_read is not None and bench.host._gpu_read.done())
    assert await bench.host._read_gpu() is not None


async def test_records_overwritten_unread_are_counted(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "shared")
    for n in range(1, bench.shared.ring_steps + 101):
        bench.core.append_step(StepRecord(n, 0, 1_000, 1, 0, 1, 16, 0))
    assert bench.host.build_report().steps == bench.shared.ring_steps
    assert bench.host._builder.steps_lost == 100
    await bench.close()


async def test_the_step_model_leaves_out_the_warm_up(bench: Bench) -> None:
    for n in range(1, WARM_UP_STEPS + 1):
        bench.core.append_step(StepRecord(n, 0, 10_000_000, 1, 0, 1, 16, 0))
    model = bench.host.build_report().step_model
    assert model is not None
    assert model.samples == 0
    bench.core.append_step(StepRecord(WARM_UP_STEPS + 1, 0, 20_000, 1, 0, 1, 16, 0))
    model = bench.host.build_report().step_model
    assert model is not None
    assert model.samples == 1


async def test_routing_stats_are_flat_fresh_and_numbered(bench: Bench) -> None:
    await bench.start()
    first, second = bench.host.routing_stats(), bench.host.routing_stats()
    assert second["seq"] != first["seq"]
    bench.core.write_gauges(EngineGauges(running=3, waiting=1, prefill_backlog_tokens=77, running_seqs_now=5))
    stats = bench.host.routing_stats()
    assert (stats["running"], stats["waiting"], stats["prefill_backlog_tokens"]) == (3, 1, 77)
    assert stats["running_seqs_max"] == 5
    assert all(isinstance(v, (int, float, str)) for v in stats.values())
    json.dumps(stats)


async def test_autoscaling_stats_count_open_requests(bench: Bench) -> None:
    await bench.start()
    assert bench.host.autoscaling_stats()["http_inflight"] == 0
    async with bench.get("/stream") as response:
        await response.content.readany()
        assert bench.host.autoscaling_stats()["http_inflight"] == 1
