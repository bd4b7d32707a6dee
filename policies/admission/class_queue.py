"""Decides which tenant of one class is next: the one that was served least for its weight (virtual token counters).

    counter += tokens / weight                      at dispatch; corrected when the true figures are known
    next     = the tenant that waits with the least counter; at equal counters one that just came in
    comes in = counter raised to the least counter of those that wait: who was away saves nothing up
    nobody waits = all counters forgotten: what nobody else wanted counts against nobody

Source: Sheng et al., Fairness in Serving Large Language Models (OSDI 2024), with weights. A correction never takes a
counter below its value when the tenant came in, so it cannot give back what was counted in an earlier backlog.

What this must not do: know other classes, or order requests inside a tenant.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection
from typing import TypeAlias

from policies.admission.tenant_queue import Spot, TaskTag, TenantQueue
from policies.config import PolicyConfig

IDLE_TENANTS_MAX = 1_000
"""Tenants without waiting requests that one class remembers."""

Key: TypeAlias = tuple[float, int, int]


class ClassQueue:
    """See the module."""

    __slots__ = ("_active", "_clock_max", "_config", "_epoch", "_idle", "_keys", "_order", "_queues", "credit",
                 "requests", "tokens")  # fmt: skip

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self._active: dict[str, TenantQueue] = {}
        self._idle: OrderedDict[str, TenantQueue] = OrderedDict()
        self._keys: list[Key] = []
        self._queues: list[TenantQueue] = []
        self._order = 0
        self._epoch = 0
        self._clock_max = 0.0
        self.requests = 0
        """Requests that wait."""
        self.tokens = 0
        """Their tokens."""
        self.credit = 0.0
        """Tokens this class may be served ahead of more important ones."""

    @property
    def tenants(self) -> int:
        """Tenants remembered."""
        return len(self._active) + len(self._idle)

    def add(
        self, tenant: str, request_id: str, tokens: int, deadline_ns: int | None, order: int, task: TaskTag | None
    ) -> Spot:
        """Let a request wait."""
        queue = self._active.get(tenant)
        if queue is None:
            queue = self._idle.pop(tenant) if tenant in self._idle else self._new(tenant)
            self._active[tenant] = queue
            self._come_in(queue)
        self.requests += 1
        self.tokens += tokens
        return queue.add(request_id, tokens, deadline_ns, order, task)

    def remove(self, tenant: str, spot: Spot) -> None:
        """Forget a request that is not served."""
        queue = self._active[tenant]
        queue.remove(spot)
        self._left(queue, spot)

    def served(self, tenant: str, spot: Spot) -> None:
        """A request's turn came: it waits no longer, its tenant is charged."""
        queue = self._active[tenant]
        queue.served(spot)
        self._count(queue, spot.tokens)
        self._left(queue, spot)

    def charge(self, tenant: str, task: TaskTag | None, tokens: int) -> None:
        """Count work that did not wait here, or correct what was counted."""
        queue = self._active.get(tenant) or self._idle.get(tenant)
        if queue is None:
            if tokens <= 0:
                return
            queue = self._new(tenant)
        queue.charge(task, tokens)
        self._clock_max = max(self._clock_max, queue.clock)
        if self._active:
            self._count(queue, tokens)
        if tenant not in self._active:
            self._remember(queue)

    def first(self, skip: Collection[str] = ()) -> str | None:
        """Id of the request that is next, but for those of the tenants in ``skip``."""
        if not skip:
            return self._queues[0].first() if self._queues else None
        return next((queue.first() for queue in self._queues if queue.name not in skip), None)

    def tokens_ahead(self, tenant: str, task: TaskTag | None, tokens: int) -> int:
        """Tokens of this class that are served before such a newcomer, if nobody else comes."""
        queue = self._active.get(tenant)
        own, weight = 0, self._config.tenant(tenant).weight
        if queue is not None:
            own, counter = queue.tokens_ahead(task, tokens), queue.counter
        else:
            counter = self._counter_in(self._idle.get(tenant))
        counter += own / weight
        return own + sum([q.tokens_before(counter) for q in self._queues if q is not queue and q.counter <= counter])

    # --- places among tenants -----------------------------------------------------------------------------------------

    def _new(self, tenant: str) -> TenantQueue:
        weight = self._config.tenant(tenant).weight
        return TenantQueue(tenant, weight, self._clock_max, self._config.tasks.credit_tokens_max)

    def _least(self) -> float:
        return self._keys[0][0] if self._keys else 0.0

    def _counter_in(self, queue: TenantQueue | None) -> float:
        """Counter with which a tenant comes in."""
        if queue is None or queue.epoch != self._epoch:
            return self._least()
        return max(queue.counter, self._least())

    def _come_in(self, queue: TenantQueue) -> None:
        counter = self._counter_in(queue)
        raised = queue.epoch != self._epoch or counter > queue.counter
        if raised:
            queue.counter = queue.floor = counter
            queue.epoch = self._epoch
        self._insert(queue, newcomer=raised)

    def _count(self, queue: TenantQueue, tokens: int) -> None:
        if queue.epoch != self._epoch:
            if tokens <= 0:
                return
            queue.epoch = self._epoch
            queue.counter = queue.floor = self._least()
        queue.counter = max(queue.floor, queue.counter + tokens / queue.weight)
        if queue.key is not None:
            self._delete(queue)
            self._insert(queue, newcomer=False)

    def _insert(self, queue: TenantQueue, newcomer: bool) -> None:
        self._order += 1
        queue.key = (queue.counter, 0 if newcomer else 1, self._order)
        index = bisect_left(self._keys, queue.key)
        self._keys.insert(index, queue.key)
        self._queues.insert(index, queue)

    def _delete(self, queue: TenantQueue) -> None:
        assert queue.key is not None
        index = bisect_left(self._keys, queue.key)
        del self._keys[index], self._queues[index]
        queue.key = None

    def _left(self, queue: TenantQueue, spot: Spot) -> None:
        self.requests -= 1
        self.tokens -= spot.tokens
        self._clock_max = max(self._clock_max, queue.clock)
        if queue.requests:
            return
        self._delete(queue)
        del self._active[queue.name]
        self._remember(queue)
        if not self._active:
            self._epoch += 1
            self.credit = 0.0

    def _remember(self, queue: TenantQueue) -> None:
        self._idle[queue.name] = queue
        self._idle.move_to_end(queue.name)
        if len(self._idle) > IDLE_TENANTS_MAX:
            self._idle.popitem(last=False)
