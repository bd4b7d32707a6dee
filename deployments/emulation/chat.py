"""``/v1/chat/completions`` of the emulated engine: from body to job, from job to answer, as vLLM 0.29.0 has them."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from deployments.emulation import checks
from deployments.emulation.answers import AnswerRules, make_answer
from deployments.emulation.bodies import ChatBody, Sampling
from deployments.emulation.errors import ApiError, invalid_body, refused
from deployments.emulation.jobs import DONE, FINGERPRINT, Job, View, data_event, logprob_of
from deployments.emulation.tokens import encode_chat, token_text
from deployments.settings import EmulatedSettings


def parse(raw: Any, model: str, settings: EmulatedSettings, job_id: str, created: int) -> ChatView:
    """Check a body and answer it. :class:`ApiError` when it is refused."""
    if isinstance(raw, dict):
        checks.check_raw_chat(raw)
    try:
        body = ChatBody.model_validate(raw)
    except ValidationError as error:
        raise invalid_body(error) from None
    checks.check_messages(body.messages)
    checks.check_model(body.model, model)
    _check_template(body, raw)
    text = "\n".join(checks.message_text(m.get("content"), model) for m in body.messages)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if body.truncate_prompt_tokens is None:
        checks.check_chars(len(text), asked, settings.context_tokens_max)
    prompt = truncated(encode_messages(body.messages, model, not body.continue_final_message), body)
    check_numbers(body, asked, len(prompt), settings.context_tokens_max, body.top_logprobs or None)
    rules = rules_of(body, asked, len(prompt), settings)
    answers = [make_answer(prompt, rules, i) for i in range(body.n or 1)]
    job = Job(
        f"chatcmpl-{body.request_id or job_id}", created, model, [prompt], answers, [0] * len(answers), text,
        body.cache_salt or "", bool(body.stream),
    )  # fmt: skip
    return ChatView(job, body)


def _check_template(body: ChatBody, raw: Any) -> None:
    if body.chat_template is not None:
        raise refused(
            "Chat template is passed with request, but --trust-request-chat-template is not set. Refused request with "
            "untrusted chat template."
        )
    if body.tools and raw.get("tool_choice", "auto") == "auto":
        raise refused('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')
    if not body.messages:
        raise refused("Cannot apply chat template to an empty conversation. Provide at least one message.")


def encode_messages(messages: list[Any], model: str, generation_prompt: bool = True) -> list[int]:
    """Tokens of checked chat messages."""
    pairs = [(m["role"], checks.message_text(m.get("content"), model)) for m in messages]
    try:
        return encode_chat(pairs, generation_prompt)
    except UnicodeEncodeError:
        raise refused("TextEncodeInput must be Union[TextInputSequence, Tuple[InputSequence, InputSequence]]") from None


def truncated(prompt: list[int], body: Sampling) -> list[int]:
    """The prompt's end when the request asks for no more."""
    limit = body.truncate_prompt_tokens
    return prompt if limit is None or limit < 0 else prompt[len(prompt) - min(limit, len(prompt)) :]


def check_numbers(
    body: Sampling, asked: int | None, prompt_tokens: int, context_max: int, logprobs: int | None
) -> None:
    """Lengths, then sampling, then what the engine itself refuses."""
    checks.check_length(prompt_tokens, asked, context_max)
    fields = body.model_dump(exclude={"messages", "prompt"})
    stop = [body.stop] if isinstance(body.stop, str) else body.stop
    checks.check_sampling(fields | {"stop": stop, "max_tokens": asked})
    fmt = body.response_format
    schema = fmt.json_schema.json_schema if fmt and fmt.json_schema else None
    checks.check_engine(fields | {"logprobs": logprobs, "schema": schema})


def rules_of(body: Sampling, asked: int | None, prompt_tokens: int, settings: EmulatedSettings) -> AnswerRules:
    """How this request's answers are made."""
    room = settings.context_tokens_max - prompt_tokens
    form = body.response_format
    structured = body.structured_outputs or {}
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return AnswerRules(
        tokens_max=max(1, room if asked is None else min(asked, room)),
        tokens_min=body.min_tokens,
        stop=stop,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        keep_stop=body.include_stop_str_in_output,
        ignore_end=body.ignore_eos,
        json_object=(form is not None and form.type != "text") or structured.get("json") is not None,
        words=settings.text,
        repeat_marker=settings.repeat_marker,
        engine_seed=settings.seed,
        request_seed=body.seed,
    )


class ChatView(View):
    """Chat completion, whole or in chunks."""

    def __init__(self, job: Job, body: ChatBody) -> None:
        super().__init__(job)
        options = body.stream_options
        self._usage = bool(options and options.include_usage)
        self._running_usage = self._usage and bool(options and options.continuous_usage_stats)
        self._logprobs = bool(body.logprobs)
        self._top = max(0, body.top_logprobs or 0)
        self._ids = bool(body.return_token_ids)
        self._made = 0

    def first(self) -> list[bytes]:
        """The role of each choice."""
        extra = {"prompt_token_ids": self.job.prompts[0] if self._ids else None, "prompt_text": None}
        events = []
        for index in range(len(self.job.answers)):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            events.append(data_event(self._chunk([choice]) | self._usage_now(0) | extra))
        return events

    def token(self, index: int, count: int, last: bool) -> bytes:
        """One delta."""
        answer = self.job.answers[index]
        token = answer.tokens[count - 1]
        self._made += 1
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"content": answer.deltas[count - 1]},
            "logprobs": {"content": [self._logprob(token)]} if self._logprobs else None,
            "finish_reason": answer.finish_reason if last else None,
        }
        if last:
            choice["stop_reason"] = answer.stop_reason
        choice["token_ids"] = [token] if self._ids else None
        chunk = self._chunk([choice]) | self._usage_now(self._made)
        if last and not self._usage:
            chunk["system_fingerprint"] = FINGERPRINT
        return data_event(chunk)

    def closing(self, cached_tokens: int) -> list[bytes]:
        """Usage where it was asked for, then the end mark."""
        if not self._usage:
            return [DONE]
        details = {"cached_tokens": cached_tokens, "created_cache_tokens": 0}
        usage = self._counts(self.job.output_tokens) | {"prompt_tokens_details": details}
        return [data_event(self._chunk([]) | {"usage": usage, "system_fingerprint": FINGERPRINT}), DONE]

    def broken(self, error: ApiError) -> list[bytes]:
        """The error, then the end mark: vLLM sends it even then."""
        return [data_event(error.openai()), DONE]

    def whole(self, cached_tokens: int) -> dict[str, Any]:
        """The completion."""
        job = self.job
        details = {"cached_tokens": cached_tokens, "created_cache_tokens": 0, "multimodal_tokens": None}
        usage = self._counts(job.output_tokens) | {"prompt_tokens_details": details, "completion_tokens_details": None}
        return {
            "id": job.id, "object": "chat.completion", "created": job.created, "model": job.model,
            "choices": [self._choice(i) for i in range(len(job.answers))], "service_tier": None,
            "system_fingerprint": FINGERPRINT, "usage": usage, "prompt_logprobs": None,
            "prompt_token_ids": job.prompts[0] if self._ids else None, "prompt_text": None,
            "kv_transfer_params": None, "ec_transfer_params": None, "metrics": None,
        }  # fmt: skip

    def _choice(self, index: int) -> dict[str, Any]:
        answer = self.job.answers[index]
        message = {
            "role": "assistant", "content": answer.text, "refusal": None, "annotations": None, "audio": None,
            "function_call": None, "reasoning": None,
        }  # fmt: skip
        return {
            "index": index,
            "message": message,
            "logprobs": {"content": [self._logprob(t) for t in answer.tokens]} if self._logprobs else None,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            "token_ids": answer.tokens if self._ids else None,
            "routed_experts": None,
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        job = self.job
        head = {"id": job.id, "object": "chat.completion.chunk", "created": job.created, "model": job.model}
        return head | {"choices": choices}

    def _counts(self, made: int) -> dict[str, Any]:
        prompt = self.job.prompt_tokens
        return {"prompt_tokens": prompt, "total_tokens": prompt + made, "completion_tokens": made}

    def _usage_now(self, made: int) -> dict[str, Any]:
        return {"usage": self._counts(made) | {"completion_tokens_details": None}} if self._running_usage else {}

    def _logprob(self, token: int) -> dict[str, Any]:
        top = [_one_logprob(token + i, token, i) for i in range(self._top)]
        return _one_logprob(token, token, 0) | {"top_logprobs": top}


def _one_logprob(token: int, chosen: int, rank: int) -> dict[str, Any]:
    text = token_text(token)
    return {"token": text, "logprob": logprob_of(chosen, rank), "bytes": list(text.encode())}
