"""Hands the spans of finished requests to OpenTelemetry's exporter, which sends them as OTLP over HTTP.

Imported only where traces are on. Spans wait for the exporter's thread in a queue of :data:`SPANS_MAX`; where those of
a request do not fit, all of them are dropped and counted: requests never wait for a collector, and a trace is whole or
missing. What the collector does not take after :data:`EXPORT_S_MAX` of repetitions is lost and counted too.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from opentelemetry import trace as api
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from deployments.tracing import Span, TraceContext

SPANS_MAX = 8_192
"""Spans that wait to be exported, or are being exported."""
EXPORT_EVERY_S = 1.0
EXPORT_SPANS_MAX = 512
"""Spans of one export."""
EXPORT_S_MAX = 5.0
"""One export's time, repetitions included."""
CLOSE_S_MAX = 5.0
"""Longest wait for the last spans when a gateway ends."""

_KINDS = {"gateway.request": api.SpanKind.SERVER, "attempt": api.SpanKind.CLIENT}


class Exporter:
    """Called from one event loop; never waits, but for :meth:`close`."""

    def __init__(self, endpoint: str, service_name: str, instance: str, spans_max: int = SPANS_MAX) -> None:
        self._spans_max = spans_max
        self._put = self._dropped = 0
        self._told = (0, 0, 0)
        self._ids = _GivenIds()
        self._otlp = _CountingExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_S_MAX)
        resource = Resource.create({"service.name": service_name, "service.instance.id": instance})
        self._provider = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False, id_generator=self._ids)
        processor = BatchSpanProcessor(
            self._otlp,
            max_queue_size=spans_max,
            schedule_delay_millis=EXPORT_EVERY_S * 1_000,
            max_export_batch_size=min(EXPORT_SPANS_MAX, spans_max),
            export_timeout_millis=EXPORT_S_MAX * 1_000,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("tidegate")

    def put(self, trace: TraceContext, spans: Sequence[Span], wall_minus_clock_ns: int) -> None:
        """Hand over the spans of one request, the root first. Their times plus ``wall_minus_clock_ns`` are Unix ns."""
        if self._put - self._otlp.taken - self._otlp.failed + len(spans) > self._spans_max:
            self._dropped += len(spans)
            return
        self._put += len(spans)
        parent = _below(trace.trace_id, trace.parent_span_id, remote=True) if trace.parent_span_id else Context()
        for span in spans:
            self._ids.trace_id, self._ids.span_id = trace.trace_id, span.span_id
            made = self._tracer.start_span(
                span.name,
                parent,
                _KINDS.get(span.name, api.SpanKind.INTERNAL),
                span.attributes,
                start_time=span.begin_ns + wall_minus_clock_ns,
            )
            if span.first_byte_ns:
                made.add_event("first_byte", timestamp=span.first_byte_ns + wall_minus_clock_ns)
            if span.failed:
                made.set_status(api.StatusCode.ERROR)
            made.end(span.end_ns + wall_minus_clock_ns)
            if span is spans[0]:
                parent = _below(trace.trace_id, trace.span_id, remote=False)

    def take_counts(self) -> tuple[int, int, int]:
        """Spans exported, spans the collector did not take, and spans dropped, since the last call."""
        now, told = (self._otlp.taken, self._otlp.failed, self._dropped), self._told
        self._told = now
        return now[0] - told[0], now[1] - told[1], now[2] - told[2]

    def close(self) -> None:
        """Export what waits; blocks for at most :data:`CLOSE_S_MAX`."""
        ending = threading.Thread(target=self._provider.shutdown, name="tidegate-tracing-close", daemon=True)
        ending.start()
        ending.join(CLOSE_S_MAX)


def _below(trace_id: int, span_id: int, *, remote: bool) -> Context:
    """The context in which a span is a child of ``span_id``."""
    context = api.SpanContext(trace_id, span_id, remote, api.TraceFlags(api.TraceFlags.SAMPLED))
    return api.set_span_in_context(api.NonRecordingSpan(context), Context())


class _GivenIds(IdGenerator):
    """Ids that were chosen before: replicas have been told them already."""

    def __init__(self) -> None:
        self.trace_id = self.span_id = 0

    def generate_span_id(self) -> int:
        return self.span_id

    def generate_trace_id(self) -> int:
        return self.trace_id


class _CountingExporter(OTLPSpanExporter):
    """Counts, in the processor's one thread, what the collector took."""

    taken = 0
    failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        if result is SpanExportResult.SUCCESS:
            self.taken += len(spans)
        else:
            self.failed += len(spans)
        return result
