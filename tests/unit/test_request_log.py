"""The record of one request and its log line."""

from __future__ import annotations

import json
import logging

import pytest

from deployments.meter import Meter
from deployments.request_log import ATTEMPTS_MAX, LINES_MAX, RequestLog, RequestRecord, Split
from policies.types import Priority

MS = 1_000_000
CHAT = "/v1/chat/completions"


def _write(record: RequestRecord) -> None:
    log = RequestLog()
    log.put(record)
    log.flush()


def _record() -> RequestRecord:
    return RequestRecord("tg-1", CHAT, arrival_ns=1_000 * MS, tenant="acme", priority=Priority.BATCH, stream=True)


def test_the_parts_of_the_ttft_add_up_and_a_failed_attempt_is_in_the_route_part() -> None:
    record = _record()
    record.wait_begins(1_002 * MS)
    record.wait_ends(1_012 * MS)
    first = record.sent("a", 1_013 * MS)
    first.close(1_020 * MS, "reset")
    second = record.sent("b", 1_021 * MS)
    split = record.first_byte(second, 1_051 * MS)
    assert split == Split(10 * MS, 11 * MS, 30 * MS)
    assert split.queue_ns + split.route_ns + split.engine_ns == 51 * MS


def test_a_wait_after_the_first_byte_does_not_change_the_split() -> None:
    record = _record()
    record.first_byte(record.sent("a", 1_001 * MS), 1_030 * MS)
    record.wait_begins(1_040 * MS)
    record.wait_ends(1_050 * MS)
    assert record.first_byte(record.sent("b", 1_050 * MS, resume=True), 1_060 * MS) is None
    record.finish("succeeded", "ok", 1_070 * MS)
    line = record.line()
    assert (line["queue_ms"], line["route_ms"], line["engine_ttft_ms"], line["ttft_ms"]) == (0, 1, 29, 30)
    assert (line["resumed"], line["replicas"], line["attempts"]) == (1, ["a", "b"], 2)


def test_a_second_end_is_a_mistake_that_shows() -> None:
    record = _record()
    record.finish("failed", "reset", 1_010 * MS)
    with pytest.raises(AssertionError, match="ended twice: reset, then ok"):
        record.finish("succeeded", "ok", 1_011 * MS)


def test_a_request_that_is_not_over_has_no_line() -> None:
    with pytest.raises(AssertionError, match="is not over"):
        _write(_record())


def test_what_nobody_knows_is_null_and_not_zero() -> None:
    record = _record()
    record.wait_begins(1_002 * MS)
    record.finish("refused", "deadline", 1_004 * MS)
    line = record.line()
    unknown = ("ttft_ms", "route_ms", "engine_ttft_ms", "prompt_tokens", "cached_tokens", "output_tokens", "usd")
    assert [line[name] for name in unknown] == [None] * len(unknown)
    assert (line["queue_ms"], line["e2e_ms"], line["replicas"]) == (2, 4, [])


def test_attempts_that_run_at_the_end_end_with_the_request_and_others_keep_their_own() -> None:
    record = _record()
    record.sent("a", 1_001 * MS).close(1_002 * MS, "draining")
    record.sent("b", 1_002 * MS)
    record.sent("c", 1_003 * MS, hedge=True).close(1_009 * MS, "hedge_lost")
    record.finish("succeeded", "ok", 1_010 * MS)
    assert record.line()["ends"] == ["draining", "ok", "hedge_lost"]
    assert record.hedged


def test_only_the_attempt_that_answered_ends_well() -> None:
    record = _record()
    record.sent("a", 1_001 * MS)
    record.sent("b", 1_002 * MS)
    record.finish("succeeded", "ok", 1_010 * MS)
    assert record.line()["ends"] == ["left", "ok"]


def test_a_record_keeps_a_bounded_number_of_attempts_and_waits_and_counts_all() -> None:
    record = _record()
    for n in range(3 * ATTEMPTS_MAX):
        record.wait_begins(2_000 * MS + n)
        record.wait_ends(2_000 * MS + n + 1)
        record.sent("a", 2_000 * MS + n)
    assert (len(record.attempts), len(record.waits)) == (ATTEMPTS_MAX, ATTEMPTS_MAX)
    assert (record.attempts_seen, record.queue_ns) == (3 * ATTEMPTS_MAX, 3 * ATTEMPTS_MAX)


def test_one_request_is_one_line_of_json_whatever_its_ids_hold(caplog: pytest.LogCaptureFixture) -> None:
    record = _record()
    record.task = 'goal"\n{"event": "request_end"}\u2028'
    record.finish("succeeded", "ok", 1_010 * MS)
    with caplog.at_level(logging.INFO, "ray.serve"):
        logging.getLogger("ray.serve").addHandler(caplog.handler)
        try:
            _write(record)
        finally:
            logging.getLogger("ray.serve").removeHandler(caplog.handler)
    lines = {entry.getMessage() for entry in caplog.records}
    assert len(lines) == 1
    text = lines.pop()
    assert "\n" not in text
    assert json.loads(text)["task"] == record.task


def test_the_split_is_counted_by_class() -> None:
    meter = Meter("g", "m")
    meter.split(10 * MS, 400_000, 30 * MS, Priority.BATCH)
    text = meter.telemetry.render().decode()
    assert 'tidegate_queue_seconds_sum{priority="batch"} 0.01' in text
    assert "tidegate_engine_ttft_seconds_sum 0.03" in text
    assert 'tidegate_route_seconds_bucket{le="0.0002"} 0.0' in text
    assert 'tidegate_route_seconds_bucket{le="0.0005"} 1.0' in text


def test_lines_wait_for_each_other_and_none_is_lost_or_written_twice(caplog: pytest.LogCaptureFixture) -> None:
    log, count = RequestLog(), LINES_MAX + 3
    with caplog.at_level(logging.INFO, "ray.serve"):
        logging.getLogger("ray.serve").addHandler(caplog.handler)
        try:
            for i in range(count):
                record = _record()
                record.task = f"task-{i}"
                record.finish("succeeded", "ok", 1_010 * MS)
                log.put(record)
            assert len({id(entry) for entry in caplog.records}) == 1, "the first full lot"
            log.flush()
            log.flush()
        finally:
            logging.getLogger("ray.serve").removeHandler(caplog.handler)
    texts = {id(entry): entry.getMessage() for entry in caplog.records}
    lines = [json.loads(line)["task"] for text in texts.values() for line in text.split("\n")]
    assert lines == [f"task-{i}" for i in range(count)]
