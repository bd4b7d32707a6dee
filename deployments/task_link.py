"""Exchanges a gateway's counts of tasks with the other gateways', through the controller. With one gateway it is idle.

Nothing here waits on a request's path, but for a client that asks for a task this gateway has not heard of yet. It must
not decide whether a call may go on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from deployments.clock import now_ns
from policies.tasks import TaskBook, TaskShares

USES_MAX = 1_000
"""Tasks of one message to the controller."""
ROUNDS_MAX = 8
"""Messages of one exchange; what is left waits for the next."""

Call: TypeAlias = Callable[..., Awaitable[Any]]
"""Calls a method of the controller: its name, then its arguments."""


class TaskLink:
    """One gateway's end. Exchanges may overlap: what is told twice changes nothing."""

    def __init__(self, gateway_id: str, book: TaskBook) -> None:
        self._gateway_id = gateway_id
        self._book = book
        self._epoch = ""
        self._seq = 0

    async def exchange(self, call: Call) -> None:
        """Tell what changed here, learn what changed elsewhere. Raises what ``call`` raises; nothing is lost then."""
        book = self._book
        for _ in range(ROUNDS_MAX if book.shared else 0):
            uses = book.changes(USES_MAX, now_ns())
            try:
                shares: TaskShares = await call("exchange_tasks", self._gateway_id, self._epoch, self._seq, uses)
            except BaseException:
                book.untold(uses)
                raise
            is_new = shares.epoch != self._epoch and bool(self._epoch)
            if is_new:
                book.tell_all()
            self._epoch, self._seq = shares.epoch, shares.seq
            book.learn(shares.uses, now_ns())
            if not is_new and not shares.more and len(uses) < USES_MAX:
                return
