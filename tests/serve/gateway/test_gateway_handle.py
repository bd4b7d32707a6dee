"""The same flow behind methods of the deployment handle: from a script and from another application."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.errors import GatewayError
from tests.serve.gateway.conftest import APP, MODEL, System, until

pytestmark = [pytest.mark.serve, pytest.mark.timeout(180)]

USER = [{"role": "user", "content": "Name a river."}]
CHAT: dict[str, Any] = {"model": MODEL, "messages": USER, "max_tokens": 5}


@pytest.mark.parametrize(
    ("method", "body"),
    [
        ("chat", CHAT),
        ("completions", {"model": MODEL, "prompt": "river", "max_tokens": 5}),
        ("responses", {"model": MODEL, "input": "river", "max_output_tokens": 5}),
        ("messages", CHAT),
        ("tokenize", {"prompt": "The river"}),
        ("detokenize", {"tokens": [1, 2]}),
    ],
)
def test_methods_answer_with_the_engines_object(system: System, method: str, body: dict[str, Any]) -> None:
    answer = getattr(system.handle, method).remote(body).result(timeout_s=30)
    assert isinstance(answer, dict)
    assert "error" not in answer


def test_models_are_known(system: System) -> None:
    assert system.handle.models.remote().result(timeout_s=30)["data"][0]["id"] == MODEL


def test_a_stream_is_a_generator_of_chunks(system: System) -> None:
    chunks = list(system.handle.options(stream=True).chat.remote(CHAT | {"stream": True}))
    assert [c["object"] for c in chunks] == ["chat.completion.chunk"] * len(chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    kinds = [e["type"] for e in system.handle.options(stream=True).messages.remote(CHAT | {"stream": True})]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (CHAT | {"model": "gpt-9"}, 404, "model_not_found"),
        (CHAT | {"messages": []}, 400, None),
        (CHAT | {"temperature": float("nan")}, 400, "invalid_json"),
        (CHAT | {"stream": "yes"}, 400, "invalid_type"),
        ("text", 400, None),
        (CHAT | {"messages": [{"role": "user", "content": "x" * 200_000}]}, 413, "request_too_large"),
    ],
)
def test_errors_are_raised_with_their_fields(system: System, body: Any, status: int, code: str | None) -> None:
    with pytest.raises(GatewayError) as caught:
        system.handle.chat.remote(body).result(timeout_s=30)
    error = caught.value.cause  # type: ignore[attr-defined]
    assert (error.status, error.code) == (status, code)


def test_an_error_of_a_stream_is_raised_from_its_generator(system: System) -> None:
    stream = system.handle.options(stream=True)
    with pytest.raises(GatewayError):
        list(stream.chat.remote(CHAT | {"stream": True, "model": "gpt-9"}))
    system.faults(kind="cut", after_tokens=3)
    chunks = iter(stream.chat.remote(CHAT | {"stream": True, "max_tokens": 50, "ignore_eos": True}))
    assert next(chunks)
    with pytest.raises(GatewayError):
        list(chunks)


def test_a_foreign_handle_reaches_the_engines_through_the_same_router(system: System) -> None:
    calls = [system.engine.counters.remote() for _ in range(20)]
    assert all(call.result(timeout_s=30)["kv_tokens_max"] for call in calls)


def test_a_cancelled_call_stops_the_engine(system: System) -> None:
    long = CHAT | {"max_tokens": 3_000, "ignore_eos": True}
    response = system.handle.chat.remote(long)
    until(lambda: system.total("running") == 1, "a running request", 20)
    response.cancel()
    until(lambda: system.total("running") == 0, "the engine's abort", 10)
    generator = system.handle.options(stream=True).chat.remote(long | {"stream": True})
    assert next(iter(generator))
    generator.cancel()
    until(lambda: system.total("running") == 0, "the engine's abort", 10)


class Caller:
    """A deployment of another application that uses the gateway."""

    def __init__(self) -> None:
        self._gateway: DeploymentHandle[Any] = serve.get_app_handle(APP)

    async def ask(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """One whole answer and one stream."""
        whole = await self._gateway.chat.remote(body)
        stream = self._gateway.options(stream=True).chat.remote(body | {"stream": True})
        return [whole, *[chunk async for chunk in stream]]

    async def leave(self, body: dict[str, Any]) -> int:
        """Begin a stream and leave it after its second chunk."""
        stream = self._gateway.options(stream=True).chat.remote(body | {"stream": True})
        for _ in range(2):
            await anext(stream)
        stream.cancel()
        await asyncio.sleep(0)
        return 2


def test_another_application_asks_through_the_handle(system: System) -> None:
    caller = serve.run(
        serve.deployment(Caller, ray_actor_options={"num_cpus": 0}).bind(), name="caller", route_prefix=None
    )
    try:
        answers = caller.ask.remote(CHAT).result(timeout_s=60)
        assert answers[0]["object"] == "chat.completion"
        assert len(answers) > 3
        assert caller.leave.remote(CHAT | {"max_tokens": 3_000, "ignore_eos": True}).result(timeout_s=60) == 2
        until(lambda: system.total("running") == 0, "the engine's abort", 10)
    finally:
        serve.delete("caller")
