"""Two attempts of one request side by side: the first that gives a byte is the request's own, the other is aborted.

The flow is told what happens as it happens (``HedgeDue``, ``HedgeWon``, failures); what is left for the driver is the
surviving attempt and its event. It must not decide whether there is a second attempt: that is the flow's answer to
``HedgeDue``.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

from deployments.attempt import Dispatched
from deployments.clock import now_ns
from policies.events import (
    Dispatch,
    Effect,
    Event,
    HedgeDue,
    HedgeWon,
    RefusalKind,
    ReplicaRefused,
    ResponseStarted,
    UpstreamFailed,
    UpstreamFailure,
)
from policies.types import ReplicaId


class Race:
    """One race. ``begin`` makes an attempt at a replica, ``run`` sends it, ``step`` asks the flow."""

    def __init__(
        self,
        begin: Callable[[ReplicaId, bool], Dispatched | None],
        run: Callable[[Dispatched], Awaitable[Event]],
        step: Callable[[Event], list[Effect]],
    ) -> None:
        self._begin = begin
        self._run = run
        self._step = step
        self._running: dict[asyncio.Future[Event], Dispatched] = {}
        self._first: Dispatched | None = None

    async def winner(self, first: Dispatched, hedge_ms: float) -> tuple[Dispatched, Event]:
        """The attempt that decides, and its event. When cancelled both attempts are closed."""
        self._first = first
        try:
            task = self._start(first)
            await asyncio.wait({task}, timeout=hedge_ms / 1_000)
            if not task.done():
                self._hedge()
            return await self._decide()
        finally:
            for task, attempt in self._running.items():
                task.cancel()
                attempt.exchange.close()
                attempt.record.close(now_ns(), "aborted")

    def _start(self, attempt: Dispatched) -> asyncio.Future[Event]:
        task = asyncio.ensure_future(self._run(attempt))
        self._running[task] = attempt
        return task

    def _hedge(self) -> None:
        for effect in self._step(HedgeDue()):
            if not isinstance(effect, Dispatch):
                continue
            second = self._begin(effect.replica_id, True)
            if second is None:
                self._step(ReplicaRefused(RefusalKind.CONNECT, hedge=True))
            else:
                self._start(second)

    async def _decide(self) -> tuple[Dispatched, Event]:
        while True:
            done, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                attempt, event = self._running.pop(task), task.result()
                if not self._running:
                    return attempt, event
                if isinstance(event, ResponseStarted) and event.status < 500:
                    if attempt is not self._first:
                        self._step(HedgeWon())
                    return attempt, event
                self._lost(attempt, event)

    def _lost(self, attempt: Dispatched, event: Event) -> None:
        """One failed while the other runs."""
        attempt.exchange.close()
        attempt.record.close(now_ns(), attempt.failed_why or "server_error")
        is_hedge = attempt is not self._first
        if isinstance(event, ReplicaRefused):
            self._step(dataclasses.replace(event, hedge=is_hedge))
        else:
            kind = event.kind if isinstance(event, UpstreamFailed) else UpstreamFailure.PROTOCOL
            self._step(UpstreamFailed(kind, hedge=is_hedge))
