"""Checks of the emulated engine beyond the schema, in the order, words and parameters of vLLM 0.29.0.

Every function either returns or raises :class:`ApiError`. They decide nothing else: no text is made here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from deployments.emulation.errors import ApiError, invalid, missing, model_not_found, refused
from deployments.emulation.tokens import CHUNK_CHARS, VOCABULARY

N_MAX = 16_384
LOGPROBS_MAX = 20
MESSAGE_SCHEMA = "ChatCompletionDeveloperMessageParam"
"""The first branch of vLLM's union of messages; its errors come first."""
SCHEMA_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})


def check_raw(raw: Mapping[str, Any]) -> None:
    """Checks of a chat or completion body that come before its schema."""
    if raw.get("stream_options") and not raw.get("stream"):
        raise refused("Stream options can only be defined when `stream=True`.", "stream_options")
    fmt = raw.get("response_format")
    if isinstance(fmt, dict) and fmt.get("type") == "json_schema" and fmt.get("json_schema") is None:
        raise refused(
            "When response_format type is 'json_schema', the 'json_schema' field must be provided.", "response_format"
        )
    _check_structured(raw.get("structured_outputs"))
    prompt_logprobs = _whole(raw, "prompt_logprobs")
    if prompt_logprobs is not None:
        if raw.get("stream") and (prompt_logprobs > 0 or prompt_logprobs == -1):
            raise refused("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
        if prompt_logprobs < 0 and prompt_logprobs != -1:
            raise refused("`prompt_logprobs` must be a positive value or -1.", "prompt_logprobs", value=prompt_logprobs)


def check_raw_chat(raw: Mapping[str, Any]) -> None:
    """Checks of a chat body that come before its schema."""
    if "messages" in raw and raw["messages"] is None:
        raise refused("'NoneType' object is not iterable")
    check_raw(raw)
    top = _whole(raw, "top_logprobs")
    if top is not None:
        if top < 0 and top != -1:
            raise refused("`top_logprobs` must be a positive value or -1.", "top_logprobs", value=top)
        if top != 0 and not raw.get("logprobs"):
            raise refused("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
    if raw.get("continue_final_message") and raw.get("add_generation_prompt"):
        raise refused("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    tools, choice = raw.get("tools"), raw.get("tool_choice")
    if tools == []:
        raise refused(
            "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.", "tools"
        )
    if choice not in (None, "none") and tools is None:
        raise refused("When using `tool_choice`, `tools` must be set.", "tool_choice")


def check_raw_completion(raw: Mapping[str, Any]) -> None:
    """Checks of a completion body that come before its schema."""
    check_raw(raw)
    logprobs = _whole(raw, "logprobs")
    if logprobs is not None and logprobs < 0 and logprobs != -1:
        raise refused("`logprobs` must be a positive value or -1.", "logprobs", value=logprobs)
    if raw.get("prompt") in (None, "") and raw.get("prompt_embeds") in (None, []):
        raise refused("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if raw.get("prompt_embeds") is not None:
        raise refused("You must set `--enable-prompt-embeds` to input `prompt_embeds`.", "prompt_embeds")


def _whole(raw: Mapping[str, Any], name: str) -> int | float | None:
    value = raw.get(name)
    if value is None or isinstance(value, (int, float)):
        return value
    raise refused(f"`{name}` must be an integer.", name, value=value)


def _check_structured(given: Any) -> None:
    if not isinstance(given, dict):
        return
    if sum(given.get(k) is not None for k in ("json", "regex", "choice")) > 1:
        raise refused("You can only use one kind of constraints for structured outputs ('json', 'regex' or 'choice').")


def check_messages(messages: list[Any]) -> None:
    """Form of chat messages: objects with a text role, and content where the role has it."""
    for i, message in enumerate(messages):
        at: tuple[str | int, ...] = ("messages", i, MESSAGE_SCHEMA)
        if not isinstance(message, dict):
            msg = "Input should be a valid dictionary"
            raise invalid([{"type": "dict_type", "loc": ("body", *at), "msg": msg, "input": message}])
        if "role" not in message:
            raise missing(*at, *(("role",) if "content" in message else ("content",)), given=message)
        if not isinstance(message["role"], str):
            msg = "Input should be 'developer'"
            raise invalid(
                [{"type": "literal_error", "loc": ("body", *at, "role"), "msg": msg, "input": message["role"]}]
            )
        content = message.get("content")
        if content is not None and not isinstance(content, (str, list)):
            found = {"type": "string_type", "msg": "Input should be a valid string", "input": content}
            raise invalid([{**found, "loc": ("body", *at, "content", "str")}] * 2)


def message_text(content: Any, model: str) -> str:
    """Text of a chat message's content."""
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, str):
            parts.append(part)
        elif kind in ("text", "input_text", "output_text", "refusal", "thinking"):
            parts.append(str(part.get("text") or part.get(kind) or ""))
        elif kind in ("image_url", "input_image", "image", "input_audio", "audio_url", "video_url", "file"):
            raise refused(f"{model} is not a multimodal model")
        else:
            raise refused(
                f"1 validation error for ValidatorIterator\n0.text\n  Field required [input_value={part!r:.200}]"
            )
    return "\n".join(parts)


def check_model(given: str | None, served: str) -> None:
    """The model must be the one that is served, or not named."""
    if given and given != served:
        raise model_not_found(given)


def check_length(input_tokens: int, output_tokens: int | None, context_max: int, param: str = "max_tokens") -> None:
    """Prompt and asked output must fit the context. ``output_tokens`` ``None``: not asked for."""
    asked = output_tokens or 0
    if asked > context_max:
        raise refused(
            f"{param}={asked} cannot be greater than max_model_len=max_total_tokens={context_max}. Please request "
            "fewer output tokens.", param, value=asked,
        )  # fmt: skip
    limit = max(0, context_max - asked)
    if input_tokens > limit or input_tokens >= context_max:
        raise refused(
            f"This model's maximum context length is {context_max} tokens. However, you requested {asked} output "
            f"tokens and your prompt contains {input_tokens} input tokens, for a total of {input_tokens + asked} "
            "tokens. Please reduce the length of the input prompt or the number of requested output tokens.",
            "input_tokens", value=input_tokens,
        )  # fmt: skip


def check_chars(chars: int, output_tokens: int | None, context_max: int, param: str = "max_tokens") -> None:
    """Refuse a text that cannot fit before it is tokenised: a token has at most :data:`CHUNK_CHARS` characters."""
    if chars > CHUNK_CHARS * context_max:
        check_length(chars // CHUNK_CHARS, output_tokens, context_max, param)


def check_sampling(p: Mapping[str, Any]) -> None:
    """Ranges of sampling parameters, by vLLM's names; absent or ``None`` is not checked."""
    n = _n(p)
    for name in ("presence_penalty", "frequency_penalty"):
        if not -2 <= _number(p, name, 0.0) <= 2:
            raise refused(f"{name} must be in [-2, 2], got {float(p[name])}.")
    if not _number(p, "repetition_penalty", 1.0) > 0:
        raise refused(f"repetition_penalty must be greater than zero, got {float(p['repetition_penalty'])}.")
    _check_temperature(_number(p, "temperature", 1.0))
    top_p = _number(p, "top_p", 1.0)
    if not 0 < top_p <= 1:
        raise refused(f"top_p must be in (0, 1], got {top_p}.", "top_p", value=top_p)
    if _number(p, "top_k", 0) < -1:
        raise refused(f"top_k must be 0 (disable), or at least 1, got {p['top_k']}.")
    if not 0 <= _number(p, "min_p", 0.0) <= 1:
        raise refused(f"min_p must be in [0, 1], got {float(p['min_p'])}.")
    _check_counts(p)
    if any(not text for text in p.get("stop") or ()):
        raise refused("stop cannot contain an empty string.")
    if n > 1 and _number(p, "temperature", 1.0) < 1e-5:
        raise refused(f"n must be 1 when using greedy sampling, got {n}.")


def _n(p: Mapping[str, Any]) -> int:
    n = p.get("n")
    n = 1 if n is None else int(n)
    if n < 1:
        raise refused(f"n must be at least 1, got {n}.")
    if n > N_MAX:
        raise refused(
            f"n must be at most {N_MAX}, got {n}. To increase this limit, set the VLLM_MAX_N_SEQUENCES environment "
            "variable."
        )
    return n


def _number(p: Mapping[str, Any], name: str, default: float) -> float:
    value = p.get(name)
    return default if value is None else float(value)


def _check_temperature(temperature: float) -> None:
    if not math.isfinite(temperature):
        raise refused(f"temperature must be a finite number, got {temperature}.", "temperature", value=temperature)
    if temperature < 0:
        raise refused(f"temperature must be non-negative, got {temperature}.", "temperature", value=temperature)
    if temperature > 2:
        raise refused(f"temperature must be in [0, 2], got {temperature}.", "temperature", value=temperature)


def _check_counts(p: Mapping[str, Any]) -> None:
    most, least = p.get("max_tokens"), p.get("min_tokens") or 0
    if most is not None and most < 1:
        raise refused(f"max_tokens must be at least 1, got {most}.", "max_tokens", value=most)
    if least < 0:
        raise refused(f"min_tokens must be greater than or equal to 0, got {least}.")
    if most is not None and least > most:
        raise refused(f"min_tokens must be less than or equal to max_tokens={most}, got {least}.")


def check_engine(p: Mapping[str, Any]) -> None:
    """What the engine itself refuses: vocabulary, log probabilities, grammars."""
    logprobs = p.get("logprobs")
    if logprobs is not None and logprobs is not True and logprobs > LOGPROBS_MAX:
        message = f"Requested sample logprobs of {logprobs}, which is greater than max allowed: {LOGPROBS_MAX}"
        raise refused(message, "logprobs", value=logprobs)
    bias = p.get("logit_bias") or {}
    words = [key for key in bias if not key.lstrip("-").isdigit()]
    if words:
        text = f"logit_bias contains key(s) that cannot be converted to integer token IDs: {words}"
        raise refused(text, "logit_bias", value=words)
    beyond = [int(key) for key in bias if not 0 <= int(key) < VOCABULARY]
    if beyond:
        text = f"token_id(s) {beyond} in logit_bias contain out-of-vocab token ids. Vocabulary size: {VOCABULARY}"
        raise refused(text, "logit_bias", value=beyond)
    allowed = p.get("allowed_token_ids")
    if allowed is not None and any(not 0 <= token < VOCABULARY for token in allowed):
        raise refused("allowed_token_ids contains out-of-vocab token id!", "allowed_token_ids", value=allowed)
    _check_grammar(p.get("structured_outputs"), p.get("schema"))


def _check_grammar(structured: Any, schema: Any) -> None:
    structured = structured if isinstance(structured, dict) else {}
    if structured.get("json_object") is False:
        why = "omit structured_outputs to disable structured outputs"
        raise refused(f"structured_outputs.json_object must be True if set; {why}")
    if structured.get("json") == "":
        raise refused("structured_outputs.json cannot be an empty string")
    grammar = structured.get("grammar")
    if isinstance(grammar, str) and grammar.count("(") != grammar.count(")"):
        raise refused("Invalid grammar specification: Failed to convert the grammar from GBNF to Lark: Expected ')'")
    for found in (schema, structured.get("json")):
        kind = found.get("type") if isinstance(found, dict) else None
        if isinstance(kind, str) and kind not in SCHEMA_TYPES:
            raise refused(f"Grammar error: Invalid type: {kind}")


def full() -> ApiError:
    """503 of an engine whose queue is full."""
    return ApiError(503, "ServiceUnavailableError", "Too many requests are waiting.")
