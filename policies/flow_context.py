"""What all request flows of one gateway share, and the states they go through.

What this must not do: decide.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import NamedTuple

from policies.admission.gate import AdmissionGate
from policies.admission.spent import Spent
from policies.config import PolicyConfig
from policies.faults import Quarantine, ReplicaHealth, RetryBudget
from policies.routing.load import LoadBook
from policies.routing.strategy import RoutingStrategy
from policies.tasks import TaskBook, TaskOutcome
from policies.types import ReplicaId, Request, RouteChoice


class FlowError(Exception):
    """The driver reported an event that cannot happen in the flow's state: a programming error."""


class State(StrEnum):
    """Where a request is; the diagram is in the module's text."""

    NEW = "new"
    QUEUED = "queued"
    ROUTING = "routing"
    WAITING = "waiting"
    SENT = "sent"
    ANSWERED = "answered"
    STREAMING = "streaming"
    OVER = "over"
    GONE = "gone"


AT_REPLICA = frozenset({State.SENT, State.ANSWERED, State.STREAMING})
ENDED = frozenset({State.OVER, State.GONE})


class Unproven(NamedTuple):
    """An attempt without its first byte."""

    request: Request
    replica_id: ReplicaId
    held_blocks: int
    """Leading blocks the replica was believed to hold before."""


@dataclass(slots=True)
class FlowContext:
    """What all flows of one gateway share."""

    admission: AdmissionGate
    health: ReplicaHealth
    quarantine: Quarantine
    tasks: TaskBook
    budget: RetryBudget
    book: LoadBook
    router: RoutingStrategy
    config: PolicyConfig
    rng: Random
    unproven: dict[str, Unproven] = field(default_factory=dict)
    """Attempts whose prompts their replicas are believed to hold on trust, by entry in the load book."""

    def count_dispatch(
        self, entry_id: str, request: Request, choice: RouteChoice, replica_id: ReplicaId, now_ns: int
    ) -> None:
        """Count one attempt wherever attempts are counted; ``entry_id`` is its entry in the load book."""
        self.count_load(entry_id, request, choice, replica_id)
        if request.blocks:
            self.unproven[entry_id] = Unproven(request, replica_id, self.router.held_blocks(request, replica_id))
        self.router.dispatched(request, replica_id)
        predicted_ms = choice.predicted_ttft_ms.get(replica_id) if request.stream else None
        self.health.sent(replica_id, now_ns, predicted_ms)

    def count_load(self, entry_id: str, request: Request, choice: RouteChoice, replica_id: ReplicaId) -> None:
        """Count the load of an attempt; its earlier entry moves."""
        hit_tokens = choice.predicted_hit_tokens.get(replica_id, 0)
        uncached_tokens = max(0, request.prompt_tokens - hit_tokens)
        self.book.dispatched(replica_id, entry_id, uncached_tokens, request.prompt_tokens)

    def first_byte(self, entry_id: str) -> None:
        """An attempt's prompt is computed; repeated calls change nothing."""
        self.book.first_byte(entry_id)
        attempt = self.unproven.pop(entry_id, None)
        if attempt is not None:
            self.router.computed(attempt.request, attempt.replica_id)

    def released(self, entry_id: str, failed: bool) -> None:
        """Give back what an attempt holds; repeated calls change nothing.

        One that failed before its first byte left no prefix at its replica. One that was only left may have: its
        client went, or another was faster.
        """
        self.book.released(entry_id)
        attempt = self.unproven.pop(entry_id, None)
        if attempt is not None and failed:
            self.router.not_computed(*attempt)

    def end_call(
        self,
        request: Request,
        spent: Spent,
        tokens_expected: int,
        usd: float,
        replica_id: ReplicaId | None,
        succeeded: bool,
        outcome: TaskOutcome | None,
        now_ns: int,
    ) -> None:
        """A call of a task is over."""
        self.tasks.ended(
            request.tenant,
            request.task,
            tokens_expected=tokens_expected,
            tokens=spent.prompt_tokens + spent.output_tokens,
            usd=usd,
            replica_id=replica_id,
            succeeded=succeeded,
            e2e_ms=(now_ns - request.arrival_ns) / 1e6,
            now_ns=now_ns,
            outcome=outcome,
        )
