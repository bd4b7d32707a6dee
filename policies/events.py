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
class Granted:
    """Answer to :class:`Enqueue`: the request's turn has come."""


@dataclass(frozen=True, slots=True)
class Expired:
    """Answer to :class:`Enqueue`: served from now on, the request would miss what it is due."""


@dataclass(frozen=True, slots=True)
class Routed:
    """Answer to :class:`Route`. An empty choice means no replica may take the request now."""

    choice: RouteChoice


class RefusalKind(StrEnum):
    """Why a replica did not take a request it never started."""

    CONNECT = "connect"
    DRAINING = "draining"
    UNAVAILABLE = "unavailable"
    """Its server answered 503 at once."""


@dataclass(frozen=True, slots=True)
class ReplicaRefused:
    """The replica did not take the request: nothing was started, so it is safe to send it elsewhere."""

    kind: RefusalKind
    hedge: bool = False
    """It was the second of two attempts that run side by side; the first goes on."""


@dataclass(frozen=True, slots=True)
class ResponseStarted:
    """The replica's status line and headers are here; or once more, the status of the error its stream begins with."""

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
    ENGINE = "engine"
    """The engine reported an error inside its stream."""
    LOST = "lost"
    """The replica is known to be stuck or gone; the connection says nothing."""


@dataclass(frozen=True, slots=True)
class UpstreamFailed:
    """The connection to the replica broke after the request was sent."""

    kind: UpstreamFailure
    resumable: bool = False
    """What was sent to the client so far can be continued exactly by another replica."""
    hedge: bool = False
    """It was the second of two attempts that run side by side; the first goes on."""


@dataclass(frozen=True, slots=True)
class HedgeDue:
    """The time of :class:`ArmHedge` is over and there is no first byte."""


@dataclass(frozen=True, slots=True)
class HedgeWon:
    """The second of two attempts gave the first byte: the first one is aborted, and the second is the request's own."""


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The client closed its connection."""


@dataclass(frozen=True, slots=True)
class TimeUp:
    """The request took longer than any request may."""


@dataclass(frozen=True, slots=True)
class WaitedOut:
    """The time asked for with :class:`WaitForReplica` is over and no replica appeared."""


Event: TypeAlias = (
    Arrived
    | Granted
    | Expired
    | Routed
    | ReplicaRefused
    | ResponseStarted
    | FirstByte
    | ResponseEnded
    | UpstreamFailed
    | ClientGone
    | TimeUp
    | WaitedOut
    | HedgeDue
    | HedgeWon
)


# --- effects ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Enqueue:
    """The request waits in the gateway's queue; answer with :class:`Granted` or :class:`Expired` when a pump says."""


@dataclass(frozen=True, slots=True)
class Route:
    """Ask the router for a choice without ``exclude``, after a pause; answer with :class:`Routed`."""

    exclude: frozenset[ReplicaId] = frozenset()
    pause_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class WaitForReplica:
    """Wait until membership changes, then answer with a fresh :class:`Routed`; or :class:`WaitedOut` after ``ms``."""

    ms: float
    exclude: frozenset[ReplicaId] = frozenset()


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send the request to ``replica_id``. Load is already counted."""

    replica_id: ReplicaId
    resume: bool = False
    """Not the request itself but the continuation of what was sent to the client so far."""
    hedge: bool = False
    """Beside the attempt that runs."""


@dataclass(frozen=True, slots=True)
class ArmHedge:
    """Report :class:`HedgeDue` when there is no first byte ``ms`` after the :class:`Dispatch` that follows."""

    ms: float


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
    should_retry: bool | None = None
    """Said to clients' libraries in ``x-should-retry`` where it is not ``None``."""


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


Effect: TypeAlias = (
    Enqueue
    | Route
    | WaitForReplica
    | ArmHedge
    | Dispatch
    | Relay
    | SendError
    | SendStreamError
    | AbortUpstream
    | Finish
)
