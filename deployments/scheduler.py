"""vLLM's schedulers with knobs that move between two steps, and a record of each step. Runs in the engine core.

:func:`live_scheduler` is the ``scheduler_cls`` of every engine: it builds the live form of the scheduler that vLLM
itself would have chosen. The path of the shared mapping and the replica's process id come in
``additional_config["tidegate"]``. Each live scheduler holds one :class:`LiveStep`, which does all the work; the classes
only call it.

Knobs, applied before each ``schedule()``::

    running_seqs_max    never above start-up max_num_seqs (buffers are sized for it), never below what runs now
    step_tokens_max     never above start-up max_num_batched_tokens, never below one token (and its drafts) for each
                        running sequence, so that a small budget slows prompts and starves no stream
    speculative_depth   0 .. num_speculative_tokens, for the drafts made at the end of the step: vLLM is asked for that
                        many (``num_spec_tokens_to_schedule``; at 0 nothing is looked up), and more are cut. With
                        asynchronous scheduling drafts never pass through here and the depth stays what it was

Where the plan allows it, a few steps now and then draft at another depth, to learn what that is worth
(``policies/speculation/explorer.py``); each record says at which.

Duration of a step: from its start to the moment its output is here. Steps may overlap: with asynchronous scheduling
step n+1 is scheduled while step n runs, and begins to run when n ends. So::

    start = end of the previous step   the engine had work without a pause since, or this step was scheduled before it
            time of schedule()         the engine was idle in between

A busy engine's durations add up to the time that passed, and each is the gap a decoding stream saw. Steps that compute
nothing are not recorded and are no progress.

It must never raise into vLLM: an error inside switches the knobs back to the start-up values and itself off, once,
with a log line. What it uses of vLLM beyond the public interface is listed in :data:`VLLM_NAMES`, and a missing name
stops the engine at its start.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from deployments.clock import now_ns
from deployments.knobs import EngineGauges, EngineShared, StepRecord, depth_within, sizes_within
from deployments.orphan import end_with
from policies.speculation import DepthExplorer
from policies.types import Knobs

CONFIG_KEY = "tidegate"
PATH_KEY = "shared"
PARENT_KEY = "replica_pid"
STEP_TOKENS_MIN = 16
STEPS_UNDER_WAY_MAX = 64

VLLM_NAMES: dict[str, tuple[str, ...]] = {
    "Scheduler": (
        "vllm_config", "scheduler_config", "cache_config", "kv_cache_manager", "requests", "running", "num_spec_tokens",
        "max_num_running_reqs", "max_num_scheduled_tokens", "block_size", "need_mamba_block_aligned_split", "schedule",
        "update_from_output", "add_request", "finish_requests", "update_draft_token_ids", "get_request_counts",
        "get_kv_cache_usage", "get_num_unfinished_requests",
    ),
    "KVCacheManager": ("prefix_cache_lookup_enabled",),
    "Request": (
        "request_id", "num_tokens", "num_prompt_tokens", "num_computed_tokens", "num_preemptions", "is_prefill_chunk",
    ),
    "SchedulerOutput": (
        "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "preempted_req_ids",
        "scheduled_spec_decode_tokens", "num_spec_tokens_to_schedule",
    ),
    "NewRequestData": ("req_id", "num_computed_tokens"),
    "CachedRequestData": ("resumed_req_ids",),
    "EngineCoreOutputs": ("outputs",),
    "EngineCoreOutput": ("request_id", "new_token_ids", "finish_reason"),
    "DraftTokenIds": ("draft_token_ids",),
}  # fmt: skip
"""Names of vLLM 0.29 that this module reads or sets, by class."""

logger = logging.getLogger("vllm.tidegate")
P = ParamSpec("P")


class VllmChangedError(RuntimeError):
    """The installed vLLM lacks a name that this module needs."""


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A step that is scheduled and not finished."""

    output: Any
    begin_ns: int
    contiguous: bool
    running: int
    prefill_tokens: int
    decode_seqs: int
    kv_tokens: int
    preempted: int
    depth: int
    drafts: Mapping[str, Sequence[int]]


def _guarded(hook: Callable[P, None]) -> Callable[P, None]:
    """Make a hook of :class:`LiveStep` unable to raise."""

    @functools.wraps(hook)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        live: Any = args[0]
        if live.broken:
            return
        try:
            hook(*args, **kwargs)
        except Exception:
            logger.exception("live knobs and step records are off; the engine goes on with its start-up values")
            live.switch_off()

    return call


class LiveStep:
    """Knobs and records of one scheduler."""

    def __init__(self, scheduler: Any, shared: EngineShared) -> None:
        """``scheduler`` is complete; raises :class:`VllmChangedError` when it lacks a name this class needs."""
        missing = [n for n in VLLM_NAMES["Scheduler"] if not hasattr(scheduler, n)]
        if missing:
            raise VllmChangedError(f"vLLM's {type(scheduler).__name__} has no {', '.join(missing)}: use vLLM 0.29")
        self.broken = False
        self._scheduler = scheduler
        self._shared = shared
        self._seqs_hard: int = scheduler.max_num_running_reqs
        self._tokens_hard: int = scheduler.max_num_scheduled_tokens
        self._drafts_max: int = scheduler.num_spec_tokens
        aligned = scheduler.block_size if scheduler.need_mamba_block_aligned_split else 0
        floor = max(STEP_TOKENS_MIN, 1 + self._drafts_max, aligned)
        self._tokens_floor = self._tokens_hard if _needs_whole_budget(scheduler) else floor
        self._depth: int | None = self._drafts_max or None
        self._movable = self._drafts_max > 0 and not scheduler.scheduler_config.async_scheduling
        self._explorer = DepthExplorer(self._drafts_max)
        self._next_depth = self._cut_depth = self._drafts_max
        """Depth of the drafts the step now composed will make, and of those it verifies."""
        self._kv_tokens_max = _kv_tokens_max(scheduler)
        self._compile_ms = _compile_ms(scheduler)
        self._under_way: deque[_UnderWay] = deque(maxlen=STEPS_UNDER_WAY_MAX)
        self._prefilling: set[str] = set()
        self._not_admitted: dict[str, int] = {}
        self._begin_ns = 0
        self._seq = 0
        self._progress_ns = 0
        self._work_since_ns = 0
        self._paused = True
        self._finished = self._aborted = self._preemptions = self._queried = self._hit = 0
        self._publish()

    def switch_off(self) -> None:
        """Go back to the start-up values for good, and say nothing more: no work, so no verdict on progress either."""
        self.broken = True
        self._scheduler.max_num_running_reqs = self._seqs_hard
        self._scheduler.max_num_scheduled_tokens = self._tokens_hard
        limits = {"running_seqs_hard": self._seqs_hard, "step_tokens_hard": self._tokens_hard}
        self._shared.write_gauges(EngineGauges(kv_tokens_max=self._kv_tokens_max, **limits))

    # --- hooks, in the order of a request's life ----------------------------------------------------------------------

    @_guarded
    def added(self, request: Any) -> None:
        """A request has come to the scheduler."""
        self._not_admitted[request.request_id] = request.num_tokens
        self._publish()

    @_guarded
    def before_schedule(self) -> None:
        """Set the knobs for the step that is about to be composed."""
        scheduler, knobs = self._scheduler, self._shared.read_knobs()
        self._begin_ns = now_ns()
        running = len(scheduler.running)
        floor = max(self._tokens_floor, running * (1 + self._cut_depth))
        seqs, tokens = sizes_within(knobs, self._seqs_hard, self._tokens_hard, floor, running)
        scheduler.max_num_running_reqs, scheduler.max_num_scheduled_tokens = seqs, tokens
        if self._movable:
            self._set_depth(knobs, running)

    @_guarded
    def after_schedule(self, output: Any) -> None:
        """Note the composition of the step."""
        scheduled = output.num_scheduled_tokens
        self._note_admissions(output)
        preempted = self._note_preemptions(output.preempted_req_ids or ())
        prefill_tokens, prefill_seqs = self._prefill_part(scheduled)
        if scheduled:
            step = _UnderWay(
                output,
                self._begin_ns,
                not self._paused,
                len(scheduled),
                prefill_tokens,
                len(scheduled) - prefill_seqs,
                self._kv_tokens(),
                preempted,
                self._cut_depth,
                output.scheduled_spec_decode_tokens,
            )
            self._under_way.append(step)
        if self._movable:
            output.num_spec_tokens_to_schedule = min(output.num_spec_tokens_to_schedule, self._next_depth)
        self._paused = not scheduled
        self._publish()

    @_guarded
    def after_update(self, output: Any, results: Any, ready_ns: int) -> None:
        """Record the step whose output came at ``ready_ns``."""
        tokens = accepted = 0
        drafts = output.scheduled_spec_decode_tokens
        for per_client in results.values():
            for result in per_client.outputs:
                new = len(result.new_token_ids)
                tokens += new
                self._finished += result.finish_reason is not None
                if new > 1 and result.request_id in drafts:
                    accepted += new - 1
        step = self._take(output)
        if step is not None:
            self._record(step, ready_ns, tokens, accepted)
        if not self._scheduler.get_num_unfinished_requests():
            self._paused = True
            self._publish()  # otherwise the next after_schedule does, within microseconds

    @_guarded
    def ended_early(self, requests: Iterable[Any], status: Any) -> None:
        """Requests were ended from outside: a client left, or their work cannot be done."""
        for request in requests:
            self._aborted += status == RequestStatus.FINISHED_ABORTED
            self._not_admitted.pop(request.request_id, None)
        if not self._scheduler.get_num_unfinished_requests():
            self._paused = True
        self._publish()

    @_guarded
    def cut_drafts(self, drafts: Any) -> None:
        """Keep only as many draft tokens as the depth allows."""
        if self._movable:
            self._cut_depth = self._next_depth
            if self._next_depth < self._drafts_max:
                drafts.draft_token_ids = [ids[: self._next_depth] for ids in drafts.draft_token_ids]

    # --- bookkeeping --------------------------------------------------------------------------------------------------

    def _set_depth(self, asked: Knobs, running: int) -> None:
        """The depth asked for, and the one at which the next step's drafts are made."""
        self._depth = depth_within(asked, self._drafts_max)
        self._next_depth = self._explorer.choose(self._depth, self._shared.bounds, running)

    def _note_admissions(self, output: Any) -> None:
        requests = self._scheduler.requests
        for new in output.scheduled_new_reqs:
            self._not_admitted.pop(new.req_id, None)
            self._prefilling.add(new.req_id)
            request = requests[new.req_id]
            if request.num_preemptions == 0 and self._scheduler.kv_cache_manager.prefix_cache_lookup_enabled(request):
                self._queried += request.num_prompt_tokens
                self._hit += min(new.num_computed_tokens, request.num_prompt_tokens)
        for req_id in output.scheduled_cached_reqs.resumed_req_ids:
            self._not_admitted.pop(req_id, None)
            self._prefilling.add(req_id)

    def _note_preemptions(self, req_ids: Iterable[str]) -> int:
        count = 0
        for req_id in req_ids:
            count += 1
            self._prefilling.discard(req_id)
            if request := self._scheduler.requests.get(req_id):
                self._not_admitted[req_id] = request.num_tokens
        self._preemptions += count
        return count

    def _prefill_part(self, scheduled: dict[str, int]) -> tuple[int, int]:
        """Prompt tokens and sequences still in their prompt among ``scheduled``; forgets those that got through."""
        tokens = seqs = 0
        for req_id in tuple(self._prefilling):
            request = self._scheduler.requests.get(req_id)
            if n := scheduled.get(req_id, 0):
                tokens += n
                seqs += 1
            if request is None or not request.is_prefill_chunk:
                self._prefilling.discard(req_id)
        return tokens, seqs

    def _take(self, output: Any) -> _UnderWay | None:
        """The step that belongs to ``output``; earlier ones that never came back are dropped."""
        if not output.num_scheduled_tokens:
            return None
        while self._under_way:
            step = self._under_way.popleft()
            if step.output is output:
                return step
        return None

    def _record(self, step: _UnderWay, ready_ns: int, tokens: int, accepted: int) -> None:
        follows = step.contiguous or self._progress_ns > step.begin_ns
        start_ns = self._progress_ns if follows and self._progress_ns else step.begin_ns
        self._progress_ns = ready_ns
        self._seq += 1
        self._shared.append_step(
            StepRecord(
                self._seq,
                start_ns,
                (ready_ns - start_ns) // 1000,
                step.running,
                step.prefill_tokens,
                step.decode_seqs,
                step.kv_tokens,
                step.preempted,
                tokens,
                step.depth,
                sum(map(len, step.drafts.values())),
                accepted,
            )
        )
        if self._movable and not step.prefill_tokens:
            self._explorer.ran(step.depth, step.decode_seqs, tokens, (ready_ns - start_ns) / 1e6)

    def _kv_tokens(self) -> int:
        tokens: int = round(self._scheduler.get_kv_cache_usage() * self._kv_tokens_max)
        return tokens

    def _backlog(self) -> int:
        """Tokens still to be computed before first tokens come; what the prefix cache will spare is not known yet."""
        requests, left = self._scheduler.requests, sum(self._not_admitted.values())
        for req_id in self._prefilling:
            if request := requests.get(req_id):
                left += max(0, request.num_tokens - request.num_computed_tokens)
        return left

    def _publish(self) -> None:
        """Write the gauges; keeps the time since when there is work."""
        scheduler = self._scheduler
        running, waiting = scheduler.get_request_counts()
        if not scheduler.get_num_unfinished_requests():
            self._work_since_ns = 0
        elif not self._work_since_ns:
            self._work_since_ns = now_ns()
        self._shared.write_gauges(
            EngineGauges(
                running,
                waiting,
                self._kv_tokens(),
                self._kv_tokens_max,
                self._backlog(),
                self._seqs_hard,
                self._tokens_hard,
                scheduler.max_num_running_reqs,
                scheduler.max_num_scheduled_tokens,
                self._depth,
                self._drafts_max if self._movable else 0,
                self._finished,
                self._aborted,
                self._preemptions,
                self._queried,
                self._hit,
                self._progress_ns,
                self._work_since_ns,
                self._tokens_floor,
                self._compile_ms,
            )
        )


def _needs_whole_budget(scheduler: Any) -> bool:
    """True when a prompt, or a part of one that cannot be split, must fit into one step: the budget stays as it is."""
    config = scheduler.scheduler_config
    return not config.enable_chunked_prefill or config.disable_chunked_mm_input


def _kv_tokens_max(scheduler: Any) -> int:
    """Tokens the KV cache holds, as vLLM states it."""
    cache = scheduler.cache_config
    stated = getattr(cache, "kv_cache_size_tokens", None)
    return int(cache.num_gpu_blocks * scheduler.block_size if stated is None else stated)


def _compile_ms(scheduler: Any) -> int:
    """What the engine spent on compiling in its start, as vLLM states it; 0 where it says nothing."""
    config = getattr(scheduler.vllm_config, "compilation_config", None)
    seconds = [getattr(config, name, 0.0) for name in ("compilation_time", "encoder_compilation_time")]
    return round(sum(seconds) * 1_000)


def _live(base: Any) -> Any:
    """The live form of one of vLLM's schedulers."""

    class Live(base):
        """A vLLM scheduler that tells its :class:`LiveStep` what happens."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            config = self.vllm_config.additional_config[CONFIG_KEY]
            self.live = LiveStep(self, EngineShared.open(config[PATH_KEY]))
            end_with(config[PARENT_KEY])

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            self.live.before_schedule()
            output = super().schedule(*args, **kwargs)
            self.live.after_schedule(output)
            return output

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            ready_ns = now_ns()
            results = super().update_from_output(scheduler_output, model_runner_output)
            self.live.after_update(scheduler_output, results, ready_ns)
            return results

        def add_request(self, request: Any) -> None:
            super().add_request(request)
            self.live.added(request)

        def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
            ended = super().finish_requests(request_ids, finished_status)
            self.live.ended_early(ended, finished_status)
            return ended

        def update_draft_token_ids(self, draft_token_ids: Any) -> None:
            self.live.cut_drafts(draft_token_ids)
            super().update_draft_token_ids(draft_token_ids)

    Live.__name__ = Live.__qualname__ = f"Live{base.__name__}"
    return Live


LiveScheduler = _live(Scheduler)
LiveAsyncScheduler = _live(AsyncScheduler)


def live_scheduler(*args: Any, vllm_config: Any, **kwargs: Any) -> Any:
    """What ``scheduler_cls`` names: the live form of the scheduler that fits vLLM's resolved ``async_scheduling``."""
    cls = LiveAsyncScheduler if vllm_config.scheduler_config.async_scheduling else LiveScheduler
    return cls(*args, vllm_config=vllm_config, **kwargs)
