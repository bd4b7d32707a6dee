"""``/v1/messages`` of the emulated engine: Anthropic's shapes as vLLM 0.29.0 has them."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError

from deployments.emulation import checks
from deployments.emulation.answers import AnswerRules, make_answer
from deployments.emulation.bodies import Block, CountBody, MessagesBody
from deployments.emulation.chat import encode_messages
from deployments.emulation.errors import ApiError, invalid, invalid_body, refused
from deployments.emulation.jobs import Job, View, named_event
from deployments.settings import EmulatedSettings

BodyT = TypeVar("BodyT", bound=CountBody)


def parse(raw: Any, model: str, settings: EmulatedSettings, job_id: str, created: int) -> MessagesView:
    """Check a body and answer it. :class:`ApiError` when it is refused."""
    body = _body(MessagesBody, raw)
    if body.max_tokens <= 0:
        raise _not_positive(body.max_tokens)
    messages = _messages(body, model)
    text = "\n".join(m["content"] for m in messages)
    checks.check_chars(len(text), body.max_tokens, settings.context_tokens_max)
    prompt = encode_messages(messages, model)
    stop = tuple(body.stop_sequences or ())
    checks.check_length(len(prompt), body.max_tokens, settings.context_tokens_max)
    checks.check_sampling({"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k, "stop": stop})
    rules = AnswerRules(
        tokens_max=min(body.max_tokens, settings.context_tokens_max - len(prompt)),
        stop=stop, words=settings.text, repeat_marker=settings.repeat_marker, engine_seed=settings.seed,
    )  # fmt: skip
    job = Job(
        f"chatcmpl-{job_id}", created, model, [prompt], [make_answer(prompt, rules)], [0], text,
        body.cache_salt or "", bool(body.stream),
    )  # fmt: skip
    return MessagesView(job)


def count_tokens(raw: Any, model: str) -> dict[str, Any]:
    """Answer of ``/v1/messages/count_tokens``."""
    body = _body(CountBody, raw)
    tokens = len(encode_messages(_messages(body, model), model))
    return {"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}}


def _body(kind: type[BodyT], raw: Any) -> BodyT:
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise invalid_body(error) from None


def _not_positive(value: int) -> ApiError:
    found = {"type": "value_error", "loc": ("body", "max_tokens"), "msg": "Value error, max_tokens must be positive"}
    return invalid([{**found, "input": value}])


def _messages(body: CountBody, model: str) -> list[dict[str, Any]]:
    if not body.model:
        raise invalid(
            [{"type": "value_error", "loc": ("body", "model"), "msg": "Value error, Model is required", "input": ""}]
        )
    checks.check_model(body.model, model)
    messages = [{"role": m.role, "content": _text(m.content, model)} for m in body.messages]
    if body.system is not None:
        messages.insert(0, {"role": "system", "content": _text(body.system, model)})
    if not body.messages:
        raise refused("Cannot apply chat template to an empty conversation. Provide at least one message.")
    return messages


def _text(content: str | list[Block], model: str) -> str:
    if isinstance(content, str):
        return content
    if any(block.type == "image" for block in content):
        raise refused(f"{model} is not a multimodal model")
    return "\n".join(block.text or str((block.model_extra or {}).get("content") or "") for block in content)


class MessagesView(View):
    """A message, whole or as events."""

    def first(self) -> list[bytes]:
        """The message and its text block begin."""
        usage = {"input_tokens": self.job.prompt_tokens, "output_tokens": 0}
        message = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": usage}
        block = {"type": "text", "text": ""}
        return [
            named_event({"type": "message_start", "message": message}),
            named_event({"type": "content_block_start", "content_block": block, "index": 0}),
        ]

    def token(self, index: int, count: int, last: bool) -> bytes:  # noqa: ARG002 - one choice, ended by closing()
        """One delta."""
        delta = self.job.answers[index].deltas[count - 1]
        if not delta:
            return b""
        event = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": delta}, "index": 0}
        return named_event(event)

    def closing(self, cached_tokens: int) -> list[bytes]:
        """Everything that began ends."""
        return [
            named_event({"type": "content_block_stop", "index": 0}),
            named_event({"type": "message_delta", "delta": self._stop(), "usage": self._usage(cached_tokens)}),
            named_event({"type": "message_stop"}),
        ]

    def broken(self, error: ApiError) -> list[bytes]:
        """An error event; nothing follows it."""
        return [named_event({"type": "error", "error": {"type": "internal_error", "message": error.message}})]

    def whole(self, cached_tokens: int) -> dict[str, Any]:
        """The message; fields without a value are left out."""
        content = [{"type": "text", "text": self.job.answers[0].text}]
        return self._message(content) | self._stop() | {"usage": self._usage(cached_tokens)}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        job = self.job
        return {"id": job.id, "type": "message", "role": "assistant", "content": content, "model": job.model}

    def _stop(self) -> dict[str, Any]:
        answer = self.job.answers[0]
        if answer.finish_reason == "length":
            return {"stop_reason": "max_tokens"}
        if isinstance(answer.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_reason}
        return {"stop_reason": "end_turn"}

    def _usage(self, cached_tokens: int) -> dict[str, Any]:
        return {
            "input_tokens": self.job.prompt_tokens, "output_tokens": self.job.output_tokens,
            "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached_tokens,
        }  # fmt: skip
