"""One request inside the emulated engine, and how an endpoint shows it: a :class:`Job` and a :class:`View` of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import msgspec

from deployments.emulation.answers import Answer
from deployments.emulation.errors import ApiError

FINGERPRINT = "emulated-0.29.0"
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Job:
    """A valid request and everything that will be said to it."""

    id: str
    created: int
    """Unix time in s."""
    model: str
    prompts: list[list[int]]
    answers: list[Answer]
    prompt_of: list[int]
    """Index of each answer's prompt."""
    prompt_text: str
    """All prompts as text, for the markers of scripted faults."""
    salt: str = ""
    stream: bool = False

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(a.tokens) for a in self.answers)

    def pairs(self) -> list[tuple[list[int], list[int]]]:
        """Prompt and answer tokens of each sequence."""
        return [(self.prompts[p], a.tokens) for p, a in zip(self.prompt_of, self.answers, strict=True)]


class View(ABC):
    """How one endpoint shows one job. Bytes are whole server-sent events."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def opening(self) -> list[bytes]:
        """Events sent before anything is computed."""
        return []

    def first(self) -> list[bytes]:
        """Events sent when the first token exists."""
        return []

    @abstractmethod
    def token(self, index: int, count: int, last: bool) -> bytes:
        """Event of the ``count``-th token (from 1) of choice ``index``."""

    @abstractmethod
    def closing(self, cached_tokens: int) -> list[bytes]:
        """Events after the last token."""

    @abstractmethod
    def broken(self, error: ApiError) -> list[bytes] | None:
        """Events of an error in the middle; ``None``: the connection is cut, as vLLM does there."""

    @abstractmethod
    def whole(self, cached_tokens: int) -> dict[str, Any]:
        """Body of an answer that is not streamed."""


def to_json(value: Any) -> bytes:
    """Compact JSON."""
    return msgspec.json.encode(value)


def data_event(value: Any) -> bytes:
    """One event without a name."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """One event named by its own ``type``."""
    return f"event: {value['type']}\ndata: ".encode() + msgspec.json.encode(value) + b"\n\n"


def logprob_of(token: int, rank: int = 0) -> float:
    """Made-up log probability of ``token``, lower with each ``rank``."""
    return -((token * 2_654_435_761) % 1_000) / 500 - rank
