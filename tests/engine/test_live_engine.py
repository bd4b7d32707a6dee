"""Real vLLM behind the replica's own port: answers, gate, live knobs, step records, aborts, health, leaving."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import uuid
from pathlib import Path
from typing import Any

import httpx
import pytest

from policies.types import Knobs
from tests import loopback
from tests.engine.conftest import APP, MODEL_NAME, RUNNING_SEQS, STEP_TOKENS, STUCK_AFTER_S, Engine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def prompt(words: int) -> str:
    """A prompt nobody has sent before, about two tokens a word."""
    start = uuid.uuid4().hex
    return f"{start} " + " ".join(f"item{n}" for n in range(words))


def completion(words: int = 5, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL_NAME, "prompt": prompt(words), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return body | fields


async def complete(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post(COMPLETIONS, json=completion(**fields))
    assert response.status_code == 200, response.text
    usage: dict[str, Any] = response.json()["usage"]
    return usage


# --- answers and the gate ---------------------------------------------------------------------------------------------


async def test_it_answers_sensibly_and_says_what_was_cached(engine: Engine, client: httpx.AsyncClient) -> None:
    system = "You are a helpful assistant who answers questions in one short and friendly sentence. " * 20
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    body = {"model": MODEL_NAME, "messages": messages, "max_tokens": 24, "temperature": 0}
    first = (await client.post(CHAT, json=body)).json()
    assert "Paris" in first["choices"][0]["message"]["content"]
    before = await engine.gauges()
    second = (await client.post(CHAT, json=body)).json()
    after = await engine.gauges()
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    assert after.prefix_hit_tokens_total - before.prefix_hit_tokens_total == cached
    assert after.prefix_query_tokens_total - before.prefix_query_tokens_total == second["usage"]["prompt_tokens"]
    assert second["choices"][0]["message"]["content"] == first["choices"][0]["message"]["content"]


async def test_the_model_has_the_configured_name(client: httpx.AsyncClient) -> None:
    models = (await client.get("/v1/models")).json()["data"]
    assert [m["id"] for m in models] == [MODEL_NAME]


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", CHAT, "/docs", "/nothing"])
@pytest.mark.parametrize("token", [None, "wrong"])
async def test_nothing_is_served_without_the_token(running_engine: Engine, path: str, token: str | None) -> None:
    async with loopback.AsyncClient(headers={"x-tidegate-gate": token} if token else {}) as stranger:
        for method in ("GET", "POST"):
            response = await stranger.request(method, running_engine.url + path)
            assert response.status_code == 403
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nothing", 404), ("GET", CHAT, 405)])
async def test_errors_of_the_framework_have_openais_shape(
    client: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    response = await client.request(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


# --- knobs ------------------------------------------------------------------------------------------------------------


async def test_the_number_of_running_sequences_moves_between_two_steps(
    engine: Engine, client: httpx.AsyncClient
) -> None:
    widest = {}
    for cap in (4, None):
        await engine.knobs(Knobs(running_seqs_max=cap))
        seq = await engine.last_seq()
        await asyncio.gather(*[complete(client, max_tokens=12) for _ in range(RUNNING_SEQS)])
        widest[cap] = max(s.running for s in await engine.steps(seq))
        assert (await engine.gauges()).running_seqs_now == (cap or RUNNING_SEQS)
    assert widest[4] == 4
    assert widest[None] > 8


async def test_a_lower_cap_lets_running_sequences_finish(engine: Engine, client: httpx.AsyncClient) -> None:
    first = [asyncio.create_task(complete(client, max_tokens=60)) for _ in range(8)]
    await engine.until(lambda g: g.running == 8, 30)
    await engine.knobs(Knobs(running_seqs_max=2))
    seq = await engine.last_seq()
    late = [asyncio.create_task(complete(client, max_tokens=6)) for _ in range(4)]
    usages = await asyncio.gather(*first, *late)
    assert [u["completion_tokens"] for u in usages] == [60] * 8 + [6] * 4
    steps = await engine.steps(seq)
    assert max(s.running for s in steps) <= 8
    assert max(s.running for s in steps[-5:]) <= 2
    assert sum(s.preempted for s in steps) == 0


async def test_the_token_budget_bounds_a_step_while_streams_decode(engine: Engine, client: httpx.AsyncClient) -> None:
    largest = {}
    for budget in (128, None):
        await engine.knobs(Knobs(step_tokens_max=budget))
        stream = asyncio.create_task(complete(client, max_tokens=40))
        await engine.until(lambda g: g.running == 1, 30)
        seq = await engine.last_seq()
        await complete(client, words=120, max_tokens=2)
        await stream
        largest[budget] = max(s.prefill_tokens + s.decode_seqs for s in await engine.steps(seq))
    assert 64 < largest[128] <= 128
    assert 200 < largest[None] <= STEP_TOKENS


async def test_knobs_above_the_start_up_values_change_nothing(engine: Engine, client: httpx.AsyncClient) -> None:
    await engine.knobs(Knobs(10_000, 10_000_000, 50))
    await complete(client)
    gauges = await engine.gauges()
    assert (gauges.running_seqs_now, gauges.step_tokens_now) == (RUNNING_SEQS, STEP_TOKENS)
    assert gauges.speculative_depth_now is None


# --- records ----------------------------------------------------------------------------------------------------------


async def test_records_add_up_to_what_clients_were_told(engine: Engine, client: httpx.AsyncClient) -> None:
    seq, before = await engine.last_seq(), await engine.gauges()
    requests = [complete(client, words=8 * n, max_tokens=5 + n) for n in range(1, 9)]
    usages = await asyncio.gather(*requests)
    steps, after = await engine.steps(seq), await engine.until(lambda g: g.work_since_ns == 0, 10)
    assert sum(s.output_tokens or 0 for s in steps) == sum(u["completion_tokens"] for u in usages)
    cached = sum((u["prompt_tokens_details"] or {}).get("cached_tokens") or 0 for u in usages)
    assert sum(s.prefill_tokens for s in steps) == sum(u["prompt_tokens"] for u in usages) - cached
    # every token but a request's first comes from a decode step
    assert sum(s.decode_seqs for s in steps) == sum(u["completion_tokens"] - 1 for u in usages)
    assert after.finished_total - before.finished_total == len(usages)
    assert after.aborted_total == before.aborted_total
    assert all(0 < s.running <= RUNNING_SEQS and s.duration_us > 0 for s in steps)
    assert all(0 < s.kv_tokens <= after.kv_tokens_max for s in steps)
    assert [s.seq for s in steps] == list(range(seq + 1, seq + 1 + len(steps)))
    assert all(b.start_ns >= a.start_ns + a.duration_us * 1000 for a, b in itertools.pairwise(steps))


async def test_an_idle_engine_holds_nothing(engine: Engine) -> None:
    gauges = await engine.gauges()
    assert (gauges.running, gauges.waiting, gauges.prefill_backlog_tokens, gauges.kv_tokens_used) == (0, 0, 0, 0)
    assert (gauges.running_seqs_hard, gauges.step_tokens_hard) == (RUNNING_SEQS, STEP_TOKENS)
    assert gauges.kv_tokens_max > 10_000


async def test_a_report_says_what_happened(engine: Engine, client: httpx.AsyncClient) -> None:
    await engine.handle.report.remote()
    usage = await complete(client, words=100, max_tokens=20)
    report = await engine.handle.report.remote()
    # the replica's own report loop may have closed a window in between: never more than was asked for
    assert 0 <= report.decode_tokens <= usage["completion_tokens"]
    assert 0 <= report.prefill_tokens <= usage["prompt_tokens"]
    assert report.step_model.samples > 0
    assert report.step_model.a_ms + report.step_model.b_ms > 0
    assert report.gpu_utilisation_share is None
    assert report.cold_start_ms > 1_000
    stats = await engine.handle.record_routing_stats.remote()
    assert stats["state"] == "ready"
    json.dumps(stats)


# --- clients that leave -----------------------------------------------------------------------------------------------


async def test_a_stream_that_is_left_is_aborted(engine: Engine, client: httpx.AsyncClient) -> None:
    before = await engine.gauges()
    async with client.stream("POST", COMPLETIONS, json=completion(max_tokens=1_500, stream=True)) as response:
        seen = 0
        async for line in response.aiter_lines():
            seen += line.startswith("data:")
            if seen == 3:
                break
    after = await engine.until(lambda g: g.work_since_ns == 0, 2)
    assert (after.running, after.kv_tokens_used) == (0, 0)
    assert after.aborted_total == before.aborted_total + 1


async def test_an_answer_nobody_waits_for_is_aborted(engine: Engine, client: httpx.AsyncClient) -> None:
    before = await engine.gauges()
    waiting = asyncio.create_task(client.post(COMPLETIONS, json=completion(max_tokens=1_500)))
    await engine.until(lambda g: g.running == 1, 30)
    waiting.cancel()
    after = await engine.until(lambda g: g.work_since_ns == 0, 2)
    assert after.aborted_total == before.aborted_total + 1


async def test_a_queued_request_is_aborted_too(engine: Engine, client: httpx.AsyncClient) -> None:
    await engine.knobs(Knobs(running_seqs_max=1))
    running = asyncio.create_task(complete(client, max_tokens=60))
    await engine.until(lambda g: g.running == 1, 30)
    queued = asyncio.create_task(client.post(COMPLETIONS, json=completion(max_tokens=1_500)))
    await engine.until(lambda g: g.waiting == 1, 30)
    queued.cancel()
    await engine.until(lambda g: g.waiting == 0, 2)
    assert not running.done()
    assert (await running)["completion_tokens"] == 60


# --- health and leaving -----------------------------------------------------------------------------------------------


async def test_idle_is_healthy(engine: Engine) -> None:
    await engine.handle.check_health.remote()


async def test_an_engine_that_has_work_and_makes_none_is_unhealthy(engine: Engine, client: httpx.AsyncClient) -> None:
    pids = await engine.handle.engine_pids.remote()
    await engine.knobs(Knobs(step_tokens_max=64))  # no step can be expected to take long
    request = asyncio.create_task(complete(client, max_tokens=100))
    await engine.until(lambda g: g.running == 1, 30)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    replica = replica_actor()  # the request router would keep a call through the handle away from a stuck replica
    try:
        await replica.check_health.remote()
        await asyncio.sleep(STUCK_AFTER_S + 0.5)
        with pytest.raises(Exception, match="finished no step"):
            await replica.check_health.remote()
        assert (await replica.record_routing_stats.remote())["state"] == "stuck"
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert (await request)["completion_tokens"] == 100
    await engine.handle.check_health.remote()


def test_the_mapping_has_no_name_any_more(running_engine: Engine) -> None:
    names = [path.name for path in Path("/dev/shm").glob("tidegate-*")]
    # one that died while it started may have left its own: names begin with the process
    assert [name for name in names if Path("/proc", name.split("-")[1]).exists()] == []


async def test_leaving_lets_an_open_stream_finish(engine: Engine, client: httpx.AsyncClient) -> None:
    """Must be the last one that uses the engine."""
    from ray import serve

    pids = await engine.handle.engine_pids.remote()
    tokens = 120
    events = []
    body = completion(max_tokens=tokens, stream=True, stream_options={"include_usage": True})
    async with client.stream("POST", COMPLETIONS, json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
            if len(events) == 3:
                await asyncio.to_thread(serve.delete, APP, _blocking=False)
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["usage"]["completion_tokens"] == tokens
    async with asyncio.timeout(30):
        while any(_alive(pid) for pid in pids):  # noqa: ASYNC110 - Ray ends them
            await asyncio.sleep(0.2)
    with pytest.raises(httpx.TransportError):
        await client.get("/health")


def replica_actor() -> Any:
    """The replica as Serve's controller calls it."""
    import ray
    from ray.util import list_named_actors

    names = [a["name"] for a in list_named_actors(all_namespaces=True) if a["name"].startswith("SERVE_REPLICA::")]
    return ray.get_actor(names[0], namespace="serve")


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
