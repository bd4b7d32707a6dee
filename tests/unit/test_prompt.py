"""Request bodies: what is read for routing, what is refused, and when two prompts share their prefix blocks."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.endpoints import RELAYED
from deployments.errors import GatewayError
from deployments.prompt import BlockSizes, ParsedBody, TokenRatio, block_hashes, parse_body

MODEL = "m"
SIZES = BlockSizes(block_bytes=16, request_blocks_max=8, bytes_per_token=4.0)
CHAT, COMPLETIONS, EMBEDDINGS = (RELAYED[f"/v1/{n}"] for n in ("chat/completions", "completions", "embeddings"))
RESPONSES, MESSAGES, TOKENIZE = RELAYED["/v1/responses"], RELAYED["/v1/messages"], RELAYED["/tokenize"]


def parse(fields: Any, endpoint: Any = CHAT, tenant: str = "", sizes: BlockSizes = SIZES) -> ParsedBody:
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return parse_body(body, endpoint, MODEL, tenant, sizes)


def chat(*texts: str, **extra: Any) -> dict[str, Any]:
    roles = ("system", "user", "assistant")
    messages = [{"role": roles[min(i, 2)], "content": t} for i, t in enumerate(texts)]
    return {"model": MODEL, "messages": messages} | extra


def refused(fields: Any, endpoint: Any = CHAT) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        parse(fields, endpoint)
    return caught.value


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"", b"  \n", b"{", b"[1", b"nope", b'{"model": NaN}', b'{"a": Infinity}', b'{"a": -Infinity}', b'{"a": 1e999}',
        b"\xff\xfe", b'{"model": "m", "messages": "\xc3\x28"}', b'{"a": "\\ud800"}', b"[" * 100_000, b'{"a":' * 5_000,
        b'{"model": "m"} trailing', b'"text"', b"[]", b"null", b"1", b"true",
    ],
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_a_400_with_the_reason(body: bytes) -> None:
    error = refused(body)
    assert error.status == 400
    assert error.type == "invalid_request_error"
    assert error.message
    assert "msgspec" not in error.message


def test_malformed_json_is_refused_with_its_position() -> None:
    assert re.search(r"\(byte \d+\)", refused(b'{"model": nan}').message)


def test_unknown_model_is_a_404_in_openais_words() -> None:
    error = refused({"model": "gpt-9", "messages": []})
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    assert error.message == "The model `gpt-9` does not exist or you do not have access to it."


def test_an_endless_model_name_is_not_echoed_whole() -> None:
    assert len(refused({"model": "x" * 100_000}).message) < 300


@pytest.mark.parametrize("model", [1, True, ["m"], {"a": 1}, 1.5])
def test_model_must_be_a_string(model: Any) -> None:
    assert refused({"model": model}).status == 400


def test_model_is_needed_except_where_engines_do_without() -> None:
    assert refused({"messages": []}).param == "model"
    assert refused({"model": None, "messages": []}).status == 400
    assert parse({"prompt": "hi"}, TOKENIZE).model == MODEL


@pytest.mark.parametrize("stream", ["true", 1, [], {}])
def test_stream_must_be_a_boolean(stream: Any) -> None:
    error = refused(chat("hi", stream=stream))
    assert (error.status, error.param) == (400, "stream")


@pytest.mark.parametrize("stream", [None, False, True])
def test_stream_is_taken_as_it_is(stream: bool | None) -> None:
    assert parse(chat("hi", stream=stream)).stream is bool(stream)


def test_stream_means_nothing_where_there_is_none() -> None:
    assert parse({"model": MODEL, "input": "hi", "stream": True}, EMBEDDINGS).stream is False


# --- what is left to the engine ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []}, {"messages": None}, {"messages": "text"}, {"messages": [1, None, "x", []]}, {},
        {"messages": [{"role": 1, "content": 2}]}, {"messages": [{"content": [1, None, {"type": "image_url"}]}]},
        {"messages": [], "max_tokens": "many"}, {"messages": [], "max_tokens": -5}, {"messages": [], "n": -1},
        {"messages": [], "max_tokens": 10**30}, {"messages": [], "max_tokens": True}, {"messages": [], "n": "x"},
        {"messages": [], "temperature": 1e300}, {"tools": "x", "messages": []}, {"cache_salt": 5, "messages": []},
    ],
)  # fmt: skip
def test_other_fields_of_any_type_pass(fields: dict[str, Any]) -> None:
    parsed = parse({"model": MODEL} | fields)
    assert parsed.prompt_tokens >= 1


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
        max_leaves=12,
    ),
    st.sampled_from(sorted(RELAYED)),
    st.sampled_from(["messages", "prompt", "input", "tokens", "instructions", "system", "tools", "max_tokens", "n"]),
)
def test_no_value_of_any_field_breaks_the_parser(value: Any, path: str, name: str) -> None:
    parsed = parse({"model": MODEL, name: value}, RELAYED[path])
    assert parsed.prompt_tokens >= 1
    assert parsed.output_tokens_max is None or parsed.output_tokens_max >= 0


@pytest.mark.parametrize(
    ("extra", "tokens"),
    [
        ({}, None), ({"max_tokens": 7}, 7), ({"max_tokens": 0}, 0), ({"max_completion_tokens": 9, "max_tokens": 7}, 9),
        ({"max_tokens": 7, "n": 3}, 21), ({"max_tokens": 10**12}, 10_000_000), ({"max_tokens": 1, "n": 10**9}, 16_384),
        ({"max_output_tokens": 5}, None), ({"max_output_tokens": 5, "max_tokens": 900}, 900),
        ({"max_completion_tokens": "900", "max_tokens": 7}, 900), ({"max_tokens": 7, "n": "3"}, 21),
        ({"max_tokens": 7.0, "n": 3.0}, 21), ({"max_completion_tokens": "x", "max_tokens": 7}, None),
    ],
)  # fmt: skip
def test_output_tokens_are_the_limit_the_engine_reads_times_the_choices(
    extra: dict[str, Any], tokens: int | None
) -> None:
    assert parse(chat("hi", **extra)).output_tokens_max == tokens


@pytest.mark.parametrize(
    ("path", "fields", "tokens"),
    [
        ("/v1/completions", {"prompt": ["a", "b", "c"], "max_tokens": 7, "n": 2}, 42),
        ("/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 7}, 14),
        ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 7}, 7),
        ("/v1/completions", {"prompt": "a", "max_tokens": 900, "max_completion_tokens": 1}, 900),
        ("/v1/responses", {"input": "a", "max_output_tokens": 900, "max_completion_tokens": 1}, 900),
        ("/v1/messages", {"messages": [], "max_tokens": 900, "max_output_tokens": 1}, 900),
        ("/v1/embeddings", {"input": ["a", "b"], "max_tokens": 7}, 0),
    ],
)
def test_output_tokens_of_a_batch_and_of_other_endpoints(path: str, fields: dict[str, Any], tokens: int) -> None:
    parsed = parse({"model": MODEL, **fields}, RELAYED[path])
    assert parsed.output_tokens_max == tokens


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_token_estimate_follows_the_learned_ratio() -> None:
    text = "x" * 400
    at_four = parse({"model": MODEL, "prompt": text}, COMPLETIONS).prompt_tokens
    at_two = parse({"model": MODEL, "prompt": text}, COMPLETIONS, sizes=BlockSizes(16, 8, 2.0)).prompt_tokens
    assert (at_four, at_two) == (100, 200)


def test_token_ids_are_counted_not_estimated() -> None:
    sizes = BlockSizes(16, 8, 2.0)
    assert parse({"model": MODEL, "prompt": list(range(50))}, COMPLETIONS, sizes=sizes).prompt_tokens == 50


def test_a_batch_counts_all_its_prompts() -> None:
    assert parse({"model": MODEL, "input": ["x" * 40, "y" * 40]}, EMBEDDINGS).prompt_tokens == 20
    assert parse({"model": MODEL, "prompt": [[1] * 10, [2] * 10]}, COMPLETIONS).prompt_tokens == 20


def test_every_endpoint_counts_load_and_tokenising_counts_little() -> None:
    whole = parse({"model": MODEL, "prompt": "x" * 4_000}, COMPLETIONS)
    small = parse({"prompt": "x" * 4_000}, TOKENIZE)
    assert 1 <= small.prompt_tokens < whole.prompt_tokens / 30
    assert small.blocks == ()
    assert small.output_tokens_max == 0


def test_ratio_learns_from_long_prompts_only_and_stays_in_bounds() -> None:
    ratio = TokenRatio()
    ratio.observe(10_000, 10)
    assert ratio.bytes_per_token == 4.0
    for _ in range(200):
        ratio.observe(10_000, 5_000)
    assert ratio.bytes_per_token == pytest.approx(2.0, rel=0.01)
    for _ in range(500):
        ratio.observe(10**9, 100)
    assert ratio.bytes_per_token <= 16
    ratio.observe(0, 100)
    assert ratio.bytes_per_token >= 1


# --- prefix blocks ----------------------------------------------------------------------------------------------------


def test_turns_of_one_conversation_share_their_prefix() -> None:
    first = parse(chat("a" * 40, "b" * 40)).blocks
    second = parse(chat("a" * 40, "b" * 40, "c" * 40)).blocks
    assert len(first) >= 4
    assert second[: len(first)] == first


def test_blocks_diverge_where_the_text_does_and_never_meet_again() -> None:
    one = parse(chat("a" * 48 + "b" * 48)).blocks
    two = parse(chat("a" * 48 + "c" * 48)).blocks
    shared = sum(x == y for x, y in zip(one, two, strict=True))
    assert 0 < shared < len(one)
    assert one[shared:] != two[shared:]
    assert all(x != y for x, y in zip(one[shared:], two[shared:], strict=True))


@pytest.mark.parametrize(
    "other",
    [
        chat("x" * 64, cache_salt="s"),
        chat("x" * 64, tools=[{"type": "function", "function": {"name": "f"}}]),
        chat("x" * 64, chat_template_kwargs={"thinking": True}),
    ],
)
def test_what_changes_the_engines_cache_key_changes_the_blocks(other: dict[str, Any]) -> None:
    assert parse(chat("x" * 64)).blocks[0] != parse(other).blocks[0]


def test_blocks_are_salted_by_tenant_and_model() -> None:
    body = json.dumps(chat("x" * 64)).encode()
    mine = parse_body(body, CHAT, MODEL, "a", SIZES).blocks
    assert mine != parse_body(body, CHAT, MODEL, "b", SIZES).blocks
    other_model = json.dumps(chat("x" * 64) | {"model": "n"}).encode()
    assert mine != parse_body(other_model, CHAT, "n", "a", SIZES).blocks


def test_text_parts_and_plain_text_are_the_same_prompt() -> None:
    parts = {"model": MODEL, "messages": [{"role": "system", "content": [{"type": "text", "text": "x" * 64}]}]}
    assert parse(parts).blocks == parse(chat("x" * 64)).blocks


def test_a_system_prompt_leads_in_each_dialect() -> None:
    as_message = parse(chat("s" * 64, "u" * 64)).blocks
    anthropic = {"model": MODEL, "system": "s" * 64, "messages": [{"role": "user", "content": "u" * 64}]}
    responses = {"model": MODEL, "instructions": "s" * 64, "input": [{"role": "user", "content": "u" * 64}]}
    assert parse(anthropic, MESSAGES).blocks == as_message
    assert parse(responses, RESPONSES).blocks == as_message


def test_blocks_are_capped_and_a_partial_block_is_none() -> None:
    assert len(parse(chat("x" * 10_000)).blocks) == SIZES.request_blocks_max
    assert parse({"model": MODEL, "prompt": "x" * 15}, COMPLETIONS).blocks == ()
    assert len(parse({"model": MODEL, "prompt": "x" * 16}, COMPLETIONS).blocks) == 1


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_equal_prefixes_have_equal_hashes_and_only_they(a: bytes, b: bytes) -> None:
    one, two = block_hashes(a, 7, SIZES), block_hashes(b, 7, SIZES)
    shared = 0
    while shared < min(len(one), len(two)) and a[: (shared + 1) * 16] == b[: (shared + 1) * 16]:
        shared += 1
    assert one[:shared] == two[:shared]
    if shared < min(len(one), len(two)):
        assert one[shared] != two[shared]


def test_block_tokens_follow_the_ratio_and_are_never_zero() -> None:
    assert BlockSizes(256, 8, 4.0).block_tokens == 64
    assert BlockSizes(16, 8, 100.0).block_tokens == 1
