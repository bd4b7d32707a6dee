"""One request's record, filled by its driver while it lives, and the one log line written from it at its end.

    ttft = queue + route + engine

``queue``: waiting in the gateway, for its turn or for a replica. ``engine``: from the dispatch of the attempt that
answered to its first body byte. ``route``: all the rest, which is the gateway's own work, the client's sending of the
body, and attempts that failed before one answered. The parts are measured on one clock and add up exactly.

A line is one JSON object with ids, sizes, times and codes. It must not hold a prompt, an answer, a key, or any text an
engine or a client wrote freely: ids come in cleaned and capped. Values nobody knows are ``null``, never 0.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from policies.types import Priority, ReplicaId

if TYPE_CHECKING:
    from deployments.tracing import TraceContext

logger = logging.getLogger("ray.serve")

ATTEMPTS_MAX = 32
"""Attempts of one request that its record keeps; later ones are counted only."""
LINES_MAX = 128
"""Lines that wait to be written."""
EVENT = "request_end"
"""``event`` of every line written here."""


@dataclass(slots=True)
class Attempt:
    """One dispatch to one replica. Times are the gateway's clock in ns, 0 while they have not come."""

    replica_id: ReplicaId
    sent_ns: int
    resume: bool = False
    """It goes on with a stream that broke off elsewhere."""
    hedge: bool = False
    """It runs beside another."""
    span_id: int = 0
    """Its span where the request is traced, else 0."""
    first_byte_ns: int = 0
    ended_ns: int = 0
    end: str = ""
    """``ok``, or why it failed; empty while it runs."""

    def close(self, now_ns: int, end: str) -> None:
        """It is over because of ``end``. What closes it first counts."""
        if not self.ended_ns:
            self.ended_ns, self.end = now_ns, end


@dataclass(frozen=True, slots=True)
class Split:
    """Where the time to the first byte went, in ns."""

    queue_ns: int
    route_ns: int
    engine_ns: int


@dataclass(slots=True)
class RequestRecord:
    """What is known of one request. Each method is called with the gateway's clock in ns."""

    request_id: str
    endpoint: str
    """Path as routed, one of the gateway's own list."""
    arrival_ns: int = 0
    model: str = ""
    client_id: str = ""
    """The client's own request id, cleaned."""
    key_id: str = ""
    tenant: str = ""
    priority: Priority | None = None
    task: str = ""
    stream: bool = False
    trace: TraceContext | None = None
    """``None``: not traced."""

    status: int | None = None
    """What the client was sent; ``None``: nothing."""
    outcome: str = ""
    reason: str = ""
    attempts: list[Attempt] = field(default_factory=list)
    attempts_seen: int = 0
    resumed: int = 0
    hedged: bool = False
    queue_ns: int = 0
    first_byte_ns: int = 0
    ended_ns: int = 0
    predicted_ttft_ms: float | None = None
    """From dispatch to first byte, as routing predicted for the replica it chose."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    usd: float | None = None
    """What the tenant is charged."""
    waits: list[tuple[int, int]] = field(default_factory=list)
    """Begin and end of each wait, the first :data:`ATTEMPTS_MAX` of them."""
    split: Split | None = None
    """Set with the first byte."""
    _waiting_since_ns: int = 0

    # --- while it lives -----------------------------------------------------------------------------------------------

    def wait_begins(self, now_ns: int) -> None:
        """It waits for its turn or for a replica."""
        self._waiting_since_ns = now_ns

    def wait_ends(self, now_ns: int) -> None:
        """It waits no more. Without a wait nothing happens."""
        since_ns = self._waiting_since_ns
        if since_ns:
            self.queue_ns += now_ns - since_ns
            self._waiting_since_ns = 0
            if len(self.waits) < ATTEMPTS_MAX:
                self.waits.append((since_ns, now_ns))

    def sent(self, replica_id: ReplicaId, now_ns: int, *, resume: bool = False, hedge: bool = False) -> Attempt:
        """It is sent to ``replica_id``; the attempt returned is closed by whoever sees it end."""
        if not hedge:
            for earlier in self.attempts:
                earlier.close(now_ns, "left")
        attempt = Attempt(replica_id, now_ns, resume, hedge)
        if self.trace is not None:
            attempt.span_id = self.trace.new_span_id()
        self.attempts_seen += 1
        self.resumed += resume
        self.hedged |= hedge
        if len(self.attempts) < ATTEMPTS_MAX:
            self.attempts.append(attempt)
        return attempt

    def first_byte(self, attempt: Attempt, now_ns: int) -> Split | None:
        """``attempt`` gave its first body byte. The split of the request's TTFT, if it is the request's first one."""
        attempt.first_byte_ns = now_ns
        if self.first_byte_ns:
            return None
        engine_ns = now_ns - attempt.sent_ns
        self.first_byte_ns = now_ns
        self.split = Split(self.queue_ns, now_ns - self.arrival_ns - self.queue_ns - engine_ns, engine_ns)
        return self.split

    def finish(self, outcome: str, reason: str, now_ns: int) -> None:
        """It is over. Called once."""
        assert not self.ended_ns, f"request {self.request_id} ended twice: {self.reason}, then {reason}"
        self.wait_ends(now_ns)
        for attempt in self.attempts:
            attempt.close(now_ns, "ok" if outcome == "succeeded" else reason)
        self.outcome, self.reason, self.ended_ns = outcome, reason, now_ns

    # --- what it says -------------------------------------------------------------------------------------------------

    def line(self) -> dict[str, Any]:
        """The fields of its log line."""
        split = self.split
        ttft_ns = self.first_byte_ns - self.arrival_ns if self.first_byte_ns else None
        return {
            "event": EVENT,
            "id": self.request_id,
            "client_id": self.client_id,
            "trace_id": None if self.trace is None else self.trace.trace_id_hex,
            "key_id": self.key_id,
            "tenant": self.tenant,
            "class": None if self.priority is None else self.priority.value,
            "task": self.task,
            "model": self.model,
            "endpoint": self.endpoint,
            "stream": self.stream,
            "status": self.status,
            "outcome": self.outcome,
            "reason": self.reason,
            "replicas": [attempt.replica_id for attempt in self.attempts],
            "ends": [attempt.end for attempt in self.attempts],
            "attempts": self.attempts_seen,
            "resumed": self.resumed,
            "hedged": self.hedged,
            "queue_ms": _ms(split.queue_ns if split else self.queue_ns),
            "route_ms": _ms(split.route_ns) if split else None,
            "engine_ttft_ms": _ms(split.engine_ns) if split else None,
            "predicted_ttft_ms": None if self.predicted_ttft_ms is None else round(self.predicted_ttft_ms, 3),
            "ttft_ms": _ms(ttft_ns),
            "e2e_ms": _ms(self.ended_ns - self.arrival_ns),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "usd": None if self.usd is None else round(self.usd, 9),
        }


def _ms(ns: int | None) -> float | None:
    return None if ns is None else round(ns / 1e6, 3)


class RequestLog:
    """Lines of requests that are over, on their way into the gateway's log file, not to the console.

    They are handed to the logger together, when :data:`LINES_MAX` wait and with each :meth:`flush` (each quarter of a
    second, and at the gateway's end): one record of the logger costs ten lines. A gateway that is killed loses those
    of its last quarter of a second.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []

    def put(self, record: RequestRecord) -> None:
        """One request is over."""
        assert record.ended_ns, f"request {record.request_id} is not over"
        if not logger.isEnabledFor(logging.INFO):
            return
        self._lines.append(msgspec.json.encode(record.line()).decode())
        if len(self._lines) >= LINES_MAX:
            self.flush()

    def flush(self) -> None:
        """Hand over what waits."""
        if self._lines:
            lines, self._lines = self._lines, []
            logger.info("\n".join(lines), extra={"log_to_stderr": False})
