from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from deployments.emulation.core import STEP_TOKENS_MIN, EngineCore, EngineFullError
from deployments.emulation.faults import FaultBoard
from deployments.emulation.tokens import encode
from deployments.knobs import EngineShared
from deployments.settings import EmulatedSettings, FaultSettings, StepSettings
from policies.step_model import predict_step_ms
from policies.types import Knobs, StepCoefficients
from tests.unit.emulation.drive import SLOW, engine

PROMPT = encode("Name a river. " * 20)


@pytest.fixture
def shared(tmp_path: Path) -> EngineShared:
    return EngineShared.create(tmp_path / "shared")


async def test_steps_are_recorded_with_what_they_computed(shared: EngineShared) -> None:
    async with engine(shared=shared) as e:
        e.core.submit([(PROMPT, [7] * 4)], "")
        await e.idle()
    steps, last, lost = shared.read_steps(0)
    assert (last, lost) == (4, 0)
    assert [s.prefill_tokens for s in steps] == [len(PROMPT), 0, 0, 0]
    assert [s.decode_seqs for s in steps] == [0, 1, 1, 1]
    assert [s.running for s in steps] == [1, 1, 1, 1]
    assert all(s.duration_us >= 1 for s in steps)


async def test_gauges_tell_the_truth_at_rest_and_at_work(shared: EngineShared) -> None:
    async with engine(SLOW, shared=shared, running_seqs_max=1) as e:
        assert shared.read_gauges().running_seqs_hard == 1
        first = e.core.submit([(PROMPT, [7] * 50)], "")
        e.core.submit([(encode("x" * 400), [7] * 50)], "")
        await first.events.get()
        gauges = shared.read_gauges()
        assert (gauges.running, gauges.waiting) == (1, 1)
        assert gauges.prefill_backlog_tokens == 100
        assert gauges.kv_tokens_used >= len(PROMPT)
        assert gauges.work_since_ns > 0
        e.core.faults.change({"slow_factor": 0.001})
        await e.idle()
        await asyncio.sleep(0)
    gauges = shared.read_gauges()
    assert (gauges.running, gauges.waiting, gauges.kv_tokens_used, gauges.work_since_ns) == (0, 0, 0, 0)
    assert gauges.finished_total == 2
    assert gauges.progress_ns > 0
    assert gauges.speculative_depth_now is None


async def test_knobs_are_obeyed_within_what_is_possible(shared: EngineShared) -> None:
    async with engine(shared=shared, running_seqs_max=4, step_tokens_max=64) as e:
        for knobs, expected in (
            (Knobs(), (4, 64)),
            (Knobs(running_seqs_max=2, step_tokens_max=32), (2, 32)),
            (Knobs(running_seqs_max=99, step_tokens_max=9_999), (4, 64)),
            (Knobs(running_seqs_max=0, step_tokens_max=0), (1, STEP_TOKENS_MIN)),
        ):
            shared.write_knobs(knobs)
            e.core.submit([(PROMPT, [7])], "")
            await e.idle()
            gauges = shared.read_gauges()
            assert (gauges.running_seqs_now, gauges.step_tokens_now) == expected


async def test_knob_takes_effect_between_two_steps_and_never_stops_what_runs(shared: EngineShared) -> None:
    async with engine(SLOW, shared=shared) as e:
        running = [e.core.submit([(PROMPT, [7] * 10)], "") for _ in range(3)]
        for generation in running:
            await generation.events.get()
        shared.write_knobs(Knobs(running_seqs_max=1))
        late = e.core.submit([(PROMPT, [7] * 2)], "")
        await late.events.get()
        assert all(g.sequences[0].finished for g in running)
    decodes = [s.decode_seqs for s in shared.read_steps(0)[0]]
    assert max(decodes) == 3


async def test_smaller_token_budget_cuts_prompts_into_more_steps(shared: EngineShared) -> None:
    async with engine(shared=shared) as e:
        shared.write_knobs(Knobs(step_tokens_max=16))
        e.core.submit([(list(range(259, 259 + 64)), [7])], "")
        await e.idle()
    assert [s.prefill_tokens for s in shared.read_steps(0)[0]] == [16, 16, 16, 16]


def test_steps_last_as_long_as_the_law_says_with_jitter_and_slowness_on_top() -> None:
    law = StepSettings(a_ms=10, b_ms=2, c_ms=4, d_ms=0.5, jitter_share=0.1)
    core = EngineCore(EmulatedSettings(step=law), FaultBoard(), None)
    core.submit([(PROMPT, [7, 7])], "")
    plan = core.scheduler.schedule(16, 2_048)
    exact = predict_step_ms(StepCoefficients(10, 2, 4, 0.5), 1, 0, len(PROMPT))
    drawn = [core.step_ms(plan) for _ in range(200)]
    assert 0.9 * exact <= min(drawn) < 0.95 * exact < 1.05 * exact < max(drawn) <= 1.1 * exact
    core.faults.change({"slow_factor": 10})
    assert core.step_ms(plan) >= 9 * exact


def test_jitter_is_the_same_for_the_same_seed() -> None:
    def draws(seed: int) -> list[float]:
        law = StepSettings(a_ms=10, jitter_share=0.5)
        core = EngineCore(EmulatedSettings(step=law, seed=seed), FaultBoard(), None)
        core.submit([(PROMPT, [7, 7])], "")
        plan = core.scheduler.schedule(16, 2_048)
        return [core.step_ms(plan) for _ in range(5)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)


def test_cache_smaller_than_one_context_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"emulated\.kv_blocks: 10 blocks"):
        EngineCore(EmulatedSettings(kv_blocks=10), FaultBoard(), None)


def test_full_queue_is_refused() -> None:
    core = EngineCore(EmulatedSettings(), FaultBoard(), None)
    core.scheduler.waiting_max = 2
    core.submit([(PROMPT, [7]), (PROMPT, [7])], "")
    with pytest.raises(EngineFullError):
        core.submit([(PROMPT, [7])], "")


async def test_abort_takes_out_running_and_waiting_work_once() -> None:
    async with engine(SLOW, running_seqs_max=1) as e:
        running = e.core.submit([(PROMPT, [7] * 500)], "")
        waiting = e.core.submit([(PROMPT, [7] * 500)], "")
        await running.events.get()
        for generation in (running, waiting, running):
            e.core.abort(generation)
        assert not e.core.scheduler.has_work
        await asyncio.sleep(0.02)
        assert e.core.counters.aborted == 2
        assert e.core.counters.tokens_after_abort == 0
        assert e.core.scheduler.pool.used_tokens == 0


async def test_abort_after_the_end_counts_nothing() -> None:
    async with engine() as e:
        generation = e.core.submit([(PROMPT, [7])], "")
        await e.idle()
        e.core.abort(generation)
        assert (e.core.counters.finished, e.core.counters.aborted) == (1, 0)


async def test_ignored_abort_wastes_tokens_and_counts_them() -> None:
    async with engine(faults=FaultSettings(ignore_aborts=True)) as e:
        generation = e.core.submit([(PROMPT, [7] * 9)], "")
        e.core.abort(generation)
        await e.idle()
        assert e.core.counters.tokens_after_abort == 9


async def test_die_marker_ends_the_process() -> None:
    died: list[int] = []
    async with engine(die=died.append, faults=FaultSettings(die_marker="poison")) as e:
        e.core.submit([(PROMPT, [7])], "fine")
        assert died == []
        e.core.submit([(PROMPT, [7])], "some poison here")
    assert died == [13]


async def test_frozen_engine_stops_after_so_many_tokens_and_goes_on_when_the_fault_ends(shared: EngineShared) -> None:
    async with engine(shared=shared, faults=FaultSettings(kind="freeze", after_tokens=3, marker="ice")) as e:
        e.core.submit([(PROMPT, [7] * 9)], "fine")
        await e.idle()
        generation = e.core.submit([(PROMPT, [7] * 9)], "ice")
        for _ in range(200):
            await asyncio.sleep(0)
        assert generation.events.qsize() == 3
        assert shared.read_gauges().work_since_ns > 0
        e.core.faults.change({"kind": "none"})
        await e.idle()
        assert generation.events.qsize() == 9


async def test_draining_engine_that_ignores_it_never_ends_its_work() -> None:
    async with engine(SLOW, faults=FaultSettings(ignore_drain=True)) as e:
        generation = e.core.submit([(PROMPT, [7] * 5)], "")
        await generation.events.get()
        e.core.draining = True
        await asyncio.sleep(0.05)
        assert e.core.scheduler.has_work
        e.core.faults.change({"ignore_drain": False})
        await e.idle()
