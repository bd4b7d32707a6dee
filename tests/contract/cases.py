"""HTTP cases that the emulated engine and real vLLM must answer alike.

A case is a request. What vLLM 0.29.0 answers to it is recorded beside this file in ``vllm_0_29_0.json`` (status, shape,
error type) by ``python -m tests.contract.record``, so that the emulated engine stays pinned where vLLM is missing.
``MODEL`` in a body is replaced by the name the server under test gives its model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

MODEL = "@model@"
LONG_TEXT = "tide gate " * 6_000
"""Far more than the context of 2048 tokens in every tokenizer."""


@dataclass(frozen=True, slots=True)
class Case:
    """One request. ``body`` is sent as JSON, ``raw`` as it is; neither means no body."""

    name: str
    path: str
    body: Any = None
    raw: bytes | None = None
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    loose: tuple[str, ...] = ()
    """Keys left out of the comparison: they depend on the text a model happens to write."""

    def content(self, model: str) -> bytes | None:
        """Request body for a server whose model is called ``model``."""
        if self.raw is not None:
            return self.raw.replace(MODEL.encode(), model.encode())
        if self.body is None:
            return None
        return json.dumps(self.body).replace(MODEL, model).encode()


JSON = {"content-type": "application/json"}
USER = [{"role": "user", "content": "Name a river."}]


def _chat(name: str, /, messages: Any = USER, loose: tuple[str, ...] = (), drop: str = "", **extra: Any) -> Case:
    body = {"model": MODEL, "messages": messages, "max_tokens": 6, "temperature": 0} | extra
    body.pop(drop, None)
    return Case(f"chat-{name}", "/v1/chat/completions", body, headers=JSON, loose=loose)


def _complete(
    name: str, /, prompt: Any = "The river", loose: tuple[str, ...] = (), drop: str = "", **extra: Any
) -> Case:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 6, "temperature": 0} | extra
    body.pop(drop, None)
    return Case(f"completion-{name}", "/v1/completions", body, headers=JSON, loose=loose)


def _respond(name: str, /, loose: tuple[str, ...] = (), drop: str = "", **extra: Any) -> Case:
    body = {"model": MODEL, "input": "Name a river.", "max_output_tokens": 6, "temperature": 0} | extra
    body.pop(drop, None)
    return Case(f"responses-{name}", "/v1/responses", body, headers=JSON, loose=loose)


def _message(name: str, /, messages: Any = USER, loose: tuple[str, ...] = (), drop: str = "", **extra: Any) -> Case:
    body = {"model": MODEL, "messages": messages, "max_tokens": 6, "temperature": 0} | extra
    body.pop(drop, None)
    return Case(f"messages-{name}", "/v1/messages", body, headers=JSON, loose=loose)


def _raw(name: str, path: str, raw: bytes, headers: dict[str, str] | None = None) -> Case:
    return Case(name, path, raw=raw, headers=JSON if headers is None else headers)


def _get(name: str, path: str, method: str = "GET") -> Case:
    return Case(name, path, method=method)


CHAT_GOOD = (
    _chat("plain"),
    _chat("stream", stream=True),
    _chat("stream-usage", stream=True, stream_options={"include_usage": True}),
    _chat("stream-continuous-usage", stream=True,
          stream_options={"include_usage": True, "continuous_usage_stats": True}),
    _chat("n", n=2, temperature=0.5),
    _chat("n-stream", n=2, temperature=0.5, stream=True),
    _chat("n-null", n=None),
    _chat("logprobs", logprobs=True, top_logprobs=2),
    _chat("logprobs-stream", logprobs=True, top_logprobs=1, stream=True),
    _chat("model-absent", drop="model"),
    _chat("model-null", model=None),
    _chat("max-absent", drop="max_tokens", max_completion_tokens=4),
    _chat("ignore-eos", ignore_eos=True, min_tokens=6),
    _chat("stop-unused", stop=["\x01never"]),
    _chat("stop-null", stop=None),
    _chat("parts", messages=[{"role": "user", "content": [{"type": "text", "text": "Name a river."}]}]),
    _chat("system", messages=[{"role": "system", "content": "Be brief."}, *USER]),
    _chat("assistant-last", messages=[*USER, {"role": "assistant", "content": "The"}]),
    _chat("content-null", messages=[{"role": "assistant", "content": None}, *USER]),
    _chat("role-unknown", messages=[{"role": "wizard", "content": "Name a river."}]),
    _chat("temperature-hot", temperature=3.0),
    _chat("extra-field", no_such_field={"a": [1]}),
    _chat("seed", seed=7, user="u", metadata={"a": "b"}),
    _chat("cache-salt", cache_salt="tenant-a"),
    _chat("request-id-body", request_id="client-id-1"),
    _chat("logit-bias", logit_bias={"17": 1.0}),
    _chat("truncate", messages=[{"role": "user", "content": LONG_TEXT}], truncate_prompt_tokens=100,
          loose=("finish_reason",)),
    _chat("json-object", response_format={"type": "json_object"}),
    _chat("response-format-text", response_format={"type": "text"}),
    _chat("max-zero", max_tokens=0),
    _chat("max-huge", max_tokens=1_000_000),
    _chat("return-token-ids", return_token_ids=True),
    Case("chat-own-request-id", "/v1/chat/completions", {"model": MODEL, "messages": USER, "max_tokens": 2},
         headers=JSON | {"x-request-id": "abc"}),
    Case("chat-charset", "/v1/chat/completions", {"model": MODEL, "messages": USER, "max_tokens": 2},
         headers={"content-type": "application/json; charset=utf-8"}),
)  # fmt: skip

CHAT_BAD = (
    _raw("chat-json-malformed", "/v1/chat/completions", b'{"model": "@model@", "messages": ['),
    _raw("chat-json-empty", "/v1/chat/completions", b""),
    _raw("chat-json-array", "/v1/chat/completions", b"[1, 2]"),
    _raw("chat-json-null", "/v1/chat/completions", b"null"),
    _raw("chat-json-string", "/v1/chat/completions", b'"hello"'),
    _raw("chat-json-utf8", "/v1/chat/completions", b'{"model": "\xff\xfe"}'),
    _raw("chat-json-surrogate", "/v1/chat/completions",
         b'{"model": "@model@", "max_tokens": 2, "messages": [{"role": "user", "content": "\\ud800"}]}'),
    _raw("chat-json-deep", "/v1/chat/completions", b'{"messages": ' + b"[" * 100_000),
    _raw("chat-nan", "/v1/chat/completions",
         b'{"model": "@model@", "messages": [{"role": "user", "content": "a"}], "temperature": NaN}'),
    _raw("chat-infinity", "/v1/chat/completions",
         b'{"model": "@model@", "messages": [{"role": "user", "content": "a"}], "top_p": Infinity}'),
    _raw("chat-penalty-nan", "/v1/chat/completions",
         b'{"model": "@model@", "messages": [{"role": "user", "content": "a"}], "presence_penalty": NaN}'),
    _raw("chat-logit-bias-nan", "/v1/chat/completions",
         b'{"model": "@model@", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2, '
         b'"logit_bias": {"3": NaN}}'),
    _raw("chat-type-none", "/v1/chat/completions", b"{}", {}),
    _raw("chat-type-text", "/v1/chat/completions", b"{}", {"content-type": "text/plain"}),
    _chat("messages-absent", drop="messages"),
    _chat("messages-empty", messages=[]),
    _chat("messages-string", messages="hello"),
    _chat("messages-null", messages=None),
    _chat("message-string", messages=["hello"]),
    _chat("message-empty", messages=[{}]),
    _chat("role-absent", messages=[{"content": "a"}]),
    _chat("role-number", messages=[{"role": 3, "content": "a"}]),
    _chat("content-absent", messages=[{"role": "user"}]),
    _chat("content-number", messages=[{"role": "user", "content": 3}]),
    _chat("part-unknown", messages=[{"role": "user", "content": [{"type": "smell", "smell": "rose"}]}]),
    _chat("part-image", messages=[{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]),
    _chat("model-unknown", model="no-such-model"),
    _chat("model-number", model=3),
    _chat("temperature-negative", temperature=-1),
    _chat("temperature-string", temperature="hot"),
    _chat("top-p-zero", top_p=0),
    _chat("top-p-high", top_p=1.5),
    _chat("top-k-low", top_k=-2),
    _chat("min-p-high", min_p=1.5),
    _chat("n-zero", n=0),
    _chat("n-negative", n=-1),
    _chat("n-huge", n=1_000_000_000),
    _chat("n-string", n="two"),
    _chat("n-greedy", n=2),
    _chat("max-negative", max_tokens=-1),
    _chat("max-string", max_tokens="ten"),
    _chat("max-float", max_tokens=1.5),
    _chat("context-long", messages=[{"role": "user", "content": LONG_TEXT}]),
    _chat("stop-number", stop=3),
    _chat("stop-list-number", stop=[3]),
    _chat("stop-empty", stop=""),
    _chat("stop-many", stop=[str(i) for i in range(1_000)]),
    _chat("stop-token-ids-string", stop_token_ids=["a"]),
    _chat("top-logprobs-alone", top_logprobs=2),
    _chat("top-logprobs-negative", logprobs=True, top_logprobs=-2),
    _chat("top-logprobs-high", logprobs=True, top_logprobs=1_000),
    _chat("logprobs-number", logprobs=5),
    _chat("prompt-logprobs-stream", prompt_logprobs=1, stream=True),
    _chat("presence-high", presence_penalty=5),
    _chat("frequency-low", frequency_penalty=-5),
    _chat("repetition-zero", repetition_penalty=0),
    _chat("logit-bias-beyond", logit_bias={"99999999": 1.0}),
    _chat("logit-bias-word", logit_bias={"river": 1.0}),
    _chat("stream-options-alone", stream_options={"include_usage": True}),
    _chat("stream-string", stream="maybe"),
    _chat("seed-huge", seed=2**70),
    _chat("min-above-max", min_tokens=20),
    _chat("min-negative", min_tokens=-1),
    _chat("priority", priority=3),
    _chat("cache-salt-empty", cache_salt=""),
    _chat("tools-string", tools="hammer"),
    _chat("tools-auto", tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]),
    _chat("tool-choice-unknown", tool_choice="always"),
    _chat("tool-choice-no-tools", tool_choice="required"),
    _chat("response-format-unknown", response_format={"type": "xml"}),
    _chat("response-schema-absent", response_format={"type": "json_schema"}),
    _chat("response-schema-bad", response_format={"type": "json_schema", "json_schema": {
        "name": "a", "schema": {"type": "no-such-type"}}}),
    _chat("structured-empty", structured_outputs={"json": ""}),
    _chat("structured-two", structured_outputs={"regex": "a", "choice": ["a"]}),
    _chat("structured-grammar", structured_outputs={"grammar": "root ::= ((("}),
    _chat("template", chat_template="{{ messages }}"),
    _chat("continue-and-generate", continue_final_message=True, add_generation_prompt=True),
    _chat("allowed-tokens-beyond", allowed_token_ids=[99_999_999]),
    _get("chat-get", "/v1/chat/completions"),
)  # fmt: skip

COMPLETIONS = (
    _complete("plain"),
    _complete("stream", stream=True),
    _complete("stream-usage", stream=True, stream_options={"include_usage": True}),
    _complete("list", prompt=["The river", "The sea"]),
    _complete("list-stream", prompt=["The river", "The sea"], stream=True),
    _complete("tokens", prompt=[10, 20, 30]),
    _complete("tokens-list", prompt=[[10, 20], [30]]),
    _complete("n", n=2, temperature=0.5),
    _complete("echo", echo=True),
    _complete("echo-only", echo=True, max_tokens=0),
    _complete("logprobs", logprobs=2, loose=("top_logprobs",)),
    _complete("logprobs-zero", logprobs=0, loose=("top_logprobs",)),
    _complete("max-absent", drop="max_tokens", ignore_eos=True),
    _complete("stop-unused", stop="\x01never"),
    _complete("max-zero", max_tokens=0),
    _complete("prompt-empty", prompt=""),
    _complete("list-empty", prompt=[]),
    _complete("list-of-empty", prompt=[[]]),
    _complete("list-mixed", prompt=["a", 3]),
    _complete("prompt-absent", drop="prompt"),
    _complete("prompt-number", prompt=3),
    _complete("prompt-null", prompt=None),
    _complete("prompt-embeds", prompt=None, prompt_embeds="AAAA"),
    _complete("token-negative", prompt=[-1]),
    _complete("token-beyond", prompt=[99_999_999]),
    _complete("suffix", suffix="end"),
    _complete("best-of", best_of=2),
    _complete("logprobs-high", logprobs=1_000),
    _complete("logprobs-negative", logprobs=-2),
    _complete("context-long", prompt=LONG_TEXT),
    _complete("context-long-tokens", prompt=[7] * 5_000),
    _complete("model-unknown", model="no-such-model"),
    _complete("n-zero", n=0),
    _complete("max-negative", max_tokens=-1),
    _complete("temperature-negative", temperature=-0.5),
    _complete("stream-options-alone", stream_options={"include_usage": True}),
    _raw("completion-json-malformed", "/v1/completions", b"{"),
    _get("completion-get", "/v1/completions"),
)

RESPONSES = (
    _respond("plain", store=False),
    _respond("stream", stream=True, store=False),
    _respond("list", input=USER),
    _respond("typed-list", input=[
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]),
    _respond("instructions", instructions="Be brief."),
    _respond("complete", max_output_tokens=300, input="Say ok."),
    _respond("input-absent", drop="input"),
    _respond("input-number", input=3),
    _respond("input-empty", input=""),
    _respond("list-empty", input=[]),
    _respond("model-unknown", model="no-such-model"),
    _respond("model-absent", drop="model"),
    _respond("temperature-negative", temperature=-1),
    _respond("top-p-high", top_p=2),
    _respond("max-zero", max_output_tokens=0),
    _respond("max-string", max_output_tokens="ten"),
    _respond("context-long", input=LONG_TEXT),
    _respond("previous-unknown", previous_response_id="resp_nothing"),
    _respond("previous-bad", previous_response_id="nothing"),
    _respond("background", background=True),
    _respond("tool-choice", tool_choice="required"),
    _respond("schema", text={"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}},
             max_output_tokens=40, loose=("status", "incomplete_details")),
    _raw("responses-json-malformed", "/v1/responses", b"{"),
    _get("responses-get", "/v1/responses/resp_nothing"),
    _get("responses-get-bad", "/v1/responses/nothing"),
    _get("responses-cancel", "/v1/responses/resp_nothing/cancel", "POST"),
)  # fmt: skip

MESSAGES = (
    _message("plain"),
    _message("stream", stream=True),
    _message("system", system="Be brief."),
    _message("system-blocks", system=[{"type": "text", "text": "Be brief."}]),
    _message("blocks", messages=[{"role": "user", "content": [{"type": "text", "text": "Name a river."}]}]),
    _message("stop-unused", stop_sequences=["\x01never"]),
    _message("max-absent", drop="max_tokens"),
    _message("max-zero", max_tokens=0),
    _message("max-string", max_tokens="ten"),
    _message("model-unknown", model="no-such-model"),
    _message("model-absent", drop="model"),
    _message("model-empty", model=""),
    _message("messages-absent", drop="messages"),
    _message("messages-empty", messages=[]),
    _message("role-unknown", messages=[{"role": "wizard", "content": "a"}]),
    _message("content-number", messages=[{"role": "user", "content": 3}]),
    _message("block-unknown", messages=[{"role": "user", "content": [{"type": "smell"}]}]),
    _message("temperature-negative", temperature=-1),
    _message("top-p-high", top_p=2),
    _message("context-long", messages=[{"role": "user", "content": LONG_TEXT}]),
    _raw("messages-json-malformed", "/v1/messages", b"{"),
    Case("messages-count", "/v1/messages/count_tokens", {"model": MODEL, "messages": USER}, headers=JSON),
    Case("messages-count-model", "/v1/messages/count_tokens", {"model": "no", "messages": USER}, headers=JSON),
)

OTHERS = (
    Case("embeddings", "/v1/embeddings", {"model": MODEL, "input": "a"}, headers=JSON),
    Case("embeddings-empty", "/v1/embeddings", {}, headers=JSON),
    _get("models", "/v1/models"),
    _get("model", f"/v1/models/{MODEL}"),
    _get("model-unknown", "/v1/models/no-such-model"),
    Case("tokenize", "/tokenize", {"model": MODEL, "prompt": "The river"}, headers=JSON),
    Case("tokenize-strs", "/tokenize", {"model": MODEL, "prompt": "a b", "return_token_strs": True}, headers=JSON),
    Case("tokenize-chat", "/tokenize", {"model": MODEL, "messages": USER}, headers=JSON),
    Case("tokenize-model", "/tokenize", {"model": "no", "prompt": "The river"}, headers=JSON),
    Case("tokenize-absent", "/tokenize", {"model": MODEL}, headers=JSON),
    Case("tokenize-number", "/tokenize", {"model": MODEL, "prompt": 3}, headers=JSON),
    Case("tokenize-empty", "/tokenize", {"model": MODEL, "prompt": ""}, headers=JSON),
    Case("tokenize-long", "/tokenize", {"model": MODEL, "prompt": LONG_TEXT}, headers=JSON),
    Case("detokenize", "/detokenize", {"model": MODEL, "tokens": [10, 20]}, headers=JSON),
    Case("detokenize-empty", "/detokenize", {"model": MODEL, "tokens": []}, headers=JSON),
    Case("detokenize-absent", "/detokenize", {"model": MODEL}, headers=JSON),
    Case("detokenize-string", "/detokenize", {"model": MODEL, "tokens": "ten"}, headers=JSON),
    Case("detokenize-negative", "/detokenize", {"model": MODEL, "tokens": [-1]}, headers=JSON),
    Case("detokenize-beyond", "/detokenize", {"model": MODEL, "tokens": [99_999_999]}, headers=JSON),
    Case("detokenize-model", "/detokenize", {"model": "no", "tokens": [10]}, headers=JSON),
    _get("health", "/health"),
    _get("ping", "/ping"),
    _get("version", "/version"),
    _get("root", "/"),
    _get("not-found", "/v1/no-such-endpoint"),
    _get("models-post", "/v1/models", "POST"),
    Case("rerank", "/v1/rerank", {"model": MODEL, "query": "a", "documents": ["b"]}, headers=JSON),
    Case("score", "/score", {"model": MODEL, "text_1": "a", "text_2": "b"}, headers=JSON),
    Case("classify", "/classify", {"model": MODEL, "input": "a"}, headers=JSON),
    Case("pooling", "/pooling", {"model": MODEL, "input": "a"}, headers=JSON),
)  # fmt: skip

CASES: tuple[Case, ...] = CHAT_GOOD + CHAT_BAD + COMPLETIONS + RESPONSES + MESSAGES + OTHERS
