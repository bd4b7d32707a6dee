"""The client's side of one request, and what may stop it from outside."""

from __future__ import annotations

from enum import Enum, auto
from typing import Protocol

from deployments.errors import GatewayError
from policies.events import UpstreamFailure


class Interrupt(Enum):
    """Why a driver is stopped from outside."""

    CLIENT_GONE = auto()
    SILENCE = auto()
    REPLICA_LOST = auto()
    TIME_UP = auto()


FAILURES = {Interrupt.SILENCE: UpstreamFailure.TIMEOUT, Interrupt.REPLICA_LOST: UpstreamFailure.LOST}


class Sink(Protocol):
    """The client's side of one request. Each coroutine waits while the client cannot take more."""

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """The response's head."""

    async def body(self, chunk: bytes) -> None:
        """The next bytes of its body."""

    async def end(self) -> None:
        """The body is complete."""

    async def error(self, error: GatewayError, headers: list[tuple[bytes, bytes]]) -> None:
        """The whole response is this error; nothing was sent before."""

    async def stream_error(self, error: GatewayError, is_stream: bool) -> None:
        """The response that was begun ends here, so that nobody takes it for complete."""


def own_headers(request_id: str, replica_id: str | None, output_tokens_max: int | None) -> list[tuple[bytes, bytes]]:
    """What the gateway itself tells of a request: its id, its replica, and the output limit of a brownout."""
    headers = [(b"x-request-id", request_id.encode())]
    if replica_id is not None:
        headers.append((b"x-tidegate-replica", replica_id.encode()))
    if output_tokens_max is not None:
        headers.append((b"x-tidegate-output-tokens-max", str(output_tokens_max).encode()))
    return headers
