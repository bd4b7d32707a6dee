"""Decides whether a stream could go on exactly after its replica was lost, and what a continuation asks for.

A continuation is ``POST /v1/completions`` with token ids as its prompt: the prompt's and those of the answer so far. It
is exact when the model sees nothing else than it would have seen:

    next token = f(prompt + answer so far, sampling parameters)

So what depends on where the answer *began* is out: penalties on output tokens, bad words, grammars, seeds. So is what
an answer shows beyond its text (log probabilities, tool calls, several choices). At temperature 0 the continuation
gives the same tokens; above it the continuation is a draw from the same distribution.

Fields are known by name. One that is not known stops the resume, not the request: who cannot say what a field does to
an answer must not promise to continue it.

It must not touch a stream (``deployments/resume.py``) and not decide whether to resume (``policies``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from deployments.endpoints import Endpoint

CHAT_PATH, COMPLETIONS_PATH = "/v1/chat/completions", "/v1/completions"
GREEDY_BELOW = 1e-5
"""vLLM samples greedily below this temperature."""
COMPLETION_TOKENS_DEFAULT = 16
"""``max_tokens`` of a completion that names none, in OpenAI's API and in vLLM."""

_COPIED = """
    model user logit_bias seed stop temperature top_p top_k min_p repetition_penalty length_penalty stop_token_ids
    include_stop_str_in_output ignore_eos skip_special_tokens allowed_token_ids priority cache_salt session_id
    stream_options stream_interval
"""
COPIED = frozenset(_COPIED.split())
"""Fields a continuation has from its request: they mean the same after any number of tokens."""
_DROPPED = """
    messages prompt documents chat_template chat_template_kwargs add_generation_prompt continue_final_message
    add_special_tokens truncate_prompt_tokens truncation_side reasoning_effort include_reasoning max_tokens
    max_completion_tokens min_tokens stream return_token_ids return_prompt_text request_id return_tokens_as_token_ids
    parallel_tool_calls tool_choice top_logprobs response_format metadata store service_tier safety_identifier
    prompt_cache_key prompt_cache_retention verbosity
"""
DROPPED = frozenset(_DROPPED.split())
"""Fields that made the prompt, are set anew, or mean nothing to an engine."""
OFF: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "n": (None, 1),
        "best_of": (None, 1),
        "use_beam_search": (None, False),
        "logprobs": (None,),
        "prompt_logprobs": (None,),
        "logprob_token_ids": (None, []),
        "echo": (None, False),
        "suffix": (None,),
        "presence_penalty": (None, 0),
        "frequency_penalty": (None, 0),
        "bad_words": (None, []),
        "structured_outputs": (None,),
        "tools": (None,),
        "functions": (None,),
        "function_call": (None,),
        "thinking_token_budget": (None, -1),
        "repetition_detection": (None,),
        "kv_transfer_params": (None,),
        "ec_transfer_params": (None,),
        "vllm_xargs": (None, {}),
        "prompt_embeds": (None, []),
        "routed_experts_prompt_start": (None, 0),
        "return_token_offsets": (None, False),
        "return_assistant_tokens_mask": (None, False),
        "mm_processor_kwargs": (None, {}),
        "media_io_kwargs": (None, {}),
        "spaces_between_special_tokens": (None, True),
    }
)
"""Fields that stop a resume unless they have one of these values, with which they do nothing."""
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of parts of a message that are text and nothing else."""
PARSER_ARGUMENTS = ("reasoning_parser", "tool_call_parser", "enable_auto_tool_choice", "override_generation_config")
"""Engine arguments under which a chat stream is more than its text, or its length is not the request's to say."""


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """How one stream would be continued."""

    chat: bool
    """The stream is a chat completion's, else a text completion's."""
    greedy: bool
    """Tokens can be computed again and come out the same."""
    stop_chars: int
    """A stop string that is not complete yet reaches back at most so many characters."""
    held_chars: int
    """Characters that the engine holds back because a stop string might begin there."""
    tokens_max: int | None
    """Output tokens asked for; ``None``: as many as the context has room for."""
    tokens_min: int
    ids_asked: bool
    """The client itself asked for token ids."""
    usage: bool
    """The stream ends with a usage event."""


def plan_of(fields: Mapping[str, Any], endpoint: Endpoint) -> ResumePlan | str:
    """How to continue the stream that the request body ``fields`` asks for; or, in a word, why that cannot be exact."""
    chat = endpoint.path == CHAT_PATH
    if not chat and endpoint.path != COMPLETIONS_PATH:
        return "endpoint"
    if fields.get("stream") is not True:
        return "no stream"
    return _stopping_field(fields, chat) or _plan(fields, chat)


def engine_reason(engine_args: Mapping[str, Any]) -> str:
    """Why no chat stream of an engine with these arguments can be continued exactly; empty when some can."""
    return next((f"engine argument {name}" for name in PARSER_ARGUMENTS if engine_args.get(name)), "")


def splice(body: bytes, fields: Mapping[str, Any]) -> bytes:
    """``body``, a valid JSON object, with ``fields`` added at its end, where they win over earlier ones of that name.

    The rest of the body stays as it came, byte for byte.
    """
    if not fields:
        return body
    begun = body[: body.rindex(b"}")].rstrip()
    comma = b"" if begun.endswith(b"{") else b","  # only an empty object ends like this
    return begun + comma + msgspec.json.encode(dict(fields))[1:]


def continuation_fields(fields: Mapping[str, Any], plan: ResumePlan, tokens: int, tokens_left: int) -> dict[str, Any]:
    """Fields of a continuation after ``tokens`` output tokens, room for ``tokens_left`` more; all but its prompt."""
    kept = {name: value for name, value in fields.items() if name in COPIED}
    return kept | {
        "max_tokens": tokens_left,
        "min_tokens": max(0, plan.tokens_min - tokens),
        "stream": True,
        "return_token_ids": True,
    }


def _stopping_field(fields: Mapping[str, Any], chat: bool) -> str:
    for name, value in fields.items():
        if name in COPIED or name in DROPPED:
            continue
        if name not in OFF:
            return f"unknown field {name[:60]}"
        if value not in OFF[name] and not (name == "logprobs" and chat and value is False):
            return name
    form = fields.get("response_format")
    if form is not None and not (isinstance(form, dict) and form.get("type") == "text"):
        return "response_format"
    if chat and not _text_only(fields.get("messages")):
        return "messages with more than text"
    if not chat and not _one_prompt(fields.get("prompt")):
        return "several prompts"
    return ""


def _plan(fields: Mapping[str, Any], chat: bool) -> ResumePlan | str:
    greedy = _number(fields.get("temperature"), 1.0) < GREEDY_BELOW
    if fields.get("seed") is not None and not greedy:
        return "seed"
    stops = fields.get("stop")
    stops = [stops] if isinstance(stops, str) else stops or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        return "stop"
    if stops and not greedy:
        return "stop strings above temperature 0"
    tokens_max = fields.get("max_tokens")
    if chat and fields.get("max_completion_tokens") is not None:
        tokens_max = fields["max_completion_tokens"]
    if not chat and tokens_max is None:
        tokens_max = COMPLETION_TOKENS_DEFAULT
    if tokens_max is not None and (type(tokens_max) is not int or tokens_max < 1):
        return "max_tokens"
    options = fields.get("stream_options")
    stop_chars = max((len(stop) for stop in stops), default=1) - 1
    return ResumePlan(
        chat=chat,
        greedy=greedy,
        stop_chars=stop_chars,
        held_chars=0 if fields.get("include_stop_str_in_output") else stop_chars,
        tokens_max=tokens_max,
        tokens_min=int(_number(fields.get("min_tokens"), 0)),
        ids_asked=bool(fields.get("return_token_ids")),
        usage=isinstance(options, dict) and bool(options.get("include_usage")),
    )


def _number(value: object, default: float) -> float:
    return float(value) if isinstance(value, int | float) else default


def _text_only(messages: object) -> bool:
    """Whether chat messages are text; images and sound are no token ids."""
    if not isinstance(messages, list):
        return False
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            if not all(isinstance(p, str) or (isinstance(p, dict) and p.get("type") in TEXT_PARTS) for p in content):
                return False
        elif content is not None and not isinstance(content, str):
            return False
    return True


def _one_prompt(prompt: object) -> bool:
    """A text, or the token ids of one."""
    if isinstance(prompt, list):
        return bool(prompt) and (all(type(token) is int for token in prompt) or _is_one_text(prompt))
    return isinstance(prompt, str)


def _is_one_text(prompt: list[Any]) -> bool:
    return len(prompt) == 1 and (isinstance(prompt[0], str) or _one_prompt(prompt[0]))
