"""Values of tasks that cross boundaries. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

N = TypeVar("N", int, float)


class TaskOutcome(StrEnum):
    """What a client says of its task."""

    SUCCESS = "success"
    FAILURE = "failure"


class TaskEnding(StrEnum):
    """How a task ended."""

    SUCCESS = "success"
    FAILURE = "failure"
    STOPPED = "stopped"
    """A call was refused at one of the task's limits, and no outcome was told."""
    UNKNOWN = "unknown"
    """Its calls ceased and no outcome was told."""


@dataclass(frozen=True, slots=True)
class TaskLimits:
    """Limits one call names for its task; ``None``: it names none."""

    calls_max: int | None = None
    tokens_max: int | None = None
    """Prompt plus output tokens of all its calls."""
    deadline_s: float | None = None
    """From the arrival of its first call."""

    def narrowed(self, other: TaskLimits) -> TaskLimits:
        """The smaller of each."""
        return TaskLimits(
            least(self.calls_max, other.calls_max),
            least(self.tokens_max, other.tokens_max),
            least(self.deadline_s, other.deadline_s),
        )


NO_LIMITS = TaskLimits()


@dataclass(slots=True)
class TaskCounts:
    """What was counted of one task's calls."""

    calls: int = 0
    """Begun and not taken back, open ones included."""
    calls_open: int = 0
    succeeded: int = 0
    failed: int = 0
    tokens: int = 0
    """Prompt plus output tokens of its ended calls."""
    tokens_held: int = 0
    """Expected of its open calls."""
    usd: float = 0.0
    busy_ms: float = 0.0
    """Sum of the times of its calls."""

    def plus(self, other: TaskCounts) -> TaskCounts:
        """Sum of both."""
        return TaskCounts(
            self.calls + other.calls,
            self.calls_open + other.calls_open,
            self.succeeded + other.succeeded,
            self.failed + other.failed,
            self.tokens + other.tokens,
            self.tokens_held + other.tokens_held,
            self.usd + other.usd,
            self.busy_ms + other.busy_ms,
        )


@dataclass(frozen=True, slots=True)
class TaskUse:
    """One task as gateways tell each other of it, through the controller: all they ever counted, not what is new."""

    tenant: str
    task: str
    counts: TaskCounts
    """Of the sender; in an answer, of all gateways but the receiver."""
    age_ms: float
    """Since the arrival of its first call, when this was sent."""
    idle_ms: float
    """Since the end of its last call, likewise."""
    limits: TaskLimits = NO_LIMITS
    outcome: TaskOutcome | None = None
    owner: bool | None = None
    """The sender, in an answer the receiver, counts this task when it is over; ``None``: not known yet."""


@dataclass(frozen=True, slots=True)
class TaskShares:
    """The controller's answer to one gateway."""

    epoch: str
    """Identifies one life of the controller: another one knows nothing of what was told before."""
    seq: int
    """To be sent with the next exchange."""
    uses: tuple[TaskUse, ...]
    more: bool = False
    """There is more than one answer holds."""


@dataclass(frozen=True, slots=True)
class TaskEnd:
    """One task that is over."""

    tenant: str
    ending: TaskEnding
    calls: int
    tokens: int
    usd: float
    e2e_ms: float
    """Arrival of its first call to the end of its last one."""


@dataclass(slots=True)
class TaskTotals:
    """Sums over the tasks of one ending."""

    tasks: int = 0
    calls: int = 0
    tokens: int = 0
    usd: float = 0.0
    e2e_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class TaskView:
    """One task as it is now."""

    task: str
    outcome: TaskOutcome | None
    stopped: bool
    """A call was refused at one of its limits."""
    counts: TaskCounts
    age_ms: float
    e2e_ms: float
    """Arrival of its first call to the end of its last one so far; what ``counts.busy_ms`` leaves of it, the client
    spent elsewhere."""
    limits: TaskLimits
    """In force, the configured ones included."""


def least(a: N | None, b: N | None) -> N | None:
    """The smaller of two limits; ``None`` is no limit."""
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)
