"""What a gateway remembers of tasks, and whether a call of one may go on.

A task is named by its client, within its tenant. It begins with its first call and ends when its outcome is told
(success or failure), or when it is forgotten: after ``idle_s_max`` without a call, or for room. A call is refused::

    outcome told already                                    -> task_ended
    now >= arrival of its first call + deadline             -> task_deadline
    calls + 1 > calls_max                                   -> task_calls
    tokens used + tokens its open calls and this one are
    expected to use > tokens_max                            -> task_tokens

Expected tokens are held while a call is open and replaced by the true ones at its end, so calls side by side do not
overrun a budget together; what calls use above what was expected they overrun it by. A call that no engine saw (refused
elsewhere) is taken back and costs nothing. Of the limits that calls of one task name, the smallest holds: a task that
runs away cannot raise its own budget. A task that names none has the configured one.

Each task is counted once, when it is over and no call of it is open: by ending, with its calls, tokens, cost and time
from its first call to the end of its last one. A task stopped at a limit whose outcome nobody tells counts as stopped.
With several gateways counts are exchanged (see :mod:`policies.tasks.shares`), limits hold for the sum, and the one
gateway that owns the task counts it, with what it knows of the others then.

When there is no room an idle task goes (see :mod:`policies.tasks.recency`). A task with an open call stays whatever
happens, so there are at most ``tasks_max``, or as many as calls are open where those are more.

It must not decide order or replica: the fair queue knows by itself what each task was served and since when, and a
task's prefix is warm where the prefix index says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace

from policies.admission.refusal import QUOTA, Refusal
from policies.config import TasksConfig
from policies.tasks.recency import Recency
from policies.tasks.values import (
    NO_LIMITS,
    TaskCounts,
    TaskEnd,
    TaskEnding,
    TaskLimits,
    TaskOutcome,
    TaskTotals,
    TaskUse,
    TaskView,
    least,
)
from policies.types import ReplicaId

ENDED_MAX = 4_096
"""Endings kept for :meth:`TaskBook.take_ended`; older ones are dropped. The totals hold them all."""

INVALID = "invalid_request_error"
"""Type of errors a client can mend only by asking for something else."""


class _Task:
    """One task."""

    __slots__ = (
        "counted", "elsewhere", "idle_since_ns", "key", "last_end_ns", "limits", "outcome", "own", "owner",
        "started_ns", "stopped",
    )  # fmt: skip

    def __init__(self, key: tuple[str, str], now_ns: int) -> None:
        self.key = key
        self.started_ns = self.idle_since_ns = self.last_end_ns = now_ns
        self.own = TaskCounts()
        self.elsewhere = TaskCounts()
        self.limits = NO_LIMITS
        self.outcome: TaskOutcome | None = None
        self.owner: bool | None = None
        """Whether this gateway counts it; ``None``: not known yet."""
        self.stopped = self.counted = False

    @property
    def e2e_ms(self) -> float:
        return (self.last_end_ns - self.started_ns) / 1e6


class TaskBook:
    """The tasks one gateway knows. All calls need the same monotonic clock; tenant and task are already cleaned."""

    def __init__(self, config: TasksConfig, gateways: int = 1) -> None:
        """``gateways``: of the application; counts are kept for exchange when there are several."""
        self._config = config
        self.shared = gateways > 1
        """There are other gateways."""
        self._tasks: dict[tuple[str, str], _Task] = {}
        self._idle: Recency[_Task] = Recency()
        """Those without an open call, by when it ended."""
        self._open_calls = 0
        self._open_tasks = 0
        self._changed: dict[tuple[str, str], None] = {}
        """Tasks with counts the others do not know."""
        self._ended: deque[TaskEnd] = deque(maxlen=ENDED_MAX)
        self._totals = {ending: TaskTotals() for ending in TaskEnding}

    def __len__(self) -> int:
        """Tasks remembered, those that are over included."""
        return len(self._tasks)

    # --- one call -----------------------------------------------------------------------------------------------------

    def call(self, tenant: str, task: str, limits: TaskLimits, tokens_expected: int, now_ns: int) -> Refusal | None:
        """A call of ``task`` asks to begin. ``None``: it may, is counted, and :meth:`ended` must follow.

        ``tokens_expected``: prompt plus output it may be expected to use. An empty ``task`` is none: nothing happens.
        """
        if not task:
            return None
        self.expire(now_ns)
        record = self._tasks.get((tenant, task)) or self._begin(tenant, task, now_ns)
        if limits is not NO_LIMITS:
            record.limits = record.limits.narrowed(limits)
        refusal = self._refusal(record, tokens_expected, now_ns)
        own = record.own
        if refusal is None:
            self._idle.pop(record.key)
            own.calls += 1
            own.calls_open += 1
            own.tokens_held += tokens_expected
            self._open_calls += 1
            self._mark(record)
            return None
        record.stopped = record.stopped or record.outcome is None
        if not own.calls_open:
            self._rest(record, now_ns)
        return refusal

    def ended(
        self,
        tenant: str,
        task: str,
        *,
        tokens_expected: int,
        tokens: int,
        usd: float,
        replica_id: ReplicaId | None,
        succeeded: bool,
        e2e_ms: float,
        now_ns: int,
        outcome: TaskOutcome | None = None,
    ) -> None:
        """A call that :meth:`call` let in is over; once for each.

        ``replica_id``: who served it last; ``None``: no engine saw it, so the call is taken back. ``outcome``: what
        the call itself said of the task; a success counts only when the call succeeded.
        """
        record = self._tasks.get((tenant, task))
        if record is None or record.own.calls_open == 0:
            return
        own = record.own
        self._open_calls -= 1
        own.calls_open -= 1
        own.tokens_held -= tokens_expected
        own.tokens += tokens
        own.usd += usd
        if replica_id is None:
            own.calls -= 1
        else:
            own.busy_ms += e2e_ms
            record.last_end_ns = now_ns
            own.succeeded += succeeded
            own.failed += not succeeded
        if record.outcome is None and outcome is not None and (succeeded or outcome is TaskOutcome.FAILURE):
            self._decide(record, outcome)
        self._mark(record)
        if not own.calls_open:
            self._rest(record, now_ns)
        if record.outcome is not None:
            self._count(record)
        if len(self._tasks) > self._config.tasks_max:
            self._make_room(tenant)

    def outcome(self, tenant: str, task: str, outcome: TaskOutcome, now_ns: int) -> Refusal | None:
        """The client tells how ``task`` ended. ``None``: noted, or it was known as that already."""
        self.expire(now_ns)
        record = self._tasks.get((tenant, task))
        if record is None:
            return Refusal("task_not_found", "this task had no call here, or none for too long", INVALID, 404)
        known = record.outcome
        if known is not None:
            return None if known is outcome else _over(known)
        self._decide(record, outcome)
        self._mark(record)
        self._count(record)
        return None

    # --- what is known ------------------------------------------------------------------------------------------------

    def get(self, tenant: str, task: str, now_ns: int) -> TaskView | None:
        """One task as it is now; ``None``: not known, or forgotten."""
        self.expire(now_ns)
        record = self._tasks.get((tenant, task))
        if record is None:
            return None
        return TaskView(
            task=task,
            outcome=record.outcome,
            stopped=record.stopped,
            counts=record.own.plus(record.elsewhere),
            age_ms=(now_ns - record.started_ns) / 1e6,
            e2e_ms=record.e2e_ms,
            limits=TaskLimits(self._calls_max(record), self._tokens_max(record), record.limits.deadline_s),
        )

    def deadline_ns(self, tenant: str, task: str, limits: TaskLimits, now_ns: int) -> int | None:
        """When the whole task must be done, as a call that arrives now with ``limits`` would find it."""
        record = self._tasks.get((tenant, task))
        started_ns, known_s = (now_ns, None) if record is None else (record.started_ns, record.limits.deadline_s)
        deadline_s = least(known_s, limits.deadline_s)
        return None if deadline_s is None else started_ns + round(deadline_s * 1e9)

    @property
    def open_tasks(self) -> int:
        """Tasks whose outcome is not known yet."""
        return self._open_tasks

    @property
    def open_calls(self) -> int:
        """Calls let in that have not ended."""
        return self._open_calls

    @property
    def totals(self) -> Mapping[TaskEnding, TaskTotals]:
        """Sums over all tasks that are over, by ending."""
        return self._totals

    def successes_per_usd(self) -> float | None:
        """Successful tasks for each dollar all ended tasks cost; ``None`` while they cost nothing."""
        usd = sum(total.usd for total in self._totals.values())
        return self._totals[TaskEnding.SUCCESS].tasks / usd if usd > 0 else None

    def take_ended(self) -> list[TaskEnd]:
        """Tasks that ended since the last call, the last :data:`ENDED_MAX` of them."""
        taken = list(self._ended)
        self._ended.clear()
        return taken

    def expire(self, now_ns: int) -> None:
        """Forget tasks without a call for too long."""
        before_ns = now_ns - round(self._config.idle_s_max * 1e9)
        while (oldest := self._idle.oldest()) is not None and oldest[1].idle_since_ns <= before_ns:
            self._forget(oldest[1])

    # --- between gateways ---------------------------------------------------------------------------------------------

    def changes(self, uses_max: int, now_ns: int) -> list[TaskUse]:
        """At most ``uses_max`` tasks with counts the other gateways do not know; they count as told."""
        uses: list[TaskUse] = []
        while self._changed and len(uses) < uses_max:
            key = next(iter(self._changed))
            del self._changed[key]
            record = self._tasks.get(key)
            if record is not None:
                uses.append(
                    TaskUse(
                        tenant=key[0],
                        task=key[1],
                        counts=replace(record.own),
                        age_ms=(now_ns - record.started_ns) / 1e6,
                        idle_ms=(now_ns - record.last_end_ns) / 1e6,
                        limits=record.limits,
                        outcome=record.outcome,
                        owner=record.owner,
                    )
                )
        return uses

    def untold(self, uses: Iterable[TaskUse]) -> None:
        """What :meth:`changes` gave did not arrive."""
        for use in uses:
            self._changed[use.tenant, use.task] = None

    def tell_all(self) -> None:
        """The controller is a new one: tell it everything once more."""
        for key, record in self._tasks.items():
            if record.own.calls or record.owner or record.outcome is not None:
                self._changed[key] = None

    def learn(self, uses: Iterable[TaskUse], now_ns: int) -> None:
        """Take what the other gateways counted."""
        for use in uses:
            record = self._tasks.get((use.tenant, use.task)) or self._begin(use.tenant, use.task, now_ns)
            record.elsewhere = use.counts
            if use.owner is not None:
                record.owner = use.owner
            elif record.owner is None and record.own.calls:
                self._mark(record)
            record.started_ns = min(record.started_ns, now_ns - round(use.age_ms * 1e6))
            record.last_end_ns = max(record.last_end_ns, now_ns - round(use.idle_ms * 1e6))
            record.limits = record.limits.narrowed(use.limits)
            if record.outcome is None and use.outcome is not None:
                self._decide(record, use.outcome)
            if not record.own.calls_open:
                self._rest(record, now_ns)
            if record.outcome is not None:
                self._count(record)

    def _mark(self, record: _Task) -> None:
        if self.shared:
            self._changed[record.key] = None

    # --- inside -------------------------------------------------------------------------------------------------------

    def _refusal(self, record: _Task, tokens_expected: int, now_ns: int) -> Refusal | None:
        if record.outcome is not None:
            return _over(record.outcome)
        deadline_s = record.limits.deadline_s
        if deadline_s is not None and now_ns >= record.started_ns + round(deadline_s * 1e9):
            return _stop("task_deadline", f"its time of {deadline_s:g} s is over")
        own, elsewhere, calls_max = record.own, record.elsewhere, self._calls_max(record)
        if calls_max is not None and own.calls + elsewhere.calls >= calls_max:
            return _stop("task_calls", f"it has made the {calls_max} calls it may make")
        tokens_max = self._tokens_max(record)
        if tokens_max is None:
            return None
        used, held = own.tokens + elsewhere.tokens, own.tokens_held + elsewhere.tokens_held
        if used + held + tokens_expected <= tokens_max:
            return None
        open_calls = f" and {held} held for its open calls" if held else ""
        why = f"{used} of its {tokens_max} tokens are used{open_calls}, this call needs about {tokens_expected}"
        return _stop("task_tokens", why)

    def _calls_max(self, record: _Task) -> int | None:
        named = record.limits.calls_max
        return self._config.calls_max if named is None else named

    def _tokens_max(self, record: _Task) -> int | None:
        named = record.limits.tokens_max
        return self._config.tokens_max if named is None else named

    def _begin(self, tenant: str, task: str, now_ns: int) -> _Task:
        if len(self._tasks) >= self._config.tasks_max:
            self._make_room(tenant)
        record = self._tasks[tenant, task] = _Task((tenant, task), now_ns)
        self._open_tasks += 1
        return record

    def _decide(self, record: _Task, outcome: TaskOutcome) -> None:
        """The outcome of a task that had none."""
        record.outcome = outcome
        self._open_tasks -= 1

    def _make_room(self, tenant: str) -> None:
        """Forget one task for one of ``tenant``, where one is idle."""
        spare = self._idle.spare(tenant)
        if spare is not None:
            self._forget(self._tasks[spare])

    def _rest(self, record: _Task, now_ns: int) -> None:
        """No call of it is open from now on."""
        record.idle_since_ns = now_ns
        self._idle.use(record.key, record)

    def _forget(self, record: _Task) -> None:
        self._idle.pop(record.key)
        del self._tasks[record.key]
        self._open_tasks -= record.outcome is None
        self._changed.pop(record.key, None)
        if record.owner is not False:
            record.owner = True
        self._count(record)

    def _count(self, record: _Task) -> None:
        if record.counted or record.own.calls_open or (self.shared and not record.owner):
            return
        record.counted = True
        if record.outcome is not None:
            ending = TaskEnding(record.outcome.value)
        else:
            ending = TaskEnding.STOPPED if record.stopped else TaskEnding.UNKNOWN
        counts = record.own.plus(record.elsewhere)
        total = self._totals[ending]
        total.tasks += 1
        total.calls += counts.calls
        total.tokens += counts.tokens
        total.usd += counts.usd
        total.e2e_ms += record.e2e_ms
        self._ended.append(TaskEnd(record.key[0], ending, counts.calls, counts.tokens, counts.usd, record.e2e_ms))


def _stop(code: str, why: str) -> Refusal:
    return Refusal(code, f"the task is stopped: {why}", QUOTA, 429, None, should_retry=False)


def _over(outcome: TaskOutcome) -> Refusal:
    return Refusal("task_ended", f"the task is over: its outcome is {outcome}", INVALID, 409, None, should_retry=False)
