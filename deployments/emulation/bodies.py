"""Request bodies of the emulated engine: field names, types and bounds of vLLM 0.29.0, unknown fields let through.

Only what decides an answer's status, shape or length is listed. Checks that need more than one field, the model or
the tokenizer are in ``checks.py``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

STOP_STRINGS_MAX = 4
INT64 = 2**63
Seed = Annotated[int, Field(ge=-INT64, le=INT64 - 1)]
Token = Annotated[int, Field(ge=0)]
Stop = str | Annotated[list[str], Field(max_length=STOP_STRINGS_MAX)] | None
Salt = Annotated[str, Field(min_length=1, max_length=1_024)]


class Body(BaseModel):
    """Any body: more fields than named are allowed."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class StreamOptions(Body):
    """What a stream carries beside text."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class JsonSchema(Body):
    """A named schema."""

    name: str
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(Body):
    """Form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Function(Body):
    """What a tool is called."""

    name: str


class Tool(Body):
    """A tool the model may call (this one never does)."""

    type: Literal["function"] = "function"
    function: Function


class Sampling(Body):
    """Fields of chat and completions."""

    model: str | None = None
    frequency_penalty: float | None = 0.0
    presence_penalty: float | None = 0.0
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    n: int | None = 1
    seed: Seed | None = None
    stop: Stop = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: list[int] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: Seed = 0
    request_id: str | None = None
    return_token_ids: bool | None = None
    cache_salt: Salt | None = None


class ChatBody(Sampling):
    """``/v1/chat/completions``."""

    messages: list[Any]
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    max_completion_tokens: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = "none"
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None


class CompletionBody(Sampling):
    """``/v1/completions``."""

    prompt: list[Token] | list[list[Token]] | str | list[str] | None = None
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool = False
    suffix: str | None = None


class TextConfig(Body):
    """Form of a response's text."""

    format: Body | None = None


class ResponsesBody(Body):
    """``/v1/responses``."""

    input: str | list[Any]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    background: bool | None = False
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    text: TextConfig | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: Any = "auto"
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] = "auto"
    truncation: Literal["auto", "disabled"] | None = "disabled"
    user: str | None = None
    seed: Seed | None = None
    stop: Stop = None
    ignore_eos: bool = False
    request_id: str | None = None
    cache_salt: Salt | None = None


class Block(Body):
    """Part of a message in Anthropic's shape."""

    type: Literal["text", "image", "tool_use", "tool_result", "tool_reference", "thinking", "redacted_thinking"]
    text: str | None = None


class Message(Body):
    """Message in Anthropic's shape."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class CountBody(Body):
    """``/v1/messages/count_tokens``."""

    model: str
    messages: list[Message]
    system: str | list[Block] | None = None


class MessagesBody(CountBody):
    """``/v1/messages``."""

    max_tokens: int
    stop_sequences: Annotated[list[str], Field(max_length=STOP_STRINGS_MAX)] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    cache_salt: Salt | None = None


class TokenizeBody(Body):
    """``/tokenize`` of a text."""

    model: str | None = None
    prompt: str
    return_token_strs: bool | None = False


class TokenizeChatBody(Body):
    """``/tokenize`` of a conversation."""

    model: str | None = None
    messages: list[Any]
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False


class DetokenizeBody(Body):
    """``/detokenize``."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, le=INT64 - 1)]]
