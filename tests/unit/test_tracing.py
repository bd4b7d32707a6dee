"""Traces of requests, as an OpenTelemetry collector gets them over HTTP."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from deployments.clock import now_ns
from deployments.request_log import RequestRecord
from deployments.settings import Settings, SettingsError
from deployments.tracing import Tracing, open_tracing, read_traceparent
from deployments.tracing_export import Exporter
from policies.types import Priority
from tests.collector import Collector

MS = 1_000_000
PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOT_TRACED = PARENT[:-1] + b"0"


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def _tracing(collector: Collector, share: float = 1.0, spans_max: int = 1_000) -> Tracing:
    exporter = Exporter(collector.url, "tidegate", "gateway-1", spans_max)
    return Tracing(exporter, share, random.Random(7))


def _ended(tracing: Tracing, traceparent: bytes | None = None) -> tuple[RequestRecord, list[str]]:
    """A request that waited 10 ms, was refused by one replica and answered by another; what replicas were told."""
    begin_ns = now_ns()
    record = RequestRecord("tg-1", "/v1/chat/completions", arrival_ns=begin_ns, tenant="acme", priority=Priority.BATCH)
    record.trace = trace = tracing.begin(traceparent)
    record.wait_begins(begin_ns + 1 * MS)
    record.wait_ends(begin_ns + 11 * MS)
    first = record.sent("a", begin_ns + 12 * MS)
    first.close(begin_ns + 15 * MS, "draining")
    second = record.sent("b", begin_ns + 16 * MS)
    record.first_byte(second, begin_ns + 46 * MS)
    record.status, record.prompt_tokens, record.output_tokens = 200, 12, 5
    record.finish("succeeded", "ok", begin_ns + 60 * MS)
    tracing.end(record)
    return record, [trace.traceparent(first), trace.traceparent(second)]


def _attributes(span: OtlpSpan) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}


@pytest.mark.slow
def test_a_request_becomes_one_tree_of_spans_below_the_callers(collector: Collector) -> None:
    tracing = _tracing(collector)
    _, told = _ended(tracing, PARENT)
    tracing.close()
    spans = collector.spans()
    root = next(span for span in spans if span.name == "gateway.request")
    assert root.parent_span_id.hex() == "b7ad6b7169203331"
    assert {span.trace_id.hex() for span in spans} == {"0af7651916cd43dd8448eb211c80319c"}
    children = sorted((s for s in spans if s is not root), key=lambda s: s.start_time_unix_nano)
    assert {span.parent_span_id for span in children} == {root.span_id}
    origin_ns = root.start_time_unix_nano
    at = [((s.start_time_unix_nano - origin_ns) // MS, (s.end_time_unix_nano - origin_ns) // MS) for s in children]
    assert [span.name for span in children] == ["queue", "route", "attempt", "route", "attempt"]
    assert at == [(1, 11), (11, 12), (12, 15), (15, 16), (16, 60)]
    attempts = [span for span in children if span.name == "attempt"]
    assert told == [f"00-{root.trace_id.hex()}-{span.span_id.hex()}-01" for span in attempts]
    assert [span.status.code for span in attempts] == [Status.STATUS_CODE_ERROR, Status.STATUS_CODE_UNSET]
    assert [span.kind for span in attempts] == [OtlpSpan.SPAN_KIND_CLIENT] * 2
    assert collector.paths == {"/v1/traces"}
    assert tracing.take_counts() == (6, 0, 0)


def test_what_a_span_says_is_what_the_log_line_says(collector: Collector) -> None:
    tracing = _tracing(collector)
    record, _ = _ended(tracing)
    tracing.close()
    root = next(span for span in collector.spans() if span.name == "gateway.request")
    said, line = _attributes(root), record.line()
    assert (root.kind, root.parent_span_id, root.status.code) == (OtlpSpan.SPAN_KIND_SERVER, b"", 0)
    assert root.trace_id.hex() == line["trace_id"]
    assert said["tidegate.engine_ttft_ms"] == line["engine_ttft_ms"] == 30
    assert said["tidegate.queue_ms"] == line["queue_ms"] == 10
    assert said["gen_ai.usage.input_tokens"] == line["prompt_tokens"] == 12
    assert (said["tidegate.class"], said["http.response.status_code"]) == (line["class"], line["status"])
    resource = collector.requests[0].resource_spans[0].resource
    assert {"service.name": "tidegate", "service.instance.id": "gateway-1"}.items() <= {
        pair.key: pair.value.string_value for pair in resource.attributes
    }.items()


def test_a_caller_that_does_not_trace_is_followed_and_replicas_are_told(collector: Collector) -> None:
    tracing = _tracing(collector)
    record, told = _ended(tracing, NOT_TRACED)
    tracing.close()
    assert record.trace is not None
    assert told == [f"00-0af7651916cd43dd8448eb211c80319c-{record.trace.span_id:016x}-00"] * 2
    assert collector.requests == []


def test_without_a_caller_the_share_decides(collector: Collector) -> None:
    tracing = _tracing(collector, share=0.2)
    traced = sum(tracing.begin(None).sampled for _ in range(2_000))
    assert 300 < traced < 500
    tracing.close()


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"ff" + PARENT[2:],
        PARENT.upper(),
        PARENT + b"-more",
        PARENT.replace(b"0af7651916cd43dd8448eb211c80319c", b"0" * 32),
        PARENT.replace(b"b7ad6b7169203331", b"0" * 16),
        PARENT[:-1],
        b"cc" + PARENT[2:] + b"-" + b"x" * 1_000,
        b"\xff" * 55,
    ],
)
def test_a_header_that_is_not_valid_is_no_header(value: bytes) -> None:
    assert read_traceparent(value) is None


def test_a_later_version_of_the_header_is_read_as_far_as_it_is_known() -> None:
    assert read_traceparent(b"cc" + PARENT[2:] + b"-what-comes") == read_traceparent(PARENT)


def test_requests_never_wait_for_a_collector_and_what_does_not_fit_is_dropped_whole(collector: Collector) -> None:
    collector.gate.clear()
    tracing = _tracing(collector, spans_max=20)
    for _ in range(10):
        _ended(tracing)
    collector.gate.set()
    tracing.close()
    assert tracing.take_counts() == (18, 0, 42)
    assert len(collector.spans()) == 18
    assert sum(span.name == "gateway.request" for span in collector.spans()) == 3


def test_what_the_collector_refuses_is_counted_and_makes_room_again(collector: Collector) -> None:
    collector.status = 400
    tracing = _tracing(collector, spans_max=6)
    _ended(tracing)
    tracing.close()
    assert tracing.take_counts() == (0, 6, 0)
    assert tracing.take_counts() == (0, 0, 0)


def test_a_gateway_ends_although_its_collector_does_not_answer(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.tracing_export.CLOSE_S_MAX", 0.1)
    collector.gate.clear()
    tracing = _tracing(collector)
    _ended(tracing)
    tracing.close()
    assert tracing.take_counts() == (0, 0, 0)


@pytest.mark.slow
def test_switched_off_nothing_of_opentelemetry_is_imported() -> None:
    program = (
        "import sys\n"
        "from deployments.settings import Settings\n"
        "from deployments.tracing import open_tracing\n"
        "assert open_tracing(Settings(), 'g') is None\n"
        "sys.exit(any(name.startswith('opentelemetry.sdk') for name in sys.modules))\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_switched_on_by_the_settings_alone(collector: Collector) -> None:
    settings = Settings.load({"tracing": {"otlp_endpoint": collector.url + "/", "sample_share": 1.0}})
    tracing = open_tracing(settings, "g")
    assert tracing is not None
    _ended(tracing)
    tracing.close()
    assert len(collector.spans()) == 6


@pytest.mark.parametrize("url", ["127.0.0.1:4318", "http://", "ftp://h", "http://user:word@h:1", "http://h/?q=1"])
def test_a_wrong_address_stops_the_start(url: str) -> None:
    with pytest.raises(SettingsError, match=r"tracing\.otlp_endpoint: .*: must be a URL such as"):
        Settings.load({"tracing": {"otlp_endpoint": url}})


def test_tuning_what_is_off_stops_the_start() -> None:
    with pytest.raises(SettingsError, match=r"tracing: has no effect because tracing\.otlp_endpoint is not set"):
        Settings.load({"tracing": {"sample_share": 0.5}})
