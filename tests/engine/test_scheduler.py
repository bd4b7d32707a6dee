"""deployments/scheduler.py: the names it needs of vLLM, its limits, and that it never raises. Skipped without vLLM."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus

from deployments.knobs import EngineShared
from deployments.scheduler import (
    STEP_TOKENS_MIN,
    VLLM_NAMES,
    LiveAsyncScheduler,
    LiveScheduler,
    LiveStep,
    VllmChangedError,
    live_scheduler,
)
from policies.speculation import Bounds
from policies.types import Knobs


def names_of(cls: type) -> set[str]:
    """Methods, properties, declared fields, and what the constructor sets."""
    fields = {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    fields |= set(getattr(cls, "__struct_fields__", ()))
    if inspect.isfunction(constructor := vars(cls).get("__init__")) and not dataclasses.is_dataclass(cls):
        fields |= set(re.findall(r"self\.(\w+)(?::[^=\n]+)? = ", inspect.getsource(constructor)))
    return fields | set(dir(cls))


@pytest.mark.parametrize(
    "cls",
    [
        Scheduler,
        KVCacheManager,
        Request,
        SchedulerOutput,
        NewRequestData,
        CachedRequestData,
        EngineCoreOutputs,
        EngineCoreOutput,
        DraftTokenIds,
    ],
)
def test_every_name_used_of_vllm_is_there(cls: type) -> None:
    missing = set(VLLM_NAMES[cls.__name__]) - names_of(cls)
    assert not missing, f"vLLM moved {cls.__name__}.{missing}: adapt deployments/scheduler.py"


def test_the_list_of_names_covers_every_class_it_lists() -> None:
    assert len(VLLM_NAMES) == 9


def test_signatures_that_are_overridden_are_as_they_were() -> None:
    assert list(inspect.signature(Scheduler.schedule).parameters) == ["self", "throttle_prefills"]
    assert list(inspect.signature(Scheduler.update_from_output).parameters) == [
        "self",
        "scheduler_output",
        "model_runner_output",
    ]
    assert list(inspect.signature(Scheduler.finish_requests).parameters) == ["self", "request_ids", "finished_status"]
    assert list(inspect.signature(Scheduler.add_request).parameters) == ["self", "request"]
    assert list(inspect.signature(Scheduler.update_draft_token_ids).parameters) == ["self", "draft_token_ids"]


def test_the_factory_follows_vllms_own_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LiveScheduler", "LiveAsyncScheduler"):
        monkeypatch.setattr(f"deployments.scheduler.{name}", lambda *a, _name=name, **k: _name)
    for wanted, name in ((True, "LiveAsyncScheduler"), (False, "LiveScheduler")):
        config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=wanted))
        assert live_scheduler(vllm_config=config) == name
    assert issubclass(LiveScheduler, Scheduler)
    assert issubclass(LiveAsyncScheduler, Scheduler)


class State(SimpleNamespace):
    """The attributes of a vLLM scheduler that LiveStep reads: values, no behaviour."""

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), self.waiting_count

    def get_kv_cache_usage(self) -> float:
        return 0.5

    def get_num_unfinished_requests(self) -> int:
        return self.get_request_counts()[0] + self.get_request_counts()[1]


def state(**changes: Any) -> State:
    base: dict[str, Any] = dict.fromkeys(VLLM_NAMES["Scheduler"][:4])
    base |= {
        "vllm_config": None,
        "scheduler_config": SimpleNamespace(
            enable_chunked_prefill=True, disable_chunked_mm_input=False, async_scheduling=False
        ),
        "cache_config": SimpleNamespace(kv_cache_size_tokens=1000, num_gpu_blocks=None),
        "kv_cache_manager": SimpleNamespace(prefix_cache_lookup_enabled=lambda _request: True),
        "requests": {},
        "running": [],
        "waiting_count": 0,
        "num_spec_tokens": 0,
        "max_num_running_reqs": 16,
        "max_num_scheduled_tokens": 2048,
        "block_size": 16,
        "need_mamba_block_aligned_split": False,
        **{name: None for name in VLLM_NAMES["Scheduler"] if name.startswith(("schedule", "update", "add", "finish"))},
    }
    base["scheduler_config"] = SimpleNamespace(
        enable_chunked_prefill=True, disable_chunked_mm_input=False, async_scheduling=False
    )
    return State(**{**base, **changes})


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[EngineShared]:
    end = EngineShared.create(tmp_path / "shared")
    yield end
    end.close()


def step(
    live: LiveStep,
    scheduled: dict[str, int],
    results: dict[int, Any] | None = None,
    ready_ns: int = 0,
    drafts: dict[str, list[int]] | None = None,
) -> Any:
    output = SimpleNamespace(
        num_scheduled_tokens=scheduled,
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
        preempted_req_ids=set(),
        scheduled_spec_decode_tokens=drafts or {},
        num_spec_tokens_to_schedule=4,
    )
    live.before_schedule()
    live.after_schedule(output)
    if results is not None:
        live.after_update(output, results, ready_ns)
    return output


@pytest.mark.parametrize(
    ("knobs", "running", "expected"),
    [
        (Knobs(), 0, (16, 2048)),
        (Knobs(4, 128), 0, (4, 128)),
        (Knobs(4, 128), 10, (10, 128)),  # never below what runs
        (Knobs(10_000, 10_000_000), 0, (16, 2048)),  # never above the start-up values
        (Knobs(0, 0), 0, (1, STEP_TOKENS_MIN)),
        (Knobs(-5, -5), 0, (1, STEP_TOKENS_MIN)),
        (Knobs(4, 16), 16, (16, 16)),
        (Knobs(None, 64), 0, (16, 64)),
        (Knobs(8, None), 0, (8, 2048)),
    ],
)
def test_knobs_stay_within_what_the_engine_can_do(
    shared: EngineShared, knobs: Knobs, running: int, expected: tuple[int, int]
) -> None:
    scheduler = state(running=[object()] * running)
    live = LiveStep(scheduler, EngineShared.open(shared.path))
    shared.write_knobs(knobs)
    live.before_schedule()
    assert (scheduler.max_num_running_reqs, scheduler.max_num_scheduled_tokens) == expected
    shared.write_knobs(Knobs())
    live.before_schedule()
    assert (scheduler.max_num_running_reqs, scheduler.max_num_scheduled_tokens) == (16, 2048)


def test_a_small_budget_leaves_a_token_and_its_drafts_for_each_running_sequence(shared: EngineShared) -> None:
    scheduler = state(running=[object()] * 10, num_spec_tokens=4)
    live = LiveStep(scheduler, EngineShared.open(shared.path))
    shared.write_knobs(Knobs(step_tokens_max=16))
    live.before_schedule()
    assert scheduler.max_num_scheduled_tokens == 50


@pytest.mark.parametrize(
    "config",
    [
        SimpleNamespace(enable_chunked_prefill=False, disable_chunked_mm_input=False, async_scheduling=False),
        SimpleNamespace(enable_chunked_prefill=True, disable_chunked_mm_input=True, async_scheduling=False),
    ],
)
def test_the_budget_stays_where_prompts_cannot_be_split(shared: EngineShared, config: Any) -> None:
    scheduler = state(scheduler_config=config)
    live = LiveStep(scheduler, EngineShared.open(shared.path))
    shared.write_knobs(Knobs(step_tokens_max=64))
    live.before_schedule()
    assert scheduler.max_num_scheduled_tokens == 2048


@pytest.mark.parametrize(("depth", "kept"), [(0, 0), (2, 2), (4, 4), (9, 4), (-1, 0), (None, 4)])
def test_drafts_are_asked_for_and_cut_to_the_depth(shared: EngineShared, depth: int | None, kept: int) -> None:
    live = LiveStep(state(num_spec_tokens=4), EngineShared.open(shared.path))
    shared.write_knobs(Knobs(speculative_depth=depth))
    output = step(live, {"a": 1})
    assert output.num_spec_tokens_to_schedule == kept
    drafts = SimpleNamespace(req_ids=["a", "b"], draft_token_ids=[[1, 2, 3, 4], [5]])
    live.cut_drafts(drafts)
    assert drafts.draft_token_ids == [[1, 2, 3, 4][:kept], [5][:kept]]


def test_a_step_is_recorded_at_the_depth_its_drafts_were_cut_to(shared: EngineShared) -> None:
    live = LiveStep(state(running=["a"], num_spec_tokens=4), EngineShared.open(shared.path))
    drafts = SimpleNamespace(req_ids=["a"], draft_token_ids=[[1, 2, 3, 4]])
    for depth in (4, 1, 0):
        shared.write_knobs(Knobs(speculative_depth=depth))
        output = step(live, {"a": 1})
        output.scheduled_spec_decode_tokens = {"a": [1] * depth}
        live.after_update(output, results(1 + depth), 1)
        live.cut_drafts(drafts)
    assert [s.depth for s in shared.read_steps(0)[0]] == [4, 4, 1]


def test_a_step_tells_the_drafts_it_verified_and_kept(shared: EngineShared) -> None:
    live = LiveStep(state(running=["a", "b"], num_spec_tokens=4), EngineShared.open(shared.path))
    output = step(live, {"0": 5, "1": 1}, drafts={"0": [1, 2, 3, 4]})
    live.after_update(output, results(3, 1), 1)
    (record,) = shared.read_steps(0)[0]
    assert (record.output_tokens, record.draft_tokens, record.accepted_tokens) == (4, 4, 2)


def test_where_it_may_the_engine_explores_other_depths_and_records_them(shared: EngineShared) -> None:
    live = LiveStep(state(running=["a"], num_spec_tokens=4), EngineShared.open(shared.path))
    shared.write_knobs(Knobs(speculative_depth=0), Bounds(0.2, 4))
    for n in range(1, 200):
        output = step(live, {"a": 1})
        live.after_update(output, results(1), n * 1_000_000)
        live.cut_drafts(SimpleNamespace(req_ids=[], draft_token_ids=[]))
    depths = {s.depth for s in shared.read_steps(0)[0][1:]}
    assert depths == {0, 1, 2, 4}
    assert shared.read_gauges().speculative_depth_now == 0


def test_with_asynchronous_scheduling_the_depth_stands_still(shared: EngineShared) -> None:
    config = SimpleNamespace(enable_chunked_prefill=True, disable_chunked_mm_input=False, async_scheduling=True)
    live = LiveStep(state(num_spec_tokens=4, scheduler_config=config), EngineShared.open(shared.path))
    shared.write_knobs(Knobs(speculative_depth=0))
    assert step(live, {"a": 1}).num_spec_tokens_to_schedule == 4
    gauges = shared.read_gauges()
    assert (gauges.speculative_depth_now, gauges.speculative_depth_hard) == (4, 0)


def test_without_speculation_the_depth_is_unknown(shared: EngineShared) -> None:
    LiveStep(state(), EngineShared.open(shared.path))
    assert shared.read_gauges().speculative_depth_now is None


def results(*tokens: int, finished: int = 0) -> dict[int, Any]:
    outputs = [
        SimpleNamespace(request_id=str(i), new_token_ids=[0] * n, finish_reason=None) for i, n in enumerate(tokens)
    ]
    outputs += [SimpleNamespace(request_id="end", new_token_ids=[], finish_reason="stop")] * finished
    return {0: SimpleNamespace(outputs=outputs)}


def test_durations_of_a_busy_engine_add_up_and_idle_time_is_left_out(
    shared: EngineShared, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(ns=1_000_000)
    monkeypatch.setattr("deployments.scheduler.now_ns", lambda: clock.ns)
    scheduler = state(running=["a"])
    live = LiveStep(scheduler, EngineShared.open(shared.path))
    step(live, {"a": 1}, results(1), ready_ns=3_000_000)  # from schedule() at 1 ms
    clock.ns = 4_000_000
    step(live, {"a": 1}, results(1), ready_ns=8_000_000)  # back to back: from 3 ms
    scheduler.running = []
    clock.ns = 9_000_000
    step(live, {}, results(0), ready_ns=9_000_000)  # nothing to compute
    scheduler.running = ["b"]
    clock.ns = 50_000_000
    output = step(live, {"b": 1})  # after a pause: from schedule()
    scheduler.running = []
    live.after_update(output, results(1, finished=1), 52_000_000)
    steps, _, _ = shared.read_steps(0)
    assert [s.duration_us for s in steps] == [2_000, 5_000, 2_000]
    assert [s.start_ns for s in steps] == [1_000_000, 3_000_000, 50_000_000]
    assert shared.read_gauges().progress_ns == 52_000_000


def test_overlapping_steps_run_one_after_the_other(shared: EngineShared, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(ns=1_000_000)
    monkeypatch.setattr("deployments.scheduler.now_ns", lambda: clock.ns)
    live = LiveStep(state(running=["a"]), EngineShared.open(shared.path))
    first = step(live, {"a": 1})
    clock.ns = 2_000_000
    second = step(live, {"a": 1})
    live.after_update(first, results(1), 6_000_000)
    live.after_update(second, results(1), 9_000_000)
    steps, _, _ = shared.read_steps(0)
    assert [(s.start_ns, s.duration_us) for s in steps] == [(1_000_000, 5_000), (6_000_000, 3_000)]


def test_work_is_known_from_the_first_request_to_the_last(shared: EngineShared) -> None:
    scheduler = state()
    live = LiveStep(scheduler, EngineShared.open(shared.path))
    assert shared.read_gauges().work_since_ns == 0
    request = SimpleNamespace(request_id="a", num_tokens=7)
    scheduler.waiting_count = 1
    live.added(request)
    assert shared.read_gauges().work_since_ns > 0
    assert shared.read_gauges().prefill_backlog_tokens == 7
    scheduler.waiting_count = 0
    live.ended_early([request], RequestStatus.FINISHED_ABORTED)
    gauges = shared.read_gauges()
    assert (gauges.work_since_ns, gauges.prefill_backlog_tokens, gauges.aborted_total) == (0, 0, 1)


def test_an_error_inside_switches_it_off_and_never_reaches_vllm(shared: EngineShared) -> None:
    scheduler = state()
    live = LiveStep(scheduler, EngineShared.open(shared.path))
    shared.write_knobs(Knobs(4, 128))
    live.before_schedule()
    assert scheduler.max_num_running_reqs == 4
    live.after_schedule(object())
    assert live.broken
    assert (scheduler.max_num_running_reqs, scheduler.max_num_scheduled_tokens) == (16, 2048)
    live.before_schedule()
    assert scheduler.max_num_running_reqs == 16
    assert shared.read_gauges().work_since_ns == 0


def test_a_vllm_without_a_needed_name_stops_the_start(shared: EngineShared) -> None:
    scheduler = state()
    del scheduler.max_num_running_reqs
    with pytest.raises(VllmChangedError, match="max_num_running_reqs"):
        LiveStep(scheduler, EngineShared.open(shared.path))


def test_steps_that_never_come_back_are_bounded(shared: EngineShared) -> None:
    live = LiveStep(state(running=["a"]), EngineShared.open(shared.path))
    for _ in range(200):
        last = step(live, {"a": 1})
    live.after_update(last, results(1), 1)
    assert not live.broken
    assert len(shared.read_steps(0)[0]) == 1
    assert len(live._under_way) == 0
