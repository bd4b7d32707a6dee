"""What becomes of requests for a model that nobody serves, that may sleep (``scaling.replicas_min`` 0) or cannot start.

    cold       no replica takes requests, and those that are there leave; of a model that may not sleep: and starts fail
    sleeps     cold, and not because the one that serves by the plan in force cannot be reached from here
    remaining  asleep: start_s + WAKE_S     starting: start_s - elapsed, at least OVERDUE_SHARE of it
    held       its class waits for starts, and remaining <= patience
    patience   hold_s_max, or what is left until its deadline where that is less; no_replica_wait_ms unless it sleeps
    refused    else: 503 model_starting after remaining; model_cannot_start after what is left of the back-off

``start_s`` is what the controller measured (``Plan.cold``), or ``start_s_prior`` before it has told anything; a plan
that is too old for steering is still the best that is known of starts. Held and refused requests wake the model alike:
the controller hears of both. Those that are held wait in the gateway's queue, within its bounds and in its order.

What this must not do: wake anybody, or decide how many replicas there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from policies.admission.refusal import Refusal
from policies.config import PolicyConfig
from policies.steering import ColdModel, ColdPhase
from policies.types import Request

WAKE_S = 3.0
"""From a request to the begin of a start: the gateway's report, the controller's tick, Serve's question."""

OVERDUE_SHARE = 0.2
"""A start that takes longer than the longest of the last ones takes this share of it more, as far as anybody knows."""


class ColdGate:
    """One per gateway and model.

    Args:
        config: ``scaling``, ``classes`` and the jitter of ``admission``.
        told: what the last plan said, with its times brought up to ``now_ns``; ``None``: nothing yet.
        awake: whether the plan in force says that some replica serves.
        nobody: whether no replica takes requests and none that is there will.
        rng: lengthens each ``Retry-After``, so that those refused together do not come back together.
    """

    def __init__(
        self,
        config: PolicyConfig,
        told: Callable[[int], ColdModel | None],
        awake: Callable[[int], bool],
        nobody: Callable[[int], bool],
        rng: Random,
    ) -> None:
        self._config = config
        self._told = told
        self._awake = awake
        self._nobody = nobody
        self._rng = rng
        self._start_s = config.scaling.start_s_prior
        """Last told."""
        self.may_sleep = config.scaling.replicas_min == 0

    def reconfigure(self, config: PolicyConfig) -> None:
        """Follow the classes of ``config`` from now on."""
        self._config = config

    def is_cold(self, now_ns: int) -> bool:
        """Whether nobody takes requests, and they are held or refused for that."""
        return self._nobody(now_ns) if self.may_sleep else self.cannot_start(now_ns) is not None

    def sleeps(self, now_ns: int) -> bool:
        """Whether only a start helps."""
        return self.is_cold(now_ns) and not self._awake(now_ns)

    def cannot_start(self, now_ns: int) -> str | None:
        """Why the model cannot start, until it is tried again; ``None``: nothing says that."""
        told = self._told(now_ns)
        if told is None or told.phase is not ColdPhase.FAILED or told.retry_after_s <= 0 or not self._nobody(now_ns):
            return None
        return told.why

    def remaining_s(self, now_ns: int) -> float:
        """Until a replica serves, or until somebody tries to start one again."""
        told = self._told(now_ns)
        if told is None:
            return self._start_s + WAKE_S
        self._start_s = told.start_s
        if told.phase is ColdPhase.FAILED:
            return told.retry_after_s + (told.start_s if told.retry_after_s <= 0 else 0.0)
        if told.phase is ColdPhase.ASLEEP:
            return told.start_s + WAKE_S
        return max(told.start_s - told.elapsed_s, told.start_s * OVERDUE_SHARE)

    def patience_s(self, request: Request, now_ns: int) -> float:
        """How long a request may be held, from now on."""
        held_s = (now_ns - request.arrival_ns) / 1e9
        left_s = self._config.scaling.hold_s_max - held_s
        if request.deadline_ns is not None:
            left_s = min(left_s, (request.deadline_ns - now_ns) / 1e9)
        return max(0.0, left_s)

    def enter(self, request: Request, now_ns: int) -> tuple[Refusal | None, int]:
        """Why a request is not held, or until when it is."""
        if self.cannot_start(now_ns) is not None:
            return self.refusal(now_ns), 0
        remaining_s, patience_s = self.remaining_s(now_ns), self.patience_s(request, now_ns)
        if not self.sleeps(now_ns):
            return None, now_ns + round(min(patience_s, self._config.admission.no_replica_wait_ms / 1_000) * 1e9)
        if not self._config.classes.of(request.priority).waits_for_start:
            why = f"requests of class {request.priority} do not wait for that"
        elif remaining_s > patience_s:
            why = f"the request can wait for {patience_s:,.0f} s"
        else:
            return None, now_ns + round(patience_s * 1e9)
        return self._starting(f"the model starts, for the next {remaining_s:,.0f} s; {why}", now_ns), 0

    def refusal(self, now_ns: int) -> Refusal:
        """Why a request that was held is held no longer."""
        why = self.cannot_start(now_ns)
        if why is None:
            return self._starting("it was held for as long as it may be, and the model has not started", now_ns)
        return Refusal(
            "model_cannot_start", f"the model cannot start: {why}", "server_error", 503, self._after_s(now_ns)
        )

    def later(self, refusal: Refusal, now_ns: int) -> Refusal:
        """``refusal`` for want of room in the queue, with the time after which that empties."""
        return replace(refusal, retry_after_s=self._after_s(now_ns))

    def _starting(self, text: str, now_ns: int) -> Refusal:
        return Refusal("model_starting", text, "server_error", 503, self._after_s(now_ns))

    def _after_s(self, now_ns: int) -> float:
        admission = self._config.admission
        seconds = max(self.remaining_s(now_ns), admission.retry_after_s)
        return seconds * (1 + admission.retry_after_jitter_share * self._rng.random())
