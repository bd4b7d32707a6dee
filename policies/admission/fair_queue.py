"""Decides in which order the requests that wait in a gateway go on.

    class     strictly by rank, but each class that waits earns ``class_floor_share`` of every token that is sent on and
              goes first once it has earned its next request
    tenant    the one served least for its weight: policies/admission/class_queue.py
    request   earliest deadline, then tasks by age and by what they took: policies/admission/tenant_queue.py

Charges are in tokens: prompt plus twice the expected output, as the caller counts them. They fall at :meth:`pop`, or
at :meth:`charge` for work that was sent on without waiting, and are corrected by :meth:`charge` when the true figures
are known.

Each operation takes O(log n) comparisons; :meth:`FairQueue.tokens_ahead` also adds up what is ahead. Bounded: whoever
adds requests bounds those (``queue_requests_max``); ``tasks.tasks_max`` tasks and
:data:`~policies.admission.class_queue.IDLE_TENANTS_MAX` idle tenants of each class are remembered, the longest unheard
of go.

What this must not do: decide who gets in, look at replicas, or drop anybody by itself (:meth:`expired` is asked for).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from policies.admission.class_queue import ClassQueue
from policies.admission.tenant_queue import Spot, TaskTag
from policies.config import PolicyConfig
from policies.types import Priority


@dataclass(frozen=True, slots=True)
class Waiting:
    """One request that waits."""

    request_id: str
    tenant: str
    priority: Priority
    task: str
    """Empty: a goal of its own."""
    tokens: int
    """Its cost: prompt plus twice the expected output."""
    deadline_ns: int | None
    """When the whole answer must be there, if the client said so: orders requests of one tenant."""
    expires_ns: int
    """From then on it is too late to begin: :meth:`FairQueue.expired` takes it out."""
    enqueued_ns: int


@dataclass(frozen=True, slots=True)
class _Entry:
    waiting: Waiting
    spot: Spot
    order: int


class FairQueue:
    """See the module."""

    def __init__(self, config: PolicyConfig) -> None:
        self._floor_share = config.admission.class_floor_share
        self._tasks_max = config.tasks.tasks_max
        self._classes: Mapping[Priority, ClassQueue] = {priority: ClassQueue(config) for priority in Priority}
        self._entries: dict[str, _Entry] = {}
        self._expiry: list[tuple[int, int, str]] = []
        self._tasks: OrderedDict[tuple[Priority, str, str], TaskTag] = OrderedDict()
        self._order = 0

    @property
    def requests(self) -> int:
        """Requests that wait."""
        return len(self._entries)

    @property
    def tokens(self) -> int:
        """Their tokens."""
        return sum([class_.tokens for class_ in self._classes.values()])

    def tokens_above(self, priority: Priority) -> int:
        """Tokens that wait in more important classes."""
        return sum([class_.tokens for p, class_ in self._classes.items() if p.rank < priority.rank])

    # --- in and out ---------------------------------------------------------------------------------------------------

    def add(self, waiting: Waiting) -> None:
        """Let a request wait.

        :raises ValueError: the id waits already. Ids are the server's own, so this is a programming error.
        """
        if waiting.request_id in self._entries:
            raise ValueError(f"request {waiting.request_id} waits already")
        self._order += 1
        task = self._task(waiting.priority, waiting.tenant, waiting.task)
        spot = self._classes[waiting.priority].add(
            waiting.tenant, waiting.request_id, waiting.tokens, waiting.deadline_ns, self._order, task
        )
        self._entries[waiting.request_id] = _Entry(waiting, spot, self._order)
        heapq.heappush(self._expiry, (waiting.expires_ns, self._order, waiting.request_id))

    def remove(self, request_id: str) -> Waiting | None:
        """Take a request out that is not served, such as one whose client left; ``None``: it does not wait."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return None
        waiting = entry.waiting
        self._classes[waiting.priority].remove(waiting.tenant, entry.spot)
        self._tidy()
        return waiting

    def peek(self, skip: Collection[str] = ()) -> Waiting | None:
        """Who is next, but for the tenants in ``skip``; ``None``: nobody waits.

        Tenants are skipped where somebody else may take what they may not; floors of classes do not count then.
        """
        if skip:
            ids = (class_.first(skip) for class_ in self._classes.values())
            return next((self._entries[r].waiting for r in ids if r is not None), None)
        class_ = self._next_class()
        return None if class_ is None else self._first(class_)

    def pop(self, skip: Collection[str] = ()) -> Waiting | None:
        """Take out who is next, and charge its tokens."""
        waiting = self.peek(skip)
        if waiting is None:
            return None
        class_ = self._classes[waiting.priority]
        entry = self._entries.pop(waiting.request_id)
        self._sent(waiting.priority, waiting.tokens)
        class_.served(waiting.tenant, entry.spot)
        self._tidy()
        return waiting

    def charge(self, tenant: str, priority: Priority, task: str, tokens: int) -> None:
        """Count work that was sent on without waiting, or correct what was counted, by ``tokens`` more or less."""
        if tokens > 0:
            self._sent(priority, tokens)
        known = (priority, tenant, task) in self._tasks
        tag = self._task(priority, tenant, task) if known or tokens > 0 else None
        self._classes[priority].charge(tenant, tag, tokens)

    def expired(self, now_ns: int, until_ns: Callable[[Waiting, int], int] | None = None) -> list[Waiting]:
        """Take out those whose ``expires_ns`` has come, and return them, earliest first.

        ``until_ns`` says until when one of them waits on, in its place; a time that is over: no longer.
        """
        found: list[Waiting] = []
        while self._expiry and self._expiry[0][0] <= now_ns:
            _, order, request_id = heapq.heappop(self._expiry)
            entry = self._entries.get(request_id)
            if entry is None or entry.order != order:
                continue
            later_ns = now_ns if until_ns is None else until_ns(entry.waiting, now_ns)
            if later_ns > now_ns:
                heapq.heappush(self._expiry, (later_ns, order, request_id))
                continue
            self.remove(request_id)
            found.append(entry.waiting)
        return found

    def tokens_ahead(self, tenant: str, priority: Priority, task: str, tokens: int) -> int:
        """Most tokens that are served before such a newcomer, if nobody else comes. It has no deadline."""
        tag = self._tasks.get((priority, tenant, task)) if task else None
        ahead = self.tokens_above(priority) + self._classes[priority].tokens_ahead(tenant, tag, tokens)
        below = [c for p, c in self._classes.items() if p.rank > priority.rank and c.requests]
        share = self._floor_share
        earned = share * (ahead + sum([c.credit for c in below])) / (1 - share * len(below))
        return ahead + sum([min(c.tokens, int(c.credit + earned)) for c in below])

    def has_begun(self, tenant: str, priority: Priority, task: str) -> bool:
        """Whether the task had a call in this class."""
        tag = self._tasks.get((priority, tenant, task)) if task else None
        return tag is not None and tag.begun

    # --- classes ------------------------------------------------------------------------------------------------------

    def _next_class(self) -> ClassQueue | None:
        first: ClassQueue | None = None
        for class_ in self._classes.values():
            if not class_.requests:
                continue
            if first is None:
                first = class_
            elif class_.credit >= self._first(class_).tokens:
                return class_
        return first

    def _first(self, class_: ClassQueue) -> Waiting:
        request_id = class_.first()
        assert request_id is not None
        return self._entries[request_id].waiting

    def _sent(self, priority: Priority, tokens: int) -> None:
        """Classes that wait earn their share of what is sent on, up to their next request; the one it is for pays.

        No more than that: a class whose tenants are skipped for long would go ahead of all others for as long again.
        """
        for class_ in self._classes.values():
            first = self._entries.get(class_.first() or "")
            if class_.requests and (first is None or class_.credit < first.waiting.tokens):
                class_.credit += self._floor_share * tokens
        class_ = self._classes[priority]
        class_.credit = max(0.0, class_.credit - tokens)

    # --- bounded memory -----------------------------------------------------------------------------------------------

    def _task(self, priority: Priority, tenant: str, task: str) -> TaskTag | None:
        if not task:
            return None
        key = (priority, tenant, task)
        tag = self._tasks.get(key)
        if tag is None:
            tag = self._tasks[key] = TaskTag()
            if len(self._tasks) > self._tasks_max:
                self._tasks.popitem(last=False)
        else:
            self._tasks.move_to_end(key)
        return tag

    def _tidy(self) -> None:
        """Drop expiry times of requests that are gone, once they are the greater part."""
        if len(self._expiry) > 2 * len(self._entries) + 64:
            self._expiry = [item for item in self._expiry if self._lives(item[2], item[1])]
            heapq.heapify(self._expiry)

    def _lives(self, request_id: str, order: int) -> bool:
        entry = self._entries.get(request_id)
        return entry is not None and entry.order == order
