"""The table of what the gateway answers: path, method, how a prompt lies in the body, which dialect errors speak.

One row per endpoint of the engine's native application that is relayed, and one per endpoint the gateway answers
itself. Whatever is not here is a 404; a path asked with another method is a 405 that names the allowed ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from deployments.keys import CONTROL_READ, CONTROL_WRITE, INFERENCE, METRICS


class PromptKind(StrEnum):
    """Where the prompt lies in a request body."""

    CHAT = "chat"
    """``messages`` (and ``tools``), as OpenAI's chat completions and Anthropic's messages have it."""
    PROMPT = "prompt"
    """``prompt``: text, token ids, or a list of either."""
    INPUT = "input"
    """``input``: text, token ids, a list of either, or response items; ``instructions`` before it."""
    TOKENS = "tokens"
    """``tokens``: ids to be turned into text."""
    PROMPT_OR_CHAT = "prompt_or_chat"


class Dialect(StrEnum):
    """Whose clients read an endpoint's errors."""

    OPENAI = "openai"
    RESPONSES = "responses"
    """OpenAI's, with named events in a stream."""
    ANTHROPIC = "anthropic"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint that is relayed to a replica by POST."""

    path: str
    prompt: PromptKind
    dialect: Dialect = Dialect.OPENAI
    generates: bool = True
    """Runs the model's decode loop; the others produce no output tokens."""
    streams: bool = True
    """``stream: true`` means something here."""
    model_optional: bool = False
    prompt_weight: float = 1.0
    """Load of a prompt token, in computed prompt tokens: tokenising is far cheaper than prefill."""
    output_limits: tuple[str, ...] = ("max_tokens",)
    """Fields that limit one answer's output tokens; the first that a body has counts."""
    end_mark: bytes = b""
    """In the last event of every complete stream; a stream that ends without it was cut."""


_TOKENISE_WEIGHT = 1 / 64

RELAYED: Mapping[str, Endpoint] = MappingProxyType(
    {
        e.path: e
        for e in (
            Endpoint(
                "/v1/chat/completions",
                PromptKind.CHAT,
                output_limits=("max_completion_tokens", "max_tokens"),
                end_mark=b"[DONE]",
            ),
            Endpoint("/v1/completions", PromptKind.PROMPT, end_mark=b"[DONE]"),
            Endpoint("/v1/responses", PromptKind.INPUT, Dialect.RESPONSES, output_limits=("max_output_tokens",)),
            Endpoint("/v1/messages", PromptKind.CHAT, Dialect.ANTHROPIC, end_mark=b"message_stop"),
            Endpoint(
                "/v1/messages/count_tokens",
                PromptKind.CHAT,
                Dialect.ANTHROPIC,
                generates=False,
                streams=False,
                prompt_weight=_TOKENISE_WEIGHT,
            ),
            Endpoint("/v1/embeddings", PromptKind.INPUT, generates=False, streams=False),
            Endpoint(
                "/tokenize",
                PromptKind.PROMPT_OR_CHAT,
                generates=False,
                streams=False,
                model_optional=True,
                prompt_weight=_TOKENISE_WEIGHT,
            ),
            Endpoint(
                "/detokenize",
                PromptKind.TOKENS,
                generates=False,
                streams=False,
                model_optional=True,
                prompt_weight=_TOKENISE_WEIGHT,
            ),
        )
    }
)
"""Endpoints of the engine's native application, by path."""

OWN: Mapping[str, str] = MappingProxyType(
    {
        "/health": "at least one replica is ready",
        "/metrics": "Prometheus text of this gateway",
        "/v1/models": "the models that may be asked for",
        "/openapi.json": "this interface, as OpenAPI describes it",
        "/control/metrics": "Prometheus text of the controller, whichever gateway is asked",
        "/control/state": "signals, conditions and plan of the controller",
        "/control/decisions": "the controller's ledger",
        "/control/conditions": "every named condition, with figures and the next step",
        "/control/overrides": "values and modes set by hand that are in force",
        "/control/shadow": "for every knob, whether decisions about it are acted on",
        "/control/tasks": "what became of the tasks this gateway counted",
        "/control/tenants": "usage, budget and limits by tenant, all gateways together",
        "/control/overview": "what an operator looks at each second: replicas in rows, traffic, cost, decisions",
        "/dashboard": "a page that shows the fleet, and where a prompt can be tried",
    }
)
"""Endpoints the gateway answers itself by GET."""

OWN_CHANGES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"/control/overrides": ("POST", "DELETE"), "/control/shadow": ("POST",)}
)
"""Other methods that endpoints of :data:`OWN` answer."""

OVERRIDE_PREFIX = "/control/overrides/"
"""``DELETE /control/overrides/<id>`` takes one override back."""

REQUEST_PREFIX = "/control/requests/"
"""``GET /control/requests/<id>`` tells what became of one request."""

PAGE = "/dashboard"
OPEN = frozenset({PAGE})
"""Answered by GET and HEAD without a key: what is there holds nothing of this system."""

TASK_PREFIX = "/v1/tasks/"
"""``GET /v1/tasks/<id>`` shows one task."""
TASK_OUTCOME_SUFFIX = "/outcome"
"""``POST /v1/tasks/<id>/outcome`` tells how it ended."""

MODEL_PREFIX = "/v1/models/"
"""``GET /v1/models/<name>`` describes one model."""


def allowed_methods(path: str) -> tuple[str, ...]:
    """Methods ``path`` answers, in the order of an ``Allow`` header; empty for an unknown path."""
    if path in RELAYED:
        return ("POST", "OPTIONS")
    if path in OWN_CHANGES:
        return ("GET", "HEAD", *OWN_CHANGES[path], "OPTIONS")
    if path.startswith(OVERRIDE_PREFIX):
        override_id = path.removeprefix(OVERRIDE_PREFIX)
        return ("DELETE", "OPTIONS") if override_id and "/" not in override_id else ()
    if path.startswith(REQUEST_PREFIX):
        request_id = path.removeprefix(REQUEST_PREFIX)
        return ("GET", "HEAD", "OPTIONS") if request_id and "/" not in request_id else ()
    if path in OWN or (path.startswith(MODEL_PREFIX) and len(path) > len(MODEL_PREFIX)):
        return ("GET", "HEAD", "OPTIONS")
    if path.startswith(TASK_PREFIX):
        match path.removeprefix(TASK_PREFIX).split("/"):
            case [task] if task:
                return ("GET", "HEAD", "OPTIONS")
            case [task, action] if task and "/" + action == TASK_OUTCOME_SUFFIX:
                return ("POST", "OPTIONS")
    return ()


def label_of(path: str) -> str:
    """``path`` as metrics and logs name it: whatever a client may choose in it is left out."""
    if path in RELAYED or path in OWN:
        return path
    for prefix in (TASK_PREFIX, OVERRIDE_PREFIX, REQUEST_PREFIX):
        if path.startswith(prefix) and allowed_methods(path):
            return prefix + "{id}"
    return "unknown"


_READS = frozenset({"GET", "HEAD", "OPTIONS"})
_ANY_KEY = frozenset({"/health", "/openapi.json", PAGE})


def scope_needed(path: str, method: str) -> str | None:
    """The scope a key must have for ``path``; ``None``: any valid key. What is not named here is part of the API."""
    if path in _ANY_KEY:
        return None
    if path in {"/metrics", "/control/metrics"}:
        return METRICS
    if path == "/control" or path.startswith("/control/"):
        return CONTROL_READ if method in _READS else CONTROL_WRITE
    return INFERENCE
