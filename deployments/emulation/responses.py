"""``/v1/responses`` of the emulated engine, as vLLM 0.29.0 has it without its store: nothing is kept afterwards."""

from __future__ import annotations

import secrets
from typing import Any

from pydantic import ValidationError

from deployments.emulation import checks
from deployments.emulation.answers import AnswerRules, make_answer
from deployments.emulation.bodies import ResponsesBody
from deployments.emulation.chat import encode_messages
from deployments.emulation.errors import ApiError, invalid_body, refused
from deployments.emulation.jobs import Job, View, named_event
from deployments.settings import EmulatedSettings

NO_STORE = (
    "This vLLM engine does not support `store=True` and therefore does not support the background mode. To enable "
    "these features, set the environment variable `VLLM_ENABLE_RESPONSES_API_STORE=1` when launching the vLLM server."
)


def not_found(response_id: str) -> ApiError:
    """404 for any stored response."""
    return ApiError(404, "invalid_request_error", f"Response with id '{response_id}' not found.", "response_id")


def parse(raw: Any, model: str, settings: EmulatedSettings, job_id: str, created: int) -> ResponsesView:
    """Check a body and answer it. :class:`ApiError` when it is refused."""
    if isinstance(raw, dict) and not raw.get("tools") and raw.get("tool_choice") == "required":
        raise refused("Tool choice 'required' must be specified with 'tools' parameter.", "tool_choice")
    try:
        body = ResponsesBody.model_validate(raw)
    except ValidationError as error:
        raise invalid_body(error) from None
    checks.check_model(body.model, model)
    if body.background:
        raise ApiError(400, "invalid_request_error", NO_STORE, "background")
    if body.previous_response_id is not None:
        raise not_found(body.previous_response_id)
    messages = _messages(body)
    text = "\n".join(checks.message_text(m["content"], model) for m in messages)
    checks.check_chars(len(text), body.max_output_tokens, settings.context_tokens_max, "max_output_tokens")
    prompt = encode_messages(messages, model)
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    checks.check_length(len(prompt), body.max_output_tokens, settings.context_tokens_max, "max_output_tokens")
    checks.check_sampling(
        {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k, "stop": stop,
         "max_tokens": body.max_output_tokens}
    )  # fmt: skip
    room = settings.context_tokens_max - len(prompt)
    form = body.text.format.model_dump() if body.text and body.text.format else {}
    rules = AnswerRules(
        tokens_max=room if body.max_output_tokens is None else min(body.max_output_tokens, room),
        stop=stop,
        ignore_end=body.ignore_eos,
        json_object=form.get("type") in ("json_object", "json_schema"),
        words=settings.text,
        repeat_marker=settings.repeat_marker,
        engine_seed=settings.seed,
        request_seed=body.seed,
    )
    job = Job(
        body.request_id or f"resp_{job_id}", created, model, [prompt], [make_answer(prompt, rules)], [0], text,
        body.cache_salt or "", bool(body.stream),
    )  # fmt: skip
    return ResponsesView(job, body)


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    for item in items:
        if not isinstance(item, dict):
            raise refused(f"Invalid input item: {item!r:.100}", "input")
        content = item.get("content", item.get("output", item.get("arguments", "")))
        content = content if isinstance(content, (str, list)) else str(content)
        messages.append({"role": str(item.get("role", "user")), "content": content})
    if not items:
        raise refused("Cannot apply chat template to an empty conversation. Provide at least one message.")
    return messages


class ResponsesView(View):
    """A response object, whole or as events."""

    def __init__(self, job: Job, body: ResponsesBody) -> None:
        super().__init__(job)
        self._body = body
        self._item_id = secrets.token_hex(8)
        self._events = 0

    def opening(self) -> list[bytes]:
        """The response in progress, twice, as OpenAI's clients expect it."""
        shown = self._response("in_progress", [], None)
        return [self._event(f"response.{name}", response=shown) for name in ("created", "in_progress")]

    def first(self) -> list[bytes]:
        """The message and its text part begin."""
        item = {"id": self._item_id, "content": [], "role": "assistant", "status": "in_progress", "type": "message"}
        part = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
        return [
            self._event("response.output_item.added", item=item | {"phase": None}, output_index=0),
            self._event("response.content_part.added", **self._at(), part=part),
        ]

    def token(self, index: int, count: int, last: bool) -> bytes:  # noqa: ARG002 - one choice, ended by closing()
        """One delta."""
        delta = self.job.answers[index].deltas[count - 1]
        if not delta:
            return b""
        return self._event("response.output_text.delta", **self._at(), delta=delta, logprobs=[])

    def closing(self, cached_tokens: int) -> list[bytes]:
        """Everything that began ends, the whole response last."""
        text = self.job.answers[0].text
        item = self._item(self._item_id) | {"summary": []}
        return [
            self._event("response.output_text.done", **self._at(), text=text, logprobs=[]),
            self._event("response.content_part.done", **self._at(), part=_part(text)),
            self._event("response.output_item.done", item=item, output_index=0),
            self._event("response.completed", response=self.whole(cached_tokens)),
        ]

    def broken(self, error: ApiError) -> list[bytes] | None:  # noqa: ARG002 - nothing is said of it
        """There is no error event in vLLM: the stream is cut."""
        return None

    def whole(self, cached_tokens: int) -> dict[str, Any]:
        """The finished response."""
        status = "incomplete" if self.job.answers[0].finish_reason == "length" else "completed"
        return self._response(status, [self._item(f"msg_{self._item_id}")], cached_tokens)

    def _at(self) -> dict[str, Any]:
        return {"content_index": 0, "item_id": self._item_id, "output_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = named_event({**fields, "sequence_number": self._events, "type": kind})
        self._events += 1
        return event

    def _item(self, item_id: str) -> dict[str, Any]:
        return {
            "id": item_id, "content": [_part(self.job.answers[0].text)], "role": "assistant", "status": "completed",
            "type": "message", "phase": None,
        }  # fmt: skip

    def _response(self, status: str, output: list[dict[str, Any]], cached_tokens: int | None) -> dict[str, Any]:
        body, job = self._body, self.job
        return {
            "id": job.id, "created_at": job.created,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions, "metadata": body.metadata, "model": job.model, "object": "response",
            "output": output, "parallel_tool_calls": True,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "tool_choice": body.tool_choice if body.tools else "none", "tools": body.tools,
            "top_p": 1.0 if body.top_p is None else body.top_p, "background": False,
            "max_output_tokens": body.max_output_tokens, "max_tool_calls": None, "previous_response_id": None,
            "prompt": None, "reasoning": None, "service_tier": body.service_tier, "status": status,
            "text": _text_config(body), "top_logprobs": None, "truncation": body.truncation,
            "usage": None if cached_tokens is None else self._usage(cached_tokens), "user": body.user,
            "presence_penalty": body.presence_penalty or 0.0, "frequency_penalty": body.frequency_penalty or 0.0,
            "kv_transfer_params": None, "ec_transfer_params": None, "input_messages": None, "output_messages": None,
        }  # fmt: skip

    def _usage(self, cached_tokens: int) -> dict[str, Any]:
        prompt, made = self.job.prompt_tokens, self.job.output_tokens
        turns: list[int] = []
        return {
            "input_tokens": prompt,
            "input_tokens_details": {
                "cached_tokens": cached_tokens, "input_tokens_per_turn": turns, "cached_tokens_per_turn": turns,
            },
            "output_tokens": made,
            "output_tokens_details": {
                "reasoning_tokens": 0, "tool_output_tokens": 0, "output_tokens_per_turn": turns,
                "tool_output_tokens_per_turn": turns,
            },
            "total_tokens": prompt + made,
        }  # fmt: skip


def _part(text: str) -> dict[str, Any]:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}


def _text_config(body: ResponsesBody) -> dict[str, Any] | None:
    if body.text is None:
        return None
    form = None if body.text.format is None else body.text.format.model_dump()
    if form is not None and form.get("type") == "json_schema":
        form = {"name": None, "schema": None, "type": None, "description": None, "strict": None} | form
    return {"format": form, "verbosity": None}
