"""Tasks: the calls that together serve one goal of a user, such as an agent's. See README.md."""

from policies.tasks.book import ENDED_MAX, TaskBook
from policies.tasks.shares import TaskLedger
from policies.tasks.values import (
    NO_LIMITS,
    TaskCounts,
    TaskEnd,
    TaskEnding,
    TaskLimits,
    TaskOutcome,
    TaskShares,
    TaskTotals,
    TaskUse,
    TaskView,
)

__all__ = [
    "ENDED_MAX",
    "NO_LIMITS",
    "TaskBook",
    "TaskCounts",
    "TaskEnd",
    "TaskEnding",
    "TaskLedger",
    "TaskLimits",
    "TaskOutcome",
    "TaskShares",
    "TaskTotals",
    "TaskUse",
    "TaskView",
]
