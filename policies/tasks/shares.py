"""What the gateways tell each other of tasks, kept by the controller, so that a budget is one for all of them.

    gateway --tasks it counted something of--> ledger --tasks that changed since it last asked--> gateway

Gateways send all they ever counted of a task, so a lost message costs nothing and a repeated one changes nothing. The
first gateway that names a task owns it and alone counts it when it is over. What a gateway counted stays when it is
gone. A controller that is new asks for all again by its new epoch, and for :data:`GRACE_S` believes those that say they
own a task but names no other owner. Between two exchanges each gateway knows of the others what it knew at the last
one: a budget may be overrun by what they let in meanwhile.

Bounded: tasks by ``tasks_max`` (see :mod:`policies.tasks.recency`) and by ``idle_s_max`` without a change, gateways of
one task by :data:`GATEWAYS_MAX`, an answer by :data:`ANSWER_TASKS_MAX`. What this must not do: decide whether a call
may go on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from policies.config import TasksConfig
from policies.tasks.recency import Recency
from policies.tasks.values import NO_LIMITS, TaskCounts, TaskLimits, TaskOutcome, TaskShares, TaskUse

GATEWAYS_MAX = 64
"""Gateways whose counts of one task are kept apart; the one silent for longest is added to those that are gone."""
ANSWER_TASKS_MAX = 1_000
GRACE_S = 10.0
"""Owners of tasks have told themselves to a new ledger by then."""


class _Entry:
    """One task."""

    __slots__ = ("by_gateway", "changed_ns", "gone", "last_end_ns", "limits", "outcome", "owner", "seq", "started_ns")

    def __init__(self, now_ns: int) -> None:
        self.owner: str | None = None
        self.by_gateway: OrderedDict[str, TaskCounts] = OrderedDict()
        self.gone = TaskCounts()
        self.started_ns = self.changed_ns = now_ns
        self.last_end_ns = 0
        self.limits: TaskLimits = NO_LIMITS
        self.outcome: TaskOutcome | None = None
        self.seq = 0

    def take(self, gateway_id: str, use: TaskUse, may_own: bool, now_ns: int) -> None:
        if use.owner or (may_own and self.owner is None and use.owner is None):
            self.owner = gateway_id
        self.by_gateway[gateway_id] = use.counts
        self.by_gateway.move_to_end(gateway_id)
        if len(self.by_gateway) > GATEWAYS_MAX:
            self.gone = self.gone.plus(self.by_gateway.popitem(last=False)[1])
        self.started_ns = min(self.started_ns, now_ns - round(use.age_ms * 1e6))
        self.last_end_ns = max(self.last_end_ns, now_ns - round(use.idle_ms * 1e6))
        self.limits = self.limits.narrowed(use.limits)
        self.outcome = self.outcome or use.outcome
        self.changed_ns = now_ns

    def seen_by(self, gateway_id: str, key: tuple[str, str], now_ns: int) -> TaskUse:
        """What ``gateway_id`` does not know by itself."""
        counts = self.gone
        for other, theirs in self.by_gateway.items():
            if other != gateway_id:
                counts = counts.plus(theirs)
        return TaskUse(
            tenant=key[0],
            task=key[1],
            counts=counts,
            age_ms=(now_ns - self.started_ns) / 1e6,
            idle_ms=(now_ns - self.last_end_ns) / 1e6,
            limits=self.limits,
            outcome=self.outcome,
            owner=None if self.owner is None else self.owner == gateway_id,
        )


class TaskLedger:
    """One for each life of the controller, named by ``epoch``."""

    def __init__(self, config: TasksConfig, epoch: str, now_ns: int) -> None:
        self._config = config
        self._epoch = epoch
        self._started_ns = now_ns
        self._entries: Recency[_Entry] = Recency()
        """By when they changed, and so by ``seq``."""
        self._seq = 0

    def __len__(self) -> int:
        """Tasks remembered."""
        return len(self._entries)

    def exchange(self, gateway_id: str, epoch: str, seq: int, uses: Iterable[TaskUse], now_ns: int) -> TaskShares:
        """Take what a gateway counted; answer with what changed since ``seq``, what it just sent included.

        ``epoch``, ``seq``: of the answer it had last, empty and 0 before the first.
        """
        for use in uses:
            self._take(gateway_id, use, now_ns)
        self._forget(now_ns)
        since = seq if epoch == self._epoch else 0
        found: list[tuple[tuple[str, str], _Entry]] = []
        for key, entry in self._entries.newest_first():
            if entry.seq <= since:
                break
            found.append((key, entry))
        found.reverse()
        page = found[:ANSWER_TASKS_MAX]
        seen = tuple(entry.seen_by(gateway_id, key, now_ns) for key, entry in page)
        return TaskShares(self._epoch, page[-1][1].seq if page else since, seen, len(found) > len(page))

    def _take(self, gateway_id: str, use: TaskUse, now_ns: int) -> None:
        key = use.tenant, use.task
        entry = self._entries.get(key)
        if entry is None:
            spare = self._entries.spare(use.tenant) if len(self._entries) >= self._config.tasks_max else None
            if spare is not None:
                self._entries.pop(spare)
            entry = _Entry(now_ns)
        self._seq += 1
        entry.seq = self._seq
        entry.take(gateway_id, use, now_ns - self._started_ns >= GRACE_S * 1e9, now_ns)
        self._entries.use(key, entry)

    def _forget(self, now_ns: int) -> None:
        before_ns = now_ns - round(self._config.idle_s_max * 1e9)
        while (oldest := self._entries.oldest()) is not None and oldest[1].changed_ns <= before_ns:
            self._entries.pop(oldest[0])
