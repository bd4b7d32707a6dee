from __future__ import annotations

import asyncio

import pytest

from deployments.emulation.http import BODY_BYTES_MAX
from tests.unit.emulation.drive import CHAT, SLOW, Call, engine, until

GENERATE = {
    CHAT: {"messages": [{"role": "user", "content": "Name a river."}], "max_tokens": 2_000, "ignore_eos": True},
    "/v1/completions": {"prompt": "The river", "max_tokens": 2_000, "ignore_eos": True},
    "/v1/responses": {"input": "Name a river.", "max_output_tokens": 2_000, "ignore_eos": True},
    "/v1/messages": {"model": "m", "messages": [{"role": "user", "content": "Name a river."}], "max_tokens": 2_000},
}


async def test_stream_and_whole_answer_are_the_same_text() -> None:
    async with engine() as e:
        whole, stream = await e.chat().end(), await e.chat(stream=True).end()
        assert stream.text == whole.json["choices"][0]["message"]["content"]


async def test_two_engines_write_the_same_and_another_seed_writes_something_else() -> None:
    texts = []
    for seed in (0, 0, 1):
        async with engine(seed=seed) as e:
            texts.append((await e.chat(stream=True).end()).text)
    assert texts[0] == texts[1] != texts[2]


async def test_choices_differ() -> None:
    async with engine() as e:
        choices = (await e.chat(n=3, temperature=1).end()).json["choices"]
        assert len({c["message"]["content"] for c in choices}) == 3


async def test_cached_tokens_are_reported_and_kept_apart_by_salt() -> None:
    async with engine() as e:

        async def cached(**fields: object) -> int:
            answer = await e.chat("river " * 100, **fields).end()
            return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert await cached() == 0
        assert await cached() > 100
        assert await cached(cache_salt="tenant") == 0
        assert await cached(cache_salt="tenant") > 100


async def test_usage_event_comes_last_and_counts_right() -> None:
    async with engine() as e:
        call = await e.chat(stream=True, stream_options={"include_usage": True}).end()
        usage = call.events[-2]["usage"]
        assert call.events[-2]["choices"] == []
        assert usage["completion_tokens"] == 20
        assert usage["total_tokens"] == usage["prompt_tokens"] + 20


async def test_stop_string_is_neither_sent_nor_counted_twice() -> None:
    async with engine() as e:
        text = (await e.chat(max_tokens=100).end()).json["choices"][0]["message"]["content"]
        stop = text[10:15]
        call = await e.chat(max_tokens=100, stream=True, stop=stop).end()
        assert call.text == text[: text.index(stop)]
        last = call.events[-2]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", list(GENERATE))
async def test_client_that_leaves_aborts_its_work(path: str, stream: bool) -> None:
    async with engine(SLOW) as e:
        call = e.call(path, GENERATE[path] | {"stream": stream})
        await until(lambda: e.core.counters.generated_tokens >= 3)
        call.leave()
        await call.end()
        assert not e.core.scheduler.has_work
        assert (e.core.counters.aborted, e.core.counters.tokens_after_abort) == (1, 0)


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_leaves_the_queue_is_never_computed(stream: bool) -> None:
    async with engine(SLOW, running_seqs_max=1) as e:
        first, second = e.chat(max_tokens=200), e.chat("Other.", stream=stream)
        await until(lambda: e.core.counters.generated_tokens > 0 and bool(e.core.scheduler.waiting))
        second.leave()
        await second.end()
        assert not e.core.scheduler.waiting
        assert e.core.counters.prompt_tokens == e.core.scheduler.prefix_query_tokens_total
        first.leave()
        await first.end()


async def test_cancelled_handler_aborts_too() -> None:
    async with engine(SLOW) as e:
        call = e.chat(stream=True, max_tokens=500)
        await call.chunk(2)
        call.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.task
        assert not e.core.scheduler.has_work


async def test_client_that_leaves_before_its_body_is_here_starts_nothing() -> None:
    async with engine() as e:
        call = Call(e.app, CHAT, b"{")
        call._inbox._queue[0]["more_body"] = True  # type: ignore[attr-defined]
        call.leave()
        await call.end()
        assert call.status is None
        assert e.core.counters.steps == 0


async def test_body_over_the_limit_is_refused() -> None:
    async with engine() as e:
        assert (await e.call(CHAT, b" " * (BODY_BYTES_MAX + 1)).end()).status == 413


async def test_full_engine_answers_503() -> None:
    async with engine() as e:
        e.core.scheduler.waiting_max = 0
        call = await e.chat(stream=True).end()
        assert call.status == 503
        assert call.json["error"]["type"] == "ServiceUnavailableError"


async def test_many_requests_at_once_all_end_and_nothing_is_left() -> None:
    async with engine(running_seqs_max=4) as e:
        calls = [e.chat(f"{i}", stream=i % 2 == 0, max_tokens=1 + i % 7) for i in range(60)]
        for i, call in enumerate(calls):
            await call.end()
            assert call.status == 200
            assert call.complete, i
        assert not e.core.scheduler.has_work
        assert e.core.scheduler.pool.used_tokens == 0
        assert e.core._work.owners == {}


@pytest.mark.parametrize("path", list(GENERATE))
async def test_text_far_too_long_is_refused_as_too_long(path: str) -> None:
    long = "a" * 3_000_000
    asked = {
        CHAT: {"messages": [{"role": "user", "content": long}]},
        "/v1/completions": {"prompt": long},
        "/v1/responses": {"input": long},
        "/v1/messages": {"model": "m", "messages": [{"role": "user", "content": long}], "max_tokens": 5},
    }
    async with engine() as e:
        call = await e.call(path, asked[path]).end()
        assert call.status == 400
        assert "maximum context length is 2048" in call.json["error"]["message"]


async def test_context_is_full_to_the_last_token_and_no_further() -> None:
    async with engine(context_tokens_max=64) as e:
        fits = {"prompt": [7] * 60, "max_tokens": 4, "ignore_eos": True}
        assert (await e.call("/v1/completions", fits).end()).json["usage"]["total_tokens"] == 64
        assert (await e.call("/v1/completions", fits | {"max_tokens": 5}).end()).status == 400
        assert (await e.call("/v1/completions", {"prompt": [7] * 64, "max_tokens": 1}).end()).status == 400
