"""What a run left behind: one row per client request in columns, use of each pool, decisions, counters, a digest.

Columns are arrays of machine numbers (about 80 bytes a request), so that a million requests fit into 100 MB.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from autoscaling.simulator.gaps import GapCounts
from policies.types import Decision


class Names:
    """Strings as small numbers, in order of first use."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self.names: list[str] = []

    def id_of(self, name: str) -> int:
        """Number of ``name``."""
        number = self._ids.get(name)
        if number is None:
            number = self._ids[name] = len(self.names)
            self.names.append(name)
        return number


@dataclass(slots=True)
class Row:
    """One client request, its repetitions by the client included. Times are in ms since its first arrival."""

    index: int
    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    """Delivered to the client."""
    cached_tokens: int
    """Prompt tokens that the engine found in its cache."""
    ttft_ms: float
    """NaN: no byte came."""
    e2e_ms: float
    """To the last byte or to the end without one."""
    outcome: str
    """``succeeded``, ``failed``, ``cancelled`` (client left), ``refused``, ``lost`` (the run ended before it did)."""
    reason: str
    attempts: int
    """Times it was sent to a replica."""
    tries: int
    """Times the client sent it, at least 1."""
    replica: str
    """The last one it was sent to; empty: none."""
    tenant: str
    task: str
    task_last: bool

    @property
    def tpot_ms(self) -> float:
        """Mean time per output token after the first; NaN below two tokens."""
        return (self.e2e_ms - self.ttft_ms) / (self.output_tokens - 1) if self.output_tokens > 1 else math.nan


class Records:
    """All rows of a run, in the order in which requests ended."""

    def __init__(self) -> None:
        self.index = array("q")
        self.arrival_ns = array("q")
        self.prompt_tokens = array("l")
        self.output_tokens = array("l")
        self.cached_tokens = array("l")
        self.ttft_ms = array("d")
        self.e2e_ms = array("d")
        self.outcome = array("h")
        self.reason = array("h")
        self.attempts = array("h")
        self.tries = array("h")
        self.replica = array("l")
        self.tenant = array("l")
        self.task = array("l")
        self.task_last = array("b")
        self.outcomes, self.reasons, self.replicas, self.tenants, self.tasks = (Names() for _ in range(5))

    def add(self, row: Row) -> None:
        """Append one row."""
        self.index.append(row.index)
        self.arrival_ns.append(row.arrival_ns)
        self.prompt_tokens.append(row.prompt_tokens)
        self.output_tokens.append(row.output_tokens)
        self.cached_tokens.append(row.cached_tokens)
        self.ttft_ms.append(row.ttft_ms)
        self.e2e_ms.append(row.e2e_ms)
        self.outcome.append(self.outcomes.id_of(row.outcome))
        self.reason.append(self.reasons.id_of(row.reason))
        self.attempts.append(row.attempts)
        self.tries.append(row.tries)
        self.replica.append(self.replicas.id_of(row.replica))
        self.tenant.append(self.tenants.id_of(row.tenant))
        self.task.append(self.tasks.id_of(row.task) if row.task else -1)
        self.task_last.append(row.task_last)

    def __len__(self) -> int:
        return len(self.index)

    def __iter__(self) -> Iterator[Row]:
        return (self.row(i) for i in range(len(self)))

    def row(self, i: int) -> Row:
        """Row ``i`` as a value."""
        return Row(
            self.index[i], self.arrival_ns[i], self.prompt_tokens[i], self.output_tokens[i], self.cached_tokens[i],
            self.ttft_ms[i], self.e2e_ms[i], self.outcomes.names[self.outcome[i]], self.reasons.names[self.reason[i]],
            self.attempts[i], self.tries[i], self.replicas.names[self.replica[i]], self.tenants.names[self.tenant[i]],
            self.tasks.names[self.task[i]] if self.task[i] >= 0 else "", bool(self.task_last[i]),
        )  # fmt: skip

    def update_digest(self, digest: hashlib._Hash) -> None:
        """Feed every column and every name to ``digest``."""
        for column in (
            self.index, self.arrival_ns, self.prompt_tokens, self.output_tokens, self.cached_tokens, self.ttft_ms,
            self.e2e_ms, self.outcome, self.reason, self.attempts, self.tries, self.replica, self.tenant, self.task,
            self.task_last,
        ):  # fmt: skip
            digest.update(column.tobytes())
        for names in (self.outcomes, self.reasons, self.replicas, self.tenants, self.tasks):
            digest.update("\0".join(names.names).encode())


@dataclass(frozen=True, slots=True)
class FleetSample:
    """One pool at one time."""

    at_ns: int
    target: int
    starting: int
    ready: int
    draining: int
    waiting: int
    """Requests that wait in engines and gateways."""
    running: int


@dataclass(slots=True)
class PoolUse:
    """What one pool cost and did."""

    profile: str
    role: str
    replica_hours: float
    """From the begin of each start to the end of each stop."""
    gpu_hours: float
    usd: float
    starts: int
    replicas_max: int
    preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    busy_share: float
    """Mean share of their ready time that engines spent in steps."""
    itl: GapCounts
    timeline: list[FleetSample] = field(default_factory=list)
    """One sample per tick of the controller (at most one a second)."""


@dataclass(slots=True)
class RunResult:
    """Everything one run left."""

    scenario: str
    seed: int
    records: Records
    pools: list[PoolUse]
    decisions: list[Decision]
    counters: dict[str, int]
    """E.g. ``dispatches``, ``retries``, ``events``, ``ticks``; names are in ``world.py``."""
    end_ns: int
    digest: str
    """SHA-256 over rows, decisions and counters: one seed, one digest."""
