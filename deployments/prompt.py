"""Reads a request body once, for routing only: model, stream, sizes and prefix blocks. The bytes go on unchanged.

Prompt text is laid out in the order the engine's template will see it (tools, then message after message), cut into
blocks of ``block_bytes`` and hashed as a chain:

    hash[-1] = xxh3_64(model, tenant, cache salt)
    hash[i]  = xxh3_64(block[i], seed=hash[i-1])        full blocks only, at most request_blocks_max

so two prompts share their first n hashes exactly when they share their first n blocks, model, tenant and salt. Tokens
are estimated: ``bytes / bytes_per_token``, where the ratio is learned from what engines report (:class:`TokenRatio`).

Only what the gateway itself needs is checked; every other field is the engine's to judge. It must not keep the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from deployments.endpoints import Endpoint, PromptKind
from deployments.errors import GatewayError, bad_request, model_not_found
from deployments.resume_plan import ResumePlan, plan_of
from policies.types import BlockHash

OUTPUT_TOKENS_MAX = 10_000_000
"""A larger ``max_tokens`` is taken as this for counting load; the engine judges the number itself."""
CHOICES_MAX = 16_384
"""Likewise for ``n`` times the prompts of a batch; engines allow no larger ``n``."""
TOKEN_ID_BYTES = 4


class TokenRatio:
    """Bytes of prompt text per token, learned from engines' true counts by an exponential mean.

    Starts at 4, a common figure for English text; kept in [1, 16].
    """

    def __init__(self) -> None:
        self.bytes_per_token = 4.0

    def observe(self, prompt_bytes: int, prompt_tokens: int) -> None:
        """Take one request's text size and the engine's count. Small prompts are mostly template and say little."""
        if prompt_tokens >= 64 and prompt_bytes > 0:
            ratio = min(16.0, max(1.0, prompt_bytes / prompt_tokens))
            self.bytes_per_token += 0.1 * (ratio - self.bytes_per_token)


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """How prompts are cut, from the routing configuration."""

    block_bytes: int
    request_blocks_max: int
    bytes_per_token: float

    @property
    def block_tokens(self) -> int:
        """Estimated tokens in one block, at least 1."""
        return max(1, round(self.block_bytes / self.bytes_per_token))


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """What the gateway needs of a body."""

    model: str
    stream: bool
    prompt_bytes: int
    """Bytes of prompt text; token ids count as ``TOKEN_ID_BYTES`` each."""
    prompt_tokens: int
    """Estimated load in computed prompt tokens, at least 1."""
    output_tokens_max: int | None
    """Of all its answers together; ``None``: it names no limit."""
    choices: int
    """Answers it asks for: ``n`` for each prompt of a batch."""
    blocks: tuple[BlockHash, ...]
    metadata: object = None
    """The body's ``metadata``, as it came."""
    cache_salt: object = None
    """The body's own ``cache_salt``, as it came."""
    plan: ResumePlan | None = None
    """How its stream could be resumed exactly; ``None``: it could not."""


def parse_body(body: bytes, endpoint: Endpoint, model: str, tenant: str, sizes: BlockSizes) -> ParsedBody:
    """Read ``body`` for ``endpoint`` of a gateway that serves ``model``.

    Raises:
        GatewayError: 400 for what is not a JSON object or has a ``model`` or ``stream`` of the wrong type, 404 for a
            model that is not served.
    """
    fields = _decode(body)
    _check_model(fields, endpoint, model)
    stream = _stream_flag(fields)
    head, extra_bytes, ids = _Text(fields).read(endpoint.prompt)
    salt = fields.get("cache_salt")
    seed = xxh3_64_intdigest(f"{model}\0{tenant}\0{salt if isinstance(salt, str) else ''}".encode("utf-8", "replace"))
    total_bytes = len(head) + extra_bytes
    ratio = TOKEN_ID_BYTES if ids else sizes.bytes_per_token
    tokens = max(1, round(total_bytes / ratio * endpoint.prompt_weight))
    blocks = block_hashes(head, seed, sizes) if endpoint.prompt_weight == 1 else ()
    return ParsedBody(
        model=model,
        stream=stream and endpoint.streams,
        prompt_bytes=total_bytes,
        prompt_tokens=tokens,
        output_tokens_max=_output_tokens(fields, endpoint) if endpoint.generates else 0,
        choices=choices_of(fields, endpoint),
        blocks=blocks,
        metadata=fields.get("metadata"),
        cache_salt=salt,
        plan=_plan(fields, endpoint) if stream else None,
    )


def _plan(fields: dict[str, Any], endpoint: Endpoint) -> ResumePlan | None:
    plan = plan_of(fields, endpoint)
    return None if isinstance(plan, str) else plan


def block_hashes(text: bytes, seed: int, sizes: BlockSizes) -> tuple[BlockHash, ...]:
    """Chain hashes of the full blocks of ``text``."""
    size = sizes.block_bytes
    view = memoryview(text)
    hashes: list[int] = []
    for start in range(0, min(len(text) // size, sizes.request_blocks_max) * size, size):
        seed = xxh3_64_intdigest(view[start : start + size], seed)
        hashes.append(seed)
    return tuple(hashes)


# --- checks -----------------------------------------------------------------------------------------------------------


def _decode(body: bytes) -> dict[str, Any]:
    if not body.strip():
        raise bad_request("The request body is empty; a JSON object is needed.")
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        why = str(error).removeprefix("JSON is malformed: ")
        raise bad_request(f"The request body is not valid JSON: {why}.", code="invalid_json") from None
    except RecursionError:
        raise bad_request("The request body is nested too deeply.", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise bad_request(f"The request body must be a JSON object, not {_json_type(fields)}.", code="invalid_json")
    return fields


def _check_model(fields: dict[str, Any], endpoint: Endpoint, model: str) -> None:
    asked = fields.get("model")
    if asked is None:
        if endpoint.model_optional:
            return
        raise bad_request("you must provide a model parameter", "model")
    if not isinstance(asked, str):
        raise bad_request(f"model: must be a string, not {_json_type(asked)}.", "model", "invalid_type")
    if asked != model:
        raise model_not_found(asked)


def _stream_flag(fields: dict[str, Any]) -> bool:
    stream = fields.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise bad_request(f"stream: must be true or false, not {_json_type(stream)}.", "stream", "invalid_type")
    return bool(stream)


def _output_tokens(fields: dict[str, Any], endpoint: Endpoint) -> int | None:
    limit = limit_of(fields, endpoint)[1]
    return None if limit is None else min(limit, OUTPUT_TOKENS_MAX) * choices_of(fields, endpoint)


def limit_of(fields: dict[str, Any], endpoint: Endpoint) -> tuple[str, int | None]:
    """Name and value of the field that limits each answer; ``None``: there is no limit, or none that makes sense."""
    names = endpoint.output_limits
    name = next((n for n in names if fields.get(n) is not None), names[-1])
    limit = whole_of(fields.get(name))
    return name, limit if limit is not None and limit >= 0 else None


def choices_of(fields: dict[str, Any], endpoint: Endpoint) -> int:
    """Answers that a body asks for, 1 to ``CHOICES_MAX``."""
    prompt = fields.get("prompt") if endpoint.prompt is PromptKind.PROMPT else None
    batch = len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else 1
    return min(CHOICES_MAX, batch * max(1, whole_of(fields.get("n")) or 1))


def whole_of(value: object) -> int | None:
    """``value`` as engines read a whole number: one in a string, and a float without a fraction, are taken as well."""
    if isinstance(value, int):
        return int(value)
    try:
        number = float(value) if isinstance(value, str | float) else 0.5
    except ValueError:
        return None
    return int(number) if number.is_integer() else None


def _json_type(value: object) -> str:
    names: dict[type, str] = {
        bool: "a boolean",
        str: "a string",
        list: "an array",
        dict: "an object",
        type(None): "null",
    }
    return names.get(type(value), "a number")


# --- layout of the prompt ---------------------------------------------------------------------------------------------


class _Text:
    """Lays out the prompt of one body as bytes. Wrongly typed parts are skipped: the engine refuses them."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields
        self._parts: list[bytes] = []
        self._extra_bytes = 0
        self._ids = False

    def read(self, kind: PromptKind) -> tuple[bytes, int, bool]:
        """The prompt (of a batch, the first), bytes of a batch's other prompts, and whether it is token ids."""
        fields = self._fields
        if kind is PromptKind.PROMPT_OR_CHAT:
            kind = PromptKind.CHAT if "messages" in fields else PromptKind.PROMPT
        if kind is PromptKind.CHAT:
            self._head(("tools", "documents", "chat_template_kwargs"))
            self._message("system", fields.get("system"))
            self._messages(fields.get("messages"))
        elif kind is PromptKind.PROMPT:
            self._prompts(fields.get("prompt"))
        elif kind is PromptKind.TOKENS:
            self._prompts(fields.get("tokens"))
        else:
            self._head(("tools",))
            self._message("system", fields.get("instructions"))
            self._input(fields.get("input"))
        return b"".join(self._parts), self._extra_bytes, self._ids

    def _head(self, names: tuple[str, ...]) -> None:
        for name in names:
            value = self._fields.get(name)
            if value:
                self._parts.append(msgspec.json.encode(value))

    def _messages(self, messages: object) -> None:
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict):
                role = message.get("role")
                self._message(role if isinstance(role, str) else "", message.get("content"))
                rest = {k: v for k, v in message.items() if k not in {"role", "content"} and v is not None}
                if rest:
                    self._parts.append(msgspec.json.encode(rest))

    def _message(self, role: str, content: object) -> None:
        if content is None:
            return
        self._parts.append(f"\x1e{role}\x1f".encode("utf-8", "replace"))
        if isinstance(content, str):
            self._parts.append(_utf8(content))
        elif isinstance(content, list):
            for part in content:
                text = part.get("text") if isinstance(part, dict) else part
                self._parts.append(_utf8(text) if isinstance(text, str) else msgspec.json.encode(part))

    def _input(self, value: object) -> None:
        items = value if isinstance(value, list) else ()
        if any(isinstance(item, dict) for item in items):
            self._messages(value)
        else:
            self._prompts(value)

    def _prompts(self, value: object) -> None:
        """One prompt or a batch of them, each text or token ids."""
        if isinstance(value, list) and value and isinstance(value[0], str | list):
            self._one_prompt(value[0])
            for other in value[1:]:
                self._extra_bytes += len(_utf8(other)) if isinstance(other, str) else _ids_size(other)
        else:
            self._one_prompt(value)

    def _one_prompt(self, value: object) -> None:
        if isinstance(value, str):
            self._parts.append(_utf8(value))
        elif isinstance(value, list):
            self._ids = True
            self._parts.append(
                b"".join((v & 0xFFFFFFFF).to_bytes(TOKEN_ID_BYTES, "little") for v in value if type(v) is int)
            )


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _ids_size(value: object) -> int:
    return len(value) * TOKEN_ID_BYTES if isinstance(value, list) else 0


__all__ = ["BlockSizes", "GatewayError", "ParsedBody", "TokenRatio", "block_hashes", "parse_body"]
