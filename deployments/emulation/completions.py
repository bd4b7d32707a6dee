"""``/v1/completions`` of the emulated engine: from body to job, from job to answer, as vLLM 0.29.0 has them."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

from pydantic import ValidationError

from deployments.emulation import checks
from deployments.emulation.answers import Answer, make_answer
from deployments.emulation.bodies import CompletionBody
from deployments.emulation.chat import check_numbers, rules_of, truncated
from deployments.emulation.errors import ApiError, invalid_body, refused
from deployments.emulation.jobs import DONE, FINGERPRINT, Job, View, data_event, logprob_of
from deployments.emulation.tokens import VOCABULARY, decode, encode, token_text
from deployments.settings import EmulatedSettings


def parse(raw: Any, model: str, settings: EmulatedSettings, job_id: str, created: int) -> CompletionView:
    """Check a body and answer it. :class:`ApiError` when it is refused."""
    if isinstance(raw, dict):
        checks.check_raw_completion(raw)
    try:
        body = CompletionBody.model_validate(raw)
    except ValidationError as error:
        raise invalid_body(error) from None
    checks.check_model(body.model, model)
    if body.max_tokens is None:
        body.max_tokens = CompletionBody.model_fields["max_tokens"].default
    if body.suffix is not None:
        raise refused("suffix is not currently supported")
    prompts = [truncated(prompt, body) for prompt in _prompts(body, settings.context_tokens_max)]
    asked = 1 if body.echo and body.max_tokens == 0 else body.max_tokens
    answers: list[Answer] = []
    for prompt in prompts:
        check_numbers(body, asked, len(prompt), settings.context_tokens_max, body.logprobs)
        rules = rules_of(body, asked, len(prompt), settings)
        answers += [make_answer(prompt, rules, i) for i in range(body.n or 1)]
    if body.max_tokens == 0:
        answers = [replace(answer, deltas=[""] * len(answer.tokens)) for answer in answers]
    prompt_of = [i for i in range(len(prompts)) for _ in range(body.n or 1)]
    job = Job(
        f"cmpl-{body.request_id or job_id}", created, model, prompts, answers, prompt_of,
        "\n".join(map(decode, prompts)), body.cache_salt or "", bool(body.stream),
    )  # fmt: skip
    return CompletionView(job, body)


def _prompts(body: CompletionBody, context_max: int) -> list[list[int]]:
    """Token ids of each prompt."""
    given = body.prompt
    if isinstance(given, str):
        given = [given]
    if not given:
        raise refused("You must pass at least one prompt")
    several = [given] if isinstance(given[0], int) else given
    prompts: list[list[int]] = []
    for one in several:
        if isinstance(one, str) and body.truncate_prompt_tokens is None:
            checks.check_chars(len(one), body.max_tokens, context_max)
        prompt = _encode(one) if isinstance(one, str) else list(one)
        if not prompt:
            raise refused("The decoder prompt cannot be empty")
        if max(prompt) >= VOCABULARY:
            raise refused(f"Token id {max(prompt)} is out of vocabulary")
        prompts.append(prompt)
    return prompts


def _encode(text: str) -> list[int]:
    try:
        return encode(text)
    except UnicodeEncodeError:
        raise refused("TextEncodeInput must be Union[TextInputSequence, Tuple[InputSequence, InputSequence]]") from None


class CompletionView(View):
    """Text completion, whole or in chunks."""

    def __init__(self, job: Job, body: CompletionBody) -> None:
        super().__init__(job)
        options = body.stream_options
        self._usage = bool(options and options.include_usage)
        self._running_usage = self._usage and bool(options and options.continuous_usage_stats)
        self._logprobs = body.logprobs
        self._ids = bool(body.return_token_ids)
        self._echo = [decode(prompt) if body.echo else "" for prompt in job.prompts]
        self._made = 0

    def token(self, index: int, count: int, last: bool) -> bytes:
        """One delta; the first brings the prompt along where it is to be repeated."""
        job, answer = self.job, self.job.answers[index]
        echo = self._echo[job.prompt_of[index]] if count == 1 else ""
        self._made += 1
        choice = {
            "index": index,
            "text": echo + answer.deltas[count - 1],
            "logprobs": self._logprobs_of(answer, count - 1, count),
            "finish_reason": answer.finish_reason if last else None,
            "stop_reason": answer.stop_reason if last else None,
            "prompt_token_ids": job.prompts[job.prompt_of[index]] if self._ids and count == 1 else None,
            "token_ids": [answer.tokens[count - 1]] if self._ids else None,
        }
        chunk = self._chunk([choice])
        if self._running_usage:
            chunk["usage"] = self._counts(self._made) | {"completion_tokens_details": None}
        if last and not self._usage:
            chunk["system_fingerprint"] = FINGERPRINT
        return data_event(chunk)

    def closing(self, cached_tokens: int) -> list[bytes]:
        """Usage where it was asked for, then the end mark."""
        if not self._usage:
            return [DONE]
        usage = self._counts(self.job.output_tokens) | {"prompt_tokens_details": {"cached_tokens": cached_tokens}}
        return [data_event(self._chunk([]) | {"usage": usage, "system_fingerprint": FINGERPRINT}), DONE]

    def broken(self, error: ApiError) -> list[bytes]:
        """The error, then the end mark: vLLM sends it even then."""
        return [data_event(error.openai()), DONE]

    def whole(self, cached_tokens: int) -> dict[str, Any]:
        """The completion."""
        job = self.job
        details = {"cached_tokens": cached_tokens, "created_cache_tokens": None, "multimodal_tokens": None}
        usage = self._counts(job.output_tokens) | {"prompt_tokens_details": details, "completion_tokens_details": None}
        return {
            "id": job.id, "object": "text_completion", "created": job.created, "model": job.model,
            "choices": [self._choice(i) for i in range(len(job.answers))], "service_tier": None,
            "system_fingerprint": FINGERPRINT, "usage": usage, "kv_transfer_params": None, "ec_transfer_params": None,
            "metrics": None,
        }  # fmt: skip

    def _choice(self, index: int) -> dict[str, Any]:
        job, answer = self.job, self.job.answers[index]
        return {
            "index": index,
            "text": self._echo[job.prompt_of[index]] + answer.text,
            "logprobs": self._logprobs_of(answer, 0, len(answer.tokens)),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            "token_ids": answer.tokens if self._ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": job.prompts[job.prompt_of[index]] if self._ids else None,
            "routed_experts": None,
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        job = self.job
        return {
            "id": job.id, "object": "text_completion", "created": job.created, "model": job.model, "choices": choices,
        }  # fmt: skip

    def _counts(self, made: int) -> dict[str, Any]:
        prompt = self.job.prompt_tokens
        return {"prompt_tokens": prompt, "total_tokens": prompt + made, "completion_tokens": made}

    def _logprobs_of(self, answer: Answer, start: int, end: int) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        tokens = answer.tokens[start:end]
        offsets = [0, *accumulate(map(len, answer.deltas))]
        ranks = range(max(1, self._logprobs))
        return {
            "text_offset": offsets[start:end],
            "token_logprobs": [logprob_of(t) for t in tokens],
            "tokens": [token_text(t) for t in tokens],
            "top_logprobs": [{token_text(t + r): logprob_of(t, r) for r in ranks} for t in tokens],
        }
