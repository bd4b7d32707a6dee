"""Whatever bytes a client sends as body or headers: they are read, or the client is told what is wrong with them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deployments.endpoints import RELAYED
from deployments.errors import GatewayError, engine_error, error_answer
from deployments.prompt import BlockSizes, ParsedBody, parse_body
from deployments.request_meta import parse_meta
from tests.examples import examples

MODEL = "m"
SIZES = BlockSizes(block_bytes=64, request_blocks_max=8, bytes_per_token=4.0)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=80)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
NAMES = (
    "model", "messages", "prompt", "input", "tokens", "stream", "max_tokens", "max_completion_tokens", "n", "system",
    "max_output_tokens", "cache_salt", "tools", "documents", "chat_template_kwargs", "instructions", "metadata",
)  # fmt: skip
MESSAGES = st.lists(
    VALUES
    | st.fixed_dictionaries({"role": VALUES, "content": VALUES | st.lists(st.fixed_dictionaries({"text": VALUES}))}),
    max_size=4,
)
BODIES = st.dictionaries(st.sampled_from(NAMES), VALUES | MESSAGES, max_size=8)
META = tuple(
    b"x-tidegate-" + name
    for name in (
        b"class", b"deadline-ms", b"task", b"task-outcome", b"task-deadline-s", b"task-calls-max", b"task-tokens-max",
    )
)  # fmt: skip

drawn = settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])


def read(path: str, body: bytes) -> ParsedBody | None:
    """The body as it is read; ``None`` when it is refused, with words. Anything else is raised."""
    try:
        return parse_body(body, RELAYED[path], MODEL, "tenant", SIZES)
    except GatewayError as error:
        refusal = error
    assert 400 <= refusal.status < 500
    assert json.loads(error_answer(refusal).body)["error"]["message"]
    return None


@pytest.mark.parametrize("path", sorted(RELAYED))
@drawn
@given(fields=BODIES)
def test_any_json_object_is_read_or_refused(path: str, fields: dict[str, Any]) -> None:
    found = read(path, json.dumps({"model": MODEL} | fields).encode())
    if found is not None:
        assert found.prompt_tokens >= 1
        assert len(found.blocks) <= SIZES.request_blocks_max


@drawn
@given(
    path=st.sampled_from(sorted(RELAYED)), body=st.binary(max_size=300) | VALUES.map(lambda v: json.dumps(v).encode())
)
def test_any_bytes_are_read_or_refused(path: str, body: bytes) -> None:
    read(path, body)


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('[{"content":[', "]}]")])
@pytest.mark.parametrize("depth", [10, 500, 900, 980, 1_000, 1_100, 5_000, 100_000])
def test_any_depth_is_read_or_refused(opening: str, closing: str, depth: int) -> None:
    for name in ("messages", "tools", "prompt", "metadata"):
        begin = f'{{"model": "{MODEL}", "{name}": ' + opening * depth
        for body in (begin, begin + "1" + closing * depth + "}"):
            read("/v1/chat/completions", body.encode())


@drawn
@given(
    headers=st.dictionaries(st.sampled_from(META), st.binary(max_size=200) | st.sampled_from([b"1", b"batch", b"t"])),
    metadata=VALUES | st.fixed_dictionaries({"task_id": VALUES}),
)
def test_any_headers_are_read_or_refused(headers: dict[bytes, bytes], metadata: Any) -> None:
    try:
        meta = parse_meta(headers, metadata)
    except GatewayError as error:
        refusal = error
    else:
        assert len(meta.task) <= 128
        return
    assert refusal.status == 400
    assert refusal.message.isprintable()
    assert len(refusal.message) < 400


@drawn
@given(
    status=st.integers(400, 599),
    kind=st.sampled_from(["application/json", "text/html", "text/plain", ""]),
    body=st.binary(max_size=300) | VALUES.map(lambda v: json.dumps(v).encode()) | st.fixed_dictionaries(
        {"error": VALUES | st.fixed_dictionaries({"message": VALUES, "param": VALUES, "code": VALUES})}
    ).map(lambda v: json.dumps(v).encode()),
)  # fmt: skip
def test_any_error_of_an_engine_becomes_one_of_ours(status: int, kind: str, body: bytes) -> None:
    error = engine_error(status, kind, body)
    shown = json.loads(error_answer(error).body)["error"]
    assert error.status == (502 if status == 500 else status) or (status, error.status) == (422, 400)
    assert shown["message"]
    assert len(shown["message"]) < 2_100
