"""OpenTelemetry traces of requests, where ``tracing.otlp_endpoint`` is set. Otherwise nothing here runs or is imported.

    gateway.request
      queue      one for each wait, for a turn or for a replica
      route      from arrival, a wait's end or a failed attempt to the next dispatch: the gateway's own work
      attempt    one for each dispatch; its id goes to the replica in ``traceparent``, so an engine's spans lie below it

Spans are made from the request's record (``deployments/request_log.py``) when it is over, so a traced request costs its
ids and its ``traceparent`` while it runs, and what is reported is what the log line says.

A client's ``traceparent`` decides whether its request is traced; without one, ``sample_share`` does. Replicas are told
either way: an engine with tracing on would else begin traces of its own for requests that are not traced here.
``tracestate`` is not passed on. Spans hold sizes, times, ids and codes, never text.

``tracing_export.py`` hands the spans to OpenTelemetry.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deployments.clock import now_ns
from deployments.request_log import Attempt, RequestRecord

if TYPE_CHECKING:
    from deployments.settings import Settings
    from deployments.tracing_export import Exporter

_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_SAMPLED = 1


@dataclass(slots=True)
class TraceContext:
    """The ids of one request. Made by :meth:`Tracing.begin`."""

    trace_id: int
    span_id: int
    """Of ``gateway.request``."""
    parent_span_id: int
    """The caller's span; 0: there is none."""
    sampled: bool
    ids: random.Random

    @property
    def trace_id_hex(self) -> str:
        """32 digits."""
        return f"{self.trace_id:032x}"

    def new_span_id(self) -> int:
        """An id for a span of this trace; 0 where it is not traced."""
        return self.ids.getrandbits(64) or 1 if self.sampled else 0

    def traceparent(self, attempt: Attempt) -> str:
        """Header for the replica that ``attempt`` goes to."""
        return f"00-{self.trace_id:032x}-{attempt.span_id or self.span_id:016x}-{int(self.sampled):02x}"


def read_traceparent(value: bytes) -> tuple[int, int, bool] | None:
    """Trace id, span id and whether the caller traces; ``None`` for what is not a valid header (W3C Trace Context)."""
    match = _TRACEPARENT.fullmatch(value) if len(value) <= 256 else None
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == b"ff" or (version == b"00" and more):
        return None
    ids = int(trace_id, 16), int(span_id, 16)
    return (*ids, bool(int(flags, 16) & _SAMPLED)) if all(ids) else None


class Tracing:
    """Begins and ends traces, on one event loop."""

    def __init__(self, exporter: Exporter, sample_share: float, ids: random.Random | None = None) -> None:
        self._exporter = exporter
        self._share = sample_share
        self._ids = ids or random.Random()

    def begin(self, traceparent: bytes | None) -> TraceContext:
        """The context of a request that came with ``traceparent``."""
        ids = self._ids
        parent = read_traceparent(traceparent) if traceparent is not None else None
        trace_id, parent_span_id, sampled = parent or (ids.getrandbits(128) or 1, 0, ids.random() < self._share)
        return TraceContext(trace_id, ids.getrandbits(64) or 1, parent_span_id, sampled, ids)

    def end(self, record: RequestRecord) -> None:
        """Export the spans of a request that is over."""
        trace = record.trace
        if trace is None or not trace.sampled:
            return
        spans = list(_spans(record, trace))
        self._exporter.put(trace, spans, time.time_ns() - now_ns())

    def take_counts(self) -> tuple[int, int, int]:
        """Spans exported, spans the collector did not take, and spans dropped, since the last call."""
        return self._exporter.take_counts()

    def close(self) -> None:
        """Export what waits; blocks for some seconds at most."""
        self._exporter.close()


def open_tracing(settings: Settings, instance: str) -> Tracing | None:
    """Tracing for one gateway, ``instance``; ``None`` where no collector is configured."""
    tracing = settings.tracing
    if tracing.otlp_endpoint is None:
        return None
    from deployments.tracing_export import Exporter

    exporter = Exporter(tracing.otlp_endpoint, tracing.service_name, instance)
    return Tracing(exporter, tracing.sample_share)


@dataclass(frozen=True, slots=True)
class Span:
    """One span before it is handed over. Times in ns of the gateway's clock."""

    name: str
    span_id: int
    begin_ns: int
    end_ns: int
    attributes: dict[str, str | int | float | bool]
    failed: bool = False
    first_byte_ns: int = 0


def _spans(record: RequestRecord, trace: TraceContext) -> Iterator[Span]:
    """The root first. Names of attributes are OpenTelemetry's where it has one."""
    yield Span(
        "gateway.request",
        trace.span_id,
        record.arrival_ns,
        record.ended_ns,
        _known(_request_attributes(record)),
        failed=record.outcome == "failed",
        first_byte_ns=record.first_byte_ns,
    )
    for begin_ns, end_ns in record.waits:
        yield Span("queue", trace.new_span_id(), begin_ns, end_ns, {})
    for attempt in record.attempts:
        if not attempt.hedge:
            since_ns = _before(record, attempt)
            if attempt.sent_ns > since_ns:
                yield Span("route", trace.new_span_id(), since_ns, attempt.sent_ns, {})
        yield Span(
            "attempt",
            attempt.span_id,
            attempt.sent_ns,
            attempt.ended_ns,
            {
                "tidegate.replica": attempt.replica_id,
                "tidegate.end": attempt.end,
                "tidegate.resume": attempt.resume,
                "tidegate.hedge": attempt.hedge,
            },
            failed=attempt.end != "ok",
            first_byte_ns=attempt.first_byte_ns,
        )


def _before(record: RequestRecord, attempt: Attempt) -> int:
    """When the last thing before ``attempt`` was over."""
    ends = [end_ns for _, end_ns in record.waits]
    ends += [other.ended_ns for other in record.attempts if other is not attempt]
    return max((end_ns for end_ns in ends if 0 < end_ns <= attempt.sent_ns), default=record.arrival_ns)


def _request_attributes(record: RequestRecord) -> dict[str, str | int | float | bool | None]:
    split = record.split
    return {
        "http.request.method": "POST",
        "http.route": record.endpoint,
        "http.response.status_code": record.status,
        "gen_ai.request.model": record.model,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "tidegate.request_id": record.request_id,
        "tidegate.tenant": record.tenant,
        "tidegate.class": None if record.priority is None else record.priority.value,
        "tidegate.task": record.task or None,
        "tidegate.outcome": record.outcome,
        "tidegate.reason": record.reason,
        "tidegate.attempts": record.attempts_seen,
        "tidegate.resumed": record.resumed,
        "tidegate.hedged": record.hedged,
        "tidegate.queue_ms": split.queue_ns / 1e6 if split else None,
        "tidegate.route_ms": split.route_ns / 1e6 if split else None,
        "tidegate.engine_ttft_ms": split.engine_ns / 1e6 if split else None,
    }


def _known(attributes: dict[str, str | int | float | bool | None]) -> dict[str, str | int | float | bool]:
    return {name: value for name, value in attributes.items() if value is not None}
