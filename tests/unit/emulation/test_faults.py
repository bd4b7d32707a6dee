from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import ValidationError

from deployments.emulation.faults import FaultBoard
from deployments.settings import FaultSettings
from tests.unit.emulation.drive import SLOW, engine


def test_changes_replace_what_they_name_and_are_checked() -> None:
    board, heard = FaultBoard(FaultSettings(silence_s=3)), []
    board.listen(lambda: heard.append(board.now.kind))
    board.change({"kind": "cut"})
    assert (board.now.kind, board.now.silence_s) == ("cut", 3)
    for wrong in ({"kindd": "cut"}, {"kind": "explode"}, {"share": 2}):
        with pytest.raises(ValidationError):
            board.change(wrong)
    assert heard == ["cut"]


def test_share_and_marker_choose_who_is_hit() -> None:
    board = FaultBoard(FaultSettings(kind="error", share=0.25, marker="x"), seed=1)
    assert not any(board.hits("abc") for _ in range(50))
    assert 150 < sum(board.hits("axc") for _ in range(1_000)) < 350
    assert not FaultBoard(FaultSettings(share=1)).hits("x")


async def test_engine_error_before_the_first_token_is_a_status_or_an_event() -> None:
    async with engine(faults=FaultSettings(kind="error")) as e:
        whole = await e.chat().end()
        assert whole.status == 500
        assert whole.json["error"]["type"] == "InternalServerError"
        stream = await e.chat(stream=True).end()
        assert stream.status == 200
        assert stream.events == [whole.json, "[DONE]"]
        assert stream.complete
        assert e.core.counters.aborted == 2


async def test_engine_error_after_tokens_is_one_event_in_the_stream() -> None:
    async with engine(faults=FaultSettings(kind="error", after_tokens=5)) as e:
        stream = await e.chat(stream=True).end()
        assert [("error" in event) for event in stream.events[:-1]] == [False] * 6 + [True]
        assert not any(c["finish_reason"] for event in stream.events[:6] for c in event["choices"])


async def test_error_of_messages_is_an_error_event_and_of_responses_a_cut() -> None:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}], "stream": True}
    async with engine(faults=FaultSettings(kind="error", after_tokens=2)) as e:
        messages = await e.call("/v1/messages", body).end()
        assert messages.events[-1]["type"] == "error"
        assert messages.complete
        responses = await e.call("/v1/responses", {"input": "a", "stream": True}).end()
        assert not responses.complete


@pytest.mark.parametrize("stream", [True, False])
async def test_cut_socket_is_a_response_without_its_end(stream: bool) -> None:
    async with engine(faults=FaultSettings(kind="cut", after_tokens=3)) as e:
        call = await e.chat(stream=stream).end()
        assert call.status == 200
        assert not call.complete
        assert "[DONE]" not in call.events


async def test_broken_event_comes_once_and_the_stream_goes_on() -> None:
    async with engine(faults=FaultSettings(kind="bad_json", after_tokens=2)) as e:
        call = await e.chat(stream=True).end()
        broken = [i for i, event in enumerate(call.events) if isinstance(event, str) and event != "[DONE]"]
        assert broken == [3]
        assert call.events[-1] == "[DONE]"
        whole = await e.chat().end()
        with pytest.raises(ValueError, match=r"Unterminated|Expecting"):
            whole.json  # noqa: B018 - parsing is the test


async def test_silence_lasts_as_told_then_the_socket_closes() -> None:
    async with engine(faults=FaultSettings(kind="silence", after_tokens=2, silence_s=0.05)) as e:
        call = await e.chat(stream=True).end()
        assert len(call.chunks) == 3
        assert not call.complete


async def test_client_may_leave_a_silent_stream() -> None:
    async with engine(faults=FaultSettings(kind="silence", after_tokens=2, silence_s=3_600)) as e:
        call = e.chat(stream=True)
        await call.chunk(3)
        call.leave()
        await call.end()


async def test_unavailable_engine_answers_503_to_those_hit() -> None:
    async with engine(faults=FaultSettings(kind="unavailable", marker="river")) as e:
        assert (await e.chat(stream=True).end()).status == 503
        assert (await e.chat("sea").end()).status == 200
        assert (e.core.counters.requests, e.core.counters.finished) == (2, 1)


async def test_health_is_answered_truly_never_or_with_503() -> None:
    async with engine() as e:
        assert (await e.call("/health", b"", "GET").end()).status == 200
        e.core.faults.change({"health": "failed"})
        assert (await e.call("/health", b"", "GET").end()).status == 503
        e.core.faults.change({"health": "blocked"})
        blocked = e.call("/health", b"", "GET")
        await asyncio.sleep(0.02)
        assert not blocked.task.done()
        assert (await e.chat().end()).status == 200
        e.core.faults.change({"health": "ok"})
        assert (await blocked.end()).status == 200


async def test_blocked_health_check_ends_when_its_client_leaves() -> None:
    async with engine(faults=FaultSettings(health="blocked")) as e:
        blocked = e.call("/health", b"", "GET")
        blocked.leave()
        await blocked.end()
        assert blocked.status is None


async def test_metrics_stop_freeze_and_go_nan() -> None:
    async def page(e: Any) -> bytes:
        call = await e.call("/metrics", b"", "GET").end()
        return bytes(call.body)

    async with engine() as e:
        before = await page(e)
        assert b'vllm:generation_tokens_total{engine="0",model_name="m"} 0' in before
        e.core.faults.change({"signals": "freeze"})
        await e.chat().end()
        assert await page(e) == before
        e.core.faults.change({"signals": "ok"})
        assert b'vllm:generation_tokens_total{engine="0",model_name="m"} 20' in await page(e)
        e.core.faults.change({"signals": "nan"})
        assert (await page(e)).count(b" NaN") == before.count(b"# TYPE")
        e.core.faults.change({"signals": "stop"})
        assert await page(e) == b""


async def test_fault_set_while_a_stream_runs_does_not_hit_it() -> None:
    async with engine(SLOW) as e:
        call = e.chat(stream=True)
        await call.chunk(2)
        e.core.faults.change({"kind": "error", "slow_factor": 0.01})
        assert (await call.end()).events[-1] == "[DONE]"
        assert (await e.chat().end()).status == 500
