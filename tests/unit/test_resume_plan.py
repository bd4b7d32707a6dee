from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.endpoints import RELAYED
from deployments.resume_plan import (
    COPIED,
    DROPPED,
    OFF,
    ResumePlan,
    continuation_fields,
    engine_reason,
    plan_of,
    splice,
)

CHAT, TEXT = RELAYED["/v1/chat/completions"], RELAYED["/v1/completions"]
MESSAGES = [{"role": "user", "content": "a"}]
CHAT_BODY: dict[str, Any] = {"model": "m", "messages": MESSAGES, "stream": True}
TEXT_BODY: dict[str, Any] = {"model": "m", "prompt": "a", "stream": True}


def plan(fields: dict[str, Any], chat: bool = True) -> ResumePlan:
    found = plan_of(fields, CHAT if chat else TEXT)
    assert isinstance(found, ResumePlan), found
    return found


# --- which streams ----------------------------------------------------------------------------------------------------


def test_a_plain_chat_stream_can_be_resumed() -> None:
    assert plan(CHAT_BODY) == ResumePlan(
        chat=True, greedy=False, stop_chars=0, held_chars=0, tokens_max=None, tokens_min=0, ids_asked=False, usage=False
    )


def test_a_plan_says_what_the_request_asked_for() -> None:
    fields = TEXT_BODY | {
        "temperature": 0, "seed": 1, "stop": ["ab", "abcd"], "max_tokens": 9, "min_tokens": 2, "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert plan(fields, chat=False) == ResumePlan(
        chat=False, greedy=True, stop_chars=3, held_chars=3, tokens_max=9, tokens_min=2, ids_asked=True, usage=True
    )
    assert plan(fields | {"include_stop_str_in_output": True}, chat=False).held_chars == 0


@pytest.mark.parametrize(("fields", "tokens"), [({}, 16), ({"max_tokens": None}, 16), ({"max_tokens": 3}, 3)])
def test_a_completion_without_a_length_has_openais_default(fields: dict[str, Any], tokens: int) -> None:
    assert plan(TEXT_BODY | fields, chat=False).tokens_max == tokens


def test_the_newer_name_of_the_length_wins_in_a_chat() -> None:
    assert plan(CHAT_BODY | {"max_tokens": 3, "max_completion_tokens": 5}).tokens_max == 5


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"stream": False}, "no stream"),
    ({"n": 2}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"logprobs": True}, "logprobs"),
    ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ({"echo": True}, "echo"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
    ({"guided_json": {}}, "unknown field guided_json"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"seed": 7}, "seed"),
    ({"seed": 7, "temperature": 1}, "seed"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"frequency_penalty": -0.5}, "frequency_penalty"),
    ({"bad_words": ["a"]}, "bad_words"),
    ({"stop": "abc", "temperature": 0.5}, "stop strings above temperature 0"),
    ({"stop": "abc"}, "stop strings above temperature 0"),
    ({"stop": 7}, "stop"),
    ({"suffix": "a"}, "suffix"),
    ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ({"repetition_detection": {}}, "repetition_detection"),
    ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
    ({"kv_transfer_params": {}}, "kv_transfer_params"),
    ({"logits_processors": ["a"]}, "unknown field logits_processors"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "7"}, "max_tokens"),
    ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
]


@pytest.mark.parametrize(("fields", "why"), REFUSED, ids=[str(f) for f, _ in REFUSED])
def test_what_cannot_be_exact_is_named(fields: dict[str, Any], why: str) -> None:
    assert plan_of(CHAT_BODY | fields, CHAT) == why
    assert plan_of(TEXT_BODY | fields, TEXT) == why


@pytest.mark.parametrize("path", [p for p in RELAYED if p not in ("/v1/chat/completions", "/v1/completions")])
def test_other_endpoints_have_no_continuation(path: str) -> None:
    assert plan_of(CHAT_BODY, RELAYED[path]) == "endpoint"


@pytest.mark.parametrize(
    "prompt", [["a", "b"], [[1], [2]], [], None, 7, [[]], ["a", 1], {"a": 1}, [[["a"]], ["b"]], [1.5]]
)
def test_a_batch_of_prompts_cannot_be_resumed(prompt: object) -> None:
    assert plan_of(TEXT_BODY | {"prompt": prompt}, TEXT) == "several prompts"


@pytest.mark.parametrize("prompt", ["a", [1, 2], ["a"], [[1, 2]]])
def test_one_prompt_in_any_form_can(prompt: object) -> None:
    assert plan(TEXT_BODY | {"prompt": prompt}, chat=False).tokens_max == 16


@pytest.mark.parametrize(
    "content", [[{"type": "image_url", "image_url": {"url": "x"}}], [{"type": "input_audio"}], 7, [7], {"a": 1}]
)
def test_messages_with_more_than_text_cannot_be_resumed(content: object) -> None:
    fields = CHAT_BODY | {"messages": [*MESSAGES, {"role": "user", "content": content}]}
    assert plan_of(fields, CHAT) == "messages with more than text"


@pytest.mark.parametrize("content", [None, "a", ["a", "b"], [{"type": "text", "text": "a"}]])
def test_messages_of_text_can(content: object) -> None:
    assert plan(CHAT_BODY | {"messages": [{"role": "user", "content": content}]}).chat


def test_fields_that_do_nothing_do_not_stop_a_resume() -> None:
    for name, values in OFF.items():
        for value in values:
            assert plan(CHAT_BODY | {name: value}).chat, name
    assert plan(CHAT_BODY | {"logprobs": False, "top_logprobs": 0, "response_format": {"type": "text"}}).chat


def test_no_field_is_in_two_tables() -> None:
    assert not COPIED & DROPPED
    assert not (COPIED | DROPPED) & set(OFF)


def test_an_engine_that_parses_answers_is_named() -> None:
    assert engine_reason({"max_model_len": 7, "reasoning_parser": ""}) == ""
    assert engine_reason({"reasoning_parser": "qwen3"}) == "engine argument reasoning_parser"


# --- bodies -----------------------------------------------------------------------------------------------------------

SPACE = st.text(" \t\r\n", max_size=3)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text("abc{}\"' ", max_size=3), JSON, max_size=4)


@pytest.mark.slow
@given(OBJECTS, OBJECTS, SPACE, SPACE, st.sampled_from([None, 1, " "]))
def test_spliced_fields_win_and_the_rest_stays(
    fields: dict[str, Any], more: dict[str, Any], before: str, after: str, indent: Any
) -> None:
    text = before + json.dumps(fields, indent=indent) + after
    body = splice(text.encode(), more)
    assert json.loads(body) == fields | more
    if more:
        assert body.startswith(text.rstrip()[:-1].rstrip().encode())
    else:
        assert body == text.encode()


def test_a_continuation_keeps_what_samples_and_drops_what_made_the_prompt() -> None:
    fields = CHAT_BODY | {
        "temperature": 0, "stop": ["ab"], "logit_bias": {"5": 1}, "cache_salt": "s", "max_completion_tokens": 50,
        "min_tokens": 10, "tool_choice": "none", "chat_template_kwargs": {"a": 1}, "n": 1, "response_format": None,
        "request_id": "x", "stream_options": {"include_usage": True}, "top_logprobs": 0,
    }  # fmt: skip
    assert continuation_fields(fields, plan(fields), 7, 43) == {
        "model": "m", "temperature": 0, "stop": ["ab"], "logit_bias": {"5": 1}, "cache_salt": "s", "max_tokens": 43,
        "min_tokens": 3, "stream": True, "return_token_ids": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert continuation_fields(fields, plan(fields), 30, 20)["min_tokens"] == 0
