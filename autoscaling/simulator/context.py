"""What the parts of one world share: the clock, delays in ns, counters, the observer, and the requests on their way.

Three values follow one request. :class:`Ask` is what a client wants, its repetitions included; :class:`Call` is one try
of it at one gateway, driven by one ``RequestFlow``; :class:`Attempt` is one dispatch of a call to one replica.

What this must not do: act. The parts do, see the folder's README.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Protocol

from autoscaling.simulator.events import EventQueue
from autoscaling.simulator.spec import NetworkSpec, Scenario, SimRequest
from policies.control.loop import TickResult
from policies.events import Effect, Event
from policies.flow import RequestFlow
from policies.types import ReplicaId, Request

if TYPE_CHECKING:
    from autoscaling.simulator.engine import Job
    from autoscaling.simulator.gateway import Gateway
    from autoscaling.simulator.replica import Replica

REPORT_JITTER_SHARE = 0.1
"""As in the live replica."""

COUNTERS = (
    "requests", "succeeded", "failed", "cancelled", "refused", "lost", "client_retries", "dispatches", "retries",
    "refused_connect", "refused_draining", "refused_unavailable", "rejected", "broken", "timeouts", "aborts", "waits",
    "slot_waits", "handovers", "queued", "resumes", "hedges", "starts", "starts_failed", "stops", "cut", "kills",
    "membership_changes", "samples", "reports", "ticks", "events",
)  # fmt: skip
"""Names of ``RunResult.counters``. The first six count client requests; ``dispatches`` what was sent to replicas,
``retries`` those after the first of a call; ``cut`` requests ended by a leaving replica's time; ``rejected`` those an
engine answered with an error; ``waits`` calls that waited for any replica, ``slot_waits`` those that waited for room at
one, ``queued`` those that waited in a gateway's own queue; ``resumes`` streams that went on elsewhere, ``hedges``
second attempts.
"""


class Observer(Protocol):
    """Sees everything that happens in a run, for checkers. Calls must not change what they are given."""

    def flow(self, now_ns: int, gateway: int, request_id: str, event: Event, effects: Sequence[Effect]) -> None:
        """A gateway stepped a request's flow."""
        ...

    def engine(self, now_ns: int, replica_id: ReplicaId, phase: str, kind: str, request_id: str) -> None:
        """``kind`` (``submit``, ``abort``, ``first_token``, ``finish``, ``lost``) at a replica in ``phase``."""
        ...

    def replica(self, now_ns: int, replica_id: ReplicaId, phase: str) -> None:
        """A replica entered ``phase``: ``starting``, ``ready``, ``draining``, ``refusing``, ``dead``, ``stopped``."""
        ...

    def tick(self, now_ns: int, pool: int, result: TickResult) -> None:
        """The controller of a pool ticked."""
        ...

    def end(self, now_ns: int, gateway: int, counts: dict[str, int]) -> None:
        """What a gateway still holds when the run is over: ``requests`` and ``tokens`` admitted, ``inflight`` in the
        load book, ``open`` calls, ``waiting`` for a replica, ``queued`` for room, ``attempts_left`` of its budget.
        """
        ...


def ns(ms: float) -> int:
    """Milliseconds as whole ns."""
    return round(ms * 1e6)


class Delays:
    """:class:`NetworkSpec` in ns."""

    __slots__ = (
        "client", "drain_max", "entry", "first_byte_max", "grace", "hop", "idle_max", "membership", "report",
        "report_lag", "stats", "stats_lag", "tick_late",
    )  # fmt: skip

    def __init__(self, network: NetworkSpec) -> None:
        self.client = ns(network.client_ms)
        self.entry = ns(network.client_ms) + ns(network.gateway_ms)
        """From the client's sending to the gateway's first decision."""
        self.hop = ns(network.hop_ms)
        self.stats, self.stats_lag = ns(network.stats_period_ms), ns(network.stats_lag_ms)
        self.report, self.report_lag = ns(network.report_period_ms), ns(network.report_lag_ms)
        self.tick_late = ns(network.tick_late_ms)
        self.membership = ns(network.membership_lag_ms)
        self.grace, self.drain_max = ns(network.drain_grace_ms), ns(network.drain_ms_max)
        self.idle_max, self.first_byte_max = ns(network.idle_timeout_ms), ns(network.first_byte_timeout_ms)


class Context:
    """One per run."""

    __slots__ = ("counters", "delays", "observer", "queue", "scenario")

    def __init__(self, scenario: Scenario, observer: Observer | None) -> None:
        self.scenario = scenario
        self.queue = EventQueue()
        self.delays = Delays(scenario.network)
        self.observer = observer
        self.counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)

    def rng(self, part: str) -> Random:
        """A stream of random numbers for ``part`` alone, the same under any hash seed."""
        return Random(f"{self.scenario.seed}/{part}")

    def report_period_ns(self, rng: Random) -> int:
        """Time to a reporter's next report, jittered as live so that they do not report in step."""
        return round(self.delays.report * (1 - REPORT_JITTER_SHARE + 2 * REPORT_JITTER_SHARE * rng.random()))


class Ask:
    """What one client wants, from its first try to its one row."""

    __slots__ = ("attempts", "leave_tokens", "request", "rng", "sent_ns", "tries")

    def __init__(self, request: SimRequest) -> None:
        self.request = request
        self.sent_ns = request.arrival_ns
        """When the client sent this try."""
        self.tries = 0
        self.attempts = 0
        """Dispatches of all tries."""
        self.leave_tokens = 0
        """The client leaves after this many tokens; 0: it stays."""
        self.rng: Random | None = None

    def as_request(self, model: str, client_ns: int) -> Request:
        """This try as a gateway sees it; ``client_ns``: its way there."""
        sim = self.request
        return Request(
            request_id=f"{sim.index}-{self.tries}",
            model=model,
            endpoint="/v1/chat/completions",
            tenant=sim.tenant,
            prompt_tokens=sim.prompt_tokens,
            output_tokens_max=sim.output_tokens_max,
            blocks=sim.blocks,
            block_tokens=sim.block_tokens,
            stream=sim.stream,
            arrival_ns=self.sent_ns + client_ns,
            priority=sim.priority,
            task=sim.task if sim.task_header else "",
            deadline_ns=None if sim.deadline_ms is None else self.sent_ns + round(sim.deadline_ms * 1e6),
            fingerprint=sim.index + 1,
        )


class Call:
    """One try at one gateway."""

    __slots__ = (
        "ask", "attempt", "delivered", "first_byte_ns", "flow", "gateway", "gone_ns", "gone_why", "hedge", "hedge_ns",
        "in_line", "may_retry", "request", "retry_after_ns", "wait_version",
    )  # fmt: skip

    def __init__(self, ask: Ask, gateway: Gateway, request: Request, flow: RequestFlow) -> None:
        self.ask = ask
        self.gateway = gateway
        self.request = request
        self.flow = flow
        self.attempt: Attempt | None = None
        self.first_byte_ns: int | None = None
        """At the gateway."""
        self.delivered = 0
        """Output tokens that came."""
        self.gone_ns: int | None = None
        """When the client left."""
        self.gone_why = ""
        self.hedge: Attempt | None = None
        """A second attempt beside the first."""
        self.hedge_ns: int | None = None
        self.retry_after_ns = 0
        self.may_retry = True
        self.wait_version = 0
        self.in_line = False
        """It waits for room at a replica."""

    def settle(self, winner: Attempt) -> Attempt:
        """Of two attempts ``winner`` gives the first byte and is the call's own; return the other."""
        assert self.attempt is not None
        assert self.hedge is not None
        other = self.attempt if winner is self.hedge else self.hedge
        self.attempt, self.hedge = winner, None
        return other

    def lost(self, attempt: Attempt) -> bool:
        """``attempt`` failed; whether it was the second one of two. Where the first one failed, the second goes on."""
        if self.hedge is None:
            return False
        is_hedge = attempt is self.hedge
        if not is_hedge:
            self.attempt = self.hedge
        self.hedge = None
        return is_hedge


class Attempt:
    """One dispatch."""

    __slots__ = (
        "aborted",
        "before",
        "call",
        "first_byte_at_ns",
        "job",
        "over",
        "prefill_job",
        "received_ns",
        "replica",
        "where",
    )

    def __init__(self, call: Call, replica: Replica, before: int = 0) -> None:
        self.call = call
        self.before = before
        """Output tokens that came from other replicas: it goes on after them."""
        self.replica = replica
        """Whom the gateway sent it to."""
        self.where: Replica | None = replica
        """Where it is; ``None`` while its KV travels or it waits for a decode replica."""
        self.job: Job | None = None
        """In the engine that holds it, or held it last."""
        self.prefill_job: Job | None = None
        """In a split fleet, the one that came before."""
        self.over = False
        """The gateway listens no more."""
        self.aborted = False
        self.received_ns = 0
        self.first_byte_at_ns = 0

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache spared."""
        job = self.prefill_job or self.job
        return job.cached_tokens if job is not None else 0
