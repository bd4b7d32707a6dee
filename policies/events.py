"""What can happen to a request (events) and what its owner asks of the driver (effects).

Two drivers feed the same :class:`policies.flow.RequestFlow`: asyncio in ``deployments/gateway.py`` and the simulator's
event heap. A driver does exactly what the effects say, in order, and reports what came of it as events.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from policies.types import Reason, ReplicaId, RouteChoice


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts an engine reported for one request. ``None``: it did not say."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrived:
    """The request is complete, parsed and valid."""


@dataclass(frozen=True, slots=True)
class Routed:
    """Answer to :class:`Route`. An empty choice means no replica may take the request now."""

    choice: RouteChoice


class RefusalKind(StrEnum):
    """Why a replica did not take a request it never started."""

    CONNECT = "connect"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class ReplicaRefused:
    """The replica did not take the request: nothing was started, so it is safe to send it elsewhere."""

    kind: RefusalKind


@dataclass(frozen=True, slots=True)
class ResponseStarted:
    """The replica's status line and headers are here."""

    status: int


@dataclass(frozen=True, slots=True)
class FirstByte:
    """The first body byte of a successful response is here: prefill is over."""


@dataclass(frozen=True, slots=True)
class ResponseEnded:
    """The replica's response is complete."""

    usage: Usage = Usage()
    stream_error: bool = False
    """The stream carried an error object of the engine."""


class UpstreamFailure(StrEnum):
    """How a response broke off."""

    RESET = "reset"
    TIMEOUT = "timeout"
    PROTOCOL = "protocol"


@dataclass(frozen=True, slots=True)
class UpstreamFailed:
    """The connection to the replica broke after the request was sent."""

    kind: UpstreamFailure


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The client closed its connection."""


@dataclass(frozen=True, slots=True)
class WaitedOut:
    """The time asked for with :class:`WaitForReplica` is over and no replica appeared."""


Event: TypeAlias = (
    Arrived
    | Routed
    | ReplicaRefused
    | ResponseStarted
    | FirstByte
    | ResponseEnded
    | UpstreamFailed
    | ClientGone
    | WaitedOut
)


# --- effects ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Route:
    """Ask the router for a choice without ``exclude``; answer with :class:`Routed`."""

    exclude: frozenset[ReplicaId] = frozenset()


@dataclass(frozen=True, slots=True)
class WaitForReplica:
    """Wait until membership changes, then answer with a fresh :class:`Routed`; or :class:`WaitedOut` after ``ms``."""

    ms: float
    exclude: frozenset[ReplicaId] = frozenset()


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send the request to ``replica_id``. Load is already counted."""

    replica_id: ReplicaId


@dataclass(frozen=True, slots=True)
class Relay:
    """Pass the replica's response on to the client as it is.

    The status line is held back until the first body byte (or the end of an empty body): engines send it long before
    prefill is over, and a break in between can then still be sent elsewhere or answered with a true status.
    """


@dataclass(frozen=True, slots=True)
class SendError:
    """Answer with an error in OpenAI's shape; nothing was sent before.

    Body: ``{"error": {"message", "type", "param", "code"}}``.
    """

    status: int
    type: str
    code: str
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class SendStreamError:
    """Something was sent already: one SSE ``data: {"error": ...}`` event, then end without ``[DONE]``.

    A response that is not a stream is cut off instead, so that no client takes it for complete.
    """

    type: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class AbortUpstream:
    """Close the connection to the replica, which makes the engine abort the work."""


class Outcome(StrEnum):
    """The three endings of a request, and refusal before any work."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Finish:
    """The request is over, once. ``reason.code`` is bounded: it labels metrics."""

    outcome: Outcome
    reason: Reason


Effect: TypeAlias = Route | WaitForReplica | Dispatch | Relay | SendError | SendStreamError | AbortUpstream | Finish
