"""What the rules of conditions look at in one tick, each thing worked out once.

:class:`Facts` joins the signals, the burn of the error budgets, every replica's pace against its kind, the queue's last
lengths and how long a rise of the fleet has made no progress. :class:`Memory` is all that detection remembers between
ticks, besides the hysteresis of each condition; it is bounded.

What this must not do: name a condition.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from policies.config import PolicyConfig
from policies.control.burn import BurnMeter
from policies.control.peers import Comparison, Peers
from policies.control.signals import ReplicaSignals, Signals
from policies.types import GatewayReport, ReplicaState

QUEUE_TICKS = 12
"""Ticks over which a queue's growth is judged."""


@dataclass(frozen=True, slots=True)
class Facts:
    """One tick, as rules see it."""

    config: PolicyConfig
    signals: Signals
    meter: BurnMeter
    fresh: Sequence[ReplicaSignals]
    serving: Sequence[ReplicaSignals]
    """Of the fresh ones, those that take requests."""
    peers: Comparison
    """The serving ones, each against its kind."""
    prefill_share: float | None
    """Share of all step time that computes prompts, by each replica's learned step model; ``None`` without any."""
    queue: int | None
    """Requests that wait, in engines and gateways together; ``None`` when blind."""
    queues: Sequence[int]
    """The last :data:`QUEUE_TICKS` of them, newest last."""
    starting: int | None
    """Replicas that were asked for or start, and do not serve yet; ``None`` where Serve says nothing."""
    waited_s: float
    """Time since a rise was asked for or since the last replica came up; 0 while none is missing."""

    @property
    def queue_each(self) -> float | None:
        """Requests that wait per serving replica."""
        return None if self.queue is None else self.queue / max(1, len(self.serving))


class Memory:
    """What is remembered from tick to tick."""

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self._meter = BurnMeter(config)
        self._peers = Peers()
        self._queues: deque[int] = deque(maxlen=QUEUE_TICKS)
        self._running = 0
        self._waits_since_ns: int | None = None

    def reconfigure(self, config: PolicyConfig) -> None:
        """Judge by another configuration from the next tick on."""
        self._config = config
        self._meter.reconfigure(config)

    def receive_gateway(self, report: GatewayReport) -> None:
        """Count an accepted report."""
        self._meter.receive(report)

    def facts(self, signals: Signals, now_ns: int) -> Facts:
        """Everything about one tick; call it once per tick."""
        self._meter.step(now_ns)
        queue = signals.queue
        if queue is not None:
            self._queues.append(queue)
        fresh, serving = signals.fresh, signals.serving
        starting = _starting(signals, fresh)
        return Facts(
            config=self._config,
            signals=signals,
            meter=self._meter,
            fresh=fresh,
            serving=serving,
            peers=self._peers.compare(serving, signals.serving_ids),
            prefill_share=_prefill_share(serving),
            queue=queue,
            queues=tuple(self._queues),
            starting=starting,
            waited_s=self._waited_s(signals, now_ns),
        )

    def _waited_s(self, signals: Signals, now_ns: int) -> float:
        fleet = signals.fleet
        if fleet is not None:
            came_up = fleet.replicas_running > self._running
            self._running = fleet.replicas_running
            if fleet.replicas_running >= fleet.replicas_target:
                self._waits_since_ns = None
            elif came_up or self._waits_since_ns is None:
                self._waits_since_ns = now_ns
        return 0.0 if self._waits_since_ns is None else (now_ns - self._waits_since_ns) / 1e9


def _prefill_share(replicas: Sequence[ReplicaSignals]) -> float | None:
    prefill = busy = 0.0
    for replica in replicas:
        share, busy_share = replica.prefill_share, replica.busy_share
        if share is not None and busy_share is not None:
            prefill += share * busy_share
            busy += busy_share
    return prefill / busy if busy else None


def _starting(signals: Signals, fresh: Sequence[ReplicaSignals]) -> int | None:
    if signals.fleet is None:
        return None
    missing = signals.fleet.replicas_target - signals.fleet.replicas_running
    return max(0, missing, sum([r.latest.state is ReplicaState.STARTING for r in fresh]))
